"""Memory of a compiled step, as its compiler planned it."""

import dataclasses
from typing import Any

from course_lib.measure import program
from course_lib.measure.units import gib


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that one device needs to run a program, in bytes."""

    arguments: int  # parameters, optimizer state, batch
    outputs: int
    aliased: int  # the part of the outputs that overwrites donated arguments, at no extra cost
    temporaries: int  # the block for everything else: activations, gradients, workspace
    host: int  # the part of all this that lies in the host's memory (offloaded arrays)
    # the most bytes in use at one moment. It may include offloaded arrays; `heap` counts only
    # arrays in the device's memory
    peak: int

    def __str__(self) -> str:
        return (
            f"peak {gib(self.peak)}: arguments {gib(self.arguments)}, outputs"
            f" {gib(self.outputs)} of which {gib(self.aliased)} aliased, temporaries"
            f" {gib(self.temporaries)}"
        )


def memory(step: Any) -> Memory:
    """Reads how much memory a step, compiled or lowered, needs on one device.

    The compiler of a GPU or TPU reports the peak: the largest sum of arrays that are alive
    together. XLA's CPU compiler leaves out temporaries and constants, so the peak is an upper
    bound there (the block of temporaries can have gaps; `heap` is exact): of a lowered step,
    compiled without a library that hides arrays (`virtual.NO_FUSED_LIBRARY`). A compiled one
    that hides large ones is refused. A device needs more, for its context, the workspace of its
    libraries (on a CPU, copies of operands in each thread), and gaps between arrays:
    `peak_in_own_process` measures that.
    """
    compiled = program.read(step)
    if compiled.platform == "cpu":
        compiled.check_nothing_hidden()
    return planned(compiled)


def planned(step: Any) -> Memory:
    """As `memory`, of any compiled step: on a CPU it may take more, inside a library."""
    compiled = program.read(step)
    stats = compiled.compiled.memory_analysis()

    def total(of: str) -> int:
        arguments, outputs, aliased, temporaries = (
            getattr(stats, f"{of}{part}_size_in_bytes")
            for part in ("argument", "output", "alias", "temp")
        )
        return arguments + outputs - aliased + temporaries

    peak = stats.peak_memory_in_bytes
    if compiled.platform == "cpu":
        instructions = compiled.module.instructions.values()
        constants = (
            i.bytes for i in instructions if i.opcode == "constant" and i.shapes[0].dims
        )
        peak = total("") + sum(constants)
    return Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        host=total("host_"),
        peak=peak,
    )
