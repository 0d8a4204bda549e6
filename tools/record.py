"""Records the studies of `course_lib.lessons`, and draws the pictures of their records.

    python tools/record.py case_study           computes and records every row, and draws it
    python tools/record.py --draw case_study    draws the record that is there

A picture carries a digest of its rows, so that a test can tell whether it is up to date.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from course_lib import measure
from course_lib.lessons import case_study, ladder, optimizer_study
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

    name: str  # of its file
    rows: Callable[[], Rows]
    draw: Callable[[Rows], Figure]

    def digest(self) -> str:
        """Returns the SHA-256 of the rows."""
        return hashlib.sha256(json.dumps(self.rows()).encode()).hexdigest()


STUDIES: dict[str, list[Callable[[], None]]] = {
    "case_study": [
        case_study.LESSON_BY_LESSON.record,
        *(case_study.study(name).record for name in case_study.ACCELERATORS),
    ],
    "ladder": [ladder.STUDY.record],
    "optimizers": [optimizer_study.record],
}
PICTURES = {
    "case_study": Picture("case_study.png", published_cases, bars),
    "ladder": Picture("smallest_step.png", rungs, ladder_of),
}


def main() -> None:
    """Records and draws what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--draw", action="store_true", help="draw only")
    options = parser.parse_args()
    if options.draw and (none := set(options.studies) - PICTURES.keys()):
        parser.error(f"no picture of {', '.join(none)}")
    for name in options.studies:
        for record in STUDIES[name] if not options.draw else ():
            record()
        if picture := PICTURES.get(name):
            figures.use_style()
            figure = picture.draw(picture.rows())
            figure.savefig(DOCS / picture.name, metadata={"Description": picture.digest()})
            print(f"drew {picture.name}")


if __name__ == "__main__":
    main()
