"""Estimates of a strategy by formula: bytes held, bytes sent and seconds per step, before
anything is compiled.

    h100s = Cluster(hardware.get("h100"), 64)
    found = estimate(config, {"data": 8, "tensor": 8}, Strategy(zero=1, sequence=True), h100s)
    print(found.memory, found.step, found.mfu, found.time.exposed)
    best = choose(config, h100s)[0]

No device is needed. The strategy's specs say what each device holds. The formulas of
`costs` give what is held and sent, those of `step_model` the time of a step.

The time assumes that gradients and parameters travel along "data" while layers compute, as they
do with PyTorch's FSDP or MaxText. This course's own step hides less, as XLA compiles it without
flags: nothing of stage 0, about a third of stage 3 (notebook 8 reads it from the program).
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
from course_lib.many_devices import costs, meshes, options, step_model, strategies
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.many_devices.pipeline_parallel import schedules, slots
from course_lib.many_devices.pipeline_parallel.schedules import Schedule
from course_lib.many_devices.plans import Plan, Shape
from course_lib.many_devices.step_model import Breakdown
from course_lib.models import routing


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes that one device holds and sends, and the time of a step.

    Attributes:
      axes: the mesh, sizes by name, outer to inner.
      strategy: how its axes are used.
      parts: into how many parts a device along "data" cuts its share of the batch:
        microbatches, or minibatches.
      bytes: "parameters", "optimizer" and "batch", which are the arguments of the step,
        exactly; "gradients", "copies" (of parameters, as they are computed with) and
        "activations", about.
      sent: bytes that a device sends along each axis.
      time: seconds of the step by what they are spent on.
      fits: whether all of `bytes` is at most the accelerator's memory.
    """

    axes: Mapping[str, int]
    strategy: Strategy
    parts: int
    bytes: Mapping[str, int]
    sent: Mapping[str, int]
    time: Breakdown
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
        """Seconds of a step."""
        return self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.time.mfu


def shape_of(config: ConfigDict) -> Shape:
    """Returns the sizes of a configuration's model."""
    model, length = config.model, config.data.seq_len
    slots = 1.0
    if model.num_experts:
        room = routing.capacity(
            length, model.num_experts, model.experts_per_token, model.capacity_factor
        )
        slots = model.num_experts * room / length
    return Shape(
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.head_dim,
        model.mlp_expansion * model.hidden_size,
        model.num_outputs,
        length,
        kv_heads=model.num_kv_heads,
        experts=model.num_experts,
        slots=slots,
        parallel=model.parallel_block,
    )


def plan_of(config: ConfigDict, axes: Mapping[str, int], chosen: Strategy) -> Plan:
    """Returns how this course's program trains a model with a strategy.

    Args:
      config: a whole configuration; the batch is that of all devices.
      axes: sizes of the mesh's axes, outer to inner.
      chosen: how they are used.
    """
    model, sharded = config.model, chosen.zero == 3
    width = jnp.dtype(model.dtype).itemsize
    parts = chosen.microbatches * config.training.num_minibatches
    remat = set(model.remat)
    recompute = "full" if "Block" in remat or {"MLP", "Attn"} <= remat else "none"
    if recompute == "none" and remat:
        recompute = "mlp" if "MLP" in remat else "attention"
    schedule = None
    if "pipe" in axes:
        schedule = _schedule(chosen, axes["pipe"])
    return Plan(
        {"fsdp" if sharded and axis == "data" else axis: n for axis, n in axes.items()},
        batch=config.data.batch_size,
        microbatch=config.data.batch_size // parts // axes["data"] // axes.get("expert", 1),
        chunks=chosen.chunks,
        zero=0 if sharded else chosen.zero,
        recompute=recompute,
        fused_attention=model.attention in ("cudnn", "pallas"),
        sequence_parallel=chosen.sequence,
        tensor_overlap=chosen.overlap != "none",
        gradient_bytes=width if sharded else 4,
        parameter_bytes=width if sharded else 4,
        dtype=model.dtype,
        schedule=schedule,
        dense_dispatch=True,
    )


def estimate(
    config: ConfigDict, axes: Mapping[str, int], chosen: Strategy, cluster: Cluster
) -> Estimate:
    """Estimates a training step on a mesh, written by hand.

    Args:
      config: a whole configuration; the batch is that of all devices.
      axes: sizes of the mesh's axes, outer to inner: "data", and perhaps others of
        `meshes.AXES`.
      chosen: how they are used.
      cluster: what the devices are, and what links them.

    Raises:
      ValueError: if the strategy is refused (`options.check`), or is left to the compiler,
        which decides by itself; if the axes do not multiply to the cluster's devices, the
        accelerator has no unit for a product's dtype, or there is no figure for a link.
    """
    if few := {axis: size for axis, size in axes.items() if size < 1}:
        raise ValueError(f"axes={few} must be at least 1 device each")
    if unknown := set(axes) - set(meshes.AXES):
        raise ValueError(f"axes={dict(axes)} must be of {meshes.AXES}, not {sorted(unknown)}")
    grid, piped = AbstractMesh(tuple(axes.values()), tuple(axes)), "pipe" in axes
    training.check(config)
    options.check(config, grid, chosen)
    if chosen.by != "hand":
        raise ValueError(
            f"by={chosen.by!r} must be 'hand' for an estimate: a compiler sends what it likes;"
            " read the ledger"
        )
    n = {axis: axes.get(axis, 1) for axis in meshes.AXES}
    parts = chosen.microbatches if piped else config.training.num_minibatches
    state = _state(_of_one(config))
    held, kept = strategies.layout_of(state, config, grid, chosen)
    params = costs.leaves(state.params, held.params, kept, n)
    # What a device computes at once.
    layers = config.model.num_layers // n["pipe"] // chosen.chunks
    sequences = config.data.batch_size // n["data"] // n["expert"]
    tokens = sequences // parts * config.data.seq_len // n["context"]
    residual = tokens * config.model.hidden_size * jnp.dtype(config.model.dtype).itemsize
    residual //= n["tensor"] if chosen.sequence else 1
    slots_of_time, waiting = _pipeline(chosen, n["pipe"]) if piped else (0, 0)
    rest, of_rest = (dataclasses.replace(tree, params=None) for tree in (state, held))
    held_bytes = {
        "parameters": sum(leaf.bytes for leaf in params),
        "optimizer": sum(leaf.bytes for leaf in costs.leaves(rest, of_rest, of_rest, n)),
        "batch": 3 * 4 * config.data.batch_size // n["data"] * config.data.seq_len,
        "gradients": costs.gradients(chosen, params, n["data"], summed=parts > 1 or piped),
        "copies": costs.copies(config, chosen, params, layers, n),
        "activations": (
            waiting * residual + costs.activations(config, layers, tokens, residual, n)
        ),
    }
    sent = {
        "data": costs.sent_for_gradients(config, chosen, params, n["data"]),
        "pipe": costs.sent_between_stages(params, slots_of_time, residual, n["pipe"]),
        "expert": costs.sent_to_experts(config, params, n),
        "context": costs.sent_around_a_ring(config, params, n),
        "tensor": costs.sent_inside_layers(config, chosen, params, n, parts, piped),
    }
    return Estimate(
        dict(axes),
        chosen,
        parts,
        held_bytes,
        {axis: int(size) for axis, size in sent.items()},
        step_model.breakdown(shape_of(config), plan_of(config, axes, chosen), cluster),
        sum(held_bytes.values()) <= cluster.accelerator.memory_bytes,
    )


def choose(config: ConfigDict, cluster: Cluster) -> list[Estimate]:
    """Estimates the strategies for a cluster: those that fit, by the time of a step.

    Goes through all grids data x pipe x tensor that divide the model, with "tensor" inside a
    host. Without a pipeline ZeRO 0, 1 and 3, with that number of minibatches that is fastest
    among those that fit; with one only 1F1B, one chunk a device, with ZeRO 1 and as many
    microbatches as there can be, at most eight a stage. Where "data" does not divide the
    model's width, only ZeRO 0 is left. Where there is an axis "tensor", it divides the sequence
    too.

    Args:
      config: a whole configuration; its own number of minibatches does not count.
      cluster: what the devices are, and what links them.

    Returns:
      Estimates, the fastest first; none if nothing fits.

    Raises:
      ValueError: if the model cannot work on any number of devices; as `estimate`, if the
        accelerator has no figure for a link.
    """
    count = cluster.count
    found, whole = [], ConfigDict(config.to_dict())
    whole.training.num_minibatches = 1
    training.check(whole)  # so that what is refused below only does not divide
    hosted = _divisors(math.gcd(count, cluster.per_switch))
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
            found.append(estimate(given, axes, chosen, cluster))
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
def _schedule(chosen: Strategy, stages: int) -> Schedule:
    return schedules.make(chosen.schedule, stages, chosen.microbatches, chosen.chunks)


@functools.cache
def _pipeline(chosen: Strategy, stages: int) -> tuple[int, int]:
    """Returns slots of time, and how many activations wait on a device."""
    planned = _schedule(chosen, stages)
    return len(planned.table[0]), sum(slots.program(planned).sizes.values())
