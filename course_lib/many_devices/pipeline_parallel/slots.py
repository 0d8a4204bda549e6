"""What a pipeline's devices need to know in each slot: a schedule as arrays, with the buffers
that it needs.

Three things wait on a device, each in a buffer whose slots are assigned before anything runs:

    inbox       activations that have arrived, until their F
    stash       the input of each stage, from its F until its W: what is recomputed from. As
                many slots as microbatches are live at once, `schedules.peak_live`
    gradients   gradients that have arrived, until their W

A slot that is free again is given to the next: two values share it only if one is gone before
the other comes. Intervals of time that are given slots in the order in which they begin need no
more slots than there are values at once (interval graph colouring,
https://en.wikipedia.org/wiki/Interval_graph#Efficient_recognition_algorithms).
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.many_devices.pipeline_parallel.schedules import Schedule

Interval = tuple[int, int]  # from the first slot of time to the last, both included


@dataclasses.dataclass(frozen=True)
class Program:
    """A schedule as arrays.

    Attributes:
      kinds: "idle", and those that occur; the column "kind" counts in it.
      columns: int32 [S, T] by name. "kind", "microbatch", "stage" (of the model), "chunk" say
        what to do. "inbox", "stash", "gradient" are the slots where the op finds its values;
        "inbox_put", "stash_put", "gradient_put" those into which what arrives or is kept is
        put, at the end of this slot of time. Where there is none, it is one past the end.
      sizes: the slots of "inbox", "stash" and "gradient", on the device that needs most: all
        devices run one program.
    """

    kinds: tuple[str, ...]
    columns: Mapping[str, np.ndarray]
    sizes: Mapping[str, int]


def program(schedule: Schedule) -> Program:
    """Assigns slots to all that waits in a legal schedule, or in the forward part of one."""
    cells = schedules.cells(schedule)
    place = {(op.microbatch, schedule.stage(d, op.chunk)): d for d, _, op in cells}
    when = {
        (part, op.microbatch, schedule.stage(d, op.chunk)): t
        for d, t, op in cells
        for part in op.kind.strip("-")
    }
    waiting: dict[str, list[dict[tuple[int, int], Interval]]] = {
        name: [{} for _ in range(schedule.stages)] for name in ("inbox", "stash", "gradient")
    }
    for (m, stage), device in place.items():
        start = when["F", m, stage]
        end = when.get(("W", m, stage), start)
        waiting["stash"][device][m, stage] = (start, end)
        if ("F", m, stage - 1) in when:
            waiting["inbox"][device][m, stage] = (when["F", m, stage - 1] + 1, start)
        if ("B", m, stage + 1) in when:
            waiting["gradient"][device][m, stage] = (when["B", m, stage + 1] + 1, end)
    slots = {
        name: [colour(intervals) for intervals in devices] for name, devices in waiting.items()
    }
    sizes = {
        name: max([1, *(1 + slot for found in devices for slot in found.values())])
        for name, devices in slots.items()
    }

    shape = schedule.stages, len(schedule.table[0])
    columns = {
        name: np.zeros(shape, np.int32) for name in ("kind", "microbatch", "stage", "chunk")
    }
    columns |= {name: np.full(shape, size, np.int32) for name, size in sizes.items()}
    columns |= {f"{name}_put": np.full(shape, size, np.int32) for name, size in sizes.items()}
    kinds = (
        "idle",
        *(kind for kind in schedules.KINDS if any(op.kind == kind for _, _, op in cells)),
    )
    for device, time, op in cells:
        key = m, stage = op.microbatch, schedule.stage(device, op.chunk)
        given = {
            "kind": kinds.index(op.kind),
            "microbatch": m,
            "stage": stage,
            "chunk": op.chunk,
        }
        given |= {name: slots[name][device].get(key, sizes[name]) for name in sizes}
        for name, value in given.items():
            columns[name][device, time] = value
    for buffer, made_by, distance in (
        ("inbox", "F", -1),
        ("stash", "F", 0),
        ("gradient", "B", 1),
    ):
        for device, found in enumerate(slots[buffer]):
            for (m, stage), slot in found.items():
                columns[f"{buffer}_put"][device, when[made_by, m, stage + distance]] = slot
    return Program(kinds, columns, sizes)


def taken(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Returns how often a device takes each branch of the program in a step, for
    `measure.ledger(..., taken=...)`.

    The same for all devices: each does every microbatch once with each of its chunks.

    Args:
      schedule: a whole one. A conditional is known by its number of branches, and half of one
        has as many as others.

    Raises:
      ValueError: if it has only forwards.
    """
    found = program(schedule)
    if len(found.kinds) < 3:
        raise ValueError(
            "schedule must be a whole one: branches of forwards only are like other"
            " conditionals"
        )
    return {
        len(found.kinds): tuple(
            np.bincount(found.columns["kind"][0], minlength=len(found.kinds)).tolist()
        )
    }


def colour(intervals: Mapping[tuple[int, int], Interval]) -> dict[tuple[int, int], int]:
    """Returns a slot for each interval, so that those that share a slot do not overlap."""
    ends: list[int] = []  # of the last interval in each slot
    found = {}
    for key, (start, end) in sorted(intervals.items(), key=lambda item: item[1]):
        slot = next((slot for slot, last in enumerate(ends) if last < start), len(ends))
        ends[slot : slot + 1] = [end]
        found[key] = slot
    return found


def forward(schedule: Schedule) -> Schedule:
    """Returns a schedule of the same size that has only forwards, as early as they can be:
    those of breadth-first.
    """
    whole = schedules.breadth_first(schedule.stages, schedule.microbatches, schedule.chunks)
    rows = [
        [op if op is not None and op.kind == "F" else None for op in row] for row in whole.table
    ]
    length = max(time + 1 for row in rows for time, op in enumerate(row) if op is not None)
    return dataclasses.replace(
        whole, name="forward", table=tuple(tuple(row[:length]) for row in rows)
    )


def lockstep(
    schedule: Schedule,
    durations: Mapping[str, float],
    of_last: Mapping[str, float] | None = None,
) -> float:
    """Returns when the last device is through a step, of the program that `pipeline` runs:
    neighbours wait for each other.

    They exchange what they have after every column of the table, so that a device begins a
    column when it and the devices before and after it are through the last one. A backward in
    one piece stands in two columns and is computed in the second. Of a table whose backwards
    lie on a diagonal, as in 1F1B, hardly two columns overlap.

    Args:
      schedule: a legal one.
      durations: of an op by its kind, "F" and "BW", or "F", "B" and "W"; what is sent takes no
        time.
      of_last: the same for the last stage of the model, which has the output layer. None: the
        same as of the others.
    """
    last = schedule.stages * schedule.chunks - 1

    def duration(device: int, op: schedules.Op | None) -> float:
        if op is None:
            return 0.0
        is_last = of_last is not None and schedule.stage(device, op.chunk) == last
        return (of_last if is_last else durations).get(op.kind, 0.0)

    through = [0.0] * schedule.stages
    for column in zip(*schedule.table, strict=True):
        ends = [
            begin + duration(device, op)
            for device, (begin, op) in enumerate(zip(through, column, strict=True))
        ]
        through = [
            max(ends[d - 1], end, ends[(d + 1) % len(ends)]) for d, end in enumerate(ends)
        ]
    return max(through)
