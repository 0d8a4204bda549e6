"""Measures whether the input keeps up: tokens/s that arrive on the device, against those that
the train step takes.

    python -m benchmarks.input --preset cpu         prints one line of JSON;
                                                    --out docs/results/benchmarks stores it

Three things in turn: batches alone, steps alone (on a batch that lies ready), and steps that
are fed. Batches are made ahead: while others have their turn, some get ready, which would be
had for nothing. So a turn begins with as many that are not timed. The input works in a thread
beside the steps: where there are few cores it takes time from them, which the fed steps show.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks import table
from course_lib import configs, training
from course_lib.text import data, loading

# batches that may lie ready: Grain's 2, the one in its hand, those on the device, and some
READY = 8
NAMES = {"input": "batches alone", "step": "steps alone", "fed": "steps with input"}


def by_turns(
    rounds: Mapping[str, Callable[[], Any]], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Returns the seconds of each turn of so many steps, after one turn that compiles and, in
    each turn, steps that are not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(1 + repeats):
        for name, function in rounds.items():
            for _ in range(READY):
                last = function()
            jax.block_until_ready(last)
            start = time.perf_counter()
            for _ in range(steps):
                last = function()
            jax.block_until_ready(last)
            seconds[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in seconds.items()}


def summary(seconds: Mapping[str, list[float]], tokens: int) -> list[dict[str, Any]]:
    """Returns tokens/s at the median and the quartiles of turns of so many tokens, and the
    median over that of the steps alone: how many times faster batches come than steps take
    them, and what is left of the steps' rate when they are fed.
    """
    rates = {
        name: np.quantile(tokens / np.asarray(each), [0.25, 0.5, 0.75]).tolist()
        for name, each in seconds.items()
    }
    return [
        {
            "measured": NAMES[name],
            "tokens/s": middle,
            "quartiles": [low, high],
            "over steps alone": middle / rates["step"][1],
        }
        for name, (low, middle, high) in rates.items()
    ]


def measure(*, preset: str = "cpu", steps: int = 20, repeats: int = 15) -> dict[str, Any]:
    """Measures a preset on the first device of this machine."""
    chosen = configs.get(preset)
    run = training.build(chosen)
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    B, L = chosen.data.batch_size, chosen.data.seq_len

    def batches():
        made = loading.batches(
            data.tokens("train"),
            seed=chosen.seed,
            batch_size=B,
            seq_len=L,
            vocab_size=chosen.model.vocab_size,
        )
        return loading.DeviceBatches(made, sharding)

    alone, feeding = batches(), batches()
    ready = next(alone)
    state = run.init(jax.random.key(chosen.seed))

    def step(batch):
        nonlocal state
        state, metrics = run.train_step(state, batch)
        return metrics

    rounds = {
        "input": lambda: next(alone),
        "step": lambda: step(ready),
        "fed": lambda: step(next(feeding)),
    }
    rows = summary(by_turns(rounds, steps, repeats), steps * B * L)
    notes = (
        f"Preset `{preset}`, batches of {B} x {L} tokens."
        f" {repeats} rounds of {steps} each, in turn: median and quartiles."
    )
    return table.record("input", rows, notes, ("jax", "jaxlib", "grain", "numpy"))


if __name__ == "__main__":
    table.run(measure)
