"""The first parameters of the Transformer: names, shapes and numbers of Flax's modules.

Kernels start as those of `nn.Dense`. Scanned layers lie in "block", with a leading axis of N;
layers one by one lie in "block_0", "block_1", ...
"""

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import initializers
from ml_collections import ConfigDict

from course_lib import arguments

PyTree = Any
Shape = tuple[tuple[int, ...], tuple[int, ...]]  # inputs and outputs of a kernel

_embedding = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
_position = initializers.normal(0.02)
_kernel = initializers.lecun_normal()


def init(key: jax.Array, config: ConfigDict) -> PyTree:
    """Returns float32 parameters of the `model` part of a configuration."""
    width, outputs = (config.hidden_size,), (config.num_outputs,)
    vocabulary = (config.vocab_size, config.hidden_size)
    params = {"embed": {"embedding": _embedding(key_of(key, "embed", 1), vocabulary)}}
    if config.positions == "learned":
        places = (config.max_seq_len, config.hidden_size)
        params["pos_emb"] = {"embedding": _position(key_of(key, "pos_emb", 1), places)}
    if config.scan_layers:
        keys = jax.random.split(key, config.num_layers)
        params["block"] = jax.lax.map(lambda key: _layer(key, config, "block"), keys)
    else:
        names = [f"block_{i}" for i in range(config.num_layers)]
        params |= {name: _layer(key, config, name) for name in names}
    if not config.tied_embeddings:
        of_head = key_of(key, "output_layer", 1)
        params["output_layer"] = _dense(of_head, (width, outputs), config.use_bias)
    return params | {"post_norm": _norm(config)}


def mlp_width(config: ConfigDict) -> int:
    """Returns F, the hidden width of the MLP or of one expert."""
    width: int = config.mlp_size or config.mlp_expansion * config.hidden_size
    return width


def key_of(key: jax.Array | None, *path: str | int) -> jax.Array | None:
    """Returns the key that a Flax module at this path draws from, so that models start with the
    numbers of those that were Flax modules. A path ends with a count of keys. None stays None.
    """
    if key is None:
        return None
    digest = hashlib.sha1()
    for part in path:
        digest.update(part.encode() if isinstance(part, str) else bytes([part]))
    return jax.random.fold_in(key, np.uint32(int.from_bytes(digest.digest()[:4], "big")))


def keys_in_layer(
    key: jax.Array | None, layer: str, *path: str, draws: int = 1
) -> list[jax.Array | None]:
    """Returns the keys that a module of a layer draws; Flax traces a scanned one twice."""
    traced_before = draws if layer == "block" else 0
    return [key_of(key, layer, *path, traced_before + i + 1) for i in range(draws)]


def _layer(key: jax.Array, config: ConfigDict, name: str) -> PyTree:
    """Returns the parameters of one layer, whose name is "block" or "block_i"."""
    width, heads, size = (config.hidden_size,), config.num_heads, config.head_dim
    hidden, groups = (mlp_width(config),), config.num_kv_heads
    biased = {"qkv", "q", "kv"} if config.qkv_bias else set()
    into_mlp, out_of_mlp, out_of_attn = (width, hidden), (hidden, width), ((heads, size), width)
    if groups in (0, heads):
        projections = {"qkv": (width, (heads, 3 * size))}
    else:
        projections = {"q": (width, (heads, size)), "kv": (width, (groups, 2 * size))}
    names = ("expert_in", "expert_gate", "expert_out")
    if not config.num_experts:
        names = ("input_layer", "gate_layer", "output_layer")
    modules = dict(zip(names, (into_mlp, into_mlp, out_of_mlp), strict=True))
    if not config.mlp_gate:
        del modules[names[1]]
    norms = {"pre_norm": _norm(config)}
    if config.qk_norm:
        norms |= {each: {"scale": jnp.ones(size)} for each in ("query_norm", "key_norm")}

    def dense(key: jax.Array, part: str, module: str, shape: Shape) -> PyTree:
        drawn = keys_in_layer(key, name, part, module, draws=1 + config.use_bias)
        return _dense(drawn[0], shape, config.use_bias or module in biased)

    def several(keys: Any, shapes: Mapping[str, Shape]) -> PyTree:
        drawn = zip(keys, shapes.items(), strict=True)
        return {
            module: _dense(key, shape, config.use_bias or module in biased)
            for key, (module, shape) in drawn
        }

    if config.parallel_block:
        of_mlp, of_attn = keys_in_layer(key, name, draws=2)
        attn = projections | {"output_layer": out_of_attn}
        return norms | {
            "mlp": several(jax.random.split(of_mlp, len(modules)), modules),
            "attn": several(jax.random.split(of_attn, len(attn)), attn),
        }

    def one_mlp(key: jax.Array) -> PyTree:
        return {each: dense(key, "mlp", each, shape) for each, shape in modules.items()}

    if config.num_experts:
        mlp = jax.vmap(one_mlp)(jax.random.split(key, config.num_experts))
        (of_router,) = keys_in_layer(key, name, "mlp")
        mlp["router"] = _kernel(of_router, (config.hidden_size, config.num_experts))
    else:
        mlp = one_mlp(key)
    if "qkv" in projections:
        attn = {"qkv": dense(key, "attn", "qkv", projections["qkv"])}
    else:
        attn = several(keys_in_layer(key, name, "attn", draws=2), projections)
    attn["output_layer"] = dense(key, "attn", "output_layer", out_of_attn)
    return {"mlp": mlp | {"pre_norm": _norm(config)}, "attn": attn | norms}


def _dense(key: jax.Array, shape: Shape, use_bias: bool) -> PyTree:
    inputs, outputs = shape
    kernel = _kernel(key, (math.prod(inputs), math.prod(outputs))).reshape(inputs + outputs)
    return {"kernel": kernel} | ({"bias": jnp.zeros(outputs)} if use_bias else {})


def _norm(config: ConfigDict) -> PyTree:
    width = config.hidden_size
    has_bias = config.use_bias and config.norm == "layer"
    return {"scale": jnp.ones(width)} | ({"bias": jnp.zeros(width)} if has_bias else {})


def check(params: PyTree, config: ConfigDict) -> None:
    """Refuses parameters of another model. Most would be used silently: a model of twelve
    layers computes, whatever `num_layers` says.
    """

    def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {arguments.name_in_tree(path): tuple(leaf.shape) for path, leaf in leaves}

    expected = shapes(jax.eval_shape(lambda: init(jax.random.key(0), config)))
    given = shapes(params)
    for name in expected | given:
        if given.get(name) != expected.get(name):
            raise ValueError(
                f"params[{name!r}] has the shape {given.get(name)}, and must have"
                f" {expected.get(name)}: these are parameters of another model"
            )
