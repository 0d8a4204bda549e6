"""Faults that code like this has had: each function stands in for the right one, which it gets
before the arguments of a call.

Nothing here takes effect by itself: see `bug_zoo.release`.
"""

import dataclasses
import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from course_lib.many_devices import collectives, data_parallel
from course_lib.many_devices.meshes import vary


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault."""

    where: str  # the module or class that has the attribute, not imported yet
    attribute: str  # the name of the function that is replaced
    make: Callable[[Any], Any]  # makes the faulty function from the right one
    does: str  # what the faulty function does

    owner = property(lambda self: pkgutil.resolve_name(self.where))


FAULTS: dict[str, Fault] = {}  # by name


def _fault(where: str, attribute: str) -> Callable[[Any], Any]:
    """Enters a function `wrong(right, *arguments)` into `FAULTS`."""

    def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
        def make(right: Any) -> Any:
            return functools.wraps(right)(lambda *args, **named: wrong(right, *args, **named))

        FAULTS[wrong.__name__] = Fault(where, attribute, make, wrong.__doc__)
        return wrong

    return enter


@_fault("course_lib.many_devices.data_parallel", "label_share")
def mean_of_means(right, metrics, total):
    """Averages the means of the devices, whatever their numbers of labels."""
    return jnp.asarray(1 / jax.lax.axis_size("data"))


@_fault("course_lib.many_devices.data_parallel", "sum_over_devices")
def summed_twice(right, *args):
    """Sums a gradient over devices twice."""
    return jax.tree.map(lambda x: jax.lax.psum(vary(x, "data"), "data"), right(*args))


@_fault("course_lib.many_devices.data_parallel", "sum_over_devices")
def mean_for_sum(right, *args):
    """Averages gradients over devices instead of adding them."""
    return jax.tree.map(lambda x: x / jax.lax.axis_size("data"), right(*args))


@_fault("course_lib.many_devices.data_parallel", "sum_over_devices")
def wrong_slice(right, grads, param_specs, grad_specs):
    """Keeps the neighbour's slice of the gradient."""

    def neighbours(x, spec):
        cut = data_parallel.dim_of(spec, "data") is not None
        return collectives.shift(x, "data") if cut else x

    return jax.tree.map(neighbours, right(grads, param_specs, grad_specs), grad_specs)


@_fault("course_lib.many_devices.data_parallel", "_own_key")
def shared_key(right, rng):
    """Drops the same units on all devices, with a key that was not folded in."""
    return rng


@_fault("course_lib.many_devices.data_parallel", "gather")
def gathered_twice(right, params, *args):
    """Gathers parameters a second time, for nothing."""
    first = right(params, *args)
    params, first = jax.lax.optimization_barrier((params, first))
    return jax.tree.map(lambda x, y: x + 0 * y, right(params, *args), first)


@_fault("course_lib.many_devices.data_parallel", "gather_outside")
def one_layer_late(right, specs, dtype):
    """Uses the parameters gathered for the layer before."""

    def late(params):
        layers = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), params["block"])
        return right(specs, dtype)(params | {"block": layers})

    return late


@_fault("optax", "clip_by_global_norm")
def norm_of_a_slice(right, max_norm):
    """Clips gradients by the norm of one slice of two."""

    def update(grads, state, params=None):
        own = jax.tree.map(lambda x: x[..., : max(1, x.shape[-1] // 2)], grads)
        norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(own)))
        scale = jnp.minimum(1.0, max_norm / norm)
        return jax.tree.map(lambda x: x * scale, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@_fault("course_lib.many_devices.tensor_parallel", "cross_entropy")
def loss_on_every_shard(right, logits, labels):
    """Counts the loss once per device that shares the tokens."""
    loss, correct = right(logits, labels)
    return jax.lax.psum(vary(loss, "tensor"), "tensor"), correct


@_fault("course_lib.many_devices.tensor_parallel", "cross_entropy")
def neighbours_logits(right, logits, labels):
    """Looks labels up in the neighbour's logits."""
    return right(collectives.shift(logits, "tensor"), labels)


def _with_params(hooks: Any, change: Callable[[Any, Array], Array]) -> Any:
    """Returns hooks whose layers compute with parameters that are changed by their paths."""

    def layer(right):
        return lambda params, *args: right(
            jax.tree_util.tree_map_with_path(change, params), *args
        )

    return dataclasses.replace(hooks, layer=layer)


@_fault("course_lib.many_devices.tensor_parallel", "hooks")
def bias_on_every_shard(right, grid, **options):
    """Adds a bias on every device, before the sum over devices."""

    def change(path, leaf):
        is_bias = [key.key for key in path][-2:] == ["output_layer", "bias"]
        return leaf * grid.shape["tensor"] if is_bias else leaf

    return _with_params(right(grid, **options), change)


@_fault("course_lib.many_devices.tensor_parallel", "hooks")
def same_positions(right, grid, **options):
    """Counts the positions of each part of the sequence from 0."""

    def positions(length):
        return vary(jnp.arange(length // grid.shape["tensor"]), "tensor")

    return dataclasses.replace(right(grid, **options), positions=positions)


@jax.custom_vjp
def _through_one_device(x: Array) -> Array:
    """Returns x, with the gradient through the first device alone."""
    return vary(x, "tensor")


def _backward(_: None, gradient: Array) -> tuple[Array]:
    first = jax.lax.axis_index("tensor") == 0
    return (jax.lax.psum(jnp.where(first, gradient, 0), "tensor"),)


_through_one_device.defvjp(lambda x: (_through_one_device(x), None), _backward)


@_fault("course_lib.many_devices.tensor_parallel", "column")
def gradient_of_one_shard(right, x, *args, **options):
    """Takes the gradient of a shared input through one device, not the sum."""
    return right(_through_one_device(x), *args, **options)


@_fault("course_lib.models.layers", "norm")
def norm_of_own_heads(right, params, name, x):
    """Normalizes queries and keys over all heads of a device."""
    if name not in ("query_norm", "key_norm"):
        return right(params, name, x)
    scale = {"scale": jnp.tile(params[name]["scale"], x.shape[-2])}
    return right({name: scale}, name, x.reshape(*x.shape[:2], -1)).reshape(x.shape)


@_fault("course_lib.many_devices.tensor_parallel", "hooks")
def scale_of_one_shard(right, grid, **options):
    """Takes the gradient of the query and key norms' scale from one device's heads."""

    def change(path, leaf):
        is_scale = path[-2].key in ("query_norm", "key_norm")
        return _through_one_device(leaf) if is_scale else leaf

    return _with_params(right(grid, **options), change)


@_fault("course_lib.many_devices.collectives", "join")
def order_of_arrival(right, parts, first, axis, dim):
    """Joins the parts that came around a ring in their order of arrival."""
    return jnp.concatenate(parts, dim)


@_fault("course_lib.many_devices.context_parallel", "block_pairs")
def other_part(right, step, causal):
    """Shows early queries later keys, and hides keys from late queries."""
    return [(1 - k, 1 - q, masked) for q, k, masked in right(step, causal)]


@_fault("course_lib.models.losses", "balanced_loss")
def balance_on_every_shard(right, apply_fn, weight, score):
    """Counts the balance of experts once per device that has experts."""
    return lambda *args: right(apply_fn, weight * jax.lax.axis_size("expert"), score)(*args)


@_fault("course_lib.many_devices.pipeline_parallel.stage:Device", "backward")
def next_microbatch(right, device, state, op):
    """Computes the backward pass of a microbatch with the next one's labels."""
    following = (op["microbatch"] + 1) % device.batch.inputs.shape[0]
    return right(device, state, op | {"microbatch": following})


@_fault("course_lib.many_devices.pipeline_parallel.slots", "program")
def small_stash(right, schedule):
    """Overwrites activations, with one slot too few in the stash."""
    program = right(schedule)
    size = max(1, program.sizes["stash"] - 1)
    columns = {**program.columns, "stash": program.columns["stash"] % size}
    return dataclasses.replace(program, columns=columns, sizes={**program.sizes, "stash": size})


@_fault("course_lib.training", "make_train_step")
def reads_what_it_gave_away(right, *args, **options):
    """Reads the donated state again, for a log."""
    step = right(*args, **options)

    def reading(state, batch):
        new, metrics = step(state, batch)
        before = sum((x**2).sum() for x in jax.tree.leaves(state.params))
        return new, metrics | {"squares": (before, jnp.ones(()))}

    return reading
