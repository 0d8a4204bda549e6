"""Buffers of a pipeline: nothing is overwritten before it is read, and none is larger than it
must be.
"""

import dataclasses

import pytest

from course_lib.many_devices.pipeline_parallel import schedules, slots

SCHEDULES = [
    schedules.make(name, stages, microbatches, chunks)
    for name, stages, microbatches, chunks in (
        ("gpipe", 1, 1, 1),
        ("gpipe", 3, 5, 1),
        ("1f1b", 4, 2, 1),
        ("1f1b", 4, 9, 1),
        ("zero_bubble", 4, 3, 1),
        ("zero_bubble", 3, 8, 1),
        ("breadth_first", 2, 3, 3),
        ("breadth_first", 4, 1, 2),
        ("depth_first", 4, 8, 2),
        ("depth_first", 2, 4, 3),
    )
]


def name(value):
    return f"{value.name}-{value.stages}-{value.microbatches}-{value.chunks}"


def replay(found):
    """Moves names of values through the buffers as the devices do, and yields (op, what it
    finds in each buffer).
    """
    program = slots.program(found)
    stages = found.stages * found.chunks
    buffers = [
        {what: [None] * (size + 1) for what, size in program.sizes.items()} for _ in found.table
    ]
    for time in range(len(found.table[0])):
        kept, sent_on, sent_back = {}, {}, {}
        for device, row in enumerate(found.table):
            column = {
                what: int(values[device, time]) for what, values in program.columns.items()
            }
            op = row[time]
            if op is None or op.kind == "-":
                assert program.kinds[column["kind"]] == ("idle" if op is None else "-")
                continue
            stage = found.stage(device, op.chunk)
            assert (program.kinds[column["kind"]], column["microbatch"], column["stage"]) == (
                op.kind,
                op.microbatch,
                stage,
            )
            if op.kind == "F":
                kept[device] = sent_on[device] = op.microbatch, stage
            if "B" in op.kind:
                sent_back[device] = op.microbatch, stage
            yield (
                op,
                stage,
                stages,
                {what: buffers[device][what][column[what]] for what in program.sizes},
            )
        for device, buffer in enumerate(buffers):
            for what, sent, by in (
                ("inbox", sent_on, -1),
                ("stash", kept, 0),
                ("gradient", sent_back, 1),
            ):
                slot = program.columns[f"{what}_put"][device, time]
                if slot < program.sizes[what]:
                    buffer[what][slot] = sent[(device + by) % found.stages]


@pytest.mark.parametrize("found", SCHEDULES, ids=name)
def test_every_op_finds_its_values(found):
    for op, stage, stages, finds in replay(found):
        if op.kind == "F":
            assert stage == 0 or finds["inbox"] == (op.microbatch, stage - 1)
        else:
            assert finds["stash"] == (op.microbatch, stage)
            assert stage == stages - 1 or finds["gradient"] == (op.microbatch, stage + 1)


@pytest.mark.parametrize("found", SCHEDULES, ids=name)
def test_the_stash_has_as_many_slots_as_microbatches_are_live(found):
    assert slots.program(found).sizes["stash"] == max(schedules.peak_live(found))


def test_intervals_share_a_slot_only_where_one_ends_before_the_other_begins():
    found = slots.colour({(0, 0): (0, 3), (1, 0): (3, 5), (2, 0): (4, 6), (3, 0): (6, 6)})
    assert found == {(0, 0): 0, (1, 0): 1, (2, 0): 0, (3, 0): 1}


def test_forwards_alone_follow_each_other_without_pause_and_keep_nothing():
    found = slots.forward(schedules.one_f_one_b(2, 4))
    assert [[op and op.microbatch for op in row] for row in found.table] == [
        [0, 1, 2, 3, None],
        [None, 0, 1, 2, 3],
    ]
    assert slots.program(found).sizes == {"inbox": 1, "stash": 1, "gradient": 1}


@pytest.mark.parametrize("planned", SCHEDULES, ids=name)
def test_all_devices_take_each_branch_as_often(planned):
    kinds, [counts] = slots.program(planned).kinds, slots.taken(planned).values()
    for row in planned.table:
        found = ["idle" if op is None else op.kind for op in row]
        assert [found.count(kind) for kind in kinds] == list(counts)


def test_half_a_schedule_has_no_branches_that_could_be_told_apart():
    with pytest.raises(ValueError, match="must be a whole one"):
        slots.taken(slots.forward(schedules.one_f_one_b(2, 4)))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 16), (12, 36)])
def test_executed_in_lockstep_gpipe_takes_its_table_and_1f1b_much_longer(stages, microbatches):
    """With a backward as long as two forwards, as in the table."""

    def stretched(make):
        table = make(stages, microbatches)
        return slots.lockstep(table, {"F": 1.0, "BW": 2.0}) / (
            3 * microbatches / (1 - schedules.bubble(table))
        )

    assert stretched(schedules.gpipe) == 1
    assert 1.2 < stretched(schedules.one_f_one_b) < 2


def test_a_device_waits_for_its_neighbours_only():
    F, row = schedules.Op("F", 0), (None, None)
    found = schedules.Schedule("one", 5, 1, 1, ((F, None), row, row, row, row))
    assert slots.lockstep(found, {"F": 1.0}) == 1
    later = dataclasses.replace(found, table=((F, None), row, (None, F), row, row))
    assert slots.lockstep(later, {"F": 1.0}) == 1  # two columns at once
    beside = dataclasses.replace(found, table=((F, None), (None, F), row, row, row))
    assert slots.lockstep(beside, {"F": 1.0}) == 2
