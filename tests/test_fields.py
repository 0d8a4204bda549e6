"""Laws of tables of fields."""

import pytest

from course_lib import fields
from course_lib.fields import FRACTION, Field, at_least

PART = dict(layers=3, decay=0.0, names=(), on=True, how=Field("a", ("a", "b")))
PART |= dict(rate=Field(0.5, FRACTION), keep=Field(3, at_least(2)))
TABLE = dict(part=PART, seed=1)


def checked(**changes):
    config = fields.template(TABLE)
    config.update_from_flattened_dict(changes)
    return fields.check(config, fields.template(TABLE), fields.by_name(TABLE))


def test_defaults_and_values_within_the_rules_pass():
    checked()
    checked(**{"part.decay": 0, "part.rate": 0.0, "part.names": ["x"], "part.how": "b"})


@pytest.mark.parametrize(
    ("field", "value", "must"),
    [
        ("layers", 0, "be positive"),  # as its default is not 0
        ("decay", -1.0, "not be negative"),  # as its default is 0
        ("decay", float("nan"), "be a finite number"),
        ("rate", 1.0, r"be in \[0, 1\)"),
        ("keep", 1, "be at least 2"),
        ("how", "c", "be one of"),
    ],
)
def test_a_value_against_its_rule_is_refused(field, value, must):
    with pytest.raises(ValueError, match=rf"part\.{field}={value!r} must {must}"):
        checked(**{f"part.{field}": value})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (PART | {"layer": 3}, r"part\.layer=3 is no field .* did you mean part\.layers"),
        (dict(layers=3), r"part\.decay must be given"),
        (3, "part=3 must have fields, as"),
        (PART | {"layers": True}, r"part\.layers=True must be of type int"),
        (PART | {"names": [1]}, r"part\.names=\[1\] must hold strings"),
    ],
)
def test_other_names_and_types_are_refused(part, message):
    part = {n: getattr(f, "default", f) for n, f in part.items()} if part != 3 else 3
    with pytest.raises(ValueError, match=message):
        fields.check(dict(part=part, seed=1), fields.template(TABLE))


def test_differences_name_the_fields():
    saved = {"model": {"num_layers": 3, "remat": ["MLP"], "old": None}, "seed": 1, "no": {}}
    given = {"model": {"num_layers": 6, "remat": ("MLP",), "new": "x"}, "seed": 1}
    assert fields.differences(saved, given, ("here", "there")) == [
        "model.num_layers: 3 here, 6 there",
        "model.old: None here, not there",
        "model.new: not here, 'x' there",
    ]
    assert fields.differences(saved, saved) == []
