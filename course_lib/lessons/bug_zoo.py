"""Faults that many-device code has had. Each can be released for a while, to see its effect.

    with bug_zoo.release("mean_of_means"):
        run = strategies.build(config, grid)    # everything built and traced here has the fault

A falling loss rules no fault out: Adam, for example, hides a wrong scale of the gradient.
Comparing gradients with one device's finds faults, and so does a ledger of the bytes sent;
`tests/lessons/test_faults.py` proves it for each. Only `release` activates them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from course_lib.lessons.faults import FAULTS as FAULTS
from course_lib.lessons.faults import Fault

SUSPECTS = dict(
    first="gathered_twice", second="none", third="gradient_of_one_shard", fourth="shared_key"
)


@contextlib.contextmanager
def release(name: str) -> Iterator[Fault]:
    """Releases a fault for as long as the context lasts; ValueError if `FAULTS` lacks it. Only
    functions traced inside the context have it, and keep it; those that `jax.jit` traced before
    stay right.
    """
    if name not in FAULTS:
        raise ValueError(f"name={name!r} must be one of {', '.join(FAULTS)}")
    fault = FAULTS[name]
    wrong = fault.make(getattr(fault.owner, fault.attribute))
    with mock.patch.object(fault.owner, fault.attribute, wrong):
        yield fault


def suspect(name: str) -> Any:
    """Releases the fault of one of `SUSPECTS`, if it has one, and does not say which."""
    fault = SUSPECTS[name]
    return contextlib.nullcontext() if fault == "none" else release(fault)
