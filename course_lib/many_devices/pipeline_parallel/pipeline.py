"""Pipeline parallelism: each device holds some of the layers, and microbatches pass from device
to device.

`gradient` executes a schedule's table, whichever it is, slot by slot (`jax.lax.scan`). In each
slot a device does what its row says (`stage`), and then everyone passes an activation to the
next device on the ring and a gradient to the previous one. So the order of the backward pass is
the table's, not one that JAX would derive from a forward pass: JAX differentiates one stage at
a time (`jax.vjp`), from its input, which is all that is kept (Huang et al., 2018,
https://arxiv.org/abs/1811.06965).

One program runs on all devices, and that has a price. The parameters of embedding and head lie
on all of them, though only the first and the last use them; their gradients are summed over
"pipe" once a step. And what a slot sends is sent in all slots, whether there is something or
not: neighbours wait for each other, so that a slot of the table lasts as long as the longest op
in it. A step of GPipe takes as long as its table says; one of 1F1B, whose backwards lie on a
diagonal, 1.6 times as long with 4 stages and 16 microbatches (`slots.lockstep`): it is chosen
for its memory. Zero-bubble takes longest: its B and its W each compute the stage again.
Parameters of layers never move.

    sent by a device, along "pipe"    2 * slots * activation bytes of a microbatch, and
                                      2 (S-1)/S of the gradient bytes of embedding and head
    kept by a device                  as many activations as its buffers have slots
                                      (`slots.program`)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import training
from course_lib.many_devices import data_parallel, meshes
from course_lib.many_devices.collectives import shift
from course_lib.many_devices.meshes import vary
from course_lib.many_devices.pipeline_parallel import schedules, slots, stage
from course_lib.many_devices.pipeline_parallel.schedules import Schedule
from course_lib.models.hooks import Hooks
from course_lib.models.transformer import Transformer
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn

PyTree = Any
ApplyPart = Callable[..., Any]

AXIS = "pipe"


def parts(config: ConfigDict, stages: int, hooks: Hooks) -> ApplyPart:
    """Returns the Transformer in parts, `apply_part(part, params, x, rng)`, whose "layers" are
    those of one stage.

    Args:
      config: the `model` part of a configuration.
      stages: S v, into how many the layers are cut.
      hooks: what of it one of several devices along "tensor" does; `Hooks()` without such an
        axis.
    """
    model = Transformer(
        FrozenConfigDict({**config.to_dict(), "num_layers": config.num_layers // stages}), hooks
    )

    def apply_part(part: str, params: PyTree, x: Array, rng: Any) -> Any:
        rngs = {} if rng is None else {"dropout": rng}
        return model.apply(
            {"params": params}, x, train=rng is not None, parts=(part,), rngs=rngs
        )

    return apply_part


def loss_of_head(
    apply_part: ApplyPart, score: Callable[..., Any] = training.cross_entropy
) -> LossFn:
    """Returns the loss function of the last part: of the head's parameters, on a batch whose
    inputs are activations.
    """
    return training.next_token_loss(
        lambda params, x, rng: apply_part("head", params, x, None), score
    )


def gradient(
    loss_fn: LossFn,
    apply_part: ApplyPart,
    mesh: Mesh,
    held: PyTree,
    schedule: Schedule,
    kept: PyTree = None,
) -> GradFn:
    """Returns a gradient function that executes a schedule.

    Each device along "data" takes its share of the batch, and cuts it into M microbatches. Each
    stage draws its dropout from a key of its own for each microbatch, and the same one when it
    runs again: the given one with the device's index along "data", the microbatch and the stage
    folded in.

    Args:
      loss_fn: the loss of the head, as `loss_of_head` gives it.
      apply_part: the model in parts.
      mesh: with the axes "data" and "pipe".
      held: specs of the parameters, whose layers lie as `to_stages` places them.
      schedule: any legal one of as many stages as "pipe" has devices.
      kept: specs of the gradients that come out, cut over "data" with stage 1 of ZeRO; those of
        the parameters if None.

    Raises:
      ValueError: if the schedule is not legal, or of another number of stages; and, when
        called, before it is compiled, if the batch cannot be cut into M microbatches for each
        device along "data".
    """
    kept = held if kept is None else kept

    def on_one_device(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree]:
        state = _execute(loss_fn, apply_part, schedule, params, batch, rng)
        return _sum(state["grads"], held, kept), jax.lax.psum(state["metrics"], ("data", AXIS))

    return _spread(on_one_device, mesh, schedule, held, (kept, P()))


def loss(
    loss_fn: LossFn, apply_part: ApplyPart, mesh: Mesh, held: PyTree, schedule: Schedule
) -> LossFn:
    """Returns the loss function of the whole model on arrays that are spread over the mesh: the
    forwards of a schedule.

    Arguments and errors as for `gradient`.
    """

    def on_one_device(params: PyTree, batch: PyTree, rng: Any) -> tuple[Array, PyTree]:
        state = _execute(loss_fn, apply_part, slots.forward(schedule), params, batch, rng)
        metrics = jax.lax.psum(state["metrics"], ("data", AXIS))
        total, count = metrics["loss"]
        return total / jnp.where(count != 0, count, 1), metrics

    return _spread(on_one_device, mesh, schedule, held, (P(), P()))


def count(
    loss_fn: LossFn, apply_part: ApplyPart, mesh: Mesh, held: PyTree, schedule: Schedule
) -> Callable[..., tuple[PyTree, PyTree, PyTree]]:
    """Returns a gradient function that also returns what each device does, counted while it
    does it.

    Nothing of it is read from the table: each branch counts that it was taken, and its own use
    of the stash. Arguments and errors as for `gradient`.

    Returns:
      `counted(params, batch, rng) -> (grads, metrics, counts)`. `counts["slots"]` has for each
      kind that the schedule has, and "idle", the slots of time that went into it,
      `counts["peak_live"]` the most slots of the stash that were in use at once: int32 [S]
      each, by device along "pipe".
    """
    kinds = slots.program(schedule).kinds

    def on_one_device(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree, PyTree]:
        state = _execute(loss_fn, apply_part, schedule, params, batch, rng)
        counts = {
            "slots": dict(zip(kinds, state["taken"][:, None], strict=True)),
            "peak_live": state["peak"][None],
        }
        return (
            _sum(state["grads"], held, held),
            jax.lax.psum(state["metrics"], ("data", AXIS)),
            counts,
        )

    return _spread(on_one_device, mesh, schedule, held, (held, P(), P(AXIS)))


def _spread(
    on_one_device: Callable[..., PyTree],
    mesh: Mesh,
    schedule: Schedule,
    held: PyTree,
    out_specs: PyTree,
) -> Callable[..., PyTree]:
    check_schedule(schedule, mesh)
    spread = jax.shard_map(
        on_one_device, mesh=mesh, in_specs=(held, P("data"), P()), out_specs=out_specs
    )
    microbatches = meshes.axis_size(mesh, "data") * schedule.microbatches

    def run(params: PyTree, batch: PyTree, rng: Any) -> PyTree:
        gradient_accumulation.check_divides(batch, microbatches)
        return spread(params, batch, rng)

    return run


def _execute(
    loss_fn: LossFn,
    apply_part: ApplyPart,
    schedule: Schedule,
    params: PyTree,
    batch: PyTree,
    rng: Any,
) -> stage.State:
    """Executes a schedule on one device. Returns its state after the last slot; nothing is
    summed over devices yet.
    """
    program = slots.program(schedule)
    params, batch = vary(params, ("data", AXIS)), vary(batch, AXIS)
    params = {
        part: {name: params[name] for name in names if name in params}
        for part, names in stage.PARTS.items()
    }
    params["layers"] = jax.tree.map(
        lambda x: x.reshape(schedule.chunks, -1, *x.shape[1:]), params["layers"]
    )
    device = stage.Device(
        apply_part=apply_part,
        loss_fn=loss_fn,
        params=params,
        batch=jax.tree.map(lambda x: x.reshape(schedule.microbatches, -1, *x.shape[1:]), batch),
        total=jax.lax.psum(batch.weights.astype(jnp.float32).sum(), "data"),
        rng=None if rng is None else jax.random.fold_in(rng, jax.lax.axis_index("data")),
        last=schedule.stages * schedule.chunks - 1,
    )
    nothing = device.activation()
    branches = {"idle": device.idle, "-": device.idle, "F": device.forward}
    branches |= {wrt: functools.partial(device.backward, wrt) for wrt in ("B", "W", "BW")}

    def branch(number: int, run: Callable[..., stage.Result]) -> Callable[..., stage.Result]:
        def taken(state: stage.State, waiting: dict[str, Array], op: PyTree) -> stage.Result:
            state, found = run(state | {"taken": state["taken"].at[number].add(1)}, waiting, op)
            return state, {name: found.get(name, nothing) for name in waiting}

        return taken

    choices = [branch(number, branches[kind]) for number, kind in enumerate(program.kinds)]

    def slot(
        carry: tuple[stage.State, dict[str, Array]], op: PyTree
    ) -> tuple[tuple[stage.State, dict[str, Array]], None]:
        state, waiting = carry
        state, found = jax.lax.switch(op["kind"], choices, state, waiting, op)
        found |= {
            "inbox": shift(found["inbox"], AXIS, 1),
            "gradient": shift(found["gradient"], AXIS, -1),
        }
        # Buffers are written here, in place: what passes through a branch is copied on the way,
        # on a GPU.
        return (
            state,
            {
                name: stage.put(waiting[name], op[f"{name}_put"], found[name])
                for name in waiting
            },
        ), None

    state = device.state(program.sizes["stash"]) | {
        "taken": vary(jnp.zeros(len(choices), jnp.int32), AXIS)
    }
    waiting = {
        name: jnp.broadcast_to(nothing, (size, *nothing.shape))
        for name, size in program.sizes.items()
    }
    rows = {
        name: jnp.asarray(column)[jax.lax.axis_index(AXIS)]
        for name, column in program.columns.items()
    }
    (state, _), _ = jax.lax.scan(slot, (state, waiting), rows)
    return state


def _sum(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
    """Returns the gradients of the whole batch: those of the layers as they lie, the others
    summed over stages too.
    """
    layers = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grads["layers"])
    return data_parallel.sum_over_devices(
        layers | jax.lax.psum(grads["embed"] | grads["head"], AXIS), held, kept
    )


def to_stages(params: PyTree, stages: int, chunks: int) -> PyTree:
    """Returns parameters whose layers lie as the devices hold them: device by device, each its
    v chunks in order.

    With one chunk a device they lie so already.

    Args:
      params: of the model, or a tree like them; scanned layers, [N, ...].
      stages: S devices.
      chunks: v.
    """
    return _reorder(params, (chunks, stages))


def from_stages(params: PyTree, stages: int, chunks: int) -> PyTree:
    """Undoes `to_stages`: returns the parameters with the layers in the model's order."""
    return _reorder(params, (stages, chunks))


def _reorder(params: PyTree, sizes: tuple[int, int]) -> PyTree:
    """Returns parameters whose layers, read as a grid of these sizes, lie column by column."""

    def of_leaf(x: Any) -> Any:
        return x.reshape(*sizes, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    return params if 1 in sizes else params | {"block": jax.tree.map(of_leaf, params["block"])}


def check(
    model: ConfigDict, mesh: meshes.Shape, chunks: int = 1, num_minibatches: int = 1
) -> None:
    """Refuses a model whose layers cannot be cut into the stages of a pipeline, and minibatches
    beside its microbatches.

    Args:
      model: the `model` part of a configuration.
      mesh: with an axis "pipe".
      chunks: v, a device.
      num_minibatches: into how many the batch is cut.

    Raises:
      ValueError: naming the field, its value and the nearest that would do.
    """
    size = meshes.axis_size(mesh, AXIS)
    stages, layers = size * chunks, model.num_layers
    if num_minibatches != 1:
        raise ValueError(
            f"num_minibatches={num_minibatches} must be 1 with a pipeline, which adds up the"
            " gradients of microbatches itself; take Strategy(microbatches=...)"
        )
    if not model.scan_layers:
        raise ValueError(
            "scan_layers=False must be True for a pipeline: it cuts the stacked parameters of"
            " all layers"
        )
    if rest := layers % stages:
        below = layers - rest
        why = f"{rest} would be left over" if below else "some stages would have no layer"
        raise ValueError(
            f"num_layers={layers} must be a multiple of the {stages} stages, {chunks} on each"
            f" of {size} devices: {why}; take {f'{below} or ' * (below > 0)}{below + stages}"
        )


def check_schedule(schedule: Schedule, mesh: Mesh) -> None:
    """Refuses a schedule that is not legal, or not for as many stages as the mesh has devices
    along "pipe".

    Raises:
      ValueError: naming the number of stages, or the cell of the table.
    """
    size = meshes.axis_size(mesh, AXIS)
    if schedule.stages != size:
        raise ValueError(
            f"stages={schedule.stages} must be the number of devices along the mesh axis"
            f" 'pipe': {size}"
        )
    schedules.check(schedule)
