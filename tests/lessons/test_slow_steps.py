"""Laws of the slow steps of notebook 06: right numbers, and each with its fault."""

import jax
import numpy as np
import pytest

from course_lib.lessons import slow_steps


@pytest.mark.parametrize("name", slow_steps.FAULTS)
def test_a_slow_step_returns_what_the_plain_one_does(name):
    params, x = slow_steps.inputs()
    slow, plain = getattr(slow_steps, name)(params, x), slow_steps.plain(params, x)
    for part in params:
        np.testing.assert_allclose(slow[part], plain[part], atol=1e-6)
        assert np.abs(plain[part] - params[part]).max() > 1e-6


def test_each_fault_is_in_its_program_and_not_in_the_plain_one():
    def words(step):
        return jax.jit(step).lower(*slow_steps.inputs()).as_text()

    assert "stablehlo.sort" in words(slow_steps.third)
    assert "stablehlo.sort" not in words(slow_steps.plain)
    products = [
        words(step).count("stablehlo.dot_general")
        for step in (slow_steps.second, slow_steps.plain)
    ]
    assert products[0] < products[1]
    assert not hasattr(slow_steps.first, "lower"), "the first step is no single program"
