"""The game: make a training step fit a GPU, make it small, make it fast.

    from course_lib import lessons
    from course_lib.lessons import game

    lessons.submit(game.first_step)  # does not fit

A submission is a function `make_step(config) -> step`. `submit` checks that its updates are
those of `first_step`, compiles the real step for a GPU that need not be there, and scores it.
In Part III a submission may train with another optimizer, or keep AdamW's moments on the host:

    lessons.submit(make_step, optimizer="lion")
    lessons.submit(make_step, moments="host")

The model is loaded when it is first asked for, and the checks with the first submission.
"""

import importlib
from typing import Any

_ELSEWHERE = {"submit": "submission", "SMALL": "small"}


def __getattr__(name: str) -> Any:
    module = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'model')}")
    if name.startswith("_") or not hasattr(module, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
