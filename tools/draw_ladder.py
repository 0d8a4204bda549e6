"""Draws docs/smallest_step.png from the recorded ladder of notebook 19.

The picture carries a digest of its rows, so that a test can tell whether it is up to date.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from course_lib.lessons import ladder
from course_lib.show import figures

PICTURE = Path(__file__).parent.parent / "docs" / "smallest_step.png"


def rows() -> list[dict[str, Any]]:
    """Returns one row per rung: its name, its peak in bytes and its seconds."""
    return [
        {"name": row["case"], "peak": row["bytes"], "seconds": row["seconds"]}
        for row in ladder.table().rows
    ]


def digest() -> str:
    """Returns the SHA-256 of the rows."""
    return hashlib.sha256(json.dumps(rows()).encode()).hexdigest()


if __name__ == "__main__":
    figures.use_style()
    title = "One training step, 155.9M parameters, compiled for an A5000"
    figure = figures.rungs(rows(), title=title, unit="GB")
    figure.savefig(PICTURE, metadata={"Description": digest()})
    print(f"drew {PICTURE.name}")
