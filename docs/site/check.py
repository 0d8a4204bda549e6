"""Refuses a built site with a picture without a text, or with a link inside that leads nowhere.

usage: python docs/site/check.py FOLDER
"""

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


def errors(folder: Path) -> list[str]:
    """Returns a line for each picture without a text and each dead link of a folder's pages."""
    pages = {
        path.resolve(): re.sub(
            r"<script\b(?! src).*?</script>", "", path.read_text(), flags=re.S
        )
        for path in sorted(folder.rglob("*.html"))
    }
    names = {
        path: {"", *re.findall(r'\b(?:id|name)="([^"]*)"', x)} for path, x in pages.items()
    }
    found = []
    for path, text in pages.items():
        for picture in re.findall(r"<img\b[^>]*>", text):
            if not re.search(r'\balt="\s*[^"\s]', picture):
                found.append(f"{path.name}: without alt: {picture[:99]}")
        for link in re.findall(r'\b(?:href|src)="([^"]+)"', text):
            url = urlsplit(link)
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            place = unquote(url.fragment)
            if not (url.scheme or url.netloc) and (
                not target.is_file() or (target in names and place not in names[target])
            ):
                found.append(f"{path.name}: leads nowhere: {link[:99]}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(errors(Path(sys.argv[1]))) or None)
