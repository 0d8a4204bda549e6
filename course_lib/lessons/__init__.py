"""For the course alone: the case study, checks of exercises, the game, and faults of
many-device code. Nothing in the library imports this package.
"""

from typing import Any


def submit(
    make_step: Any,
    gpu: str = "a5000",
    name: str = "",
    optimizer: str = "adamw",
    moments: str = "device",
) -> None:
    """Checks and scores a training step of the game: `course_lib.lessons.game.submit`."""
    from course_lib.lessons import game

    game.submit(make_step, gpu, name, optimizer, moments)


def progress() -> None:
    """Prints the exercises of all notebooks, those that are done with a ✓."""
    from course_lib.lessons import done

    print(done.table())
