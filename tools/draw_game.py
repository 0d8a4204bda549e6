"""Draws the README's picture of the game, docs/game.png, from the recorded reference moves, and
records the same moves in float16 for a T4.

    python tools/draw_game.py                    # from the record
    COURSE_RECORD=1 python tools/draw_game.py    # compiles the moves first: minutes

The moves are those of tests/lessons/moves, the folded solutions of notebooks 1 to 6 and 15 to
19. The T4 has those of notebooks 1 to 6. The picture carries a digest of its rows, so that a
test can tell whether it is up to date.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from course_lib import lessons
from course_lib.lessons import game
from course_lib.lessons.game import reference_moves, score, setups, submission
from course_lib.show import figures

ROOT = Path(__file__).parent.parent
MOVES = sorted((ROOT / "tests" / "lessons" / "moves").glob("move_*.py"))
PICTURE = ROOT / "docs" / "game.png"
GPU = "a5000"
LAST_OF_T4 = "move_06"  # the levels after it are for GPUs with bfloat16

# A T4 multiplies no bfloat16, and float16 needs a loss scale (notebook 1).
SCALED = """
SCALE = 2.0**15


def value_and_grad(loss):
    def scaled(params, batch):
        value, grads = jax.value_and_grad(lambda params: SCALE * loss(params, batch))(params)
        return value / SCALE, jax.tree.map(lambda g: g / SCALE, grads)

    return scaled
"""


def source(path: Path, gpu: str) -> str:
    """Returns the program of a move; for a T4, in float16 with a loss scale."""
    text = path.read_text()
    if score.half_dtype(gpu) == "bfloat16":
        return text
    scaled = text.replace("bfloat16", "float16")
    return SCALED + scaled.replace("jax.value_and_grad(loss)", "value_and_grad(loss)")


def moves(gpu: str = GPU) -> dict[str, tuple[Any, setups.Setup]]:
    """Returns the `make_step` and the setup of the first step and of each move, by name."""
    by_name = {"first step": (game.first_step, setups.Setup())}

    def submit(make_step, name, **options):
        by_name[name] = make_step, setups.Setup(**options)

    with mock.patch.object(lessons, "submit", submit):
        for path in MOVES:
            if path.stem <= LAST_OF_T4 or gpu != "t4":
                exec(compile(source(path, gpu), path.name, "exec"), {"jax": jax})
    return by_name


def compiled(name: str, gpu: str = GPU) -> dict[str, Any]:
    """Returns the row of a move, compiled here."""
    make_step, setup = moves(gpu)[name]
    result, _ = score.compile_step(make_step, gpu, name, setup)
    return {"case": name, **dataclasses.asdict(result)}


def scores(gpu: str = GPU) -> list[score.Score]:
    """Returns the recorded moves; compiles and records them under `COURSE_RECORD=1`."""
    return reference_moves.table(gpu, list(moves(gpu)), functools.partial(compiled, gpu=gpu))


def digest(rows: list[score.Score]) -> str:
    """Returns the SHA-256 of some moves."""
    text = json.dumps([dataclasses.asdict(one) for one in rows])
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    figures.use_style()
    rows = scores()
    submission.table(rows, GPU)
    figure = reference_moves.picture(rows)
    figure.savefig(PICTURE, dpi=150, metadata={"Description": digest(rows)})
    print(f"drew {PICTURE.name}")
    submission.table(scores("t4"), "t4")
