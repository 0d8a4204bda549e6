"""Measures how well the preset `cpu` can be trained in a minute on this CPU.

    python -m benchmarks.minute    prints one line of JSON, in minutes on idle cores;
                                   --out docs/results/benchmarks stores it

Each case is the README's command, `python -m course_lib.train`, with other options. The seconds
are those of the whole process: imports, compilation, steps, validation and checkpoints. The
cases take turns, one for each seed, so that a slow moment of the machine does not fall on one
of them alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import table

GOAL, LIMIT = 4.5, 60  # nats of validation loss per token, in so many seconds
MUON = {"optimizer.name": "muon", "optimizer.learning_rate": 1e-2}
# Changes of the preset, by case.
CASES: dict[str, dict[str, Any]] = {
    "the preset": {},
    "without what is faster on a CPU": {
        "model.flat_products": False,
        "model.attention": "reference",
    },
    "Muon": MUON | {"training.steps": 600, "optimizer.total_steps": 600},
}


def train(changes: dict[str, Any], folder: Path) -> dict[str, float]:
    """Trains the preset with some changes into a new folder, as a process of its own.

    Returns:
      "loss": the validation loss at the end, in nats per token; "seconds": of the process;
      "processor": seconds of all its threads.
    """
    words = []
    for field, value in changes.items():
        text = value if isinstance(value, str) else json.dumps(value)  # true, not True
        words += ["--set", f"{field}={text}"]
    start, used = time.perf_counter(), os.times()
    subprocess.run(
        [sys.executable, "-m", "course_lib.train", "--preset", "cpu", "--run", folder, *words],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    seconds, after = time.perf_counter() - start, os.times()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    [*_, loss] = [line["validation_loss"] for line in lines if "validation_loss" in line]
    processor = sum(after[2:4]) - sum(used[2:4])
    return {"loss": loss, "seconds": seconds, "processor": processor}


def row(case: str, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Returns a row of the table: the medians of a case's runs."""
    loss, seconds, processor = (
        statistics.median(run[name] for run in found)
        for name in ("loss", "seconds", "processor")
    )
    losses = [run["loss"] for run in found]
    return {
        "case": case,
        "steps": CASES[case].get("training.steps", 1000),
        "validation loss (nats)": round(loss, 3),
        "from, to": f"{min(losses):.3f}, {max(losses):.3f}",
        "seconds": round(seconds, 1),
        "processor (s)": round(processor, 1),
        "goal": "met" if loss <= GOAL and seconds <= LIMIT else "missed",
    }


def measure(*, repeats: int = 3, cases: tuple[str, ...] = tuple(CASES)) -> dict[str, Any]:
    """Trains cases in turns."""
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(repeats):
            for number, case in enumerate(cases):
                changes = CASES[case] | {"seed": seed}
                found[case].append(train(changes, Path(folder) / f"{number}-{seed}"))
                print(f"{case}, seed {seed}: {found[case][-1]}", file=sys.stderr)
    notes = (
        f"The preset `cpu` on its shipped corpus; goal: {GOAL} nats of validation loss after"
        f" {LIMIT} s of the whole process. Medians of {repeats} seeds."
    )
    return table.record("minute", [row(case, runs) for case, runs in found.items()], notes)


if __name__ == "__main__":
    table.run(measure)
