"""Programs in processes of their own: small runs, and what cluster_worker.py does."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from small_run import STRICT, arguments, corpus

from course_lib.lessons.by_processes import free_port
from course_lib.program import journal

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
LAUNCHERS = ("OMPI_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "CUDA_VISIBLE_DEVICES")
PYTHON = [sys.executable, "-u", *STRICT, "-m"]


def until(condition, seconds=600):
    """Waits until a function returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def losses(run):
    return journal.pairs(journal.read(run), "loss")


class Started(subprocess.Popen):
    """A process with its output in a file."""

    def __init__(self, command, env, log):
        self.log = log
        with log.open("w") as file:
            super().__init__(command, env=env, stdout=file, stderr=file, start_new_session=True)

    def said(self):
        return self.log.read_text()

    def until(self, words):
        """Waits until it has said something, and returns the match."""
        return until(lambda: self._is_well() and re.search(words, self.said()))

    def until_step(self, run, step):
        """Waits until the run has written the line of a step."""
        until(lambda: self._is_well() and any(number >= step for number, _ in losses(run)))

    def _is_well(self):
        said = self.said()
        assert not re.search(r"^[\w.]*error\b", said, re.I | re.M), said
        return True


class Programs:
    """Starts programs in a folder; at the end of a `with`, kills those that still run."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        self.text = corpus(folder / "text")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def start(self, *command, **environ):
        env = {n: x for n, x in os.environ.items() if not n.startswith(LAUNCHERS)}
        env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}", **environ}
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles quickly
        log = self.folder / f"output {len(self.started)}"
        self.started.append(Started(command, env, log))
        return self.started[-1]

    def train(self, run, *changes, devices=2, place=()):
        """Starts the smallest run, with changes of its configuration."""
        given = arguments(self.text, self.folder / run, devices, *changes)
        return self.start(*PYTHON, "course_lib.train", *given, *place)

    def train_by_two(self, run, *changes, second=()):
        """Starts two processes of one run; the second may be told something else."""
        place = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process"]
        return [
            self.train(run, *changes, *second * number, place=[*place, str(number)])
            for number in range(2)
        ]
