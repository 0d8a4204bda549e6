"""Laws of letting faults out."""

import pytest
from slow_cases import slow

from course_lib.lessons import bug_zoo
from course_lib.lessons.check import expert_parallel


def test_outside_of_the_context_nothing_is_changed():
    before = {
        name: getattr(fault.owner, fault.attribute) for name, fault in bug_zoo.FAULTS.items()
    }
    for name, fault in bug_zoo.FAULTS.items():
        with bug_zoo.release(name) as released:
            assert (
                released is fault and getattr(fault.owner, fault.attribute) is not before[name]
            )
        assert getattr(fault.owner, fault.attribute) is before[name]


def test_a_fault_that_is_not_there_cannot_be_released():
    with (
        pytest.raises(ValueError, match="name='hydra' must be one of mean_of_means, "),
        bug_zoo.release("hydra"),
    ):
        pass


GRADIENTS = "mean_of_means mean_for_sum one_layer_late neighbours_logits gradient_of_one_shard"
FOUND_BY = {
    "none": [],
    **dict.fromkeys(GRADIENTS.split(), ["gradient"]),
    "gathered_twice": ["bytes"],
    "norm_of_a_slice": ["update"],
    "shared_key": ["masks"],
}


@pytest.mark.parametrize("fault", [one if one == "none" else slow(one) for one in FOUND_BY])
def test_one_instrument_finds_what_a_suspect_of_notebook_14_has(fault, monkeypatch):
    suspect = "second" if fault == "none" else fault
    monkeypatch.setitem(bug_zoo.SUSPECTS, suspect, fault)
    shown = expert_parallel.shown(suspect)
    wrong = {
        "gradient": max(shown["off"]) > 1e-5,
        "bytes": shown["gathered"] != expert_parallel.shown("second")["gathered"],
        "masks": shown["losses"][0] == shown["losses"][1],
        "update": abs(shown["update"] - 0.1) > 1e-4,
    }
    assert [name for name, is_wrong in wrong.items() if is_wrong] == FOUND_BY[fault]


def test_the_suspects_are_a_step_without_a_fault_and_three_that_differ_in_what_finds_them():
    finders = [FOUND_BY[fault] for fault in bug_zoo.SUSPECTS.values()]
    assert sorted(map(len, finders)) == [0, 1, 1, 1] and len({*map(tuple, finders)}) == 4
