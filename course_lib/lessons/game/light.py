"""The model of move 8: the game's, in bfloat16, with rematerialized blocks, flash attention and
the loss in chunks. Later moves begin with it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from course_lib.lessons.game import model
from course_lib.smaller_and_faster import flash_attention, large_vocabulary

PyTree = Any

CHUNKS = 8
"""Parts into which the loss cuts each sequence."""


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
    """Returns the vectors [B L D] of a batch's tokens [B L+1], without the last token of each
    sequence.
    """
    return model.embed(_half(params), batch[:, :-1])


@jax.checkpoint  # saves its input alone
def light_block(layer: PyTree, x: jax.Array, key: None = None) -> jax.Array:
    """Applies one layer to x [B L D]. Nothing is random: `key` is not read."""
    layer = _half(layer)
    q, k, v = jnp.einsum("bld,dchk->cblhk", model.norm(layer["norm_1"], x), layer["qkv"])
    y = flash_attention.attend(q, k, v, tile=min(64, x.shape[1]))
    x = x + jnp.einsum("blhk,hkd->bld", y, layer["out"])
    return x + model.mlp(layer, model.norm(layer["norm_2"], x))


def light_head(
    params: PyTree, x: jax.Array, batch: jax.Array
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns the mean loss of predicting the labels of a batch [B L+1] from the last layer's x
    [B L D]; and, under "loss", its sum and the number of labels. All labels count alike.
    """
    params, labels = _half(params), batch[:, 1:]
    per_label, _ = large_vocabulary.linear_cross_entropy(
        model.norm(params["norm"], x), params["output"], labels, chunks=CHUNKS, along="tokens"
    )
    return per_label.mean(), {"loss": (per_label.sum(), jnp.float32(labels.size))}


def _half(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
