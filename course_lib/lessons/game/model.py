"""The game's model in plain JAX: the pieces that a learner begins with, and the first step.

A Transformer of GPT-2's shape (Radford et al., 2019,
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)
without biases and with an output matrix of its own: 163 million parameters. The parameters are
a dict of arrays; those of the layers are stacked along a first axis. A layer's matrices may
have any float dtype, and the products follow it; norms, softmax and loss compute in float32.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from course_lib.smaller_and_faster import flash_attention, large_vocabulary

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a game, and its optimizer."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int  # tokens per sequence
    batch_size: int
    optimizer: optax.GradientTransformation  # which the step has to use


REAL = Config(12, 768, 12, 50_257, 1024, 16, optax.adamw(3e-4))  # the model that is to fit


def init(config: Config, key: jax.Array) -> PyTree:
    """Returns the parameters, float32."""
    N, D, V, H = config.layers, config.width, config.vocabulary, config.heads
    keys = iter(jax.random.split(key, 7))

    def normal(*shape, fan_in):
        return jax.random.normal(next(keys), shape) / math.sqrt(fan_in)

    return {
        "tokens": normal(V, D, fan_in=D),
        "positions": normal(config.length, D, fan_in=D),
        "layers": {
            "norm_1": jnp.ones((N, D)),
            "qkv": normal(N, D, 3, H, D // H, fan_in=D),
            "out": normal(N, H, D // H, D, fan_in=D),
            "norm_2": jnp.ones((N, D)),
            "up": normal(N, D, 4 * D, fan_in=D),
            "down": normal(N, 4 * D, D, fan_in=4 * D),
        },
        "norm": jnp.ones(D),
        "output": normal(D, V, fan_in=D),
    }


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divides each vector of x [... D] by its root mean square (RMSNorm), in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
    return (scale * y).astype(x.dtype)


@jax.named_scope("attention")
def attention(layer: PyTree, x: jax.Array) -> jax.Array:
    """Lets each token of x [B L D] look at the tokens before it."""
    q, k, v = jnp.einsum("bld,dchk->cbhlk", x, layer["qkv"])
    scores = jnp.einsum("bhqk,bhsk->bhqs", q, k) / math.sqrt(q.shape[-1])
    past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(past, scores.astype(jnp.float32), -jnp.inf))
    y = jnp.einsum("bhqs,bhsk->bhqk", weights.astype(x.dtype), v)
    return jnp.einsum("bhqk,hkd->bqd", y, layer["out"])


@jax.named_scope("mlp")
def mlp(layer: PyTree, x: jax.Array) -> jax.Array:
    """Transforms each token of x [B L D] by itself."""
    return jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def block(layer: PyTree, x: jax.Array) -> jax.Array:
    """Applies one layer to x [B L D]. `layer` holds the parameters of this layer alone."""
    x = x + attention(layer, norm(layer["norm_1"], x))
    return x + mlp(layer, norm(layer["norm_2"], x))


@jax.named_scope("embed")
def embed(params: PyTree, inputs: jax.Array) -> jax.Array:
    """Returns the vectors [B L D] of tokens [B L]."""
    return params["tokens"][inputs] + params["positions"]


@jax.named_scope("loss")
def cross_entropy(params: PyTree, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of predicting the labels [B L] from the last layer's x [B L D]."""
    logits = (norm(params["norm"], x) @ params["output"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss(params: PyTree, batch: jax.Array) -> jax.Array:
    """Returns the mean loss over a batch of tokens [B L+1]."""
    x = embed(params, batch[:, :-1])
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return cross_entropy(params, x, batch[:, 1:])


def first_step(config: Config) -> Callable[..., Any]:
    """Makes the step as first written, which does not fit: the first submission."""

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = config.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


# The model of move 8, with which later moves begin: bfloat16, rematerialized blocks, flash
# attention, and the loss in chunks.

CHUNKS = 8  # of each sequence, in the loss


def light_loss(params: PyTree, batch: jax.Array) -> jax.Array:
    """Returns the mean loss over a batch of tokens [B L+1], like `game.loss`, in less memory.
    Eight divides L.
    """
    x, params = light_embed(params, batch), _half(params)
    x, _ = jax.lax.scan(lambda x, layer: (light_block(layer, x), None), x, params["layers"])
    return light_head(params, x, batch)[0]


def light_embed(params: PyTree, batch: jax.Array) -> jax.Array:
    """Returns the embeddings [B L D] of a batch's tokens [B L+1] without the last column."""
    # In float32: the gradient of a row sums over all its uses, more than bfloat16 can add up.
    return embed(params, batch[:, :-1]).astype(jnp.bfloat16)


@jax.checkpoint  # saves its input alone
def light_block(layer: PyTree, x: jax.Array, key: None = None) -> jax.Array:
    """Applies one layer to x [B L D]. `key`, which `smallest_step` passes, is not used."""
    layer = _half(layer)
    q, k, v = jnp.einsum("bld,dchk->cblhk", norm(layer["norm_1"], x), layer["qkv"])
    y = flash_attention.attend(q, k, v, tile=min(64, x.shape[1]))
    x = x + jnp.einsum("blhk,hkd->bld", y, layer["out"])
    return x + mlp(layer, norm(layer["norm_2"], x))


def light_head(
    params: PyTree, x: jax.Array, batch: jax.Array
) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns the mean loss for the last layer's x [B L D] and a batch's tokens [B L+1], and
    the metrics {"loss": (sum, number of labels)}. Eight divides L.
    """
    params, labels = _half(params), batch[:, 1:]
    per_label, _ = large_vocabulary.linear_cross_entropy(
        norm(params["norm"], x), params["output"], labels, chunks=CHUNKS, along="tokens"
    )
    return per_label.mean(), {"loss": (per_label.sum(), jnp.float32(labels.size))}


def _half(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
