"""Laws of a floor under a step's time, and of utilization."""

import pytest

from course_lib.measure import Flops, Move, Traffic, attainable_seconds, hardware, mfu, roofline

A5000, T4, V5E = (hardware.get(name) for name in ("a5000", "t4", "v5e"))
NOTHING = Traffic(0, ())


def products(dtype, count, recomputed=0):
    return Flops({dtype: count}, {dtype: recomputed} if recomputed else {})


def test_a_second_of_products_at_the_peak_rate_takes_a_second():
    found = roofline(products("bfloat16", int(A5000.peak("bfloat16"))), NOTHING, A5000)
    assert (found.compute_seconds, found.memory_seconds, found.floor_seconds) == (1.0, 0.0, 1.0)


def test_the_floor_is_the_longer_of_products_and_memory():
    two_seconds = Traffic(int(2 * A5000.memory_bandwidth), ())
    found = roofline(products("bfloat16", int(A5000.peak("bfloat16"))), two_seconds, A5000)
    assert (found.compute_seconds, found.floor_seconds) == (1.0, 2.0)


def test_recomputed_products_take_time_but_are_no_use():
    flops = products(
        "bfloat16", int(A5000.peak("bfloat16")), recomputed=int(A5000.peak("bfloat16")) // 4
    )
    assert roofline(flops, NOTHING, A5000).floor_seconds == 1.0
    assert mfu(flops, 1.0, A5000) == 0.75


def test_attainable_time_adds_products_at_77_percent_and_memory_at_85_percent_of_their_peaks():
    second = int(0.77 * A5000.peak("bfloat16"))
    flops = products("bfloat16", 2 * second, recomputed=second)
    three_seconds = Traffic(int(3 * 0.85 * A5000.memory_bandwidth), ())
    assert attainable_seconds(flops, three_seconds, A5000) == pytest.approx(5.0)


def test_transfers_to_the_host_take_time_only_where_a_link_is_given():
    moves = (Move("copy", "offload", 64 * 10**9, 1, ""), Move("dot", "matmul", 10**9, 1, ""))
    moved = Traffic(0, moves)
    link = hardware.host_link("pcie4")  # 32 GB/s
    nothing = products("bfloat16", 0)
    assert attainable_seconds(nothing, moved, A5000, link) == pytest.approx(2.0)
    assert attainable_seconds(nothing, moved, A5000) == 0


def test_dtypes_add_up_each_at_its_own_rate():
    flops = Flops(
        {"bfloat16": int(A5000.peak("bfloat16")), "float16": int(A5000.peak("float16"))}, {}
    )
    assert roofline(flops, NOTHING, A5000).floor_seconds == 2.0


def test_float32_products_use_tensorfloat32_where_the_accelerator_has_it():
    flops = products("float32", int(A5000.peak("tensorfloat32")))
    assert roofline(flops, NOTHING, A5000).floor_seconds == 1.0
    assert (
        roofline(products("float32", int(T4.peak("float32"))), NOTHING, T4).floor_seconds == 1.0
    )


@pytest.mark.parametrize(("dtype", "accelerator"), [("bfloat16", T4), ("float16", V5E)])
def test_a_dtype_that_the_accelerator_has_no_unit_for_is_refused(dtype, accelerator):
    with pytest.raises(ValueError, match=f"dtype={dtype!r} must be one of"):
        roofline(products(dtype, 1), NOTHING, accelerator)
    with pytest.raises(ValueError, match=f"dtype={dtype!r} must be one of"):
        mfu(products(dtype, 1), 1.0, accelerator)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_step_that_takes_no_time_has_no_utilization(seconds):
    with pytest.raises(ValueError, match=f"seconds={seconds} must be above 0"):
        mfu(products("bfloat16", 1), seconds, A5000)


def test_on_an_unknown_accelerator_there_is_no_utilization():
    assert mfu(products("bfloat16", 1), 1.0, None) is None


def test_a_roofline_calls_itself_a_floor():
    assert "floor, not a forecast" in str(
        roofline(products("bfloat16", 10**12), NOTHING, A5000)
    )


def test_a_tpu_multiplies_float32_as_bfloat16():
    flops = {
        dtype: roofline(products(dtype, 10**12), NOTHING, V5E).compute_seconds
        for dtype in ("float32", "bfloat16")
    }
    assert flops["float32"] == flops["bfloat16"]
