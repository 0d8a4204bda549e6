"""A GPT-style Transformer: a language model that predicts every token from those before it.

It is the model of the tutorial series that this course builds on, so that its published
measurements can be compared with ours
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html).
It has learned positions, N blocks and an output layer. A block is an MLP and an attention, each
with a norm before it, and each added to its input. `layers` lists the options of later models.
Parameters and logits are float32, everything else has `dtype`.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from course_lib.models import attention, layers
from course_lib.models.hooks import Hooks
from course_lib.models.products import with_products
from course_lib.one_device import rematerialization
from course_lib.smaller_and_faster import large_vocabulary
from course_lib.text import data

PyTree = Any

PARTS = ("embed", "layers", "head")
"""The parts of the model: tokens to activations, N blocks, and activations to logits."""


class Transformer(nn.Module):
    """The whole model, from tokens to logits.

        params = model.init(key, tokens, train=False)["params"]
        logits = model.apply({"params": params}, tokens, train=True, rngs={"dropout": key})

    Attributes:
      config: the `model` part of a configuration (`course_lib.configs`).
      hooks: how one device's share of the model differs from the whole model.
    """

    config: ConfigDict
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(
        self,
        x: Int[Array, "B L"] | Float[Array, "B _ D"],
        *,
        train: bool = True,
        parts: Sequence[str] = PARTS,
    ) -> Any:
        """Returns float32 logits [B L V] of the token at each position, given those before it.

        Args:
          x: the tokens before each position, B sequences of L; or activations, if `parts` does
            not begin with "embed". If the hooks divide the sequences, x is this device's part.
          train: whether dropout is on; then a random key must come as `rngs={"dropout": key}`.
          parts: those of `PARTS` to run, in that order; without "head" it returns activations
            [B L D].

        Raises:
          ValueError: if L exceeds `max_seq_len`, an option or part does not exist, tokens are
            not integers [B, L], or one is outside the vocabulary. Inside `jax.jit`, where
            values are not known, such a token gets an embedding of NaN: check tokens that do
            not come from `data` with `data.check_tokens`.
        """
        check_parts(parts)
        if "embed" in parts:
            _check_tokens(x, self.config.vocab_size)
        config, dtype, length = self.config, jnp.dtype(self.config.dtype), x.shape[1]
        hooks = with_products(self.hooks, config.flat_products)
        check(config, length)
        if "embed" in parts:
            # Both tables are read in float32: the gradient of a row sums over all its uses,
            # more than bfloat16 can add up.
            small = nn.initializers.normal(0.02)
            embed = nn.Embed(
                config.vocab_size // hooks.shards, config.hidden_size, name="embed"
            )
            x = hooks.lookup(embed.embedding, x)
            if config.positions == "learned":
                pos_emb = nn.Embed(
                    config.max_seq_len, config.hidden_size, embedding_init=small, name="pos_emb"
                )
                x = x + pos_emb(hooks.positions(length))[None]
            x = x.astype(dtype)
        if "layers" in parts:
            block = _block(config, hooks)
            # Scanned: one traced and compiled block; its parameters have a leading axis of N.
            if config.scan_layers:
                x = _scanned(
                    block(config, train, hooks, name="block"), x, length=config.num_layers
                )
            else:
                for layer in range(config.num_layers):
                    x = block(config, train, hooks, name=f"block_{layer}")(x)
        if "head" in parts:
            x = nn.LayerNorm(dtype=dtype, use_bias=config.use_bias, name="post_norm")(x)
            outputs = config.num_outputs // hooks.shards
            if hooks.output:
                weights = OutputWeights(outputs, config.use_bias, name="output_layer")
                return hooks.output(x, *weights(config.hidden_size))
            common: dict[str, Any] = dict(
                dtype=dtype, use_bias=config.use_bias, dot_general=hooks.column
            )
            x = nn.Dense(outputs, **common, name="output_layer")(x)
            x = x.astype(jnp.float32)
        return x


class OutputWeights(nn.Module):
    """The weights of the output layer, as `nn.Dense` has them, without its product.

    Attributes:
      outputs: V, on one device.
      use_bias: whether there is a bias.
    """

    outputs: int
    use_bias: bool

    @nn.compact
    def __call__(self, width: int) -> tuple[Array, Array | None]:
        """Returns the kernel [D, V] and the bias [V], or None. `width` is D."""
        kernel = self.param(
            "kernel", nn.initializers.lecun_normal(), (width, self.outputs), jnp.float32
        )
        if not self.use_bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, (self.outputs,), jnp.float32)


class Layer(nn.Module):
    """One layer of a Transformer whose layers are scanned: a scan of one turn.

    Its parameters are `{"block": ...}` with a leading axis of 1. It takes the random key of its
    layer, `jax.random.split(key, num_layers)[layer]`, and draws from it what the scan over all
    layers draws. Attributes are as for `Transformer`.
    """

    config: ConfigDict
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(
        self, x: Float[Array, "B _ D"], *, train: bool = True
    ) -> Float[Array, "B _ D"]:
        """Applies the layer to activations. `train` is as for `Transformer`."""
        hooks = with_products(self.hooks, self.config.flat_products)
        block = _block(self.config, hooks)(self.config, train, hooks, name="block")
        return _scanned(block, x, length=1, split=False)


def _scanned(block: nn.Module, x: Array, *, length: int, split: bool = True) -> Array:
    """Applies a block `length` times, each time with its own parameters and, with `split`, its
    own random key.
    """
    scan = nn.scan(
        lambda block, x, _: (block(x), None),
        variable_axes={"params": 0, "balance": 0},
        split_rngs={"params": split, "dropout": split},
        length=length,
    )
    return scan(block, x, None)[0]


def _block(config: ConfigDict, hooks: Hooks) -> type[nn.Module]:
    """Returns the class of a layer, rematerialized if the configuration says so."""
    chosen = layers.ParallelBlock if config.parallel_block else layers.Block
    return layers.rematerialized(hooks.layer(chosen), "Block", config)


def _check_tokens(tokens, vocab_size):
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} must be integers [B, L]"
        )
    if not isinstance(tokens, jax.core.Tracer) and getattr(
        tokens, "is_fully_addressable", True
    ):
        data.check_tokens(np.asarray(tokens), vocab_size)


def check(config: ConfigDict, seq_len: int) -> None:
    """Refuses an impossible model.

    Args:
      config: the `model` part of a configuration.
      seq_len: L, the length of the sequences that the model is to see.

    Raises:
      ValueError: naming the field, its value and the fix.
    """
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} must be at most max_seq_len={config.max_seq_len}: later"
            " positions have no embedding; raise max_seq_len or cut the sequences"
        )
    if config.num_heads * config.head_dim != config.hidden_size:
        raise ValueError(
            f"head_dim={config.head_dim} must be hidden_size / num_heads = {config.hidden_size}"
            f" / {config.num_heads}: the heads share the width of the model"
        )
    layers.check(config, seq_len)
    large_vocabulary.check(
        config.loss_chunks,
        config.loss_along,
        tokens=seq_len,
        vocabulary=config.num_outputs,
        prefix="loss_",
    )
    rematerialization.check(config.remat, config.remat_policy, config.remat_names)
    for name in config.remat_names:
        if name not in layers.NAMES:
            names = tuple(config.remat_names)
            raise ValueError(
                f"remat_names={names!r} must hold names from {tuple(layers.NAMES)}: there is no"
                f" {name!r}"
            )
        if not {layers.NAMES[name], "Block"} & set(config.remat):
            raise ValueError(
                f"remat={tuple(config.remat)!r} must hold {layers.NAMES[name]!r} or 'Block' for"
                f" remat_names to hold {name!r}: these modules make that value, and a module"
                " that is not rematerialized keeps it anyway"
            )
    attention.check(
        config.attention,
        dtype=config.dtype,
        softmax_dtype=config.softmax_dtype,
        seq_len=seq_len,
        head_dim=config.head_dim,
    )


def check_parts(parts: Sequence[str]) -> None:
    """Refuses parts that the model does not have.

    Raises:
      ValueError: naming `parts` and what it may hold.
    """
    neighbours = [PARTS[i:j] for i in range(len(PARTS)) for j in range(i + 1, len(PARTS) + 1)]
    if tuple(parts) not in neighbours:
        raise ValueError(
            f"parts={parts!r} must be one of {PARTS}, or several in a row: others do not fit"
            " together"
        )


def num_params(params: PyTree) -> int:
    """Returns P, the number of parameters: arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def abstract_params(model: nn.Module, *inputs: jax.ShapeDtypeStruct) -> PyTree:
    """Returns shapes and dtypes of the parameters; nothing is computed or allocated."""
    return jax.eval_shape(
        lambda *inputs: model.init(jax.random.key(0), *inputs, train=False)["params"], *inputs
    )
