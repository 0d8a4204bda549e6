"""Schedules are legal, idle as their formulas say, and keep no more than they say."""

import dataclasses
import itertools

import pytest

from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.many_devices.pipeline_parallel.schedules import Op, Schedule

STAGES = (1, 2, 3, 4, 8)
MICROBATCHES = (1, 2, 3, 4, 7, 8, 16)
CHUNKS = (1, 2, 3)


def every():
    """Returns (name, S, M, v) of every schedule of these sizes that is not refused."""
    for name, stages, microbatches in itertools.product(
        schedules.SCHEDULES, STAGES, MICROBATCHES
    ):
        if name == "depth_first":
            yield from (
                (name, stages, microbatches, v) for v in (2, 3) if microbatches % stages == 0
            )
        else:
            yield from (
                (name, stages, microbatches, v)
                for v in (CHUNKS if name == "breadth_first" else (1,))
            )


def changed(found: Schedule, device: int, time: int, op: Op | None) -> Schedule:
    """Returns the schedule with another op in one cell."""
    rows = [list(row) for row in found.table]
    rows[device][time] = op
    return dataclasses.replace(found, table=tuple(map(tuple, rows)))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_every_schedule_is_legal(name):
    for given in (case for case in every() if case[0] == name):
        schedules.check(schedules.make(*given))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_devices_idle_as_the_formula_says(name):
    for _, stages, microbatches, chunks in (case for case in every() if case[0] == name):
        work = 3 * microbatches if name == "zero_bubble" else chunks * microbatches
        formula = (stages - 1) / (work + stages - 1)
        found = schedules.bubble(schedules.make(name, stages, microbatches, chunks))
        if microbatches >= stages or name in ("gpipe", "1f1b"):
            assert found == pytest.approx(formula)
        else:
            assert found >= formula - 1e-12


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_devices_keep_as_many_microbatches_as_the_formula_says(name):
    formula = {
        "gpipe": lambda s, m, v, d: m,
        "1f1b": lambda s, m, v, d: min(s - d, m),
        "breadth_first": lambda s, m, v, d: v * m,
        "depth_first": lambda s, m, v, d: min(2 * (s - d - 1) + (v - 1) * s + 1, v * m),
        "zero_bubble": lambda s, m, v, d: min(s, m),
    }[name]
    for _, stages, microbatches, chunks in (case for case in every() if case[0] == name):
        found = schedules.peak_live(schedules.make(name, stages, microbatches, chunks))
        assert found == [
            formula(stages, microbatches, chunks, device) for device in range(stages)
        ]


def test_zero_bubble_idles_a_third_of_1f1b_and_keeps_no_more_than_its_first_device():
    ours, other = schedules.zero_bubble(4, 16), schedules.one_f_one_b(4, 16)
    idle = [len(found.table[0]) * schedules.bubble(found) for found in (ours, other)]
    assert 3 * idle[0] == pytest.approx(idle[1])
    assert max(schedules.peak_live(ours)) == max(schedules.peak_live(other))


def test_1f1b_of_two_stages_is_as_drawn_by_hand():
    rows = schedules.one_f_one_b(2, 3).table
    drawn = [" ".join(f"{op.kind}{op.microbatch}" if op else "." for op in row) for row in rows]
    assert drawn == [
        "F0 F1 . . -0 BW0 F2 -1 BW1 . -2 BW2",
        ". F0 -0 BW0 F1 -1 BW1 F2 -2 BW2 . .",
    ]


def test_breadth_first_with_one_chunk_is_gpipe():
    assert schedules.breadth_first(3, 5, 1).table == schedules.gpipe(3, 5).table


def test_a_device_holds_chunks_that_lie_a_ring_apart():
    assert [
        schedules.gpipe(4, 1).stage(device, chunk) for chunk in (0, 1) for device in (0, 3)
    ] == [0, 3, 4, 7]


@pytest.mark.parametrize(
    ("device", "time", "op", "message"),
    [
        (0, 0, None, r"table\[0\] must have F of microbatch 0, chunk 0 somewhere"),
        (
            0,
            1,
            Op("F", 0),
            r"table\[0\]\[1\].* must not do F a second time: table\[0\]\[0\] did it",
        ),
        (0, 1, Op("F", 2), "a microbatch under 2"),
        (0, 1, Op("F", 1, 1), "a chunk under 1"),
        (0, 1, Op("X", 1), "must have a kind of"),
        (1, 3, Op("B", 0), r"table\[1\]\[2\].* must be followed by its BW"),
        (1, 2, None, r"table\[1\]\[3\].* must follow its '-'"),
        (1, 7, Op("W", 0), r"must not do W a second time: table\[1\]\[3\] did it"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_the_cell(device, time, op, message):
    with pytest.raises(ValueError, match=message):
        schedules.check(changed(schedules.one_f_one_b(2, 2), device, time, op))


def swapped(found: Schedule, device: int, first: int, second: int) -> Schedule:
    """Returns the schedule with the contents of two cells exchanged."""
    row = found.table[device]
    return changed(changed(found, device, first, row[second]), device, second, row[first])


@pytest.mark.parametrize(
    ("device", "first", "second", "message"),
    [
        (
            1,
            0,
            1,
            (
                r"table\[1\]\[0\].*'F'.* must start after table\[0\]\[0\], F of microbatch 0 in"
                r" stage 0"
            ),
        ),
        (
            0,
            2,
            3,
            (
                r"table\[0\]\[2\].*'B'.* must start after table\[1\]\[2\], B of microbatch 0 in"
                r" stage 1"
            ),
        ),
        (
            1,
            2,
            1,
            (
                r"table\[1\]\[1\].*'B'.* must start after table\[1\]\[2\], F of microbatch 0 in"
                r" stage 1"
            ),
        ),
        (
            0,
            3,
            4,
            (
                r"table\[0\]\[3\].*'W'.* must start after table\[0\]\[4\], B of microbatch 0 in"
                r" stage 0"
            ),
        ),
    ],
)
def test_an_op_before_what_it_needs_is_refused_with_both_cells(device, first, second, message):
    with pytest.raises(ValueError, match=message):
        schedules.check(swapped(schedules.zero_bubble(2, 2), device, first, second))


def test_rows_of_different_lengths_are_refused():
    found = schedules.gpipe(2, 2)
    with pytest.raises(ValueError, match="table must have 2 rows of one length"):
        schedules.check(dataclasses.replace(found, table=(found.table[0], found.table[1][:-1])))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("dualpipe", 2, 2, 1), "schedule='dualpipe' must be one of gpipe, 1f1b"),
        (("1f1b", 2, 2, 2), "chunks=2 must be 1 for schedule='1f1b'"),
        (
            ("depth_first", 4, 6, 2),
            "microbatches=6 must be a multiple of the 4 stages .* take 4 or 8",
        ),
        (("depth_first", 4, 3, 2), "take 4$"),
        (("depth_first", 4, 4, 1), "chunks=1 must be at least 2"),
        (("gpipe", 0, 1, 1), "must be at least 1"),
        (("1f1b", 1, 0, 1), "must be at least 1"),
        (("breadth_first", 2, 2, 0), "must be at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        schedules.make(*given)
