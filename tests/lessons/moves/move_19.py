import functools

import jax
import jax.numpy as jnp
import optax

from course_lib import lessons
from course_lib.lessons import game
from course_lib.smaller_and_faster import (
    flash_attention,
    large_vocabulary,
    offload,
    smallest_step,
)

M = 8  # minibatches
C = 8  # chunks of each sequence, for the loss


def half(tree):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), tree)


def flash(layer, x):
    q, k, v = jnp.einsum("bld,dchk->cblhk", x, layer["qkv"])
    y = flash_attention.attend(q, k, v, tile=min(64, x.shape[1]))
    return jnp.einsum("blhk,hkd->bld", y, layer["out"])


@jax.checkpoint  # saves its input alone
def block(layer, x, key):
    layer = half(layer)
    x = x + flash(layer, game.norm(layer["norm_1"], x))
    return x + game.mlp(layer, game.norm(layer["norm_2"], x))


def embed(rest, batch):
    return game.embed(half(rest), batch[:, :-1])


def head(rest, x, batch):
    rest, labels = half(rest), batch[:, 1:]
    x = game.norm(rest["norm"], x)
    per_label, _ = large_vocabulary.linear_cross_entropy(
        x, rest["output"], labels, chunks=C, along="tokens"
    )
    return per_label.mean(), {"loss": (per_label.sum(), jnp.float32(labels.size))}


add = smallest_step.gradient_in_place(embed, block, head, stacked="layers")


def accumulate(params, batch):
    def add_minibatch(total, minibatch):
        total, metrics = add(total, params, minibatch, None)
        return total, metrics["loss"][0]

    zeros, labels = jax.tree.map(jnp.zeros_like, params), batch[:, 1:].size
    minibatches = batch.reshape(M, -1, batch.shape[1])
    total, losses = jax.lax.scan(add_minibatch, zeros, minibatches)
    return losses.sum() / labels, jax.tree.map(lambda sum: sum / labels, total)


def make_step(config):
    optimizer = offload.streamed(config.optimizer, stacked=("layers",))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        value, grads = accumulate(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


lessons.submit(make_step, name="gradients in place", moments="host")
