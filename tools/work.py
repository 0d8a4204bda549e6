"""Copies the notebooks into work/, the learner's own folder, which git ignores.

usage: python tools/work.py        copies those that are not there, and names those that changed
       python tools/work.py 03     takes notebook 03 anew, and keeps yours beside it

So a learner's notebooks never stand in the way of a new version of the course.
"""

import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(number: str = "", root: Path = ROOT) -> None:
    """Copies notebooks; prints what a learner should know."""
    work, taken = root / "work", root / "work" / ".taken.json"
    originals = sorted((root / "notebooks").glob("*.ipynb"))
    wanted = [path for path in originals if number and path.name.startswith(number)]
    if number and len(wanted) != 1:
        sys.exit(f"NB={number!r} must begin the name of one notebook, as in NB=03")
    work.mkdir(exist_ok=True)
    known = json.loads(taken.read_text()) if taken.exists() else {}
    for original in originals:
        copy, now = work / original.name, _digest(original)
        if original in wanted and copy.exists():
            old = copy.with_stem(f"{copy.stem}_{time.strftime('%Y-%m-%d_%H%M%S')}")
            copy.rename(old)
            print(f"Yours is now work/{old.name}")
        untouched = copy.exists() and _digest(copy) == known.get(copy.name)
        if untouched or not copy.exists():
            shutil.copyfile(original, copy)
            known[copy.name] = now
        elif known.get(copy.name) != now:
            anew = f"make work NB={copy.name[:2]}"
            print(f"work/{copy.name} is yours. To get the newer one beside it: {anew}")
    taken.write_text(json.dumps(known))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main("".join(sys.argv[1:2]))
