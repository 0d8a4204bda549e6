"""Laws of a Colab runtime: its packages keep their versions, and its chip keeps its JAX."""

import fnmatch

import pytest
from packaging.requirements import Requirement

from course_lib.show import colab


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
