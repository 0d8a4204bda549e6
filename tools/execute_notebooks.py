"""Runs notebooks from top to bottom, each in a fresh kernel, and stores their outputs.

usage: python tools/execute_notebooks.py [--fresh] [01 02 ...]        no number: all of them

If only outputs of cells tagged nbval-ignore-output changed (times, for example), the file
stays as it is, so a second run leaves nothing to commit; `--fresh` stores those outputs too.
Integers and words that changed in such cells are printed, since no test compares them. A stored
notebook always comes from one complete run. If a notebook fails, its file does not change.
"""

import difflib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import stamp
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = stamp.ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT = ("tags", "jupyter", "cellView")  # of a cell's metadata; the last two fold its code
SECONDS_A_CELL = 600
UNITS = r"\s?(?:%|ns|µs|us|ms|s|min|tokens/s)(?!\w)"  # after what is measured
NUMBER = rf"(?<![\w.,])(?<!e[-+])\d[\d,]*(?![\d,]*(?:\.\d|[^\W\d]|{UNITS}))"
FACT = re.compile(rf"\b[^\W\d]\w*|{NUMBER}")


def run(path: Path, repo: str) -> nbformat.NotebookNode:
    """Runs a notebook, stamped with the project's address, and returns it with its outputs;
    writes nothing.
    """
    nb = nbformat.read(path, 4)
    stamp.stamp_notebook(nb, path.name, repo)
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        nb,
        timeout=SECONDS_A_CELL,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    nb.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(nb.cells):
        cell.id = f"cell-{number:02d}"
        kept = {key: cell.metadata[key] for key in KEPT if cell.metadata.get(key)}
        cell.metadata = nbformat.from_dict(kept)
    nbformat.validate(nb)
    return nb


def measures(cell: nbformat.NotebookNode) -> bool:
    return "nbval-ignore-output" in cell.metadata.get("tags", ())


def facts(nb: nbformat.NotebookNode) -> list:
    """Returns the parts that two runs on one machine have in common: everything except the
    outputs of measurements.
    """
    cells = []
    for cell in nb.cells:
        left_out = {"outputs"} if measures(cell) else set()
        cells.append({key: value for key, value in cell.items() if key not in left_out})
    return [nb.metadata, cells]


def words(cell: nbformat.NotebookNode) -> list[str]:
    """Returns the integers and words of each line that a cell printed."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    return [" ".join(FACT.findall(line)) for line in text.splitlines()]


def unread(before: nbformat.NotebookNode, after: nbformat.NotebookNode) -> Iterator[str]:
    """Yields lines of measurements whose integers or words changed, or their order."""
    stored = {cell.source: cell for cell in before.cells if cell.get("outputs")}
    for cell in filter(measures, after.cells):
        lines = difflib.ndiff(words(stored.get(cell.source, cell)), words(cell))
        yield from (f"{cell.id}: {line}" for line in lines if line[0] in "-+")


def store(path: Path, *, fresh: bool = False) -> str:
    """Runs a notebook and stores it if a fact changed; returns "stored" or "unchanged"."""
    before = nbformat.read(path, 4)
    nb = run(path, stamp.repository())
    for line in unread(before, nb):
        print(line)
    if not fresh and facts(before) == facts(nb):
        return "unchanged"
    path.write_text(nbformat.writes(nb) + "\n")
    return "stored"


def main(arguments: list[str]) -> int:
    """Runs the named notebooks; returns the number of failures."""
    fresh, names = "--fresh" in arguments, [a for a in arguments if a != "--fresh"]
    paths = sorted(path for name in names or [""] for path in FOLDER.glob(f"{name}*.ipynb"))
    if not paths:
        there = sorted(path.name for path in FOLDER.glob("*.ipynb"))
        sys.exit(
            f"NB={' '.join(names)!r} must be how a notebook's name begins: there are {there}"
        )
    if Path("/proc/driver/nvidia/version").exists():
        os.environ["JAX_PLATFORMS"] = "cpu"  # stored outputs are a CPU's
    # Record the rows of virtual devices, for machines without them. COURSE_RECORD=0 leaves the
    # recorded tables as they are, and is quicker.
    os.environ.setdefault("COURSE_RECORD", "1")
    failures = 0
    for path in paths:
        start = time.perf_counter()
        try:
            done = store(path, fresh=fresh)
        except CellExecutionError as error:
            failures, done = failures + 1, f"FAILED, not stored\n{error}"
        print(f"{path.name:32} {time.perf_counter() - start:4.0f} s  {done}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
