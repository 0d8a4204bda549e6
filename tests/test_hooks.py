"""What must be true of products that several layers share."""

import jax
import numpy as np
import pytest

from course_lib import hooks
from course_lib.hooks import Hooks

X = jax.random.normal(jax.random.key(0), (2, 3, 4))
SHAPES = {"first": ((4,), (6,)), "second": ((4,), (2, 5))}


def counted(shards):
    """Returns hooks that count the products they are asked for."""
    calls = []

    def product(*args, **options):
        calls.append(args)
        return jax.lax.dot_general(*args, **options)

    return Hooks(shards=shards, column=product, row=product), calls


@pytest.mark.parametrize(("shards", "products"), [(1, 2), (2, 1)])
def test_products_of_one_input_are_one_product_where_devices_share_the_work(shards, products):
    weights = hooks.initialize_all(jax.random.key(1), SHAPES, use_bias=True)
    weights = jax.tree.map(lambda leaf: leaf + 1, weights)
    given, calls = counted(shards)
    first, second = hooks.columns(given, X, list(weights.values()))
    assert len(calls) == products
    w = jax.device_get(weights)
    np.testing.assert_allclose(first, X @ w["first"]["kernel"] + w["first"]["bias"][None, None], rtol=1e-5)
    expected = np.einsum("bld,dhk->blhk", X, w["second"]["kernel"]) + w["second"]["bias"]
    np.testing.assert_allclose(second, expected, rtol=1e-5)


@pytest.mark.parametrize(("shards", "products"), [(1, 2), (2, 1)])
def test_a_sum_of_products_is_one_product_where_devices_share_the_work_and_has_each_bias_once(shards, products):
    shapes = {"first": ((4,), (6,)), "second": ((2, 2), (6,))}
    weights = jax.tree.map(lambda leaf: leaf + 1, hooks.initialize_all(jax.random.key(1), shapes, use_bias=True))
    given, calls = counted(shards)
    found = hooks.rows(given, [X, X.reshape(2, 3, 2, 2)], list(weights.values()))
    assert len(calls) == products
    w = jax.device_get(weights)
    kernel = w["first"]["kernel"] + w["second"]["kernel"].reshape(4, 6)
    np.testing.assert_allclose(found, X @ kernel + 2, rtol=1e-5)


def test_weights_start_as_those_of_a_dense_layer():
    weights = hooks.initialize(jax.random.key(0), ((64, 4), (8, 16)), use_bias=True)
    assert weights["kernel"].shape == (64, 4, 8, 16) and weights["bias"].shape == (8, 16)
    assert np.std(weights["kernel"]) == pytest.approx(256**-0.5, rel=0.02)  # of 32,768 draws: 0.4% is one deviation
    assert not weights["bias"].any() and "bias" not in hooks.initialize(jax.random.key(0), ((4,), (2,)), use_bias=False)
