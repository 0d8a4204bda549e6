"""Laws of products that several layers share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.models import products
from course_lib.models.hooks import Hooks

X = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
MATRICES = (((2,), (0,)), ((), ()))
DRAW = np.random.default_rng(0)


def counted(shards):
    """Returns hooks that count the products they are asked for."""
    calls = []

    def product(*args, **options):
        calls.append(args)
        return jax.lax.dot_general(*args, **options)

    return Hooks(shards=shards, column=product, row=product), calls


def random_weights(shapes):
    """Returns a kernel and a bias by name."""
    return {
        name: {
            "kernel": jnp.asarray(DRAW.normal(size=inputs + outputs), jnp.float32),
            "bias": jnp.asarray(DRAW.normal(size=outputs), jnp.float32),
        }
        for name, (inputs, outputs) in shapes.items()
    }


@pytest.mark.parametrize(("shards", "count"), [(1, 2), (2, 1)])
def test_products_of_one_input_are_one_product_where_devices_share_the_work(shards, count):
    weights = random_weights({"first": ((4,), (6,)), "second": ((4,), (2, 5))})
    given, calls = counted(shards)
    first, second = products.columns(given, jnp.asarray(X), list(weights.values()))
    assert len(calls) == count
    w = jax.device_get(weights)
    expected = X @ w["first"]["kernel"] + w["first"]["bias"]
    np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
    expected = np.einsum("bld,dhk->blhk", X, w["second"]["kernel"]) + w["second"]["bias"]
    np.testing.assert_allclose(second, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shards", "count"), [(1, 2), (2, 1)])
def test_a_sum_of_products_is_one_product_where_devices_share_the_work_and_has_each_bias_once(
    shards, count
):
    weights = random_weights({"first": ((4,), (6,)), "second": ((2, 2), (6,))})
    given, calls = counted(shards)
    found = products.rows(
        given, [jnp.asarray(X), jnp.asarray(X.reshape(2, 3, 2, 2))], list(weights.values())
    )
    assert len(calls) == count
    w = jax.device_get(weights)
    kernel = w["first"]["kernel"] + w["second"]["kernel"].reshape(4, 6)
    np.testing.assert_allclose(
        found, X @ kernel + w["first"]["bias"] + w["second"]["bias"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 3), (4, 2, 3), (2, 3, 4)], ids=str)
def test_flat_products_are_the_same_products_with_the_same_gradients(shape):
    summed = 2 if shape == (2, 3, 4) else 1
    x = jax.random.normal(jax.random.key(2), (2, 3, *shape[:summed]))
    kernel = jax.random.normal(jax.random.key(3), shape)
    dimensions = (tuple(range(2, 2 + summed)), tuple(range(summed))), ((), ())

    def both(product):
        return jax.value_and_grad(
            lambda x, kernel: jnp.sin(product(x, kernel, dimensions)).sum(), (0, 1)
        )(x, kernel)

    with jax.default_matmul_precision("highest"):
        assert (
            products.flat(x, kernel, dimensions).shape
            == jax.lax.dot_general(x, kernel, dimensions).shape
        )
        flat, reference = both(products.flat), both(jax.lax.dot_general)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6),
        flat,
        reference,
    )


def test_flat_products_do_not_replace_those_of_a_strategy():
    own, _ = counted(1)
    assert products.with_products(own, True) is own
    for flat_products, product in ((True, products.flat), (False, jax.lax.dot_general)):
        filled = products.with_products(Hooks(), flat_products)
        assert (filled.column, filled.row) == (product, product)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA:CPU multiplies")
def test_the_gradient_of_a_flat_product_transposes_no_gradients_in_memory():
    x, kernel, g = (
        jnp.ones((2, 12, 8)),
        jnp.ones((8, 32)),
        jnp.ones((2, 12, 32)),
    )
    gradient = jax.jit(
        lambda x, g, product: jax.vjp(lambda k: product(x, k, MATRICES), kernel)[1](g)[0],
        static_argnums=2,
    )
    text = {
        product: gradient.lower(x, g, product).compile().as_text()
        for product in (products.flat, jax.lax.dot_general)
    }
    transposed = "f32[32,24]"  # outputs, B * L
    assert transposed in text[jax.lax.dot_general] and transposed not in text[products.flat]
