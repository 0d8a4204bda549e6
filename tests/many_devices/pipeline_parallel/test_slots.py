"""Buffers of a pipeline: nothing is overwritten before it is read, and none is larger than it
must be.
"""

import dataclasses

import pytest

from course_lib.many_devices.pipeline_parallel import schedules, slots

SCHEDULES = [
    schedules.make(*given)
    for given in (
        ("gpipe", 1, 1, 1),
        ("gpipe", 3, 5, 1),
        ("1f1b", 4, 2, 1),
        ("1f1b", 4, 9, 1),
        ("zero_bubble", 3, 8, 1),
        ("breadth_first", 2, 3, 3),
        ("depth_first", 4, 8, 2),
        ("zb_v", 1, 3, 2),
        ("zb_v", 2, 3, 2),
        ("zb_v", 4, 9, 2),
        ("dualpipe_v", 3, 2, 2),
        ("dualpipe_v", 4, 9, 2),
    )
]


def name(value):
    return f"{value.name}-{value.stages}-{value.microbatches}-{value.chunks}"


def replay(found):
    """Moves names of values through the buffers as the devices do, and yields (op, its stage,
    number of stages, what it finds in each buffer).
    """
    program = slots.program(found)
    stages = found.stages * found.chunks
    buffers = [
        {what: [None] * (size + 1) for what, size in program.sizes.items()} for _ in found.table
    ]
    for time in range(len(found.table[0])):
        sent_on, sent_back = {}, {}
        for device, row in enumerate(slots.executed(found).table):
            column = {
                what: int(values[device, time]) for what, values in program.columns.items()
            }
            op = row[time]
            if op is None:
                assert program.kinds[column["kind"]] == "idle"
                continue
            value = op.microbatch, found.stage(device, op.chunk)
            assert program.kinds[column["kind"]] == op.kind
            assert (column["microbatch"], column["stage"]) == value
            finds = {what: buffers[device][what][column[what]] for what in program.sizes}
            yield op, value[1], stages, finds
            if op.kind == "F":
                buffers[device]["stash"][column["stash"]] = sent_on[device] = value
            if op.kind == "B":
                buffers[device]["passed"][column["passed"]] = sent_back[device] = value
        for device, buffer in enumerate(buffers):
            sent = {"inbox": sent_on, "gradient": sent_back}
            for (what, way), put in program.arrivals.items():
                if (slot := put[device, time]) < program.sizes[what]:
                    buffer[what][slot] = sent[what][(device - way) % found.stages]


@pytest.mark.parametrize("found", SCHEDULES, ids=name)
def test_every_op_finds_its_values(found):
    for op, stage, stages, finds in replay(found):
        if op.kind == "F":
            assert stage == 0 or finds["inbox"] == (op.microbatch, stage - 1)
            continue
        assert finds["stash"] == (op.microbatch, stage)
        if op.kind == "B":
            assert stage == stages - 1 or finds["gradient"] == (op.microbatch, stage + 1)
        else:
            assert finds["passed"] == (op.microbatch, stage)


@pytest.mark.parametrize("found", SCHEDULES, ids=name)
def test_a_backward_in_one_piece_is_executed_as_b_and_then_w_and_stays_legal(found):
    table = slots.executed(found)
    schedules.check(table)
    for device, time, op in schedules.cells(found):
        if op.kind == "BW":
            pieces = [cell.kind for cell in table.table[device][time - 1 : time + 1]]
            assert pieces == ["B", "W"]
    for row in table.table:
        kinds = [op.kind for op in row if op is not None]
        assert {kind: kinds.count(kind) for kind in "FBW"} == slots.taken(found)


@pytest.mark.parametrize("found", SCHEDULES, ids=name)
def test_a_schedule_stashes_what_is_live_and_in_lockstep_takes_as_long_as_its_table(found):
    """Where F, B and W last equally long, neighbours that wait for each other lose nothing."""
    assert slots.program(found).sizes["stash"] == max(schedules.peak_live(found))
    by_table = 3 * found.microbatches * found.chunks / (1 - schedules.bubble(found))
    assert slots.lockstep(found, {"F": 1.0, "B": 1.0, "W": 1.0}) == pytest.approx(by_table)


def test_intervals_share_a_slot_only_where_one_ends_before_the_other_begins():
    found = slots.colour({(0, 0): (0, 3), (1, 0): (3, 5), (2, 0): (4, 6), (3, 0): (6, 6)})
    assert found == {(0, 0): 0, (1, 0): 1, (2, 0): 0, (3, 0): 1}


def test_forwards_alone_follow_each_other_without_pause_and_keep_nothing():
    found = slots.forward(schedules.one_f_one_b(2, 4))
    assert [[op and op.microbatch for op in row] for row in found.table] == [
        [0, 1, 2, 3, None],
        [None, 0, 1, 2, 3],
    ]
    assert set(slots.program(found).sizes.values()) == {1}
    assert slots.taken(slots.forward(schedules.one_f_one_b(2, 4))) == {"F": 4}


def test_a_longer_b_makes_neighbours_wait_in_1f1b_and_not_in_gpipe():
    def ratio(make):
        table, seconds = make(4, 16), {"F": 1.0, "B": 2.0, "W": 1.0}
        by_table = 16 * sum(seconds.values()) / (1 - schedules.bubble(table))
        return slots.lockstep(table, seconds) / by_table

    assert ratio(schedules.gpipe) == pytest.approx(1)
    assert 1.1 < ratio(schedules.one_f_one_b) < 1.6


def test_a_device_waits_for_its_neighbours_only():
    F, row = schedules.Op("F", 0), (None, None)
    found = schedules.Schedule("one", 5, 1, 1, ((F, None), row, row, row, row))
    assert slots.lockstep(found, {"F": 1.0}) == 1
    later = dataclasses.replace(found, table=((F, None), row, (None, F), row, row))
    assert slots.lockstep(later, {"F": 1.0}) == 1  # two columns at once
    beside = dataclasses.replace(found, table=((F, None), (None, F), row, row, row))
    assert slots.lockstep(beside, {"F": 1.0}) == 2
    before = dataclasses.replace(found, table=((None, F), (F, None), row, row, row))
    assert slots.lockstep(before, {"F": 1.0}) == 2
