"""Faults that many-device code has had, caged: each can be let out for a while, to see what it
does and who notices.

    with bug_zoo.release("mean_of_means"):
        run = strategies.build(config, grid)    # what is built and traced here has the fault

A loss that falls does not rule one out: Adam, for one, hides a wrong scale of the gradient
altogether. What finds them is a comparison of gradients with one device's, and a ledger of what
was sent. `tests/lessons/test_faults.py` proves that every fault here is found so. Nothing but
`release` reaches them, and outside of it the library is as it is written.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from course_lib.lessons.faults import FAULTS as FAULTS
from course_lib.lessons.faults import Fault


@contextlib.contextmanager
def release(name: str) -> Iterator[Fault]:
    """Lets a fault out for as long as the context lasts.

    Only what is built and traced inside has it: a function that `jax.jit` traced before stays
    right, one that it traced inside stays wrong.

    Args:
      name: one of `FAULTS`.

    Raises:
      ValueError: if there is no such fault.
    """
    if name not in FAULTS:
        raise ValueError(f"name={name!r} must be one of {', '.join(FAULTS)}")
    fault = FAULTS[name]
    wrong = fault.make(getattr(fault.owner, fault.attribute))
    with mock.patch.object(fault.owner, fault.attribute, wrong):
        yield fault
