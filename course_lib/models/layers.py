"""The layers of the Transformer: MLP, attention and blocks, with options of later models.

The defaults are those of the tutorial series that this course builds on. Each option is off by
default, and changes parameters and products as in its source:

    qk_norm         queries and keys of each head are normalized before the scores
                    (Dehghani et al., 2023, https://arxiv.org/abs/2302.05442, section 2.1)
    parallel_block  MLP and attention read the same normalized input, and run at once
                    (the same paper; Wang and Komatsuzaki, 2021,
                    https://github.com/kingoflolz/mesh-transformer-jax)
    num_kv_heads    several query heads read the same keys and values
                    (Ainslie et al., 2023, https://arxiv.org/abs/2305.13245)
    mlp_activation  "squared_relu" (So et al., 2021, https://arxiv.org/abs/2109.08668)
    positions       "rotary": queries and keys are rotated by their position
                    (Su et al., 2021, https://arxiv.org/abs/2104.09864)
    use_bias        False: neither matmuls nor norms add a bias
                    (Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311)
    num_experts     each token is computed by few of many MLPs: see `ExpertsBlock`
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from course_lib.models import routing
from course_lib.models.hooks import Hooks
from course_lib.models.products import Shape, columns, initialize, initialize_all, rows
from course_lib.one_device import rematerialization

NAMES = {"block_in": "Block", "mlp_hidden": "MLP", "qkv": "Attn", "attn_out": "Attn"}
"""The values that a remat policy can keep or offload by name, and the module of each.

Their shapes: [B L D], [B L F] before the activation, [B L H 3K] (with grouped queries [B L H K]
and [B L G 2K]), [B L H K].
"""

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": nn.gelu,
    "squared_relu": lambda x: jnp.square(nn.relu(x)),
}
"""The activation functions between the two products of an MLP, by name."""

POSITIONS = ("learned", "rotary")
"""Position embeddings: a learned table, or rotations of queries and keys."""


class MLPBlock(nn.Module):
    """LayerNorm, Dense to F = mlp_expansion * D, activation, Dense back to D, Dropout."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Transforms each position by itself."""
        config, hooks, width = self.config, self.hooks, x.shape[-1]
        common: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), use_bias=config.use_bias)
        x = nn.LayerNorm(**common, name="pre_norm")(x)
        hidden = config.mlp_expansion * width // hooks.shards
        x = nn.Dense(hidden, **common, dot_general=hooks.column, name="input_layer")(x)
        x = hooks.named(x, "mlp_hidden")
        x = ACTIVATIONS[config.mlp_activation](x)
        x = nn.Dense(width, **common, dot_general=hooks.row, name="output_layer")(x)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class ExpertsBlock(nn.Module):
    """LayerNorm, a router, its chosen experts (MLPs), their weighted sum, Dropout."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Transforms each position by its experts; 0 where all of them are full."""
        config, hooks, (_, length, width) = self.config, self.hooks, x.shape
        common: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), use_bias=config.use_bias)
        x = nn.LayerNorm(**common, name="pre_norm")(x)
        router = self.param(
            "router", nn.initializers.lecun_normal(), (width, config.num_experts)
        )
        logits = jnp.matmul(x.astype(jnp.float32), router, precision="highest")
        per_token = config.experts_per_token
        room = routing.capacity(length, config.num_experts, per_token, config.capacity_factor)
        routed = routing.route(logits, per_token, room)
        self.sow("balance", "balance", routed.balance)

        stacked = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        first = stacked(config.mlp_expansion * width, **common, name="expert_in")
        second = stacked(width, **common, name="expert_out")

        def run(tokens: Float[Array, "E B C D"]) -> Float[Array, "E B C D"]:
            hidden = checkpoint_name(first(tokens), "mlp_hidden")
            return second(ACTIVATIONS[config.mlp_activation](hidden))

        outputs = hooks.experts(
            run, jnp.einsum("blec,bld->ebcd", routed.dispatch.astype(x.dtype), x)
        )
        x = jnp.einsum("blec,ebcd->bld", routed.combine.astype(x.dtype), outputs)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class AttentionBlock(nn.Module):
    """LayerNorm, a Dense for queries, keys and values, attention, Dense to D, Dropout."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Lets each position read from the positions that it may see."""
        config, hooks, width = self.config, self.hooks, x.shape[-1]
        common: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), use_bias=config.use_bias)
        x = nn.LayerNorm(**common, name="pre_norm")(x)
        shapes = _projections(config, hooks.shards)
        if "qkv" in shapes:
            products = [
                nn.DenseGeneral(
                    shapes["qkv"][1], **common, dot_general=hooks.column, name="qkv"
                )(x)
            ]
        else:
            weights = [
                self.param(name, initialize, shape, config.use_bias)
                for name, shape in shapes.items()
            ]
            products = columns(hooks, x, weights)
        x = attended(config, hooks, products)
        x = nn.DenseGeneral(
            width, axis=(-2, -1), **common, dot_general=hooks.row, name="output_layer"
        )(x)
        return nn.Dropout(config.dropout_rate, deterministic=not self.train)(x)


class Block(nn.Module):
    """An MLP, or experts, then an attention, each added to its input."""

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Applies one layer of the model."""
        options = self.config, self.train, self.hooks
        x = self.hooks.named(x, "block_in")
        mlp = ExpertsBlock if self.config.num_experts else MLPBlock
        x = x + rematerialized(mlp, "MLP", self.config)(*options, name="mlp")(x)
        x = x + rematerialized(AttentionBlock, "Attn", self.config)(*options, name="attn")(x)
        return x


class ParallelBlock(nn.Module):
    """An MLP and an attention that read the same normalized input; their sum is added to it.

    With tensor parallelism it needs one exchange before both and one after, where `Block` needs
    two of each.
    """

    config: ConfigDict
    train: bool
    hooks: Hooks = Hooks()

    @nn.compact
    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        """Applies one layer of the model."""
        config, hooks, width = self.config, self.hooks, x.shape[-1]
        hidden, heads = (
            config.mlp_expansion * width // hooks.shards,
            (
                config.num_heads // hooks.shards,
                config.head_dim,
            ),
        )
        projections = _projections(config, hooks.shards)
        of_mlp = {"input_layer": ((width,), (hidden,)), "output_layer": ((hidden,), (width,))}
        of_attention = {**projections, "output_layer": (heads, (width,))}
        mlp = self.param("mlp", initialize_all, of_mlp, config.use_bias)
        attn = self.param("attn", initialize_all, of_attention, config.use_bias)

        x = hooks.named(x, "block_in")
        y = nn.LayerNorm(
            dtype=jnp.dtype(config.dtype), use_bias=config.use_bias, name="pre_norm"
        )(x)
        y, *products = columns(
            hooks, y, [mlp["input_layer"], *(attn[name] for name in projections)]
        )
        y = ACTIVATIONS[config.mlp_activation](hooks.named(y, "mlp_hidden"))
        y = rows(
            hooks,
            [y, attended(config, hooks, products)],
            [mlp["output_layer"], attn["output_layer"]],
        )
        return x + nn.Dropout(config.dropout_rate, deterministic=not self.train)(y)


def attended(
    config: ConfigDict, hooks: Hooks, products: Sequence[Array]
) -> Float[Array, "B L H K"]:
    """Returns the attended values of all heads, given the products of the input with `qkv`, or
    with `q` and `kv`.

    Call it inside a module: that module owns the scales of the norms of queries and keys, one
    number for each of the K dimensions of a head.
    """
    products = [hooks.named(product, "qkv") for product in products]
    if len(products) == 1:
        query, key, value = jnp.split(products[0], 3, axis=-1)
    else:
        query, (key, value) = products[0], jnp.split(products[1], 2, axis=-1)
    if config.qk_norm:
        query, key = norm_of_heads(query, "query_norm"), norm_of_heads(key, "key_norm")
    if config.positions == "rotary":
        positions = hooks.attend_positions(query.shape[1])
        query, key = rotate(query, positions), rotate(key, positions)
    x = hooks.attend(
        query,
        key,
        value,
        causal=config.causal_mask,
        implementation=config.attention,
        softmax_dtype=jnp.dtype(config.softmax_dtype),
    )
    return hooks.named(x, "attn_out")


def norm_of_heads(x: Float[Array, "B L H K"], name: str) -> Float[Array, "B L H K"]:
    """Normalizes each head by itself, so the result does not depend on how many heads a device
    has. Call it inside a module.
    """
    return nn.LayerNorm(dtype=x.dtype, use_bias=False, name=name)(x)


def rotate(x: Float[Array, "B L H K"], positions: Int[Array, " L"]) -> Float[Array, "B L H K"]:
    """Turns each pair of dimensions, k and k + K/2, by the angle position / 10000 ** (2k / K),
    in float32.

    The product of a turned query and a turned key depends on their positions only through the
    distance.
    """
    half = x.shape[-1] // 2
    angles = (
        positions[:, None].astype(jnp.float32) * 10_000.0 ** (-jnp.arange(half) / half)[None]
    )
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def _projections(config: ConfigDict, shards: int) -> dict[str, Shape]:
    """Returns the shapes of one device's layers for queries, keys and values."""
    width, heads, size = config.hidden_size, config.num_heads // shards, config.head_dim
    if config.num_kv_heads in (0, config.num_heads):
        return {"qkv": ((width,), (heads, 3 * size))}
    return {
        "q": ((width,), (heads, size)),
        "kv": ((width,), (config.num_kv_heads // shards, 2 * size)),
    }


def rematerialized(module: type[nn.Module], name: str, config: ConfigDict) -> type[nn.Module]:
    """Returns `module`, rematerialized if the configuration names it."""
    return rematerialization.wrap(
        module,
        name,
        config.remat,
        config.remat_policy,
        config.remat_names,
        scanned=config.scan_layers,
    )


def check(config: ConfigDict, seq_len: int) -> None:
    """Refuses impossible layers.

    Args:
      config: the `model` part of a configuration.
      seq_len: L.

    Raises:
      ValueError: naming the field, its value and the fix.
    """
    for name, known in (("mlp_activation", tuple(ACTIVATIONS)), ("positions", POSITIONS)):
        if config[name] not in known:
            raise ValueError(f"{name}={config[name]!r} must be one of {known}")
    heads, groups = config.num_heads, config.num_kv_heads
    if groups < 0 or (groups and heads % groups):
        raise ValueError(
            f"num_kv_heads={groups} must divide num_heads={heads}, so that each key head serves"
            " equally many query heads; or be 0, for one key head per query head"
        )
    if config.positions == "rotary" and config.head_dim % 2:
        raise ValueError(
            f"head_dim={config.head_dim} must be even for positions='rotary': dimensions are"
            " turned in pairs"
        )
    routing.check(
        config.num_experts,
        config.experts_per_token,
        config.capacity_factor,
        config.balance_weight,
        seq_len,
    )
    if config.num_experts and config.parallel_block:
        raise ValueError(
            f"num_experts={config.num_experts} must be 0 for parallel_block=True, whose MLP"
            " shares its matmuls with the attention"
        )
    if config.parallel_block and {"MLP", "Attn"} & set(config.remat):
        raise ValueError(
            f"remat={tuple(config.remat)!r} must be () or ('Block',) for parallel_block=True,"
            " which computes MLP and attention together"
        )
