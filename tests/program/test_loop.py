"""Laws of a run: that it survives whatever stops it, and nothing of it is lost or changed."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import slow
from small_run import (
    assert_same_losses,
    assert_same_run,
    final_state,
    full_disk,
    steps_end_with,
    train,
)
from started import until

from course_lib import training
from course_lib.program import journal, loop, preemption
from course_lib.program.checkpoints import CheckpointError, Checkpoints

pytestmark = pytest.mark.usefixtures("quick")
DONE = loop.Ended(loop.DONE, 40)
NEITHER = dict(run__validate_every=1000, run__sample_tokens=0)  # validated at the end only


def test_sigterm_leaves_a_checkpoint_and_the_run_goes_on_from_there_for_more_steps(text, at):
    stopped, through = at(30, "stopped"), at(30, "through")

    def terminate():
        until(lambda: any(line["step"] > 40 for line in journal.read(stopped)))
        os.kill(os.getpid(), signal.SIGTERM)

    for name in ("metrics.jsonl", "samples.jsonl"):  # of a run that was killed at step 30
        journal._cut(stopped / name, 30)
    threading.Thread(target=terminate, daemon=True).start()
    ended = train(text, stopped, training__steps=100_000)
    assert ended.reason == loop.PREEMPTED and ended.step > 40
    assert final_state(stopped).step == ended.step
    more, last = dict(training__steps=ended.step + 9), loop.Ended(loop.DONE, ended.step + 9)
    assert train(text, stopped, **more) == train(text, through, **more) == last
    assert_same_run(stopped, through)


def preempt(text, folder, step, asked=1):
    """Trains until a notice to end comes: when a step is done and it is asked for so many
    times.
    """
    done, found = [], []

    def count(new, metrics):
        done.append(int(new.step))
        return new, metrics

    def stop_reason():
        found.append(done[-1])
        return loop.PREEMPTED if found.count(step) == asked else ""

    with pytest.MonkeyPatch.context() as patched:
        steps_end_with(patched, count)
        patched.setattr(preemption, "notices", lambda: contextlib.nullcontext(stop_reason))
        assert train(text, folder) == loop.Ended(loop.PREEMPTED, step)


# before and in the middle of validation
@pytest.mark.parametrize(("number", "asked"), [(20, 1), slow(40, 1), slow(20, 2), (40, 3)])
def test_at_a_notice_only_the_checkpoint_is_written_and_what_else_was_due_is_done_later(
    text, unbroken, at, monkeypatch, number, asked
):
    folder = at(number - 10)

    def looked_at():
        lines = journal.read(folder) + journal.read(folder, "samples")
        looked = [line for line in lines if line.keys() & {"validation_loss", "text"}]
        return [line for line in looked if line["step"] == number]

    def killed(*given):
        raise KeyboardInterrupt

    preempt(text, folder, number, asked)
    assert final_state(folder).step == number and not looked_at()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop.Loop, "save", killed)
        train(text, folder)
    assert len(looked_at()) == 2
    assert train(text, folder) == DONE
    assert_same_run(folder, unbroken)


@pytest.mark.slow
def test_a_run_that_goes_on_without_donation_is_the_same_bit_for_bit(text, unbroken, at):
    folder = at(30)
    train(text, folder, training__donate=False)
    assert_same_run(folder, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("adamw_8bit", "bfloat16"), ("adamw_bf16", "float32"), ("muon", "float32")],
)
def test_codes_scales_and_keys_of_an_optimizer_outlive_a_stop(text, tmp_path, optimizer, dtype):
    changes = dict(optimizer__name=optimizer, optimizer__param_dtype=dtype)
    changes |= dict(optimizer__weight_decay=0.1, **NEITHER)
    for folder, stops in (("unbroken", [20]), ("stopped", [10, 20])):
        for steps in stops:
            train(text, tmp_path / folder, training__steps=steps, **changes)
    assert_same_run(tmp_path / "stopped", tmp_path / "unbroken", written=())


def test_from_a_damaged_checkpoint_a_run_goes_back_to_the_one_before(
    text, unbroken, at, capsys
):
    folder = at(30)
    path = folder / "checkpoints" / "00000030" / "about.json"
    path.write_text(path.read_text().replace('"step": 30', '"step": 31'))
    train(text, folder)
    assert "the checkpoint of step 30 is damaged" in capsys.readouterr().out
    assert_same_run(folder, unbroken)


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [(Checkpoints, "_finish", CheckpointError), (journal.Journal, "write", OSError)],
    ids=["a checkpoint", "a line"],
)
def test_a_full_disk_ends_the_run_with_a_sentence_and_nothing_is_lost(
    text, unbroken, at, monkeypatch, owner, method, error
):
    folder, real = at(20), getattr(owner, method)

    def fills(self, step, *given, **values):
        if owner is Checkpoints:  # on a full disk, Orbax itself leaves coroutines behind
            self._orbax.wait_until_finished()
        with full_disk() if step > 20 else contextlib.nullcontext():
            return real(self, step, *given, **values)

    with monkeypatch.context() as patched, pytest.raises(error, match="could not|cannot be"):
        patched.setattr(owner, method, fills)
        train(text, folder)
    assert final_state(folder).step == 20
    assert train(text, folder) == DONE
    assert_same_run(folder, unbroken)


def test_lines_are_on_the_disk_before_the_checkpoint_that_implies_them(text, at, monkeypatch):
    done, sync, save = [], journal.Journal.sync, Checkpoints.save
    monkeypatch.setattr(journal.Journal, "sync", lambda *_: (done.append("sync"), sync(*_)))
    monkeypatch.setattr(Checkpoints, "save", lambda *_: (done.append("save"), save(*_)))
    train(text, at(20))
    assert done == ["sync", "save", "sync", "save", "sync"]  # and at the end


def test_the_best_of_all_validations_is_kept_whenever_checkpoints_are_due(
    text, tmp_path, monkeypatch
):
    # after steps 4, 8, 10 (the last), 12, 16, 20
    losses, saved, save = iter([5.0, 1.0, 6.0, float("nan"), 2.0, 4.0]), [], Checkpoints.save

    def noted(self, step, *given):
        saved.append(step)
        save(self, step, *given)

    monkeypatch.setattr(loop.observe, "validate", lambda *_, **options: {"loss": next(losses)})
    monkeypatch.setattr(Checkpoints, "save", noted)
    every = dict(run__validate_every=4, run__checkpoint_every=10, run__keep=2)
    every |= dict(run__sample_tokens=0)
    for steps in (10, 20):
        train(text, tmp_path, training__steps=steps, run__non_finite="skip", **every)
    assert saved == [4, 8, 10, 20]
    found = {
        path.name: json.loads((path / "about.json").read_text())["loss"]
        for path in (tmp_path / "checkpoints").iterdir()
    }
    assert found == {"00000008": 1.0, "00000010": 6.0, "00000020": 4.0}


def spoil(monkeypatch, part, number):
    """Has one part of the state become NaN in one step."""

    def change(new, metrics):
        factor = np.float32(np.nan if int(new.step) == number else 1)
        spoilt = jax.tree.map(
            lambda leaf: leaf * factor if leaf.dtype == jnp.float32 else leaf,
            getattr(new, part),
        )
        return dataclasses.replace(new, **{part: spoilt}), metrics

    steps_end_with(monkeypatch, change)


@pytest.mark.parametrize(("part", "number"), [("params", 14), ("opt_state", 20)])
def test_what_is_not_finite_stops_the_run_and_is_in_no_checkpoint(
    text, at, monkeypatch, capsys, part, number
):
    folder = at(10)
    spoil(monkeypatch, part, number)
    ended = train(text, folder)
    assert ended.reason == loop.NOT_FINITE and number <= ended.step <= number + 1 + loop.BEHIND
    what = "state after step 20" if number == 20 else "loss of step 15"
    assert f"the {what} is not finite" in capsys.readouterr().err
    assert final_state(folder).step == 10


def test_a_run_that_was_not_finite_before_its_first_checkpoint_begins_anew(
    text, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        spoil(patched, "params", 8)
        assert train(text, tmp_path).reason == loop.NOT_FINITE
    assert journal.read(tmp_path) and not (tmp_path / "report.md").exists()
    assert train(text, tmp_path, training__steps=9, **NEITHER).reason == loop.DONE


@pytest.mark.parametrize(("loss", "non_finite"), [(np.nan, "stop"), (np.inf, "skip")])
def test_a_run_whose_last_validation_is_not_finite_is_not_done(
    text, at, monkeypatch, loss, non_finite
):
    before, put_off = at(10), at(30, "put off")
    preempt(text, put_off, 40)  # its last validation is still to come
    monkeypatch.setattr(loop.observe, "validate", lambda *_, **options: {"loss": float(loss)})
    ends, given = 20 if non_finite == "stop" else 40, dict(run__non_finite=non_finite)
    for _ in range(2):  # the same command ends in the same way
        assert train(text, before, **given) == loop.Ended(loop.NOT_FINITE, ends)
        assert final_state(before).step == ends - 10
        assert train(text, put_off, **given) == loop.Ended(loop.NOT_FINITE, 40)


@pytest.mark.parametrize("where", ["params", "opt_state", "loss"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(where):
    def loss_fn(params, batch, rng):
        is_bad = batch.any()
        total = jnp.where(is_bad & (where == "loss"), jnp.nan, jnp.float32(3))
        # the optimizer sees which batch it is
        return params.sum() * (1 + is_bad), {"loss": (total, jnp.float32(1))}

    def update(grads, state, params):
        is_bad = grads[0] > 1
        moved = [
            jnp.where(is_bad & (where == name), jnp.nan, 1.0)
            for name in ("params", "opt_state")
        ]
        return moved[0] + 0 * params, state + moved[1]

    optimizer = optax.GradientTransformation(lambda params: params + 1, update)
    state = training.init_state(jnp.zeros(3), optimizer, jax.random.key(0))
    careful = training.make_train_step(loss_fn, optimizer, donate=False, skip_not_finite=True)
    for number, is_bad in enumerate([False, True, False]):
        state, metrics = careful(state, np.array([is_bad]))
        assert metrics["skipped"] == (is_bad, 1)
        assert metrics["loss"] == ((0, 0) if is_bad else (3, 1))
        assert state.step == number + 1  # the batch has been seen
    np.testing.assert_array_equal(state.params, 2)
    np.testing.assert_array_equal(state.opt_state, 3)


def test_updates_left_out_in_a_row_end_the_run_at_the_same_step_however_often_it_was_resumed(
    text, tmp_path, monkeypatch, capsys
):
    left_out = {*range(3, 14), *range(25, 100)}

    def change(new, metrics):  # as of a step with a loss scale
        used = np.float32(int(new.step) not in left_out)
        metrics = {name: (used * total, used * n) for name, (total, n) in metrics.items()}
        return new, metrics | {"skipped": (1 - used, np.float32(1))}

    steps_end_with(monkeypatch, change)
    quiet = dict(run__skips_in_a_row=12, **NEITHER)
    for steps in (20, 30):
        assert train(text, tmp_path, training__steps=steps, **quiet).reason == loop.DONE
    assert train(text, tmp_path, training__steps=60, **quiet).reason == loop.NOT_FINITE
    assert (
        "12 updates in a row were skipped because they were not finite; the last one is step 36"
        in capsys.readouterr().err
    )
    assert final_state(tmp_path).step == 30
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


def test_a_logger_is_told_of_the_run_and_of_its_lines_and_one_that_is_missing_is_named(
    text, tmp_path, monkeypatch
):
    got = []
    run = types.SimpleNamespace(
        log=lambda numbers, step: got.append(step), finish=lambda: got.append("end")
    )
    began = {}
    logger = types.SimpleNamespace(init=lambda **about: began.update(about) or run)
    for module, missing in (("trackio", False), ("wandb", True)):
        monkeypatch.setitem(sys.modules, module, None if missing else logger)
        folder = tmp_path / module
        with contextlib.ExitStack() as stack:
            if missing:
                error = "run.logger='wandb' cannot be imported .*pip install wandb"
                stack.enter_context(pytest.raises(loop.Refused, match=error))
            train(text, folder, training__steps=7, run__logger=module)
        assert (folder / "metrics.jsonl").exists() != missing
    assert began["name"] == str(tmp_path / "trackio") and began["resume"] == "allow"
    assert began["config"]["run"]["logger"] == "trackio"
    assert got[0] == 0 and got[-2:] == [7, "end"]
