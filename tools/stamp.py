"""Stamps the project's address into the README's links and into each notebook's badge and
set-up cell.

usage: python tools/stamp.py [owner/name]     with a name: makes it the project's address first

The address is read from `[project.urls]` of pyproject.toml.
"""

import re
import sys
import tomllib
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
BADGE = (
    "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{repo}/blob/main/notebooks/{name})"
)
SETUP = """\
# On Colab: install the library and what it needs. Elsewhere: check versions.
import importlib.util
import subprocess
import sys

if "google.colab" in sys.modules:
    if importlib.util.find_spec("course_lib") is None:
        %pip install -q --no-deps "course_lib @ git+https://github.com/{repo}"
    install = [sys.executable, "-m", "course_lib.show.colab"]
    done = subprocess.run(install, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr  # run the cell again: it installs what is missing

from course_lib.show import notebook
{first}
notebook.setup()"""
# `setup` starts JAX. These run before it: from notebook 7 on, or as `BEFORE_SETUP` says.
FIRST_OF_PART_TWO = "07"
MANY_DEVICES = """\
from course_lib.many_devices import meshes

meshes.simulate(8)  # this CPU shows as eight devices, if it is told before JAX starts"""
PROFILES = """\
from course_lib import xla_flags

xla_flags.name_kernels()  # a GPU's profile knows its kernels, if set before JAX starts"""
ONE_DEVICE = dict.fromkeys(("20_your_own_model.ipynb", "23_memory_profiling.ipynb"), "")
BEFORE_SETUP = {"06_profiling.ipynb": PROFILES} | ONE_DEVICE
IS_BADGE = re.compile(r"^\[!\[Open In Colab\].*$", re.M)


def repository(root: Path = ROOT) -> str:
    """Returns the project's `owner/name`."""
    url = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    return url.removeprefix("https://github.com/")


def notebook_texts(name: str, repo: str) -> tuple[str, str]:
    """Returns the badge and the set-up cell of a notebook, by its file name."""
    first = BEFORE_SETUP.get(name, MANY_DEVICES if name >= FIRST_OF_PART_TWO else "")
    return BADGE.format(repo=repo, name=name), SETUP.format(repo=repo, first=first)


def stamp_notebook(nb: nbformat.NotebookNode, name: str, repo: str) -> None:
    """Puts the badge under the title, and the set-up cell first among the code cells."""
    title = nb.cells[0]
    if title.cell_type != "markdown" or not title.source.startswith("# "):
        raise ValueError(f"{name} must begin with a Markdown cell that holds its title")
    badge, setup = notebook_texts(name, repo)
    if IS_BADGE.search(title.source):
        title.source = IS_BADGE.sub(badge, title.source)
    else:
        first, _, rest = title.source.partition("\n")
        title.source = f"{first}\n\n{badge}\n{rest}".rstrip()
    cell = next((cell for cell in nb.cells if cell.cell_type == "code"), None)
    if cell is None or "notebook.setup()" not in cell.source:
        cell = nbformat.v4.new_code_cell(id="setup")
        nb.cells.insert(1, cell)
    cell.source = setup
    cell.metadata.tags = ["nbval-ignore-output"]


def readme_with(text: str, old: str, new: str) -> str:
    """Returns the README with the project's old address replaced by a new one."""
    return re.sub(
        rf"(?<=github\.com/){re.escape(old)}(?![\w-])|(?<=/github/){re.escape(old)}(?![\w-])",
        new,
        text,
    )


def main(new: str | None = None) -> None:
    """Stamps all notebooks, with a new address also pyproject.toml and the README."""
    old = repository()
    if new is not None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", new):
            sys.exit(f"REPO={new!r} must be owner/name, as it stands after github.com/")
        toml, readme = ROOT / "pyproject.toml", ROOT / "README.md"
        address = '"https://github.com/{}"'
        toml.write_text(toml.read_text().replace(address.format(old), address.format(new)))
        readme.write_text(readme_with(readme.read_text(), old, new))
    stamped = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        before = path.read_text()
        nb = nbformat.reads(before, 4)
        stamp_notebook(nb, path.name, new or old)
        after = nbformat.writes(nb) + "\n"
        if after != before:
            path.write_text(after)
            stamped.append(path.name)
    print(f"{new or old} stamped into: {', '.join(stamped) or 'no notebook, all have it'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
