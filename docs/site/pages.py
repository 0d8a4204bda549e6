"""Writes the sources of the site: README as its start page, the notebooks with a text for each
picture, the pages of docs/, and the library's reference. Checks the pages that are built.

usage: python docs/site/pages.py write | check FOLDER

Reads files and nothing else: no notebook runs, and no module of the course is imported.
"""

import ast
import json
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
DOCS = """your_model training teaching cluster/README cluster/slurm cluster/kubernetes
    cluster/ssh gpu xla_flags versions benchmarks backtest design"""
PAGES = [f"docs/{name}" for name in DOCS.split()]
PAGES += ["CONTRIBUTING", "CHANGELOG", "course_lib/text/corpus/SOURCE"]
FILES = ["LICENSE", "course_lib/lessons/bug_zoo.py"]  # that a page links to
SHORT = {"docs/your_model": "It does not fit, is slow, or is NaN"}  # in the list of pages
INSIDE = {"lessons", "show"}  # notebooks start their programs, not a person
ADDRESS = os.environ.get("GITHUB_REPOSITORY", "OWNER/REPO")


def read(name: str) -> str:
    """Returns a file's text, with the project's address if GitHub builds the site."""
    return (ROOT / name).read_text().replace("OWNER/REPO", ADDRESS)


def contents() -> dict[str, list[str]]:
    """Returns the pages under each heading of the site, the parts of docs/design.md first."""
    stems = {path.name[:2]: path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    parts = re.findall(r"^\| ([IV]+ [^|]+?) \| ([^|]+) \|", read("docs/design.md"), re.M)
    lists = {
        part: [f"notebooks/{stems[number]}" for number in re.findall(r"\b\d\d\b", names)]
        for part, names in parts
    }
    return lists | {"Look up": ["docs/site/glossary", "reference/index"], "More": PAGES}


def start() -> str:
    """Returns the start page: README's text, and the contents for the menu."""
    text = read("README.md")
    for heading, pages in contents().items():
        listed = "\n".join(f"{SHORT[x]} <{x}>" if x in SHORT else x for x in pages)
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n{listed}\n```\n"
    return text


def plain(markdown: str) -> str:
    """Returns a paragraph of Markdown as one line of text."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", markdown)
    return " ".join(re.sub(r"[*`$>#\\]|^\W+", "", text).split())


def notebook(name: str) -> str:
    """Returns a notebook with a text for each picture, and with links that lead to pages."""
    book = json.loads(read(f"notebooks/{name}.ipynb"))
    book["metadata"]["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    heading = sentence = ""
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = re.sub(r"^(#.*)", r"\1\n", re.sub(r"<[^>]+>", "", source), flags=re.M)
            for block in re.split(r"\n\s*\n", text):
                if block.startswith("#"):
                    heading, sentence = plain(block), ""
                elif long := [x for x in plain(block).split(". ") if len(x) > 20]:
                    sentence = long[0]
            source = re.sub(rf"https://github\.com/{ADDRESS}/blob/main/", "../", source)
            source = re.sub(r"!\[(Open In Colab)\]\(\S+\)\]", r"\1]", source)
            for file, kinds in cell.pop("attachments", {}).items():
                data = "data:image/png;base64," + "".join(kinds["image/png"].split())
                source = source.replace(f"attachment:{file}", data)
            cell["source"] = source
            continue
        titles = [re.sub(r"\{.*?\}", "…", x) for x in re.findall(r'title=f?"([^"]+)"', source)]
        about = next((x for x in titles[::-1] if len(x.replace("…", "")) > 8), sentence)
        cell["metadata"]["mystnb"] = {"image": {"alt": f"{heading}: {about}".strip(": ")}}
        if source.startswith("# @title"):  # Colab folds the cell
            cell["metadata"]["tags"] = ["hide-input"]
    return json.dumps(book)


def named() -> set[tuple[str, str]]:
    """Returns each `module.name` of the notebooks, README and docs/, as a pair, and where the
    name is defined if that module imports it.
    """
    texts = [read(f"{page}.md") for page in ["README", *PAGES]]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        texts += ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    text = "\n".join(texts)
    pairs = set(re.findall(r"(?=\b(\w+)\.(\w+))", text))
    pairs |= set(imported(text))
    for path in (ROOT / "course_lib").rglob("*.py"):
        pairs |= {pair for pair in imported(path.read_text()) if (path.stem, pair[1]) in pairs}
    return pairs


def imported(text: str) -> list[tuple[str, str]]:
    """Returns each name that a program imports from a module of the course, as a pair."""
    found = re.findall(r"from course_lib\S*?(\w+) import (\([^)]*\)|.*)", text)
    return [(module, name) for module, names in found for name in re.findall(r"\w+", names)]


def described(node: ast.AST) -> str:
    """Returns a docstring as Markdown: the entries of `Args:` become a list."""

    def section(match: re.Match) -> str:
        entries = re.sub(r"^(\S[^:\n]*): ", r"- `\1`: ", textwrap.dedent(match[2]), flags=re.M)
        return f"\n**{match[1]}**\n\n{entries}\n"

    text = re.sub(r"^\+ ", r"\+ ", ast.get_docstring(node) or "", flags=re.M)
    text = re.sub(r"^python -m ", r"    python -m ", text, flags=re.M)
    text = re.sub(r"^(?! {4})(.*[\s(])(https://[^\s`)>]+[\w/])", r"\1<\2>", text, flags=re.M)
    return re.sub(r"^(Args|Attributes|Raises):\n((?:  .*\n?|\n)+)", section, text, flags=re.M)


def entry(node: ast.FunctionDef | ast.ClassDef, module: str, lines: list[str]) -> str:
    """Returns the directive that describes a function, or a class with fields and methods."""
    if isinstance(node, ast.FunctionDef):
        arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        first = f"::::{{py:function}} {node.name}({arguments}){returns}\n:module: {module}"
        return f"{first}\n\n{described(node)}\n::::\n"
    body = [f":::::{{py:class}} {node.name}\n:module: {module}\n", described(node)]
    if fields := [child for child in node.body if isinstance(child, ast.AnnAssign)]:
        source = lines[node.body[0].end_lineno : fields[-1].end_lineno]
        body += ["```python", textwrap.dedent("\n".join(source)).strip("\n"), "```"]
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name[0] != "_" and described(child):
            body.append(entry(child, module, lines).replace("py:function", "py:method"))
    return "\n".join([*body, ":::::\n"])


def reference() -> dict[str, str]:
    """Returns a page for each part: what a notebook, a page or the command line names."""
    names, pages = named(), {}
    for path in sorted((ROOT / "course_lib").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        module = module.removesuffix(".__init__").removesuffix(".__main__")
        tree, above = ast.parse(path.read_text()), module.split(".")[1:]
        public = [
            entry(node, module, path.read_text().splitlines())
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            if described(node) and any((one, node.name) in names for one in above)
        ]
        command = '__name__ == "__main__"' in path.read_text() and not set(above) & INSIDE
        if public or command:
            heading = f"python -m {module}" if command else ".".join(above)
            page = pages.setdefault("commands" if command else above[0], [])
            page.append("\n\n".join([f"## {heading}", described(tree), *public]))
    listed = "\n".join(sorted(pages))
    about = "# The library\n\nEach function that a notebook, a page or a command names."
    written = {page: "\n\n".join([f"# {page}", *texts]) for page, texts in pages.items()}
    return written | {"index": f"{about}\n\n```{{toctree}}\n{listed}\n```\n"}


def write(folder: Path) -> None:
    """Writes all sources into a new folder."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    sources = {file: read(file) for file in FILES} | {"index.md": start()}
    for page in PAGES:
        sources[f"{page}.md"] = re.sub(r"\[([^]]+)\]\(results/\w+\)", r"\1", read(f"{page}.md"))
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        sources[f"notebooks/{path.name}"] = notebook(path.stem)
    sources |= {f"reference/{page}.md": text for page, text in reference().items()}
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def check(folder: Path) -> None:
    """Refuses pages with a picture without a text, or with a link inside that leads nowhere."""
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
        if "::::{" in text:
            found.append(f"{path.name}: shows a directive as text")
        for picture in re.findall(r"<img\b[^>]*>", text):
            if not re.search(r'\balt="\s*[^"\s]', picture):
                found.append(f"{path.name}: without alt: {picture[:99]}")
        for link in re.findall(r'\b(?:href|src)="(?!\w+:|//)([^"]+)"', text):
            file, _, place = unquote(link).partition("#")
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.is_file() or place not in names.get(target, {place}):
                found.append(f"{path.name}: leads nowhere: {link[:99]}")
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
