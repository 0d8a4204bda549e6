"""What must be true of setting XLA's flags."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from course_lib import xla_flags

GONE = "xla_gpu_enable_triton_softmax_fusion"
THERE = "xla_gpu_autotune_level"


@pytest.fixture
def fresh(monkeypatch):
    """A process in which JAX has not started and no flag is set, and in which flags set by a
    test are forgotten.
    """
    monkeypatch.setattr(xla_flags, "_backend_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.mark.parametrize("name", [GONE, "xla_gpu_enable_async_collectives"])
def test_flags_that_the_sources_set_and_xla_dropped_are_not_accepted(name):
    assert not xla_flags.is_accepted(xla_flags.FLAGS[name].text)


def test_flags_are_accepted_unless_their_history_says_removed():
    for flag in xla_flags.FLAGS.values():
        assert xla_flags.is_accepted(flag.text) == ("removed" not in flag.history), flag.name


def test_a_value_of_the_wrong_type_is_not_accepted():
    assert not xla_flags.is_accepted(f"--{THERE}=often")


def test_a_trial_that_ended_for_another_reason_says_nothing_of_the_flag(monkeypatch):
    killed = subprocess.CompletedProcess([], returncode=-9, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: killed)
    with pytest.raises(
        RuntimeError, match="--xla_gpu_autotune_level=3 could not be tried: exit code -9"
    ):
        xla_flags.is_accepted(f"--{THERE}=3")


@pytest.mark.parametrize(
    "flag", ["xla_gpu_autotune_level=0", "--xla_gpu_autotune_level", "--xla_a=1 --xla_b=1", ""]
)
def test_what_is_not_one_flag_with_a_value_is_refused(flag):
    with pytest.raises(ValueError, match="flag="):
        xla_flags.is_accepted(flag)


def test_only_accepted_flags_are_set_and_the_others_are_reported(fresh):
    report = xla_flags.set_flags(GONE, THERE)
    assert report == xla_flags.Report(accepted=(THERE,), refused=(GONE,))
    assert os.environ["XLA_FLAGS"] == f"--{THERE}=0"


def test_flags_of_the_user_stay(fresh, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/tmp/dump --{THERE}=2")
    xla_flags.set_flags(THERE, "xla_gpu_triton_gemm_any")
    assert (
        os.environ["XLA_FLAGS"]
        == f"--xla_dump_to=/tmp/dump --{THERE}=2 --xla_gpu_triton_gemm_any=false"
    )


def test_a_flag_that_the_user_turned_on_without_a_value_stays_too(fresh, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_triton_gemm_any")
    xla_flags.set_flags("xla_gpu_triton_gemm_any")
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_triton_gemm_any"


def test_an_unknown_name_is_refused_before_anything_is_set(fresh):
    with pytest.raises(ValueError, match="name='xla_gpu_go_faster' must be one of"):
        xla_flags.set_flags(THERE, "xla_gpu_go_faster")
    assert os.environ["XLA_FLAGS"] == ""


def test_jax_starts_with_the_flags_that_were_set_and_then_takes_no_more():
    code = """
from course_lib.measure import virtual
from course_lib import xla_flags
flags = "xla_gpu_enable_async_collectives", "xla_force_host_platform_device_count"
print(xla_flags.set_flags(*flags).refused)
import jax
print(len(jax.devices()))
try:
    xla_flags.set_flags("xla_gpu_autotune_level")
except RuntimeError as error:
    print(error)
"""
    environment = {
        **os.environ,
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    refused, count, too_late = run.stdout.splitlines()
    assert (refused, count) == ("('xla_gpu_enable_async_collectives',)", "8")
    assert "restart Python" in too_late


def test_a_product_is_of_the_numbers_that_lie_there_now():
    """JAX 0.7.2 as it is fails here: it packs a right operand once for each address."""
    product, x = jax.jit(lambda w, x: x @ w), jnp.ones((512, 512))
    for i in range(20):
        w = y = None  # freed, so that the next ones may lie where these lay
        w = jnp.full((512, 128), float(i))
        y = product(w, x)
        assert float(y[0, 0]) == 512 * i


@pytest.fixture
def old(fresh, monkeypatch):
    monkeypatch.setattr(xla_flags, "_jaxlib_version", lambda: "0.8.1")


@pytest.mark.parametrize("version", ["0.8.2", "0.10.2", "0.8.2rc1", "1.0.0.dev1", "0.12.0.1"])
def test_a_newer_jax_gets_no_flag(fresh, monkeypatch, version):
    monkeypatch.setattr(xla_flags, "_jaxlib_version", lambda: version)
    xla_flags.keep_products_right()
    assert os.environ["XLA_FLAGS"] == ""


def test_an_old_jax_gets_the_flag_beside_those_of_the_user(old, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/dump")
    xla_flags.keep_products_right()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/dump --xla_cpu_use_xnnpack=false"


def test_what_the_user_says_of_that_flag_stays(old, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_xnnpack=true")
    xla_flags.keep_products_right()
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_use_xnnpack=true"


def test_an_old_jax_that_runs_already_is_warned_of(old, monkeypatch):
    monkeypatch.setattr(xla_flags, "_backend_started", lambda: True)
    with pytest.warns(RuntimeWarning, match="jaxlib 0.8.1 computes wrong products on CPUs"):
        xla_flags.keep_products_right()
    assert os.environ["XLA_FLAGS"] == ""
