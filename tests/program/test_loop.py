"""Laws of a run: that it survives whatever stops it, and nothing of it is lost or
changed.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run
from slow_cases import slow
from small_run import final_state, is_key, steps_end_with, train

from course_lib.program import journal, loop, preemption
from course_lib.program.checkpoints import CheckpointError, Checkpoints

KILLS = int(os.environ.get("COURSE_KILLS", 5))
WRITTEN = ("metrics.jsonl", "samples.jsonl")
pytestmark = pytest.mark.usefixtures("quick")


def assert_same_run(text, folder, other, **changes):
    for name in WRITTEN:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    first, second = (final_state(text, each, **changes) for each in (folder, other))
    assert (first.step, first.data_state) == (second.step, second.data_state)
    assert first.loss == second.loss
    for a, b in zip(*map(jax.tree.leaves, (first.state, second.state)), strict=True):
        np.testing.assert_array_equal(
            *(jax.random.key_data(x) if is_key(x) else x for x in (a, b))
        )


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


def test_sigterm_leaves_a_checkpoint_and_the_run_goes_on_from_there_for_more_steps(text, at):
    stopped, through = at(30, "stopped"), at(30, "through")

    def terminate():
        wait_for(lambda: any(line["step"] > 40 for line in journal.read(stopped)))
        os.kill(os.getpid(), signal.SIGTERM)

    for line in ("metrics.jsonl", "samples.jsonl"):  # of a run that was killed at step 30
        journal._cut(stopped / line, 30)
    threading.Thread(target=terminate, daemon=True).start()
    ended = train(text, stopped, training__steps=100_000)
    assert ended.reason == loop.PREEMPTED and ended.step > 40
    assert final_state(text, stopped).step == ended.step
    more, last = dict(training__steps=ended.step + 9), loop.Ended(loop.DONE, ended.step + 9)
    assert train(text, stopped, **more) == train(text, through, **more) == last
    assert_same_run(text, stopped, through)


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

    preempt(text, folder, number, asked)
    assert final_state(text, folder).step == number and not looked_at()

    def killed(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop.Loop, "save", killed)
        train(text, folder)
    assert len(looked_at()) == 2
    assert train(text, folder) == loop.Ended(loop.DONE, 40)
    assert_same_run(text, folder, unbroken)


def test_a_run_that_goes_on_without_donation_is_the_same_bit_for_bit(text, unbroken, at):
    folder = at(30)
    train(text, folder, training__donate=False)
    assert_same_run(text, folder, unbroken)


def test_from_a_damaged_checkpoint_a_run_goes_back_to_the_one_before(
    text, unbroken, at, capsys
):
    folder = at(30)
    path = folder / "checkpoints" / "00000030" / "about.json"
    path.write_text(path.read_text().replace('"step": 30', '"step": 31'))
    train(text, folder)
    assert "the checkpoint of step 30 is damaged" in capsys.readouterr().out
    assert_same_run(text, folder, unbroken)


@pytest.mark.parametrize("where", ["save", "_finish"], ids=["begun", "while written"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_nothing_is_lost(
    text, unbroken, at, monkeypatch, where
):
    folder, real = at(20), getattr(Checkpoints, where)

    def full(self, step, *given):
        if step == 30:
            raise CheckpointError("step 30 could not be saved: No space left")
        real(self, step, *given)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="step 30"):
        patched.setattr(Checkpoints, where, full)
        train(text, folder)
    assert final_state(text, folder).step == 20
    assert train(text, folder) == loop.Ended(loop.DONE, 40)
    assert_same_run(text, folder, unbroken)


def test_a_full_disk_ends_the_run_with_a_sentence_and_nothing_is_lost(
    text, unbroken, at, monkeypatch
):
    folder, write = at(20), journal.Journal.write
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fills(self, step, *given, **values):
        if step == 28:  # bytes that a file may have
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        write(self, step, *given, **values)

    try:
        with (
            monkeypatch.context() as patched,
            pytest.raises(OSError, match="cannot be written"),
        ):
            patched.setattr(journal.Journal, "write", fills)
            train(text, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert final_state(text, folder).step == 20
    assert train(text, folder) == loop.Ended(loop.DONE, 40)
    assert_same_run(text, folder, unbroken)


def test_lines_are_on_the_disk_before_the_checkpoint_that_implies_them(text, at, monkeypatch):
    done = []
    for owner, name in ((journal.Journal, "sync"), (Checkpoints, "save")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda self, *given, n=name, real=real: (done.append(n), real(self, *given))[1],
        )
    train(text, at(20))
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
    every |= dict(run__sample_tokens=0)
    train(text, tmp_path, training__steps=10, **every)
    train(text, tmp_path, training__steps=20, **every)
    assert saved == [4, 8, 10, 20]
    found = {
        path.name: json.loads((path / "about.json").read_text())["loss"]
        for path in (tmp_path / "checkpoints").iterdir()
    }
    assert found == {"00000008": 1.0, "00000010": 6.0, "00000020": 4.0}
