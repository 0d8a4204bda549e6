"""Two language models that are not the course's, with names of their own: one of Flax NNX, one
of a dict of arrays. Each is `(apply_fn, init_params)`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from course_lib import training

V, D, L, N = 24, 16, 8, 2
LIST = getattr(nnx, "List", list)  # Flax 0.11 takes lists


class Block(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.RMSNorm(D, rngs=rngs)
        self.mix = nnx.Linear(D, D, rngs=rngs)
        self.up = nnx.Linear(D, 2 * D, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        before = jnp.tri(x.shape[1], dtype=x.dtype) / L  # a mean over earlier tokens
        x = x + jnp.einsum("ts,bsd->btd", before, self.mix(self.scale(x)))
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs, vocabulary):
        self.table = nnx.Embed(vocabulary, D, rngs=rngs)
        self.table.dtype = None  # that of the table, which a policy casts; not of its beginning
        self.blocks = LIST(Block(rngs) for _ in range(N))

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def of_nnx(vocabulary=V):
    def init_params(rng):
        return nnx.state(Model(nnx.Rngs(rng), vocabulary), nnx.Param)

    return training.as_function(Model(nnx.Rngs(0), vocabulary)), init_params


def layer(w, x):
    before = jnp.tri(x.shape[1], dtype=x.dtype) / L
    x = x + jnp.einsum("ts,bsd->btd", before, x @ w["mix"])
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def of_dict(vocabulary=V, wrap=lambda layer: layer):
    def apply_fn(params, tokens, rng=None):
        x = params["table"][tokens]
        for number in range(N):
            x = wrap(layer)(jax.tree.map(lambda w, n=number: w[n], params["stack"]), x)
        return x @ params["head"]

    def init_params(rng):
        shapes = dict(mix=(N, D, D), up=(N, D, 2 * D), down=(N, 2 * D, D))
        draw = iter(jax.random.split(rng, 5))
        stack = {n: jax.random.normal(next(draw), s) / D**0.5 for n, s in shapes.items()}
        table, head = (jax.random.normal(next(draw), (vocabulary, D)) for _ in range(2))
        return {"table": table, "stack": stack, "head": head.T / D**0.5}

    return apply_fn, init_params


MODELS = {"NNX": of_nnx, "dict": of_dict}
