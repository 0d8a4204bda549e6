"""Laws of products in two dimensions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.models import products
from course_lib.models.hooks import Hooks

MATRICES = (((2,), (0,)), ((), ()))
DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 3), (2, 3, 4)], ids=str)
def test_flat_products_are_the_same_products_with_the_same_gradients(shape):
    summed = 2 if shape == (2, 3, 4) else 1
    x, kernel = (
        jnp.asarray(DRAW.normal(size=size), jnp.float32)
        for size in ((2, 3, *shape[:summed]), shape)
    )
    dimensions = (tuple(range(2, 2 + summed)), tuple(range(summed))), ((), ())

    def of(product):
        def loss(x, kernel):
            y = product(x, kernel, dimensions)
            return jnp.sin(y).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)

    with jax.default_matmul_precision("highest"):
        both = jax.jit(
            lambda *args: [of(p)(*args) for p in (products.flat, jax.lax.dot_general)]
        )
        flat, reference = both(x, kernel)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), flat, reference
    )


def test_flat_products_do_not_replace_those_of_a_strategy():
    own = Hooks(column=jax.lax.dot_general, row=jax.lax.dot_general)
    assert products.with_products(own, True) is own
    for flat_products, product in ((True, products.flat), (False, jax.lax.dot_general)):
        filled = products.with_products(Hooks(), flat_products)
        assert (filled.column, filled.row) == (product, product)


def test_two_strategies_may_not_change_the_same_part_of_the_model():
    one, other = Hooks(positions=lambda n: jnp.zeros(n)), Hooks(own_key=lambda key: key)
    both = one | other | one
    assert (both.positions, both.own_key) == (one.positions, other.own_key)
    with pytest.raises(ValueError, match=r"hooks\.positions must be changed once"):
        one | Hooks(positions=lambda n: jnp.ones(n))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how XLA:CPU multiplies")
def test_the_gradient_of_a_flat_product_transposes_no_gradients_in_memory():
    x, kernel, g = (jnp.ones((2, 12, 8)), jnp.ones((8, 32)), jnp.ones((2, 12, 32)))
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
