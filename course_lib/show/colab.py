"""Prepares a Colab runtime for the notebooks. Their first cell runs it before JAX starts:

    python -m course_lib.show.colab

Run again, it installs what is still missing. Colab's packages keep their versions: pip gets
them as constraints, except those that are too old for course_lib. A CPU runtime gets another
JAX and Flax, which can compile for GPUs that are not there and run with Colab's NumPy. On a GPU
or TPU runtime Colab's own JAX drives the chip, and stays.
"""

import glob
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable

# Packages of the extras that notebooks need, beside the dependencies of course_lib itself.
EXTRAS = ["tensorboard-plugin-profile>=2.24,<3", "grain"]
# The profiler's plugin needs newer versions of these than Colab's.
RAISED = ("absl-py", "urllib3")
# JAX with the compiler for NVIDIA's GPUs and without CUDA's libraries, and a Flax for it.
VIRTUAL_GPUS = ["jax[cuda13-local]==0.10.2", "nvidia-cuda-nvcc>=13,<14", "nvidia-nvvm>=13,<14"]
VIRTUAL_GPUS += ["flax>=0.12.8,<1"]
REPLACED = ("jax", "jaxlib", "flax")
# Imported after the installation, to see that they work beside Colab's packages.
MODULES = ("jax", "flax", "optax", "ml_collections", "jaxtyping", "grain", "orbax.checkpoint")


def runtime() -> str:
    """Returns "gpu", "tpu" or "cpu": the chip that this machine shows."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return "gpu"
    tpu = os.environ.get("COLAB_TPU_ADDR") or glob.glob("/dev/accel*")
    return "tpu" if tpu or glob.glob("/dev/vfio/[0-9]*") else "cpu"


def requirements(kind: str) -> list[str]:
    """Returns what pip installs on a runtime, by its kind."""
    from packaging.requirements import Requirement  # Colab has it, an empty environment not

    own = importlib.metadata.requires("course_lib") or []  # installed with --no-deps
    own = [line for line in own if "extra ==" not in line]
    own = [line for line in own if Requirement(line).name not in REPLACED]
    return own + EXTRAS + (VIRTUAL_GPUS if kind == "cpu" else [])


def constraints(kind: str, installed: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line of pip's constraints file per installed package that stays: its name and
    version.
    """
    from packaging.requirements import Requirement

    free = {*RAISED, *(_key(Requirement(line).name) for line in missing(kind))}
    free |= set(REPLACED if kind == "cpu" else ())
    kept = {(n, v) for n, v in installed if _key(n) not in free}
    return sorted(f"{name}=={version}" for name, version in kept)


def _key(name: str) -> str:
    return name.lower().replace("_", "-")


def missing(kind: str) -> list[str]:
    """Returns the requirements that the installed packages do not meet."""
    from packaging.requirements import Requirement

    def meets(requirement: Requirement) -> bool:
        try:
            return requirement.specifier.contains(importlib.metadata.version(requirement.name))
        except importlib.metadata.PackageNotFoundError:
            return False

    return [line for line in requirements(kind) if not meets(Requirement(line))]


def install(kind: str) -> int:
    """Installs what a runtime needs, and returns pip's exit status."""
    installed = [(d.name, d.version) for d in importlib.metadata.distributions() if d.name]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints(kind, installed)))
        file.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", file.name]
        return subprocess.call([*pip, *requirements(kind)])


def main() -> int:
    """Installs what is missing and imports it. Returns 0, or 1 after a sentence that says what
    went wrong.
    """
    kind, wrong = runtime(), ""
    if missing(kind):
        status = install(kind)
        importlib.invalidate_caches()
        if lacks := missing(kind):
            wrong = f"pip ended with status {status}, and {', '.join(lacks)} cannot be had"
    try:
        for module in MODULES if not wrong else ():
            importlib.import_module(module)
    except Exception as error:  # a package that is there may still be broken
        wrong = f"the module {module} cannot be imported ({error!r})"
    if wrong:
        cure = "Run this cell again; if that does not help, Runtime > Disconnect and delete"
        print(f"The set-up is not complete: {wrong}. {cure} runtime", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
