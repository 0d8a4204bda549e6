"""Faults that many-device code has had, caged: each can be let out for a while, to see what it does and who notices.

    with bug_zoo.release("mean_of_means"):
        run = strategy.build(config, grid)      # what is built and traced in here has the fault

A loss that falls does not rule one out: Adam, for one, hides a wrong scale of the gradient altogether. What finds
them is a comparison of gradients with one device's, and a ledger of what was sent. `tests/test_bug_zoo.py` proves that every
fault here is found so. Nothing but `release` reaches them, and outside of it the library is as it is written.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from course_lib import training
from course_lib.parallel import collectives, data, slots, stage, tensor
from course_lib.parallel.mesh import vary

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      what: what is done wrong, as the one who finds it would write it into the log.
      owner: the module or class that has the attribute.
      attribute: what is replaced.
      make: from the right one, makes the wrong one.
    """

    what: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]


@contextlib.contextmanager
def release(name: str) -> Iterator[Fault]:
    """Lets a fault out for as long as the context lasts.

    Only what is built and traced inside has it: a function that `jax.jit` traced before stays right, one that it traced
    inside stays wrong.

    Args:
      name: one of `FAULTS`.

    Raises:
      ValueError: if there is no such fault.
    """
    if name not in FAULTS:
        raise ValueError(f"name={name!r} must be one of {', '.join(FAULTS)}")
    fault = FAULTS[name]
    wrong = fault.make(getattr(fault.owner, fault.attribute))
    with mock.patch.object(fault.owner, fault.attribute, wrong):
        yield fault


def _mean_of_means(right: Any) -> Any:
    return lambda metrics, total: jnp.asarray(1 / jax.lax.axis_size("data"))


def _summed_twice(right: Any) -> Any:
    def wrong(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.psum(vary(x, "data"), "data"), right(grads, held, kept))

    return wrong


def _mean_for_sum(right: Any) -> Any:
    def wrong(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x / jax.lax.axis_size("data"), right(grads, held, kept))

    return wrong


def _wrong_slice(right: Any) -> Any:
    def wrong(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
        found = right(grads, held, kept)
        cut = jax.tree.map(lambda spec: data.dim_of(spec, "data") is not None, kept)
        return jax.tree.map(lambda x, moves: collectives.shift(x, "data") if moves else x, found, cut)

    return wrong


def _shared_key(right: Any) -> Any:
    return lambda rng: rng


def _gathered_twice(right: Any) -> Any:
    def wrong(params: PyTree, specs: PyTree, dtype: Any) -> PyTree:
        first = right(params, specs, dtype)
        params, first = jax.lax.optimization_barrier((params, first))
        return jax.tree.map(lambda x, y: x + 0 * y, right(params, specs, dtype), first)

    return wrong


def _one_layer_late(right: Any) -> Any:
    def wrong(apply_fn: Callable[..., Array], specs: PyTree, dtype: Any) -> Callable[..., Array]:
        def late(params: PyTree, inputs: Array, rng: Any) -> Array:
            layers = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), params["block"])
            return right(apply_fn, specs, dtype)(params | {"block": layers}, inputs, rng)

        return late

    return wrong


def _clip_by_norm_of_a_slice(right: Any) -> Any:
    def wrong(max_norm: float) -> optax.GradientTransformation:
        def update(grads: PyTree, state: Any, params: Any = None) -> tuple[PyTree, Any]:
            own = jax.tree.map(lambda x: x[..., : max(1, x.shape[-1] // 2)], grads)
            norm = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(own)))
            scale = jnp.minimum(1.0, max_norm / norm)
            return jax.tree.map(lambda x: x * scale, grads), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    return wrong


def _on_every_shard(right: Any) -> Any:
    def wrong(logits: Array, labels: Array) -> tuple[Array, Array]:
        loss, correct = right(logits, labels)
        return jax.lax.psum(vary(loss, "tensor"), "tensor"), correct

    return wrong


def _neighbours_logits(right: Any) -> Any:
    return lambda logits, labels: right(collectives.shift(logits, "tensor"), labels)


def _bias_on_every_shard(right: Any) -> Any:
    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        def times(tree: PyTree) -> PyTree:
            def of_leaf(path: Any, leaf: Array) -> Array:
                keys = [key.key for key in path]
                return leaf * grid.shape["tensor"] if keys[-2:] == ["output_layer", "bias"] else leaf

            return jax.tree_util.tree_map_with_path(of_leaf, tree)

        def layer(module: type[nn.Module]) -> type[nn.Module]:
            return nn.map_variables(module, "params", times)

        return dataclasses.replace(right(grid, sequence=sequence), layer=layer)

    return wrong


def _same_positions(right: Any) -> Any:
    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        return dataclasses.replace(
            right(grid, sequence=sequence), positions=lambda length: vary(jnp.arange(length // grid.shape["tensor"]), "tensor")
        )

    return wrong


def _gradient_of_one_shard(right: Any) -> Any:
    @jax.custom_vjp
    def shared(x: Array) -> Array:
        return vary(x, "tensor")

    def backward(_: None, gradient: Array) -> tuple[Array]:
        first = jax.lax.axis_index("tensor") == 0
        return (jax.lax.psum(jnp.where(first, gradient, 0), "tensor"),)

    shared.defvjp(lambda x: (shared(x), None), backward)
    return lambda x, *args, **options: right(shared(x), *args, **options)


def _next_microbatch(right: Any) -> Any:
    def wrong(self: stage.Device, wrt: str, state: Any, arrived: Any, op: PyTree) -> stage.Result:
        following = (op["microbatch"] + 1) % self.batch.inputs.shape[0]
        return right(self, wrt, state, arrived, op | {"microbatch": following})

    return wrong


def _small_stash(right: Any) -> Any:
    def wrong(schedule: Any) -> slots.Program:
        found = right(schedule)
        size = max(1, found.sizes["stash"] - 1)
        columns = {**found.columns, "stash": found.columns["stash"] % size}
        return dataclasses.replace(found, columns=columns, sizes={**found.sizes, "stash": size})

    return wrong


def _reads_what_it_gave_away(right: Any) -> Any:
    @functools.wraps(right)
    def wrong(*args: Any, **options: Any) -> Any:
        step = right(*args, **options)

        def reading(state: training.TrainState, batch: PyTree) -> tuple[training.TrainState, PyTree]:
            new, metrics = step(state, batch)
            before = sum((x**2).sum() for x in jax.tree.leaves(state.params))
            return new, metrics | {"squares": (before, jnp.ones(()))}

        return reading

    return wrong


FAULTS: Mapping[str, Fault] = {
    "mean_of_means": Fault(
        "the mean over devices of their means, whatever their numbers of labels", data, "_share", _mean_of_means
    ),
    "summed_twice": Fault("a gradient that is summed over devices, and once more", data, "sum_over_devices", _summed_twice),
    "mean_for_sum": Fault("the mean over devices of gradients that had to be added", data, "sum_over_devices", _mean_for_sum),
    "wrong_slice": Fault("each device keeps its neighbour's slice of the gradient", data, "sum_over_devices", _wrong_slice),
    "shared_key": Fault("all devices drop the same units, since the key was not folded in", data, "_own_key", _shared_key),
    "gathered_twice": Fault("parameters are gathered a second time, for nothing", data, "gather", _gathered_twice),
    "one_layer_late": Fault("a layer uses the parameters gathered for the one before", data, "gather_around", _one_layer_late),
    "norm_of_a_slice": Fault(
        "gradients are clipped by the norm of the slice that one of two devices has",
        optax,
        "clip_by_global_norm",
        _clip_by_norm_of_a_slice,
    ),
    "loss_on_every_shard": Fault(
        "the loss is counted once a device that shares the tokens", tensor, "cross_entropy", _on_every_shard
    ),
    "neighbours_logits": Fault("labels are looked up in the neighbour's logits", tensor, "cross_entropy", _neighbours_logits),
    "bias_on_every_shard": Fault(
        "a bias is added on every device, before the sum over them", tensor, "hooks", _bias_on_every_shard
    ),
    "same_positions": Fault(
        "each part of the sequence counts its positions from the start", tensor, "hooks", _same_positions
    ),
    "gradient_of_one_shard": Fault(
        "the gradient of a shared input is that through one device, not the sum", tensor, "column", _gradient_of_one_shard
    ),
    "next_microbatch": Fault(
        "the backward pass of a microbatch meets the labels of the next", stage.Device, "backward", _next_microbatch
    ),
    "small_stash": Fault("the stash has one slot too few, and activations are overwritten", slots, "program", _small_stash),
    "reads_what_it_gave_away": Fault(
        "the donated state is read again, for a log", training, "make_train_step", _reads_what_it_gave_away
    ),
}
"""The faults by name."""
