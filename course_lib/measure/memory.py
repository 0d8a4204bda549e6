"""Memory of a compiled step, as its compiler planned it."""

import dataclasses
from typing import Any

import jax

from course_lib.measure.units import GIB, MIB


def gib(bytes: int | float) -> str:
    """Returns bytes as text: `"14.23 GiB"`, or `"3.52 MiB"` below a hundredth of a GiB."""
    return f"{bytes / GIB:.2f} GiB" if abs(bytes) >= GIB / 100 else f"{bytes / MIB:.2f} MiB"


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that one device needs to run a program, in bytes.

    Attributes:
      arguments: inputs: parameters, optimizer state, batch.
      outputs: results.
      aliased: the part of the outputs that overwrites donated arguments, at no extra cost.
      temporaries: the block for everything else: activations, gradients, workspace.
      host: the part of all this that lies in the host's memory (offloaded arrays).
      peak: the most bytes in use at one moment. It may include offloaded arrays; `heap` counts
        only arrays in the device's memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int
    peak: int

    def __str__(self) -> str:
        parts = (
            f"arguments {gib(self.arguments)}, outputs {gib(self.outputs)} of which"
            f" {gib(self.aliased)} aliased"
        )
        return f"peak {gib(self.peak)}: {parts}, temporaries {gib(self.temporaries)}"


def memory(compiled: jax.stages.Compiled) -> Memory:
    """Reads how much memory a compiled program needs on one device.

    The compiler of a GPU or TPU, real or virtual, reports the peak: the largest sum of arrays
    that are alive together. XLA's CPU compiler does not (its `peak_memory_in_bytes` leaves the
    temporaries out). On a CPU this function therefore returns an upper bound: arguments +
    outputs - aliased + temporaries. The block of temporaries can have gaps; `heap` is exact.

    None of this is measured. A device needs more, for its context, the workspace of its
    libraries, and gaps between arrays: `peak_in_own_process` measures that.

    Args:
      compiled: `jax.jit(f).lower(...).compile()`.

    Raises:
      ValueError: if it is not compiled.
    """
    check_compiled(compiled)
    stats = compiled.memory_analysis()
    total = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host=(
            stats.host_argument_size_in_bytes
            + stats.host_output_size_in_bytes
            - stats.host_alias_size_in_bytes
            + stats.host_temp_size_in_bytes
        ),
        peak=total if _platform(compiled) == "cpu" else stats.peak_memory_in_bytes,
    )


def check_compiled(compiled: Any) -> None:
    """Refuses anything that is not a compiled program.

    Raises:
      ValueError: saying how to compile it.
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise ValueError(
            f"compiled={_short(compiled)} must be a compiled step:"
            " jax.jit(f).lower(...).compile()"
        )


def check_lowered(lowered: Any) -> None:
    """Refuses anything that is not a lowered program.

    Raises:
      ValueError: saying how to lower it.
    """
    if not isinstance(lowered, jax.stages.Lowered):
        raise ValueError(
            f"lowered={_short(lowered)} must be a lowered step, not yet compiled:"
            " jax.jit(f).lower(...)"
        )


def _short(what: Any) -> str:
    return f"<{type(what).__name__}>"


def _platform(compiled: jax.stages.Compiled) -> str:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return next(iter(shardings[0].device_set)).platform
