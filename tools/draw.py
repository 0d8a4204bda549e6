"""Draws the pictures in docs/ that come from recorded tables.

    python tools/draw.py case_study smallest_step

A picture carries a digest of its rows, so that a test can tell whether it is up to date.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from course_lib import measure
from course_lib.lessons import case_study, ladder
from course_lib.measure import hardware
from course_lib.show import figures

DOCS = Path(__file__).parent.parent / "docs"
PUBLISHED, COMPILED = "published, measured on an A5000", "compiled for an A5000, without one"
Rows = list[dict[str, Any]]


def published_cases() -> Rows:
    return [
        {
            "name": row["case"],
            PUBLISHED: row["published_gib"] * measure.GIB,
            COMPILED: row["peak_bytes"],
        }
        for row in case_study.recorded_rows("a5000")
        if row["published_gib"]
    ]


def bars(rows: Rows) -> Figure:
    figure = figures.memory_bars(
        rows,
        values=(PUBLISHED, COMPILED),
        capacity=hardware.get("a5000").memory_bytes,
        title="Peak memory of one training step, 155.9M parameters",
    )
    width, _ = figure.get_size_inches()
    figure.set_size_inches(1.3 * width, 4.6)  # so wide that no label touches the capacity
    return figure


def rungs() -> Rows:
    return [
        {"name": row["case"], "peak": row["bytes"], "seconds": row["seconds"]}
        for row in ladder.table().rows
    ]


def ladder_of(rows: Rows) -> Figure:
    title = "One training step, 155.9M parameters, compiled for an A5000"
    return figures.rungs(rows, title=title, unit="GB")


class Picture(NamedTuple):
    """A picture of recorded rows."""

    rows: Callable[[], Rows]
    draw: Callable[[Rows], Figure]

    def digest(self) -> str:
        """Returns the SHA-256 of the rows."""
        return hashlib.sha256(json.dumps(self.rows()).encode()).hexdigest()


PICTURES = {
    "case_study": Picture(published_cases, bars),
    "smallest_step": Picture(rungs, ladder_of),
}

if __name__ == "__main__":
    figures.use_style()
    for name in sys.argv[1:]:
        picture, path = PICTURES[name], DOCS / f"{name}.png"
        figure = picture.draw(picture.rows())
        figure.savefig(path, metadata={"Description": picture.digest()})
        print(f"drew {path.name}")
