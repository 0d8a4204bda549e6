"""The smallest step: a backward pass by hand, which adds each layer's gradient in place.

A train step that accumulates gradients holds their sum, 4 bytes per parameter. If a scan runs
over the layers, it also holds the gradient of one minibatch: the backward pass is a scan, too,
and returns the gradients of all layers as one stacked array. A loop by hand adds each of them
to the sum at once:

    forward    a scan over the layers keeps what each layer's backward pass reads
    backward   a scan over the layers in reverse carries the gradient of the activations and
               the sum of the gradients, and adds to the sum at one index

XLA overwrites the carry of a scan in place. (With layers in a list, `jax.grad` needs as little,
but compiles every layer.) `jax.vjp` differentiates one layer at a time, so a layer is any
function. If it is wrapped in `jax.checkpoint`, only its input and what the policy saves are
kept (see `course_lib.one_device.rematerialization`).

JAX's own `with_refs` adds to references in the dtype of the parameters. The functions here may
sum gradients of bfloat16 parameters in float32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from course_lib import arguments
from course_lib.smaller_and_faster import offload

PyTree = Any
Add = Callable[[PyTree, PyTree, Any, Any], tuple[PyTree, dict[str, Any]]]

BACKWARD = ("autodiff", "in_place")  # by `jax.grad`, or by `gradient_in_place`


def gradient_in_place(
    embed: Callable[..., Any],
    layer: Callable[..., Any],
    head: Callable[..., Any],
    *,
    stacked: str = "block",
) -> Add:
    """Returns a function that adds the gradient of one minibatch to a sum of gradients.

        add(total, params, batch, rng) -> (total, metrics)

    `total` has the shapes of `params`, in the dtype that gradients are summed in. The gradient
    is that of the loss times `metrics["loss"][1]`, the summed weights of the labels: a weighted
    *sum* over labels, so that minibatches add up. Divide by the weights of all of them at the
    end (`gradient_accumulation.accumulate_in_place` does). `rng` is split into one key per
    layer, as `nn.scan` splits it.

    Args:
      embed: `embed(rest, batch) -> x`. `rest` is `params` without the stacked layers.
      layer: `layer(weights, x, key) -> x`, one layer; `weights` without the axis of layers.
        `key` is None if `rng` is.
      head: `head(rest, x, batch) -> (loss, metrics)`, the weighted mean over labels, and
        name -> (sum, count), as for any loss function. It reads the same `rest` as `embed`, so
        embeddings may be tied.
      stacked: the entry of the parameters whose leaves have a leading axis of layers.
    """
    arguments.functions(embed=embed, layer=layer, head=head)

    def add(total: PyTree, params: PyTree, batch: Any, rng: Any) -> tuple[PyTree, Any]:
        num_layers = offload.num_layers(params, (stacked,))
        _check_total(total, params)
        stack, rest = params[stacked], _without(params, stacked)
        keys = None if rng is None else jax.random.split(rng, num_layers)
        with jax.named_scope("forward"):
            x, from_embed = jax.vjp(lambda rest: embed(rest, batch), rest)
            x, saved, pull_back = forward_and_saved(layer, stack, x, keys)
            _, from_head, metrics = jax.vjp(
                lambda rest, x: head(rest, x, batch), rest, x, has_aux=True
            )
        with jax.named_scope("backward"):
            # Of the loss times the summed weights: the sum over labels, not their mean.
            to_head, dx = from_head(metrics["loss"][1])

            def backward(carry: Any, inputs: Any) -> tuple[Any, None]:
                (dx, sums), (i, weights, saved) = carry, inputs
                gradient, dx = pull_back(weights, saved, dx)
                sums = jax.tree.map(
                    lambda total, new: total.at[i].add(new.astype(total.dtype)), sums, gradient
                )
                return (dx, sums), None

            turns = jnp.arange(num_layers), stack, saved
            (dx, sums), _ = jax.lax.scan(backward, (dx, total[stacked]), turns, reverse=True)
            (to_embed,) = from_embed(dx)
            others = jax.tree.map(
                lambda total, *new: total + sum(part.astype(total.dtype) for part in new),
                _without(total, stacked),
                to_head,
                to_embed,
            )
        return {**others, stacked: sums}, metrics

    return add


def forward_and_saved(layer: Any, stack: PyTree, x: Any, keys: Any) -> tuple[Any, PyTree, Any]:
    """Applies all layers. Returns the result; what the backward pass reads except the weights,
    stacked; and a function `pull_back(weights, saved, dy) -> (gradient, dx)` of one layer.
    """
    places, structure = [], None

    def forward(x: Any, inputs: Any) -> tuple[Any, list[Any]]:
        nonlocal places, structure
        weights, key = inputs
        y, back = jax.vjp(lambda weights, x: layer(weights, x, key), weights, x)
        # `back` is a pytree of the values that it reads. Weights are among them: they are in
        # the stack already, and are not saved a second time.
        values, structure = jax.tree.flatten(back)
        own = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(weights))}
        places = [own.get(id(value)) for value in values]
        return y, [v for v, place in zip(values, places, strict=True) if place is None]

    def pull_back(weights: PyTree, saved: list[Any], dy: Any) -> tuple[PyTree, Any]:
        own, others = jax.tree.leaves(weights), iter(saved)
        values = [next(others) if place is None else own[place] for place in places]
        return jax.tree.unflatten(structure, values)(dy)

    x, saved = jax.lax.scan(forward, x, (stack, keys))
    return x, saved, pull_back


def _check_total(total: PyTree, params: PyTree) -> None:
    """Refuses sums of other shapes, to which a gradient would be added by broadcasting."""

    def check(path: Any, param: Any, leaf: Any) -> None:
        if jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"total{jax.tree_util.keystr(path)} of shape {jnp.shape(leaf)} must be of the"
                f" parameter's shape {jnp.shape(param)}"
            )

    jax.tree_util.tree_map_with_path(check, params, total)


def _without(tree: Mapping[str, PyTree], name: str) -> dict[str, PyTree]:
    return {key: part for key, part in tree.items() if key != name}
