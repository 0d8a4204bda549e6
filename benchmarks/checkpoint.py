"""Measures what checkpoints cost a run: the program's loop with saves, against it without.

    python -m benchmarks.checkpoint --preset cpu    prints one line of JSON;
                                                    --out docs/results/benchmarks stores it

Two kinds of run take turns: one saves every few steps, the other at its end only. Between two
lines of metrics both do the same steps, and one of them a save besides. The difference is the
cost of a save: the time in `save`, the wait for the steps before it, and the time that writing
takes from the steps beside it. This cost does not depend on the interval, so the overhead
follows for any interval.
"""

import argparse
import contextlib
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks import table
from course_lib import configs
from course_lib.program import loop, observe, settings
from course_lib.program.checkpoints import Checkpoints

GOAL = 0.03
"""The largest share of a run's time that saving may take."""


def summary(
    plain: Sequence[float], saving: Sequence[float], steps: int, intervals: Sequence[int]
) -> dict[str, Any]:
    """Returns the cost of a save, as a row of the table.

    Args:
      plain: seconds between two lines without a save, several times.
      saving: the same with one save, in the same order.
      steps: steps between two lines.
      intervals: numbers of steps between two saves, for which to compute the overhead.

    Returns:
      The median time of a step without saves; the median and the quartiles of the extra time
      of a save; for each interval the overhead, extra time over time of the steps; and the
      shortest interval whose overhead is within `GOAL`.
    """
    more = [with_save - without for without, with_save in zip(plain, saving, strict=True)]
    step, (low, save, high) = statistics.median(plain) / steps, statistics.quantiles(more, n=4)
    return (
        {"per step (s)": step, "per save (s)": save, "quartiles (s)": [low, high]}
        | {
            f"overhead every {interval} steps": f"{save / (interval * step):.2%}"
            for interval in intervals
        }
        | {f"under {GOAL:.0%} from every": max(1, math.ceil(save / (GOAL * step)))}
    )


@contextlib.contextmanager
def clocks() -> Iterator[tuple[list[tuple[float, float]], list[float]]]:
    """Reads the clocks during a run.

    Yields:
      Two lists that grow: wall and CPU seconds at each line of times, and the seconds that each
      `save` blocked.
    """
    lines: list[tuple[float, float]] = []
    blocked: list[float] = []
    write, save = observe.Speed.write, Checkpoints.save

    def timed_write(*args):
        lines.append((time.perf_counter(), time.process_time()))
        write(*args)

    def timed_save(*args):
        start = time.perf_counter()
        save(*args)
        blocked.append(time.perf_counter() - start)

    with (
        mock.patch.object(observe.Speed, "write", timed_write),
        mock.patch.object(Checkpoints, "save", timed_save),
    ):
        yield lines, blocked


def measure_here(
    preset: str, every: int, saves: int, repeats: int, intervals: Sequence[int], folder: Path
) -> dict[str, Any]:
    """Measures a preset on this machine's first device.

    Args:
      preset: of `course_lib.configs`.
      every: steps between two saves.
      saves: saves per run, besides the one at its end.
      repeats: runs of each kind.
      intervals: as `summary` takes them.
      folder: where runs are written, on the disk to measure.
    """
    config = settings.complete(configs.get(preset))
    config.training.steps = every * (saves + 1)
    config.optimizer.total_steps = max(config.optimizer.total_steps, config.training.steps)
    never = config.training.steps + 1
    config.run.update(
        log_every=every,
        validate_every=never,
        validation_batches=1,
        sample_every=never,
        sample_tokens=0,
    )
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    blocked = []
    devices = jax.devices()[:1]
    built = loop.build(config, devices)
    with mock.patch.object(loop, "build", lambda *args: built):  # compiled once
        for repeat in range(1 + repeats):  # the first ones compile
            for with_saves in (False, True):
                config.run.checkpoint_every = every if with_saves else never
                with clocks() as (lines, blocks):
                    loop.train(config, folder / f"{repeat}-{with_saves}", devices)
                if repeat:
                    # before the first line, steps compile
                    seconds[with_saves] += [
                        (end[0] - begin[0], end[1] - begin[1])
                        for begin, end in itertools.pairwise(lines)
                    ]
                    blocked += blocks[:-1]
    newest = max((folder / f"{repeats}-True" / "checkpoints").iterdir())
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    rows = []
    # CPU seconds stay the same when other programs run.
    for number, clock in enumerate(("wall", "CPU")):
        plain, saving = (
            [each[number] for each in seconds[with_saves]] for with_saves in (False, True)
        )
        rows.append({"clock": clock} | summary(plain, saving, every, intervals))
    notes = (
        f"Preset `{preset}`, checkpoints of {size / 2**20:.1f} MiB. {repeats} runs with a save"
        f" every {every} steps and as many without, in turn. `save` itself blocked for"
        f" {1e3 * statistics.median(blocked):.0f} ms (median)."
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
        help="steps between saves; they must take longer than writing a checkpoint",
    )
    parser.add_argument("--saves", type=int, default=5, help="saves per run, at least 2")
    parser.add_argument(
        "--repeats", type=int, default=4, help="runs of each kind, after one that compiles"
    )
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=[50, 100, 250, 500],
        help="steps between two saves, to compute the overhead for",
    )
    parser.add_argument(
        "--folder", help="where to write; default: the system's folder for temporary files"
    )
    parser.add_argument("--out", type=Path, help="a folder for checkpoint.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure_here(
            args.preset, args.every, args.saves, args.repeats, args.intervals, Path(folder)
        )
    table.store(result, args.out)
    return result


if __name__ == "__main__":
    main()
