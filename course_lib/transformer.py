"""A GPT-style Transformer: a language model that predicts every token from those before it.

The model of the tutorial series that this course builds on
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html), so that
its published measurements can be compared: learned positions, N blocks of an MLP and an attention, each normalized
first and added to its input, and an output layer. Parameters and logits are float32, `dtype` is what the rest is computed in.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from course_lib import attention, remat

PyTree = Any

NAMES = ("block_in", "mlp_hidden", "qkv", "attn_out")
"""Values of a block that a policy can keep or offload by name: [B L D], [B L F] before the GELU, [B L H 3K], [B L H K]."""


class MLPBlock(nn.Module):
    """LayerNorm, Dense to F = mlp_expansion * D, GELU, Dense back to D, Dropout."""

    config: ConfigDict
    train: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Transforms each position by itself."""
        config, dtype, width = self.config, jnp.dtype(self.config.dtype), x.shape[-1]
        x = nn.LayerNorm(dtype=dtype, name="pre_norm")(x)
        x = nn.Dense(config.mlp_expansion * width, dtype=dtype, name="input_layer")(x)
        x = checkpoint_name(x, "mlp_hidden")
        x = nn.gelu(x)
        x = nn.Dense(width, dtype=dtype, name="output_layer")(x)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class AttentionBlock(nn.Module):
    """LayerNorm, one Dense for queries, keys and values, attention, Dense back to D, Dropout."""

    config: ConfigDict
    train: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Lets each position read from those that it may see."""
        config, dtype, width = self.config, jnp.dtype(self.config.dtype), x.shape[-1]
        x = nn.LayerNorm(dtype=dtype, name="pre_norm")(x)
        qkv = nn.DenseGeneral((config.num_heads, 3 * config.head_dim), dtype=dtype, name="qkv")(x)
        qkv = checkpoint_name(qkv, "qkv")
        query, key, value = jnp.split(qkv, 3, axis=-1)
        x = attention.attend(
            query,
            key,
            value,
            causal=config.causal_mask,
            implementation=config.attention,
            softmax_dtype=jnp.dtype(config.softmax_dtype),
        )
        x = checkpoint_name(x, "attn_out")
        x = nn.DenseGeneral(width, axis=(-2, -1), dtype=dtype, name="output_layer")(x)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class Block(nn.Module):
    """An MLP, then an attention, each added to its input."""

    config: ConfigDict
    train: bool

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Applies one layer of the model."""
        x = checkpoint_name(x, "block_in")
        x = x + _rematerialized(MLPBlock, "MLP", self.config)(self.config, self.train, name="mlp")(x)
        x = x + _rematerialized(AttentionBlock, "Attn", self.config)(self.config, self.train, name="attn")(x)
        return x


class Transformer(nn.Module):
    """The whole model, from tokens to logits.

        params = model.init(key, tokens, train=False)["params"]
        logits = model.apply({"params": params}, tokens, train=True, rngs={"dropout": key})

    Attributes:
      config: the `model` part of a configuration (`course_lib.config`).
    """

    config: ConfigDict

    @nn.compact
    def __call__(self, tokens: Int[Array, "B L"], *, train: bool = True) -> Float[Array, "B L V"]:
        """Returns float32 logits of the token at each position, given those before it.

        Args:
          tokens: the tokens before each position: B sequences of L.
          train: whether dropout is on; then a random key must come as `rngs={"dropout": key}`.

        Raises:
          ValueError: if L exceeds `max_seq_len`, or the configuration asks for what does not exist.
        """
        config, dtype, length = self.config, jnp.dtype(self.config.dtype), tokens.shape[1]
        check(config, length)
        # Both tables are read in float32: the gradient of a row sums over all its uses, more than bfloat16 can add up.
        small = nn.initializers.normal(0.02)
        embed = nn.Embed(config.vocab_size, config.hidden_size, name="embed")
        pos_emb = nn.Embed(config.max_seq_len, config.hidden_size, embedding_init=small, name="pos_emb")
        x = embed(tokens) + pos_emb(jnp.broadcast_to(jnp.arange(length), tokens.shape))
        x = x.astype(dtype)

        block = _rematerialized(Block, "Block", config)
        if config.scan_layers:  # one traced and compiled block; its parameters have a leading axis of N layers
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=config.num_layers,
            )
            x, _ = scan(block(config, train, name="block"), x, None)
        else:
            for layer in range(config.num_layers):
                x = block(config, train, name=f"block_{layer}")(x)

        x = nn.LayerNorm(dtype=dtype, name="post_norm")(x)
        x = nn.Dense(config.num_outputs, dtype=dtype, name="output_layer")(x)
        return x.astype(jnp.float32)


def _rematerialized(module: type[nn.Module], name: str, config: ConfigDict) -> type[nn.Module]:
    return remat.wrap(module, name, config.remat, config.remat_policy, config.remat_names, scanned=config.scan_layers)


def check(config: ConfigDict, seq_len: int = 1) -> None:
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
            raise ValueError(f"remat_names={names!r} must hold names from {NAMES}: there is no {name!r}")
    if config.attention not in attention.IMPLEMENTATIONS:
        raise ValueError(f"attention={config.attention!r} must be one of {list(attention.IMPLEMENTATIONS)}")


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
