"""A schedule as arrays, with assigned slots in the buffers that it needs.

Each device has four buffers. Their slots are assigned before anything runs:

    inbox      activations that have arrived, until their F
    stash      what F saves for B and W, until W. It has as many slots as microbatches are live
               at once, `schedules.peak_live`
    gradient   gradients that have arrived, until their B
    passed     what B passes on to W, until W

A backward in one piece, "BW", is executed as B and then W, each in its own slot of time.

Two values share a slot only if one is gone before the other comes. If intervals of time get
slots in the order in which they begin, they need no more slots than there are values at once
(interval graph colouring,
https://en.wikipedia.org/wiki/Interval_graph#Efficient_recognition_algorithms).
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.many_devices.pipeline_parallel.schedules import Op, Schedule

Interval = tuple[int, int]  # from the first slot of time to the last, both included


@dataclasses.dataclass(frozen=True)
class Program:
    """A schedule as arrays."""

    kinds: tuple[str, ...]  # "idle", and the kinds that occur: the column "kind" indexes them
    # int32 [S, T] by name. "kind", "microbatch", "stage" (of the model) and "chunk" of the op.
    # "inbox", "stash", "gradient" and "passed" are the slots that the op reads or writes. One
    # past the end means none.
    columns: Mapping[str, np.ndarray]
    # By buffer, "inbox" and "gradient", and by direction: the slots [S, T] for what arrives at
    # the end of this slot of time, from the previous device (1), the next one (-1) or this (0).
    arrivals: Mapping[tuple[str, int], np.ndarray]
    sizes: Mapping[str, int]  # slots of each buffer, on the device that needs most


PIECES = {"-": "B", "BW": "W"}
"""The ops that are executed in the two slots of a BW: B, then W."""


def executed(schedule: Schedule) -> Schedule:
    """Returns the table that is executed: B and then W in the two slots of a BW."""
    table = tuple(
        tuple(op and Op(PIECES.get(op.kind, op.kind), op.microbatch, op.chunk) for op in row)
        for row in schedule.table
    )
    return dataclasses.replace(schedule, table=table)


def program(schedule: Schedule) -> Program:
    """Assigns slots to all values that wait in a legal schedule, or in its forward part."""
    schedule = executed(schedule)
    cells = schedules.cells(schedule)
    place = {(op.microbatch, schedule.stage(d, op.chunk)): d for d, _, op in cells}
    when = {(op.kind, op.microbatch, schedule.stage(d, op.chunk)): t for d, t, op in cells}
    names = "inbox", "stash", "gradient", "passed"
    waiting: dict[str, list[dict[tuple[int, int], Interval]]] = {
        name: [{} for _ in range(schedule.stages)] for name in names
    }
    for (m, stage), device in place.items():
        start = when["F", m, stage]
        end = when.get(("W", m, stage), start)
        waiting["stash"][device][m, stage] = (start, end)
        if ("F", m, stage - 1) in when:
            waiting["inbox"][device][m, stage] = (when["F", m, stage - 1] + 1, start)
        if ("B", m, stage) in when:
            waiting["passed"][device][m, stage] = (when["B", m, stage], end)
        if ("B", m, stage + 1) in when:
            waiting["gradient"][device][m, stage] = (
                when["B", m, stage + 1] + 1,
                when["B", m, stage],
            )
    slots = {
        name: [colour(intervals) for intervals in devices] for name, devices in waiting.items()
    }
    sizes = {
        name: max([1, *(1 + slot for of_device in devices for slot in of_device.values())])
        for name, devices in slots.items()
    }

    sources = {"inbox": ("F", -1), "gradient": ("B", 1)}  # of what arrives
    shape = schedule.stages, len(schedule.table[0])
    columns = {
        name: np.zeros(shape, np.int32) for name in ("kind", "microbatch", "stage", "chunk")
    }
    columns |= {name: np.full(shape, size, np.int32) for name, size in sizes.items()}
    arrivals: dict[tuple[str, int], np.ndarray] = {}
    kinds = ("idle", *(kind for kind in "FBW" if any(op.kind == kind for _, _, op in cells)))
    for device, time, op in cells:
        key = m, stage = op.microbatch, schedule.stage(device, op.chunk)
        row = {"kind": kinds.index(op.kind), "microbatch": m, "stage": stage, "chunk": op.chunk}
        row |= {name: slots[name][device].get(key, size) for name, size in sizes.items()}
        for name, value in row.items():
            columns[name][device, time] = value
    for buffer, (made_by, distance) in sources.items():
        for device, of_device in enumerate(slots[buffer]):
            for (m, stage), slot in of_device.items():
                source, way = stage + distance, -distance
                if schedule.v_shaped:
                    way = device - schedule.place(source)[0]
                none = np.full(shape, sizes[buffer], np.int32)
                puts = arrivals.setdefault((buffer, way), none)
                puts[device, when[made_by, m, source]] = slot
    return Program(kinds, columns, arrivals, sizes)


def taken(schedule: Schedule) -> dict[str, int]:
    """Returns how often a device runs each kind of op per step, for
    `measure.ledger(..., taken=...)`. The same for all devices: each does every microbatch once
    with each of its chunks.
    """
    return dict.fromkeys(program(schedule).kinds[1:], schedule.microbatches * schedule.chunks)


def colour(intervals: Mapping[tuple[int, int], Interval]) -> dict[tuple[int, int], int]:
    """Returns a slot for each interval. Intervals with the same slot do not overlap."""
    ends: list[int] = []  # of the last interval in each slot
    slots = {}
    for key, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        slot = next((slot for slot, last in enumerate(ends) if last < start), len(ends))
        ends[slot : slot + 1] = [end]
        slots[key] = slot
    return slots


def forward(schedule: Schedule) -> Schedule:
    """Returns a schedule of the same size with only forwards, as early as possible: those of
    breadth-first.
    """
    chunks, microbatches = range(schedule.chunks), range(schedule.microbatches)
    order = [Op("F", m, c) for c in chunks for m in microbatches]
    empty = dataclasses.replace(schedule, name="forward", table=())
    return schedules.in_order(empty, [order] * schedule.stages)


def lockstep(
    schedule: Schedule,
    durations: Mapping[str, float],
    of_last: Mapping[str, float] | None = None,
) -> float:
    """Returns the time of a step of the program that `pipeline` runs, until its last device has
    finished. `durations` are seconds of "F", "B" and "W", `of_last` those on the last stage,
    with the output layer. Neighbours exchange after every column of the table, so a device
    begins a column when it and both neighbours have finished the column before.
    """
    kinds = [PIECES.get(kind, kind) for kind in schedules.KINDS]
    each = [of.get(kind, np.nan) for of in (durations, of_last or durations) for kind in kinds]
    seconds = np.array([*each, 0.0])[schedule.kinds]  # [slots, devices]; the last one: it waits
    devices = np.arange(schedule.stages)
    before, after = (devices - 1) % len(devices), (devices + 1) % len(devices)
    ready = np.zeros(len(devices))
    for column in seconds:
        ends = ready + column
        ready = np.maximum(np.maximum(ends[before], ends), ends[after])
    return float(ready.max())
