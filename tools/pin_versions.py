"""Resolves the ranges of pyproject.toml into the exact versions of requirements/.

usage: python tools/pin_versions.py         (needs uv on the PATH: pip install uv)

  py311.txt   newest versions for Python 3.11: the reference, notebooks hold what these print
  py312.txt   newest versions for Python 3.12 to 3.14 (array-record, which Grain needs, has no
              wheel for a later one)
  oldest.txt  the lower bounds of pyproject.toml, on Python 3.11

`.venv` is made from these, whatever machine the learner has: Linux on x86-64 or arm64, or macOS
on arm64. They name no index.
"""

import subprocess
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Written by tools/pin_versions.py from pyproject.toml: {what}. Do not edit.\n"
# matplotlib 3.10.0 calls what pyparsing 3.3 deprecates, and the tests take warnings for errors.
OLDEST_ALSO = ["pyparsing<3.3"]
PLATFORMS = (
    {"sys_platform": "linux", "platform_machine": "x86_64"},
    {"sys_platform": "linux", "platform_machine": "aarch64"},
    {"sys_platform": "darwin", "platform_machine": "arm64"},
)


def marker(platform: dict[str, str]) -> str:
    """Returns the platform as an environment marker."""
    return " and ".join(f"{name} == '{value}'" for name, value in platform.items())


def resolve(requirements: list[str], python: str, python_marker: str) -> str:
    """Returns exact versions of everything that the requirements need, as the lines of a
    requirements file.
    """
    environments = [f"{marker(platform)} and {python_marker}" for platform in PLATFORMS]
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "pyproject.toml"
        wanted.write_text(
            f'[project]\nname = "wanted"\nversion = "0"\nrequires-python = ">={python}"\n'
            f"dependencies = {requirements!r}\n[tool.uv]\nenvironments = {environments!r}\n"
        )
        command = [
            "uv",
            "pip",
            "compile",
            str(wanted),
            "--universal",
            "--python-version",
            python,
            "--quiet",
        ]
        command += [
            "--no-header",
            "--no-annotate",
            "--no-emit-index-url",
            "--no-emit-find-links",
        ]
        lines = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder
        ).stdout.splitlines()
    return "".join(pin(Requirement(line), f"{python}.0") for line in lines)


def pin(requirement: Requirement, python: str) -> str:
    """Returns the line `name==version`, with a marker if only some of our platforms need it;
    nothing if none does.
    """
    version = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    needing = [
        p
        for p in PLATFORMS
        if requirement.marker is None or requirement.marker.evaluate(p | version)
    ]
    if not needing:
        return ""
    where = "" if needing == list(PLATFORMS) else f" ; {' or '.join(map(marker, needing))}"
    return f"{requirement.name}{requirement.specifier}{where}\n"


def lower_bounds(requirements: list[str]) -> list[str]:
    """Returns `name==x` for each `name>=x`."""
    bounds = []
    for requirement in map(Requirement, requirements):
        bounds += [
            f"{requirement.name}=={s.version}"
            for s in requirement.specifier
            if s.operator == ">="
        ]
    return bounds


def main() -> None:
    """Writes the three files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + extras["notebooks"] + extras["test"]
    newest = needed + extras["virtual"]
    sets = {
        "py311.txt": (
            "newest versions for Python 3.11",
            newest,
            "3.11",
            "python_full_version < '3.12'",
        ),
        "py312.txt": (
            "newest versions for Python 3.12 to 3.14",
            newest,
            "3.12",
            "python_full_version >= '3.12' and python_full_version < '3.15'",
        ),
        "oldest.txt": (
            "its lower bounds, on Python 3.11",
            needed + lower_bounds(project["dependencies"]) + OLDEST_ALSO,
            "3.11",
            "python_full_version < '3.12'",
        ),
    }
    for name, (what, requirements, python, python_marker) in sets.items():
        pins = resolve(requirements, python, python_marker)
        (ROOT / "requirements" / name).write_text(HEADER.format(what=what) + pins)
        print(f"requirements/{name}")


if __name__ == "__main__":
    main()
