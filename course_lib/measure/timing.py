"""Measures the time of a step.

A naive measurement goes wrong in three ways. JAX returns before the device is done: wait for
the result. The first call compiles: time it separately. Machines are noisy: take the median
of several calls, and alternate between functions to compare them.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time as clock
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

PyTree = Any

WARMUP = 2  # calls before those that are measured: the first compiles
_ALONE = """
import importlib, json, sys
module, function, kwargs = sys.argv[1:]
result = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
import jax
jax.block_until_ready(result)
print("PEAK", jax.local_devices()[0].memory_stats()["peak_bytes_in_use"])
"""


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of one call: the median and the quartiles of several."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{1e3 * self.median:.4g} ms ({1e3 * self.low:.4g} to {1e3 * self.high:.4g})"


@dataclasses.dataclass(frozen=True)
class StepTime(Time):
    """Seconds of one training step, and of tracing and compiling it (None without jit)."""

    compile_seconds: float | None


def step_time(
    step: Callable[..., tuple[PyTree, PyTree]],
    state: PyTree,
    batch: PyTree,
    *,
    steps: int = 10,
) -> StepTime:
    """Times steps after `WARMUP` others, each from its call until its results are there.

    Every step gets the state that the step before returned, as in training. A step that donates
    its state also overwrites `state`. A jitted one is compiled here, once.
    """
    compile_seconds = None
    if hasattr(step, "lower"):
        start = clock.perf_counter()
        step = step.lower(state, batch).compile()
        compile_seconds = clock.perf_counter() - start
    seconds = []
    for _ in range(WARMUP + steps):
        start = clock.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        seconds.append(clock.perf_counter() - start)
    return StepTime(*_quartiles(seconds[WARMUP:]), compile_seconds)


def compare(
    functions: Mapping[str, Callable[[], Any]], *, repeats: int = 10
) -> dict[str, Time]:
    """Times functions by turns, so that a slow moment of the machine slows all of them. They
    take no arguments, and return arrays (`lambda: step(x)`). `WARMUP` calls come before the
    `repeats`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(WARMUP + repeats):
        for name, function in functions.items():
            start = clock.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(clock.perf_counter() - start)
    return {name: Time(*_quartiles(times[WARMUP:])) for name, times in seconds.items()}


def time(function: Callable[..., Any], *args: Any, repeats: int = 10) -> Time:
    """Times calls of a function of arrays, without the first `WARMUP` ones."""
    return compare({"it": lambda: function(*args)}, repeats=repeats)["it"]


def peak_in_own_process(target: str, **kwargs: Any) -> int | None:
    """Runs `target`, "module:function", with arguments of JSON's types in a new Python process,
    and returns its peak device memory in bytes; None, and runs nothing, where devices do not
    count it, as on a CPU. It reserves no memory ahead; neither must this process:
    `notebook.setup` sets `XLA_PYTHON_CLIENT_PREALLOCATE=false`, before JAX starts.
    """
    if jax.local_devices()[0].memory_stats() is None:
        return None
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, *target.split(":"), json.dumps(kwargs)],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEAK ")]
    if done.returncode or not lines:
        raise RuntimeError(
            f"target={target!r} failed in its own process:\n{done.stderr[-2000:]}"
        )
    return int(lines[-1].removeprefix("PEAK "))


def _quartiles(seconds: list[float]) -> tuple[float, float, float]:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return float(median), float(low), float(high)
