"""Measures what the lightest optimizer costs in loss, with the preset `cpu`: Adafactor with
bfloat16 parameters that are rounded stochastically, beside AdamW in float32.

    python -m benchmarks.light     prints one line of JSON, in about 20 minutes;
                                   --out docs/results/benchmarks stores it

Each run is the README's command, `python -m course_lib.train`, with other options. Each
optimizer is trained at three learning rates with the first seed, then at the best of them with
the other seeds. Other programs on the machine change the time, not the losses.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import minute, table

FACTOR = math.sqrt(10)  # between two learning rates of the grid
RATE = "optimizer.learning_rate"
ADAMW, LIGHT = "AdamW, float32", "Adafactor, bfloat16 parameters"
# Changes of the preset, by case; the learning rate is the middle of its grid.
CASES: dict[str, dict[str, Any]] = {
    ADAMW: {RATE: 1e-2},
    LIGHT: {
        "optimizer.name": "adafactor",
        "optimizer.weight_decay": 0.0,
        "optimizer.param_dtype": "bfloat16",
        RATE: 1e-1,
    },
}


def search(
    loss: Callable[[float, int], float], middle: float, seeds: int
) -> tuple[float, list[float]]:
    """Returns the best learning rate of the first seed, and the losses of all seeds there."""
    first = {rate: loss(rate, 0) for rate in (middle / FACTOR, middle, middle * FACTOR)}
    best = min(first, key=first.__getitem__)
    return best, [first[best], *(loss(best, seed) for seed in range(1, seeds))]


def rows(found: dict[str, tuple[float, list[float]]]) -> list[dict[str, Any]]:
    """Returns the rows of the table, from each case's best learning rate and losses by seed."""
    adamw = statistics.mean(found[ADAMW][1])
    return [
        {
            "case": case,
            "best rate": f"{rate:.3g}",
            "validation loss (nats)": round(statistics.mean(losses), 3),
            "from, to": f"{min(losses):.3f}, {max(losses):.3f}",
            "over AdamW": f"{statistics.mean(losses) / adamw - 1:+.2%}",
        }
        for case, (rate, losses) in found.items()
    ]


def measure(*, seeds: int = 3) -> dict[str, Any]:
    """Trains all cases."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (case, changes) in enumerate(CASES.items()):

            def loss(rate: float, seed: int, number=number, changes=changes) -> float:
                run = Path(folder) / f"{number}-{rate:.4f}-{seed}"
                reached = minute.train(changes | {RATE: rate, "seed": seed}, run)["loss"]
                print(f"{run.name}: {reached:.4f}", file=sys.stderr)
                return reached

            found[case] = search(loss, changes[RATE], seeds)
    notes = (
        "The preset `cpu` on its shipped corpus, 1,000 steps. Three learning rates with one"
        f" seed, then means of {seeds} seeds at the best of them."
    )
    return table.record("light", rows(found), notes)


if __name__ == "__main__":
    table.run(measure)
