"""A layer of the Transformer: an MLP and an attention, with options of other models.

The defaults are those of the tutorial series that this course builds on. Each option is off by
default, and changes parameters and products as in its source:

    qk_norm         queries and keys of each head are normalized before the scores
                    (Dehghani et al., 2023, https://arxiv.org/abs/2302.05442, section 2.1)
    parallel_block  MLP and attention read the same normalized input, and run at once
                    (the same paper; Wang and Komatsuzaki, 2021,
                    https://github.com/kingoflolz/mesh-transformer-jax)
    num_kv_heads    several query heads read the same keys and values
                    (Ainslie et al., 2023, https://arxiv.org/abs/2305.13245)
    mlp_activation  "squared_relu" (So et al., 2021, https://arxiv.org/abs/2109.08668); "silu"
                    (Ramachandran et al., 2017, https://arxiv.org/abs/1710.05941)
    mlp_gate        the MLP's hidden activations are multiplied by a second projection; with
                    "silu": SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)
    positions       "rotary": queries and keys are rotated by their position
                    (Su et al., 2021, https://arxiv.org/abs/2104.09864)
    rotary_scaling  slower rotations, for longer sequences: "linear", all of them (Chen et al.,
                    2023, https://arxiv.org/abs/2306.15595); "llama3", only slow ones
                    (Llama 3.1, https://github.com/meta-llama/llama-models)
    window          a position sees the last ones only (sliding window; Jiang et al., 2023,
                    https://arxiv.org/abs/2310.06825)
    attention_width heads that together are wider, or narrower, than the model (Raffel et al.,
                    2020, https://arxiv.org/abs/1910.10683; Qwen3)
    norm            "rms": no mean is subtracted, and no bias is added
                    (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467)
    use_bias        False: neither matmuls nor norms add a bias
                    (Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311)
    qkv_bias        queries, keys and values add one nevertheless (Qwen2,
                    https://arxiv.org/abs/2407.10671)
    attention_first attention comes before the MLP, as in GPT-2 (Radford et al., 2019,
                    https://github.com/openai/gpt-2)
    num_experts     each token is computed by few of many MLPs: see `experts`

All are functions of a dict of parameters. Every technique of this course changes `layer` a
little: it computes it again (`rematerialized`), on a device's part of the parameters (`Hooks`),
or on another device than its neighbours (`many_devices.pipeline_parallel`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from course_lib.models import routing
from course_lib.models.hooks import Hooks
from course_lib.models.parameters import keys_in_layer
from course_lib.models.products import columns, rows, with_bias
from course_lib.one_device import rematerialization

Params = Mapping[str, Any]
Key = Any  # a typed random key for dropout, or None for none
Layer = Callable[[Params, Array, Key], tuple[Array, Array | None]]

NAMES = {"block_in": "Block", "mlp_hidden": "MLP", "qkv": "Attn", "attn_out": "Attn"}
"""The values that a remat policy can keep or offload by name, and the module of each.

Their shapes: [B L D], [B L F] before the activation (with a gate two of them: the gradient
needs both), [B L H 3K] (with grouped queries [B L H K] and [B L G 2K]), [B L H K].
"""

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": jax.nn.gelu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}
"""The activation functions between the two products of an MLP, by name."""

POSITIONS = ("learned", "rotary")
"""Position embeddings: a learned table, or rotations of queries and keys."""


def _llama3(speeds: Array, factor: float, length: int) -> Array:
    """Slows down what turns less than once within a length, and not what turns four times."""
    turns = speeds * length / (2 * jnp.pi)
    kept = jnp.clip((turns - 1) / (4 - 1), 0, 1)
    return speeds * (kept + (1 - kept) / factor)


ROTARY_SCALINGS: Mapping[str, Callable[[Array, float, int], Array]] = {
    "none": lambda speeds, factor, length: speeds,
    "linear": lambda speeds, factor, length: speeds / factor,
    "llama3": _llama3,
}
"""How angles per position change, given `rotary_factor` and `rotary_length`."""


def layer(
    config: ConfigDict,
    hooks: Hooks,
    params: Params,
    x: Float[Array, "B _ D"],
    key: Key = None,
    *,
    name: str = "block",
) -> tuple[Float[Array, "B _ D"], Float[Array, " B"] | None]:
    """Applies one layer: an MLP, or experts, and an attention, each added to its input.

    Returns the activations, and the load-balancing loss of each sequence, or None without
    experts. The profiler shows `name`: "block" if layers are scanned, else "block_0", ...
    """
    with jax.named_scope(name):
        x = hooks.named(x, "block_in")
        if config.parallel_block:
            (key,) = keys_in_layer(key, name, "Dropout_0")
            return x + parallel(config, hooks, params, x, key), None
        (of_mlp,) = keys_in_layer(key, name, "mlp", "Dropout_0")
        (of_attn,) = keys_in_layer(key, name, "attn", "Dropout_0")
        run = rematerialized(functools.partial(mlp, config, hooks), "MLP", config)
        attend = rematerialized(functools.partial(attention, config, hooks), "Attn", config)
        if config.attention_first:
            x += attend(params["attn"], x, of_attn)
        y, balance = run(params["mlp"], x, of_mlp)
        x += y
        if not config.attention_first:
            x += attend(params["attn"], x, of_attn)
        return x, balance


def changed_layer(config: ConfigDict, hooks: Hooks, name: str = "block") -> Layer:
    """Returns `layer(params, x, key)`, changed by the hooks, and perhaps rematerialized."""
    one = hooks.layer(functools.partial(layer, config, hooks, name=name))
    return rematerialized(one, "Block", config)


def rematerialized(function: Callable[..., Any], name: str, config: ConfigDict) -> Any:
    """Returns a part of a layer, rematerialized if `config.remat` holds its name."""
    if name not in config.remat:
        return function
    in_loop = config.scan_layers and config.num_layers > 1
    options = config.remat_policy, config.remat_names
    return rematerialization.wrap(function, *options, in_loop=in_loop)


@jax.named_scope("mlp")
def mlp(
    config: ConfigDict, hooks: Hooks, params: Params, x: Float[Array, "B _ D"], key: Key
) -> tuple[Float[Array, "B _ D"], Float[Array, " B"] | None]:
    """Transforms each position by itself: D to F, activation, back to D."""
    x = norm(params, "pre_norm", x, **norm_options(config))
    if config.num_experts:
        x, balance = experts(config, hooks, params, x)
    else:
        if config.mlp_gate:
            products = columns(hooks, x, [params["input_layer"], params["gate_layer"]])
        else:
            products = [dense(params, "input_layer", x, hooks.column)]
        x = activated(config, hooks.named, products)
        x, balance = dense(params, "output_layer", x, hooks.row), None
    return dropout(x, config.dropout_rate, key), balance


def activated(
    config: ConfigDict, named: Callable[[Array, str], Array], products: Sequence[Array]
) -> Float[Array, "... F"]:
    """Returns the MLP's hidden activations, given the products of its input: act(x W_in), or
    with a gate x W_in * act(x W_gate).
    """
    *linear, last = [named(product, "mlp_hidden") for product in products]
    return functools.reduce(jnp.multiply, linear, ACTIVATIONS[config.mlp_activation](last))


def experts(
    config: ConfigDict, hooks: Hooks, params: Params, x: Float[Array, "B L D"]
) -> tuple[Float[Array, "B L D"], Float[Array, " B"]]:
    """Transforms each token by the experts (MLPs) that a router chooses for it, and adds up
    their weighted results; 0 where all of them are full.
    """
    # bfloat16 would round the small differences that decide between experts
    logits = jnp.matmul(x.astype(jnp.float32), params["router"], precision="highest")
    per_token = config.experts_per_token
    into = ("expert_in", "expert_gate") if config.mlp_gate else ("expert_in",)
    of_experts = {name: params[name] for name in (*into, "expert_out")}

    def expert(
        params: Params, x: Float[Array, "..."], product: Callable
    ) -> Float[Array, "..."]:
        products = [dense(params, name, x, product) for name in into]
        x = activated(config, checkpoint_name, products)
        return dense(params, "expert_out", x, product)

    def biases(change: Callable[[Array], Array]) -> Params:
        return {
            name: {n: change(x) if n == "bias" else x for n, x in weights.items()}
            for name, weights in of_experts.items()
        }

    if config.dropless:

        def run_rows(rows: Float[Array, "R D"], sizes: Int[Array, " E"]) -> Float[Array, "R D"]:
            own = functools.partial(
                jnp.repeat, repeats=sizes, axis=0, total_repeat_length=len(rows)
            )
            return expert(
                biases(own), rows, lambda x, kernels, _: routing.grouped(x, kernels, sizes)
            )

        return routing.dropless(
            functools.partial(hooks.experts, run_rows), x, logits, per_token
        )

    def run(tokens: Float[Array, "E B C D"]) -> Float[Array, "E B C D"]:
        each = ((3,), (1,)), ((0,), (0,))  # no `vmap`, which JAX 0.12 refuses for reduced types
        return expert(
            biases(lambda x: x[:, None, None]),
            tokens,
            lambda x, kernels, _: jax.lax.dot_general(x, kernels, each),
        )

    room = routing.capacity(x.shape[1], config.num_experts, per_token, config.capacity_factor)
    routed = routing.route(logits, per_token, room)
    tokens = jnp.einsum("blec,bld->ebcd", routed.dispatch.astype(x.dtype), x)
    results = hooks.experts(run, tokens)
    return jnp.einsum("blec,ebcd->bld", routed.combine.astype(x.dtype), results), routed.balance


@jax.named_scope("attn")
def attention(
    config: ConfigDict, hooks: Hooks, params: Params, x: Float[Array, "B _ D"], key: Key
) -> Float[Array, "B _ D"]:
    """Lets each position read from the positions that it may see."""
    x = norm(params, "pre_norm", x, **norm_options(config))
    if "qkv" in params:
        products = [dense(params, "qkv", x, hooks.column)]
    else:
        products = columns(hooks, x, [params["q"], params["kv"]])
    x = attended(config, hooks, params, products)
    x = dense(params, "output_layer", x, hooks.row, inputs=2)
    return dropout(x, config.dropout_rate, key)


def parallel(
    config: ConfigDict, hooks: Hooks, params: Params, x: Float[Array, "B _ D"], key: Key
) -> Float[Array, "B _ D"]:
    """Returns the sum of an MLP and an attention that read the same normalized input: with
    tensor parallelism one exchange before both and one after, where a `layer` has two of each.
    """
    mlp, attn = params["mlp"], params["attn"]
    x = norm(params, "pre_norm", x, **norm_options(config))
    into = [mlp[name] for name in ("input_layer", "gate_layer") if name in mlp]
    projections = [attn[name] for name in ("qkv", "q", "kv") if name in attn]
    products = columns(hooks, x, [*into, *projections])
    hidden = activated(config, hooks.named, products[: len(into)])
    inputs = [hidden, attended(config, hooks, params, products[len(into) :])]
    x = rows(hooks, inputs, [mlp["output_layer"], attn["output_layer"]])
    return dropout(x, config.dropout_rate, key)


def attended(
    config: ConfigDict, hooks: Hooks, params: Params, products: Sequence[Array]
) -> Float[Array, "B L H K"]:
    """Returns the attended values of all heads, given the products of the input with `qkv`, or
    with `q` and `kv`.
    """
    products = [hooks.named(product, "qkv") for product in products]
    if len(products) == 1:
        query, key, value = jnp.split(products[0], 3, axis=-1)
    else:
        query, (key, value) = products[0], jnp.split(products[1], 2, axis=-1)
    if config.qk_norm:  # each head by itself: it does not matter how many a device has
        how = norm_options(config)
        query = norm(params, "query_norm", query, **how)
        key = norm(params, "key_norm", key, **how)
    if config.positions == "rotary":
        positions = hooks.attend_positions(query.shape[1])
        speeds = rotary_speeds(config)
        query, key = (rotate(x, positions, speeds) for x in (query, key))
    x = hooks.attend(
        query,
        key,
        value,
        causal=config.causal_mask,
        implementation=config.attention,
        softmax_dtype=jnp.dtype(config.softmax_dtype),
        window=config.window,
    )
    return hooks.named(x, "attn_out")


def dense(
    params: Params, name: str, x: Float[Array, "..."], product: Callable, inputs: int = 1
) -> Float[Array, "..."]:
    """Multiplies the last `inputs` dimensions of x by a kernel [*inputs *outputs]."""
    with jax.named_scope(name):
        weights = params[name]
        axes = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
        y = product(x, weights["kernel"].astype(x.dtype), (axes, ((), ())))
        return with_bias(y, weights)


def norm(
    params: Params,
    name: str,
    x: Float[Array, "..."],
    *,
    kind: str = "layer",
    epsilon: float = 1e-6,
) -> Float[Array, "..."]:
    """LayerNorm or RMSNorm over the last dimension, in float32."""
    with jax.named_scope(name):
        wide = x.astype(jnp.float32)
        mean = wide.mean(-1, keepdims=True) if kind == "layer" else 0.0
        variance = jnp.maximum(0, (wide**2).mean(-1, keepdims=True) - mean**2)
        scale = params[name]["scale"].reshape((1,) * (x.ndim - 1) + (-1,))
        # Cast x a second time, as Flax does: the two gradients are added in the dtype of x.
        y = (x.astype(jnp.float32) - mean) * (jax.lax.rsqrt(variance + epsilon) * scale)
        return with_bias(y, params[name]).astype(x.dtype)


def norm_options(config: ConfigDict) -> dict[str, Any]:
    """Returns the last arguments of `norm`; none for its defaults."""
    chosen = dict(kind=config.norm, epsilon=config.norm_epsilon)
    return {} if chosen == dict(kind="layer", epsilon=1e-6) else chosen


def dropout(x: Float[Array, "..."], rate: float, key: Key) -> Float[Array, "..."]:
    """Sets a share of the numbers to 0 and enlarges the others; nothing without a key."""
    if key is None or rate == 0:
        return x
    with jax.named_scope("dropout"):
        kept = jax.random.bernoulli(key, 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def rotary_speeds(config: ConfigDict) -> Float[Array, " K_2"]:
    """Returns the angle per position of each pair of a head's dimensions."""
    half = config.head_dim // 2
    speeds = config.rotary_base ** (-jnp.arange(half) / half)
    scaled = ROTARY_SCALINGS[config.rotary_scaling]
    return scaled(speeds, config.rotary_factor, config.rotary_length)


def rotate(
    x: Float[Array, "B L H K"], positions: Int[Array, " L"], speeds: Float[Array, " K_2"]
) -> Float[Array, "B L H K"]:
    """Turns each pair of dimensions, k and k + K/2, by the angle position * speeds[k], in
    float32: the product of a query and a key then depends on their positions through the
    distance only.
    """
    angles = positions[:, None].astype(jnp.float32) * speeds[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
