import functools

import jax
import jax.numpy as jnp
import optax

from course_lib import lessons
from course_lib.lessons import game
from course_lib.smaller_and_faster import flash_attention, large_vocabulary

C = 8  # chunks of each sequence, for the loss


def attention(layer, x):
    q, k, v = jnp.einsum("bld,dchk->cblhk", x, layer["qkv"])
    y = flash_attention.attend(q, k, v, tile=min(64, x.shape[1]))
    return jnp.einsum("blhk,hkd->bld", y, layer["out"])


@jax.checkpoint  # saves its input alone
def block(layer, x):
    x = x + attention(layer, game.norm(layer["norm_1"], x))
    return x + game.mlp(layer, game.norm(layer["norm_2"], x))


def cross_entropy(params, x, labels):
    x = game.norm(params["norm"], x)
    per_label, _ = large_vocabulary.linear_cross_entropy(
        x, params["output"], labels, chunks=C, along="tokens"
    )
    return per_label.mean()


def loss(params, batch):
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    x = game.embed(params, batch[:, :-1])
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return cross_entropy(params, x, batch[:, 1:])


def make_step(config):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = config.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


lessons.submit(make_step, name="bfloat16 moments", optimizer="adamw_bf16")
