"""Laws of the command `python -m course_lib.train` in processes of its own."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
import small_run
from small_run import STRICT, arguments, corpus

from course_lib.lessons.by_processes import free_port
from course_lib.program import command, journal, processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was(monkeypatch):
    """As if a user had started it: no launcher."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX")):
            monkeypatch.delenv(name)


@pytest.mark.slow
def test_the_program_trains_on_simulated_devices_ends_at_sigterm_and_goes_on(
    programs_kept, tmp_path
):
    text, run = corpus(tmp_path / "text"), tmp_path / "run"
    given = arguments(text, run, 2, "run.checkpoint_every=50")
    environment = (
        os.environ
        | programs_kept
        | {
            "PYTHONPATH": str(ROOT),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        }
    )
    words = [sys.executable, *STRICT, "-m", "course_lib.train", *given]
    metrics = run / "metrics.jsonl"
    endless = [*words, "--set", "training.steps=100000"]
    with subprocess.Popen(endless, env=environment, stderr=subprocess.PIPE, text=True) as first:
        late = threading.Timer(600, first.kill)
        late.start()
        while first.poll() is None and not (metrics.exists() and metrics.stat().st_size > 200):
            time.sleep(0.02)
        first.send_signal(signal.SIGTERM)
        said = first.communicate()[1]
        late.cancel()
    assert first.returncode == command.EXIT_CODE_PREEMPTED, said
    step = int(re.search(r"ended by SIGTERM after step (\d+), with a checkpoint", said)[1])
    again = [*words, "--set", f"training.steps={step + 3}"]
    done = subprocess.run(again, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        f"goes on after step {step} of {step + 3}" in done.stderr
        and "2 x cpu" in (run / "times.jsonl").read_text()
    )
    steps = [line["step"] for line in journal.read(run) if "loss" in line]
    assert steps == list(range(1, step + 4))


class Commands:
    """Calls of the command, each in a process that is forked from one that has imported all:
    see small_run.py.
    """

    def __init__(self, server, folder):
        self.server, self.folder, self.text = server, folder, corpus(folder / "text")
        self.numbers = itertools.count()

    def start(self, run, *changes, devices=2, more=()):
        """Starts a small run, and returns its process number and where it writes to."""
        given = [*arguments(self.text, self.folder / run, devices, *changes), *more]
        self.folder.joinpath("logs").mkdir(exist_ok=True)
        log = self.folder / "logs" / str(next(self.numbers))
        return self._ask(dict(arguments=given, log=str(log))), log

    def pair(self, run, *changes, second=()):
        """Starts two processes of one run; the second may be told something else."""
        place = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process"]
        return [
            self.start(run, *changes, *second * number, more=[*place, str(number)])
            for number in range(2)
        ]

    def until(self, run, step, *processes):
        """Waits until a run has written the line of a step, and returns its last step."""
        last = time.monotonic() + 600
        while not (steps := [number for number, _ in self.losses(run)]) or steps[-1] < step:
            said = "".join(log.read_text() for _, log in processes if log.exists())
            assert time.monotonic() < last and not re.search(
                r"^[\w.]*error\b", said, re.I | re.M
            ), said
            time.sleep(0.02)
        return steps[-1]

    def log_with(self, words, *processes):
        """Waits until the first of some processes has said something, and returns all that it
        said.
        """
        last = time.monotonic() + 600
        while words not in (
            said := processes[0][1].read_text() if processes[0][1].exists() else ""
        ):
            assert time.monotonic() < last, said
            time.sleep(0.02)
        return said

    def losses(self, run):
        return journal.pairs(journal.read(self.folder / run), "loss")

    def code(self, process):
        """Waits for a process, and returns its exit code."""
        return self._ask(process[0])

    def _ask(self, what):
        """Asks the server, which is killed with all that it started if it does not answer: then
        there is no number to read.
        """
        late = threading.Timer(600, os.killpg, [self.server.pid, signal.SIGKILL])
        late.start()
        try:
            self.server.stdin.write(json.dumps(what) + "\n")
            self.server.stdin.flush()
            return int(self.server.stdout.readline())
        finally:
            late.cancel()


@pytest.fixture(scope="module")
def commands(programs_kept, tmp_path_factory):
    here = Path(small_run.__file__).parent
    environment = os.environ | programs_kept | {"PYTHONPATH": f"{ROOT}{os.pathsep}{here}"}
    with subprocess.Popen(
        [sys.executable, str(here / "small_run.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as server:
        try:
            yield Commands(server, tmp_path_factory.mktemp("commands"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_processes_that_are_told_different_things_end_at_once_and_say_which(commands):
    both = commands.pair(
        "unlike", "training.steps=3", second=["seed=7", "run.validate_every=2"]
    )
    assert [commands.code(each) for each in both] == [command.USAGE] * 2, both[0][1].read_text()
    for _, log in both:
        said = (
            "run.validate_every: 250 in process 0, 2 in process 1; seed: 42 in process 0, 7 in"
            " process 1"
        )
        # of any thread, at any time
        lines = [line for line in log.read_text().splitlines() if not line.startswith("[Gloo]")]
        assert lines[-1] == f"error: all processes must have the same configuration: {said}"
    assert not (commands.folder / "unlike" / "metrics.jsonl").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_ctrl_c_writes_a_checkpoint_and_has_its_own_exit_code(commands):
    one = commands.start("interrupted", "training.steps=100000", devices=1)
    commands.until("interrupted", 3, one)
    os.kill(one[0], signal.SIGINT)
    assert commands.code(one) == command.EXIT_CODE_INTERRUPTED, one[1].read_text()
    step = int(
        re.search(r"ended by Ctrl-C after step (\d+), with a checkpoint", one[1].read_text())[1]
    )
    assert (commands.folder / "interrupted" / "checkpoints" / f"{step:08d}").is_dir()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_sigterm_before_the_first_step_ends_the_program_at_once(commands):
    one = commands.start("early", "model.num_layers=9", devices=1)  # nobody has compiled that
    commands.log_with("begins, ", one)
    os.kill(one[0], signal.SIGTERM)
    assert commands.code(one) == -signal.SIGTERM
    assert not (commands.folder / "early" / "checkpoints").exists() and not commands.losses(
        "early"
    )


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_two_processes_of_which_one_is_killed_and_then_one_is_told_to_end_lose_nothing(
    commands,
):
    changes = ["mesh.tensor=2", "strategy.zero=1"]
    endless = [*changes, "run.checkpoint_every=3", "training.steps=100000"]
    both = commands.pair("two", *endless)
    commands.until("two", 7, *both)
    os.kill(both[1][0], signal.SIGKILL)
    killed = time.monotonic()
    code = commands.code(both[0])
    jaxs = -signal.SIGABRT if jax.__version_info__ >= (0, 8) else 1
    # JAX's heartbeat may be faster than a broken connection
    assert code in (command.FAILED, jaxs), both[0][1].read_text()
    assert time.monotonic() - killed < processes.HEARTBEAT + 30  # the machine may be busy
    assert commands.code(both[1]) == -signal.SIGKILL
    assert (
        "another process ended first" in (said := both[0][1].read_text())
        or "another task died" in said  # JAX's words
    )

    both = commands.pair("two", *endless)
    went_on = int(
        re.search(r"goes on after step (\d+)", commands.log_with("goes on after", *both))[1]
    )
    commands.until("two", went_on + 4, *both)
    os.kill(both[1][0], signal.SIGTERM)
    assert [commands.code(each) for each in both] == [command.EXIT_CODE_PREEMPTED] * 2, both[0][
        1
    ].read_text()
    steps = int(
        re.search(
            r"ended by SIGTERM after step (\d+), with a checkpoint", both[0][1].read_text()
        )[1]
    )

    alone = commands.start("one", *changes, f"training.steps={steps}", devices=4)
    assert commands.code(alone) == 0, alone[1].read_text()
    found, expected = commands.losses("two"), commands.losses("one")
    assert (
        [step for step, _ in found]
        == [step for step, _ in expected]
        == list(range(1, steps + 1))
    )
    for (_, loss), (_, other) in zip(found, expected, strict=True):
        assert loss == pytest.approx(other, rel=1e-4)  # sums over processes have another order


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_two_processes_train_as_one_does_and_one_goes_on_with_what_they_saved(commands):
    changes = [
        "run.validate_every=3",
        "run.validation_batches=2",
        "run.sample_tokens=3",
        "mesh.tensor=2",
        "strategy.zero=1",
    ]

    def done(process):
        assert commands.code(process) == 0, process[1].read_text()
        return process[1].read_text()

    first, second = [
        done(process) for process in commands.pair("both", *changes, "training.steps=5")
    ]
    assert "done after 5 steps" in first and "done" not in second  # one of them speaks
    assert "4 x cpu" in (commands.folder / "both" / "times.jsonl").read_text()
    assert "goes on after step 5 of 8" in done(
        commands.start("both", *changes, "training.steps=8", devices=4)
    )
    done(commands.start("single", *changes, "training.steps=8", devices=4))
    found, expected = (journal.read(commands.folder / name) for name in ("both", "single"))
    # Where the first run ended it validated, too.
    assert [line["step"] for line in found if line["step"] != 5 or "loss" in line] == [
        line["step"] for line in expected
    ]
    for name in ("loss", "validation_loss"):
        losses = dict(journal.pairs(found, name))
        for step, loss in journal.pairs(expected, name):
            # of sums over processes the order is another
            assert losses[step] == pytest.approx(loss, rel=1e-5)
