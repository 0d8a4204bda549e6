"""Laws of the layers' options: each changes what it names, and none changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from course_lib import configs
from course_lib.models import layers, parameters, transformer
from course_lib.models.hooks import Hooks
from course_lib.models.products import with_products
from course_lib.models.transformer import Transformer

B, L, D, H, K, F = 2, 5, 16, 4, 4, 64


def small(**changes):
    model = configs.get("155m").model
    model.update(num_layers=1, hidden_size=D, head_dim=K, num_heads=H, max_seq_len=8)
    model.update(vocab_size=11, num_outputs=11, dropout_rate=0.0, dtype="float32", remat=())
    model.update({"scan_layers": False} | changes)
    return model


@functools.cache
def block_of(**changes):
    """Returns random parameters of a block, none of them 0, and an input, as NumPy arrays."""
    draw = np.random.default_rng(0)
    params = jax.eval_shape(
        lambda: parameters.init(jax.random.key(0), small(**changes))["block_0"]
    )

    def random(path, leaf):
        scale = leaf.shape[0] ** -0.5 if path[-1].key == "kernel" else 0.1
        moved = (path[-1].key == "scale") + scale * draw.normal(size=leaf.shape)
        return jnp.asarray(moved, jnp.float32)

    x = jnp.asarray(draw.normal(size=(B, L, D)), jnp.float32)
    return jax.tree_util.tree_map_with_path(random, params), x


def apply(model, params, x, key=None, part=layers.layer):
    """Applies a block or a part of it, in one program instead of one per operation."""
    hooks = with_products(Hooks(), flat_products=False)
    y = jax.jit(lambda *args: part(model, hooks, *args))(params, x, key)
    return y[0] if isinstance(y, tuple) else y


def norm(x, scale, bias=0.0):
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-6) * scale + bias


def names(**changes):
    """Returns the names of the model's parameters, and their shapes."""
    params = transformer.abstract_params(
        Transformer(small(**changes)), jax.ShapeDtypeStruct((B, L), jnp.int32)
    )
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def test_options_add_and_remove_the_parameters_that_they_say():
    plain, grouped = names(), names(num_kv_heads=2)
    norms = {f"block_0/attn/{x}_norm/scale" for x in ("query", "key")}
    assert set(names(qk_norm=True)) - set(plain) == norms
    assert set(plain) - set(names(positions="rotary")) == {"pos_emb/embedding"}
    biases = {name for name in plain if name.endswith("bias")}
    assert set(plain) - set(names(use_bias=False)) == biases
    assert grouped["block_0/attn/q/kernel"] == (D, H, K)
    assert grouped["block_0/attn/kv/kernel"] == (D, 2, 2 * K)


def plain(model, p, x):
    """A layer in plain JAX."""

    def norm(p, x):
        x -= x.mean(-1, keepdims=True) * float(model.norm == "layer")
        x /= jnp.sqrt((x**2).mean(-1, keepdims=True) + model.norm_epsilon)
        return x * p["scale"] + p.get("bias", 0.0)

    def dense(p, x, dims):
        return jnp.einsum(dims, x, p["kernel"]) + p["bias"]

    def turned(x):  # pairs of numbers as complex ones
        speeds = model.rotary_base ** (-np.arange(0, K, 2) / K)
        turns = np.exp(1j * np.arange(L)[:, None] * speeds)[:, None].astype(np.complex64)
        x = jax.lax.complex(x[..., : K // 2], x[..., K // 2 :]) * turns
        return jnp.concatenate([x.real, x.imag], -1)

    def mlp(p, x):
        x = norm(p["pre_norm"], x)
        act = {"gelu": jax.nn.gelu, "silu": lambda x: x / (1 + jnp.exp(-x))}
        hidden = dense(p["gate_layer" if model.mlp_gate else "input_layer"], x, "bld,df->blf")
        hidden = act[model.mlp_activation](hidden)
        hidden *= dense(p["input_layer"], x, "bld,df->blf") if model.mlp_gate else 1.0
        return dense(p["output_layer"], hidden, "blf,fd->bld")

    def attention(p, x):
        heads = dense(p["qkv"], norm(p["pre_norm"], x), "bld,dhk->blhk")
        *pair, value = jnp.split(heads, 3, axis=-1)
        query, key = map(turned, pair) if model.positions == "rotary" else pair
        scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / np.sqrt(K)
        weights = jax.nn.softmax(jnp.where(np.tri(L, dtype=bool), scores, -1e9))
        read = jnp.einsum("bhqs,bshk->bqhk", weights, value)
        return dense(p["output_layer"], read, "bqhk,hkd->bqd")

    if model.parallel_block:
        shared = {"pre_norm": p["pre_norm"]}
        return x + mlp(p["mlp"] | shared, x) + attention(p["attn"] | shared, x)
    for part in ("attn", "mlp") if model.attention_first else ("mlp", "attn"):
        x += {"attn": attention, "mlp": mlp}[part](p[part], x)
    return x


OPTIONS = {"norm": "rms", "norm_epsilon": 0.1, "mlp_gate": True, "mlp_activation": "silu"}
OPTIONS |= {"mlp_size": 12, "attention_first": True, "rotary_base": 50.0}


@pytest.mark.parametrize("option", [*map(slow, OPTIONS), "all of them", "a gate side by side"])
def test_a_layer_with_an_option_is_that_of_a_few_lines_of_plain_jax(option):
    changes = {name: OPTIONS[name] for name in OPTIONS if option in (name, "all of them")}
    changes |= {"positions": "rotary"} if "rotary_base" in changes else {}
    changes = changes or {"mlp_gate": True, "parallel_block": True}
    params, x = block_of(**changes)
    model, seen = small(**changes), jnp.asarray(np.random.default_rng(1).normal(size=x.shape))

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(layer):
        y, transpose = jax.vjp(layer, params, x)
        return y, transpose(seen.astype(y.dtype))

    with jax.default_matmul_precision("highest"):
        found = values_and_gradients(lambda params, x: apply(model, params, x))
        with jax.numpy_rank_promotion("allow"):
            expected = values_and_gradients(functools.partial(plain, model))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        # the gradient of the keys' bias is 0 in theory
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) + 1e-5


@pytest.mark.parametrize("activation", ["gelu", "squared_relu"])
def test_a_parallel_block_adds_mlp_and_attention_of_the_same_normalized_input(activation):
    params, x = block_of(parallel_block=True)
    p = jax.device_get(params)
    mlp, attn, y = p["mlp"], p["attn"], norm(np.asarray(x), **p["pre_norm"])
    hidden = y @ mlp["input_layer"]["kernel"] + mlp["input_layer"]["bias"]
    hidden = jax.nn.gelu(hidden) if activation == "gelu" else np.maximum(hidden, 0) ** 2
    change = np.asarray(hidden) @ mlp["output_layer"]["kernel"] + mlp["output_layer"]["bias"]
    heads = np.einsum("bld,dhk->blhk", y, attn["qkv"]["kernel"]) + attn["qkv"]["bias"]
    query, key, value = np.split(heads, 3, axis=-1)
    scores = np.where(np.tri(L), np.einsum("bqhk,bshk->bhqs", query, key) / np.sqrt(K), -1e9)
    mean = np.einsum("bhqs,bshk->bqhk", np.asarray(jax.nn.softmax(scores)), value)
    read = np.einsum("blhk,hkd->bld", mean, attn["output_layer"]["kernel"])
    with jax.default_matmul_precision("highest"):
        found = apply(small(parallel_block=True, mlp_activation=activation), params, x)
    # exp and 64 terms in another order
    expected = np.asarray(x) + change + read + attn["output_layer"]["bias"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_normalized_queries_and_keys_do_not_grow_with_their_kernel_and_values_do():
    """Heads read the same from queries and keys a thousand times larger, and a thousand times
    as much from such values.
    """
    model, one = small(qk_norm=True), {"scale": jnp.ones(K)}
    product = np.random.default_rng(0).normal(size=(B, L, H, 3, K)).astype(np.float32)

    @jax.jit
    def read(of_keys, of_values):
        scale = jnp.stack([of_keys, of_keys, of_values])[None, None, None, :, None]
        products = [(product * scale).reshape(B, L, H, 3 * K)]
        norms = {"query_norm": one, "key_norm": one}
        return layers.attended(model, Hooks(), norms, products)

    np.testing.assert_allclose(read(1e3, 1.0), read(1.0, 1.0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(read(1e3, 1e3), 1e3 * read(1.0, 1.0), rtol=1e-4, atol=1e-2)


def test_each_head_is_normalized_by_its_own_mean_and_variance():
    draw = np.random.default_rng(0).normal(size=(B, L, H, K))
    x = (3 + draw * np.arange(1.0, H + 1)[:, None]).astype(np.float32)
    found = layers.norm({"query_norm": {"scale": jnp.ones(K)}}, "query_norm", jnp.asarray(x))
    np.testing.assert_allclose(found, norm(x, 1.0), rtol=1e-4, atol=1e-4)


def test_the_score_of_turned_queries_and_keys_depends_on_their_distance_alone():
    draw = np.random.default_rng(3)
    query, key = jnp.asarray(draw.normal(size=(2, 1, 1, 1, 8)), jnp.float32)
    speeds = layers.rotary_speeds(small(head_dim=8))

    def score(at, other):
        places = (query, at), (key, other)
        turned = [layers.rotate(x, jnp.array([place]), speeds) for x, place in places]
        return float((turned[0] * turned[1]).sum())

    assert score(0, 0) == pytest.approx(float((query * key).sum()), rel=1e-5)
    # float32 angles near 40 are off by 2e-6
    assert score(40, 37) == pytest.approx(score(3, 0), abs=1e-4)
    assert abs(score(3, 0) - score(0, 3)) > 0.1 and abs(score(3, 0) - score(4, 0)) > 0.1


def test_rotary_angles_are_those_of_the_paper():
    x = jnp.ones((1, 1, 1, 4))
    a, b = 7.0, 7.0 / 10_000 ** (2 / 4)
    cos, sin = np.cos, np.sin
    expected = [cos(a) - sin(a), cos(b) - sin(b), cos(a) + sin(a), cos(b) + sin(b)]
    turned = layers.rotate(x, jnp.array([7]), layers.rotary_speeds(small(head_dim=4)))
    np.testing.assert_allclose(turned[0, 0, 0], expected, rtol=1e-4)


def test_scaled_positions_turn_more_slowly_and_fast_ones_do_not_in_llama_3():
    """Three kinds of pairs: they turn four times within 64 positions, less than once, or
    between.
    """
    given = dict(head_dim=16, rotary_base=100.0, rotary_factor=8.0, rotary_length=64)
    usual = np.asarray(layers.rotary_speeds(small(**given)))
    np.testing.assert_allclose(usual, 100.0 ** (-np.arange(8) / 8), rtol=1e-5)
    linear = layers.rotary_speeds(small(**given, rotary_scaling="linear"))
    np.testing.assert_allclose(linear, usual / 8, rtol=1e-6)
    found = np.asarray(layers.rotary_speeds(small(**given, rotary_scaling="llama3"))) / usual
    turns = usual * 64 / (2 * np.pi)
    np.testing.assert_allclose(found[turns > 4], 1.0)
    np.testing.assert_allclose(found[turns < 1], 1 / 8)
    assert {"fast": (turns > 4).sum(), "slow": (turns < 1).sum()} == {"fast": 2, "slow": 3}
    assert all(np.diff(found) <= 0) and 1 / 8 < found[2] < 1


def test_queries_keys_and_values_may_have_the_only_bias():
    for parallel_block in (False, True):
        shape = dict(parallel_block=parallel_block, use_bias=False, num_kv_heads=2)
        kept, found = names(**shape), names(**shape, qkv_bias=True)
        added = {name: shape for name, shape in found.items() if name not in kept}
        assert {**kept, **added} == found
        assert {tuple(name.split("/")[-2:]): shape for name, shape in added.items()} == {
            ("q", "bias"): (H, K),
            ("kv", "bias"): (2, 2 * K),
        }
    params, x = block_of(use_bias=False, qkv_bias=True)
    without = {**params, "attn": {**params["attn"], "qkv": dict(params["attn"]["qkv"])}}
    del without["attn"]["qkv"]["bias"]
    model = small(use_bias=False, qkv_bias=True)
    assert abs(np.subtract(apply(model, params, x), apply(model, without, x))).max() > 1e-5


def test_heads_may_be_wider_together_than_the_model():
    shape = dict(head_dim=2 * K, attention_width=2 * D)
    params, x = block_of(**shape)
    assert params["attn"]["qkv"]["kernel"].shape == (D, H, 3 * 2 * K)
    assert apply(small(**shape), params, x).shape == x.shape


@pytest.mark.parametrize("parallel_block", [False, slow(True)])
@pytest.mark.parametrize(
    "option",
    [
        {"positions": "rotary"},
        {"causal_mask": False},
        {"softmax_dtype": "bfloat16"},
        {"window": 2},
    ],
)
def test_an_option_reaches_the_block(parallel_block, option):
    params, x = block_of(parallel_block=parallel_block)
    kept = apply(small(parallel_block=parallel_block), params, x)
    changed = apply(small(parallel_block=parallel_block, **option), params, x)
    assert abs(np.subtract(kept, changed)).max() > 1e-5


@pytest.mark.parametrize("part", [layers.mlp, layers.attention, layers.parallel])
def test_a_layer_drops_with_a_key_only(part):
    params, x = block_of(parallel_block=part is layers.parallel)
    params = {layers.mlp: params["mlp"], layers.attention: params["attn"]}.get(part, params)
    model = small(dropout_rate=0.5)
    kept = apply(model, params, x, part=part)
    dropped = np.asarray(apply(model, params, x, jax.random.key(3), part=part))
    gone = abs(dropped) < 1e-6
    assert 0.3 < gone.mean() < 0.7
    np.testing.assert_allclose(dropped[~gone], 2 * kept[~gone], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parallel_block", [False, True])
def test_grouped_queries_are_heads_that_share_keys_and_values(parallel_block):
    """With keys and values of each group copied for each of its heads, the ungrouped layer
    computes the same.
    """
    options = {"parallel_block": parallel_block}
    params, x = block_of(num_kv_heads=2, **options)
    attn = dict(params["attn"])
    q, kv = attn.pop("q"), attn.pop("kv")
    attn["qkv"] = {
        name: jnp.concatenate([q[name], jnp.repeat(kv[name], H // 2, axis=-2)], axis=-1)
        for name in ("kernel", "bias")
    }
    with jax.default_matmul_precision("highest"):
        found = apply(small(num_kv_heads=2, **options), params, x)
        expected = apply(small(**options), params | {"attn": attn}, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
