"""The arrays that a block of the 155m model saves for its backward pass, by operation."""

import collections
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from course_lib import configs, training
from course_lib.models import parameters, transformer
from course_lib.one_device import rematerialization

Residual = rematerialization.Residual
LENGTH, WIDTH = 512, 1024  # tokens of a sequence, numbers per token
COPIES = "weights, in bfloat16"
PARTS = {
    "MLP": ("input", "norm", "hidden layer, GELU, output", COPIES),
    "attention": ("input", "norm", "queries, keys, values, output", "scores, softmax", COPIES),
}
"""The operations of each part of a block, in their order."""
PLACES = [(part, operation) for part, operations in PARTS.items() for operation in operations]
Bytes = dict[tuple[str, str], int]  # by part and operation


def of_block(sequences: int, **options: Any) -> list[Residual]:
    """Lists what one block saves of a batch, without its parameters, which are there anyway.
    `options` are fields of the model's configuration, as `remat=("MLP",)`.
    """
    model = configs.get("155m").model
    model.update(dropout_rate=0.0, **{"remat": ()} | options)
    stacks = jax.eval_shape(lambda: parameters.init(jax.random.key(0), model))["block"]
    params = jax.tree.map(
        lambda stack: jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype), stacks
    )
    x = jax.ShapeDtypeStruct((sequences, LENGTH, WIDTH), jnp.bfloat16)
    arrays = rematerialization.residuals(transformer.parts(model).layer, params, x)
    return [array for array in arrays if "argument [0]" not in array.why]


def of_one_more_layer(sequences: int, **options: Any) -> int:
    """Returns the bytes that one more layer of the scan saves. `options` as in `of_block`."""

    def saved(num_layers: int) -> int:
        config = configs.get("155m")
        config.model.update(dropout_rate=0.0, num_layers=num_layers, **{"remat": ()} | options)
        config.data.batch_size, config.training.num_minibatches = sequences, 1
        run = training.build(config)
        state, batch = run.abstract()
        arrays = rematerialization.residuals(
            lambda params, batch: run.loss_fn(params, batch, None)[0], state.params, batch
        )
        return sum(array.bytes for array in arrays if not array.why.startswith("argument"))

    return saved(3) - saved(2)


def by_operation(
    sequences: int, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Bytes, Bytes]]:
    """Returns for each case (options of `of_block`) the bytes that it saves, and those that it
    computes again: the arrays that the first case saves and it does not.
    """
    saved = {
        case: collections.Counter(of_block(sequences, **options))
        for case, options in cases.items()
    }
    first = next(iter(saved.values()))
    return {case: (_sums(arrays), _sums(first - arrays)) for case, arrays in saved.items()}


def _sums(arrays: Mapping[Residual, int]) -> Bytes:
    sums = dict.fromkeys(PLACES, 0)
    for array, times in arrays.items():
        sums[_place(array)] += times * array.bytes
    return sums


def _place(array: Residual) -> tuple[str, str]:
    """Returns the part of the block that an array belongs to, and the operation there."""
    shape, why = array.shape, array.why
    is_square = shape[2:3] == (LENGTH,)  # [B H L L]
    of_heads = len(shape) == 4 or "qkv" in why
    of_mlp = any(word in why for word in ("/mlp", "mlp_hidden", "argument", "block_in"))
    part = "MLP" if of_mlp and not (is_square or of_heads) else "attention"
    if "pre_norm" in why:
        return part, "norm"
    if LENGTH not in shape:
        return part, COPIES
    if is_square:
        return part, "scores, softmax"
    if of_heads or "/attn" in why:
        return part, "queries, keys, values, output"
    inside = "/mlp" in why or "mlp_hidden" in why
    return part, "hidden layer, GELU, output" if inside else "input"
