"""Measures what checkpoints cost a run: the program's loop with saves, against it without.

    python -m benchmarks.checkpoint --preset cpu    prints one line of JSON;
                                                    --out docs/results/benchmarks stores it

Two kinds of run take turns: one saves `--every` few steps, the other at its end only. Between
two lines of metrics both do the same steps, and one of them a save besides. The difference is
the cost of a save: the time in `save`, the wait for the steps before it, and the time that
writing takes from the steps beside it. This cost does not depend on the interval, so the
overhead follows for any of `--intervals`. `--folder` is on the disk to measure; by default that
of temporary files.
"""

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

GOAL = 0.03  # the largest share of a run's time that saving may take


def summary(
    plain: Sequence[float], saving: Sequence[float], steps: int, intervals: Sequence[int]
) -> dict[str, Any]:
    """Returns the cost of a save, as a row of the table.

    Args:
      plain: seconds between two lines without a save, several times.
      saving: the same with one save, in the same order.
      steps: steps between two lines.
      intervals: numbers of steps between two saves, for which to compute the overhead.
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
    """Gives two lists that grow during a run: wall and CPU seconds at each line of times, and
    the seconds that each `save` blocked.
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


def measure(
    *,
    preset: str = "cpu",
    every: int = 40,  # the steps must take longer than writing a checkpoint
    saves: int = 5,  # per run, besides the one at its end
    repeats: int = 4,  # runs of each kind, after one that compiles
    intervals: tuple[int, ...] = (50, 100, 250, 500),
    folder: str = "",
) -> dict[str, Any]:
    """Measures a preset on this machine's first device."""
    config = settings.complete(configs.get(preset))
    config.training.steps = every * (saves + 1)
    config.optimizer.total_steps = max(config.optimizer.total_steps, config.training.steps)
    never = config.training.steps + 1
    config.run.update(log_every=every, validate_every=never, validation_batches=1)
    config.run.update(sample_every=never, sample_tokens=0)
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    blocked = []
    devices = jax.devices()[:1]
    built = loop.build(config, devices)
    with (
        tempfile.TemporaryDirectory(dir=folder or None) as runs,
        mock.patch.object(loop, "build", lambda *args: built),  # compiled once
    ):
        for repeat, with_saves in itertools.product(range(1 + repeats), (False, True)):
            config.run.checkpoint_every = every if with_saves else never
            with clocks() as (lines, blocks):
                loop.train(config, Path(runs, f"{repeat}-{with_saves}"), devices)
            if repeat:  # the first ones compile, and before the first line, steps do
                seconds[with_saves] += [
                    (end[0] - begin[0], end[1] - begin[1])
                    for begin, end in itertools.pairwise(lines)
                ]
                blocked += blocks[:-1]
        newest = max(Path(runs, f"{repeats}-True", "checkpoints").iterdir())
        size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    rows = []
    for clock, name in enumerate(("wall", "CPU")):  # CPU's stay when other programs run
        plain, saving = ([each[clock] for each in seconds[kind]] for kind in (False, True))
        rows.append({"clock": name} | summary(plain, saving, every, intervals))
    notes = (
        f"Preset `{preset}`, checkpoints of {size / 2**20:.1f} MiB. {repeats} runs with a save"
        f" every {every} steps and as many without, in turn. `save` itself blocked for"
        f" {1e3 * statistics.median(blocked):.0f} ms (median)."
    )
    return table.record("checkpoint", rows, notes, ("jax", "jaxlib", "orbax-checkpoint"))


if __name__ == "__main__":
    table.run(measure)
