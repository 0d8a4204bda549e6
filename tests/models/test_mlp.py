"""Laws of the classifier."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.models.mlp import MLPClassifier


def _init(model):
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 128)), jnp.float32)
    init = jax.jit(lambda key: model.init(key, inputs, train=False)["params"])
    return init(jax.random.key(1)), inputs


def test_it_has_59236_parameters_with_128_inputs_as_in_the_published_series():
    params, _ = _init(MLPClassifier())
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(params))
        == 128 * 256 + 256 + 2 * 256 + 256 * 100 + 100
        == 59_236
    )


def test_parameters_and_logits_are_float32_and_what_lies_between_is_of_the_chosen_dtype():
    model = MLPClassifier(dtype=jnp.bfloat16)
    params, inputs = _init(model)
    logits, between = model.apply(
        {"params": params}, inputs, train=False, capture_intermediates=True
    )
    layers = between["intermediates"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for name in ("input_layer", "norm", "output_layer"):
        assert layers[name]["__call__"][0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32 and logits.shape == (4, 100)


def test_without_a_dtype_of_its_own_it_computes_in_that_of_inputs_and_parameters():
    params, inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _init(MLPClassifier()))
    _, between = MLPClassifier().apply(
        {"params": params}, inputs, train=False, capture_intermediates=True
    )
    assert between["intermediates"]["output_layer"]["__call__"][0].dtype == jnp.bfloat16


def test_dropout_draws_in_training_only():
    model = MLPClassifier(dropout_rate=0.5)
    params, inputs = _init(model)

    def logits(train, seed):
        return model.apply(
            {"params": params}, inputs, train=train, rngs={"dropout": jax.random.key(seed)}
        )

    np.testing.assert_array_equal(logits(False, 0), logits(False, 1))
    assert not np.allclose(logits(True, 0), logits(True, 1))
