"""Measures what checkpoints cost a run: the program's own loop with them, against the same loop
without.

    python -m benchmarks.checkpoint --preset cpu    prints one line of JSON;
                                                    --out docs/results/benchmarks stores it

By turns: a run that saves every so many steps, and one that saves at its end only. Between two
lines of metrics the one has as many steps as the other, and a save besides. The difference is
what a save costs: what `save` itself takes, the wait for the steps before it, and what the
writing beside the steps takes from them. It is the same however many steps lie between two
saves, so the share of time that it is follows for any interval.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks import table
from course_lib import configs
from course_lib.program import loop, observe, settings
from course_lib.program.checkpoints import Checkpoints

GOAL = 0.03
"""The share of a run's time that saving may take."""


def summary(
    plain: Sequence[float], saving: Sequence[float], steps: int, intervals: Sequence[int]
) -> dict[str, Any]:
    """Returns what a save costs, as a row of the table.

    Args:
      plain: seconds of so many steps without a save, several times.
      saving: seconds of as many with one, in the same order.
      steps: how many.
      intervals: steps between two saves, to say the overhead of.

    Returns:
      The median of a step without saves; the median and the quartiles of what steps with a save
      take more than their counterparts without; for each interval that time over that of the
      steps; and the shortest interval whose overhead is within `GOAL`.
    """
    more = [with_save - without for without, with_save in zip(plain, saving, strict=True)]
    step, (low, save, high) = statistics.median(plain) / steps, statistics.quantiles(more, n=4)
    return (
        {"a step (s)": step, "a save (s)": save, "quartiles (s)": [low, high]}
        | {
            f"overhead every {interval} steps": f"{save / (interval * step):.2%}"
            for interval in intervals
        }
        | {f"under {GOAL:.0%} from every": max(1, math.ceil(save / (GOAL * step)))}
    )


class Clocks:
    """Reads the clocks whenever a run writes a line of times, and how long `save` blocks."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, float]] = []
        self.blocked: list[float] = []

    def __enter__(self) -> "Clocks":
        write, save = observe.Speed.write, Checkpoints.save

        def written(speed, step, loss):
            self.lines.append((time.perf_counter(), time.process_time()))
            write(speed, step, loss)

        def saved(checkpoints, *given):
            start = time.perf_counter()
            save(checkpoints, *given)
            self.blocked.append(time.perf_counter() - start)

        self._patches = [
            mock.patch.object(observe.Speed, "write", written),
            mock.patch.object(Checkpoints, "save", saved),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()

    def between_lines(self) -> list[tuple[float, float]]:
        """Returns wall and CPU seconds between lines; before the first one, steps compile."""
        return [
            (b[0] - a[0], b[1] - a[1]) for a, b in zip(self.lines, self.lines[1:], strict=False)
        ]


def measure_here(
    preset: str, every: int, saves: int, repeats: int, intervals: Sequence[int], folder: Path
) -> dict[str, Any]:
    """Measures a preset on this machine's first device.

    Args:
      preset: of `course_lib.configs`.
      every: steps between two saves.
      saves: of a run, besides the one at its end.
      repeats: runs of either kind.
      intervals: as `summary` takes them.
      folder: where runs are written, on the disk that is to be measured.
    """
    whole = settings.whole(configs.get(preset))
    whole.training.steps = every * (saves + 1)
    whole.optimizer.total_steps = max(whole.optimizer.total_steps, whole.training.steps)
    never = whole.training.steps + 1
    whole.run.update(
        log_every=every,
        validate_every=never,
        validation_batches=1,
        sample_every=never,
        sample_tokens=0,
    )
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    blocked = []
    devices = jax.devices()[:1]
    built = loop.build(whole, devices)
    with mock.patch.object(loop, "build", lambda *given: built):  # compiled once
        for repeat in range(1 + repeats):  # the first ones compile
            for with_saves in (False, True):
                whole.run.checkpoint_every = every if with_saves else never
                with Clocks() as clocks:
                    loop.train(whole, folder / f"{repeat}-{with_saves}", devices)
                if repeat:
                    seconds[with_saves] += clocks.between_lines()
                    blocked += clocks.blocked[:-1]
    newest = max((folder / f"{repeats}-True" / "checkpoints").iterdir())
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    rows = []
    # CPU seconds say the same where other programs run beside
    for number, clock in enumerate(("wall", "CPU")):
        plain, saving = (
            [each[number] for each in seconds[with_saves]] for with_saves in (False, True)
        )
        rows.append({"clock": clock} | summary(plain, saving, every, intervals))
    notes = (
        f"Preset `{preset}`, checkpoints of {size / 2**20:.1f} MiB. {repeats} runs with a save"
        f" every {every} steps and as many without, by turns. `save` itself blocked for"
        f" {1e3 * statistics.median(blocked):.0f} ms, the median."
    )
    return table.record("checkpoint", rows, notes, ("jax", "jaxlib", "orbax-checkpoint"))


def main() -> dict[str, Any]:
    """Measures, prints the result as one line of JSON, and returns it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="cpu", choices=configs.PRESETS)
    parser.add_argument(
        "--every",
        type=int,
        default=40,
        help="steps between saves, in more time than it takes to write one",
    )
    parser.add_argument("--saves", type=int, default=5, help="of a run, at least 2")
    parser.add_argument(
        "--repeats", type=int, default=4, help="runs of either kind, after one that compiles"
    )
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=[50, 100, 250, 500],
        help="steps between two saves",
    )
    parser.add_argument(
        "--folder", help="where to write, by default the system's folder for temporary files"
    )
    parser.add_argument("--out", type=Path, help="a folder for checkpoint.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measure_here(
            given.preset, given.every, given.saves, given.repeats, given.intervals, Path(folder)
        )
    table.store(result, given.out)
    return result


if __name__ == "__main__":
    main()
