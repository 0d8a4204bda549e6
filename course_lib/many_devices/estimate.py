"""What a strategy would need, by formula: bytes held, bytes sent and seconds of a step, before
anything is compiled.

    axes, h100 = {"data": 64, "pipe": 12, "tensor": 8}, hardware.get("h100")
    found = estimate(config, axes, Strategy(zero=1, ...), h100)
    print(found.memory, found.step, found.mfu)
    best = choose(config, h100, 64)[0]

No device is needed: who holds what is read from the specs of the strategy, products are counted
by `measure.flops`, and what is sent follows from both, by the formulas of `costs` (Narayanan et
al., 2021, https://arxiv.org/abs/2104.04473, section 3; Korthikanti et al., 2022,
https://arxiv.org/abs/2205.05198; https://jax-ml.github.io/scaling-book/training).

Times are at peak rates, and neither a product nor a link reaches its peak. What takes time
beside products and links is not there at all: the softmax of attention, norms, the optimizer,
latencies. The bubble is that of the schedule's table, where nobody waits for a neighbour
without need; in the program of `pipeline` they do: `slots.lockstep` says how long.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import training
from course_lib.many_devices import costs, meshes, options, strategies
from course_lib.many_devices.options import Strategy
from course_lib.many_devices.pipeline_parallel import schedules, slots
from course_lib.measure import virtual
from course_lib.measure.hardware import Accelerator

AXES = ("data", "pipe", "tensor")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one device holds, sends and waits for in a step.

    Attributes:
      axes: the mesh, sizes by name, outer to inner.
      strategy: how its axes are used.
      parts: into how many parts a device along "data" cuts its share of the batch:
        microbatches, or minibatches.
      bytes: "parameters", "optimizer" and "batch", which are the arguments of the step,
        exactly; "gradients", "copies" (of parameters, as they are computed with) and
        "activations", about.
      sent: along each axis, in bytes.
      seconds: "products" at the peak rate, with what is computed again, on the device that has
        most; "bubble", in which it waits; "data", "pipe" and "tensor", what is sent along an
        axis by its link.
      model_seconds: a device's share of the products that the model needs, at the peak rate:
        what MFU counts.
      fits: whether all of `bytes` is less than the accelerator's memory.
    """

    axes: Mapping[str, int]
    strategy: Strategy
    parts: int
    bytes: Mapping[str, int]
    sent: Mapping[str, int]
    seconds: Mapping[str, float]
    model_seconds: float
    fits: bool

    @property
    def arguments(self) -> int:
        """Bytes of the arguments of the step on a device."""
        return self.bytes["parameters"] + self.bytes["optimizer"] + self.bytes["batch"]

    @property
    def memory(self) -> int:
        """Bytes in all."""
        return sum(self.bytes.values())

    @property
    def step(self) -> float:
        """Seconds of a step if nothing overlaps."""
        return sum(self.seconds.values())

    @property
    def floor(self) -> float:
        """Seconds of a step if all that is sent is hidden behind products, or the products
        behind it.
        """
        products, tensor = self.seconds["products"], self.seconds["tensor"]
        # How long a pipeline waits for each second of its slots.
        waiting = self.seconds["bubble"] / (products + tensor)
        return max(
            max(products, tensor) * (1 + waiting), self.seconds["data"], self.seconds["pipe"]
        )

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of `step`."""
        return self.model_seconds / self.step


def estimate(
    config: ConfigDict, axes: Mapping[str, int], chosen: Strategy, accelerator: Accelerator
) -> Estimate:
    """Estimates a training step on a mesh, written by hand.

    Args:
      config: a whole configuration; the batch is that of all devices.
      axes: sizes of the mesh's axes, outer to inner: "data", and perhaps "pipe" and "tensor".
      chosen: how they are used.
      accelerator: what each device is.

    Raises:
      ValueError: if the strategy is refused (`options.check`), has no formula here (experts,
        contexts, zero-bubble), or is left to the compiler, which decides by itself; if the
        accelerator has no unit for a product's dtype, or there is no figure for a link.
    """
    if few := {axis: size for axis, size in axes.items() if size < 1}:
        raise ValueError(f"axes={few} must be at least 1 device each")
    if (unknown := set(axes) - set(AXES)) or config.model.num_experts:
        raise ValueError(
            f"axes={dict(axes)}, num_experts={config.model.num_experts} must be of {AXES} and"
            f" 0: there is no formula here for {' and '.join(sorted(unknown)) or 'experts'};"
            " compile the step, and read memory and ledger"
        )
    if chosen.schedule == "zero_bubble":
        raise ValueError(
            "schedule='zero_bubble' must be another for an estimate: its W computes again what"
            " its B found, and there is no formula here for that; compile the step, and read"
            " memory and ledger"
        )
    grid, piped = AbstractMesh(tuple(axes.values()), tuple(axes)), "pipe" in axes
    training.check(config)
    options.check(config, grid, chosen)
    if chosen.by != "hand":
        raise ValueError(
            f"by={chosen.by!r} must be 'hand' for an estimate: a compiler sends what it likes;"
            " read the ledger"
        )
    n = {axis: axes.get(axis, 1) for axis in AXES}
    parts = chosen.microbatches if piped else config.training.num_minibatches
    frozen = _of_one(config)
    state = _state(frozen)
    held, kept = strategies.layout_of(state, config, grid, chosen)
    params = costs.leaves(state.params, held.params, kept, n)
    time, waiting, idle = _pipeline(chosen, n["pipe"]) if piped else (0, 0, 0.0)
    # What a device computes at once.
    layers = config.model.num_layers // n["pipe"] // chosen.chunks
    tokens = config.data.batch_size // n["data"] // parts * config.data.seq_len
    residual = tokens * config.model.hidden_size * jnp.dtype(config.model.dtype).itemsize
    residual //= n["tensor"] if chosen.sequence else 1
    rest, of_rest = (dataclasses.replace(tree, params=None) for tree in (state, held))
    held_bytes = {
        "parameters": sum(leaf.bytes for leaf in params),
        "optimizer": sum(leaf.bytes for leaf in costs.leaves(rest, of_rest, of_rest, n)),
        "batch": 3 * 4 * config.data.batch_size // n["data"] * config.data.seq_len,
        "gradients": costs.gradients(chosen, params, n["data"], summed=parts > 1 or piped),
        "copies": costs.copies(config, chosen, params, layers, n),
        "activations": (
            waiting * residual
            + costs.activations(config, layers, tokens, residual, n["tensor"])
        ),
    }
    outside = sum(leaf.bytes for leaf in params if "['block" not in leaf.path)
    sent = {
        "data": costs.sent_for_gradients(config, chosen, params, n["data"]),
        "pipe": (
            2 * time * residual + 2 * (n["pipe"] - 1) / n["pipe"] * outside
            if n["pipe"] > 1
            else 0.0
        ),
        "tensor": costs.sent_inside_layers(config, chosen, params, n, parts, piped),
    }
    bandwidth = {link.axis: link.bandwidth for link in meshes.links(axes, accelerator)}
    for axis in sent:
        if sent[axis] and bandwidth[axis] is None:
            raise ValueError(
                f"accelerator={accelerator.name!r} must have a figure for its network: axis"
                f" {axis!r} crosses it"
            )
    of_model, products = costs.products(
        frozen, config.data.batch_size / n["data"], accelerator, n, piped
    )
    seconds = {"products": products} | {
        axis: sent[axis] / bandwidth[axis] if sent[axis] else 0.0 for axis in AXES
    }
    seconds["bubble"] = idle / (1 - idle) * (products + seconds["tensor"])
    fits = sum(held_bytes.values()) <= accelerator.memory_bytes
    return Estimate(
        dict(axes),
        chosen,
        parts,
        held_bytes,
        {a: int(b) for a, b in sent.items()},
        seconds,
        of_model,
        fits,
    )


def choose(config: ConfigDict, accelerator: Accelerator, count: int) -> list[Estimate]:
    """Estimates the strategies for a number of devices: those that fit, by the time of a step.

    Goes through all grids data x pipe x tensor that divide the model, with "tensor" inside of a
    host. Without a pipeline ZeRO 0, 1 and 3, with that number of minibatches that is fastest
    among those that fit; with one only 1F1B, one chunk a device, with ZeRO 1 and as many
    microbatches as there can be, at most eight a stage. Where "data" does not divide the
    model's width, only ZeRO 0 is left. Where there is an axis "tensor", it divides the sequence
    too.

    Args:
      config: a whole configuration; its own number of minibatches does not count.
      accelerator: what each device is.
      count: how many there are.

    Returns:
      Estimates, the fastest first; none if nothing fits.

    Raises:
      ValueError: if there is no device, or the model cannot work on any number of them; as
        `estimate`, if the accelerator has no figure for a link.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1 device")
    found, whole = [], ConfigDict(config.to_dict())
    whole.training.num_minibatches = 1
    training.check(whole)  # so that what is refused below only does not divide
    hosted = _divisors(
        math.gcd(count, virtual.GPUS_PER_HOST) if count > virtual.GPUS_PER_HOST else count
    )
    for tensor, pipe in ((t, p) for t in hosted for p in _divisors(count // t)):
        axes = {"data": count // tensor // pipe, "pipe": pipe, "tensor": tensor}
        axes = {axis: size for axis, size in axes.items() if axis == "data" or size > 1}
        for chosen, minibatches in _candidates(config, axes):
            given = ConfigDict(config.to_dict())
            given.training.num_minibatches = minibatches
            grid = AbstractMesh(tuple(axes.values()), tuple(axes))
            try:
                training.check(given)
                options.check(given, grid, chosen)
                strategies.layout_of(_state(_of_one(given)), given, grid, chosen)
            except ValueError:  # the model does not divide, or, with ZeRO, a parameter
                continue
            found.append(estimate(given, axes, chosen, accelerator))
    fitting = sorted((each for each in found if each.fits), key=lambda each: each.step)
    best: dict[Any, Estimate] = {}
    for each in fitting:
        best.setdefault((tuple(each.axes.items()), each.strategy), each)
    return list(best.values())


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _candidates(config: ConfigDict, axes: Mapping[str, int]) -> list[tuple[Strategy, int]]:
    """Returns strategies for a grid, each with a number of minibatches."""
    share, sequence = config.data.batch_size // axes["data"], "tensor" in axes
    parts = _divisors(share)
    if "pipe" in axes:
        few = [m for m in parts if m <= 8 * axes["pipe"]]  # a bubble of a ninth, as tables go
        return [(Strategy(zero=1, sequence=sequence, microbatches=max(few)), 1)] if few else []
    stages = (0, 1, 3) if axes["data"] > 1 else (0,)
    again = not {"MLP", "Attn"} & set(config.model.remat)
    return [
        (Strategy(zero=zero, sequence=sequence, gather_again=again or zero < 3), m)
        for zero in stages
        for m in parts
    ]


def _of_one(config: ConfigDict) -> FrozenConfigDict:
    """Returns the same for one sequence: what does not depend on their number is computed once
    for all.
    """
    one = ConfigDict(config.to_dict())
    one.data.batch_size = one.training.num_minibatches = 1
    return FrozenConfigDict(one)


@functools.cache
def _state(config: FrozenConfigDict) -> training.TrainState:
    return training.build(ConfigDict(config.to_dict())).abstract()[0]


@functools.cache
def _pipeline(chosen: Strategy, stages: int) -> tuple[int, int, float]:
    """Returns slots of time, how many activations wait on a device, and the share of time in
    which it idles.
    """
    planned = schedules.make(chosen.schedule, stages, chosen.microbatches, chosen.chunks)
    return (
        len(planned.table[0]),
        sum(slots.program(planned).sizes.values()),
        schedules.bubble(planned),
    )
