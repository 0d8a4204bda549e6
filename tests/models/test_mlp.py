"""Laws of the classifier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.models.mlp import MLPClassifier


def _init(model):
    inputs = jnp.asarray(np.random.default_rng(0).normal(size=(4, 128)), jnp.float32)
    init = jax.jit(lambda key: model.init(key, inputs, train=False)["params"])
    return init(jax.random.key(1)), inputs


def test_it_has_59236_parameters_with_128_inputs_as_in_the_published_series():
    params, _ = _init(MLPClassifier(dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(params))
        == 128 * 256 + 256 + 2 * 256 + 256 * 100 + 100
        == 59_236
    )


@pytest.mark.parametrize(("dtype", "given"), [("bfloat16", "float32"), (None, "bfloat16")])
def test_logits_are_float32_and_what_lies_before_of_the_chosen_dtype_or_the_inputs(
    dtype, given
):
    model = MLPClassifier(dtype=dtype)
    params, inputs = jax.tree.map(lambda x: x.astype(given), _init(model))
    logits, between = model.apply(
        {"params": params}, inputs, train=False, capture_intermediates=True
    )
    layers = between["intermediates"]
    for name in ("input_layer", "norm", "output_layer"):
        assert layers[name]["__call__"][0].dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32 and logits.shape == (4, 100)
