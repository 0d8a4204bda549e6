"""Laws of the flag that old versions of JAX need."""

import os

import jax
import jax.numpy as jnp
import pytest

from course_lib import xla_flags


@pytest.fixture
def fresh(monkeypatch):
    """A process in which JAX has not started and no flag is set."""
    monkeypatch.setattr(xla_flags, "_backend_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")


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
