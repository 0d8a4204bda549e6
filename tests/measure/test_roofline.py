"""Laws of a floor under a step's time, and of utilization."""

import pytest

from course_lib.measure import Flops, Move, Traffic, attainable_seconds, hardware, mfu, roofline

A5000, T4, V5E = (hardware.get(name) for name in ("a5000", "t4", "v5e"))
NOTHING = Traffic(0, ())


def products(dtype, count, recomputed=0):
    return Flops({dtype: int(count)}, {dtype: int(recomputed)} if recomputed else {})


@pytest.mark.parametrize(
    ("flops", "accelerator"),
    [
        (products("bfloat16", A5000.peak("bfloat16")), A5000),
        (
            Flops({dtype: int(A5000.peak(dtype) / 2) for dtype in ("bfloat16", "float16")}, {}),
            A5000,
        ),
        (products("float32", A5000.peak("tensorfloat32")), A5000),  # float32 has faster units
        (products("float32", T4.peak("float32")), T4),
        (products("float32", V5E.peak("bfloat16")), V5E),  # which has nothing else
        (products("float32 (high)", A5000.peak("tensorfloat32")), A5000),
        (products("float32 (highest)", A5000.peak("float32")), A5000),
        (products("tensorfloat32", A5000.peak("tensorfloat32")), A5000),
        (products("float32 (high)", V5E.peak("bfloat16") // 3), V5E),  # in three products
        (products("float32 (highest)", V5E.peak("bfloat16") // 6), V5E),
    ],
)
def test_a_second_of_products_at_the_peak_rate_takes_a_second(flops, accelerator):
    found = roofline(flops, NOTHING, accelerator)
    assert found.compute_seconds == found.floor_seconds == pytest.approx(1.0, rel=1e-12)
    assert found.memory_seconds == 0.0


def test_the_floor_is_the_longer_of_products_and_memory():
    two_seconds = Traffic(int(2 * A5000.memory_bandwidth), ())
    found = roofline(products("bfloat16", A5000.peak("bfloat16")), two_seconds, A5000)
    assert (found.compute_seconds, found.floor_seconds) == (1.0, 2.0)


def test_recomputed_products_take_time_but_are_no_use():
    second = A5000.peak("bfloat16")
    flops = products("bfloat16", second, recomputed=second / 4)
    assert roofline(flops, NOTHING, A5000).floor_seconds == 1.0
    assert mfu(flops, 1.0, A5000) == 0.75 and mfu(flops, 1.0, None) is None
    for seconds in (-1.0, 0.0, float("nan")):
        with pytest.raises(ValueError, match=f"seconds={seconds} must be above 0"):
            mfu(flops, seconds, A5000)


def test_products_that_the_compiler_adds_take_time():
    flops, added = products("bfloat16", A5000.peak("bfloat16")), {"bfloat16": 10**9}
    more = roofline(flops, Traffic(0, (), added), A5000).compute_seconds
    assert more == pytest.approx(1.0 + 10**9 / A5000.peak("bfloat16"), rel=1e-9)
    with pytest.raises(ValueError, match="traffic.added_flops=None must be known"):
        roofline(flops, Traffic(0, (), None), A5000)


def test_attainable_time_adds_products_at_77_percent_and_memory_at_85_percent_of_their_peaks():
    second = int(0.77 * A5000.peak("bfloat16"))
    flops = products("bfloat16", 2 * second, recomputed=second)
    three_seconds = Traffic(int(3 * 0.85 * A5000.memory_bandwidth), ())
    assert attainable_seconds(flops, three_seconds, A5000) == pytest.approx(5.0)


def test_transfers_to_the_host_take_time_only_where_a_link_is_given():
    moves = (Move("copy", "offload", 64 * 10**9, 1, ""), Move("dot", "matmul", 10**9, 1, ""))
    moved, nothing = Traffic(0, moves), products("bfloat16", 0)
    link = hardware.host_link("pcie4")  # 32 GB/s
    assert attainable_seconds(nothing, moved, A5000, link) == pytest.approx(2.0)
    assert attainable_seconds(nothing, moved, A5000) == 0


@pytest.mark.parametrize(
    ("dtype", "accelerator"), [("bfloat16", T4), ("float16", V5E), ("int8", A5000)]
)
def test_a_dtype_without_a_rate_in_the_table_is_refused(dtype, accelerator):
    for ask in (
        lambda f: roofline(f, NOTHING, accelerator),
        lambda f: mfu(f, 1.0, accelerator),
    ):
        with pytest.raises(
            ValueError, match=f"no rate for {dtype} products of {accelerator.title}"
        ):
            ask(products(dtype, 1))
