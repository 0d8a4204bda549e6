"""Laws of a Colab runtime: its packages keep their versions, and its chip keeps its JAX."""

import fnmatch

import pytest
from packaging.requirements import Requirement

from course_lib.show import colab


def oldest(kind):
    """Returns the oldest version of each package that is allowed on a runtime."""
    asked = [Requirement(line) for line in colab.requirements(kind)]
    return {
        r.name: next((s.version for s in r.specifier if s.operator != "<"), "1") for r in asked
    }


@pytest.mark.parametrize("kind", ["cpu", "gpu", "tpu"])
def test_colabs_packages_keep_their_versions_and_its_jax_where_it_drives_a_chip(kind):
    shipped = [("jax", "0.7.2"), ("jaxlib", "0.7.2"), ("flax", "0.11.2"), ("numpy", "2.1.3")]
    shipped += [("protobuf", "5.29.6"), ("absl_py", "1.4.0"), ("urllib3", "2.5.0")]
    lines = colab.constraints(kind, shipped)
    assert {"numpy==2.1.3", "protobuf==5.29.6"} <= set(lines)
    assert not [line for line in lines if line.startswith(("absl", "urllib3"))]
    assert ("jax==0.7.2" in lines) == ("flax==0.11.2" in lines) == (kind != "cpu")
    jax = [r for r in colab.requirements(kind) if Requirement(r).name in ("jax", "flax")]
    assert bool(jax) == (kind == "cpu")


@pytest.mark.parametrize(
    ("device", "kind"),
    [("/dev/nvidia0", "gpu"), ("/dev/accel0", "tpu"), ("/dev/vfio/0", "tpu"), ("", "cpu")],
)
def test_colabs_runtime_is_told_by_its_chip(device, kind, monkeypatch):
    monkeypatch.delenv("COLAB_TPU_ADDR", raising=False)
    monkeypatch.setattr(
        colab.glob, "glob", lambda pattern: [device] * fnmatch.fnmatch(device, pattern)
    )
    assert colab.runtime() == kind


def test_the_set_up_installs_once_and_again_only_what_is_missing(monkeypatch, capsys):
    have, calls = {}, []

    def version(name):
        if name not in have:
            raise colab.importlib.metadata.PackageNotFoundError
        return have[name]

    def pip(command):
        calls.append(command)
        have.update(oldest("cpu"))
        return 0

    monkeypatch.setattr(colab, "runtime", lambda: "cpu")
    monkeypatch.setattr(colab.importlib.metadata, "version", version)
    monkeypatch.setattr(colab.subprocess, "call", pip)
    monkeypatch.setattr(colab.importlib, "import_module", lambda name: None)
    assert colab.main() == 0 and len(calls) == 1
    assert colab.main() == 0 and len(calls) == 1
    del have["grain"]
    assert colab.missing("cpu") == ["grain"]
    assert colab.main() == 0 and len(calls) == 2
    assert not capsys.readouterr().err


def test_a_set_up_that_fails_says_what_is_missing_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(colab, "runtime", lambda: "cpu")
    monkeypatch.setattr(colab, "missing", lambda kind: ["grain"])
    monkeypatch.setattr(colab.subprocess, "call", lambda command: 1)
    assert colab.main() == 1
    error = capsys.readouterr().err
    assert error.startswith("The set-up is not complete: pip ended with status 1, and grain")

    def broken(name):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(colab, "missing", lambda kind: [])
    monkeypatch.setattr(colab.importlib, "import_module", broken)
    assert colab.main() == 1
    assert "jax cannot be imported (ImportError('undefined symbol'))" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_only_a_package_that_is_too_old_for_the_course_gets_another_version(kind, monkeypatch):
    shipped = oldest(kind) | {"optax": "0.2.4", "pandas": "2.2"}
    monkeypatch.setattr(colab.importlib.metadata, "version", shipped.__getitem__)
    assert [Requirement(line).name for line in colab.missing(kind)] == ["optax"]
    lines = colab.constraints(kind, shipped.items())
    assert {"pandas==2.2", "numpy==2.1.3"} <= set(lines)
    assert not [line for line in lines if line.startswith("optax")]
