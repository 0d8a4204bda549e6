"""Guards find a NaN, and a NaN stays one where the largest of many numbers is taken.

On CPUs, JAX from 0.10 to 0.12 may lose it there: docs/versions.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib.models import attention, losses, routing
from course_lib.one_device import gradient_noise
from course_lib.smaller_and_faster import large_vocabulary, optimizer_memory

ROW, COLUMN = 3, 5
LABELS = jnp.zeros(128, jnp.int32)


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def matrix(bad=jnp.nan, dtype=jnp.float32, size=128):
    return jnp.ones((size, size), dtype).at[ROW, COLUMN].set(bad)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_block_with_a_number_that_is_not_finite_is_nan_in_8_bits_and_no_other_block(
    signed, bad
):
    def there_and_back(x):
        packed = optimizer_memory.quantize(x, signed=signed, block_size=32)
        return optimizer_memory.dequantize(packed, signed=signed)

    for function in (there_and_back, jax.jit(there_and_back)):
        lost = np.isnan(function(matrix(bad)))
        assert lost[ROW, :32].all() and lost.sum() == 32


def in_chunks(x, along):
    head = jnp.eye(128)
    return large_vocabulary.linear_cross_entropy(x, head, LABELS, chunks=4, along=along)[0]


def attend(x, implementation):
    x = x.reshape(1, 128, 2, 64)
    return attention.attend(x, x, x, causal=True, implementation=implementation)


KEEP = {
    "cross entropy": lambda x: losses.cross_entropy(x, LABELS)[0],
    "cross entropy in chunks of the vocabulary": lambda x: in_chunks(x, "vocabulary"),
    "cross entropy in chunks of tokens": lambda x: in_chunks(x, "tokens"),
    "attention": lambda x: attend(x, "reference"),
    "attention in blocks": lambda x: attend(x, "blocks"),
    "flash attention": lambda x: attend(x, "flash"),
    "routing": lambda x: routing.route(x[None], 2, 8).combine[0, ROW],
    "balance": lambda x: routing.route(x[None], 2, 8).balance,
    "gradient noise": lambda x: gradient_noise._square_norm({"w": x}),
    "stochastic rounding": lambda x: optimizer_memory.stochastic_round(jax.random.key(0), x),
}


@pytest.mark.parametrize("name", KEEP)
def test_a_nan_stays_a_nan(name):
    function = jax.jit(KEEP[name])
    assert np.isnan(np.asarray(function(matrix()), np.float32)).any()
    assert np.isfinite(np.asarray(function(matrix(1.0)), np.float32)).all()
