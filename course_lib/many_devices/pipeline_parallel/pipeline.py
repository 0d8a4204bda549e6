"""Pipeline parallelism: each device has some of the layers, and microbatches pass through the
devices.

`gradient` executes the table of any schedule, slot by slot (`jax.lax.scan`). In each slot a
device runs one op, F, B or W (`stage`), then passes an activation to the next device on the
ring and a gradient to the previous one. The table sets the order of the backward pass; JAX
differentiates one layer at a time, and `split` cuts that into F, B and W, which compute nothing
twice. A microbatch's activations are stored from its F to its W. If the model rematerializes
its layers, only their inputs are stored (Huang et al., 2018, https://arxiv.org/abs/1811.06965).

One program runs on all devices, and that has a price. All devices have the parameters of
embedding and head, though only the first and the last use them; their gradients are summed over
"pipe" once per step. Every slot sends both arrays, even if nobody needs them. Neighbours wait
for each other, so a slot lasts as long as the longest op in it: if F, B and W last equally
long, a step lasts as long as its table, and if B recomputes, longer (`slots.lockstep`).
Parameters of layers never move.

    sent per step per device, along "pipe"    2 * slots * activation bytes of a microbatch, and
                                              2 (S-1)/S of the gradient bytes of embedding and
                                              head
    stored per device                         the saved values of as many microbatches as are
                                              live, and those that B passes on to W
                                              (`slots.program`)
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from course_lib import training
from course_lib.arguments import nearest
from course_lib.many_devices import meshes, sharding
from course_lib.many_devices.axis import Asked, Axis
from course_lib.many_devices.collectives import shift
from course_lib.many_devices.meshes import vary
from course_lib.many_devices.pipeline_parallel import (
    V_SHAPED,
    schedules,
    slots,
    split,
    stage,
)
from course_lib.many_devices.pipeline_parallel.schedules import Schedule
from course_lib.models.transformer import Parts
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn

PyTree = Any

AXIS = "pipe"


def loss_of_head(parts: Parts, score: Callable[..., Any] = training.cross_entropy) -> LossFn:
    """Returns the loss as a function of the head's parameters, on a batch whose inputs are
    activations.
    """
    return training.next_token_loss(lambda params, x, rng: parts.head(params, x), score)


def gradient(
    loss_fn: LossFn,
    parts: Parts,
    mesh: Mesh,
    param_specs: PyTree,
    schedule: Schedule,
    grad_specs: PyTree = None,
) -> GradFn:
    """Returns a gradient function that executes a schedule; arguments as for `count`."""
    counted = count(loss_fn, parts, mesh, param_specs, schedule, grad_specs)
    return lambda params, batch, rng: counted(params, batch, rng)[:2]


def loss(
    loss_fn: LossFn, parts: Parts, mesh: Mesh, param_specs: PyTree, schedule: Schedule
) -> LossFn:
    """Returns the loss function of the model on arrays that are spread over the mesh: it runs
    the forwards of a schedule. Arguments and errors as for `gradient`.
    """

    def on_one_device(params: PyTree, batch: PyTree, rng: Any) -> tuple[Array, PyTree]:
        state = _execute(loss_fn, parts, slots.forward(schedule), params, batch, rng)
        metrics = jax.lax.psum(state.metrics, ("data", AXIS))
        total, count = metrics["loss"]
        return total / gradient_accumulation.nonzero(count), metrics

    return _spread(on_one_device, mesh, schedule, param_specs, (P(), P()))


def count(
    loss_fn: LossFn,
    parts: Parts,
    mesh: Mesh,
    param_specs: PyTree,
    schedule: Schedule,
    grad_specs: PyTree = None,
) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
    """Returns `counted(params, batch, rng) -> (grads, metrics, counts)`, which executes a
    schedule and counts while it runs. `counts["slots"]` has the slots of time by kind, "idle",
    "F", "B" and "W", `counts["peak_live"]` the most slots of the stash in use at once: int32
    [S] each, by device along "pipe".

    Each device along "data" takes its share of the batch, and cuts it into M microbatches. Each
    stage draws dropout from its own key for each microbatch, and from the same key when it runs
    again: `rng` with the device's index along "data", the microbatch and the stage folded in.

    Args:
      loss_fn: the loss of the head, from `loss_of_head`.
      parts: the model, from `transformer.parts`.
      mesh: with the axes "data" and "pipe".
      param_specs: specs of the parameters, whose layers lie as `to_stages` places them.
      schedule: any legal schedule with as many stages as "pipe" has devices.
      grad_specs: specs of the returned gradients, cut over "data" with stage 1 of ZeRO. None:
        those of the parameters.
    """
    grad_specs = param_specs if grad_specs is None else grad_specs

    def on_one_device(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree, PyTree]:
        state = _execute(loss_fn, parts, schedule, params, batch, rng)
        idle = len(schedule.table[0]) - state.taken.sum()
        taken = state.taken.at[0].set(idle)[:, None]
        counts = {
            "slots": dict(zip(slots.program(schedule).kinds, taken, strict=True)),
            "peak_live": state.peak[None],
        }
        return *_sum(state, params, param_specs, grad_specs), counts

    return _spread(on_one_device, mesh, schedule, param_specs, (grad_specs, P(), P(AXIS)))


def _spread(
    on_one_device: Callable[..., PyTree],
    mesh: Mesh,
    schedule: Schedule,
    param_specs: PyTree,
    out_specs: PyTree,
) -> Callable[..., PyTree]:
    if schedule.stages != (size := mesh.shape[AXIS]):
        raise ValueError(
            f"stages={schedule.stages} must be the number of devices along the mesh axis"
            f" 'pipe': {size}"
        )
    schedules.check(schedule)
    return meshes.shard_map(
        on_one_device, mesh=mesh, in_specs=(param_specs, P("data"), P()), out_specs=out_specs
    )


def _execute(
    loss_fn: LossFn,
    parts: Parts,
    schedule: Schedule,
    params: PyTree,
    batch: PyTree,
    rng: Any,
) -> stage.State:
    """Executes a schedule on one device; returns its state, not yet summed over devices."""
    program = slots.program(schedule)
    device, x = _device(loss_fn, parts, schedule, params, batch, rng)
    runs = {"F": device.forward, "B": device.backward, "W": device.weight_gradient}
    if "B" not in program.kinds:
        runs["F"] = device.evaluate

    def slot(state: stage.State, op: PyTree) -> tuple[stage.State, None]:
        for number, kind in enumerate(program.kinds[1:], 1):

            def run(
                state: stage.State, turn: Array, number: int = number, kind: str = kind
            ) -> stage.State:
                taken = state.taken.at[number].add(1)
                return runs[kind](state.replace(taken=taken), stage.at(turn, op))

            state = stage.only_if(op["kind"] == number, run, state, kind)
        activation, gradient = state.activation, state.input_gradient
        made = {"inbox": activation, "gradient": gradient}
        if schedule.v_shaped:  # the stage after an odd chunk is on the previous device
            odd = op["chunk"] % 2 == 1
            activation, gradient = (
                jnp.where(odd, gradient, activation),
                jnp.where(odd, activation, gradient),
            )
        sent = {1: shift(activation, AXIS, 1), -1: shift(gradient, AXIS, -1)}
        buffers = {"inbox": state.inbox, "gradient": state.gradient}
        for (name, way), slot in op["arrivals"].items():
            buffers[name] = stage.put(buffers[name], slot, sent.get(way, made[name]))
        return state.replace(**buffers), None

    rows = jax.tree.map(
        lambda column: jnp.asarray(column)[jax.lax.axis_index(AXIS)],
        {**program.columns, "arrivals": program.arrivals},
    )
    return jax.lax.scan(slot, _first_state(device, program, x), rows)[0]


def _device(
    loss_fn: LossFn,
    parts: Parts,
    schedule: Schedule,
    params: PyTree,
    batch: PyTree,
    rng: Any,
) -> tuple[stage.Device, Array]:
    """Returns a device's model and data, and an activation of zeros."""
    params, batch = vary(params, ("data", AXIS)), vary(batch, AXIS)
    params = {
        part: {name: params[name] for name in names if name in params}
        for part, names in stage.PARTS.items()
    }
    batch = jax.tree.map(lambda x: x.reshape(schedule.microbatches, -1, *x.shape[1:]), batch)
    if rng is not None:
        rng = vary(jax.random.fold_in(rng, jax.lax.axis_index("data")), AXIS)
    nothing = stage.zeros_like(lambda: parts.embed(params["embed"], batch.inputs[0]))
    per_chunk = len(jax.tree.leaves(params["layers"])[0]) // schedule.chunks

    def layer(weights: PyTree, x: Array, i: Array, rng: Any) -> Array:
        # The keys that a scan over the layers of a chunk would give them.
        key = None if rng is None else jax.random.split(parts.own_key(rng), per_chunk)[i]
        return parts.layer(weights["block"], x, key)

    first = jnp.zeros((), jnp.int32)
    device = stage.Device(
        embed=parts.embed,
        layer=layer,
        loss_fn=loss_fn,
        split=split.split(layer, stage.take(params["layers"], 0), nothing, first, rng),
        params=params,
        per_chunk=per_chunk,
        batch=batch,
        total=jax.lax.psum(batch.weights.astype(jnp.float32).sum(), "data"),
        rng=rng,
        last=schedule.stages * schedule.chunks - 1,
    )
    return device, nothing


def _first_state(device: stage.Device, program: slots.Program, x: Array) -> stage.State:
    """Returns zeros and empty buffers; `x` is an activation."""
    zeros, sizes, params = stage.zeros_like, program.sizes, device.params
    sums = zeros(lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))

    def metrics() -> PyTree:
        batch = dataclasses.replace(stage.take(device.batch, 0), inputs=x)
        return device.loss_fn(params["head"], batch, None)[1]

    def waiting() -> tuple[Any, Any]:
        weights, rest = stage.take(params["layers"], 0), (jnp.zeros((), jnp.int32), device.rng)
        _, saved = device.split.forward(weights, x, *rest)
        return saved, device.split.backward(weights, saved, x, *rest)[1]

    state = stage.State(
        grads=sums,
        metrics=zeros(metrics),
        activation=x,
        input_gradient=x,
        inbox=zeros(lambda: x, sizes["inbox"]),
        gradient=zeros(lambda: x, sizes["gradient"]),
        taken=vary(jnp.zeros(len(program.kinds), jnp.int32), AXIS),
        live=vary(jnp.zeros(sizes["stash"], bool), AXIS),
        peak=vary(jnp.zeros((), jnp.int32), AXIS),
    )
    if "B" not in program.kinds:
        return state
    return state.replace(
        stash=zeros(lambda: waiting()[0], sizes["stash"] * device.per_chunk),
        output=zeros(lambda: x, sizes["stash"]),
        passed=zeros(lambda: waiting()[1], sizes["passed"] * device.per_chunk),
    )


def _sum(
    state: stage.State, params: PyTree, param_specs: PyTree, grad_specs: PyTree
) -> tuple[PyTree, PyTree]:
    """Sums gradients and metrics over devices; over stages only those of embedding and head."""
    from course_lib.many_devices.data_parallel import sum_over_devices

    sums = {name: leaf for part in state.grads.values() for name, leaf in part.items()}
    grads = jax.tree.map(lambda sum, param: sum.astype(param.dtype), sums, params)
    shared = {name: grads[name] for part in ("embed", "head") for name in state.grads[part]}
    grads |= jax.lax.psum(shared, AXIS)
    return (
        sum_over_devices(grads, param_specs, grad_specs),
        jax.lax.psum(state.metrics, ("data", AXIS)),
    )


def to_stages(params: PyTree, stages: int, chunks: int, schedule: str = "") -> PyTree:
    """Puts scanned layers [N, ...] into the order of the S devices: first the v chunks of the
    first device. With one chunk per device the order stays. `schedule`: its name, since in
    those of `V_SHAPED` the second chunks lie in the opposite order.
    """

    def of_leaf(x: Any) -> Any:
        return _turned(x.reshape(chunks, stages, -1, *x.shape[1:]), schedule).swapaxes(0, 1)

    return _reordered(params, of_leaf, chunks)


def from_stages(params: PyTree, stages: int, chunks: int, schedule: str = "") -> PyTree:
    """Undoes `to_stages`: puts the layers back into the model's order."""

    def of_leaf(x: Any) -> Any:
        return _turned(x.reshape(stages, chunks, -1, *x.shape[1:]).swapaxes(0, 1), schedule)

    return _reordered(params, of_leaf, chunks)


def _turned(grid: Any, schedule: str) -> Any:
    """Turns the second of two rows around in the schedules whose chunks lie in a V."""
    return jnp.stack([grid[0], grid[1][::-1]]) if schedule in V_SHAPED else grid


def _reordered(params: PyTree, of_leaf: Callable[[Any], Any], chunks: int) -> PyTree:
    if chunks == 1:
        return params
    layers = jax.tree.map(lambda x: of_leaf(x).reshape(x.shape), params["block"])
    return params | {"block": layers}


def errors(asked: Asked) -> Iterator[str]:
    """Yields what a model and a mesh must not ask of the axis."""
    model, strategy, options = asked.model, asked.strategy, asked.config.training
    sums = options.accumulator_dtype
    for name, value, possible, why in (
        ("by", strategy.by, ["hand"], "shardings do not set the order of execution"),
        ("overlap", strategy.overlap, ["none"], "devices of a ring wait for each other"),
        ("zero", strategy.zero, [0, 1], "a stage would send it all for each microbatch"),
        ("accumulator_dtype", sums, ["float32"], "microbatches are added up in float32"),
        ("num_minibatches", options.num_minibatches, [1], "take Strategy(microbatches=...)"),
        ("scan_layers", model.scan_layers, [True], "it cuts stacked parameters of layers"),
        ("tied_embeddings", model.tied_embeddings, [False], "they are of different stages"),
    ):
        if value not in possible:
            needed = " or ".join(map(repr, possible))
            yield f"{name}={value!r} must be {needed} with a mesh axis 'pipe': {why}"
    if model.remat and model.remat_policy == "offload":
        yield (
            "remat_policy='offload' must be another policy for a pipeline, which keeps what a"
            " backward reads in the device's memory; 'names' keeps the same values"
        )
    size, layers = asked.n[AXIS], model.num_layers
    stages = size * strategy.chunks
    if rest := layers % stages:
        left = f"{rest} would be left over"
        if layers < stages:
            left = "some stages would have no layer"
        yield (
            f"num_layers={layers} must be a multiple of the {stages} stages, {strategy.chunks}"
            f" on each of {size} devices: {left}; take {nearest(layers, stages)}"
        )
    # refuses what no table can be
    schedules.make(strategy.schedule, size, strategy.microbatches, strategy.chunks)


PIPE = Axis(AXIS, errors, params=sharding.PIPELINE)
