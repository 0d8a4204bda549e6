"""Draws the README's picture, docs/case_study.png, from the recorded table of the case study.

The picture carries a digest of its rows, so that a test can tell whether it is up to date.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from course_lib import measure
from course_lib.lessons import case_study
from course_lib.measure import hardware
from course_lib.show import figures

PICTURE = Path(__file__).parent.parent / "docs" / "case_study.png"
PUBLISHED, COMPILED = "published, measured on an A5000", "compiled for an A5000, without one"


def rows() -> list[dict[str, Any]]:
    """Returns one pair of bars per published case: a name and two sizes in bytes."""
    return [
        {
            "name": row["case"],
            PUBLISHED: row["published_gib"] * measure.GIB,
            COMPILED: row["peak_bytes"],
        }
        for row in case_study.recorded_rows("a5000")
        if row["published_gib"]
    ]


def digest() -> str:
    """Returns the SHA-256 of the rows."""
    return hashlib.sha256(json.dumps(rows()).encode()).hexdigest()


if __name__ == "__main__":
    figures.use_style()
    figure = figures.memory_bars(
        rows(),
        values=(PUBLISHED, COMPILED),
        capacity=hardware.get("a5000").memory_bytes,
        title="Peak memory of one training step, 155.9M parameters",
    )
    width, _ = figure.get_size_inches()
    figure.set_size_inches(1.3 * width, 4.6)  # so wide that no label touches the capacity
    figure.savefig(PICTURE, metadata={"Description": digest()})
    print(f"drew {PICTURE.name}")
