"""The faults of the bug zoo: each makes, from something right, something that has been got
wrong in code like this.

Nothing here takes effect by itself: see `bug_zoo.release`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
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
      what: what is done wrong, as the one who finds it would write it into the log.
      owner: the module or class that has the attribute.
      attribute: what is replaced.
      make: from the right one, makes the wrong one.
    """

    what: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]


def _mean_of_means(right: Any) -> Any:
    return lambda metrics, total: jnp.asarray(1 / jax.lax.axis_size("data"))


def _summed_twice(right: Any) -> Any:
    def wrong(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: jax.lax.psum(vary(x, "data"), "data"), right(grads, held, kept)
        )

    return wrong


def _mean_for_sum(right: Any) -> Any:
    def wrong(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x / jax.lax.axis_size("data"), right(grads, held, kept))

    return wrong


def _wrong_slice(right: Any) -> Any:
    def wrong(grads: PyTree, held: PyTree, kept: PyTree) -> PyTree:
        found = right(grads, held, kept)
        cut = jax.tree.map(lambda spec: data_parallel.dim_of(spec, "data") is not None, kept)
        return jax.tree.map(
            lambda x, moves: collectives.shift(x, "data") if moves else x, found, cut
        )

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
    def wrong(
        apply_fn: Callable[..., Array], specs: PyTree, dtype: Any
    ) -> Callable[..., Array]:
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
                return (
                    leaf * grid.shape["tensor"]
                    if keys[-2:] == ["output_layer", "bias"]
                    else leaf
                )

            return jax.tree_util.tree_map_with_path(of_leaf, tree)

        def layer(module: type[nn.Module]) -> type[nn.Module]:
            return nn.map_variables(module, "params", times)

        return dataclasses.replace(right(grid, sequence=sequence), layer=layer)

    return wrong


def _same_positions(right: Any) -> Any:
    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        return dataclasses.replace(
            right(grid, sequence=sequence),
            positions=lambda length: vary(jnp.arange(length // grid.shape["tensor"]), "tensor"),
        )

    return wrong


@jax.custom_vjp
def _through_one_device(x: Array) -> Array:
    """Returns x, whose gradient is that through the first device alone."""
    return vary(x, "tensor")


def _backward(_: None, gradient: Array) -> tuple[Array]:
    first = jax.lax.axis_index("tensor") == 0
    return (jax.lax.psum(jnp.where(first, gradient, 0), "tensor"),)


_through_one_device.defvjp(lambda x: (_through_one_device(x), None), _backward)


def _gradient_of_one_shard(right: Any) -> Any:
    return lambda x, *args, **options: right(_through_one_device(x), *args, **options)


def _norm_of_own_heads(right: Any) -> Any:
    def wrong(x: Array, name: str) -> Array:
        norm = nn.LayerNorm(
            dtype=x.dtype, use_bias=False, reduction_axes=(-2, -1), feature_axes=-1, name=name
        )
        return norm(x)

    return wrong


def _scale_of_one_shard(right: Any) -> Any:
    def wrong(grid: Any, *, sequence: bool = False) -> Any:
        def of_one(path: Any, leaf: Array) -> Array:
            is_scale = path[-2].key in ("query_norm", "key_norm")
            return _through_one_device(leaf) if is_scale else leaf

        def layer(module: type[nn.Module]) -> type[nn.Module]:
            return nn.map_variables(
                module, "params", functools.partial(jax.tree_util.tree_map_with_path, of_one)
            )

        return dataclasses.replace(right(grid, sequence=sequence), layer=layer)

    return wrong


def _order_of_arrival(right: Any) -> Any:
    return lambda parts, first, axis, dim: jnp.concatenate(parts, dim)


def _other_part(right: Any) -> Any:
    return lambda step, causal: [(1 - k, 1 - q, masked) for q, k, masked in right(step, causal)]


def _balance_on_every_shard(right: Any) -> Any:
    return lambda apply_fn, weight, score: (
        lambda *args: right(apply_fn, weight * jax.lax.axis_size("expert"), score)(*args)
    )


def _next_microbatch(right: Any) -> Any:
    def wrong(
        self: stage.Device, wrt: str, state: Any, waiting: Any, op: PyTree
    ) -> stage.Result:
        following = (op["microbatch"] + 1) % self.batch.inputs.shape[0]
        return right(self, wrt, state, waiting, op | {"microbatch": following})

    return wrong


def _small_stash(right: Any) -> Any:
    def wrong(schedule: Any) -> slots.Program:
        found = right(schedule)
        size = max(1, found.sizes["stash"] - 1)
        put = found.columns["stash_put"]
        put = np.where(put < found.sizes["stash"], put % size, size)
        columns = {**found.columns, "stash": found.columns["stash"] % size, "stash_put": put}
        return dataclasses.replace(found, columns=columns, sizes={**found.sizes, "stash": size})

    return wrong


def _reads_what_it_gave_away(right: Any) -> Any:
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


FAULTS: Mapping[str, Fault] = {
    "mean_of_means": Fault(
        "the mean over devices of their means, whatever their numbers of labels",
        data_parallel,
        "label_share",
        _mean_of_means,
    ),
    "summed_twice": Fault(
        "a gradient that is summed over devices, and once more",
        data_parallel,
        "sum_over_devices",
        _summed_twice,
    ),
    "mean_for_sum": Fault(
        "the mean over devices of gradients that had to be added",
        data_parallel,
        "sum_over_devices",
        _mean_for_sum,
    ),
    "wrong_slice": Fault(
        "each device keeps its neighbour's slice of the gradient",
        data_parallel,
        "sum_over_devices",
        _wrong_slice,
    ),
    "shared_key": Fault(
        "all devices drop the same units, since the key was not folded in",
        data_parallel,
        "_own_key",
        _shared_key,
    ),
    "gathered_twice": Fault(
        "parameters are gathered a second time, for nothing",
        data_parallel,
        "gather",
        _gathered_twice,
    ),
    "one_layer_late": Fault(
        "a layer uses the parameters gathered for the one before",
        data_parallel,
        "gather_around",
        _one_layer_late,
    ),
    "norm_of_a_slice": Fault(
        "gradients are clipped by the norm of the slice that one of two devices has",
        optax,
        "clip_by_global_norm",
        _clip_by_norm_of_a_slice,
    ),
    "loss_on_every_shard": Fault(
        "the loss is counted once a device that shares the tokens",
        tensor_parallel,
        "cross_entropy",
        _on_every_shard,
    ),
    "neighbours_logits": Fault(
        "labels are looked up in the neighbour's logits",
        tensor_parallel,
        "cross_entropy",
        _neighbours_logits,
    ),
    "bias_on_every_shard": Fault(
        "a bias is added on every device, before the sum over them",
        tensor_parallel,
        "hooks",
        _bias_on_every_shard,
    ),
    "same_positions": Fault(
        "each part of the sequence counts its positions from the start",
        tensor_parallel,
        "hooks",
        _same_positions,
    ),
    "gradient_of_one_shard": Fault(
        "the gradient of a shared input is that through one device, not the sum",
        tensor_parallel,
        "column",
        _gradient_of_one_shard,
    ),
    "norm_of_own_heads": Fault(
        "queries and keys are normalized over all heads that a device has",
        layers,
        "norm_of_heads",
        _norm_of_own_heads,
    ),
    "scale_of_one_shard": Fault(
        "the scale of the query and key norms gets the gradient of one device's heads",
        tensor_parallel,
        "hooks",
        _scale_of_one_shard,
    ),
    "order_of_arrival": Fault(
        "parts that came around a ring are joined as they came, not as they belong",
        collectives,
        "join",
        _order_of_arrival,
    ),
    "other_part": Fault(
        "early queries see later keys, and late queries miss them",
        context_parallel,
        "block_pairs",
        _other_part,
    ),
    "balance_on_every_shard": Fault(
        "the balance of experts is counted once a device that has some",
        losses,
        "balanced_loss",
        _balance_on_every_shard,
    ),
    "next_microbatch": Fault(
        "the backward pass of a microbatch meets the labels of the next",
        stage.Device,
        "backward",
        _next_microbatch,
    ),
    "small_stash": Fault(
        "the stash has one slot too few, and activations are overwritten",
        slots,
        "program",
        _small_stash,
    ),
    "reads_what_it_gave_away": Fault(
        "the donated state is read again, for a log",
        training,
        "make_train_step",
        _reads_what_it_gave_away,
    ),
}
"""The faults by name."""
