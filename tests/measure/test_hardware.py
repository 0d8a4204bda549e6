"""Laws of the table of accelerators."""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import pytest

from course_lib.measure import hardware

ROWS = [hardware.get(name) for name in hardware.names()]
GPUS = [row for row in ROWS if row.platform == "gpu"]
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def device(kind: str) -> jax.Device:
    """Returns a stand-in for a device: only its kind counts."""
    return mock.Mock(spec=jax.Device, device_kind=kind)


def test_the_table_has_the_accelerators_of_the_course_and_refuses_others_by_name():
    names = "t4 l4 a5000 a100-40 a100-80 h100 h200 b200 v5e v5p v6e"
    assert hardware.names() == tuple(names.split())
    with pytest.raises(ValueError, match=r"name='a500' .* a5000"):
        hardware.get("a500")


def test_each_device_kind_is_recognized_as_its_row_and_its_neighbours_are_not():
    for row in ROWS:
        assert all(hardware.recognize(device(kind)) is row for kind in row.device_kinds)
    neighbours = (
        "NVIDIA H100 PCIe",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA RTX A5000 Laptop GPU",
        "NVIDIA L40S",
        "TPU v4",
    )
    assert not any(hardware.recognize(device(kind)) for kind in ("cpu", *neighbours))


@pytest.mark.parametrize("row", GPUS, ids=lambda row: row.name)
def test_the_float32_peak_is_what_lanes_and_clock_give(row):
    # A lane does one multiplication and one addition a cycle. Datasheets round, and some take a
    # clock 2% lower.
    target = row.target
    lanes = target.core_count * target.fpus_per_core
    assert row.peak("float32") == pytest.approx(2 * lanes * target.clock_ghz * 1e9, rel=0.03)


@pytest.mark.parametrize("row", GPUS, ids=lambda row: row.name)
def test_tensor_cores_double_with_each_halving_of_the_format(row):
    # Would be 4 where one figure of a pair was taken with sparsity. Datasheets round to two
    # digits at worst.
    peaks = [row.peak(precision) for precision in ("tensorfloat32", "float16", "float8")]
    pairs = [(wide, narrow) for wide, narrow in itertools.pairwise(peaks) if wide and narrow]
    assert all(narrow / wide == pytest.approx(2, rel=0.03) for wide, narrow in pairs)


@pytest.mark.parametrize("row", GPUS, ids=lambda row: row.name)
def test_tensor_cores_multiply_a_known_number_of_elements_a_cycle(row):
    # Dense multiply-adds a core and cycle with half-precision operands, from NVIDIA's
    # architecture papers. A figure taken with sparsity would be off by 2; the clock that a
    # datasheet takes is up to 10% under the boost clock.
    multiply_adds = {
        (7, 5): 512,
        (8, 0): 1024,
        (8, 6): 512,
        (8, 9): 512,
        (9, 0): 2048,
        (10, 0): 4096,
    }
    target = row.target
    per_cycle = 2 * multiply_adds[target.compute_capability] * target.core_count
    assert row.peak("float16") == pytest.approx(per_cycle * target.clock_ghz * 1e9, rel=0.12)


def test_gpus_with_nvlink_have_a_network_card_each_which_is_an_order_of_magnitude_slower():
    for row in GPUS:
        assert (row.network_bandwidth is not None) == ("NVLink" in row.link)
        if row.network_bandwidth:
            assert 9 <= row.link_bandwidth / row.network_bandwidth <= 18


def test_a_dtype_may_be_spelt_in_any_way_and_may_have_no_unit():
    h100, t4, v5e = (hardware.get(name) for name in ("h100", "t4", "v5e"))
    spellings = ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"))
    assert {h100.peak(dtype) for dtype in spellings} == {989e12}
    eights = ("float8", jnp.float8_e4m3fn, ml_dtypes.float8_e5m2)
    assert {h100.peak(dtype) for dtype in eights} == {1979e12}
    assert t4.peak(jnp.bfloat16) is v5e.peak(jnp.float16) is t4.peak(jnp.float64) is None
    assert h100.peak(jnp.int32) is None
    with pytest.raises(TypeError, match="bf16"):
        h100.peak("bf16")


@each
def test_units_are_bytes_and_seconds(row):
    # A figure in GiB, GB/s or TFLOP/s would be off by a factor of 1e9 or more.
    assert 10 * 2**30 < row.memory_bytes < 200 * 2**30
    assert 2e11 < row.memory_bandwidth < 1e13
    assert 1e10 < row.link_bandwidth < row.memory_bandwidth
    assert row.network_bandwidth is None or 1e10 < row.network_bandwidth < row.link_bandwidth
    assert all(1e12 < peak < 1e16 for peak in row.peak_flops.values())
    assert row.source.startswith("https://") and set(row.peak_flops) <= set(hardware.PRECISIONS)


def test_cores_are_counted_as_xla_counts_them(monkeypatch):
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    assert hardware.cores() >= 1
    monkeypatch.setenv("NPROC", "3")
    assert hardware.cores() == 3
    monkeypatch.setenv("PJRT_NPROC", "5")
    assert hardware.cores() == 5


def test_links_to_the_host_count_one_direction():
    rates = {name: link.bandwidth for name, link in hardware.HOST_LINKS.items()}
    assert rates == {"pcie4": 32e9, "pcie5": 64e9, "nvlink-c2c": 450e9}
    assert rates["pcie4"] == hardware.get("a5000").link_bandwidth  # its link to all others
    with pytest.raises(ValueError, match="name='pcie3' must be a link of the table"):
        hardware.host_link("pcie3")
