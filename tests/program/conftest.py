"""Fixtures of runs that are over in a second or two."""

import contextlib
import json
import os
import shutil
import signal

import jax
import pytest
from small_run import corpus, train
from started import LAUNCHERS, Programs

from course_lib.program import journal, loop, room

_BUILT = {}
# Under nohup and in a shell's background, these would be ignored, in other processes, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def quick_runs():
    """Builds one run for all configurations that compile to the same programs, which fit, and
    draws no pictures.
    """
    build = loop.build

    def build_once(config, devices):
        whole = config.to_dict() | {"run": config.run.non_finite}
        del whole["training"]["steps"]
        key = (json.dumps(whole), *devices)
        if key not in _BUILT:
            _BUILT[key] = build(config, devices)
        return _BUILT[key]

    def report(folder):
        (folder / "report.md").touch()

    with pytest.MonkeyPatch.context() as patched, jax.numpy_dtype_promotion("standard"):
        patched.setattr(loop, "build", build_once)
        patched.setattr(room, "step_memory", lambda run: None)
        patched.setattr(room, "does_not_fit", lambda *_: "")
        patched.setattr(journal, "report", report)
        yield


@pytest.fixture(scope="module")
def quick():
    with quick_runs():
        yield


@pytest.fixture(scope="session")
def quickly():
    return quick_runs


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture(scope="session")
def unbroken(text, tmp_path_factory):
    """A run of 40 steps that nothing stopped. Its checkpoints are of steps 10, 20, 30, 40."""
    folder = tmp_path_factory.mktemp("unbroken")
    with quick_runs():
        assert train(text, folder, run__keep=4) == loop.Ended(loop.DONE, 40)
    return folder


@pytest.fixture
def at(unbroken, tmp_path):
    """Returns a function that copies the run as a kill would leave it that came before the
    checkpoint after a step.
    """

    def at(step, name="run"):
        folder = shutil.copytree(unbroken, tmp_path / name)
        for later in range(step + 10, 50, 10):
            shutil.rmtree(folder / "checkpoints" / f"{later:08d}")
        return folder

    return at


@pytest.fixture
def no_launcher(monkeypatch):
    """As if a user had started this process by hand."""
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    with Programs(tmp_path_factory.mktemp("programs")) as programs:
        yield programs
