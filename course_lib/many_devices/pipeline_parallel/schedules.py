"""Pipeline schedules: tables of the work of each device in each slot of time.

A pipeline cuts the model's layers into stages on different devices, and the batch into M
microbatches, so that the devices work on different microbatches at once. The order of a
device's work decides how long it idles and how many activations it stores. A schedule is this
order, as a table:

    table[device][time] -> Op, or None where the device idles

    F   forward
    B   backward, the gradient of the stage's input
    W   backward, the gradient of the stage's weights
    BW  B and W in one piece: two cells, "-" and then "BW"; both end with the second cell

Each of F, B and W takes one slot, as Qi et al. count (2023, https://arxiv.org/abs/2401.10241),
so that schedules are comparable. The result of a slot arrives at the next or previous stage in
time for the next slot. A device may have several chunks of layers: chunk c of device d is stage
c S + d of the model, so that activations run around the ring of devices v times. In a V, odd
chunks lie in the opposite order: with two chunks, device d has the stages d and 2 S - 1 - d.

                    idle share         live microbatches, device d      source
    gpipe           (S-1) / (M+S-1)    M                                Huang et al., 2018
    1f1b            (S-1) / (M+S-1)    min(S-d, M)                      Narayanan et al., 2020
    breadth_first   (S-1) / (vM+S-1)   vM                               Lamy-Poirier, 2022
    depth_first     (S-1) / (vM+S-1)   min(2(S-d-1) + (v-1)S + 1, vM)   Narayanan et al., 2021
    zero_bubble     (S-1) / (3M+S-1)   min(S, M)                        Qi et al., 2023 (ZB-H1)
    zb_v            (S-1) / (6M+S-1)   2 min(S, M)                      Qi et al., 2023
    dualpipe_v      (S-1) / (6M+S-1)   min(2S+1, 2M)                    DeepSeek-AI, 2025

Bubbles with v chunks and of `zero_bubble` need M >= S microbatches, that of `dualpipe_v` needs
M >= 2S; with fewer, `bubble` counts more. If M >= 2S-1, a device of `zb_v` idles only before
its first op and after its last one. A microbatch is live in a chunk from its F to its W: the
device stores what its backward reads in that chunk, which has 1/v of the device's layers. The
table has the most that are live at once.

Sources: https://arxiv.org/abs/1811.06965, https://arxiv.org/abs/2006.09503,
https://arxiv.org/abs/2211.05953, https://arxiv.org/abs/2104.04473,
https://arxiv.org/abs/2401.10241, https://github.com/deepseek-ai/DualPipe.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from course_lib.arguments import nearest
from course_lib.many_devices.pipeline_parallel import SCHEDULES, V_SHAPED

KINDS = ("F", "B", "W", "BW", "-")


@dataclasses.dataclass(frozen=True)
class Op:
    """A device's work in one slot: a kind of `KINDS`, a microbatch, one of its chunks."""

    kind: str
    microbatch: int
    chunk: int = 0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A table of the work of S devices on M microbatches, with v chunks per device."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    table: tuple[tuple[Op | None, ...], ...] = ()
    v_shaped: bool = False  # odd chunks lie in the opposite order

    def stage(self, device: int, chunk: int) -> int:
        """Returns the number of a device's chunk among the S v stages of the model."""
        return chunk * self.stages + self._turned(device, chunk)

    @functools.cached_property
    def kinds(self) -> np.ndarray:
        """Each op's place in `KINDS` [slots, devices], + 5 on the last stage; -1: it waits."""
        kinds = np.full((len(self.table[0]), self.stages), -1)
        for device, slot, op in cells(self):
            ending = self.stage(device, op.chunk) == self.stages * self.chunks - 1
            kinds[slot, device] = KINDS.index(op.kind) + len(KINDS) * ending
        return kinds

    def place(self, stage: int) -> tuple[int, int]:
        """Returns the device and the chunk of a stage of the model."""
        chunk, device = divmod(stage, self.stages)
        return self._turned(device, chunk), chunk

    def _turned(self, device: int, chunk: int) -> int:
        return self.stages - 1 - device if self.v_shaped and chunk % 2 else device


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Runs all forwards, then all backwards."""
    return dataclasses.replace(breadth_first(stages, microbatches, 1), name="gpipe")


def breadth_first(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Runs all microbatches through one chunk before the next chunk; then the backwards in the
    same way, from the last chunk. With one chunk it is GPipe.
    """
    _check_sizes(stages, microbatches, chunks)
    forward = [Op("F", m, c) for c in range(chunks) for m in range(microbatches)]
    backward = [Op("BW", m, c) for c in reversed(range(chunks)) for m in range(microbatches)]
    empty = Schedule("breadth_first", stages, microbatches, chunks)
    return in_order(empty, [forward + backward] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Runs forwards until the first backward is possible, then a backward and a forward by
    turns.
    """
    _check_sizes(stages, microbatches, 1)
    orders = [order_1f1b(microbatches, stages - device, "BW") for device in range(stages)]
    return in_order(Schedule("1f1b", stages, microbatches, 1), orders)


def depth_first(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Runs S microbatches through all chunks before the next S (Megatron-LM's interleaving)."""
    _check_sizes(stages, microbatches, chunks)
    if chunks == 1:
        raise ValueError(
            "chunks=1 must be at least 2 for depth_first: with one chunk it would be 1f1b"
        )
    if rest := microbatches % stages:
        raise ValueError(
            f"microbatches={microbatches} must be a multiple of the {stages} stages for"
            f" depth_first, which takes as many at a time: {rest} would be left over; take"
            f" {nearest(microbatches, stages)}"
        )
    rounds = [(first, c) for first in range(0, microbatches, stages) for c in range(chunks)]
    forward = [Op("F", first + i, c) for first, c in rounds for i in range(stages)]
    backward = [
        Op("BW", first + i, chunks - 1 - c) for first, c in rounds for i in range(stages)
    ]
    orders = []
    for device in range(stages):
        ahead = min(2 * (stages - device - 1) + (chunks - 1) * stages + 1, len(forward))
        orders.append(alternate(forward, backward, ahead))
    return in_order(Schedule("depth_first", stages, microbatches, chunks), orders)


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Runs 1F1B with backwards in two pieces: B at once, so that the previous stage can go on,
    and W when the device would idle.

    ZB-H1: no device has more live microbatches than the first device of 1F1B.
    """
    _check_sizes(stages, microbatches, 1)
    orders = [order_1f1b(microbatches, stages - device, "B") for device in range(stages)]
    return in_order(Schedule("zero_bubble", stages, microbatches, 1), orders, most_live=stages)


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Runs two chunks in a V: the first device has the first and the last stage, so backwards
    begin while other devices still fill. W runs when the device would idle. No device keeps
    more than the first one of 1F1B, whose chunks are twice as large.
    """

    def order(device: int) -> str:
        rest, turns = stages - device, max(microbatches, 2 * stages - 1) - stages
        warm_up = "F0 " * (2 * rest - 1) + "F1 F0 " * device + "F1 B1 " * rest
        return warm_up + "F0 B0 F1 B1 " * turns + "B0 B1 " * device + "B0 " * rest

    return _in_a_v("zb_v", stages, microbatches, order, most_live=2 * stages)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """Runs two chunks in a V, and most forwards next to a whole backward of the other chunk.

    DeepSeek's program runs these two as one block, to hide the traffic of each behind the
    other's products. Both results leave at its end, so a device idles in 2 (S-1) slots there,
    not in S-1.
    """

    def order(device: int) -> str:
        own, rest = device + 1, stages - device - 1
        turns = max(microbatches, 2 * stages) - 2 * stages + own
        warm_up = "F0 " * (2 * rest) + "F0 F1 " * own + "B1 F1 " * rest
        steady = "F0 BW1 F1 BW0 " * turns + "BW1 F1 BW0 " * rest
        # From the middle of the cool-down, W waits until the device would idle.
        whole, split = ("BW1 BW0 " * own).split()[:own], ("B1 B0 " * own).split()[own:]
        return warm_up + steady + " ".join(whole + split) + " B0" * rest

    return _in_a_v("dualpipe_v", stages, microbatches, order, most_live=2 * stages + 1)


def _in_a_v(
    name: str, stages: int, microbatches: int, order: Callable[[int], str], most_live: int
) -> Schedule:
    """Returns the table of two chunks in a V. `order(device)` names kinds and chunks, as in
    "F0 F1 B1"; each takes the next microbatch of its kind and chunk, while there is one.
    """
    _check_sizes(stages, microbatches, 2)
    orders = []
    for words in (order(device).split() for device in range(stages)):
        turn: collections.Counter[str] = collections.Counter()
        ops = []
        for word in words:
            place = word[0] + word[-1]
            ops.append(Op(word[:-1], turn[place], int(word[-1])))
            turn[place] += 1
        orders.append([op for op in ops if op.microbatch < microbatches])
    empty = Schedule(name, stages, microbatches, 2, v_shaped=True)
    return in_order(empty, orders, most_live)


LOOPING = ("breadth_first", "depth_first")
"""The schedules with any number of chunks per device."""


@functools.cache
def make(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns a schedule by its name."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule={name!r} must be one of {', '.join(SCHEDULES)}")
    schedule: Callable[..., Schedule] = globals()[SCHEDULES[name]]
    if name in LOOPING:
        return schedule(stages, microbatches, chunks)
    if chunks != (needed := 2 if name in V_SHAPED else 1):
        raise ValueError(
            f"chunks={chunks} must be {needed} for schedule={name!r}: only"
            f" {' and '.join(LOOPING)} have a choice"
        )
    return schedule(stages, microbatches)


def _check_sizes(stages: int, microbatches: int, chunks: int) -> None:
    if min(stages, microbatches, chunks) < 1:
        raise ValueError(
            f"stages={stages}, microbatches={microbatches}, chunks={chunks} must be at least 1"
        )


def order_1f1b(microbatches: int, ahead: int, backward: str) -> list[Op]:
    """Returns 1F1B's order for a device that may be `ahead` forwards ahead of its backwards."""
    forwards = [Op("F", m) for m in range(microbatches)]
    return alternate(
        forwards, [Op(backward, m) for m in range(microbatches)], min(ahead, microbatches)
    )


def alternate(forward: Sequence[Op], backward: Sequence[Op], ahead: int) -> list[Op]:
    """Returns `ahead` forwards, then one backward and one forward by turns, then the backwards
    that are left.
    """
    turns = [op for pair in zip(backward, forward[ahead:], strict=False) for op in pair]
    return [*forward[:ahead], *turns, *backward[len(forward) - ahead :]]


def in_order(
    empty: Schedule, orders: Sequence[Sequence[Op]], most_live: int | None = None
) -> Schedule:
    """Returns the schedule with the table in which each device works in its order, each op as
    early as its inputs allow. With backwards in two pieces, `most_live` is the most
    microbatches that may be live on a device, which does its oldest W when it can do nothing
    else.
    """
    stages, chunks = empty.stages, empty.chunks
    rows: list[list[Op | None]] = [[] for _ in range(stages)]
    todo = [collections.deque(order) for order in orders]
    # W of each finished B
    pending: list[collections.deque[Op]] = [collections.deque() for _ in range(stages)]
    live = [0] * stages
    done: dict[tuple[str, int, int], int] = {}
    time = 0
    while any(todo) or any(pending):
        for device, row in enumerate(rows):
            if len(row) > time:
                continue  # in the second slot of a BW
            op = todo[device][0] if todo[device] else None
            if op is not None:
                needed = _needs(
                    op.kind, op.microbatch, empty.stage(device, op.chunk), stages * chunks
                )
                there = all(done.get(key, time) < time for key in needed)
                full = op.kind == "F" and most_live is not None and live[device] == most_live
                op = todo[device].popleft() if there and not full else None
            if op is None and pending[device]:
                op = pending[device].popleft()
            row += (
                [Op("-", op.microbatch, op.chunk), op]
                if op is not None and op.kind == "BW"
                else [op]
            )
            if op is None:
                continue
            for part in op.kind:
                done[part, op.microbatch, empty.stage(device, op.chunk)] = len(row) - 1
            live[device] += {"F": 1, "B": 0, "W": -1, "BW": -1}[op.kind]
            if op.kind == "B":
                pending[device].append(Op("W", op.microbatch, op.chunk))
        time += 1
    length = max(map(len, rows))
    return dataclasses.replace(
        empty, table=tuple((*row, *[None] * (length - len(row))) for row in rows)
    )


def _needs(kind: str, microbatch: int, stage: int, stages: int) -> list[tuple[str, int, int]]:
    """Returns the ops that must end earlier, as (F, B or W; microbatch; stage of the model)."""
    if kind == "F":
        return [("F", microbatch, stage - 1)] if stage else []
    if kind == "W":
        return [("B", microbatch, stage)]
    later = [("B", microbatch, stage + 1)] if stage + 1 < stages else []
    return [("F", microbatch, stage), *later]


def check(schedule: Schedule) -> None:
    """Refuses a table that cannot be executed, or does not compute the gradient of every
    microbatch once.
    """
    table, stages = schedule.table, schedule.stages * schedule.chunks
    _check_sizes(schedule.stages, schedule.microbatches, schedule.chunks)
    if len(table) != schedule.stages or len(set(map(len, table))) != 1:
        raise ValueError(
            f"table must have {schedule.stages} rows of one length, not of lengths"
            f" {list(map(len, table))}"
        )
    done: dict[tuple[str, int, int], tuple[int, int]] = {}
    for device, time, op in cells(schedule):
        where = f"table[{device}][{time}]={op}"
        if op.kind not in KINDS or not (
            0 <= op.microbatch < schedule.microbatches and 0 <= op.chunk < schedule.chunks
        ):
            raise ValueError(
                f"{where} must have a kind of {KINDS}, a microbatch under"
                f" {schedule.microbatches} and a chunk under {schedule.chunks}"
            )
        row = table[device]
        if op.kind == "-" and (
            time + 1 == len(row) or row[time + 1] != dataclasses.replace(op, kind="BW")
        ):
            raise ValueError(f"{where} must be followed by its BW, the second slot of one op")
        if op.kind == "BW" and (
            time == 0 or row[time - 1] != dataclasses.replace(op, kind="-")
        ):
            raise ValueError(
                f"{where} must follow its '-', the first slot of one op: BW takes two slots"
            )
        for part in op.kind.strip("-"):
            key = part, op.microbatch, schedule.stage(device, op.chunk)
            if key in done:
                raise ValueError(
                    f"{where} must not do {part} a second time:"
                    f" table[{done[key][0]}][{done[key][1]}] did it"
                )
            done[key] = device, time
    for part, m, stage in (
        (p, m, s) for s in range(stages) for m in range(schedule.microbatches) for p in "FBW"
    ):
        if (part, m, stage) not in done:
            device, chunk = schedule.place(stage)
            raise ValueError(
                f"table[{device}] must have {part} of microbatch {m}, chunk {chunk} somewhere:"
                " it is missing"
            )
    for device, time, op in cells(schedule):
        if op.kind == "-":
            continue
        start, own = time - (op.kind == "BW"), schedule.stage(device, op.chunk)
        for part, m, stage in _needs(op.kind, op.microbatch, own, stages):
            at, when = done[part, m, stage]
            if when >= start:
                raise ValueError(
                    f"table[{device}][{time}]={op} must start after table[{at}][{when}], {part}"
                    f" of microbatch {m} in stage {stage}, which gives what it needs"
                )


def cells(schedule: Schedule) -> list[tuple[int, int, Op]]:
    """Returns (device, time, op) of all busy cells, by device and time."""
    return [
        (d, t, op)
        for d, row in enumerate(schedule.table)
        for t, op in enumerate(row)
        if op is not None
    ]


def bubble(schedule: Schedule) -> float:
    """Returns the share of idle cells."""
    count = sum(map(len, schedule.table))
    return (count - len(cells(schedule))) / count


def peak_live(schedule: Schedule) -> list[int]:
    """Returns for each device the most microbatches, of any chunk, that are live at once: from
    F until W, or BW.
    """
    peaks = []
    for row in schedule.table:
        steps = [{"F": 1, "W": -1, "BW": -1}.get(op.kind, 0) for op in row if op is not None]
        peaks.append(int(np.cumsum(steps).max()))
    return peaks
