"""Time of a step, measured where it runs.

Three things make a naive measurement wrong. JAX returns before the device is done, so one waits
for the result. The first call compiles, so that is timed apart. And machines are noisy, so one
takes the median of several, and to compare two functions runs them by turns.
"""

import dataclasses
import importlib
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
    """Seconds of one training step, and of making it ready: tracing and compiling, None for a
    function without jit.
    """

    compile_seconds: float | None


def step_time(
    step: Callable[..., tuple[PyTree, PyTree]],
    state: PyTree,
    batch: PyTree,
    *,
    steps: int = 10,
    warmup: int = 2,
) -> StepTime:
    """Times training steps, each from its call until its results are there.

    Every step gets the state that the one before it returned, as in training. A step that
    donates its state takes the one given here too: afterwards it is gone.

    Args:
      step: `step(state, batch) -> (state, metrics)`, jitted or not. A jitted one is compiled
        here, once.
      state: a state to begin with, on the device.
      batch: a batch; the same in all steps.
      steps: how many are timed.
      warmup: how many run before that.

    Raises:
      ValueError: if there is nothing to time.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(
            f"steps={steps}, warmup={warmup} must be at least 1 and 0: there would be nothing"
            " to time"
        )
    compile_seconds = None
    if hasattr(step, "lower"):
        start = clock.perf_counter()
        step = step.lower(state, batch).compile()
        compile_seconds = clock.perf_counter() - start
    seconds = []
    for _ in range(warmup + steps):
        start = clock.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        seconds.append(clock.perf_counter() - start)
    return StepTime(*_quartiles(seconds[warmup:]), compile_seconds)


def compare(
    functions: Mapping[str, Callable[[], Any]], *, repeats: int = 10, warmup: int = 1
) -> dict[str, Time]:
    """Times functions by turns, so that what slows the machine down for a while slows all of
    them.

    Args:
      functions: name to a function without arguments that returns arrays (`lambda: step(x)`).
      repeats: how often each is called and timed.
      warmup: how often before that; at least 1, or the first call compiles within the
        measurement.

    Raises:
      ValueError: if there is nothing to time, or compilation would be timed.
    """
    if repeats < 1 or warmup < 1:
        raise ValueError(
            f"repeats={repeats}, warmup={warmup} must be at least 1: the first call compiles"
            " the function"
        )
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(warmup + repeats):
        for name, function in functions.items():
            start = clock.perf_counter()
            jax.block_until_ready(function())
            seconds[name].append(clock.perf_counter() - start)
    return {name: Time(*_quartiles(found[warmup:])) for name, found in seconds.items()}


def time(function: Callable[..., Any], *args: Any, repeats: int = 10, warmup: int = 1) -> Time:
    """Times a function of arrays, each call until its results are there; the first `warmup`
    calls are left out.
    """
    return compare({"it": lambda: function(*args)}, repeats=repeats, warmup=warmup)["it"]


def peak_in_own_process(target: str, **kwargs: Any) -> int | None:
    """Runs a function in a Python process of its own and returns the most device memory that
    was in use, in bytes.

    A device counts its peak over the whole life of a process, so each measurement needs a
    process. It is told to reserve no memory ahead (`XLA_PYTHON_CLIENT_PREALLOCATE=false`).
    Start this process in the same way, or set that in `os.environ` before JAX first looks for
    devices, as `notebook.setup` does: else it holds three quarters of the device, and the other
    one has to do with the rest.

    Args:
      target: `"module:function"`. The module is looked for where this process finds its
        modules.
      **kwargs: what the function is called with; numbers, strings, lists and dicts of them.

    Returns:
      None where devices do not count, as on a CPU. Then nothing is run.

    Raises:
      ValueError: if there is no such function.
      RuntimeError: if the other process fails; the message ends with what it wrote.
    """
    module, _, function = target.partition(":")
    if not callable(getattr(importlib.import_module(module), function, None)):
        raise ValueError(
            f"target={target!r} must be 'module:function': there is no such function"
        )
    if jax.local_devices()[0].memory_stats() is None:
        return None
    program = (
        "import importlib, json, sys, jax\nmodule, function, kwargs ="
        " sys.argv[1:]\njax.block_until_ready(getattr(importlib.import_module(module),"
        " function)(**json.loads(kwargs)))\nprint('PEAK',"
        " jax.local_devices()[0].memory_stats()['peak_bytes_in_use'])\n"
    )
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program, module, function, json.dumps(kwargs)],
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
