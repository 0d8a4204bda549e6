"""Says whether this Python can run the course on a GPU as it is, and if not, what is missing.

usage: python tools/check_gpu.py

`make gpu` installs nothing: the machine's own JAX, made for its GPU, is what is to be tested,
and there may be no internet.
"""

import importlib.util
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_NEEDED = {"check-jsonschema", "ruff", "mypy", "packaging"}


def missing() -> list[str]:
    """Returns the requirements of the course that are not installed here, or too old."""
    from packaging.requirements import Requirement  # not before it is known to be here

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = map(Requirement, project["dependencies"] + extras["test"] + ["ipykernel"])
    lacking = []
    for requirement in wanted:
        if requirement.name in NOT_NEEDED:
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{requirement} (not installed)")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lacking.append(f"{requirement} (found: {found})")
    return lacking


def main() -> None:
    """Prints what will be tested, or exits with what to do."""
    if importlib.util.find_spec("jax") is None:
        sys.exit(
            f"{sys.executable} has no JAX. With internet: pip install -e"
            " '.[gpu,notebooks,test]'"
        )
    if importlib.util.find_spec("packaging") is None:
        sys.exit(f"{sys.executable} cannot read what the course needs: pip install packaging")
    if lacking := missing():
        sys.exit(
            "Missing here (pip install --no-deps leaves JAX alone):\n  " + "\n  ".join(lacking)
        )
    import jax

    if jax.default_backend() != "gpu":
        sys.exit(f"jax {jax.__version__} sees no GPU here, only {jax.devices()}")
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
