"""Laws of runs whose optimizer keeps 8-bit moments or rounds at random: killed or not, they are
the same bit for bit.
"""

import contextlib

import jax
import numpy as np
import pytest
from slow_cases import slow
from small_run import configuration, corpus

from course_lib.program import loop
from course_lib.program.checkpoints import Checkpoints

LIGHT = {
    "8-bit Adam, bfloat16 parameters": ("adamw_8bit", "bfloat16"),
    "bfloat16 moments": ("adamw_bf16", "float32"),
    "Muon": ("muon", "float32"),
}


@pytest.fixture(autouse=True)
def promotion_as_flax_and_optax_need_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def train(text, folder, name, steps):
    optimizer, dtype = LIGHT[name]
    whole = configuration(
        text,
        optimizer__name=optimizer,
        optimizer__param_dtype=dtype,
        optimizer__weight_decay=0.1,
        training__steps=steps,
    )
    device = jax.devices("cpu")[:1]
    assert loop.train(whole, folder, device) == loop.Ended(loop.DONE, steps)
    run, _ = loop.build(whole, device)
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as saved:
        return saved.restore(run.abstract()[0]).state


def numbers(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize(
    "name",
    [
        slow("8-bit Adam, bfloat16 parameters"),  # codes, scales, and the key of the rounding
        slow("bfloat16 moments"),
        slow("Muon"),
    ],
)
def test_a_run_that_stops_and_goes_on_is_bit_for_bit_one_that_did_not(name, tmp_path):
    text = corpus(tmp_path / "text")
    train(text, tmp_path / "resumed", name, 10)
    resumed = train(text, tmp_path / "resumed", name, 20)
    unbroken = train(text, tmp_path / "unbroken", name, 20)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(numbers(a), numbers(b)), resumed, unbroken
    )
