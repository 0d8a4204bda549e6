"""Reads the memory of a compiled step over its instructions, and the arrays alive at the peak.

While it compiles, XLA simulates the program and gives every array a place in memory. It writes
this plan into a dump. TensorBoard's memory viewer (https://openxla.org/xprof/memory_viewer)
shows the plan, and `xprof`, the converter behind the viewer, reads it here.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
import warnings
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

from course_lib.measure import hlo, origin, virtual
from course_lib.measure.memory import check_lowered
from course_lib.measure.units import MIB

RECORD = "virtual.xplane.pb"  # the file of a session in which nothing ran

NO_PLAN = (
    "XLA wrote no plan of the program's memory: it loaded the program from JAX's persistent"
    ' compilation cache; call jax.config.update("jax_enable_compilation_cache", False) before'
)
_KINDS = {
    "Parameter": "argument",
    "Output": "output",
    "Temporary": "temporary",
    "Constant": "constant",
}


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """An array that is alive at the peak.

    Attributes:
      bytes: its size.
      shape: its shape, () for what `kind` calls "small".
      dtype: its dtype as NumPy names it, empty for "small".
      scope: where in the source it comes from, as `jit(step)/jvp(Transformer)/mlp/dot_general`,
        or an argument's name; empty where XLA does not say.
      kind: "argument" (also after an output has overwritten it), "output", "temporary",
        "constant", or "small": all arrays under 16 KiB together.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    scope: str
    kind: str


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """XLA's plan of a program's memory, as text of its dump. Both are empty if it wrote none.

    Attributes:
      lifetimes: the first and last instruction of each value (`live-range.txt`); also empty
        before JAX 0.10.
      places: the allocation and offset of each value (`buffer-assignment.txt`).
    """

    lifetimes: str
    places: str


@dataclasses.dataclass(frozen=True, eq=False)
class Heap:
    """The memory of one device while it runs a program.

    Attributes:
      peak: the most bytes that are in use at one moment.
      timeline: bytes in use at each instruction, in the order of the program (not in time). A
        loop's body occurs once; a program without temporaries has one point.
      arrays: the arrays alive at the peak, largest first. They add up to the peak.
      compiled: the program, for other measurements.
      program: the program as a serialized `HloProto`, for `write_session`.
      plan: of its memory, for `measure.tape`.
    """

    peak: int
    timeline: np.ndarray
    arrays: tuple[LiveArray, ...]
    compiled: jax.stages.Compiled = dataclasses.field(repr=False)
    program: bytes = dataclasses.field(repr=False)
    plan: MemoryPlan = dataclasses.field(repr=False)


def heap(lowered: jax.stages.Lowered) -> Heap:
    """Compiles a step and reads the arrays that are alive at its peak of memory.

    Works for any backend, real or virtual. On a CPU it is exact where `memory` has an upper
    bound.

    Args:
      lowered: `jax.jit(f).lower(...)`, not yet compiled: a compiled program has lost the plan.

    Raises:
      ValueError: if it is compiled already.
      RuntimeError: if XLA wrote no record, as for a program loaded from JAX's persistent
        compilation cache.
    """
    check_lowered(lowered)
    compiled, program, plan = compile_with_plan(lowered)
    with tempfile.TemporaryDirectory() as folder:
        record = memory_viewer(_write_record(program, pathlib.Path(folder)))
    # XLA also dumps a program that it loads, but without the plan of its memory.
    if "peakHeapMib" not in record:
        raise RuntimeError(NO_PLAN)
    module = hlo.parse(compiled.as_text())
    scopes = {
        i.name: origin.origin(i) for c in module.computations.values() for i in c.instructions
    }
    scopes |= origin.stacked(module)
    # Without temporaries there is nothing to play through.
    sizes = record.get("heapSizes", [record["peakHeapMib"]])
    timeline = np.round(np.array(sizes) * MIB).astype(np.int64)
    return Heap(
        peak=int(timeline.max()),
        timeline=timeline,
        arrays=tuple(_live_array(entry, scopes) for entry in record["maxHeapBySize"]),
        compiled=compiled,
        program=program,
        plan=plan,
    )


def write_session(
    step: jax.stages.Lowered | Heap, logdir: str | os.PathLike[str], name: str
) -> jax.stages.Compiled:
    """Compiles a step and writes a record for TensorBoard's memory viewer and graph viewer.

    A profiler's record holds the programs that ran, with the plan of their memory, and the
    times of their operations. This one holds the program only: nothing runs.

    Args:
      step: `jax.jit(f).lower(...)`, for a real or a virtual device; or its `heap`, which is
        not compiled again.
      logdir: TensorBoard's `--logdir`. The record goes into `logdir/plugins/profile/name/`.
      name: of the record in TensorBoard. It replaces an older one that this function wrote.

    Raises:
      ValueError: if the name belongs to something else, such as a trace of steps that ran, or
        the step is compiled already.
      RuntimeError: if XLA wrote no dump.
    """
    if not isinstance(step, Heap):
        check_lowered(step)
    session = pathlib.Path(logdir) / "plugins" / "profile" / name
    if session.exists() and [path.name for path in session.glob("*.xplane.pb")] != [RECORD]:
        raise ValueError(
            f"name={name!r} must be new: {str(session)!r} holds something else; take another"
            " name"
        )
    if isinstance(step, Heap):
        compiled, program = step.compiled, step.program
    else:
        compiled, program, _ = compile_with_plan(step)
    # Viewing an older record has unpacked its program there.
    shutil.rmtree(session, ignore_errors=True)
    session.mkdir(parents=True)
    _write_record(program, session)
    return compiled


def memory_viewer(record: pathlib.Path) -> dict[str, Any]:
    """Returns the memory viewer's own table for a session of one program, sizes in MiB.

    Args:
      record: the session's file, as `write_session` writes it.
    """
    # Imported here only: it takes a second. `virtual` has set its C++ side's level of logging.
    from xprof.convert import raw_to_tool_data

    # Unpacks the program into a file of its own.
    raw_to_tool_data.xspace_to_tool_names([str(record)])
    [program] = record.parent.glob("*.hlo_proto.pb")
    module = program.name.removesuffix(".hlo_proto.pb")
    params = {"module_name": module, "memory_space": "0"}  # the device's own memory
    data, _ = raw_to_tool_data.xspace_to_tool_data([str(record)], "memory_viewer", params)
    return json.loads(data)


def compile_with_plan(
    lowered: jax.stages.Lowered,
) -> tuple[jax.stages.Compiled, bytes, MemoryPlan]:
    """Compiles a program, and reads XLA's dump.

    Args:
      lowered: not yet compiled, for a real or a virtual device.

    Returns:
      The compiled program; the same as a serialized `HloProto`; and the plan of its memory.

    Raises:
      RuntimeError: if XLA wrote no dump.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
        compiled = virtual.compile(lowered, {"xla_dump_to": folder, **options})
        program = _largest(folder, "after_optimizations.hlo.pb")
        if program is None:
            raise RuntimeError(NO_PLAN)
        places = _largest(folder, "buffer-assignment.txt")
        if places is None:
            return compiled, program.read_bytes(), MemoryPlan("", "")
        ranges = places.with_name(places.name.replace("buffer-assignment", "live-range"))
        lifetimes = ranges.read_text() if ranges.exists() else ""
        return compiled, program.read_bytes(), MemoryPlan(lifetimes, places.read_text())


def _largest(folder: str, ending: str) -> pathlib.Path | None:
    """Returns the largest file with an ending, None without one. Smaller files belong to
    programs that a GPU times to choose kernels.
    """
    files = pathlib.Path(folder).glob(f"*{ending}")
    return max(files, key=lambda path: path.stat().st_size, default=None)


def _write_record(program: bytes, folder: pathlib.Path) -> pathlib.Path:
    """Writes a profiler's record of a program (`HloProto`), and returns its file."""
    (folder / RECORD).write_bytes(_as_record(program))
    return folder / RECORD


def _as_record(program: bytes) -> bytes:
    """Returns a profiler's record (`XSpace`) of a program (`HloProto`), without times."""
    escaped = program.decode("latin-1").encode("unicode_escape").decode().replace('"', '\\"')
    with warnings.catch_warnings():
        # JAX 0.7.2 on Python 3.13 warns of its own code.
        warnings.simplefilter("ignore", DeprecationWarning)
        return ProfileData.text_proto_to_serialized_xspace(f"""
            planes {{
              name: "/host:metadata"
              event_metadata {{
                key: 1 value {{ id: 1 stats {{ metadata_id: 1 bytes_value: "{escaped}" }} }}
              }}
              stat_metadata {{ key: 1 value {{ id: 1 name: "Hlo Proto" }} }}
            }}""")


def _live_array(entry: dict, scopes: dict[str, str]) -> LiveArray:
    shapes = hlo.read_shapes(entry.get("shapeString", ""))
    name = entry.get("instructionName", "")
    return LiveArray(
        bytes=round(entry["logicalBufferSizeMib"] * MIB),
        shape=shapes[0].dims if shapes else (),
        dtype=shapes[0].dtype if shapes else "",
        scope=scopes.get(name) or entry.get("tfOpName") or scopes.get(name.split("{")[0], ""),
        kind=_KINDS.get(entry.get("groupName", ""), "small" if not shapes else "temporary"),
    )
