"""Checks that this Python can run the course on a GPU, or says what is missing.

usage: python tools/check_gpu.py

`make gpu` installs nothing: it tests the machine's own JAX, and there may be no internet.
"""

import importlib.util
import sys
from importlib import metadata

NOT_NEEDED = {"jupyterlab", "check-jsonschema", "ruff", "mypy", "packaging"}


def missing() -> list[str]:
    """Returns the course's requirements that are not installed here, or are too old."""
    import sync_environment  # `main` checks first that `packaging` is installed
    from packaging.requirements import Requirement

    wanted = map(Requirement, sync_environment.needed("notebooks", "test"))
    lacking = []
    for requirement in wanted:
        if requirement.name in NOT_NEEDED:
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.append(f"{requirement} (not installed)")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            lacking.append(f"{requirement} (installed: {installed})")
    return lacking


def main() -> None:
    """Prints JAX's version and its GPU, or exits with a message that says what to do."""
    if importlib.util.find_spec("jax") is None:
        sys.exit(
            f"{sys.executable} has no JAX. With internet: pip install -e"
            " '.[gpu,notebooks,test]'"
        )
    if importlib.util.find_spec("packaging") is None:
        sys.exit(f"{sys.executable} cannot read requirements: pip install packaging")
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
