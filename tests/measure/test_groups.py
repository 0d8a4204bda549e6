"""Laws of the groups in which a collective runs: found in every spelling, and
along the right axes.
"""

import pytest

from course_lib.measure import groups

ROWS = ((0, 1, 2, 3), (4, 5, 6, 7))
COLUMNS = ((0, 4), (1, 5), (2, 6), (3, 7))
SPELLINGS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}": ROWS,
    "replica_groups=[2,4]<=[8], use_global_device_ids=true": ROWS,
    "replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, dimensions={0}": ROWS,
    "replica_groups=mesh['a'=8] {'a':(2)4}": ROWS,  # 8 = 2 x 4
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}": ROWS,
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": COLUMNS,
    "replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}": COLUMNS,
    "replica_groups=mesh['data'=2,'tensor'=4] {'data'}": COLUMNS,
    "replica_groups=mesh['a'=8,'b'=1] {'a':(1)2}": COLUMNS,
    "replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=(0,4,1,5,2,6,3,7) {'c'}": COLUMNS,
    "replica_groups=[2,4]<=[2,2,2]T(1,0,2)": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    # 4 = 2 x 2
    "replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "replica_groups={}, to_apply=%add": (tuple(range(8)),),
    "source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}": ROWS,
    "source_target_pairs={}": (),  # nobody sends
    "source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}": COLUMNS,
}


def mesh(*sizes):
    return dict(zip("abcd", sizes, strict=False))


@pytest.mark.parametrize(("attributes", "expected"), SPELLINGS.items())
def test_every_spelling_gives_the_groups(attributes, expected):
    found = groups.groups(f"channel_id=1, {attributes}, metadata={{}}", devices=8)
    assert {frozenset(group) for group in found} == {frozenset(group) for group in expected}
    assert len(found) == len(expected)


def test_an_unknown_spelling_is_refused():
    with pytest.raises(ValueError, match="must name the groups of devices"):
        groups.groups("channel_id=1, replica_groups=spiral(8), metadata={}", devices=8)


@pytest.mark.parametrize(
    ("members", "sizes", "axes"),
    [
        (ROWS, (2, 4), ("b",)),
        (COLUMNS, (2, 4), ("a",)),
        ((tuple(range(8)),), (2, 4), ("a", "b")),
        (ROWS, (2, 2, 2), ("b", "c")),
        (((0, 1, 4, 5), (2, 3, 6, 7)), (2, 2, 2), ("a", "c")),
        (((6, 2), (4, 0), (7, 3), (1, 5)), (2, 4), ("a",)),  # in any order
        (ROWS, (2, 1, 4), ("c",)),  # along one device, nobody communicates
        (ROWS, (4, 2), ()),  # they fit none
        (((0, 1), (2, 3)), (2, 4), ()),
    ],
)
def test_groups_lie_along_the_axes_of_the_mesh_that_they_vary_over(members, sizes, axes):
    assert groups.axes_of_groups(members, mesh(*sizes)) == axes


def test_a_permutation_lies_along_the_axes_in_which_sources_and_targets_differ():
    ring = tuple((i, (i + 1) % 8) for i in range(8))
    assert groups.axes_of_pairs(((0, 1), (1, 2), (2, 3), (4, 5)), mesh(2, 4)) == ("b",)
    assert groups.axes_of_pairs(((3, 7), (7, 3)), mesh(2, 4)) == ("a",)
    assert groups.axes_of_pairs(ring, mesh(2, 4)) == ("a", "b")
    assert groups.axes_of_pairs(((2, 2),), mesh(2, 4)) == ()


def test_thousands_of_devices_are_grouped_as_eight_are():
    large = {"data": 64, "pipe": 12, "tensor": 8}
    attributes = "replica_groups=mesh['data'=64,'pipe'=12,'tensor'=8] {'pipe'}"
    found = groups.groups(attributes, devices=64 * 12 * 8)
    assert (len(found), found[0]) == (64 * 8, tuple(range(0, 12 * 8, 8)))
    assert groups.axes_of_groups(found, large) == ("pipe",)
