"""Shapes in place of arrays, on this machine's device or on one that is not there."""

import pytest
from programs import array as array

from course_lib.measure import virtual

NO_VIRTUAL = virtual.why_unavailable()
needs_virtual = pytest.mark.skipif(NO_VIRTUAL is not None, reason=str(NO_VIRTUAL))
A5000 = pytest.param("a5000", marks=needs_virtual)
DEVICES = pytest.mark.parametrize("device", ["here", A5000])


def place(tree, device):
    """Returns a tree's shapes, on this machine's device or on a virtual one."""
    return tree if device == "here" else virtual.abstract(tree, virtual.devices(device)[0])
