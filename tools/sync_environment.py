"""Writes environment.yml, for conda users, from pyproject.toml and the exact versions of
requirements/reference.txt.

usage: python tools/sync_environment.py

Conda installs Python and pip, and pip the rest, so conda users get the same versions. The file
lists the versions, since micromamba cannot follow a `-r requirements.txt`
(https://github.com/mamba-org/mamba/issues/1894).
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Written by tools/sync_environment.py from pyproject.toml and requirements/reference.txt.\
 Do not edit.
# From the project's folder: conda env create -f environment.yml
name: course-lib
channels: [conda-forge, nodefaults]
dependencies:
  - python=3.13
  - pip
  - pip:
"""


def pins(path: Path) -> dict[str, Requirement]:
    """Returns the exact versions of a requirements file by canonical name."""
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    return {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}


def needed(*extras: str) -> list[str]:
    """Returns what pyproject.toml asks for with extras, and with those that an extra names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines, wanted = list(project["dependencies"]), list(extras)
    for extra in wanted:
        for line in project["optional-dependencies"][extra]:
            inner = Requirement(line)
            own = inner.name == project["name"]
            wanted += sorted(inner.extras) if own else []
            lines += [] if own else [line]
    return lines


def direct() -> list[Requirement]:
    """Returns the requirements of `.venv` in pyproject.toml, once each."""
    wanted = map(Requirement, needed("notebooks", "test", "virtual"))
    return list({canonicalize_name(r.name) + str(sorted(r.extras)): r for r in wanted}.values())


def environment() -> str:
    """Returns the text of environment.yml."""
    exact = pins(ROOT / "requirements" / "reference.txt")
    lines = []
    for wanted in direct():
        pin = exact[canonicalize_name(wanted.name)]
        extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
        line = f"{pin.name}{extras}{pin.specifier}"
        if wanted.marker:
            line = '"' + f"{line} ; {wanted.marker}".replace('"', "'") + '"'
        lines.append(f"      - {line}\n")
    return HEADER + "".join(lines) + "      - -e .\n"


if __name__ == "__main__":
    (ROOT / "environment.yml").write_text(environment())
