"""Differences between two configurations."""

from course_lib.program.differences import differences


def test_differences_name_the_fields():
    saved = {"model": {"num_layers": 3, "remat": ["MLP"], "old": None}, "seed": 1}
    given = {"model": {"num_layers": 6, "remat": ("MLP",), "new": "x"}, "seed": 1}
    assert differences(saved, given) == [
        "model.num_layers: 3 saved, 6 given",
        "model.old: None saved, not given",
        "model.new: not saved, 'x' given",
    ]
    assert differences(saved, saved) == []


def test_an_empty_part_is_no_field():
    assert differences({"model": {}}, {}) == []


def test_the_caller_can_name_the_two():
    assert differences({"a": 1}, {"b": {"c": 2}}, ("here", "there")) == [
        "a: 1 here, not there",
        "b.c: not here, 2 there",
    ]
