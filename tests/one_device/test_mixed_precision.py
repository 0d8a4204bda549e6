"""Laws of formats, policies and loss scales."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.one_device import mixed_precision, rematerialization
from course_lib.text.data import Batch


@pytest.mark.parametrize("name", mixed_precision.FORMATS)
def test_a_format_is_its_bits_with_the_range_that_ieee_754_gives_its_exponent(name):
    form = mixed_precision.describe(name)
    assert form.name == name
    assert form.bits == 1 + form.exponent_bits + form.mantissa_bits
    assert form.epsilon == 2.0**-form.mantissa_bits
    assert form.smallest_subnormal == form.smallest_normal * form.epsilon
    bias = 2 ** (form.exponent_bits - 1) - 1
    assert form.smallest_normal == 2.0 ** (1 - bias)
    if name == "float8_e4m3fn":  # gives infinity up for one more binade: arXiv 2209.05433
        assert form.largest == 1.75 * 2.0 ** (bias + 1)
    else:
        assert form.largest == (2 - form.epsilon) * 2.0**bias


def test_a_format_says_where_its_numbers_end():
    form, number = mixed_precision.describe(jnp.float16), np.float16
    with np.errstate(over="ignore"):
        assert np.isfinite(number(form.largest)) and np.isinf(number(form.largest * 2))
    assert number(form.smallest_subnormal) > 0 and number(form.smallest_subnormal / 2) == 0
    assert number(1 + form.epsilon) > 1 and number(1 + form.epsilon / 2) == 1


def test_under_a_policy_gradients_and_metrics_are_float32_and_the_model_is_not():
    seen = []

    def loss_fn(params, batch, rng):
        predicted = batch.inputs @ params["w"]
        seen.extend([predicted.dtype, batch.labels.dtype, batch.weights.dtype])
        loss = (predicted.astype(jnp.float32) * batch.weights).sum()
        return loss, {"loss": (loss, batch.weights.sum())}

    params, batch = {"w": jnp.ones(3)}, Batch(jnp.ones((2, 3)), jnp.arange(2), jnp.ones(2))
    wrapped = mixed_precision.policy("bfloat16").wrap(loss_fn)
    (loss, metrics), grads = jax.value_and_grad(wrapped, has_aux=True)(params, batch, None)
    assert seen == [jnp.bfloat16, jnp.int32, jnp.float32]
    assert loss.dtype == metrics["loss"][0].dtype == grads["w"].dtype == jnp.float32


def test_finite_means_every_number_of_every_floating_leaf():
    tree = {"w": jnp.ones(3), "ids": jnp.arange(3)}
    assert mixed_precision.all_finite(tree)
    for bad, dtype in itertools.product((jnp.inf, -jnp.inf, jnp.nan), mixed_precision.POLICIES):
        for size in (2, 2**20):  # on CPUs, a maximum of many numbers loses a NaN
            numbers = jnp.zeros(size, dtype).at[1].set(bad)
            assert not jax.jit(mixed_precision.all_finite)(tree | {"b": numbers})


def float16_gradient(scale):
    """The gradient 1e-8 of a loss, by way of float16, where the smallest number is 6e-8."""

    def loss_fn(w):
        return scale.scale(
            (w.astype(jnp.float16) * jnp.float16(1e-4)).astype(jnp.float32) * 1e-4
        )

    return scale.unscale(jax.grad(loss_fn)(jnp.float32(1.0)))


def test_a_gradient_that_float16_cannot_hold_survives_when_the_loss_is_scaled():
    assert float16_gradient(mixed_precision.NoLossScale()) == 0
    # 1e-4 in float16 is off by up to eps / 2 = 5e-4, twice
    np.testing.assert_allclose(
        float16_gradient(mixed_precision.StaticLossScale(2.0**15)), 1e-8, rtol=1e-3
    )


def test_a_gradient_is_float32_before_it_is_divided():
    """In float16, 2**-10 / 2**16 would be 0, and a scale of 2**16 infinite."""
    grads = mixed_precision.StaticLossScale(2.0**16).unscale({"w": jnp.float16(2.0**-10)})
    assert grads["w"] == 2.0**-26


def test_a_dynamic_scale_grows_after_an_interval_of_good_steps_and_backs_off_at_once():
    scale = mixed_precision.DynamicLossScale(value=8.0, growth_interval=3, factor=2.0)
    update = jax.jit(lambda scale, finite: scale.update(finite))
    seen = []
    for finite in [True, True, True, True, False, True, True, True]:
        scale = update(scale, jnp.bool_(finite))
        seen.append(float(scale.value))
    # the overflow also starts the count of good steps anew
    assert seen == [8, 8, 16, 16, 8, 8, 8, 16]


def test_a_dynamic_scale_stays_within_its_bounds():
    scale = Dynamic(value=2.0, growth_interval=1, smallest=1.0, largest=4.0)
    for finite, bound in ((True, 4), (False, 1)):
        for _ in range(3):
            scale = scale.update(jnp.bool_(finite))
        assert scale.value == bound


Static, Dynamic = mixed_precision.StaticLossScale, mixed_precision.DynamicLossScale


BAD = [
    (lambda: mixed_precision.loss_scale("auto"), "loss_scale='auto'"),
    (lambda: mixed_precision.policy("half"), "policy='half' must be one of"),
    (lambda: rematerialization.policy("dot"), "remat_policy='dot' must be one of"),
    (lambda: mixed_precision.describe("int32"), "must be a floating dtype"),
    (lambda: Static(0.0), "value="),
    (lambda: Dynamic(factor=0.5), "factor=0.5"),
    (lambda: Dynamic(growth_interval=0), "growth_interval=0"),
    # An overflow would raise these: the next update brings them into the bounds.
    (lambda: Dynamic(value=0.25), "value=0.25 must be from smallest=1.0"),
    (lambda: Dynamic(value=2.0**25), "value="),
    (lambda: Dynamic(value=4.0, smallest=0.0), "smallest=0.0"),
    (lambda: Dynamic(value=4.0, largest=math.inf), "largest=inf"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [8, np.float16(8)])
def test_a_dynamic_scale_has_the_same_dtype_before_and_after_an_update(value):
    scale = Dynamic(value=value)
    assert jnp.asarray(scale.value).dtype == jnp.float32
    assert scale.update(jnp.bool_(True)).value.dtype == jnp.float32
