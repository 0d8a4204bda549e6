"""The game: make a training step fit a GPU, make it small, make it fast.

    from course_lib import lessons
    from course_lib.lessons import game

    lessons.submit(game.first_step)  # does not fit

A submission is a function `make_step(config) -> step`. `submit` checks that its updates are
those of `first_step`, compiles the real step for a GPU that need not be there, and scores it.
In Part III a submission may train with another optimizer, or keep AdamW's moments on the host:

    lessons.submit(make_step, optimizer="lion")
    lessons.submit(make_step, moments="host")
"""

# ruff: noqa: F401
from course_lib.lessons.game.model import (
    REAL,
    Config,
    attention,
    block,
    cross_entropy,
    embed,
    first_step,
    init,
    light_block,
    light_embed,
    light_head,
    light_loss,
    loss,
    mlp,
    norm,
)
from course_lib.lessons.game.submission import submit
from course_lib.lessons.game.updates import SMALL
