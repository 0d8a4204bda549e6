"""Fixtures of runs that are over in a second or two."""

import contextlib
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from forked import LAUNCHERS, Server
from small_run import corpus, numbers, train

from course_lib.program import checkpoints, journal, loop, room

_BUILT = {}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored


name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")


class InOneFile:
    """Stands for Orbax, which writes a small state in thousands of events. Orbax itself is in
    test_checkpoints.py, test_stored_runs.py and test_program_by_processes.py.
    """

    def __init__(self, orbax):
        self.orbax, self.path = orbax, None

    def save(self, path, args):
        # A copy at once, since the state is donated; the folder appears at the end.
        leaves = jax.tree_util.tree_leaves_with_path(args.item)
        self.path, self.leaves = Path(path), {name(path): numbers(x) for path, x in leaves}

    def wait_until_finished(self):
        if self.path is not None:
            path, self.path = self.path, None
            path.mkdir(parents=True)
            np.savez(path / "arrays", **self.leaves)

    def restore(self, path, args):
        if not (path / "arrays.npz").exists():  # another process wrote it
            return self.orbax.restore(path, args=args)
        with np.load(path / "arrays.npz") as stored:
            arrays = {name: stored[name] for name in stored.files}

        def place(path, like):
            array = arrays[name(path)]
            is_key = jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key)
            if is_key:
                return jax.device_put(jax.random.wrap_key_data(array), like.sharding)
            # NumPy stores bfloat16 as two bytes of no type
            return jax.device_put(array.view(like.dtype), like.sharding)

        return jax.tree_util.tree_map_with_path(place, args.item)

    def close(self):
        self.wait_until_finished()
        self.orbax.close()


@contextlib.contextmanager
def quick_runs():
    """Builds one run for all configurations that compile to the same programs, which fit,
    stores arrays in one file, and draws no pictures.
    """
    build, real = loop.build, checkpoints.ocp.AsyncCheckpointer

    def build_once(config, devices):
        whole = config.to_dict() | {"run": config.run.non_finite}
        del whole["training"]["steps"]
        key = (json.dumps(whole), *devices)
        if key not in _BUILT:
            _BUILT[key] = build(config, devices)
        return _BUILT[key]

    def report(folder):
        (folder / "report.md").touch()

    def in_one_file(*given, **options):
        return InOneFile(real(*given, **options))

    with pytest.MonkeyPatch.context() as patched, jax.numpy_dtype_promotion("standard"):
        patched.setattr(loop, "build", build_once)
        patched.setattr(room, "step_memory", lambda run: None)
        patched.setattr(room, "does_not_fit", lambda *_: "")
        patched.setattr(journal, "report", report)
        patched.setattr(checkpoints.ocp, "AsyncCheckpointer", in_one_file)
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
def server(programs_kept, tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    with Server.started(tmp_path_factory.mktemp("server"), programs_kept) as server:
        yield server
