"""Environment variables that must be set before JAX first looks for devices.

Importing `course_lib.measure` sets them. One that is set already keeps its value, but for
`TF_CPP_MIN_LOG_LEVEL=1`, which JAX itself sets.
"""

import ctypes
import importlib.metadata
import os
import pathlib
import platform
import warnings


def version(package: str) -> str | None:
    """Returns the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _present(*patterns: str) -> bool:
    return any(True for pattern in patterns for _ in pathlib.Path("/dev").glob(pattern))


def prepare() -> None:
    """Lets compilers work without their devices, and quietly."""
    # Without an NVIDIA GPU, the CUDA plugin would fail for lack of cuDNN, which compiling does
    # not need. (dxg: a GPU seen from Windows' Linux.)
    if not _present("nvidiactl", "dxg"):
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Without a TPU, libtpu would look for its TPU machine, and complain.
    if version("libtpu") and not _present("accel*", "vfio/[0-9]*"):
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    # XLA would log when a program does not fit, which is often the lesson here.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # JAX's persistent compilation cache stores virtual programs, but cannot load them.
    warnings.filterwarnings(
        "ignore",
        "Error reading persistent compilation cache entry .* constructed with a Client",
    )


def keep_memory() -> None:
    """Keeps the memory that JAX frees on a CPU, so that the next step uses it again.

    By default glibc returns large arrays to Linux, and asks for new pages in each step: a third
    of the processor time of a small model's step. Without glibc this does nothing.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no array gets pages of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing is returned
        mallopt(-8, 1)  # M_ARENA_MAX: all threads share the free memory
