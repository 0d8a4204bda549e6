"""Laws of the classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib import measure, training
from course_lib.models.mlp import MLPClassifier
from course_lib.one_device import mixed_precision
from course_lib.text.data import Batch


def _init(model):
    inputs = jax.random.normal(jax.random.key(0), (4, 128))
    return model.init(jax.random.key(1), inputs, train=False)["params"], inputs


def test_it_has_59236_parameters_with_128_inputs_as_in_the_published_series():
    params, _ = _init(MLPClassifier())
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(params))
        == 128 * 256 + 256 + 2 * 256 + 256 * 100 + 100
        == 59_236
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_parameters_and_logits_are_float32_and_what_lies_between_is_of_the_chosen_dtype(dtype):
    model = MLPClassifier(dtype=dtype)
    params, inputs = _init(model)
    logits, between = model.apply(
        {"params": params}, inputs, train=False, capture_intermediates=True
    )
    layers = between["intermediates"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert {
        layers[name]["__call__"][0].dtype for name in ("input_layer", "norm", "output_layer")
    } == {jnp.dtype(dtype)}
    assert logits.dtype == jnp.float32 and logits.shape == (4, 100)


def test_dropout_draws_in_training_only():
    model = MLPClassifier(dropout_rate=0.5)
    params, inputs = _init(model)

    def logits(train, seed):
        return model.apply(
            {"params": params}, inputs, train=train, rngs={"dropout": jax.random.key(seed)}
        )

    np.testing.assert_array_equal(logits(False, 0), logits(False, 1))
    assert not np.allclose(logits(True, 0), logits(True, 1))


@pytest.mark.parametrize("name", mixed_precision.POLICIES)
def test_without_a_dtype_of_its_own_it_computes_in_the_policys(name):
    policy, model = mixed_precision.policy(name), MLPClassifier(dropout_rate=0.0)
    params, inputs = _init(model)
    batch = Batch(inputs, jnp.zeros(4, jnp.int32), jnp.ones(4))
    loss_fn = policy.wrap(training.classification_loss(training.as_function(model)))
    found = measure.flops(lambda params: loss_fn(params, batch, None), params)
    assert list(found.total) == [policy.compute_dtype.dtype.name]
