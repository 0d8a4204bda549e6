"""Reads the arrays that are alive at the peak of a step's memory.

While it compiles, XLA gives every array a place in memory. TensorBoard's memory viewer
(https://openxla.org/xprof/memory_viewer) shows this plan, and `xprof`, the converter behind the
viewer, reads it here.
"""

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax

from course_lib import extras
from course_lib.measure import hlo, origin
from course_lib.measure.program import NO_PLAN, Program, with_plan
from course_lib.measure.units import MIB

_KINDS = {
    "Parameter": "argument",
    "Output": "output",
    "Temporary": "temporary",
    "Constant": "constant",
}


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """An array that is alive at the peak."""

    bytes: int
    shape: tuple[int, ...]  # () for what `kind` calls "small"
    dtype: str  # as NumPy names it, "" for "small"
    # where in the source it comes from, as `jit(step)/jvp(Transformer)/mlp/dot_general`, or an
    # argument's name; "" where XLA does not say
    scope: str
    # "argument" (also after an output has overwritten it), "output", "temporary", "constant",
    # or "small": all arrays under 16 KiB together
    kind: str
    line: str = ""  # of the source, as "model.py:31 in loss"; "" where XLA does not say


@dataclasses.dataclass(frozen=True, eq=False)
class Heap:
    """The memory of one device while it runs a program."""

    peak: int  # the most bytes that are in use at one moment
    arrays: tuple[LiveArray, ...]  # alive at the peak, largest first; they add up to it
    program: Program = dataclasses.field(repr=False)  # for the other instruments

    @property
    def compiled(self) -> jax.stages.Compiled:
        return self.program.compiled


def heap(step: Any) -> Heap:
    """Reads the arrays that are alive at a step's peak of memory, on any backend.

    `step` is `jax.jit(f).lower(...)`, not yet compiled: a compiled program has lost the plan.
    On a CPU the peak is exact where `memory` has an upper bound.
    """
    program, plan = with_plan(step)
    record = memory_viewer(plan.proto)
    if "peakHeapMib" not in record:
        raise RuntimeError(NO_PLAN)
    module = program.module
    made = {name: origin.source(i) for name, i in module.instructions.items()}
    made |= origin.stacked(module)
    arrays = tuple(_live_array(entry, made, module) for entry in record["maxHeapBySize"])
    return Heap(round(record["peakHeapMib"] * MIB), arrays, program)


def memory_viewer(proto: bytes) -> dict[str, Any]:
    """Returns the memory viewer's own table, sizes in MiB, for a program (`HloProto`)."""
    # Imported here only: it takes a second. `environment` has set its level of logging.
    with extras.needed("profile"):
        from xprof.convert import raw_to_tool_data

    with tempfile.TemporaryDirectory() as name:
        # The viewer looks for the program of a profile beside it. This one has no times.
        (profile := pathlib.Path(name, "empty.xplane.pb")).touch()
        pathlib.Path(name, "step.hlo_proto.pb").write_bytes(proto)
        params = {"module_name": "step", "memory_space": "0"}  # the device's own memory
        data, _ = raw_to_tool_data.xspace_to_tool_data([str(profile)], "memory_viewer", params)
    return json.loads(data)


def _live_array(
    entry: Mapping[str, Any], made: Mapping[str, hlo.Instruction], module: hlo.Module
) -> LiveArray:
    shapes = hlo.read_shapes(entry.get("shapeString", ""))
    name = entry.get("instructionName", "")
    exact, stem = made.get(name), made.get(name.split("{")[0])
    source = exact or stem
    return LiveArray(
        bytes=round(entry["logicalBufferSizeMib"] * MIB),
        shape=shapes[0].dims if shapes else (),
        dtype=shapes[0].dtype if shapes else "",
        scope=(exact and exact.scope) or entry.get("tfOpName") or (stem.scope if stem else ""),
        kind=_KINDS.get(entry.get("groupName", ""), "small" if not shapes else "temporary"),
        line=origin.line(module.frames.get(source.frame, ())) if source else "",
    )
