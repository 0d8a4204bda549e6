"""Measures how well the preset `cpu` can be trained in a minute on this CPU.

    python -m benchmarks.minute    prints one line of JSON, in minutes on idle cores;
                                   --out docs/results/benchmarks stores it

Each case is the README's command, `python -m course_lib.train`, with other options. The seconds
are those of the whole process: imports, compilation, steps, validation and checkpoints. The
cases take turns, so that a slow moment of the machine does not fall on one of them alone.
"""

import argparse
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
from benchmarks.torch_step import KEEP

GOAL, LIMIT = 4.5, 60
"""The goal: this validation loss, in nats per token, in this many seconds."""

FAST = {"model.flat_products": True, "model.attention": "blocks"}
CASES: dict[str, dict[str, Any]] = {
    "the preset": {},
    "fast on a CPU": FAST,
    "fast on a CPU, Muon": FAST
    | {
        "optimizer.name": "muon",
        "optimizer.learning_rate": 1e-2,
        "training.steps": 600,
        "optimizer.total_steps": 600,
    },
}
"""Changes of the preset, by case."""


def train(changes: dict[str, Any], folder: Path) -> dict[str, float]:
    """Trains the preset with some changes, as a process of its own.

    Args:
      changes: values of the configuration, by field.
      folder: of the run; must not exist.

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
        env=os.environ | KEEP | {"JAX_PLATFORMS": "cpu"},
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
    middle = {
        name: statistics.median(run[name] for run in found)
        for name in ("loss", "seconds", "processor")
    }
    losses = [run["loss"] for run in found]
    return {
        "case": case,
        "steps": CASES[case].get("training.steps", 1000),
        "validation loss (nats)": round(middle["loss"], 3),
        "from, to": f"{min(losses):.3f}, {max(losses):.3f}",
        "seconds": round(middle["seconds"], 1),
        "processor (s)": round(middle["processor"], 1),
        "goal": "met" if middle["loss"] <= GOAL and middle["seconds"] <= LIMIT else "missed",
    }


def main() -> None:
    """Trains all cases in turns, prints what came out, and stores it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, by seed")
    parser.add_argument("--out", type=Path, help="the folder for minute.json")
    parser.add_argument("cases", nargs="*", help="of all: " + ", ".join(CASES))
    options = parser.parse_args()
    cases = options.cases or list(CASES)
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.repeats):
            for number, case in enumerate(cases):
                changes = CASES[case] | {"seed": seed}
                found[case].append(train(changes, Path(folder) / f"{number}-{seed}"))
                print(f"{case}, seed {seed}: {found[case][-1]}", file=sys.stderr)
    notes = (
        f"The preset `cpu` on its shipped corpus; goal: {GOAL} nats of validation loss after"
        f" {LIMIT} s of the whole process. Medians of {options.repeats} seeds."
    )
    table.store(
        table.record("minute", [row(case, runs) for case, runs in found.items()], notes),
        options.out,
    )


if __name__ == "__main__":
    main()
