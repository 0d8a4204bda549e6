"""The two compiler flags that the course sets by itself: one where JAX is older than 0.8.2, and
one to record profiles on a GPU.

XLA reads the environment variable `XLA_FLAGS` once, when JAX first looks for devices, and ends
the process at a flag that it does not know. Notebook 06 gives a flag to one compilation alone,
`lowered.compile(compiler_options={"xla_gpu_...": 0})`, where an unknown one is an error.
"""

import importlib.metadata
import os
import re
import sys
import warnings

_XNNPACK = "--xla_cpu_use_xnnpack"
_GRAPHS = "--xla_gpu_enable_command_buffer"


def keep_products_right() -> None:
    """Turns XNNPACK off on CPUs in JAX before 0.8.2, where matrix products can be wrong.

    XLA's products there keep a packed copy of their right operand and look it up by its address
    alone. They miss new numbers at the same address: a new array where an old one was freed, or
    donated parameters that a step has overwritten. A training loop does both, without an error:
    its losses only fall less.

    Importing `course_lib` calls this. A value that the user set for the flag stays. If JAX runs
    already, this only warns.
    """
    version = tuple(map(int, re.findall(r"\d+", _jaxlib_version())[:3]))
    if version >= (0, 8, 2) or _XNNPACK in os.environ.get("XLA_FLAGS", ""):
        return
    if _backend_started():
        warnings.warn(
            f"jaxlib {_jaxlib_version()} computes wrong products on CPUs, and JAX runs already:"
            " import course_lib before the first use of JAX, or set"
            f" XLA_FLAGS={_XNNPACK}=false",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XNNPACK}=false".strip()


def name_kernels() -> None:
    """Lets a GPU's kernels start one by one, so that a profile names each of them.

    By default XLA groups kernels into CUDA graphs. A profile then calls them all
    `command_buffer_7`, or so, and does not know their scopes. It also broke the process: on an
    H200 with JAX 0.11.2, a loop was recorded, and everything later on the GPU ended in
    `CUDA_ERROR_LAUNCH_FAILED`. With this flag the same program was recorded and went on.

    Notebook 6 calls this, and `profiling.trace` asks for it. Without an NVIDIA GPU it does
    nothing. A value that the user set for the flag stays.
    """
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))) or kernels_have_names():
        return
    if _backend_started():
        raise RuntimeError(
            f"JAX runs already: set XLA_FLAGS={_GRAPHS}= before it starts, or restart the"
            " kernel and call this first"
        )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_GRAPHS}=".strip()


def kernels_have_names() -> bool:
    """Whether `XLA_FLAGS` says which kernels become CUDA graphs, as `name_kernels` does."""
    return _GRAPHS in os.environ.get("XLA_FLAGS", "")


def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def _backend_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")  # JAX has no public way to ask
    return bridge is not None and bridge.backends_are_initialized()
