"""Resolves the ranges of pyproject.toml into the exact versions of requirements/.

usage: python tools/pin_versions.py         (needs uv on the PATH: pip install uv)

  reference.txt  newest versions for Python 3.12 to 3.14: the stored outputs come from these
                 (array-record, which Grain needs, has no wheel for a later Python)
  py311.txt      newest versions for Python 3.11, which has no newer JAX than 0.10.2
  colab.txt      Colab's versions (colab-published.txt), on Python 3.13; packages that it lacks
                 are at the lower bounds of pyproject.toml
  site.txt       newest versions of what `make site` needs

The files are for Linux on x86-64 or arm64, and for macOS on arm64. They name no index.
"""

import subprocess
import tempfile
import tomllib
from pathlib import Path

import sync_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by tools/pin_versions.py from pyproject.toml: {what}. Do not edit.\n"
# The set-up cell installs xprof in Colab, which needs newer versions of these than Colab's.
RAISED_ON_COLAB = {"absl-py", "urllib3"}
# The extras of the library itself. Their lower bounds are what Colab ships.
LIBRARY = ("pictures", "profile", "training")
PLATFORMS = (
    {"sys_platform": "linux", "platform_machine": "x86_64"},
    {"sys_platform": "linux", "platform_machine": "aarch64"},
    {"sys_platform": "darwin", "platform_machine": "arm64"},
)


def marker(platform: dict[str, str]) -> str:
    """Returns the platform as an environment marker."""
    return " and ".join(f"{name} == '{value}'" for name, value in platform.items())


def resolve(requirements: list[str], first: str, end: str, constraints: list[str]) -> str:
    """Returns exact versions of everything that the requirements need, as the lines of a
    requirements file for Python `first` up to, and without, `end`.
    """
    python = f"python_full_version >= '{first}' and python_full_version < '{end}'"
    environments = [f"{marker(platform)} and {python}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "pyproject.toml"
        wanted.write_text(
            f'[project]\nname = "wanted"\nversion = "0"\nrequires-python = ">={first}"\n'
            f"dependencies = {requirements!r}\n[tool.uv]\nenvironments = {environments!r}\n"
            f"constraint-dependencies = {constraints!r}\n"
        )
        command = ["uv", "pip", "compile", str(wanted), "--python-version", first]
        command += "--universal --quiet --no-header --no-annotate".split()
        command += ["--no-emit-index-url", "--no-emit-find-links"]
        lines = subprocess.check_output(command, text=True, cwd=folder).splitlines()
    return "".join(pin(Requirement(line), f"{first}.0") for line in lines)


def pin(requirement: Requirement, python: str) -> str:
    """Returns the line `name==version`, with a marker if only some of our platforms need it;
    nothing if none does.
    """
    version = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    wanted = requirement.marker
    needing = [p for p in PLATFORMS if wanted is None or wanted.evaluate(p | version)]
    if not needing:
        return ""
    where = "" if needing == list(PLATFORMS) else f" ; {' or '.join(map(marker, needing))}"
    return f"{requirement.name}{requirement.specifier}{where}\n"


def lower_bounds(requirements: list[str]) -> list[str]:
    """Returns `name==x` for each `name>=x`."""
    return [
        f"{requirement.name}=={bound.version}"
        for requirement in map(Requirement, requirements)
        for bound in requirement.specifier
        if bound.operator == ">="
    ]


def published_by_colab() -> list[str]:
    """Returns the version of each package that Colab ships, and keeps beside the course."""
    shipped = sync_environment.pins(ROOT / "requirements" / "colab-published.txt")
    return [str(pin) for name, pin in shipped.items() if name not in RAISED_ON_COLAB]


def main() -> None:
    """Writes the four files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    site = project["optional-dependencies"]["site"]
    needed = sync_environment.needed
    newest = needed("notebooks", "test", "virtual")
    colab = needed("notebooks", "test") + lower_bounds(needed(*LIBRARY))
    published = published_by_colab()
    for name, title, *wanted in (
        ("reference", "newest versions for Python 3.12 to 3.14", newest, "3.12", "3.15", []),
        ("py311", "newest versions for Python 3.11", newest, "3.11", "3.12", []),
        ("colab", "what Colab ships, on Python 3.13", colab, "3.13", "3.14", published),
        ("site", "what `make site` needs", site, "3.12", "3.15", []),
    ):
        text = HEADER.format(what=title) + resolve(*wanted)
        (ROOT / "requirements" / f"{name}.txt").write_text(text)
        print(f"requirements/{name}.txt")


if __name__ == "__main__":
    main()
