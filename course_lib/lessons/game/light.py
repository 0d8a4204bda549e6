"""The model of move 8, with which later moves begin: the game's model in bfloat16, with
rematerialized blocks, flash attention and the loss in chunks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from course_lib.lessons.game import model
from course_lib.smaller_and_faster import flash_attention, large_vocabulary

PyTree = Any

CHUNKS = 8
"""The number of chunks into which the loss cuts each sequence."""


def light_loss(params: PyTree, batch: jax.Array) -> jax.Array:
    """Returns the mean loss over a batch of tokens [B L+1], like `game.loss`, in less memory.

    Args:
      params: as `game.init` returns them.
      batch: tokens; `CHUNKS` divides L.
    """
    params = _half(params)
    x = light_embed(params, batch)
    x, _ = jax.lax.scan(lambda x, layer: (light_block(layer, x), None), x, params["layers"])
    return light_head(params, x, batch)[0]


def light_embed(params: PyTree, batch: jax.Array) -> jax.Array:
    """Returns the embeddings [B L D] of a batch's tokens [B L+1] without the last column."""
    return model.embed(_half(params), batch[:, :-1])


@jax.checkpoint  # saves its input alone
def light_block(layer: PyTree, x: jax.Array, key: None = None) -> jax.Array:
    """Applies one layer to x [B L D]. `key`, which `smallest_step` passes, is not used."""
    layer = _half(layer)
    q, k, v = jnp.einsum("bld,dchk->cblhk", model.norm(layer["norm_1"], x), layer["qkv"])
    y = flash_attention.attend(q, k, v, tile=min(64, x.shape[1]))
    x = x + jnp.einsum("blhk,hkd->bld", y, layer["out"])
    return x + model.mlp(layer, model.norm(layer["norm_2"], x))


def light_head(
    params: PyTree, x: jax.Array, batch: jax.Array
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns the mean loss, and the metrics {"loss": (sum, number of labels)}.

    Args:
      params: as `game.init` returns them.
      x: the last layer's activations [B L D]; `CHUNKS` divides L.
      batch: tokens [B L+1]; all but the first column are the labels.
    """
    params, labels = _half(params), batch[:, 1:]
    per_label, _ = large_vocabulary.linear_cross_entropy(
        model.norm(params["norm"], x), params["output"], labels, chunks=CHUNKS, along="tokens"
    )
    return per_label.mean(), {"loss": (per_label.sum(), jnp.float32(labels.size))}


def _half(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
