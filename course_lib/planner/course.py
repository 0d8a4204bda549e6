"""A configuration of this course as sizes, plan and parameters: memory, bytes sent and seconds
per step by formula, before anything is compiled.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import arguments, training
from course_lib.many_devices import meshes, sharding, strategies
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.many_devices.pipeline_parallel import schedules, slots
from course_lib.many_devices.pipeline_parallel.schedules import Schedule
from course_lib.models import routing
from course_lib.models.attention import IMPLEMENTATIONS
from course_lib.models.parameters import mlp_width
from course_lib.optimizers import OPTIMIZERS
from course_lib.planner import events, memory, price
from course_lib.planner.plan import Leaf, Plan, Shape, Step
from course_lib.planner.price import Breakdown


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes that one device holds and sends, and the time of a step.

    Gradients and parameters travel along "data" while layers compute, as with PyTorch's FSDP
    and MaxText (`time`), or do not (`unhidden`). By these formulas this course's own step lies
    between the two (notebook 8). No step of this course was timed on a cluster.
    """

    axes: Mapping[str, int]  # the mesh, sizes by name, outer to inner
    strategy: Strategy
    parts: int  # microbatches or minibatches of a replica
    # exact: "parameters", "optimizer" and "batch", the arguments of the step; estimated:
    # "gradients", "activations" and "copies" (parameters as layers compute with them)
    bytes: Mapping[str, int]
    sent: Mapping[str, int]  # along each axis
    time: Breakdown
    unhidden: Breakdown
    fits: bool  # into the accelerator's memory

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


@dataclasses.dataclass(frozen=True)
class Program:
    """Parts of a step of this course besides sizes, plan and parameters."""

    config: ConfigDict
    strategy: Strategy
    optimizer: int  # bytes of its state
    waiting: Mapping[str, int] | None  # slots of a pipeline's buffers


def shape_of(config: ConfigDict) -> Shape:
    """Returns the sizes of a configuration's model."""
    model, length, slots_per_token = config.model, config.data.seq_len, 1.0
    if model.num_experts:
        room = routing.capacity(
            length, model.num_experts, model.experts_per_token, model.capacity_factor
        )
        slots_per_token = model.num_experts * room / length
        if model.dropless:
            slots_per_token = float(model.experts_per_token)
    return Shape(
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.head_dim,
        mlp_width(model),
        model.num_outputs,
        length,
        kv_heads=model.num_kv_heads,
        matrices=2 + model.mlp_gate,
        experts=model.num_experts,
        slots=slots_per_token,
        experts_per_token=model.experts_per_token if model.num_experts else 0,
        tied=model.tied_embeddings,
        parallel=model.parallel_block,
        window=model.window,
    )


def plan_of(config: ConfigDict, axes: Mapping[str, int], strategy: Strategy) -> Plan:
    """Returns how this course's program trains a model."""
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
        fused_attention=IMPLEMENTATIONS[model.attention].fused,
        attention_block=IMPLEMENTATIONS[model.attention].block if model.causal_mask else 0,
        sequence_parallel=strategy.sequence,
        tensor_overlap=strategy.overlap != "none",
        sums_each_microbatch=stored,
        gather_again="Block" in model.remat or strategy.gather_again,
        gradient_bytes=width if sharded else stored,
        parameter_bytes=width if sharded else stored,
        embedding_bytes=stored,
        ring_gradient_bytes=4,
        update_bytes=_update_bytes(config),
        muon=OPTIMIZERS[config.optimizer.name].whole
        * (2 + (config.optimizer.weight_decay > 0)),
        dtype=model.dtype,
        schedule=_schedule(strategy, axes["pipe"]) if "pipe" in axes else None,
        chunked_loss=model.loss_chunks > 1,
        dense_dispatch=not model.dropless,
    )


def _recomputed(model: ConfigDict, strategy: Strategy) -> str:
    if "Block" in model.remat:
        return "block"
    if model.remat:
        both = {"MLP", "Attn"} <= set(model.remat)
        return "modules" if both else {"MLP": "mlp", "Attn": "attention"}[model.remat[0]]
    # Activations that came around a ring are kept.
    again = strategy.zero == 3 and strategy.gather_again and strategy.overlap == "none"
    return "gathers" if again else "none"


@functools.cache
def _state(config: FrozenConfigDict) -> training.TrainState:
    return training.build(ConfigDict(config.to_dict())).abstract()[0]


def state_of(config: ConfigDict) -> training.TrainState:
    """The shapes of the train state, computed once for all sizes of a batch."""
    return _state(FrozenConfigDict(in_minibatches(config, 1, batch_size=1)))


def in_minibatches(config: ConfigDict, count: int, **data: int) -> ConfigDict:
    changed = ConfigDict(config.to_dict())
    changed.training.num_minibatches = count
    changed.data.update(data)
    return changed


def _update_bytes(config: ConfigDict) -> float:
    """The parameter and its share of the optimizer's state, read and written."""
    state = state_of(config)
    arrays = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in arrays) / parameters


def _schedule(strategy: Strategy, stages: int) -> Schedule:
    return schedules.make(strategy.schedule, stages, strategy.microbatches, strategy.chunks)


@functools.cache
def _waiting(strategy: Strategy, stages: int) -> Mapping[str, int]:
    return slots.program(_schedule(strategy, stages)).sizes


def step_of(config: ConfigDict, axes: Mapping[str, int], strategy: Strategy) -> Step:
    """Returns the step of a strategy by hand, whose specs say what each device holds."""
    if wrong := {axis: n for axis, n in axes.items() if type(n) is not int or n < 1}:
        raise ValueError(f"axes={wrong} must have whole sizes of at least 1")
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    strategies.check(config, mesh, strategy)
    if strategy.by != "hand":
        raise ValueError(
            f"by={strategy.by!r} must be 'hand' for an estimate: else the compiler decides what"
            " is sent; read it from the ledger of the compiled step"
        )
    check_counted(config)
    _check_stacks(config, axes, strategy)
    state = state_of(config)
    specs, of_gradients = strategies.layout_of(state, mesh, strategy)
    rest, of_rest = (dataclasses.replace(tree, params=None) for tree in (state, specs))
    n = {axis: axes.get(axis, 1) for axis in meshes.AXES}
    return Step(
        shape_of(config),
        plan_of(config, axes, strategy),
        leaves_of(config, n, strategy, state.params, specs.params, of_gradients),
        Program(
            config,
            strategy,
            sum(
                leaf.size * leaf.dtype.itemsize // _parts(spec, n)
                for leaf, spec in zip(jax.tree.leaves(rest), _specs(of_rest), strict=True)
            ),
            _waiting(strategy, axes["pipe"]) if "pipe" in axes else None,
        ),
    )


def check_counted(config: ConfigDict) -> None:
    """Refuses options that no formula counts."""
    policy = config.model.remat_policy if config.model.remat else "nothing"
    for name, value, counted, why in (
        ("optimizer.offload", config.optimizer.offload, False, "the link to the host"),
        ("model.remat_policy", policy, "nothing", "the values that a policy saves"),
        ("training.backward", config.training.backward, "autodiff", "gradients in place"),
    ):
        if value != counted:
            raise ValueError(
                f"{name}={value!r} must be {counted!r} for an estimate: no formula here counts"
                f" {why}"
            )


def _check_stacks(config: ConfigDict, axes: Mapping[str, int], strategy: Strategy) -> None:
    """Refuses Muon where matrices stay cut (`muon.to_stacks`)."""
    cutting = ("tensor", "expert", "data")[: 2 + (strategy.zero > 0)]
    cut, layers = math.prod(axes.get(axis, 1) for axis in cutting), config.model.num_layers
    parts = cut * axes.get("pipe", 1)
    divided = config.model.scan_layers and layers % parts == 0
    if OPTIMIZERS[name := config.optimizer.name].whole and cut > 1 and not divided:
        raise ValueError(
            f"optimizer.name={name!r} must have scanned layers, a multiple of {parts}, for an"
            " estimate: no formula here counts what the compiler sends for matrices that stay"
            f" cut; take model.num_layers={arguments.nearest(layers, parts)} and"
            " model.scan_layers=True"
        )


def _specs(tree: Any) -> list[P]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, P))


def _parts(spec: P, n: Mapping[str, int]) -> int:
    """The number of devices that divide an array."""
    return math.prod(n[axis] for axis in sharding.axes_of(spec))


def leaves_of(
    config: ConfigDict,
    n: Mapping[str, int],
    strategy: Strategy,
    params: Any,
    specs: Any,
    of_gradients: Any,
) -> tuple[Leaf, ...]:
    """Lists parameters as one device holds them; `n`: devices along each axis."""
    model, found = config.model, []
    width = jnp.dtype(model.dtype).itemsize
    module_at_end = "['mlp']" if model.attention_first else "['attn']"
    for (path, leaf), spec, of_gradient in zip(
        jax.tree_util.tree_leaves_with_path(params),
        _specs(specs),
        _specs(of_gradients),
        strict=True,
    ):
        name, axes = jax.tree_util.keystr(path), set(filter(None, spec))
        kernel, inside = "kernel" in name, "['block" in name
        where = "layers" if inside else "head" if kernel else "outside"
        # A rematerialized block gathers all parameters again but the biases that are added
        # last; others gather what products read.
        last = module_at_end in name or model.parallel_block
        again = (kernel or "['router']" in name) and strategy.gather_again
        if "Block" in model.remat:
            again = not (last and "['output_layer']['bias']" in name)
        # of its tokens, or of its heads
        partly = strategy.sequence or "query_norm" in name or "key_norm" in name
        found.append(
            Leaf(
                "experts" if "expert" in axes else where,
                leaf.size / _parts(spec, n),
                stored := leaf.dtype.itemsize,
                width if kernel else stored,
                width if kernel else stored,
                fsdp=n["data"] if "data" in axes else 1,
                zero="data" in set(of_gradient) and "data" not in axes,
                again=again,
                undivided="tensor" not in axes and partly,
                kernel=kernel or (model.tied_embeddings and "['embed']" in name),
                module="MLP" if "['mlp']" in name else "Attn",
            )
        )
    return tuple(found)


def held(step: Step) -> dict[str, int]:
    """Returns the bytes that a device holds, by use."""
    program, data = step.program, step.program.config.data
    replicas = step.plan.size("data") * step.plan.size("fsdp")
    return {
        "parameters": sum(int(leaf.numbers * leaf.stored) for leaf in step.leaves),
        "optimizer": program.optimizer,
        "batch": 3 * 4 * data.batch_size // replicas * data.seq_len,
        **memory.of_course(step, program.config, program.waiting),
    }


def fastest(step: Step, orders: Sequence[Mapping[str, int]], cluster: Cluster) -> Estimate:
    """Estimates a step with the order of its axes that is the fastest; the first one of equals.
    The order changes neither what a device holds nor what it sends.
    """
    plan, alone = step.plan, step.like(data_overlap=False).plan
    as_planned = [
        {axis if axis in plan.axes else "fsdp": order[axis] for axis in order}
        for order in orders
    ]
    priced = price.Priced(step.shape, plan, cluster)
    times = [priced.seconds(axes) for axes in as_planned]
    best = min(range(len(orders)), key=lambda index: times[index].total)
    bytes_held = held(step)
    return Estimate(
        dict(orders[best]),
        step.program.strategy,
        step.plan.microbatches,
        bytes_held,
        events.sent(step),
        times[best],
        price.Priced(step.shape, alone, cluster).seconds(as_planned[best]),
        sum(bytes_held.values()) <= cluster.accelerator.memory_bytes,
    )


def estimate(
    config: ConfigDict, axes: Mapping[str, int], strategy: Strategy, cluster: Cluster
) -> Estimate:
    """Estimates the training step of a strategy that is written by hand: what `planner.held`,
    `sent` and `seconds` say of it, side by side. `axes` are the sizes of the mesh's, outer to
    inner.
    """
    return fastest(step_of(config, axes, strategy), [axes], cluster)
