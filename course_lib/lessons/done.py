"""The exercises that a learner has done, in a file beside the game's scoreboard.

The files are in the course's cache folder, or beside `$COURSE_SCOREBOARD`. A test run has a
temporary folder of its own. On Colab, put them on your Drive to keep them for more than a day.
"""

import contextlib
import functools
import json
import os
import pathlib
import tempfile

from course_lib import files
from course_lib.lessons import check

# The modules of `check` in the order of the notebooks; those of one notebook in one line.
NOTEBOOKS = """mixed_precision
rematerialization
gradient_accumulation
buffer_donation
attention transformer
events profiling
collectives
data_parallel buckets
pipeline_parallel pipeline_loss
tensor_parallel
async_tensor_parallel
strategies
context_parallel
expert_parallel
large_vocabulary
flash_attention
optimizer_memory
offload
smallest_step
your_own_model
a_run_that_survives
which_numbers_to_choose
memory_profiling""".splitlines()
FILE = "progress.json"


def path(name: str) -> pathlib.Path:
    """Returns the place of a file, which need not exist."""
    if named := os.environ.get("COURSE_SCOREBOARD"):
        return pathlib.Path(named).expanduser().with_name(name)
    return (_temporary() if "PYTEST_VERSION" in os.environ else files.cache_folder()) / name


@functools.cache
def _temporary() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp(prefix="course_game_"))


def exercises() -> list[str]:
    """Returns the exercises that have been answered right, in the order of the answers."""
    try:
        return list(json.loads(path(FILE).read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or damaged: its exercises are open
        return []


def add(exercise: str) -> None:
    """Remembers an exercise. Where the file cannot be written, nothing is remembered."""
    if exercise not in (before := exercises()):
        with contextlib.suppress(OSError), files.atomic_write(path(FILE)) as file:
            file.write(json.dumps([*before, exercise]).encode())


def table() -> str:
    """Returns a line for each notebook: what is done (✓), what is open (·); and the game's."""
    known, so_far = check.modules(), exercises()
    lines = []
    for number, line in enumerate(NOTEBOOKS, 1):
        names = [name for name, module in known.items() if module in line.split()]
        marks = " ".join(f"{'✓' if name in so_far else '·'} {name}" for name in names)
        lines.append(f"{number:2d}  {marks}")
    from course_lib.lessons.game import scoreboard  # the game loads more of the library

    steps = scoreboard.read()
    reached = [
        goal for goal in ("fits", "small", "fast") if any(getattr(s, goal) for s in steps)
    ]
    lines.append(f"The game: {len(steps)} steps; {', '.join(reached) or 'no target'} reached")
    return "\n".join(lines)
