"""Laws of optimizers that keep less."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from course_lib.smaller_and_faster import optimizer_memory
from course_lib.smaller_and_faster.optimizer_memory import Quantized

ULP = 2.0**-7  # between neighbouring bfloat16 numbers in [1, 2)


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# stochastic rounding


def test_the_mean_of_stochastic_rounding_is_the_number_itself():
    x = jnp.full(200_000, 1 + ULP / 4)
    rounded = optimizer_memory.stochastic_round(jax.random.key(0), x).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1.0, 1 + ULP}
    # of 200,000 throws with probability 1/4, five standard deviations are 0.5% of them
    np.testing.assert_allclose(np.mean(rounded == 1 + ULP), 0.25, atol=0.005)


def test_a_bfloat16_number_stays_as_it_is():
    exact = jnp.array([1.0, -1.0, 0.0, -0.5, 3.0, jnp.inf, -jnp.inf, 2.0**-130, jnp.nan])
    rounded = optimizer_memory.stochastic_round(jax.random.key(0), jnp.tile(exact, 1000))
    np.testing.assert_array_equal(rounded.astype(jnp.float32), np.tile(exact, 1000))


def test_each_number_becomes_one_of_its_two_neighbours_on_both_sides_of_zero():
    x = jnp.concatenate([normal(0, 1000), 1e-30 * normal(1, 1000), 1e30 * normal(2, 1000)])
    rounded = optimizer_memory.stochastic_round(jax.random.key(0), x)
    x, rounded = np.float64(x), np.float64(rounded)
    assert np.all(abs(rounded - x) <= abs(x) * 2.0**-7)
    assert np.any(abs(rounded) > abs(x)) and np.any(abs(rounded) < abs(x))


def steps_of(optimizer, param, grad, steps):
    state = optimizer.init(param)

    @jax.jit
    def step(param, state):
        updates, state = optimizer.update(jnp.full_like(param, grad), state, param)
        return optax.apply_updates(param, updates), state

    for _ in range(steps):
        param, state = step(param, state)
    return param


def test_small_updates_add_up_on_average_and_are_lost_without():
    ones, rate = jnp.ones(4096, jnp.bfloat16), 1e-4
    sgd = optax.sgd(rate)
    rounded = optimizer_memory.round_stochastically(sgd)
    assert (steps_of(sgd, ones, -1.0, 50) == 1).all()
    mean = steps_of(rounded, ones, -1.0, 50).astype(jnp.float32).mean()
    # one number's variance is below 50 * rate * ULP; 4096 of them, five standard deviations
    np.testing.assert_allclose(mean, 1 + 50 * rate, atol=5 * (50 * rate * ULP / 4096) ** 0.5)


def test_each_step_and_each_leaf_is_rounded_with_other_random_numbers():
    params = {"a": jnp.ones(512, jnp.bfloat16), "b": jnp.ones(512, jnp.bfloat16)}
    optimizer = optimizer_memory.round_stochastically(optax.sgd(-ULP / 2))
    grads, state = jax.tree.map(jnp.ones_like, params), optimizer.init(params)
    first, state = optimizer.update(grads, state, params)
    second, _ = optimizer.update(grads, state, params)
    assert not np.array_equal(first["a"], first["b"])
    assert not np.array_equal(first["a"], second["a"])


def test_float32_parameters_are_not_rounded_by_mistake():
    optimizer = optimizer_memory.round_stochastically(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"params\['w'\] is float32 and must be bfloat16"):
        optimizer.init({"w": jnp.ones(3)})


# 8 bits


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_256_numbers_in_seven_decades(signed):
    numbers = optimizer_memory.dynamic_map(signed)
    assert len(np.unique(numbers)) == 256 and np.all(np.diff(numbers) > 0)
    assert numbers[-1] == 1 and 0 in numbers and (numbers[0] < -0.99) == signed
    positive = numbers[numbers > 0]
    per_decade = [
        np.sum((positive > 10.0**d) & (positive < 10.0 ** (d + 1))) for d in range(-7, 0)
    ]
    assert per_decade == [2 ** (i + (not signed)) for i in range(7)]

    numbers = jnp.asarray(numbers)  # and each comes back exactly
    packed = optimizer_memory.quantize(numbers, signed=signed)
    np.testing.assert_array_equal(packed.codes, np.arange(256))
    np.testing.assert_array_equal(optimizer_memory.dequantize(packed, signed=signed), numbers)


def test_every_number_is_rounded_to_the_nearest_of_the_map():
    x = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, 1024), jnp.float32).at[0].set(1)
    numbers = optimizer_memory.dynamic_map(True)
    nearest = np.abs(np.asarray(x)[:, None] - numbers).min(axis=1)
    back = optimizer_memory.dequantize(optimizer_memory.quantize(x, block_size=1024))
    np.testing.assert_allclose(np.abs(back - x), nearest, atol=1e-7)


def test_a_block_does_not_feel_the_outliers_of_another():
    x = normal(0, 4, 512)
    quiet, disturbed = (
        optimizer_memory.dequantize(optimizer_memory.quantize(a, block_size=256))
        for a in (x, x.at[:, 0].set(1e6))
    )
    np.testing.assert_array_equal(quiet[:, 256:], disturbed[:, 256:])
    assert abs(disturbed - x)[:, 1:256].max() > abs(quiet - x).max()


def test_zeros_stay_zeros_and_a_positive_second_moment_never_becomes_zero():
    zeros = jnp.zeros((2, 64))
    np.testing.assert_array_equal(
        optimizer_memory.dequantize(optimizer_memory.quantize(zeros)), zeros
    )
    squares = jnp.full((1, 64), 1e-12).at[0, 0].set(1.0).at[0, 1].set(0.0)
    packed = optimizer_memory.quantize(squares, signed=False)
    back = optimizer_memory.dequantize(packed, signed=False)
    assert (back[0, 2:] > 0).all() and back[0, 1] == 0


@pytest.mark.parametrize(
    ("width", "block_size", "length"), [(1024, 256, 256), (384, 256, 192), (96, 256, 96)]
)
def test_a_block_is_the_largest_divisor_of_the_width(width, block_size, length):
    assert optimizer_memory.block_length(width, block_size) == length
    packed = optimizer_memory.quantize(jnp.ones((3, width)), block_size=block_size)
    assert packed.scales.shape == (3, width // length)


def test_blocks_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="block_size=8 must be at least 16"):
        optimizer_memory.block_length(1024, 8)
    with pytest.raises(ValueError, match="divisor of the last dimension 50257.*pad that"):
        optimizer_memory.scale_by_adam_8bit(block_size=28).init({"w": jnp.ones((2, 50257))})


def test_the_rounded_update_is_an_exact_difference_of_bfloat16_numbers():
    params = {"w": normal(0, 64, 64).astype(jnp.bfloat16)}
    optimizer = optimizer_memory.round_stochastically(optax.sgd(0.3))
    updates, _ = optimizer.update({"w": normal(1, 64, 64)}, optimizer.init(params), params)
    exact = params["w"].astype(jnp.float32) + updates["w"]
    np.testing.assert_array_equal(exact, exact.astype(jnp.bfloat16).astype(jnp.float32))


# Adam


def test_a_routers_narrow_rows_keep_float32_moments():
    state = optimizer_memory.scale_by_adam_8bit().init({"router": np.ones((512, 8), "f")})
    assert {m.dtype for m in jax.tree.leaves(state) if m.size > 1} == {jnp.dtype("float32")}


def params():
    return {"kernel": normal(0, 64, 128), "bias": normal(1, 64)}


def grads(step):
    return {"kernel": normal(10 + step, 64, 128), "bias": normal(50 + step, 64)}


STORED = {
    "float32": optax.scale_by_adam(),
    "bfloat16": optimizer_memory.scale_by_adam_bf16(),
    "8 bits": optimizer_memory.scale_by_adam_8bit(),
}


@functools.cache
def updates_of(name, steps):
    update, state = jax.jit(STORED[name].update), STORED[name].init(params())
    for step in range(steps):
        updates, state = update(grads(step), state)
    return updates, state


@pytest.mark.parametrize("name", ["bfloat16", "8 bits"])
def test_the_first_update_is_adams_and_later_ones_differ_by_the_rounding_of_moments(name):
    exact, approximate = (updates_of(each, 1)[0] for each in ("float32", name))
    for leaf in exact:
        np.testing.assert_allclose(approximate[leaf], exact[leaf], rtol=1e-4)
    (exact, _), (approximate, state) = (updates_of(each, 20) for each in ("float32", name))
    error, size = (
        {leaf: np.linalg.norm(tree[leaf] - zero * exact[leaf]) for leaf in exact}
        for tree, zero in ((approximate, 1), (exact, 0))
    )
    # 8 bits: numbers of the map are 1.4% of a block's largest apart; measured 1.3%
    assert 1e-4 < error["kernel"] / size["kernel"] < 0.03
    if name == "8 bits":  # small arrays keep float32 moments
        assert error["bias"] / size["bias"] < 1e-5
        assert isinstance(state.mu["kernel"], Quantized)
        assert state.mu["bias"].dtype == state.nu["bias"].dtype == jnp.float32


def test_moments_take_2_bytes_and_a_scale_per_block_and_4_bytes_in_bfloat16():
    shapes = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    for name, expected in {"float32": 8, "bfloat16": 4, "8 bits": 2 + 2 * 4 / 256}.items():
        found = optimizer_memory.bytes_per_parameter(STORED[name], shapes)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_bfloat16_second_moment_falls_only_if_it_is_rounded_stochastically():
    one, zero = {"w": jnp.ones(4096)}, {"w": jnp.zeros(4096)}
    optimizer = optimizer_memory.scale_by_adam_bf16(b2=0.999)
    state = optimizer.init(one)
    state = state._replace(nu={"w": jnp.ones(4096, jnp.bfloat16)})
    nearest, update = jnp.bfloat16(1.0), jax.jit(optimizer.update)
    for _ in range(100):
        _, state = update(zero, state)
        nearest = jnp.bfloat16(0.999 * nearest.astype(jnp.float32))
    assert nearest == 1  # rounded to the nearest number, it never falls
    mean = state.nu["w"].astype(jnp.float32).mean()
    np.testing.assert_allclose(mean, 0.999**100, rtol=0.01)
