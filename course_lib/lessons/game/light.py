"""The loss of move 8: the game's model in bfloat16, with rematerialized blocks, flash attention
and the loss in chunks. Later moves begin with it.
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
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = model.embed(params, batch[:, :-1])
    x, _ = jax.lax.scan(lambda x, layer: (_block(layer, x), None), x, params["layers"])
    per_label, _ = large_vocabulary.linear_cross_entropy(
        model.norm(params["norm"], x),
        params["output"],
        batch[:, 1:],
        chunks=CHUNKS,
        along="tokens",
    )
    return per_label.mean()


@jax.checkpoint  # saves its input alone
def _block(layer: PyTree, x: jax.Array) -> jax.Array:
    x = x + _attention(layer, model.norm(layer["norm_1"], x))
    return x + model.mlp(layer, model.norm(layer["norm_2"], x))


def _attention(layer: PyTree, x: jax.Array) -> jax.Array:
    q, k, v = jnp.einsum("bld,dchk->cblhk", x, layer["qkv"])
    y = flash_attention.attend(q, k, v, tile=min(64, x.shape[1]))
    return jnp.einsum("blhk,hkd->bld", y, layer["out"])
