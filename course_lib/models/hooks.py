"""Where a parallel strategy takes hold of the model, and the products that several layers
share.

`Hooks` says what one of many devices does differently inside of the model; by default, nothing.
Layers whose products have one input (`columns`), or add up to one result (`rows`), exchange it
once if their products are one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from course_lib.models import attention

Shape = tuple[tuple[int, ...], tuple[int, ...]]  # inputs and outputs of a layer
_MATRICES = (((2,), (0,)), ((), ()))  # dimension numbers of [B L in] times [in out]


def _lookup(table: Float[Array, "V D"], tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    return jnp.take(table, tokens, axis=0)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Where a parallel strategy takes hold of the model. By default nothing is taken hold of.

    Attributes:
      shards: into how many parts the heads, the MLP's hidden width and the vocabulary are cut:
        one device holds one.
      column: the product of a layer whose outputs are cut, as `jax.lax.dot_general`.
      row: the product of a layer whose inputs are cut; its bias is added once, to the whole
        sum.
      lookup: reads rows of the token table.
      positions: the positions that this device has of a sequence of L tokens.
      attend_positions: the positions of the queries and keys that reach this device's
        attention, given how many.
      attend: as `attention.attend`.
      named: marks a value of `layers.NAMES`, for rematerialization; may also say where it is
        placed.
      layer: wraps the class of a layer, to change the parameters that it sees.
      experts: runs this device's experts, a function, on tokens [E B C D] for all of them.
    """

    shards: int = 1
    column: Callable[..., Array] = jax.lax.dot_general
    row: Callable[..., Array] = jax.lax.dot_general
    lookup: Callable[..., Array] = _lookup
    positions: Callable[[int], Array] = jnp.arange
    attend_positions: Callable[[int], Array] = jnp.arange
    attend: Callable[..., Array] = attention.attend
    named: Callable[[Array, str], Array] = checkpoint_name
    layer: Callable[[type[nn.Module]], type[nn.Module]] = lambda module: module
    experts: Callable[[Callable[[Array], Array], Array], Array] = lambda run, tokens: run(
        tokens
    )


def flat(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """As `jax.lax.dot_general` of x [B L inputs] with a kernel [inputs outputs], with B and L
    as one: faster on a CPU.

    The gradient of the kernel is a sum over B and L. Where these are two dimensions, XLA
    transposes the gradients in memory and then multiplies two transposed matrices, for which
    its CPU backend has no fast product. Where there are more inputs than outputs, the fast
    product is that of the transposed gradient: inputs in two dimensions make XLA keep it.

    Args:
      x: [..., *inputs].
      kernel: [*inputs, *outputs].
      dimension_numbers: as a layer of Flax gives them: the last dimensions of x with the first
        of the kernel, and no batch.
      options: of `jax.lax.dot_general`, as `precision`.

    Returns:
      [..., *outputs].

    Raises:
      TypeError: if x and kernel do not have the same inputs.
    """
    # So many of the kernel's dimensions, the first ones, are inputs.
    summed = len(dimension_numbers[0][1])
    inputs, outputs = math.prod(kernel.shape[:summed]), kernel.shape[summed:]
    cut = (2, inputs // 2) if inputs > math.prod(outputs) and inputs % 2 == 0 else (inputs,)
    axes = tuple(range(len(cut)))
    dimensions = (tuple(axis + 1 for axis in axes), axes), ((), ())
    product = jax.lax.dot_general(
        x.reshape(-1, *cut), kernel.reshape(*cut, -1), dimensions, **options
    )
    return product.reshape(*x.shape[: x.ndim - summed], *outputs)


def with_products(hooks: Hooks, flat_products: bool) -> Hooks:
    """Returns hooks with `flat` products, if asked for and where no strategy has products of
    its own.
    """
    if flat_products and hooks.column is jax.lax.dot_general:
        return dataclasses.replace(hooks, column=flat, row=flat)
    return hooks


def columns(
    hooks: Hooks, x: Float[Array, "B L D"], weights: Sequence[Mapping[str, Array]]
) -> list[Array]:
    """Returns the products of one input with several kernels [D ...], each with its bias.

    Devices that share the work do it in one product, with all of their columns side by side:
    its input is exchanged once.
    """
    kernels = [layer["kernel"].astype(x.dtype) for layer in weights]
    flat = [kernel.reshape(x.shape[-1], -1) for kernel in kernels]
    if hooks.shards == 1:
        products = [hooks.column(x, kernel, _MATRICES) for kernel in flat]
    else:
        ends = np.cumsum([kernel.shape[1] for kernel in flat])
        products = jnp.split(
            hooks.column(x, jnp.concatenate(flat, axis=1), _MATRICES), ends[:-1], axis=-1
        )
    shaped = [
        y.reshape(*y.shape[:2], *kernel.shape[1:])
        for y, kernel in zip(products, kernels, strict=True)
    ]
    return [_with_bias(y, layer) for y, layer in zip(shaped, weights, strict=True)]


def rows(
    hooks: Hooks, xs: Sequence[Array], weights: Sequence[Mapping[str, Array]]
) -> Float[Array, "B L D"]:
    """Returns the sum of several inputs' products with kernels [... D], and of their biases.

    Devices that share the work do it in one product, with all of their rows below each other:
    its sum is exchanged once.
    """
    flat = [x.reshape(*x.shape[:2], -1) for x in xs]
    kernels = [
        layer["kernel"].astype(x.dtype).reshape(x.shape[-1], -1)
        for x, layer in zip(flat, weights, strict=True)
    ]
    if hooks.shards > 1:
        flat, kernels = [jnp.concatenate(flat, axis=-1)], [jnp.concatenate(kernels, axis=0)]
    products = [
        hooks.row(x, kernel, _MATRICES) for x, kernel in zip(flat, kernels, strict=True)
    ]
    y = functools.reduce(jnp.add, products)
    return functools.reduce(_with_bias, weights, y)


def _with_bias(x: Array, weights: Mapping[str, Array]) -> Array:
    if "bias" not in weights:
        return x
    bias = weights["bias"].astype(x.dtype)
    return x + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)


def initialize(key: Array, shape: Shape, use_bias: bool) -> dict[str, Array]:
    """Returns a layer's kernel [inputs outputs] and, with `use_bias`, its bias [outputs], as
    `nn.DenseGeneral` starts with.
    """
    inputs, outputs = shape
    kernel = nn.initializers.lecun_normal()(
        key, (math.prod(inputs), math.prod(outputs))
    ).reshape(inputs + outputs)
    return {"kernel": kernel} | ({"bias": jnp.zeros(outputs)} if use_bias else {})


def initialize_all(
    key: Array, shapes: Mapping[str, Shape], use_bias: bool
) -> dict[str, dict[str, Array]]:
    """Returns the weights of several layers by name, as `initialize` does those of one."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: initialize(key, shape, use_bias)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
