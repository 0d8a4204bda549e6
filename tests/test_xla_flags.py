"""Laws of the flags that old versions of JAX need, and profiles on a GPU."""

import os
import pathlib
import re
import subprocess
import sys

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


@pytest.mark.parametrize("version", ["0.8.2", "0.10.2", "0.8.2rc1", "1.0.0.dev1"])
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


@pytest.fixture
def gpu(fresh, monkeypatch):
    """A machine with an NVIDIA GPU, as far as its devices' names say."""
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: path == "/dev/nvidiactl" or exists(path)
    )


def test_profiles_on_a_gpu_get_the_flag_once_beside_those_of_the_user(gpu, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/dump")
    assert not xla_flags.kernels_have_names()
    for _ in range(2):
        xla_flags.name_kernels()
    assert xla_flags.kernels_have_names()
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/dump --xla_gpu_enable_command_buffer="


def test_where_jax_runs_already_its_kernels_cannot_get_names(gpu, monkeypatch):
    monkeypatch.setattr(xla_flags, "_backend_started", lambda: True)
    with pytest.raises(RuntimeError, match="JAX runs already: set XLA_FLAGS=--xla_gpu_enable"):
        xla_flags.name_kernels()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    xla_flags.name_kernels()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_enable_command_buffer=FUSION"


@pytest.mark.skipif(
    any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))), reason="there is a GPU"
)
def test_without_a_gpu_no_flag_is_set(fresh):
    xla_flags.name_kernels()
    assert os.environ["XLA_FLAGS"] == ""


def test_the_compiler_knows_the_flag():
    environ = os.environ | {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


ROOT = pathlib.Path(__file__).parent.parent
REFERENCE = re.search(
    r"^jax==(\S+)", (ROOT / "requirements" / "reference.txt").read_text(), re.M
)[1]


@pytest.mark.skipif(jax.__version__ != REFERENCE, reason=f"the flags are JAX {REFERENCE}'s")
def test_a_flag_exists_unless_the_page_of_flags_says_gone():
    page = (ROOT / "docs" / "xla_flags.md").read_text()
    rows = dict(re.findall(r"^\| `(xla_\w+)` \| (exists|gone) \|", page, re.M))
    files = [
        f for part in ("course_lib", "docs", "notebooks") for f in (ROOT / part).rglob("*")
    ]
    texts = [
        f.read_text() for f in files if f.suffix in (".py", ".md", ".ipynb", ".sh", ".toml")
    ]
    named = set(re.findall(r"\bxla_(?:gpu|cpu|dump|backend|disable)_[a-z]\w+", " ".join(texts)))
    lowered, unknown = jax.jit(lambda x: x).lower(1.0), set()
    for flag in named | rows.keys():
        try:
            lowered.compile({flag: ""})
        except jax.errors.JaxRuntimeError as error:
            unknown |= {flag} if "No such compile option" in str(error) else set()
    assert unknown == {flag for flag, state in rows.items() if state == "gone"}
    assert f"JAX {REFERENCE}" in page
