"""Marks cases of a law that `make test` leaves to `make test-all`."""

import pytest


def slow(*case):
    """Returns a case of `pytest.mark.parametrize` that runs with COURSE_SLOW=1 only."""
    return pytest.param(*case, marks=pytest.mark.slow)
