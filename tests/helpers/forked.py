"""Processes that tests of the program start, watch and end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from small_run import arguments, corpus

from course_lib.lessons.by_processes import free_port
from course_lib.program import journal

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]
LAUNCHERS = ("OMPI_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "CUDA_VISIBLE_DEVICES")


def until(condition, seconds=600):
    """Waits until a function returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def losses(run):
    return journal.pairs(journal.read(run), "loss")


class Forked:
    """A process that the server of small_run.py forked; its output is in a file."""

    def __init__(self, server, pid, log):
        self.server, self.pid, self.log = server, pid, log

    def said(self):
        return self.log.read_text() if self.log.exists() else ""

    def code(self, seconds=600):
        """Waits for its end, and returns its exit code."""
        return self.server.ask(self.pid, seconds)

    def signal(self, number):
        os.kill(self.pid, number)

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


class Server:
    """Starts processes of small runs, for which nothing is imported anew."""

    def __init__(self, process, folder):
        self.process, self.folder, self.text = process, folder, corpus(folder / "text")
        self.logs = folder / "logs"
        self.logs.mkdir()

    @classmethod
    @contextlib.contextmanager
    def started(cls, folder, environ):
        env = {n: x for n, x in os.environ.items() if not n.startswith(LAUNCHERS)}
        env |= environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{HELPERS}"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        command = [sys.executable, str(HELPERS / "small_run.py")]
        with subprocess.Popen(command, **pipes, text=True, env=env) as process:
            try:
                yield cls(process, folder)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def ask(self, what, seconds=600):
        """Asks the server, which is killed with all that it started if it does not answer: then
        there is no number to read.
        """
        late = threading.Timer(seconds, os.killpg, [self.process.pid, signal.SIGKILL])
        late.start()
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
            return int(self.process.stdout.readline())
        finally:
            late.cancel()

    def fork(self, program, *arguments, **environ):
        log = self.logs / str(len(list(self.logs.iterdir())))
        log.touch()
        what = dict(program=program, arguments=arguments, environ=environ, log=str(log))
        return Forked(self, self.ask(what), log)

    def train(self, run, *changes, devices=2, place=()):
        """Starts the smallest run, with changes of its configuration."""
        given = arguments(self.text, self.folder / run, devices, *changes)
        return self.fork("course_lib.train", *given, *place)

    def train_by_two(self, run, *changes, second=()):
        """Starts two processes of one run; the second may be told something else."""
        place = ["--coordinator", f"localhost:{free_port()}", "--processes", "2", "--process"]
        return [
            self.train(run, *changes, *second * number, place=[*place, str(number)])
            for number in range(2)
        ]
