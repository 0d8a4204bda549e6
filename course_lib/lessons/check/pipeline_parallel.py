"""Checks of notebook 09's exercises. One of them runs on four devices.

S stages, M microbatches, v chunks per device, a device d.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.exercises import Function, Numbered, Numbers, Outcome
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices, normal
from course_lib.many_devices import meshes
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
            "idle by busy": (7 / 24, lambda it: abs(it.yours["share"] - 7 / 24) <= 1e-3),
            "percent": (22.6, lambda it: it.yours["share"] > 1),
            "another": (
                0.25,
                lambda it: not abs(it.yours["share"] - it.right["share"]) < 5e-3,
            ),
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


def order(device, S, M, *, ahead=lambda device, S: S - device, count=lambda M: M, spell=str):
    """1F1B, or what becomes of it with another number of forwards ahead."""
    M = count(M)
    first = min(ahead(device, S), M)
    ops = [f"F{m}" for m in range(first)]
    for m in range(M):
        ops.append(f"B{m}")
        ops += [f"F{first + m}"] if first + m < M else []
    return [spell(op) for op in ops]


def of_all_devices(your_order, S, M):
    orders = [your_order(device, S, M) for device in range(S)]
    return None if None in orders else orders


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
    last = property(lambda it: it.M - 1)
    where = property(lambda it: f"S = {it.S}, M = {it.M}")

    @functools.cached_property
    def misspelled(self):
        """What the first device has that has no list of ops, in brackets."""
        for ops in self.result:
            spelled = isinstance(ops, list | tuple) and all(
                isinstance(op, str) and re.fullmatch(r"[FB]\d+", op) for op in ops
            )
            if not spelled:
                return [ops]
        return None

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
    name=None,
    outcome=Orders,
    rows={
        "no list": (dict(spell=str.lower), lambda it: it.misspelled),
        "once": (dict(count=lambda M: M - 1), lambda it: it.not_once),
        "forever": (dict(ahead=lambda device, S: S - device - 1), lambda it: it.time is None),
        "live": (
            [dict(ahead=lambda device, S: 100), dict(ahead=lambda device, S: S)],
            lambda it: it.too_many,
        ),
        "waits": (
            dict(ahead=lambda device, S: max(1, S - device - 1)),
            lambda it: it.time > it.least,
        ),
    },
)

STAGES_OF_GPIPE, MICROBATCHES = 4, 6
TO_NEXT = [(stage, stage + 1) for stage in range(STAGES_OF_GPIPE - 1)]


def over_pipe(x):
    return jax.lax.psum(x, "pipe")


def pipeline(kernel, x, y, *, total=over_pipe, scale=1, backward=lambda x: x, pass_on=None):
    """GPipe on one of four devices."""
    S, stage = STAGES_OF_GPIPE, jax.lax.axis_index("pipe")
    M = len(x)
    pass_on = pass_on or (lambda h: jax.lax.ppermute(h, "pipe", TO_NEXT))

    def slot(carry, time):
        arrived, error = carry
        h = jnp.where(stage == 0, x[time % M], backward(arrived))
        h = h + jnp.tanh(h @ kernel[0])
        is_last = (stage == S - 1) & (time >= S - 1)
        error += jnp.where(is_last, jnp.sum((h - y[(time - S + 1) % M]) ** 2), 0.0)
        return (pass_on(h), error), None

    start = meshes.vary((jnp.zeros(x.shape[1:]), jnp.zeros(())), "pipe")
    (_, error), _ = jax.lax.scan(slot, start, jnp.arange(M + S - 1))
    return total(scale * error)


def on_one_device(kernels, x, y, residual=1):
    for kernel in kernels:
        x = residual * x + jnp.tanh(x @ kernel)
    return jnp.sum((x - y) ** 2)


def gathered(change=lambda *arrays: arrays, **options):
    """One device's loss of other kernels, inputs or labels, on each device."""

    def loss(kernel, x, y):
        kernels = jax.lax.all_gather(kernel[0], "pipe")
        return jax.lax.pmean(on_one_device(*change(kernels, x, y), **options), "pipe")

    return loss


def whole_batch(kernel, x, y):
    """Passes all six microbatches on at once."""
    return pipeline(kernel, x.reshape(1, -1, 8), y.reshape(1, -1, 8))


def everywhere(h):
    """Sends each activation to all devices, which keep one."""
    stages = jnp.arange(STAGES_OF_GPIPE)[:, None, None]
    sent = jnp.where(stages == jax.lax.axis_index("pipe") + 1, h, 0)
    return meshes.vary(over_pipe(sent)[jax.lax.axis_index("pipe")], "pipe")


class Losses(OnDevices):
    """The loss of each device, and what the gradient sends."""

    M = MICROBATCHES
    shape = property(lambda it: np.shape(it.result)[1:])
    loss = property(lambda it: float(it.result[0]))
    wanted = property(lambda it: float(it.right[0]))

    def is_loss(self, loss):
        return abs(self.loss - loss) <= 1e-4 * abs(loss)

    are_right = property(lambda it: np.abs(it.result - it.right) < 1e-4 * it.right)

    @property
    def divided_by(self):
        _, x, _ = self.args
        counts = self.M, x[0].size, x.size, *x[0].shape
        return next((count for count in counts if self.is_loss(self.wanted / count)), None)

    @property
    def count(self):
        """How many of the first microbatches are in the loss, None if it is not their loss."""
        kernels, x, y = self.args
        losses = {n: on_one_device(kernels, x[:n], y[:n]) for n in range(1, self.M)}
        return next((n for n, loss in losses.items() if self.is_loss(loss)), None)

    activation = property(lambda it: it.args[1][0].nbytes)
    slots = property(lambda it: 2 * (it.M + STAGES_OF_GPIPE - 1))  # forward and backward
    passed = property(lambda it: it.both.payload("collective-permute", "pipe") // it.activation)
    enough = property(lambda it: it.slots * it.activation)


def six_microbatches():
    kernels, x, y = normal(3, (4, 8, 8), (6, 2, 8), (6, 2, 8))
    return [(np.float32(0.3) * kernels, x, y)]


gpipe = DeviceFunction(
    "gpipe",
    pipeline,
    one_device=on_one_device,
    cases=six_microbatches,
    axes={"pipe": STAGES_OF_GPIPE},
    in_specs=(P("pipe"), P(), P()),
    stacked=True,
    name=None,
    outcome=Losses,
    rows={
        "no number": (lambda kernel, x, y: x, lambda it: it.shape != ()),
        "last alone": (
            dict(total=lambda x: x),
            lambda it: it.are_right[-1] and not it.are_right.all(),
        ),
        "quarter": dict(scale=1 / 4),
        "divided": (dict(scale=1 / 6), lambda it: it.divided_by),
        "other y": [
            gathered(lambda w, x, y, s=s: (w, x, jnp.roll(y, s, axis=0))) for s in range(1, 6)
        ],
        "no residual": gathered(residual=0),
        "zeros": gathered(lambda w, x, y: (w[-1:], 0 * x, y)),
        "one x": gathered(lambda w, x, y: (w, jnp.broadcast_to(x[:1], x.shape), y)),
        "y of slot": gathered(lambda w, x, y: (w, x, y[np.array([3, 4, 5, 5, 5, 5])])),
        "without first": gathered(lambda w, x, y: (w, x[1:], y[1:])),
        "first ones": (
            [gathered(lambda w, x, y, n=n: (w, x[:n], y[:n])) for n in range(1, 6)],
            lambda it: it.count,
        ),
        "too much": (dict(scale=2), lambda it: it.loss >= it.wanted * (1 + 1e-4)),
        "another": (dict(scale=0.9), lambda it: not it.are_right.all()),
        "gradient": (
            dict(backward=jax.lax.stop_gradient),
            lambda it: not it.gradient_is_right,
        ),
        "gathered": (gathered(), lambda it: it.both.payload("all-gather")),
        "passed on": (whole_batch, lambda it: it.passed > it.slots),
        "sends more": (
            dict(pass_on=everywhere),
            lambda it: not it.passed or it.both.payload() > it.enough + 64,  # the loss
        ),
    },
)


class Stash(Numbered):
    """Activations, in MiB."""

    per_microbatch = property(lambda it: it.yours["gpipe"] / (32 * it.right["activation"]))


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
            "whole model": 32 * 33 * 20,
            "another": [25_600, ...],
        },
        "one_f_one_b": {
            "all live": (3200, lambda it: it.yours["one_f_one_b"] == it.yours["gpipe"]),
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
    """Whether some slots are enough."""

    enough = property(lambda it: it.yours["enough"])
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


class Plan(Numbered):
    """A schedule for 64 sequences on eight stages, on devices with room for 24 sequences."""

    schedules = ", ".join(schedules.SCHEDULES)
    sequences, stages, overhead, most_live, most_milliseconds = 64, 8, 0.25, 24, 240
    schedule = property(lambda it: it.yours["schedule"])
    M = property(lambda it: it.yours["microbatches"])
    v = property(lambda it: it.yours["chunks"])
    name = property(lambda it: f"{it.schedule} with M = {it.M} and v = {it.v}")

    @functools.cached_property
    def planned(self):
        try:
            return schedules.make(self.schedule, self.stages, int(self.M), int(self.v))
        except ValueError as error:
            return error

    chunk = property(lambda it: it.sequences / it.M / it.v)  # sequences, or milliseconds
    live = property(lambda it: max(schedules.peak_live(it.planned)) * it.chunk)
    ops = property(lambda it: 3 * it.M * it.v)
    work = property(lambda it: it.ops * it.chunk)
    fixed = property(lambda it: it.ops * it.overhead)
    bubble = property(lambda it: it.milliseconds - it.work - it.fixed)

    @property
    def milliseconds(self):
        return slots.lockstep(self.planned, dict.fromkeys("FBW", self.chunk + self.overhead))


fast_pipeline = Numbers(
    "fast_pipeline",
    lambda: {"schedule": "zero_bubble", "microbatches": 32, "chunks": 1},
    words=("schedule",),
    outcome=Plan,
    rows={
        "schedule": {
            "unknown": ("1F1B", lambda it: it.schedule not in schedules.SCHEDULES),
        },
        "microbatches": {
            "no divisor": (48, lambda it: not it.M >= 1 or it.sequences % it.M),
        },
        "chunks": {
            "no number": (1.9, lambda it: not it.v == int(it.v) >= 1),
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
