"""Three training steps of one small model, for notebook 06: each is right, and too slow.

All take `(params, x)` and return new parameters. `FAULTS` says where the time of each goes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

N, B, L, D = 4, 4, 128, 64  # layers, batch, sequence length, width
RATE = 0.1


def inputs():
    """Returns parameters and a batch, the same in each call."""
    random = np.random.default_rng(0)
    shapes = {"qkv": (N, D, 3 * D), "up": (N, D, 4 * D), "down": (N, 4 * D, D)}
    params = {
        name: random.normal(size=shape).astype(np.float32) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    return params, random.normal(size=(B, L, D)).astype(np.float32)


def product(q, k):
    return q @ k.mT


def broadcast(q, k):
    return jnp.sum(q[:, :, None] * k[:, None], axis=-1)


def layer(x, w, scores=product):
    with jax.named_scope("attention"):
        q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
        x = x + jax.nn.softmax(scores(q, k) / D**0.5) @ v
    with jax.named_scope("mlp"):
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6), None


def model(params, x, layer=layer):
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 3)


def descend(params, grads, limits):
    with jax.named_scope("optimizer"):
        return jax.tree.map(
            lambda p, g, limit: p - RATE * jnp.clip(g, -limit, limit), params, grads, limits
        )


@jax.jit
def limits_of(grads):
    return jax.tree.map(lambda g: jnp.max(jnp.abs(g)), grads)


@jax.jit
def plain(params, x):
    """The step without a fault."""
    grads = jax.grad(model)(params, x)
    return descend(params, grads, limits_of(grads))


def first(params, x):
    grads = jax.block_until_ready(_gradient(params, x))
    limits = {}
    for name, grad in grads.items():  # one number after the other, in Python
        limits[name] = np.float32(
            max(abs(value) for value in np.asarray(grad).ravel().tolist())
        )
    return _descend(params, grads, limits)


_gradient, _descend = jax.jit(jax.grad(model)), jax.jit(descend)


@jax.jit
def second(params, x):
    grads = jax.grad(model)(params, x, functools.partial(layer, scores=broadcast))
    return descend(params, grads, limits_of(grads))


@jax.jit
def third(params, x):
    grads = jax.grad(model)(params, x)
    with jax.named_scope("optimizer"):  # the largest number is the last of the sorted ones
        limits = jax.tree.map(lambda g: jnp.sort(jnp.abs(g).ravel())[-1], grads)
    return descend(params, grads, limits)


FAULTS = {"first": "host", "second": "attention", "third": "optimizer"}
