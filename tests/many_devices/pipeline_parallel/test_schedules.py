"""Schedules are legal, idle as their formulas say, and keep no more than they say."""

import dataclasses
import itertools
import math

import pytest

from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.many_devices.pipeline_parallel.schedules import Op

STAGES = (1, 2, 3, 8)
MICROBATCHES = (1, 2, 3, 7, 8, 16)


def every(name):
    """Returns (S, M, v) of every schedule of these sizes that is not refused."""
    chunks = {"depth_first": (2, 3), "breadth_first": (1, 2, 3)}.get(name, (1,))
    chunks = (2,) if name in schedules.V_SHAPED else chunks
    for stages, microbatches, v in itertools.product(STAGES, MICROBATCHES, chunks):
        if name != "depth_first" or microbatches % stages == 0:
            yield stages, microbatches, v


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_every_schedule_is_legal_and_devices_idle_as_the_formula_says(name):
    for stages, microbatches, chunks in every(name):
        made = schedules.make(name, stages, microbatches, chunks)
        schedules.check(made)
        split = name in ("zero_bubble", *schedules.V_SHAPED)
        work = (3 if split else 1) * chunks * microbatches
        formula, found = (stages - 1) / (work + stages - 1), schedules.bubble(made)
        least = {"gpipe": 1, "1f1b": 1, "dualpipe_v": 2 * stages}.get(name, stages)
        if microbatches >= least:
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
        "zb_v": lambda s, m, v, d: min(2 * s, 2 * m),
        "dualpipe_v": lambda s, m, v, d: min(2 * s + 1, 2 * m),
    }[name]
    for given in every(name):
        found = schedules.peak_live(schedules.make(name, *given))
        assert found == [formula(*given, device) for device in range(given[0])]


def test_zero_bubble_idles_a_third_of_1f1b_and_keeps_no_more_than_its_first_device():
    ours, other = schedules.zero_bubble(4, 16), schedules.one_f_one_b(4, 16)
    idle = [len(found.table[0]) * schedules.bubble(found) for found in (ours, other)]
    assert 3 * idle[0] == pytest.approx(idle[1])
    assert max(schedules.peak_live(ours)) == max(schedules.peak_live(other))


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_device_of_zb_v_never_idles_between_its_first_and_its_last_op(stages):
    for microbatches in (2 * stages - 1, 2 * stages, 5 * stages):
        made = schedules.zb_v(stages, microbatches)
        for row in made.table:
            busy = [time for time, op in enumerate(row) if op is not None]
            assert busy[-1] + 1 - busy[0] == len(busy) == 6 * microbatches


def test_a_v_takes_as_many_slots_and_activations_as_pytorch_s_order():
    """Slots and most live chunks of PyTorch 2.10's ScheduleZBVZeroBubble and ScheduleDualPipeV,
    with F = B = W = 1 and nothing sent.
    """
    sizes = (2, 4, 25, 4), (4, 8, 51, 8), (4, 16, 99, 8), (8, 16, 103, 16), (8, 32, 199, 16)
    for stages, microbatches, length, live in sizes:
        for name, more in (("zb_v", 0), ("dualpipe_v", 1)):
            made = schedules.make(name, stages, microbatches, 2)
            assert (len(made.table[0]), max(schedules.peak_live(made))) == (length, live + more)


def lasts(made, blocks):
    """Returns the slots until all blocks have ended, those of a device one after the other. The
    results of a block leave at its end.
    """

    def key(device, op):
        return op.microbatch, made.stage(device, op.chunk)

    ends, ready, waiting = {}, [0] * made.stages, [list(each) for each in blocks]
    while any(waiting):
        for device in (device for device, each in enumerate(waiting) if each):
            needs = [
                ends.get(need, math.inf)
                for op in waiting[device][0]
                for need in schedules._needs(op.kind, *key(device, op), 2 * made.stages)
            ]
            if max([0, *needs]) < math.inf:
                block = waiting[device].pop(0)
                start = max([ready[device], *needs])
                ready[device] = start + sum(len(op.kind) for op in block)
                done = {(p, *key(device, op)) for op in block for p in op.kind}
                ends |= dict.fromkeys(done, ready[device])
    return max(ready)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_dualpipe_v_idles_as_deepseek_says_if_a_pair_ends_as_one_block(stages, microbatches):
    """(S-1) (F&B + B - 3W), with F&B = 3, B = 2 and W = 1."""
    made = schedules.dualpipe_v(stages, microbatches)
    single, paired = ([[] for _ in range(stages)] for _ in range(2))
    for device, _, op in schedules.cells(made):
        if op.kind != "-":
            single[device].append([op])
            before = paired[device][-1] if paired[device] else []
            kinds = [*(each.kind for each in before), op.kind]
            if kinds == ["F", "BW"] and before[0].microbatch != op.microbatch:
                before.append(op)
            else:
                paired[device].append([op])
    assert lasts(made, single) - 6 * microbatches == stages - 1
    assert lasts(made, paired) - 6 * microbatches == (stages - 1) * (3 + 2 - 3 * 1)


def test_1f1b_of_two_stages_is_as_drawn_by_hand():
    rows = schedules.one_f_one_b(2, 3).table
    drawn = [" ".join(f"{op.kind}{op.microbatch}" if op else "." for op in row) for row in rows]
    assert drawn == [
        "F0 F1 . . -0 BW0 F2 -1 BW1 . -2 BW2",
        ". F0 -0 BW0 F1 -1 BW1 F2 -2 BW2 . .",
    ]


# the ops in some cells of 1F1B and of the zero bubble, of two stages and two microbatches
BAD = [
    ("1f1b", {(0, 0): None}, r"table\[0\] must have F of microbatch 0, chunk 0 somewhere"),
    ("1f1b", {(0, 1): Op("F", 0)}, r"table\[0\]\[1\].* must not do F a second time"),
    ("1f1b", {(0, 1): Op("F", 2)}, "a microbatch under 2"),
    ("1f1b", {(0, 1): Op("F", 1, 1)}, "a chunk under 1"),
    ("1f1b", {(0, 1): Op("X", 1)}, "must have a kind of"),
    ("1f1b", {(1, 3): Op("B", 0)}, r"table\[1\]\[2\].* must be followed by its BW"),
    ("1f1b", {(1, 2): None}, r"table\[1\]\[3\].* must follow its '-'"),
    ("1f1b", {(1, 7): Op("W", 0)}, r"must not do W a second time: table\[1\]\[3\] did it"),
    # two cells exchanged
    ("zero_bubble", [(1, 0), (1, 1)], r"\[1\]\[0\].*'F'.* must start after table\[0\]\[0\], F"),
    ("zero_bubble", [(0, 2), (0, 3)], r"\[0\]\[2\].*'B'.* must start after table\[1\]\[2\], B"),
    ("zero_bubble", [(1, 2), (1, 1)], r"\[1\]\[1\].*'B'.* must start after table\[1\]\[2\], F"),
    ("zero_bubble", [(0, 3), (0, 4)], r"\[0\]\[3\].*'W'.* must start after table\[0\]\[4\], B"),
]


@pytest.mark.parametrize(("name", "cells", "message"), BAD)
def test_a_table_that_is_wrong_is_refused_with_the_cell(name, cells, message):
    found = schedules.make(name, 2, 2)
    rows = [list(row) for row in found.table]
    if isinstance(cells, list):
        (device, first), (_, second) = cells
        cells = {cells[0]: rows[device][second], cells[1]: rows[device][first]}
    for (device, time), op in cells.items():
        rows[device][time] = op
    with pytest.raises(ValueError, match=message):
        schedules.check(dataclasses.replace(found, table=tuple(map(tuple, rows))))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("dualpipe", 2, 2, 1), "schedule='dualpipe'"),
        (("1f1b", 2, 2, 2), "chunks=2 must be 1"),
        (("zb_v", 2, 2, 1), "chunks=1 must be 2"),
        (("depth_first", 4, 6, 2), "microbatches=6 must be .* take 4 or 8"),
        (("depth_first", 4, 4, 1), "chunks=1 must be at least 2"),
        (("gpipe", 0, 1, 1), "must be at least 1"),
        (("1f1b", 1, 0, 1), "must be at least 1"),
        (("breadth_first", 2, 2, 0), "must be at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        schedules.make(*given)


def test_rows_of_different_lengths_are_refused():
    found = schedules.gpipe(2, 2)
    ragged = dataclasses.replace(found, table=(found.table[0], found.table[1][:-1]))
    with pytest.raises(ValueError, match="table must have 2 rows of one length"):
        schedules.check(ragged)
