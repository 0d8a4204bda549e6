"""One small model, trained with each optimizer at an equal budget: the curves of notebook 17.

    make optimizers

This trains each case at several learning rates, then at the best one with two more seeds, and
writes `optimizer_study.json`, which `recorded()` reads.
"""

import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import configs, optimizers, training
from course_lib.text import data

FILE = pathlib.Path(__file__).with_suffix(".json")
STEPS, EVERY, SEEDS = 250, 10, (0, 1, 2)
FACTOR = math.sqrt(10)  # between two learning rates of the grid
DIVERGED = 99.0  # stands for a loss that is not finite


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, and how it is trained."""

    name: str
    changes: Mapping[str, Any] = dataclasses.field(hash=False)  # of `config.optimizer`
    rate: float  # the middle of the grid of learning rates
    nearest: bool = False  # rounds bfloat16 parameters to the nearest number, not at random


HALF = {"param_dtype": "bfloat16"}
# Weight decay is 0.1 where the optimizer has it.
CASES = (
    Case("AdamW", {"name": "adamw"}, 1e-2),
    Case("AdamW, bf16 moments", {"name": "adamw_bf16"}, 1e-2),
    Case("AdamW, 8-bit moments", {"name": "adamw_8bit"}, 1e-2),
    Case("Lion", {"name": "lion", "b2": 0.99}, 1e-3),
    Case("Muon", {"name": "muon"}, 1e-2),
    Case("Adafactor", {"name": "adafactor", "weight_decay": 0.0}, 1e-1),
    Case("AdamW, bf16 parameters", {"name": "adamw"} | HALF, 1e-2),
    Case("AdamW, bf16 parameters, nearest", {"name": "adamw"} | HALF, 1e-2, nearest=True),
    Case("8-bit AdamW, bf16 parameters", {"name": "adamw_8bit"} | HALF, 1e-2),
    Case("Adafactor, bf16 parameters", {"name": "adafactor", "weight_decay": 0.0} | HALF, 1e-1),
)


def config_of(case: Case, steps: int = STEPS) -> ConfigDict:
    """Returns the configuration of a case: 0.37 million parameters, batches of 4 x 64 tokens,
    a learning rate that falls along a cosine over so many steps.
    """
    config = configs.get("cpu")
    config.model.update(num_layers=2, hidden_size=64, num_heads=2, max_seq_len=64)
    config.optimizer.update(case.changes)
    config.optimizer.update(learning_rate=1.0, warmup_steps=20, total_steps=steps)
    config.data.update(batch_size=4, seq_len=64)
    config.training.steps = steps
    configs.check(config)
    return config


def train(case: Case, rate: float, seed: int = 0, steps: int = STEPS) -> dict[str, Any]:
    """Trains one model; the rate is the highest one, after 20 steps of warm-up. Returns
    "curve", the mean loss of each `EVERY` steps, "validation", the loss on 32,768 tokens at the
    end, in nats per token (`DIVERGED` if not finite), and "seconds".
    """
    start = time.monotonic()
    batches = data.batches(
        data.tokens("train"),
        batch_size=4,
        seq_len=64,
        seed=seed,
        steps=steps,
        vocab_size=data.VOCAB_SIZE,
    )
    init, step, validation_loss = _program(case, steps)
    state, losses = init(jax.random.key(seed), rate), []
    for batch in batches:
        state, loss = step(state, batch, rate)
        losses.append(loss)
    means = np.reshape(jax.device_get(losses), (-1, EVERY)).mean(axis=1)
    return {
        "curve": [_finite(float(loss)) for loss in means],
        "validation": _finite(float(validation_loss(state.params))),
        "seconds": round(time.monotonic() - start, 1),
    }


@functools.cache
def _program(case: Case, steps: int) -> tuple[Callable[..., Any], ...]:
    """Returns `init(rng, rate)`, `step(state, batch, rate)`, `validation_loss(params)`."""
    config = FrozenConfigDict(config_of(case, steps))
    functions = training.functions(config)
    loss_fn = functions.loss_fn
    shape = optimizers.SCHEDULES[config.optimizer.schedule](config.optimizer)

    def optimizer_at(rate: Array) -> optax.GradientTransformation:
        options = ConfigDict(config.optimizer)
        if case.nearest:
            options.param_dtype = "float32"
        optimizer = optimizers.from_config(options, lambda count: rate * shape(count))
        return _rounding_to_nearest(optimizer) if case.nearest else optimizer

    def init(rng: Array, rate: Array) -> training.TrainState:
        state = functions.init(rng)
        return training.init_state(state.params, optimizer_at(rate), state.rng)

    def step(state: training.TrainState, batch: data.Batch, rate: Array) -> Any:
        state, metrics = training.make_train_step(loss_fn, optimizer_at(rate))(state, batch)
        return state, metrics["loss"][0] / metrics["loss"][1]

    def validation_loss(params: Any) -> Array:
        batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *_validation())
        return jax.lax.map(lambda batch: loss_fn(params, batch, None)[0], batches).mean()

    return jax.jit(init), jax.jit(step, donate_argnums=0), jax.jit(validation_loss)


def _rounding_to_nearest(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns an optimizer whose updates of bfloat16 parameters are rounded to the nearest."""

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda params: optimizer.init(wide(params)),
        lambda grads, state, params: optimizer.update(wide(grads), state, wide(params)),
    )


@functools.cache
def _validation() -> list[data.Batch]:
    batches = data.validation_batches(
        data.tokens("validation"), batch_size=32, seq_len=64, vocab_size=data.VOCAB_SIZE
    )
    return list(itertools.islice(batches, 16))


def _finite(loss: float) -> float:
    """Returns the loss with four decimals, or `DIVERGED`, which fits into JSON."""
    return round(loss, 4) if math.isfinite(loss) else DIVERGED


def study(case: Case) -> dict[str, Any]:
    """Trains a case at three learning rates, at more while the best one is at the edge, and at
    the best one with more seeds. Returns "case", "grid" (validation loss by rate, of the first
    seed), the best "rate", and "runs": what `train` returns for each of `SEEDS`.
    """
    tried: dict[int, dict[str, Any]] = {}
    best = 0
    for _ in range(4):
        for step in {best - 1, best, best + 1} - tried.keys():
            tried[step] = train(case, _rate(case, step))
        before, best = best, min(tried, key=lambda step: tried[step]["validation"])
        if best == before:
            break
    rate = _rate(case, best)
    return {
        "case": case.name,
        "grid": {
            f"{_rate(case, step):.1e}": tried[step]["validation"] for step in sorted(tried)
        },
        "rate": rate,
        "runs": [tried[best], *(train(case, rate, seed) for seed in SEEDS[1:])],
    }


def _rate(case: Case, step: int) -> float:
    return float(f"{case.rate * FACTOR**step:.1e}")


def recorded() -> dict[str, Any]:
    """Returns the record: "recorded", a date; "versions"; "steps"; "rows", as `study` returns
    them.
    """
    return json.loads(FILE.read_text(encoding="utf-8"))


def record() -> None:
    """Studies all cases and writes the record."""
    rows = []
    for case in CASES:
        rows.append(study(case))
        finals = [run["validation"] for run in rows[-1]["runs"]]
        print(f"{case.name}: {rows[-1]['grid']}, seeds {finals}", flush=True)
    contents = {
        "recorded": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "optax")},
        "steps": STEPS,
        "rows": rows,
    }
    FILE.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
