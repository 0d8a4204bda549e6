"""The gradient of several processes."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from course_lib.lessons import by_processes, tiny_transformer


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_compute_the_gradient_of_one_device(processes):
    params, inputs, labels = by_processes.example()
    with jax.default_matmul_precision("highest"):
        gradient = jax.jit(jax.value_and_grad(tiny_transformer.mean_loss))
        loss, grads = gradient(params, inputs, labels)
    its_loss, its_grads = by_processes.run(processes)
    np.testing.assert_allclose(its_loss, loss, rtol=1e-6)
    assert set(its_grads) == set(grads)
    for name, grad in grads.items():
        assert np.linalg.norm(its_grads[name] - grad) < 2e-6 * np.linalg.norm(grad), name


def test_processes_that_cannot_share_the_devices_are_refused():
    with pytest.raises(ValueError, match="processes=3 must be 2, 4 or 8"):
        by_processes.run(3)


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "no number")
    with pytest.raises(RuntimeError, match="no number"):
        by_processes.run(2)


def test_processes_that_take_too_long_are_ended(monkeypatch):
    started, popen = [], subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(RuntimeError, match="process 0 still ran after 0 s"):
        by_processes.run(2, seconds=0.0)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_one_process_that_fails_ends_the_others():
    waits, fails = (
        subprocess.Popen([sys.executable, "-c", code])
        for code in ("import time; time.sleep(3600)", "raise SystemExit(3)")
    )
    assert by_processes._wait([waits, fails], seconds=600.0) == [None, 3]
    assert waits.returncode is not None
