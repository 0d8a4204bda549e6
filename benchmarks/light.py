"""Measures what the lightest optimizer costs in loss, with the preset `cpu`: Adafactor with
bfloat16 parameters that are rounded stochastically, beside AdamW in float32.

    python -m benchmarks.light     prints one line of JSON, in about 20 minutes;
                                   --out docs/results/benchmarks stores it

Each run is the README's command, `python -m course_lib.train`, with other options. Each
optimizer is trained at three learning rates with the first seed, then at the best of them with
the other seeds. Other programs on the machine change the time, not the losses.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import minute, table

FACTOR = math.sqrt(10)
"""Between two learning rates of the grid."""

ADAMW, LIGHT = "AdamW, float32", "Adafactor, bfloat16 parameters"
CASES: dict[str, dict[str, Any]] = {
    ADAMW: {"optimizer.learning_rate": 1e-2},
    LIGHT: {
        "optimizer.name": "adafactor",
        "optimizer.weight_decay": 0.0,
        "optimizer.param_dtype": "bfloat16",
        "optimizer.learning_rate": 1e-1,
    },
}
"""Changes of the preset, by case; the learning rate is the middle of its grid."""


def train(case: str, seeds: int, folder: Path) -> tuple[float, list[float]]:
    """Returns the best learning rate of a case, and its validation losses by seed.

    Args:
      case: one of `CASES`.
      seeds: how many: 0, 1, ...
      folder: for the runs' folders.
    """
    changes = CASES[case]

    def loss(rate: float, seed: int) -> float:
        run = changes | {"optimizer.learning_rate": rate, "seed": seed}
        name = f"{case}-{rate:.4f}-{seed}".replace(" ", "-").replace(",", "")
        found = minute.train(run, folder / name)["loss"]
        print(f"{case}, rate {rate:.4f}, seed {seed}: {found:.4f}", file=sys.stderr)
        return found

    grid = [changes["optimizer.learning_rate"] * factor for factor in (1 / FACTOR, 1, FACTOR)]
    first = {rate: loss(rate, 0) for rate in grid}
    best = min(first, key=first.__getitem__)
    return best, [first[best], *(loss(best, seed) for seed in range(1, seeds))]


def rows(found: dict[str, tuple[float, list[float]]]) -> list[dict[str, Any]]:
    """Returns the rows of the table.

    Args:
      found: the best learning rate and the losses by seed, of each case; AdamW is one of them.
    """
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


def main() -> None:
    """Trains all cases, prints what came out, and stores it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each case at its best rate"
    )
    parser.add_argument("--out", type=Path, help="the folder for light.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {case: train(case, options.seeds, Path(folder)) for case in CASES}
    notes = (
        "The preset `cpu` on its shipped corpus, 1,000 steps. Three learning rates with one"
        f" seed, then means of {options.seeds} seeds at the best of them."
    )
    table.store(table.record("light", rows(found), notes), options.out)


if __name__ == "__main__":
    main()
