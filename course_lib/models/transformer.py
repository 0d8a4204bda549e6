"""A GPT-style Transformer: a language model that predicts every token from those before it.

It is the model of the tutorial series that this course builds on, so that its published
measurements can be compared with ours
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html).
It has learned positions, N layers and an output layer. A layer is an MLP and an attention, each
with a norm before it, and each added to its input. `layers` lists the options of other models,
such as GPT-2 and Llama (`configs.llama2_7b`). With `tied_embeddings` the output layer is the
token table (Press and Wolf, 2016, https://arxiv.org/abs/1608.05859). Parameters are float32,
everything else has `dtype`: logits are rounded to `dtype`, then cast to float32.

The model is functions of a dict of parameters. `Transformer` makes a Flax module of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from course_lib.models import layers, parameters
from course_lib.models.configuration import check
from course_lib.models.hooks import Hooks
from course_lib.models.layers import Key, Params
from course_lib.models.products import with_products
from course_lib.text import batches

PyTree = Any


def apply(
    config: ConfigDict, params: Params, tokens: Array, key: Key = None, hooks: Hooks = Hooks()
) -> tuple[Any, Float[Array, "N B"] | None]:
    """Returns logits [B L V] of the next tokens, rounded to `dtype`, then cast to float32, and
    the load-balancing loss of each layer, or None without experts. `tokens` [B, L] may be this
    device's part, if the hooks say so. Inside `jax.jit`, a token outside the vocabulary has an
    embedding of NaN.
    """
    _check_tokens(tokens, config.vocab_size)
    check(config, tokens.shape[1])
    hooks = with_products(hooks, config.flat_products)
    params = hooks.params(params)
    if config.tied_embeddings:  # in one place, so that the gradients of both uses add up there
        table = params["embed"]["embedding"].astype(jnp.float32)
        params = {**params, "embed": {"embedding": table}}
    with jax.named_scope("Transformer"):
        x = embed(config, hooks, params, tokens)
        x, balance = all_layers(config, hooks, params, x, hooks.own_key(key))
        return head(config, hooks, params, x), balance


def embed(
    config: ConfigDict, hooks: Hooks, params: Params, tokens: Int[Array, "B L"]
) -> Float[Array, "B _ D"]:
    """Returns the activations of tokens and their positions."""
    # Both tables are read in float32: the gradient of a row sums over all its uses, more than
    # bfloat16 can add up.
    with jax.named_scope("embed"):
        x = hooks.lookup(params["embed"]["embedding"].astype(jnp.float32), tokens)
    if config.positions == "learned":
        with jax.named_scope("pos_emb"):
            places = hooks.positions(tokens.shape[1])
            table = params["pos_emb"]["embedding"].astype(jnp.float32)
            x = x + jnp.take(table, places, axis=0)[None]
    return x.astype(jnp.dtype(config.dtype))


def all_layers(
    config: ConfigDict, hooks: Hooks, params: Params, x: Float[Array, "B _ D"], key: Key = None
) -> tuple[Float[Array, "B _ D"], Float[Array, "N B"] | None]:
    """Applies N layers. With `scan_layers` one layer is traced and compiled; its parameters in
    "block" have a leading axis of N.
    """
    if config.scan_layers:
        one = layers.changed_layer(config, hooks)
        keys = None if key is None else jax.random.split(key, config.num_layers)
        xs = params["block"], keys
        return jax.lax.scan(lambda x, of: one(of[0], x, of[1]), x, xs, config.num_layers)
    balances = []
    for name in (f"block_{i}" for i in range(config.num_layers)):
        x, balance = layers.changed_layer(config, hooks, name)(params[name], x, key)
        balances.append(balance)
    return x, jnp.stack(balances) if config.num_experts else None


def head(config: ConfigDict, hooks: Hooks, params: Params, x: Float[Array, "B _ D"]) -> Any:
    """Returns logits [B L V], rounded to `dtype`, then cast to float32; or what `hooks.output`
    makes of their factors.
    """
    x = layers.norm(params, "post_norm", x, **layers.norm_options(config))
    if config.tied_embeddings:
        params = {**params, "output_layer": {"kernel": params["embed"]["embedding"].T}}
    if hooks.output:
        with jax.named_scope("output_layer"):
            weights = params["output_layer"]
            return hooks.output(x, weights["kernel"], weights.get("bias"))
    return layers.dense(params, "output_layer", x, hooks.column).astype(jnp.float32)


class Transformer(nn.Module):
    """The model as a Flax module.

        params = model.init(key, tokens, train=False)["params"]
        logits = model.apply({"params": params}, tokens, train=True, rngs={"dropout": key})

    Attributes:
      config: the `model` part of a configuration (`course_lib.configs`).
    """

    config: ConfigDict

    @nn.compact
    def __call__(self, tokens: Array, *, train: bool = True) -> Array:
        """Returns the logits of `apply`. `train` turns dropout on."""
        if self.is_initializing():
            check(self.config, tokens.shape[1])
            key = self.scope.rngs["params"].rng
            for name, part in parameters.init(key, self.config).items():
                self.put_variable("params", name, part)
        params = self.variables["params"]
        parameters.check(params, self.config)
        drops = train and self.config.dropout_rate > 0 and not self.is_initializing()
        key = self.scope.rngs["dropout"].rng if drops else None
        return apply(self.config, params, tokens, key)[0]


def function(
    config: ConfigDict, hooks: Hooks = Hooks(), *, balance: bool = False
) -> Callable[..., Any]:
    """Returns the model as `apply_fn(params, tokens, rng=None) -> logits`; with `balance` as
    `-> (logits, balance)`, with the load-balancing loss of each sequence, the mean over layers.
    """

    def apply_fn(params: Params, tokens: Array, rng: Key = None) -> Any:
        logits, of_layers = apply(config, params, tokens, rng, hooks)
        return (logits, of_layers.mean(axis=0)) if balance else logits

    return apply_fn


class Parts(NamedTuple):
    """The model as functions, for those who run it layer by layer."""

    embed: Callable[[Params, Array], Array]  # (params, tokens) -> activations [B L D]
    layer: Callable[[Params, Array, Key], Array]  # (params of one layer, activations, key)
    head: Callable[[Params, Array], Any]  # (params, activations) -> logits
    own_key: Callable[[Key], Key]  # as in `Hooks`, for those who make the keys of layers


def parts(config: ConfigDict, hooks: Hooks = Hooks()) -> Parts:
    """Returns the parts of a model with scanned layers."""
    hooks = with_products(hooks, config.flat_products)
    one = layers.changed_layer(config, hooks)

    def layer(params: Params, x: Array, key: Key = None) -> Array:
        return one(params, x, key)[0]

    return Parts(
        functools.partial(embed, config, hooks),
        layer,
        functools.partial(head, config, hooks),
        hooks.own_key,
    )


def _check_tokens(tokens, vocab_size):
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} must be integers [B, L]"
        )
    if isinstance(tokens, jax.core.Tracer):
        return
    if getattr(tokens, "is_fully_addressable", True):
        batches.check_tokens(np.asarray(tokens), vocab_size)


def num_params(params: PyTree) -> int:
    """Returns P, the number of parameters: arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def abstract_params(model: nn.Module, *inputs: jax.ShapeDtypeStruct) -> PyTree:
    """Returns shapes and dtypes of the parameters; nothing is computed or allocated."""
    return jax.eval_shape(
        lambda *inputs: model.init(jax.random.key(0), *inputs, train=False)["params"], *inputs
    )
