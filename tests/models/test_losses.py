"""A loss is a weighted mean over labels, also with what experts add to it. See
tests/test_training.py for the other losses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib import training
from course_lib.measure import virtual
from course_lib.models import losses
from course_lib.text.data import Batch

WHY_NOT = virtual.why_unavailable()

LOGITS, LABELS = (
    jax.random.normal(jax.random.key(0), (4, 3, 5)),
    jnp.arange(12).reshape(4, 3) % 5,
)
WEIGHTS = jnp.array([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
BALANCE = jnp.array([1.0, 2.0, 3.0, 4.0])


def loss_fn(params, batch, rng):
    """Takes logits and balance of the sequences that a batch names."""
    return losses.balanced_loss(
        lambda params, rows, rng: (LOGITS[rows[:, 0]], BALANCE[rows[:, 0]]), 0.5
    )(params, batch, rng)


def part(*rows):
    rows = jnp.array(rows)
    return Batch(jnp.broadcast_to(rows[:, None], (len(rows), 3)), LABELS[rows], WEIGHTS[rows])


def test_each_label_has_its_cross_entropy_and_the_balance_of_its_sequence():
    loss, metrics = loss_fn(None, part(0, 1, 2, 3), None)
    each = losses.cross_entropy(LOGITS, LABELS)[0] + 0.5 * BALANCE[:, None]
    np.testing.assert_allclose(loss, (each * WEIGHTS).sum() / WEIGHTS.sum(), rtol=1e-6)
    assert training.mean_metrics(metrics)["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert training.mean_metrics(metrics)["balance"] == pytest.approx(
        (2 * 1 + 2 * 2 + 3 * 4) / 7, rel=1e-6
    )


def test_the_balance_adds_over_parts_of_a_batch():
    whole, halves = (
        loss_fn(None, part(0, 1, 2, 3), None)[1],
        [loss_fn(None, part(*rows), None)[1] for rows in ((0, 3), (1, 2))],
    )
    added = training.mean_metrics(training.add_metrics(*halves))
    assert added == pytest.approx(training.mean_metrics(whole), rel=1e-6)


def test_without_any_weight_the_loss_and_its_gradient_are_zero():
    def apply_fn(params, rows, rng):
        return LOGITS[rows[:, 0]] * params, BALANCE[rows[:, 0]] * params

    loss_fn = losses.balanced_loss(apply_fn, 0.5)
    (loss, _), grad = jax.value_and_grad(loss_fn, has_aux=True)(jnp.float32(1), part(2), None)
    assert loss == grad == 0
