"""Faults that code like this has had: each function makes a faulty function from the right one.

Nothing here takes effect by itself: see `bug_zoo.release`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from course_lib import training
from course_lib.many_devices import (
    collectives,
    context_parallel,
    data_parallel,
    tensor_parallel,
)
from course_lib.many_devices.meshes import vary
from course_lib.many_devices.pipeline_parallel import slots, stage
from course_lib.models import layers, losses

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      owner: the module or class that has the attribute.
      attribute: the name of the function that is replaced.
      make: makes the faulty function from the right one; its docstring says what is wrong.
    """

    owner: Any
    attribute: str
    make: Callable[[Any], Any]


FAULTS: dict[str, Fault] = {}
"""The faults by name."""


def _fault(owner: Any, attribute: str) -> Callable[[Any], Any]:
    """Enters a function into `FAULTS` that makes a faulty function from the right one."""

    def enter(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[make.__name__] = Fault(owner, attribute, make)
        return make

    return enter


@_fault(data_parallel, "label_share")
def mean_of_means(right: Any) -> Any:
    """Averages the means of the devices, whatever their numbers of labels."""
    return lambda metrics, total: jnp.asarray(1 / jax.lax.axis_size("data"))


@_fault(data_parallel, "sum_over_devices")
def summed_twice(right: Any) -> Any:
    """Sums a gradient over devices twice."""

    def wrong(grads: PyTree, param_specs: PyTree, grad_specs: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jax.lax.psum(vary(x, "data"), "data"),
            right(grads, param_specs, grad_specs),
        )

    return wrong


@_fault(data_parallel, "sum_over_devices")
def mean_for_sum(right: Any) -> Any:
    """Averages gradients over devices instead of adding them."""

    def wrong(grads: PyTree, param_specs: PyTree, grad_specs: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: x / jax.lax.axis_size("data"), right(grads, param_specs, grad_specs)
        )

    return wrong


@_fault(data_parallel, "sum_over_devices")
def wrong_slice(right: Any) -> Any:
    """Keeps the neighbour's slice of the gradient."""

    def wrong(grads: PyTree, param_specs: PyTree, grad_specs: PyTree) -> PyTree:
        summed = right(grads, param_specs, grad_specs)
        cut = jax.tree.map(
            lambda spec: data_parallel.dim_of(spec, "data") is not None, grad_specs
        )
        return jax.tree.map(
            lambda x, moves: collectives.shift(x, "data") if moves else x, summed, cut
        )

    return wrong


@_fault(data_parallel, "_own_key")
def shared_key(right: Any) -> Any:
    """Drops the same units on all devices, with a key that was not folded in."""
    return lambda rng: rng


@_fault(data_parallel, "gather")
def gathered_twice(right: Any) -> Any:
    """Gathers parameters a second time, for nothing."""

    def wrong(params: PyTree, specs: PyTree, dtype: Any) -> PyTree:
        first = right(params, specs, dtype)
        params, first = jax.lax.optimization_barrier((params, first))
        return jax.tree.map(lambda x, y: x + 0 * y, right(params, specs, dtype), first)

    return wrong


@_fault(data_parallel, "gather_outside")
def one_layer_late(right: Any) -> Any:
    """Uses the parameters gathered for the layer before."""

    def wrong(specs: PyTree, dtype: Any) -> Callable[[PyTree], PyTree]:
        def late(params: PyTree) -> PyTree:
            layers = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), params["block"])
            return right(specs, dtype)(params | {"block": layers})

        return late

    return wrong


@_fault(optax, "clip_by_global_norm")
def norm_of_a_slice(right: Any) -> Any:
    """Clips gradients by the norm of one slice of two."""

    def wrong(max_norm: float) -> optax.GradientTransformation:
        def update(grads: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Any]:
            own = jax.tree.map(lambda x: x[..., : max(1, x.shape[-1] // 2)], grads)
            norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(own)))
            scale = jnp.minimum(1.0, max_norm / norm)
            return jax.tree.map(lambda x: x * scale, grads), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    return wrong


@_fault(tensor_parallel, "cross_entropy")
def loss_on_every_shard(right: Any) -> Any:
    """Counts the loss once per device that shares the tokens."""

    def wrong(logits: Array, labels: Array) -> tuple[Array, Array]:
        loss, correct = right(logits, labels)
        return jax.lax.psum(vary(loss, "tensor"), "tensor"), correct

    return wrong


@_fault(tensor_parallel, "cross_entropy")
def neighbours_logits(right: Any) -> Any:
    """Looks labels up in the neighbour's logits."""
    return lambda logits, labels: right(collectives.shift(logits, "tensor"), labels)


@_fault(tensor_parallel, "hooks")
def bias_on_every_shard(right: Any) -> Any:
    """Adds a bias on every device, before the sum over devices."""

    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        def times(tree: PyTree) -> PyTree:
            def of_leaf(path: Any, leaf: Array) -> Array:
                keys = [key.key for key in path]
                return (
                    leaf * grid.shape["tensor"]
                    if keys[-2:] == ["output_layer", "bias"]
                    else leaf
                )

            return jax.tree_util.tree_map_with_path(of_leaf, tree)

        def layer(right: Any) -> Any:
            return lambda params, *args: right(times(params), *args)

        return dataclasses.replace(right(grid, sequence=sequence), layer=layer)

    return wrong


@_fault(tensor_parallel, "hooks")
def same_positions(right: Any) -> Any:
    """Counts the positions of each part of the sequence from 0."""

    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        return dataclasses.replace(
            right(grid, sequence=sequence),
            positions=lambda length: vary(jnp.arange(length // grid.shape["tensor"]), "tensor"),
        )

    return wrong


@jax.custom_vjp
def _through_one_device(x: Array) -> Array:
    """Returns x, with the gradient through the first device alone."""
    return vary(x, "tensor")


def _backward(_: None, gradient: Array) -> tuple[Array]:
    first = jax.lax.axis_index("tensor") == 0
    return (jax.lax.psum(jnp.where(first, gradient, 0), "tensor"),)


_through_one_device.defvjp(lambda x: (_through_one_device(x), None), _backward)


@_fault(tensor_parallel, "column")
def gradient_of_one_shard(right: Any) -> Any:
    """Takes the gradient of a shared input through one device, not the sum."""
    return lambda x, *args, **options: right(_through_one_device(x), *args, **options)


@_fault(layers, "norm")
def norm_of_own_heads(right: Any) -> Any:
    """Normalizes queries and keys over all heads of a device."""

    def wrong(params: Any, name: str, x: Array) -> Array:
        if name not in ("query_norm", "key_norm"):
            return right(params, name, x)
        scale = {"scale": jnp.tile(params[name]["scale"], x.shape[-2])}
        return right({name: scale}, name, x.reshape(*x.shape[:2], -1)).reshape(x.shape)

    return wrong


@_fault(tensor_parallel, "hooks")
def scale_of_one_shard(right: Any) -> Any:
    """Takes the gradient of the query and key norms' scale from one device's heads."""

    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        def of_one(path: Any, leaf: Array) -> Array:
            is_scale = path[-2].key in ("query_norm", "key_norm")
            return _through_one_device(leaf) if is_scale else leaf

        def layer(right: Any) -> Any:
            return lambda params, *args: right(
                jax.tree_util.tree_map_with_path(of_one, params), *args
            )

        return dataclasses.replace(right(grid, sequence=sequence), layer=layer)

    return wrong


@_fault(collectives, "join")
def order_of_arrival(right: Any) -> Any:
    """Joins the parts that came around a ring in their order of arrival."""
    return lambda parts, first, axis, dim: jnp.concatenate(parts, dim)


@_fault(context_parallel, "block_pairs")
def other_part(right: Any) -> Any:
    """Shows early queries later keys, and hides keys from late queries."""
    return lambda step, causal: [(1 - k, 1 - q, masked) for q, k, masked in right(step, causal)]


@_fault(losses, "balanced_loss")
def balance_on_every_shard(right: Any) -> Any:
    """Counts the balance of experts once per device that has experts."""
    return lambda apply_fn, weight, score: (
        lambda *args: right(apply_fn, weight * jax.lax.axis_size("expert"), score)(*args)
    )


@_fault(stage.Device, "backward")
def next_microbatch(right: Any) -> Any:
    """Computes the backward pass of a microbatch with the next one's labels."""

    def wrong(self: stage.Device, state: stage.State, op: PyTree) -> stage.State:
        following = (op["microbatch"] + 1) % self.batch.inputs.shape[0]
        return right(self, state, op | {"microbatch": following})

    return wrong


@_fault(slots, "program")
def small_stash(right: Any) -> Any:
    """Overwrites activations, with one slot too few in the stash."""

    def wrong(schedule: Any) -> slots.Program:
        program = right(schedule)
        size = max(1, program.sizes["stash"] - 1)
        columns = {**program.columns, "stash": program.columns["stash"] % size}
        return dataclasses.replace(
            program, columns=columns, sizes={**program.sizes, "stash": size}
        )

    return wrong


@_fault(training, "make_train_step")
def reads_what_it_gave_away(right: Any) -> Any:
    """Reads the donated state again, for a log."""

    @functools.wraps(right)
    def wrong(*args: Any, **options: Any) -> Any:
        step = right(*args, **options)

        def reading(
            state: training.TrainState, batch: PyTree
        ) -> tuple[training.TrainState, PyTree]:
            new, metrics = step(state, batch)
            before = sum((x**2).sum() for x in jax.tree.leaves(state.params))
            return new, metrics | {"squares": (before, jnp.ones(()))}

        return reading

    return wrong
