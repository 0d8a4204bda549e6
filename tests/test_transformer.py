"""What must be true of the Transformer."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib import config, remat, transformer
from course_lib.transformer import Transformer

REMAT = [(), ("MLP",), ("Attn",), ("MLP", "Attn"), ("Block",)]


def _config(**changes):
    """A small model in float32, without dropout."""
    model = config.get("155m").model
    small = dict(num_layers=2, hidden_size=16, head_dim=8, num_heads=2, vocab_size=11, num_outputs=11, max_seq_len=8)
    model.update(small | dict(dropout_rate=0.0, dtype="float32", remat=()) | changes)
    return model


def _tokens(seed=0, batch=3, length=6):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, 11)


@functools.cache
def _params(scan_layers=True):
    """Parameters of the small model: the same ones, stacked for a scan over layers or one by one."""
    scanned = Transformer(_config()).init(jax.random.key(1), _tokens(), train=False)["params"]
    if scan_layers:
        return scanned
    layers = {f"block_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], scanned["block"]) for i in range(2)}
    return {name: leaf for name, leaf in scanned.items() if name != "block"} | layers


def _grads(model, params, **apply):
    """Gradients, stacked as for a scan, and logits."""

    @jax.jit
    def grads(params):
        def loss(params):
            logits = Transformer(model).apply({"params": params}, _tokens(), **({"train": False} | apply))
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]), logits

        return jax.grad(loss, has_aux=True)(params)

    with jax.default_matmul_precision("highest"):
        grads, logits = grads(params)
    if not model.scan_layers:
        blocks = [grads.pop(f"block_{i}") for i in range(2)]
        grads["block"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    return grads, logits


def _assert_same(ours, theirs):
    """Equal to 5e-6 of each leaf's norm: float32 sums in another order."""
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.linalg.norm(a - b) <= 5e-6 * jnp.linalg.norm(b) + 1e-9, jax.tree_util.keystr(path)


@pytest.mark.parametrize(("scan_layers", "remat"), list(itertools.product([True, False], REMAT)))
def test_it_has_155877376_parameters_at_the_published_size_for_every_scan_and_remat(scan_layers, remat):
    model = config.get("155m").model
    model.update(scan_layers=scan_layers, remat=remat)
    params = transformer.abstract_params(Transformer(model), jax.ShapeDtypeStruct((1, 512), jnp.int32))
    assert transformer.num_params(params) == 155_877_376


def test_scanned_layers_compute_what_unrolled_ones_do():
    scanned, logits = _grads(_config(), _params())
    unrolled, unrolled_logits = _grads(_config(scan_layers=False), _params(scan_layers=False))
    _assert_same(unrolled, scanned)
    _assert_same(unrolled_logits, logits)


@pytest.mark.parametrize(("scan_layers", "modules"), [(True, REMAT[3]), (True, REMAT[4]), (False, REMAT[3]), (False, REMAT[4])])
def test_rematerialized_modules_give_the_same_gradient(scan_layers, modules):
    params = _params(scan_layers)
    plain, _ = _grads(_config(scan_layers=scan_layers), params)
    again, _ = _grads(_config(scan_layers=scan_layers, remat=modules), params)
    _assert_same(again, plain)


@pytest.mark.parametrize("policy", remat.POLICIES)
def test_every_policy_gives_the_same_gradient(policy):
    names = ("mlp_hidden", "qkv") if policy in ("names", "offload") else ()
    plain, _ = _grads(_config(), _params())
    again, _ = _grads(_config(remat=("Block",), remat_policy=policy, remat_names=names), _params())
    _assert_same(again, plain)


def test_dropout_is_the_same_when_the_forward_pass_is_computed_again():
    apply = dict(train=True, rngs={"dropout": jax.random.key(3)})
    plain, _ = _grads(_config(dropout_rate=0.5), _params(), **apply)
    again, _ = _grads(_config(dropout_rate=0.5, remat=("Block",)), _params(), **apply)
    _assert_same(again, plain)


def test_dropout_draws_in_training_only_and_differs_from_layer_to_layer():
    model = _config(dropout_rate=0.5)

    def apply(seed, train):
        rngs = {"dropout": jax.random.key(seed)}
        return Transformer(model).apply({"params": _params()}, _tokens(), train=train, rngs=rngs)

    np.testing.assert_array_equal(apply(0, False), apply(1, False))
    assert not np.allclose(apply(0, True), apply(1, True))
    bound = Transformer(_config(dropout_rate=0.5, scan_layers=False))
    variables, rngs = {"params": _params(scan_layers=False)}, {"dropout": jax.random.key(0)}
    _, layers = bound.apply(variables, _tokens(), rngs=rngs, capture_intermediates=lambda m, _: "Dropout" in m.name)
    first, second = (layers["intermediates"][f"block_{i}"]["mlp"]["Dropout_0"]["__call__"][0] == 0 for i in range(2))
    assert np.any(first != second)


@pytest.mark.parametrize("at", [0, 3])
def test_a_prediction_depends_on_the_tokens_before_it_and_on_none_after(at):
    tokens = _tokens()
    changed = (tokens + 1) % 11

    def logits(tokens):
        return Transformer(_config()).apply({"params": _params()}, tokens, train=False)

    later = jnp.concatenate([tokens[:, : at + 1], changed[:, at + 1 :]], axis=1)
    np.testing.assert_array_equal(logits(later)[:, : at + 1], logits(tokens)[:, : at + 1])
    for position in range(at + 1):
        earlier = tokens.at[:, position].set(changed[:, position])
        assert jnp.all(jnp.any(logits(earlier)[:, at] != logits(tokens)[:, at], axis=-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_gradients_and_logits_are_float32_and_activations_are_not(dtype):
    model = Transformer(_config(dtype=dtype, scan_layers=False))
    params = _params(scan_layers=False)
    logits, layers = model.apply({"params": params}, _tokens(), train=False, capture_intermediates=True)
    assert logits.dtype == jnp.float32
    for block in ("block_0", "block_1"):
        for dtypes in jax.tree.leaves(jax.tree.map(lambda leaf: leaf.dtype.name, layers["intermediates"][block])):
            assert dtypes == dtype
    grads = jax.grad(lambda params: model.apply({"params": params}, _tokens(), train=False).sum())(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, grads))} == {"float32"}


def test_the_gradient_of_a_token_that_occurs_often_is_summed_in_float32():
    """In bfloat16 a sum of 1024 equal terms stops at 256 of them, where one more no longer changes it."""
    model = Transformer(_config(num_layers=1, dtype="bfloat16", causal_mask=False))
    tokens = jnp.zeros((128, 8), jnp.int32)
    params = model.init(jax.random.key(0), tokens, train=False)["params"]

    def gradient(tokens):
        grads = jax.grad(lambda params: model.apply({"params": params}, tokens, train=False)[..., 0].sum())(params)
        return grads["embed"]["embedding"][0]

    np.testing.assert_allclose(gradient(tokens), 128 * gradient(tokens[:1]), rtol=0.02, atol=0.02)


def test_matmul_flops_count_every_weight_and_the_attention():
    model = config.get("155m").model
    params = transformer.abstract_params(Transformer(model), jax.ShapeDtypeStruct((1, 512), jnp.int32))
    kernels = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if "kernel" in jax.tree_util.keystr(path)]
    tokens = 64 * 512
    weights = 2 * tokens * sum(leaf.size for leaf in kernels)
    attention = 12 * 2 * 2 * tokens * 512 * 1024
    assert transformer.matmul_flops(model, batch_size=64, seq_len=512) == weights + attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 5}, "seq_len=6 must be at most max_seq_len=5"),
        ({"head_dim": 6}, r"head_dim=6 must be hidden_size / num_heads = 16 / 2"),
        ({"remat": ("mlp",)}, r"remat=\('mlp',\) must hold names"),
        ({"remat_policy": "some"}, "remat_policy='some' must be one of"),
        ({"remat_policy": "names", "remat_names": ("kqv",)}, r"remat_names=\('kqv',\) must hold names from .* no 'kqv'"),
        ({"attention": "flash"}, "attention='flash' must be one of"),
    ],
)
def test_what_cannot_be_is_refused_when_the_model_is_traced(changes, message):
    with pytest.raises(ValueError, match=message):
        transformer.abstract_params(Transformer(_config(**changes)), jax.ShapeDtypeStruct((3, 6), jnp.int32))
