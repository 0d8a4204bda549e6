"""Arguments that would give silently wrong numbers are refused with the value and the fix."""

import jax
import jax.numpy as jnp
import jaxtyping
import optax
import pytest

from course_lib.smaller_and_faster import (
    flash_attention,
    flash_kernels,
    large_vocabulary,
    optimizer_memory,
    smallest_step,
)


@pytest.fixture(scope="module", autouse=True)
def types_are_not_checked():
    """As in a learner's session: jaxtyping would refuse many of them first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


X, W, LABELS = jnp.ones((2, 4, 8)), jnp.ones((8, 6)), jnp.zeros((2, 4), int)
PARAMS = {"block": jnp.ones((3, 4, 4)), "head": jnp.ones(4)}
Q, NUMBERS = jnp.ones((1, 72, 2, 16)), jnp.ones((1, 2, 72))
TILES = dict(causal=True, tile=16, interpret=True)


def loss(x=X, W=W, labels=LABELS, bias=None):
    return large_vocabulary.linear_cross_entropy(x, W, labels, bias, chunks=2)


def add(**total):
    adds = smallest_step.gradient_in_place(
        lambda rest, batch: batch,
        lambda weights, x, key: x @ weights,
        lambda rest, x, batch: (x.mean(), {"loss": (x.sum(), 4.0)}),
    )
    return adds(PARAMS | total, PARAMS, jnp.ones((2, 4)), None)


def stochastic():
    """An update whose parameters are not given."""
    params, optimizer = {"w": jnp.ones(4, jnp.bfloat16)}, optax.sgd(0.1)
    optimizer = optimizer_memory.round_stochastically(optimizer)
    return optimizer.update(params, optimizer.init(params))


def kernel():
    even = jax.device_put(Q[:, :64], jax.devices("cpu")[0])
    return flash_attention.attend(even, even, even, by="kernel")


FACTORS, ONES = large_vocabulary.Factors(X, W), jnp.ones((2, 16), jnp.bfloat16)
BAD = [
    (lambda: loss(labels=LABELS.T), r"labels of shape \(4, 2\) must be of shape \(2, 4\)"),
    (lambda: loss(W=W.T), r"head of shape \(6, 8\) must be \[D, V\]"),
    (lambda: loss(bias=jnp.ones(5)), r"bias of shape \(5,\) must be of shape \(6,\)"),
    (
        lambda: large_vocabulary.statistics(FACTORS, LABELS.T, chunks=2),
        r"labels of .* \(4, 2\)",
    ),
    (lambda: add(head=jnp.ones(1)), r"of the parameter's shape \(4,\)"),
    (lambda: flash_kernels.forward(Q, Q, Q, **TILES), "tile=16 must divide the 72"),
    (
        lambda: flash_kernels.backward(Q, Q, Q, Q, NUMBERS, Q, **TILES),
        "tile=16 must divide the",
    ),
    (kernel, "by='kernel' cannot be had"),
    (lambda: optimizer_memory.quantize(ONES), "x of dtype bfloat16 must be float32"),
    (lambda: optimizer_memory.stochastic_round(jax.random.key(0), ONES), "must be float32"),
    (stochastic, "params=None"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_wrong_arguments_are_refused_with_the_value_and_the_fix(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_right_ones_are_not():
    assert loss(bias=jnp.ones(6))[0].shape == (2, 4)
    add(block=PARAMS["block"].astype(jnp.bfloat16))
