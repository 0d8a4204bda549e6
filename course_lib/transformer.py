"""A GPT-style Transformer: a language model that predicts every token from those before it.

The model of the tutorial series that this course builds on
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html), so that
its published measurements can be compared: learned positions, N blocks of an MLP and an attention, each normalized
first and added to its input, and an output layer. Parameters and logits are float32, `dtype` is what the rest is computed in.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from course_lib import attention, remat

PyTree = Any

NAMES = {"block_in": "Block", "mlp_hidden": "MLP", "qkv": "Attn", "attn_out": "Attn"}
"""Values that a policy can keep or offload by name, and the module that makes each.

Their shapes: [B L D], [B L F] before the GELU, [B L H 3K], [B L H K].
"""


PARTS = ("embed", "layers", "head")
"""What the model consists of: tokens to activations, N blocks, and activations to logits."""


def _lookup(table: Float[Array, "V D"], tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    return jnp.take(table, tokens, axis=0)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Where a parallel strategy takes hold of the model. By default nothing is taken hold of.

    Attributes:
      shards: into how many parts the heads, the MLP's hidden width and the vocabulary are cut: one device holds one.
      column: the product of a layer whose outputs are cut, as `jax.lax.dot_general`.
      row: the product of a layer whose inputs are cut; its bias is added once, to the whole sum.
      lookup: reads rows of the token table.
      positions: the positions that this device has of a sequence of L tokens.
      attend: as `attention.attend`.
      named: marks a value of `NAMES`, for rematerialization; may also say where it is placed.
      layer: wraps the class of a layer, to change the parameters that it sees.
    """

    shards: int = 1
    column: Callable[..., Array] = jax.lax.dot_general
    row: Callable[..., Array] = jax.lax.dot_general
    lookup: Callable[..., Array] = _lookup
    positions: Callable[[int], Array] = jnp.arange
    attend: Callable[..., Array] = attention.attend
    named: Callable[[Array, str], Array] = checkpoint_name
    layer: Callable[[type[nn.Module]], type[nn.Module]] = lambda module: module


class MLPBlock(nn.Module):
    """LayerNorm, Dense to F = mlp_expansion * D, GELU, Dense back to D, Dropout."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Transforms each position by itself."""
        config, hooks, dtype, width = self.config, self.hooks, jnp.dtype(self.config.dtype), x.shape[-1]
        x = nn.LayerNorm(dtype=dtype, name="pre_norm")(x)
        hidden = config.mlp_expansion * width // hooks.shards
        x = nn.Dense(hidden, dtype=dtype, dot_general=hooks.column, name="input_layer")(x)
        x = hooks.named(x, "mlp_hidden")
        x = nn.gelu(x)
        x = nn.Dense(width, dtype=dtype, dot_general=hooks.row, name="output_layer")(x)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class AttentionBlock(nn.Module):
    """LayerNorm, one Dense for queries, keys and values, attention, Dense back to D, Dropout."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Lets each position read from those that it may see."""
        config, hooks, dtype, width = self.config, self.hooks, jnp.dtype(self.config.dtype), x.shape[-1]
        x = nn.LayerNorm(dtype=dtype, name="pre_norm")(x)
        heads = config.num_heads // hooks.shards
        qkv = nn.DenseGeneral((heads, 3 * config.head_dim), dtype=dtype, dot_general=hooks.column, name="qkv")(x)
        qkv = hooks.named(qkv, "qkv")
        query, key, value = jnp.split(qkv, 3, axis=-1)
        x = hooks.attend(
            query,
            key,
            value,
            causal=config.causal_mask,
            implementation=config.attention,
            softmax_dtype=jnp.dtype(config.softmax_dtype),
        )
        x = hooks.named(x, "attn_out")
        x = nn.DenseGeneral(width, axis=(-2, -1), dtype=dtype, dot_general=hooks.row, name="output_layer")(x)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class Block(nn.Module):
    """An MLP, then an attention, each added to its input."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Applies one layer of the model."""
        given = self.config, self.train, self.hooks
        x = self.hooks.named(x, "block_in")
        x = x + _rematerialized(MLPBlock, "MLP", self.config)(*given, name="mlp")(x)
        x = x + _rematerialized(AttentionBlock, "Attn", self.config)(*given, name="attn")(x)
        return x


class Transformer(nn.Module):
    """The whole model, from tokens to logits.

        params = model.init(key, tokens, train=False)["params"]
        logits = model.apply({"params": params}, tokens, train=True, rngs={"dropout": key})

    Attributes:
      config: the `model` part of a configuration (`course_lib.config`).
      hooks: what of it one of many devices does.
    """

    config: ConfigDict
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(
        self, x: Int[Array, "B L"] | Float[Array, "B _ D"], *, train: bool = True, parts: Sequence[str] = PARTS
    ) -> Float[Array, "B _ V"] | Float[Array, "B _ D"]:
        """Returns float32 logits of the token at each position, given those before it.

        Args:
          x: the tokens before each position, B sequences of L; activations if `parts` does not begin with "embed", those
            of a device's part of the sequences where the hooks divide them.
          train: whether dropout is on; then a random key must come as `rngs={"dropout": key}`.
          parts: those of `PARTS` to run, in that order; without "head" it returns activations.

        Raises:
          ValueError: if L exceeds `max_seq_len`, or the configuration asks for what does not exist.
        """
        config, hooks, dtype, length = self.config, self.hooks, jnp.dtype(self.config.dtype), x.shape[1]
        check(config, length)
        if "embed" in parts:
            # Both tables are read in float32: the gradient of a row sums over all its uses, more than bfloat16 can add up.
            small = nn.initializers.normal(0.02)
            embed = nn.Embed(config.vocab_size // hooks.shards, config.hidden_size, name="embed")
            pos_emb = nn.Embed(config.max_seq_len, config.hidden_size, embedding_init=small, name="pos_emb")
            x = hooks.lookup(embed.embedding, x) + pos_emb(hooks.positions(length))[None]
            x = x.astype(dtype)
        if "layers" in parts:
            block = _rematerialized(hooks.layer(Block), "Block", config)
            if config.scan_layers:  # one traced and compiled block; its parameters have a leading axis of N layers
                scan = nn.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes={"params": 0},
                    split_rngs={"params": True, "dropout": True},
                    length=config.num_layers,
                )
                x, _ = scan(block(config, train, hooks, name="block"), x, None)
            else:
                for layer in range(config.num_layers):
                    x = block(config, train, hooks, name=f"block_{layer}")(x)
        if "head" in parts:
            x = nn.LayerNorm(dtype=dtype, name="post_norm")(x)
            outputs = config.num_outputs // hooks.shards
            x = nn.Dense(outputs, dtype=dtype, dot_general=hooks.column, name="output_layer")(x)
            x = x.astype(jnp.float32)
        return x


def _rematerialized(module: type[nn.Module], name: str, config: ConfigDict) -> type[nn.Module]:
    return remat.wrap(module, name, config.remat, config.remat_policy, config.remat_names, scanned=config.scan_layers)


def check(config: ConfigDict, seq_len: int) -> None:
    """Refuses a model that cannot be.

    Args:
      config: the `model` part of a configuration.
      seq_len: L, the length of the sequences that the model is to see.

    Raises:
      ValueError: naming the field, its value and the fix.
    """
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} must be at most max_seq_len={config.max_seq_len}: later positions have no embedding; "
            "raise max_seq_len or cut the sequences"
        )
    if config.num_heads * config.head_dim != config.hidden_size:
        raise ValueError(
            f"head_dim={config.head_dim} must be hidden_size / num_heads = {config.hidden_size} / {config.num_heads}: "
            "the heads share the width of the model"
        )
    remat.check(config.remat, config.remat_policy, config.remat_names)
    for name in config.remat_names:
        if name not in NAMES:
            names = tuple(config.remat_names)
            raise ValueError(f"remat_names={names!r} must hold names from {tuple(NAMES)}: there is no {name!r}")
        if not {NAMES[name], "Block"} & set(config.remat):
            raise ValueError(
                f"remat={tuple(config.remat)!r} must hold {NAMES[name]!r} or 'Block' for remat_names to hold {name!r}: "
                "that value is made there, and is kept anyway where nothing is rematerialized"
            )
    attention.check(config.attention, dtype=config.dtype, softmax_dtype=config.softmax_dtype, seq_len=seq_len)


def num_params(params: PyTree) -> int:
    """Returns P, the number of parameters: arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def abstract_params(model: nn.Module, *inputs: jax.ShapeDtypeStruct) -> PyTree:
    """Returns shapes and dtypes of the parameters; nothing is computed or allocated."""
    return jax.eval_shape(lambda *inputs: model.init(jax.random.key(0), *inputs, train=False)["params"], *inputs)


def matmul_flops(config: ConfigDict, batch_size: int, seq_len: int) -> int:
    """Counts the FLOPs of the matrix products in one forward pass, by hand.

    Two for each multiply and add. Attention is counted in full, as it is computed when it is written out; causality
    makes half of it superfluous.

    Args:
      config: the `model` part of a configuration.
      batch_size: B sequences.
      seq_len: L tokens each.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    tokens = batch_size * seq_len
    mlp = 2 * width * config.mlp_expansion * width
    projections = width * 3 * heads + heads * width
    scores_and_mean = 2 * heads * seq_len
    per_token = config.num_layers * (mlp + projections + scores_and_mean) + width * config.num_outputs
    return 2 * tokens * per_token
