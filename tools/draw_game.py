"""Draws the README's picture of the game, docs/game.png, from the recorded reference moves, and
records the same moves in float16 for a T4.

    python tools/draw_game.py                    # from the record
    COURSE_RECORD=1 python tools/draw_game.py    # compiles the moves first: minutes

The moves are folded solutions: of notebooks 1 to 6 and 15 to 19, for a T4 of 1 to 6. The
picture carries a digest of its rows, so that a test can tell whether it is up to date.
"""

import dataclasses
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from course_lib import lessons
from course_lib.lessons import game
from course_lib.lessons.game import reference_moves, score, setups, submission
from course_lib.show import figures

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "game.png"
GPU = "a5000"
LAST_OF_T4 = 6  # the notebook; the levels after it are for GPUs with bfloat16

# A T4 multiplies no bfloat16, and float16 needs a loss scale (notebook 1).
SCALED = """
SCALE = 2.0**15


def value_and_grad(loss):
    def scaled(params, batch):
        value, grads = jax.value_and_grad(lambda params: SCALE * loss(params, batch))(params)
        return value / SCALE, jax.tree.map(lambda g: g / SCALE, grads)

    return scaled
"""


@functools.cache
def solutions() -> dict[int, str]:
    """Returns the program of each move, by the number of its notebook."""
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            for code in re.findall(r"```python\n(.*?)```", "".join(cell["source"]), re.S):
                if cell["cell_type"] == "markdown" and "lessons.submit(" in code:
                    found[int(path.name[:2])] = code
    return found


def moves(gpu: str = GPU) -> dict[str, tuple[Any, setups.Setup]]:
    """Returns the `make_step` and the setup of the first step and of each move, by name. For a
    T4 the moves are in float16, with a loss scale.
    """
    by_name = {"first step": (game.first_step, setups.Setup())}

    def submit(make_step, name, **options):
        by_name[name] = make_step, setups.Setup(**options)

    for number, code in solutions().items():
        if score.half_dtype(gpu) == "float16":
            code = code.replace("bfloat16", "float16")
            code = SCALED + code.replace("jax.value_and_grad(loss)", "value_and_grad(loss)")
        if gpu != "t4" or number <= LAST_OF_T4:
            with mock.patch.object(lessons, "submit", submit):
                exec(compile(code, f"move {number}", "exec"), {"jax": jax})
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
