"""Matrix products that layers share.

Several layers may read the same input (`columns`), or add up their results (`rows`). Computed
as one product, they exchange this input or sum with other devices only once.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from course_lib.models.hooks import Hooks

_MATRICES = (((2,), (0,)), ((), ()))  # dimension numbers of [B L in] times [in out]


def flat(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Multiplies x [..., *inputs] by a kernel [*inputs, *outputs], as `jax.lax.dot_general`,
    with B and L as one dimension, which is faster on a CPU.

    The gradient of the kernel is a sum over B and L. Where these are two dimensions, XLA
    transposes the gradients in memory and then multiplies two transposed matrices, for which
    its CPU backend has no fast product. If there are more inputs than outputs, the fast product
    gives the transposed gradient; XLA keeps it if the inputs are two dimensions.
    """
    # The first `summed` dimensions of the kernel are inputs.
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
    """Fills in the products that the strategy leaves to the model: `flat`, or JAX's own."""
    if hooks.column is not None:
        return hooks
    product = flat if flat_products else jax.lax.dot_general
    return dataclasses.replace(hooks, column=product, row=product)


def columns(
    hooks: Hooks, x: Float[Array, "B L D"], weights: Sequence[Mapping[str, Array]]
) -> list[Array]:
    """Returns the products of one input with several kernels [D ...], each with its bias. If
    devices share the work, one product computes all columns: the input is exchanged once.
    """
    product = hooks.column or jax.lax.dot_general
    kernels = [layer["kernel"].astype(x.dtype) for layer in weights]
    flat = [kernel.reshape(x.shape[-1], -1) for kernel in kernels]
    if hooks.shards == 1:
        products = [product(x, kernel, _MATRICES) for kernel in flat]
    else:
        ends = np.cumsum([kernel.shape[1] for kernel in flat])
        products = jnp.split(
            product(x, jnp.concatenate(flat, axis=1), _MATRICES), ends[:-1], axis=-1
        )
    shaped = [
        y.reshape(*y.shape[:2], *kernel.shape[1:])
        for y, kernel in zip(products, kernels, strict=True)
    ]
    return [with_bias(y, layer) for y, layer in zip(shaped, weights, strict=True)]


def rows(
    hooks: Hooks, xs: Sequence[Array], weights: Sequence[Mapping[str, Array]]
) -> Float[Array, "B L D"]:
    """Returns the sum of several inputs' products with kernels [... D], and of their biases. If
    devices share the work, one product has all rows: the sum is exchanged once.
    """
    flat = [x.reshape(*x.shape[:2], -1) for x in xs]
    kernels = [
        layer["kernel"].astype(x.dtype).reshape(x.shape[-1], -1)
        for x, layer in zip(flat, weights, strict=True)
    ]
    if hooks.shards > 1:
        flat, kernels = [jnp.concatenate(flat, axis=-1)], [jnp.concatenate(kernels, axis=0)]
    product = hooks.row or jax.lax.dot_general
    products = [product(x, kernel, _MATRICES) for x, kernel in zip(flat, kernels, strict=True)]
    y = functools.reduce(jnp.add, products)
    return functools.reduce(with_bias, weights, y)


def with_bias(x: Array, weights: Mapping[str, Array]) -> Array:
    """Adds a layer's bias, if it has one."""
    if "bias" not in weights:
        return x
    bias = weights["bias"].astype(x.dtype)
    return x + bias.reshape((1,) * (x.ndim - bias.ndim) + bias.shape)
