"""Laws of a run: that it survives whatever stops it, and nothing of it is lost or
changed.
"""

import contextlib
import dataclasses
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run
from slow_cases import slow
from small_run import configuration, corpus

from course_lib import configs, files, training
from course_lib.measure import hardware
from course_lib.program import checkpoints, journal, loop, preemption, processes
from course_lib.program.checkpoints import CheckpointError, Checkpoints
from course_lib.text import data

KILLS = int(os.environ.get("COURSE_KILLS", 5))
WRITTEN = ("metrics.jsonl", "samples.jsonl")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="module")
def unbroken(text, compiled_once, tmp_path_factory):
    """A run of 40 steps that nothing stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    assert train(text, folder) == loop.Ended(loop.DONE, 40)
    return folder


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Builds one run for all configurations that compile to the same programs."""
    build, built = loop.build, {}

    def build_once(config, devices):
        whole = config.to_dict()
        whole["training"].pop("steps")
        key = json.dumps(
            {name: part for name, part in whole.items() if name != "run"}
            | {"how": config.run.non_finite}
        )
        if (key, *devices) not in built:
            built[key, *devices] = build(config, devices)
        return built[key, *devices]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "build", build_once)
        yield


def one():
    return jax.devices("cpu")[:1]


def train(text, folder, devices=None, **changes):
    return loop.train(configuration(text, **changes), folder, devices or one())


def preempt(text, folder, step, asked=1, **changes):
    """Trains from the start until a notice to end comes, when a step is done and it is asked
    for so many times.
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
        assert train(text, folder, **changes) == loop.Ended(loop.PREEMPTED, step)


def final_state(text, folder, **changes):
    run, _ = loop.build(configuration(text, **changes), one())
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as found:
        return found.restore(run.abstract()[0])


def assert_same_run(text, folder, other, **changes):
    for name in WRITTEN:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    first, second = final_state(text, folder, **changes), final_state(text, other, **changes)
    assert (first.step, first.data_state, first.loss) == (
        second.step,
        second.data_state,
        second.loss,
    )
    keys = [jax.random.key_data(saved.state.rng) for saved in (first, second)]
    np.testing.assert_array_equal(*keys)
    leaves = [
        jax.tree.leaves(dataclasses.replace(saved.state, rng=None)) for saved in (first, second)
    ]
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, two)


@contextlib.contextmanager
def server(folder, text, programs_kept):
    """A process that forks the trainings: see small_run.py."""
    here = Path(small_run.__file__).parent
    command = [sys.executable, str(here / "small_run.py"), str(folder), text]
    environment = (
        os.environ
        | programs_kept
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{here.parent}{os.pathsep}{here}",
        }
    )
    log = open(f"{folder}.log", "w")
    with (
        log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def begin(process, steps):
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def end(process):
    said, code = process.stdout.readline().split()
    assert said == "ended"
    return int(code)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_run_killed_at_random_moments_is_bit_for_bit_one_that_was_never_killed(
    text, programs_kept, tmp_path
):
    # the last kill comes long before the end
    moments, steps = random.Random(KILLS), 120 + 40 * KILLS
    with server(tmp_path / "unbroken", text, programs_kept) as process:
        begin(process, steps)
        assert end(process) == 0, (tmp_path / "unbroken.log").read_text()
    metrics = tmp_path / "killed" / "metrics.jsonl"
    with server(tmp_path / "killed", text, programs_kept) as process:
        for number in range(KILLS):
            size = metrics.stat().st_size if metrics.exists() else 0
            pid = begin(process, steps)
            if number % 5 == 3:  # perhaps before it has begun to train
                time.sleep(moments.uniform(0, 2))
            else:  # some 5 to 40 steps further than the one before
                size += moments.uniform(0, 600)
                wait_for(lambda size=size: metrics.exists() and metrics.stat().st_size > size)
                time.sleep(moments.uniform(0, 0.03))
            os.kill(pid, signal.SIGKILL)
            assert end(process) == -signal.SIGKILL
        begin(process, steps)
        assert end(process) == 0, (tmp_path / "killed.log").read_text()
    assert_same_run(text, tmp_path / "killed", tmp_path / "unbroken", training__steps=steps)


def wait_for(condition, seconds=600):
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.005)


def test_sigterm_leaves_a_checkpoint_and_the_run_goes_on_from_there_for_more_steps(
    text, tmp_path
):
    stopped, through = tmp_path / "stopped", tmp_path / "through"

    def terminate():
        wait_for(lambda: any(line["step"] > 40 for line in journal.read(stopped)))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    ended = train(text, stopped, training__steps=100_000)
    assert ended.reason == loop.PREEMPTED and ended.step > 40
    assert final_state(text, stopped).step == ended.step
    more = dict(training__steps=ended.step + 9)
    assert (
        train(text, stopped, **more)
        == train(text, through, **more)
        == loop.Ended(loop.DONE, ended.step + 9)
    )
    assert_same_run(text, stopped, through)


# before and in the middle of validation
@pytest.mark.parametrize(("number", "asked"), [(20, 1), slow(40, 1), slow(20, 2), (40, 3)])
def test_at_a_notice_only_the_checkpoint_is_written_and_what_else_was_due_is_done_later(
    text, unbroken, tmp_path, monkeypatch, number, asked
):
    def looked_at():
        lines = journal.read(tmp_path) + journal.read(tmp_path, "samples")
        return [
            line
            for line in lines
            if line["step"] == number and line.keys() & {"validation_loss", "text"}
        ]

    preempt(text, tmp_path, number, asked)
    assert final_state(text, tmp_path).step == number and not looked_at()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop.Loop, "save", killed)
        train(text, tmp_path)
    assert len(looked_at()) == 2
    assert train(text, tmp_path) == loop.Ended(loop.DONE, 40)
    assert_same_run(text, tmp_path, unbroken)


def killed(*given, **more):
    raise KeyboardInterrupt


def test_a_run_that_ended_and_goes_on_counts_every_step_once(text, unbroken, tmp_path):
    for steps in (5, 20, 40):
        train(text, tmp_path, training__steps=steps)
        assert (tmp_path / "report.md").exists()
    assert [step for step, _ in journal.pairs(journal.read(tmp_path), "loss")] == [
        5,
        7,
        14,
        20,
        21,
        28,
        35,
        40,
    ]
    ends = [7, 14, 21, 28, 35, 40]
    assert [step for step, _ in journal.pairs(journal.read(unbroken), "loss")] == ends
    np.testing.assert_allclose(losses(tmp_path, ends), losses(unbroken, ends), rtol=1e-12)


@pytest.mark.parametrize("steps", [40, 5], ids=["as many steps", "fewer"])
def test_what_is_done_is_not_done_again(text, unbroken, capsys, steps):
    before = {name: (unbroken / name).read_bytes() for name in WRITTEN}
    assert train(text, unbroken, training__steps=steps, strategy__zero=1) == loop.Ended(
        loop.DONE, 40
    )
    assert "goes on after step 40 of 40\n" in capsys.readouterr().err
    assert before == {name: (unbroken / name).read_bytes() for name in WRITTEN}
    assert (unbroken / "report.md").exists() and json.loads(
        (unbroken / "config.json").read_text()
    )["seed"] == 42


@pytest.mark.parametrize("count", [1, 2])
def test_before_the_first_step_a_run_is_checked_once_and_built_once(
    text, tmp_path, monkeypatch, count
):
    class Begins(Exception):
        pass

    def begins(*_):
        raise Begins

    whole, called = configuration(text, data__batch_size=8), []
    for owner, name in (
        (configs, "check"),
        (training, "check"),
        (training, "functions"),
        (training, "make_train_step"),
    ):
        right = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, right=right, name=name, **o: (called.append(name), right(*a, **o))[1],
        )
    monkeypatch.setattr(loop, "Loop", begins)
    with pytest.raises(Begins):
        loop.train(whole, tmp_path, jax.devices("cpu")[:count])
    assert called == ["check", "functions", "make_train_step"]


def test_the_loss_is_what_training_by_hand_gives(text, unbroken):
    first = [line for line in journal.read(unbroken) if "loss" in line][0]
    whole = configuration(text)
    run, place = loop.build(whole, one())
    batches = loop.read_batches(whole, data.tokens("train", text), place)
    state, total = run.init(jax.random.key(whole.seed)), None
    for _ in range(7):
        state, metrics = run.train_step(state, next(batches))
        total = metrics if total is None else training.add_metrics(total, metrics)
    np.testing.assert_allclose(first["loss"], training.mean_metrics(total)["loss"], rtol=1e-6)
    assert first["step"] == 7 and first["learning_rate"] == pytest.approx(1e-2 * 6 / 10)


@pytest.mark.parametrize("back", [False, slow(True)], ids=["to four devices", "back to one"])
def test_a_run_goes_on_on_another_mesh_with_the_same_losses(text, tmp_path, capsys, back):
    spread = dict(mesh__tensor=2, strategy__zero=1, model__dropout_rate=0.0)
    alone, four = (one(), dict(model__dropout_rate=0.0)), (jax.devices("cpu")[:4], spread)
    (before, first), (after, second) = (four, alone) if back else (alone, four)
    assert train(text, tmp_path / "a", before, training__steps=20, **first).step == 20
    train(text, tmp_path / "a", after, training__steps=30, **second)
    told, said = {"data": (1, 2), "tensor": ("not", 2), "zero": (0, 1)}, capsys.readouterr().err
    for field, (old, new) in {
        name: pair[::-1] if back else pair for name, pair in told.items()
    }.items():
        assert f"{field}: {old} saved, {new} given" in said
    train(text, tmp_path / "b", one(), training__steps=30, model__dropout_rate=0.0)
    assert_same_losses(tmp_path / "a", tmp_path / "b")


def test_a_run_that_goes_on_without_donation_is_the_same_bit_for_bit(text, unbroken, tmp_path):
    preempt(text, tmp_path, 17)
    train(text, tmp_path, training__donate=False)
    assert_same_run(text, tmp_path, unbroken)


def test_what_says_how_it_is_computed_may_change_and_the_losses_stay(
    text, unbroken, tmp_path, monkeypatch, capsys
):
    train(text, tmp_path, training__steps=20)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "__version__", "0.99")
        patched.setattr(hardware, "cores", lambda: 99)
        train(text, tmp_path, training__steps=20)
    assert (
        f"rounded differently: jax: '{jax.__version__}' saved, '0.99' given; cores: "
        in capsys.readouterr().err
    )
    train(
        text,
        tmp_path,
        model__remat=("MLP", "Attn"),
        model__attention="xla",
        run__sample_tokens=0,
    )
    said = [
        line for line in capsys.readouterr().err.splitlines() if "rounded differently" in line
    ]
    assert re.fullmatch(
        r".*differently: model.remat: \[\] .*; model.attention: 'reference' saved, 'xla' given",
        *said,
    )
    assert_same_losses(tmp_path, unbroken)


def losses(folder, ends):
    """Returns the mean training losses up to each of some steps, of lines that may be of fewer
    steps each.
    """
    means, total, before = [], 0.0, 0
    for step, loss in journal.pairs(journal.read(folder), "loss"):
        total, before = total + loss * (step - before), step
        if step in ends:
            means.append(total / (step - max((end for end in ends if end < step), default=0)))
            total = 0.0
    return means


def assert_same_losses(folder, other):
    """Compares losses of programs that round in another order and may have ended in between."""
    expected = journal.read(other)
    ends = [step for step, _ in journal.pairs(expected, "loss")]
    # Adam divides what rounding has changed
    np.testing.assert_allclose(losses(folder, ends), losses(other, ends), rtol=1e-4)
    found, expected = (
        dict(journal.pairs(lines, "validation_loss"))
        for lines in (journal.read(folder), expected)
    )
    assert expected and found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-4)


def test_a_run_with_another_configuration_is_refused_and_stays_as_it_was(text, unbroken):
    before = (unbroken / "config.json").read_bytes()
    told = r"optimizer\.learning_rate: 0\.01 saved, 0\.02 given; seed: 42 saved, 43 given"
    with pytest.raises(ValueError, match=told) as error:
        whole = configuration(text, optimizer__learning_rate=0.02)
        whole.seed = 43
        loop.train(whole, unbroken, one())
    assert (
        "model." not in str(error.value) and (unbroken / "config.json").read_bytes() == before
    )


def test_a_run_on_another_text_is_refused(text, unbroken, tmp_path):
    other = corpus(tmp_path / "other")
    # the same text in another place is the same
    assert train(other, unbroken).reason == loop.DONE
    (tmp_path / "other" / "00.py").write_text("a = 1\n")
    with pytest.raises(ValueError, match=r"corpus\.\w+\.tokens: \d+ saved, \d+ given"):
        train(other, unbroken)


def steps_end_with(monkeypatch, change):
    """Has `change` make something else of the state and the metrics that a step returns."""
    build = loop.build

    def built(*given):
        run, place = build(*given)
        return (
            dataclasses.replace(run, train_step=lambda *given: change(*run.train_step(*given))),
            place,
        )

    monkeypatch.setattr(loop, "build", built)


def nan_after(monkeypatch, number):
    """Has all parameters become NaN in one step."""

    def change(new, metrics):
        factor = jnp.nan if int(new.step) == number else 1
        return (
            dataclasses.replace(
                new, params=jax.tree.map(lambda leaf: leaf * factor, new.params)
            ),
            metrics,
        )

    steps_end_with(monkeypatch, change)


@pytest.mark.parametrize("number", [20, 24])
def test_what_is_not_finite_stops_the_run_and_is_in_no_checkpoint(
    text, tmp_path, monkeypatch, capsys, number
):
    with monkeypatch.context() as patched:
        nan_after(patched, number)
        ended = train(text, tmp_path)
    assert ended.reason == loop.NOT_FINITE and number <= ended.step <= number + 1 + loop.BEHIND
    what = "state after step 20" if number == 20 else "loss of step 25"
    assert f"the {what} is not finite" in capsys.readouterr().err
    saved = final_state(text, tmp_path)
    assert saved.step == (number - 1) // 10 * 10
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved.state.params))
    assert train(text, tmp_path).reason == loop.DONE  # without the fault it goes on from there


def test_an_optimizer_that_is_not_finite_is_in_no_checkpoint_either(
    text, tmp_path, monkeypatch
):
    build = loop.build

    def built(*given):
        run, place = build(*given)

        def step(state, batch):
            new, metrics = run.train_step(state, batch)
            if int(new.step) == 20:
                spoilt = jax.tree.map(
                    lambda leaf: leaf * jnp.nan if leaf.dtype == jnp.float32 else leaf,
                    new.opt_state,
                )
                new = dataclasses.replace(new, opt_state=spoilt)
            return new, metrics

        return dataclasses.replace(run, train_step=step), place

    monkeypatch.setattr(loop, "build", built)
    assert train(text, tmp_path) == loop.Ended(loop.NOT_FINITE, 20)
    assert final_state(text, tmp_path).step == 10


@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
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


@pytest.mark.parametrize("stops", [(), (20, 30)], ids=["in one go", "in three"])
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
    text, unbroken, tmp_path
):
    train(text, tmp_path, training__steps=20)
    train(text, tmp_path, run__non_finite="skip", run__sample_tokens=0)
    assert_same_losses(tmp_path, unbroken)


def test_from_a_damaged_checkpoint_a_run_goes_back_to_the_one_before(
    text, unbroken, tmp_path, capsys
):
    train(text, tmp_path, training__steps=30)
    path = tmp_path / "checkpoints" / "00000030" / "about.json"
    path.write_text(path.read_text().replace('"step": 30', '"step": 31'))
    train(text, tmp_path)
    assert "the checkpoint of step 30 is damaged" in capsys.readouterr().out
    assert_same_run(text, tmp_path, unbroken)


def test_if_a_checkpoint_cannot_be_written_training_goes_on_but_not_past_the_last(
    text, tmp_path, monkeypatch, capsys
):
    save = Checkpoints.save

    def full(self, step, *given):
        if step in (20, 40):
            raise CheckpointError(f"step {step} could not be saved")
        save(self, step, *given)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", full)
    with pytest.raises(CheckpointError, match="step 40"):
        train(text, tmp_path)
    assert "step 20 could not be saved; training goes on" in capsys.readouterr().err
    assert final_state(text, tmp_path).step == 30


def test_of_several_processes_none_goes_on_after_a_checkpoint_that_failed(monkeypatch, capsys):
    one = loop.Loop.__new__(loop.Loop)
    one.book, one.checkpoints = (
        types.SimpleNamespace(say=print),
        types.SimpleNamespace(best=lambda: None),
    )

    def fail(count):
        monkeypatch.setattr(jax, "process_count", lambda: count)
        with one.reporting_errors(must=False):
            raise CheckpointError("step 3 could not be saved")

    fail(1)
    assert capsys.readouterr().out == "step 3 could not be saved; training goes on\n"
    with pytest.raises(CheckpointError):  # it would wait for the others, which may not know
        fail(2)


def test_if_a_checkpoint_fails_while_it_is_written_the_next_one_is_tried_all_the_same(
    text, tmp_path, monkeypatch, capsys
):
    wait, failed = Checkpoints.wait, []

    def fails_once(self):
        wait(self)
        if 30 in self.steps() and not failed:
            failed.append(30)
            raise CheckpointError("step 30 could not be saved")

    monkeypatch.setattr(checkpoints.Checkpoints, "wait", fails_once)
    assert train(text, tmp_path).reason == loop.DONE
    assert "step 30 could not be saved; training goes on" in capsys.readouterr().err
    assert final_state(text, tmp_path).step == 40


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_but_no_line(
    text, unbroken, tmp_path, monkeypatch, capsys
):
    before, write = resource.getrlimit(resource.RLIMIT_FSIZE), journal.Journal.write
    full = []

    def fills_and_empties(self, step, *given, **values):
        # Orbax's part is in test_checkpoints.py
        wait_for(lambda: not (tmp_path / "checkpoints" / "unfinished").exists())
        full[:] = [14 <= step < 28]
        # bytes that a file may have
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 if full[0] else before[0], before[1]))
        write(self, step, *given, **values)

    monkeypatch.setattr(journal.Journal, "write", fills_and_empties)
    try:
        assert train(text, tmp_path) == loop.Ended(loop.DONE, 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert (
        "metrics cannot be written (File too large): training goes on" in said
        and "metrics are written again" in said
    )
    assert (
        "step 20 is not saved, because the lines up to it cannot be written; training goes on"
        in said
    )
    assert final_state(text, tmp_path).step == 40
    assert_same_run(text, tmp_path, unbroken)


def test_a_notice_whose_checkpoint_cannot_be_written_is_an_error(text, tmp_path, monkeypatch):
    def full(*given):
        raise CheckpointError("step 17 could not be saved")

    with pytest.raises(CheckpointError), monkeypatch.context() as patched:
        patched.setattr(
            Checkpoints, "save", lambda self, step, *given: full() if step == 17 else None
        )
        preempt(text, tmp_path, 17)


@pytest.mark.parametrize("while_written", [False, True])
def test_a_best_one_that_was_not_saved_does_not_count(
    text, tmp_path, monkeypatch, while_written
):
    losses = iter([5.0, 1.0, 3.0, 4.0, 6.0])  # after steps 4, 8, 12, 16, 20
    monkeypatch.setattr(
        loop.observe, "validate", lambda *given, **options: {"loss": next(losses)}
    )
    save, wait = Checkpoints.save, Checkpoints.wait

    def fails(self, step, *given):
        if step == 8 and not while_written:
            raise CheckpointError("step 8 could not be saved")
        save(self, step, *given)

    def fails_late(self):
        wait(self)
        if while_written and 8 in self.steps():
            shutil.rmtree(self._path(8))
            raise CheckpointError("step 8 could not be saved")

    monkeypatch.setattr(Checkpoints, "save", fails)
    monkeypatch.setattr(Checkpoints, "wait", fails_late)
    train(
        text,
        tmp_path,
        training__steps=20,
        run__validate_every=4,
        run__checkpoint_every=100,
        run__keep=2,
    )
    found = {
        path.name: json.loads((path / "about.json").read_text())["loss"]
        for path in (tmp_path / "checkpoints").iterdir()
    }
    assert found == {"00000012": 3.0, "00000020": 6.0}


def test_no_checkpoint_is_whole_before_the_lines_up_to_it(text, tmp_path, monkeypatch, capsys):
    sync = journal.Journal.sync
    answers = iter([False])
    monkeypatch.setattr(
        journal.Journal, "sync", lambda self: sync(self) and next(answers, True)
    )
    train(text, tmp_path, training__steps=20)
    assert (
        "step 10 is not saved, because the lines up to it cannot be written; training goes on"
        in capsys.readouterr().err
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000020"]


def test_a_run_that_was_not_finite_before_its_first_checkpoint_begins_anew(
    text, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        nan_after(patched, 8)
        assert train(text, tmp_path).reason == loop.NOT_FINITE
    assert journal.read(tmp_path) and not (tmp_path / "report.md").exists()
    assert train(text, tmp_path).reason == loop.DONE


def test_lines_are_on_the_disk_before_the_checkpoint_that_implies_them(
    text, tmp_path, monkeypatch
):
    done = []
    for owner, name in ((journal.Journal, "sync"), (Checkpoints, "save")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda self, *given, n=name, real=real: (done.append(n), real(self, *given))[1],
        )
    train(text, tmp_path, training__steps=20)
    assert done == ["sync", "save", "sync", "save", "sync"]  # and at the end


def test_the_best_of_all_validations_is_kept_whenever_checkpoints_are_due(
    text, tmp_path, monkeypatch
):
    # after steps 4, 8, 10 (the last), 12, 16, 20
    losses = iter([5.0, 1.0, 6.0, float("nan"), 2.0, 4.0])
    monkeypatch.setattr(
        loop.observe, "validate", lambda *given, **options: {"loss": next(losses)}
    )
    saved, save = [], Checkpoints.save
    monkeypatch.setattr(
        Checkpoints,
        "save",
        lambda self, step, *given: (saved.append(step), save(self, step, *given))[1],
    )
    every = dict(run__validate_every=4, run__checkpoint_every=10, run__keep=2)
    train(text, tmp_path, training__steps=10, **every)
    train(text, tmp_path, training__steps=20, **every)
    assert saved == [4, 8, 10, 20]
    found = {
        path.name: json.loads((path / "about.json").read_text())["loss"]
        for path in (tmp_path / "checkpoints").iterdir()
    }
    assert found == {"00000008": 1.0, "00000010": 6.0, "00000020": 4.0}


def test_a_folder_in_which_another_process_trains_is_left_alone(text, tmp_path):
    with (
        files.locked(tmp_path),
        pytest.raises(BlockingIOError, match="is in use by another process"),
    ):
        train(text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("place", ["run", "."])
def test_a_run_inside_of_its_text_is_refused_as_it_could_not_go_on(text, place):
    before = sorted(Path(text).iterdir())
    with pytest.raises(loop.Refused, match="must not lie in corpus=.*take another --run"):
        train(text, Path(text) / place)
    assert sorted(Path(text).iterdir()) == before


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_over_its_metrics(
    text, unbroken, tmp_path
):
    folder = tmp_path / "run"
    shutil.copytree(unbroken, folder, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(
        loop.Refused, match="has no checkpoints any more.* give another folder, or move"
    ):
        train(text, folder)
    for name in (*WRITTEN, "report.md", "times.jsonl", "config.json"):
        assert (folder / name).read_bytes() == (unbroken / name).read_bytes()


@pytest.mark.parametrize("kind", [RuntimeError, jax.errors.JaxRuntimeError])
def test_an_error_that_may_pass_is_no_refusal_after_which_nobody_would_try_again(
    text, tmp_path, monkeypatch, kind
):
    def fails(split, corpus):
        raise kind("changed while it was read, or UNAVAILABLE")

    monkeypatch.setattr(data, "tokens", fails)
    with pytest.raises(kind):
        train(text, tmp_path)


@pytest.mark.parametrize("found", ["one too high", "one alone"])
def test_a_validation_split_that_does_not_work_is_refused_and_not_only_when_it_is_due(
    text, tmp_path, monkeypatch, found
):
    train_split = data.tokens("train", text)
    size = int(train_split.max()) + 1
    validation = np.array([3, size, 3][: 3 if found == "one too high" else 1], np.uint16)
    monkeypatch.setattr(
        data,
        "tokens",
        lambda split, corpus: train_split if split == "train" else validation,
    )
    told = {
        "one too high": rf"tokens\[1\]={size} must be in \[0, vocab_size={size}\)",
        "one alone": "two or more, not 1",
    }
    with pytest.raises(loop.Refused, match=f"the validation split: .*{told[found]}"):
        train(text, tmp_path, model__vocab_size=size, model__num_outputs=size)


def test_a_mistake_is_refused_before_anything_is_written(text, tmp_path):
    for changes in (
        {"data__seq_len": 15_000, "model__max_seq_len": 15_000},
        {"mesh__tensor": 3},
    ):
        with pytest.raises(loop.Refused, match="seq_len=15000|mesh="):
            train(text, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seed": 7},
            "must have the same configuration: seed: 42 in process 0, 7 in process 1$",
        ),
        ({"jax": "0.0"}, "jax: '.*' in process 0, '0.0' in process 1$"),
        ({"folder": "elsewhere"}, "folder: '.*' in process 0, 'elsewhere' in process 1$"),
        ({"corpus": {}}, r"corpus\.train\.tokens: \d+ in process 0, not in process 1; "),
        (
            {"refused": "no such folder"},
            "refused: not in process 0, 'no such folder' in process 1$",
        ),
    ],
)
def test_what_another_process_is_told_or_finds_must_be_the_same(
    text, tmp_path, monkeypatch, change, message
):
    monkeypatch.setattr(
        processes, "gather", lambda said: [said, json.dumps(json.loads(said) | change)]
    )
    with pytest.raises(loop.Refused, match=message):
        train(text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_text_may_lie_elsewhere_in_another_process(text, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(processes, "gather", lambda words: said.append(words) or [words])
    for folder in (text, corpus(tmp_path / "other")):
        with contextlib.suppress(loop.Refused):
            train(folder, tmp_path / "run", mesh__data=3)  # of one device
    assert said[0] == said[1] and text not in said[0]
