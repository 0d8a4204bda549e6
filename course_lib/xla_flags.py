"""Flags of the XLA compiler: what some of them do, and a way to set them that cannot kill the
process.

XLA reads the environment variable `XLA_FLAGS` once, when JAX first looks for devices. A flag
that it does not know is no error that Python could catch: the process ends. Flags come and go
between versions, so a line copied from a tutorial of last year may do just that. Here a flag is
tried in a process of its own, and set only if that one survives.

A flag can also be given to one compilation: `lowered.compile(compiler_options={"xla_gpu_...":
True})`.

The course sets one by itself, and only where JAX is older than 0.8.2: `keep_products_right`
says why. The defaults named below are those of JAX 0.10.

Sources: https://docs.jax.dev/en/latest/gpu_performance_tips.html and
https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc.
"""

import dataclasses
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import warnings


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag with the value that one would set, what that does, and what became of the flag."""

    name: str
    value: str
    does: str
    history: str

    @property
    def text(self) -> str:
        """Returns the flag as `XLA_FLAGS` spells it."""
        return f"--{self.name}={self.value}"


_ROWS = (
    Flag(
        "xla_gpu_enable_triton_softmax_fusion",
        "true",
        "fuses a softmax into one Triton kernel",
        "removed in January 2025 (https://github.com/NVIDIA/JAX-Toolbox/pull/1240): fusions are"
        " found without it",
    ),
    Flag(
        "xla_gpu_triton_gemm_any",
        "false",
        "takes Triton kernels for matrix products only where they are expected to win; true:"
        " wherever they can be had",
        "on by default",
    ),
    Flag(
        "xla_gpu_enable_async_collectives",
        "true",
        "lets communication between GPUs run beside computation",
        "removed in April 2024 (https://github.com/openxla/xla/pull/11422): that is the"
        " default",
    ),
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "orders operations so that computation covers the time of communication",
        "off by default, useful on several GPUs",
    ),
    Flag(
        "xla_gpu_enable_highest_priority_async_stream",
        "true",
        "gives communication the first right to the GPU",
        "on by default",
    ),
    Flag(
        "xla_gpu_enable_pipelined_all_gather",
        "true",
        "starts gathering the parameters of a scanned layer while the layer before it computes",
        "off by default, useful for fully sharded parameters",
    ),
    Flag(
        "xla_gpu_autotune_level",
        "0",
        "does not time alternative kernels: compiles faster, runs slower",
        "4 by default",
    ),
    Flag(
        "xla_gpu_deterministic_ops",
        "true",
        "gives the same bits in each run, and is slower",
        "off by default",
    ),
    Flag(
        "xla_force_host_platform_device_count",
        "8",
        "divides this CPU into 8 devices, to try out programs for several",
        "1 by default",
    ),
)

FLAGS = {flag.name: flag for flag in _ROWS}


@dataclasses.dataclass(frozen=True)
class Report:
    """What `set_flags` did: the flags that are set now, and those that this version of XLA does
    not know.
    """

    accepted: tuple[str, ...]
    refused: tuple[str, ...]


@functools.cache
def is_accepted(flag: str) -> bool:
    """Returns whether the installed version of XLA starts with a flag, by trying it in a
    process of its own.

    Args:
      flag: as `XLA_FLAGS` spells it, for example "--xla_gpu_triton_gemm_any=false".

    Raises:
      ValueError: if `flag` is not of the form "--xla_name=value".
      RuntimeError: if the trial ended for another reason than the flag.
    """
    if not flag.startswith("--xla_") or "=" not in flag or any(c.isspace() for c in flag):
        raise ValueError(
            f"flag={flag!r} must be one flag with its value, like --xla_gpu_autotune_level=0"
        )
    # The CPU client makes XLA read its flags, those for GPUs too, and starts faster than JAX.
    trial = subprocess.run(
        [sys.executable, "-c", "from jaxlib import xla_client; xla_client.make_cpu_client()"],
        env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    # XLA failed at something else, as where the memory was not enough.
    if trial.returncode and flag.partition("=")[0].lstrip("-") not in trial.stderr:
        raise RuntimeError(
            f"{flag} could not be tried: exit code {trial.returncode}\n{trial.stderr}"
        )
    return trial.returncode == 0


def set_flags(*names: str) -> Report:
    """Adds flags of `FLAGS` to the environment variable `XLA_FLAGS`, except those that would
    kill the process.

    Call it before the first computation. Flags that are in `XLA_FLAGS` already stay as they
    are.

    Raises:
      ValueError: if a name is not in `FLAGS`.
      RuntimeError: if JAX has looked for devices already, so that XLA would not see the flags.
    """
    for name in names:
        if name not in FLAGS:
            raise ValueError(f"name={name!r} must be one of {', '.join(FLAGS)}")
    if _backend_started():
        raise RuntimeError(
            "XLA has read its flags already: restart Python, and set them before the first use"
            " of JAX"
        )
    accepted = tuple(name for name in names if is_accepted(FLAGS[name].text))
    present = os.environ.get("XLA_FLAGS", "").split()
    # A boolean flag may stand without a value.
    set_by_user = {flag.partition("=")[0] for flag in present}
    new = [FLAGS[name].text for name in accepted if f"--{name}" not in set_by_user]
    if new:
        os.environ["XLA_FLAGS"] = " ".join(present + new)
    return Report(accepted, tuple(name for name in names if name not in accepted))


def keep_products_right() -> None:
    """Turns XNNPACK off where it may multiply by a matrix that is not there any more: on CPUs,
    in JAX before 0.8.2.

    There XLA's products keep a packed copy of their right operand and find it again by its
    address alone. Other numbers at the same address are not seen: those of a new array where an
    old one was freed, or of donated parameters that a step has overwritten. A training loop
    does both, and nothing tells: its losses fall, only less.

        product = jax.jit(lambda w, x: x @ w)
        for i in range(8):
            w = jnp.full((512, 128), float(i))
            print(product(w, jnp.ones((512, 512)))[0, 0] / 512)

    prints 0, 0, 0, 3, 3, ... in JAX 0.7.2, and 0, 1, 2, 3, 4, ... in JAX 0.8.2.

    Importing `course_lib` calls this. A value that the user gave the flag stays. If JAX runs
    already, it only warns.
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


_XNNPACK = "--xla_cpu_use_xnnpack"


def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def _backend_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")  # JAX has no public way to ask
    return bridge is not None and bridge.backends_are_initialized()
