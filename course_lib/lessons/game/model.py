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

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a game, and its optimizer.

    Attributes:
      layers: number of layers.
      width: of the model.
      heads: of the attention; they divide the width.
      vocabulary: number of tokens.
      length: tokens per sequence.
      batch_size: sequences per step.
      optimizer: an Optax optimizer, which the step has to use.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch_size: int
    optimizer: optax.GradientTransformation


REAL = Config(12, 768, 12, 50_257, 1024, 16, optax.adamw(3e-4))
"""The model that is to fit."""


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
