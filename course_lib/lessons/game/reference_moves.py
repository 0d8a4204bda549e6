"""The reference moves of the game, of all notebooks: recorded, and as one picture."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.lessons.game import model, score
from course_lib.lessons.game.score import Score
from course_lib.measure import hardware, recorded
from course_lib.show import figures


def table(
    gpu: str = "a5000",
    names: Sequence[str] = (),
    compute: Callable[[str], dict[str, Any]] | None = None,
) -> list[Score]:
    """Returns the first step and the recorded moves, in the order of the notebooks. On a "t4"
    they are those of Part I, in float16. `compute` records the row of each of `names`.
    """
    sizes = dataclasses.asdict(model.REAL)
    del sizes["optimizer"]
    rows = recorded.partly_live(
        f"game_{gpu}", compute or _refuse, [], cases=names, sizes=sizes, accelerator=gpu
    ).rows
    return [Score(**{key: row[key] for key in row if key != "case"}) for row in rows]


def _refuse(name: str) -> dict[str, Any]:
    raise ValueError(f"name={name!r} cannot be computed here: run tools/draw_game.py")


def picture(moves: Sequence[Score]) -> Any:
    """Draws moves for one GPU, numbered from 0, the first step."""
    gpu = moves[0].gpu if moves else "a5000"
    return figures.rungs(
        moves,
        limit=score.limit(gpu),
        first=0,
        title=f"One training step on an {hardware.get(gpu).title}",
    )
