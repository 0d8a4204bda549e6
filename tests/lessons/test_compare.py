"""Gradients of strategies are compared with one device's, leaf by leaf."""

import jax
import numpy as np
import pytest

from course_lib.lessons import compare


@pytest.fixture(scope="module")
def alone():
    return compare.OneDevice(compare.small(batch_size=4, seq_len=8, num_layers=1))


def test_a_strategy_that_is_right_is_within_rounding_and_its_collectives_are_returned(alone):
    ledger, distance = alone.compare({"data": 2, "tensor": 2})
    assert distance < 1e-5
    assert ledger.payload("all-reduce", "tensor") > 0


def test_a_gradient_of_twice_the_size_is_one_norm_away(alone):
    doubled = jax.tree.map(lambda leaf: 2 * leaf, alone.grads)
    assert compare.furthest(doubled, alone.grads) == pytest.approx(1, abs=1e-5)


def test_labels_have_unequal_weights_on_the_devices(alone):
    halves = alone.batch.weights.reshape(2, -1).sum(axis=1)
    assert halves[0] != halves[1]


def test_one_wrong_leaf_is_found_among_many():
    expected = {"a": np.ones(4), "b": np.ones(100)}
    assert compare.furthest({"a": 1.5 * np.ones(4), "b": np.ones(100)}, expected) == 0.5


def test_a_leaf_that_is_zero_in_theory_is_compared_with_a_hundredth_of_the_whole_norm():
    expected = {"zero": np.zeros(1), "rest": np.ones(100)}  # norm 10
    rounding = {"zero": np.full(1, 1e-8), "rest": np.ones(100)}
    assert compare.furthest(rounding, expected) == pytest.approx(1e-7)
