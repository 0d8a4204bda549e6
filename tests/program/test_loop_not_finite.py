"""Laws of runs whose numbers are not finite."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import slow
from small_run import assert_same_losses, final_state, steps_end_with, train

from course_lib import training
from course_lib.program import journal, loop

pytestmark = pytest.mark.usefixtures("quick")


def spoil(monkeypatch, part, number):
    """Has one part of the state become NaN in one step."""

    def change(new, metrics):
        factor = jnp.nan if int(new.step) == number else 1
        spoilt = jax.tree.map(
            lambda leaf: leaf * factor if leaf.dtype == jnp.float32 else leaf,
            getattr(new, part),
        )
        return dataclasses.replace(new, **{part: spoilt}), metrics

    steps_end_with(monkeypatch, change)


@pytest.mark.parametrize(
    ("part", "number"), [("params", 20), ("params", 14), ("opt_state", 20)]
)
def test_what_is_not_finite_stops_the_run_and_is_in_no_checkpoint(
    text, at, monkeypatch, capsys, part, number
):
    folder = at(10)
    spoil(monkeypatch, part, number)
    ended = train(text, folder)
    assert ended.reason == loop.NOT_FINITE and number <= ended.step <= number + 1 + loop.BEHIND
    what = "state after step 20" if number == 20 else "loss of step 15"
    assert f"the {what} is not finite" in capsys.readouterr().err
    assert final_state(text, folder).step == 10


def test_a_run_that_was_not_finite_before_its_first_checkpoint_begins_anew(
    text, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        spoil(patched, "params", 8)
        assert train(text, tmp_path).reason == loop.NOT_FINITE
    assert journal.read(tmp_path) and not (tmp_path / "report.md").exists()
    assert train(text, tmp_path, training__steps=9).reason == loop.DONE


@pytest.mark.parametrize("bad", [jnp.nan, slow(-jnp.inf)])
@pytest.mark.parametrize("where", ["params", "opt_state", "loss"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(bad, where):
    def loss_fn(params, batch, rng):
        is_bad = batch.any()
        total = jnp.where(is_bad & (where == "loss"), bad, jnp.float32(3))
        # the optimizer sees which batch it is
        return params.sum() * (1 + is_bad), {"loss": (total, jnp.float32(1))}

    def update(grads, state, params):
        is_bad = grads[0] > 1
        moved = [
            jnp.where(is_bad & (where == name), bad, 1.0) for name in ("params", "opt_state")
        ]
        return moved[0] + 0 * params, state + moved[1]

    optimizer = optax.GradientTransformation(lambda params: params + 1, update)
    state = training.init_state(jnp.zeros(3), optimizer, jax.random.key(0))
    careful = training.make_train_step(loss_fn, optimizer, donate=False, skip_not_finite=True)
    for number, is_bad in enumerate([False, True, False]):
        state, metrics = careful(state, jnp.array([is_bad]))
        assert metrics["skipped"] == (is_bad, 1) and metrics["loss"] == (
            (0, 0) if is_bad else (3, 1)
        )
        assert state.step == number + 1  # the batch has been seen
    np.testing.assert_array_equal(state.params, 2)
    np.testing.assert_array_equal(state.opt_state, 3)


def skipped_in(monkeypatch, steps):
    """Has steps say that their update was left out, as one with a loss scale does."""

    def change(new, metrics):
        left_out = int(new.step) in steps
        metrics = {
            name: (0 * total, 0 * count) if left_out else (total, count)
            for name, (total, count) in metrics.items()
        }
        return new, metrics | {"skipped": (jnp.float32(left_out), jnp.float32(1))}

    steps_end_with(monkeypatch, change)


@pytest.mark.parametrize("stops", [slow(()), (20, 30)], ids=["in one go", "in three"])
def test_updates_left_out_in_a_row_end_the_run_at_the_same_step_however_often_it_was_resumed(
    text, tmp_path, monkeypatch, capsys, stops
):
    skipped_in(monkeypatch, {*range(3, 14), *range(25, 100)})
    quiet = dict(run__skips_in_a_row=12, run__validate_every=100, run__sample_tokens=0)
    for steps in stops:
        assert train(text, tmp_path, training__steps=steps, **quiet) == loop.Ended(
            loop.DONE, steps
        )
    assert train(text, tmp_path, training__steps=60, **quiet).reason == loop.NOT_FINITE
    assert (
        "12 updates in a row were skipped because they were not finite; the last one is step 36"
        in capsys.readouterr().err
    )
    assert final_state(text, tmp_path).step == 30
    last = [line for line in journal.read(tmp_path) if "loss" in line][-1]
    assert last["step"] == 35 and last["skipped"] == 11 + 11
    # Those before it that were left out, 11 + 10 of 34 steps, have not moved the schedule: 0.99
    # a step after 10 of warm-up.
    assert last["learning_rate"] == pytest.approx(1e-2 * 0.99 ** (34 - 21 - 10), rel=1e-3)


def test_skipping_can_begin_in_the_middle_and_changes_nothing_where_all_is_finite(
    text, unbroken, at
):
    folder = at(30)
    train(text, folder, run__non_finite="skip", run__sample_tokens=0)
    assert_same_losses(folder, unbroken)
