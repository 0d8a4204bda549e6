"""Checks of notebook 09's exercises; `pipeline_loss` has one more.

S stages, M microbatches, v chunks per device, a device d.
"""

import functools
import re
from collections.abc import Iterator

import numpy as np

from course_lib.lessons.check.exercises import Function, Numbered, Numbers, Outcome, change
from course_lib.many_devices.pipeline_parallel import schedules, slots


class Shares(Numbered):
    """Bubbles of the predicted numbers of microbatches."""

    @functools.cached_property
    def fault(self):
        """The first of the two numbers that is not the fewest below 5%."""
        for name, key in (("1f1b", "microbatches"), ("zero_bubble", "split_microbatches")):
            number = self.yours[key]
            if not number == int(number) >= 1:
                return {"kind": "no number", "name": name, "number": number}
            bubble, before = (
                schedules.bubble(schedules.make(name, 8, count)) if count else 1.0
                for count in (int(number), int(number) - 1)
            )
            if bubble >= 0.05 or before < 0.05:
                kind = "too few" if bubble >= 0.05 else "too many"
                return {"kind": kind, "name": name, "number": number, "bubble": bubble}
        return {"kind": None}

    def has(self, kind):
        return self.fault["kind"] == kind


bubble_share = Numbers(
    "bubble_share",
    lambda: {
        "share": schedules.bubble(schedules.one_f_one_b(8, 24)),
        "microbatches": 134,
        "split_microbatches": 45,
    },
    outcome=Shares,
    rows={
        "share": {
            "idle by busy": (7 / 24, lambda it: abs(it.share - 7 / 24) <= 1e-3),
            "percent": (22.6, lambda it: it.share > 1),
            "another": (0.25, lambda it: not abs(it.share - it.right["share"]) < 5e-3),
        },
        "microbatches": {
            "no number": (
                [0, 99.5, dict(split_microbatches=1.5)],
                lambda it: it.has("no number"),
            ),
            "too few": ([133, dict(split_microbatches=44)], lambda it: it.has("too few")),
            "too many": ([200, dict(split_microbatches=134)], lambda it: it.has("too many")),
        },
        "split_microbatches": {},
    },
)


def order(device, S, M):
    """1F1B."""
    first = min(S - device, M)
    ops = [f"F{m}" for m in range(first)]
    for m in range(M):
        ops.append(f"B{m}")
        ops += [f"F{first + m}"] if first + m < M else []
    return ops


def of_all_devices(your_order, S, M):
    orders = [your_order(device, S, M) for device in range(S)]
    if any(order is None for order in orders):
        return None
    as_lists = np.ndarray, Iterator
    return [list(order) if isinstance(order, as_lists) else order for order in orders]


def last_slot(orders):
    """Returns the slots of a step in which each device works in its order, each op as early as
    its inputs allow: one slot for a forward, two for a backward. None if the devices wait for
    each other forever.
    """
    ends: dict[tuple[str, int, int], int] = {}  # when an op of a microbatch in a stage ends
    clock, done = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for d, ops in enumerate(orders):
            while done[d] < len(ops):
                kind, m = ops[done[d]]
                needs = [("F", m, d)] if kind == "B" else []
                neighbour = d - 1 if kind == "F" else d + 1
                if 0 <= neighbour < len(orders):
                    needs.append((kind, m, neighbour))
                if any(need not in ends for need in needs):
                    break
                start = max([clock[d], *(ends[need] for need in needs)])
                clock[d] = ends[kind, m, d] = start + {"F": 1, "B": 2}[kind]
                done[d] += 1
                moved = True
    return max(clock) if done == [len(ops) for ops in orders] else None


class Orders(Outcome):
    """The orders of all devices, in one table."""

    S = property(lambda it: it.args[0])
    M = property(lambda it: it.args[1])

    @functools.cached_property
    def misspelled(self):
        """The first device's value that is no list of ops, in brackets."""
        for ops in self.result:
            spelled = isinstance(ops, list | tuple) and all(
                isinstance(op, str) and re.fullmatch(r"[FB]\d+", op) for op in ops
            )
            if not spelled:
                return [ops]
        return None

    has_whole_backwards = property(lambda it: "BW" in str(it.misspelled))

    @functools.cached_property
    def ops(self):
        return [[(op[0], int(op[1:])) for op in ops] for ops in self.result]

    @functools.cached_property
    def not_once(self):
        """The first device that runs a microbatch never, or twice."""
        for device, ops in enumerate(self.ops):
            for kind in "FB":
                numbers = [m for k, m in ops if k == kind]
                if sorted(numbers) != list(range(self.M)):
                    return {"device": device, "kind": kind, "numbers": numbers}
        return None

    @functools.cached_property
    def too_many(self):
        """The first device with more live microbatches than 1F1B has."""
        peaks = schedules.peak_live(schedules.one_f_one_b(self.S, self.M))
        for device, (ops, fewest) in enumerate(zip(self.ops, peaks, strict=True)):
            live = max(np.cumsum([1 if kind == "F" else -1 for kind, _ in ops]))
            if live > fewest:
                return {"device": device, "live": live, "fewest": fewest}
        return None

    time = property(lambda it: last_slot(it.ops))
    least = property(lambda it: len(schedules.one_f_one_b(it.S, it.M).table[0]))


one_f_one_b = Function(
    "one_f_one_b",
    order,
    cases=lambda: [(4, 8), (3, 5), (4, 2)],
    calls=of_all_devices,
    outcome=Orders,
    rows={
        "BW": (change('f"B', 'f"BW'), lambda it: it.has_whole_backwards),
        "no list": (change('f"B', 'f"b'), lambda it: it.misspelled),
        "once": (change("range(M)", "range(M - 1)"), lambda it: it.not_once),
        "forever": (change("S - device", "S - device - 1"), lambda it: it.time is None),
        "live": (change("S - device", "S"), lambda it: it.too_many),
        "waits": (
            change("S - device", "max(1, S - device - 1)"),
            lambda it: it.time > it.least,
        ),
    },
)


class Stash(Numbered):
    per_microbatch = property(lambda it: it.gpipe / (32 * it.right["activation"]))

    def is_in_mb(self, name):
        """Whether a number is the right one in units of 10**6 bytes."""
        return abs(self.yours[name] / self.right[name] / (2**20 / 1e6) - 1) < 1e-3


def stashes():
    """MiB of the first of eight devices, with four layers and 32 microbatches."""
    activation = 4 * 1024 * 2560 * 2 / 2**20
    live = {
        name: slots.program(schedules.make(schedule, 8, 32)).sizes["stash"]
        for name, schedule in (("gpipe", "gpipe"), ("one_f_one_b", "1f1b"))
    }
    sizes = {name: count * (32 // 8 + 1) * activation for name, count in live.items()}
    return sizes | {"activation": activation, "live": live}


stash = Numbers(
    "stash",
    stashes,
    outcome=Stash,
    rows={
        "gpipe": {
            "per layer": ([640, 2560], lambda it: it.per_microbatch in (1, 4)),
            "bytes": lambda right: right * 2**20,
            "MB": (lambda right: right * 2**20 / 1e6, lambda it: it.is_in_mb("gpipe")),
            "whole model": [32 * 33 * 20, 32 * 32 * 20],
            "another": [25_600, ...],
        },
        "one_f_one_b": {
            "MB": (lambda right: right * 2**20 / 1e6, lambda it: it.is_in_mb("one_f_one_b")),
            "all live": (3200, lambda it: it.one_f_one_b == it.gpipe),
            "live": [100, ...],
        },
    },
)


def overwritten(M, slots):
    """Returns how many backwards of device 0 of 1F1B find another microbatch in their slot."""
    stash: dict[int, int] = {}
    wrong = 0
    for op in schedules.order_1f1b(M, ahead=4, backward="BW"):
        if op.kind == "F":
            stash[op.microbatch % slots] = op.microbatch
        else:
            wrong += stash[op.microbatch % slots] != op.microbatch
    return wrong


class Slots(Numbered):
    suffices = property(lambda it: it.enough >= 1 and not overwritten(8, int(it.enough)))


shared_slots = Numbers(
    "shared_slots",
    lambda: {"wrong_of_4": overwritten(4, 3), "wrong_of_8": overwritten(8, 3), "enough": 4},
    outcome=Slots,
    rows={
        "wrong_of_4": {"none": 0, "another of 4": [4, ...]},
        "wrong_of_8": {"all": 8, "another of 8": [4, ...]},
        "enough": {
            "not fewest": (8, lambda it: it.enough > 4 and it.suffices),
            "too few": ([3, 0], lambda it: not it.suffices),
        },
    },
)


NAMES = {"GPipe": "gpipe", "1F1B": "1f1b", "ZB-H1": "zero_bubble", "ZB-V": "zb_v"}
NAMES |= {"breadth-first": "breadth_first", "depth-first": "depth_first"}
NAMES |= {"DualPipeV": "dualpipe_v"}  # as the notebook's text has them


class Plan(Numbered):
    """A schedule for 64 sequences on eight stages, on devices with room for 24 sequences."""

    schedules = ", ".join(schedules.SCHEDULES)
    named = property(lambda it: NAMES.get(it.schedule, it.schedule))
    sequences, stages, overhead, most_live, most_milliseconds = 64, 8, 0.25, 24, 240
    name = property(lambda it: f"{it.schedule} with M = {it.microbatches} and v = {it.chunks}")

    @functools.cached_property
    def planned(self):
        try:
            return schedules.make(
                self.named, self.stages, int(self.microbatches), int(self.chunks)
            )
        except ValueError as error:
            return error

    chunk = property(
        lambda it: it.sequences / it.microbatches / it.chunks
    )  # sequences, or milliseconds
    live = property(lambda it: max(schedules.peak_live(it.planned)) * it.chunk)
    ops = property(lambda it: 3 * it.microbatches * it.chunks)
    work = property(lambda it: it.ops * it.chunk)
    fixed = property(lambda it: it.ops * it.overhead)

    @property
    def milliseconds(self):
        return slots.lockstep(self.planned, dict.fromkeys("FBW", self.chunk + self.overhead))


fast_pipeline = Numbers(
    "fast_pipeline",
    lambda: {"schedule": "zero_bubble", "microbatches": 32, "chunks": 1},
    words=("schedule",),
    outcome=Plan,
    rows={
        "schedule": {"unknown": ("1F2B", lambda it: it.named not in schedules.SCHEDULES)},
        "microbatches": {
            "no divisor": (
                48,
                lambda it: not it.microbatches >= 1 or it.sequences % it.microbatches,
            )
        },
        "chunks": {
            "no number": (1.9, lambda it: not it.chunks == int(it.chunks) >= 1),
            "no schedule": (
                dict(schedule="1f1b", chunks=2),
                lambda it: isinstance(it.planned, ValueError),
            ),
            "memory": (
                [dict(schedule="gpipe"), dict(microbatches=16)],
                lambda it: it.live > it.most_live,
            ),
            "slow": (
                [dict(schedule="1f1b"), dict(microbatches=64)],
                lambda it: it.milliseconds > it.most_milliseconds,
            ),
        },
    },
)
