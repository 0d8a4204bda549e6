"""Estimates a strategy by formula: memory, bytes sent and seconds per step, before anything is
compiled.

    h100s = Cluster(hardware.get("h100"), 64)
    guess = estimate(config, {"data": 8, "tensor": 8}, Strategy(zero=1, sequence=True), h100s)
    print(guess.memory, guess.step, guess.mfu, guess.time.exposed)
    best = choose(config, h100s)[0]

No device is needed. The strategy's specs say which part of each array a device holds, `costs`
computes bytes, and `step_model` seconds.

`time` assumes that gradients and parameters are sent along "data" while layers compute, as
PyTorch's FSDP and MaxText do; `unhidden` assumes that they are not. By these formulas this
course's own step lies between the two: compiled without flags, it sends nothing of ZeRO stage 0
beside matmuls, and about a third of stage 3 (notebook 8 reads this from the program). No step
of this course was timed on a cluster.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import configs, training
from course_lib.many_devices import costs, meshes, step_model, strategies
from course_lib.many_devices.cluster_model import Cluster, check_type
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
      parts: number of microbatches, or minibatches, into which a device along "data" cuts its
        sequences.
      bytes: exact numbers for "parameters", "optimizer" and "batch", the arguments of the step;
        estimates of "gradients", "activations" and "copies" (parameters as layers compute with
        them).
      sent: bytes that a device sends along each axis.
      time: seconds per step, one number per kind of work.
      unhidden: the same, if nothing is sent along "data" while layers compute.
      fits: whether all of `bytes` is at most the accelerator's memory.
    """

    axes: Mapping[str, int]
    strategy: Strategy
    parts: int
    bytes: Mapping[str, int]
    sent: Mapping[str, int]
    time: Breakdown
    unhidden: Breakdown
    fits: bool

    @property
    def arguments(self) -> int:
        """Bytes of the step's arguments on a device."""
        return self.bytes["parameters"] + self.bytes["optimizer"] + self.bytes["batch"]

    @property
    def memory(self) -> int:
        """Bytes in total."""
        return sum(self.bytes.values())

    @property
    def step(self) -> float:
        """Seconds per step."""
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
        experts_per_token=model.experts_per_token if model.num_experts else 0,
        parallel=model.parallel_block,
    )


def plan_of(config: ConfigDict, axes: Mapping[str, int], strategy: Strategy) -> Plan:
    """Returns how this course's program trains a model. Arguments as for `estimate`.

    Raises:
      ValueError: if there is no axis "data".
    """
    if "data" not in axes:
        raise ValueError(f"axes={dict(axes)} must have an axis 'data'; give it size 1")
    model, sharded = config.model, strategy.zero == 3
    width = jnp.dtype(model.dtype).itemsize
    stored = jnp.dtype(config.optimizer.param_dtype).itemsize
    parts = strategy.microbatches * config.training.num_minibatches
    return Plan(
        {"fsdp" if sharded and axis == "data" else axis: n for axis, n in axes.items()},
        batch=config.data.batch_size,
        microbatch=config.data.batch_size // parts // axes["data"] // axes.get("expert", 1),
        chunks=strategy.chunks,
        zero=0 if sharded else strategy.zero,
        recompute=_recomputed(model, strategy),
        fused_attention=model.attention in ("cudnn", "flash"),
        sequence_parallel=strategy.sequence,
        tensor_overlap=strategy.overlap != "none",
        sums_each_microbatch=True,
        gather_again="Block" in model.remat or strategy.gather_again,
        gradient_bytes=width if sharded else stored,
        parameter_bytes=width if sharded else stored,
        embedding_bytes=stored,
        ring_gradient_bytes=4,
        update_bytes=_update_bytes(config),
        dtype=model.dtype,
        schedule=_schedule(strategy, axes["pipe"]) if "pipe" in axes else None,
        chunked_loss=model.loss_chunks > 1,
        dense_dispatch=True,
    )


def _recomputed(model: ConfigDict, strategy: Strategy) -> str:
    """Returns the name, in `plans.RECOMPUTE`, of what the backward pass recomputes."""
    if "Block" in model.remat:
        return "block"
    if model.remat:
        parts = {"MLP": "mlp", "Attn": "attention"}
        return "modules" if set(model.remat) == set(parts) else parts[model.remat[0]]
    # Activations that came around a ring are kept.
    again = strategy.zero == 3 and strategy.gather_again and strategy.overlap == "none"
    return "gathers" if again else "none"


def estimate(
    config: ConfigDict, axes: Mapping[str, int], strategy: Strategy, cluster: Cluster
) -> Estimate:
    """Estimates the training step of a strategy that is written by hand.

    Args:
      config: a configuration; its batch is that of all devices.
      axes: sizes of the mesh's axes, outer to inner: "data", and perhaps others of
        `meshes.AXES`.
      strategy: how they are used.
      cluster: the devices, and the links between them.

    Raises:
      TypeError: if `config` is no configuration, `axes` no mapping, or `cluster` no `Cluster`.
      ValueError: if the strategy is refused (`options.check`), or is left to the compiler,
        which decides by itself; if the optimizer's moments are on the host, or gradients are
        added in place; if the axes do not multiply to the cluster's devices, the accelerator
        has no unit for a product's dtype, or there is no figure for a link.
    """
    _check_types(config, cluster)
    check_type("axes", axes, Mapping, 'a mapping of sizes by name: {"data": 64}')
    _check_counted(config)
    if wrong := {axis: n for axis, n in axes.items() if type(n) is not int or n < 1}:
        raise ValueError(f"axes={wrong} must have whole sizes of at least 1")
    if unknown := set(axes) - set(meshes.AXES):
        raise ValueError(f"axes={dict(axes)} must be of {meshes.AXES}, not {sorted(unknown)}")
    divided = _divided(config, axes, strategy)
    if strategy.by != "hand":
        raise ValueError(
            f"by={strategy.by!r} must be 'hand' for an estimate: the compiler decides what is"
            " sent; read it from the ledger of the compiled step"
        )
    return _estimate(config, axes, strategy, cluster, _bytes(config, axes, strategy, *divided))


def _bytes(
    config: ConfigDict,
    axes: Mapping[str, int],
    strategy: Strategy,
    state: Any,
    param_specs: Any,
    grad_specs: Any,
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes that a device holds by use, and those that it sends along each axis,
    from the shapes and specs that `_divided` returns.
    """
    n = {axis: axes.get(axis, 1) for axis in meshes.AXES}
    step = costs.Step(
        config.model,
        strategy,
        n,
        sequences=config.data.batch_size // n["data"] // n["expert"],
        seq_len=config.data.seq_len,
        minibatches=config.training.num_minibatches,
        piped="pipe" in axes,
        sum_itemsize=jnp.dtype(config.training.accumulator_dtype).itemsize,
    )
    params = costs.leaves(state.params, param_specs.params, grad_specs, n)
    slots_of_time, waiting = _pipeline(strategy, n["pipe"]) if step.piped else (0, None)
    rest, of_rest = (dataclasses.replace(tree, params=None) for tree in (state, param_specs))
    held = {
        "parameters": sum(leaf.bytes for leaf in params),
        "optimizer": sum(leaf.bytes for leaf in costs.leaves(rest, of_rest, of_rest, n)),
        "batch": 3 * 4 * config.data.batch_size // n["data"] * config.data.seq_len,
        "gradients": costs.gradients(step, params),
        "copies": costs.copies(step, params),
        "activations": costs.activations(step, waiting),
    }
    sent = {
        "data": costs.sent_for_gradients(step, params),
        "pipe": costs.sent_between_stages(step, params, slots_of_time),
        "expert": costs.sent_to_experts(step, params),
        "context": costs.sent_around_a_ring(step, params),
        "tensor": costs.sent_inside_layers(step, params),
    }
    return held, {axis: int(size) for axis, size in sent.items()}


def _estimate(
    config: ConfigDict,
    axes: Mapping[str, int],
    strategy: Strategy,
    cluster: Cluster,
    held_and_sent: tuple[dict[str, int], dict[str, int]],
) -> Estimate:
    """Returns an estimate: adds the time of a step to what `_bytes` returns."""
    held, sent = held_and_sent
    shape, plan = shape_of(config), plan_of(config, axes, strategy)
    alone = dataclasses.replace(plan, data_overlap=False)
    return Estimate(
        dict(axes),
        strategy,
        strategy.microbatches if "pipe" in axes else config.training.num_minibatches,
        held,
        sent,
        step_model.breakdown(shape, plan, cluster),
        step_model.breakdown(shape, alone, cluster),
        sum(held.values()) <= cluster.accelerator.memory_bytes,
    )


def _check_types(config: object, cluster: object) -> None:
    check_type("config", config, ConfigDict, "a configuration: configs.get('80gb')")
    check_type("cluster", cluster, Cluster, "a Cluster: Cluster(hardware.get('h100'), 64)")


def _check_counted(config: ConfigDict) -> None:
    """Refuses options that no formula of `costs` and `step_model` counts."""
    if config.optimizer.offload:
        raise ValueError(
            "optimizer.offload=True must be False for an estimate: no formula here counts the"
            " link to the host (notebook 18 does)"
        )
    if config.model.remat and config.model.remat_policy != "nothing":
        raise ValueError(
            f"model.remat_policy={config.model.remat_policy!r} must be 'nothing' for an"
            " estimate: no formula here counts the values that a policy saves"
        )
    if config.training.backward != "autodiff":
        raise ValueError(
            f"training.backward={config.training.backward!r} must be 'autodiff' for an"
            " estimate: the formulas count a minibatch's gradients beside their sum"
        )


def _divided(config: ConfigDict, axes: Mapping[str, int], strategy: Strategy) -> Any:
    """Returns the shapes of the train state, its specs, and the specs of the gradients.

    Raises:
      ValueError: if the strategy is refused, or something does not divide.
    """
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    strategies.check(config, mesh, strategy)
    state = _state(FrozenConfigDict(_with_minibatches(config, 1, batch_size=1)))
    return state, *strategies.layout_of(state, mesh, strategy)


def choose(config: ConfigDict, cluster: Cluster, *, reorder: bool = True) -> list[Estimate]:
    """Estimates strategies for a cluster, and returns those that fit, the fastest first.

    Goes through all meshes data x pipe x tensor that divide the model, with "tensor" no larger
    than the GPUs behind one switch. The order of the axes decides which groups share a host, so
    it takes for each mesh the order with the fastest step. Without a pipeline it tries ZeRO 0,
    1 and 3, and takes for each the number of minibatches that fits and is the fastest. With a
    pipeline it tries only 1F1B with ZeRO 1, one chunk per device, and as many microbatches as
    possible, at most eight per stage. Where "data" does not divide the model's width, only
    ZeRO 0 is left. An axis "tensor" divides the sequence, too. Recomputation and attention stay
    as configured. Axes "context" and "expert", ZeRO 2, rings along "tensor" and interleaved
    pipelines are not tried. Notebook 12 compares what is recommended with some of these.

    Args:
      config: a configuration; its number of minibatches is ignored.
      cluster: the devices, and the links between them.
      reorder: whether to try all orders of the axes. If not, "data" is the outermost and
        "tensor" the innermost, as in the meshes of the training program.

    Returns:
      The estimates; an empty list if nothing fits.

    Raises:
      TypeError: as in `estimate`.
      ValueError: if `reorder` is neither True nor False; the model cannot work on any number
        of devices; or, as in `estimate`, if
        moments are on the host, gradients are added in place, or the accelerator has no figure
        for a link.
    """
    _check_types(config, cluster)
    if type(reorder) is not bool:
        raise ValueError(f"reorder={reorder!r} must be True or False")
    _check_counted(config)
    configs.check(_with_minibatches(config, 1))  # below, errors only mean "does not divide"
    best: dict[Any, Estimate] = {}
    inside_host = _divisors(math.gcd(cluster.count, cluster.per_switch))
    for tensor, pipe in ((t, p) for t in inside_host for p in _divisors(cluster.count // t)):
        axes = {"data": cluster.count // tensor // pipe, "pipe": pipe, "tensor": tensor}
        axes = {axis: size for axis, size in axes.items() if axis == "data" or size > 1}
        for strategy, minibatches in _candidates(config, axes):
            changed = _with_minibatches(config, minibatches)
            try:
                divided = _divided(changed, axes, strategy)
            except ValueError:
                continue
            held, sent = _bytes(changed, axes, strategy, *divided)
            if sum(held.values()) > cluster.accelerator.memory_bytes:
                continue
            order = _fastest_order(changed, axes, strategy, cluster) if reorder else axes
            guess = _estimate(changed, order, strategy, cluster, (held, sent))
            key = (*axes.items(), strategy)
            if key not in best or guess.step < best[key].step:
                best[key] = guess
    return sorted(best.values(), key=lambda guess: guess.step)


def _fastest_order(
    config: ConfigDict, axes: Mapping[str, int], strategy: Strategy, cluster: Cluster
) -> Mapping[str, int]:
    """Returns the axes in the order of the fastest step. The order changes neither what a
    device holds nor what it sends. If orders are equally fast, the first one stays.
    """
    shape = shape_of(config)

    def seconds(order: Mapping[str, int]) -> float:
        return step_model.breakdown(shape, plan_of(config, order, strategy), cluster).total

    return min(map(dict, itertools.permutations(axes.items())), key=seconds)


def _with_minibatches(config: ConfigDict, count: int, **data: int) -> ConfigDict:
    changed = ConfigDict(config.to_dict())
    changed.training.num_minibatches = count
    changed.data.update(data)
    return changed


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def _candidates(config: ConfigDict, axes: Mapping[str, int]) -> list[tuple[Strategy, int]]:
    """Returns strategies for a mesh, each with a number of minibatches."""
    share, sequence = config.data.batch_size // axes["data"], "tensor" in axes
    parts = _divisors(share)
    if "pipe" in axes:
        few = [m for m in parts if m <= 8 * axes["pipe"]]  # a bubble of a ninth
        return [(Strategy(zero=1, sequence=sequence, microbatches=max(few)), 1)] if few else []
    stages = (0, 1, 3) if axes["data"] > 1 else (0,)
    again = not {"MLP", "Attn"} & set(config.model.remat)
    return [
        (Strategy(zero=zero, sequence=sequence, gather_again=again or zero < 3), m)
        for zero in stages
        for m in parts
    ]


@functools.cache
def _state(config: FrozenConfigDict) -> training.TrainState:
    """Returns the shapes of the train state, computed once for all sizes of the batch."""
    return training.build(ConfigDict(config.to_dict())).abstract()[0]


def _update_bytes(config: ConfigDict) -> float:
    """Returns the bytes per parameter that an update reads and writes: the parameter and its
    share of the optimizer's state, without the gradient.
    """
    state = _state(FrozenConfigDict(_with_minibatches(config, 1, batch_size=1)))
    arrays = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in arrays) / parameters


@functools.cache
def _schedule(strategy: Strategy, stages: int) -> Schedule:
    return schedules.make(strategy.schedule, stages, strategy.microbatches, strategy.chunks)


@functools.cache
def _pipeline(strategy: Strategy, stages: int) -> tuple[int, Mapping[str, int]]:
    """Returns the number of time slots, and of the slots of each buffer."""
    schedule = _schedule(strategy, stages)
    return len(schedule.table[0]), slots.program(schedule).sizes
