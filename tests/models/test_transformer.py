"""Laws of the Transformer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from course_lib import configs, measure
from course_lib.models import attention, layers, losses, parameters, transformer
from course_lib.models.hooks import Hooks
from course_lib.models.products import with_products
from course_lib.models.transformer import Transformer
from course_lib.one_device import rematerialization


def _config(**changes):
    """A small model in float32, without dropout."""
    model = configs.get("155m").model
    model.update(num_layers=2, hidden_size=16, head_dim=8, num_heads=2, max_seq_len=8)
    model.update(vocab_size=11, num_outputs=11, dropout_rate=0.0, dtype="float32", remat=())
    model.update(changes)
    return model


def _tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, 11, (3, 6), np.int32))


@functools.cache
def _params(scan_layers=True):
    """Parameters of the small model: the same ones, stacked for a scan over layers or one by
    one.
    """
    init = jax.jit(
        lambda key: Transformer(_config()).init(key, _tokens(), train=False)["params"]
    )
    scanned = init(jax.random.key(1))
    if scan_layers:
        return scanned
    stacked = jax.device_get(scanned["block"])
    layers = {f"block_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(2)}
    return {name: leaf for name, leaf in scanned.items() if name != "block"} | layers


def _stored(dtype):
    """Returns the parameters as NumPy arrays of a dtype."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.dtype(dtype)), _params())


@functools.cache
def _grads(train=False, **changes):
    """Gradients, stacked as for a scan, and logits, of the small model with some changes."""
    model = _config(**changes)
    params, rngs = _params(model.scan_layers), {"dropout": jax.random.key(3)}

    @jax.jit
    def grads(params):
        def loss(params):
            logits = Transformer(model).apply(
                {"params": params}, _tokens(), train=train, rngs=rngs
            )
            return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]), logits

        return jax.grad(loss, has_aux=True)(params)

    with jax.default_matmul_precision("highest"):
        grads, logits = jax.device_get(grads(params))
    if not model.scan_layers:
        blocks = [grads.pop(f"block_{i}") for i in range(2)]
        grads["block"] = jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)
    return grads, logits


def _assert_same(ours, theirs):
    """Equal to 5e-6 of each leaf's norm: float32 sums in another order."""
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert np.linalg.norm(a - b) <= 5e-6 * np.linalg.norm(b) + 1e-9, jax.tree_util.keystr(
            path
        )


@pytest.mark.parametrize(("scan_layers", "remat"), [(True, ()), (False, ("Block",))])
def test_it_has_155877376_parameters_at_the_published_size_for_every_scan_and_remat(
    scan_layers, remat
):
    model, tokens = configs.get("155m").model, jax.ShapeDtypeStruct((1, 512), jnp.int32)
    model.update(scan_layers=scan_layers, remat=remat)
    params = transformer.abstract_params(Transformer(model), tokens)
    assert transformer.num_params(params) == 155_877_376


def test_llama_2_7b_has_its_6738415616_parameters():
    model, tokens = configs.llama2_7b().model, jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    params = transformer.abstract_params(Transformer(model), tokens)
    assert transformer.num_params(params) == 6_738_415_616


@pytest.mark.parametrize(
    "changes",
    [
        {"scan_layers": False},
        {"remat": ("MLP", "Attn")},
        {"scan_layers": False, "remat": ("Block",)},
        {"remat": ("Block",), "remat_policy": "offload", "remat_names": tuple(layers.NAMES)},
        slow({"remat": ("Block",), "remat_policy": "dots"}),
    ],
    ids=str,
)
def test_a_scan_and_rematerialization_change_no_gradient(changes):
    _assert_same(_grads(**changes), _grads())


def test_dropout_is_the_same_when_the_forward_pass_is_computed_again():
    plain = _grads(train=True, dropout_rate=0.5)
    _assert_same(_grads(train=True, dropout_rate=0.5, remat=("Block",)), plain)


def test_a_prediction_depends_on_its_own_token_and_those_before_and_on_none_after():
    params, tokens, at = _params(), np.asarray(_tokens()), 3
    model, changed = Transformer(_config()), (tokens + 1) % 11
    logits = jax.jit(lambda given: model.apply({"params": params}, given, train=False)[:, at])
    later = np.concatenate([tokens[:, : at + 1], changed[:, at + 1 :]], axis=1)
    np.testing.assert_array_equal(logits(later), logits(tokens))
    for position in range(at + 1):
        earlier = tokens.copy()
        earlier[:, position] = changed[:, position]
        assert np.all(np.any(logits(earlier) != logits(tokens), axis=-1))


def test_parameters_gradients_and_logits_are_float32_and_activations_are_not(monkeypatch):
    config, params = _config(dtype="bfloat16", scan_layers=False), _params(False)
    activations = []

    def watched(right):
        return lambda *args, **kw: activations.append(right(*args, **kw)) or activations[-1]

    for name in ("norm", "dense", "attended", "layer"):
        monkeypatch.setattr(layers, name, watched(getattr(layers, name)))

    def loss(params):
        logits, _ = transformer.apply(config, params, _tokens())
        return logits.sum(), logits

    shapes = params, jax.eval_shape(jax.grad(loss, has_aux=True), params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(activations)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"float32"}


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_gradient_of_a_row_that_is_used_often_is_summed_in_float32(stored):
    """A bfloat16 sum of 1024 equal terms stops growing at 256 of them, where one more no longer
    changes it.
    """
    model, params = Transformer(_config(dtype="bfloat16")), _stored(stored)

    @jax.jit
    def gradient(weights):
        """Returns those of token 0 and place 0, for a weighted sum over 1024 sequences."""

        def loss(params):
            tokens = jnp.zeros((1024, 1), jnp.int32)
            logits = model.apply({"params": params}, tokens, train=False)
            return (logits[:, 0, 0] * weights).sum()

        grads = jax.grad(loss)(params)
        rows = (grads[name]["embedding"][0] for name in ("embed", "pos_emb"))
        return jnp.stack([*rows]).astype("float32")

    # in one program, since products of another size may round each term in another way
    ones = np.ones(1024, "float32")
    np.testing.assert_allclose(
        gradient(ones), 1024 * gradient(ones * (np.arange(1024) == 9)), rtol=0.01
    )


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_gradient_of_a_tied_table_is_the_float32_sum_of_those_of_both_its_uses(stored):
    params = _stored(stored)
    bias = np.zeros(11)
    untied = params | {"output_layer": {"kernel": params["embed"]["embedding"].T, "bias": bias}}
    untied = jax.tree.map(lambda leaf: leaf.astype("float32"), untied)
    del params["output_layer"]

    def gradient(model, params):
        loss = lambda params: (transformer.apply(model, params, _tokens())[0] ** 2).mean()  # noqa: E731
        return jax.device_get(jax.jit(jax.grad(loss))(params))

    with jax.default_matmul_precision("highest"):
        found = gradient(_config(tied_embeddings=True), params)["embed"]["embedding"]
        both = gradient(_config(), untied)
    expected = both["embed"]["embedding"] + both["output_layer"]["kernel"].T
    # one rounding to what is stored
    rtol = 1e-5 + (stored == "bfloat16") * 2.0**-8
    np.testing.assert_allclose(found.astype("float32"), expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(
    ("scan_layers", "num_layers", "barriers"),
    [(True, 2, False), (True, 1, True), (False, 1, True)],
)
def test_barriers_against_merging_stand_where_layers_are_unrolled_and_not_inside_a_loop(
    scan_layers, num_layers, barriers
):
    model = _config(scan_layers=scan_layers, remat=("MLP",), num_layers=num_layers)
    params = jax.eval_shape(lambda: parameters.init(jax.random.key(0), model))
    loss = jax.grad(lambda params: transformer.apply(model, params, _tokens())[0].sum())
    text = jax.jit(loss).lower(params).as_text()
    assert ("optimization_barrier" in text) == barriers


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_layers": 3}, "block/attn/output_layer/bias"),
        ({"max_seq_len": 9}, "pos_emb/embedding"),
        ({"use_bias": False}, "block/attn/output_layer/bias"),
    ],
)
def test_parameters_of_another_model_are_refused(changes, name):
    with pytest.raises(ValueError, match=rf"params\['{name}'\]"):
        Transformer(_config(**changes)).apply({"params": _params()}, _tokens(), train=False)


@pytest.mark.parametrize("wrong", [-1, 11])
def test_a_token_that_has_no_embedding_is_refused_where_its_value_is_known(wrong):
    tokens = _tokens().at[2, 3].set(wrong)

    def loss(params):
        return Transformer(_config()).apply({"params": params}, tokens, train=False).sum()

    for run in (loss, jax.grad(loss), jax.jit(loss)):
        with pytest.raises(ValueError, match=rf"tokens\[2, 3\]={wrong} must be in \[0, vocab"):
            run(_params())


def test_tokens_that_are_no_integers_are_refused():
    embedded = jnp.zeros((3, 6, 16))
    with pytest.raises(ValueError, match=r"tokens of shape \(3, 6, 16\) .* must be integers"):
        jax.eval_shape(Transformer(_config()).init, jax.random.key(0), embedded)


def test_the_flops_of_a_forward_pass_are_those_of_every_weight_and_of_the_attention():
    model, tokens = configs.get("155m").model, jax.ShapeDtypeStruct((2, 512), jnp.int32)
    params = transformer.abstract_params(Transformer(model), tokens)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    kernels = sum(leaf.size for path, leaf in leaves if "kernel" in jax.tree_util.keystr(path))
    attention = 12 * 2 * 2 * tokens.size * 512 * 1024
    counted = measure.flops(losses.as_function(Transformer(model)), params, tokens)
    assert sum(counted.total.values()) == 2 * tokens.size * kernels + attention


def test_flat_products_and_attention_in_blocks_change_the_time_and_not_the_numbers(monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 4)
    fast = _grads(scan_layers=False, flat_products=True, attention="blocks")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, fast, _grads(scan_layers=False))


def test_a_sequence_that_is_too_long_is_refused_when_the_model_is_traced():
    tokens = jax.ShapeDtypeStruct((3, 6), jnp.int32)
    with pytest.raises(ValueError, match="seq_len=6 must be at most max_seq_len=5"):
        transformer.abstract_params(Transformer(_config(max_seq_len=5)), tokens)


@pytest.mark.parametrize("modules", [("MLP",), ("Attn",), ("MLP", "Attn"), ("Block",)])
def test_a_name_is_refused_exactly_where_it_would_change_nothing(modules):
    x = jax.ShapeDtypeStruct((3, 6, 16), jnp.float32)
    params = _params(scan_layers=False)["block_0"]

    def saved(policy, names):
        """Returns how many arrays a block saves beside its arguments."""
        model = _config(remat=modules, remat_policy=policy, remat_names=names)
        block = layers.changed_layer(model, with_products(Hooks(), False))
        kept = rematerialization.residuals(lambda p, x: block(p, x, None)[0], params, x)
        return sum(not residual.why.startswith("argument") for residual in kept)

    nothing = saved("nothing", ())
    for name in layers.NAMES:
        chosen = _config(remat=modules, remat_policy="names", remat_names=(name,))
        # an argument under another name: it can be offloaded
        argument = name == "block_in" and modules == ("Block",)
        if argument or saved("names", (name,)) > nothing:
            transformer.check(chosen, 6)
        else:
            with pytest.raises(ValueError, match=rf"remat=.* for remat_names to hold '{name}'"):
                transformer.check(chosen, 6)
