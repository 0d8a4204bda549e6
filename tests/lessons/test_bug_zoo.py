"""Laws of letting faults out."""

import pytest

from course_lib.lessons import bug_zoo


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
