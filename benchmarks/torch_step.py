"""Measures the training step against the same model in PyTorch, on the CPU of this machine.

    pip install torch==2.13.0          the course itself does not need it
    python -m benchmarks.torch_step --out docs/results/benchmarks

PyTorch may be installed for another Python, with the course's packages beside it:

    python -m benchmarks.torch_step --torch-python .venv-py311/bin/python

Before anything is timed, PyTorch gets the library's initial parameters, and gradients and the
losses of the next steps have to agree. Each case is a process of its own that trains on while
the others wait, a few steps in turn, so that a slow moment of the machine slows all of them.
Ratios are taken within a round, and seconds of the processor stand beside those of the clock:
under other load they say more, though a thread of PyTorch that waits for another one uses them
up too.
"""

import contextlib
import importlib
import importlib.metadata
import multiprocessing.connection
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks import table
from course_lib import configs, optimizers, training
from course_lib.text.data import Batch

# glibc then keeps what a step frees, as `measure.environment.keep_memory` makes it do.
KEEP = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
LIKE_EAGER, LIKE_DROPOUT = "PyTorch, eager", "PyTorch, eager, dropout 0.1"
DROPOUT = {"model.dropout_rate": 0.1}
# By PyTorch or the library, with which changes of the model, and whether the process keeps its
# memory.
CASES: dict[str, dict[str, Any]] = {
    LIKE_EAGER: {"by": "eager"},
    "PyTorch, compiled": {"by": "compiled"},
    "this library": {},
    "without the three options": {
        "keep": False,
        "changes": {"model.flat_products": False, "model.attention": "reference"},
    },
    "memory returned after each step": {"keep": False},
    "without flat products": {"changes": {"model.flat_products": False}},
    "attention reference": {"changes": {"model.attention": "reference"}},
    "attention xla": {"changes": {"model.attention": "xla"}},
    "scanned layers": {"changes": {"model.scan_layers": True}},
    LIKE_DROPOUT: {"by": "eager", "changes": DROPOUT},
    "this library, dropout 0.1": {"changes": DROPOUT},
}
CHECKED_STEPS = 5


def model_of_6m() -> ConfigDict:
    """Returns the preset "cpu" with 5.9 million parameters and batches of 8 x 256 tokens, and
    what is fastest on a CPU.
    """
    chosen = configs.get("cpu")
    chosen.model.update(
        num_layers=6, hidden_size=256, num_heads=4, head_dim=64, max_seq_len=256
    )
    chosen.model.update(flat_products=True, attention="blocks")
    chosen.data.update(batch_size=8, seq_len=256)
    return chosen


class Trainer:
    """The library's run of a configuration, with what `torch_model.Trainer` offers."""

    def __init__(self, chosen: ConfigDict, tokens: np.ndarray):
        run = training.build(chosen)
        weights = np.ones(tokens[:, 1:].shape, np.float32)
        self.batch = jax.device_put(
            Batch(inputs=tokens[:, :-1], labels=tokens[:, 1:], weights=weights)
        )
        self.state, self.train_step = run.init(jax.random.key(chosen.seed)), run.train_step
        self.gradient = jax.grad(lambda params: run.loss_fn(params, self.batch, None)[0])

    def step(self) -> Any:
        """Trains for a step and returns its loss."""
        self.state, metrics = self.train_step(self.state, self.batch)
        total, count = metrics["loss"]
        return total / count

    def parameters(self) -> dict[str, np.ndarray]:
        """Returns the parameters by name, as "block_0/mlp/input_layer/kernel"."""
        return by_name(self.state.params)

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradients by name, each flattened."""
        return {
            name: leaf.flatten()
            for name, leaf in by_name(self.gradient(self.state.params)).items()
        }

    def wait(self) -> None:
        """Returns when all steps are done."""
        jax.block_until_ready(self.state)


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree of dicts by their paths: "block_0/mlp/output_layer/bias"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def serve(pipe: int) -> None:
    """Trains one case, in a process of its own, as it is asked through a pipe, of which this is
    the file descriptor: ("version" | "parameters" | "gradients" | "losses" | "time", the number
    of steps).
    """
    connection = multiprocessing.connection.Connection(pipe)
    case, fields, tokens, given = connection.recv()
    if "by" in case:
        torch_model = importlib.import_module("benchmarks.torch_model")
        trainer: Any = torch_model.Trainer(
            ConfigDict(fields),
            given["params"],
            tokens,
            given["rates"],
            case["by"] == "compiled",
        )
    else:
        trainer = Trainer(ConfigDict(fields), tokens)
    while (asked := connection.recv()) is not None:
        what, steps = asked
        if what == "losses":
            connection.send([float(trainer.step()) for _ in range(steps)])
        elif what == "time":
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(steps):
                trainer.step()
            trainer.wait()
            seconds = time.perf_counter() - clock, time.process_time() - processor
            connection.send(tuple(each / steps for each in seconds))
        elif what == "version":
            connection.send(importlib.metadata.version("torch"))
        else:
            connection.send(getattr(trainer, what)())


@contextlib.contextmanager
def started(
    case: Mapping[str, Any],
    chosen: ConfigDict,
    tokens: np.ndarray,
    given: Mapping[str, Any],
    torch_python: str,
) -> Iterator[Any]:
    """Starts the process of a case, and gives the function to ask it.

    Args:
      case: a value of `CASES`.
      chosen: its configuration.
      tokens: [B L+1], the batch of all steps.
      given: for PyTorch the parameters "params" and the learning "rates" of the steps.
      torch_python: the interpreter that has PyTorch; the library runs in this one.
    """
    python = torch_python if "by" in case else sys.executable
    ours, theirs = multiprocessing.Pipe()
    process = subprocess.Popen(
        [python, "-m", "benchmarks.torch_step", "--serve", str(theirs.fileno())],
        env=os.environ | (KEEP if case.get("keep", True) else {}),
        pass_fds=[theirs.fileno()],
    )
    theirs.close()  # if the process ends, `recv` fails and does not wait
    ours.send((dict(case), chosen.to_dict(), tokens, dict(given)))

    def ask(what: str, steps: int = 0) -> Any:
        ours.send((what, steps))
        return ours.recv()

    try:
        yield ask
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def check_same(library: Any, torch: Any) -> dict[str, float]:
    """Asserts that two processes train the same model: all gradients, then the losses of the
    next steps. Returns the largest difference of a gradient, relative to its norm, and of a
    loss.
    """
    ours, theirs = library("gradients"), torch("gradients")
    assert ours.keys() == theirs.keys()
    # A bias of keys moves all scores of a query alike: its gradient is 0, up to rounding, so it
    # is compared with the others.
    apart = max(
        np.linalg.norm(theirs[name] - ours[name]) / (np.linalg.norm(ours[name]) + 1e-3)
        for name in ours
    )
    losses = [np.array(ask("losses", CHECKED_STEPS)) for ask in (library, torch)]
    of_losses = float(np.abs(losses[1] / losses[0] - 1).max())
    assert apart < 1e-4 and of_losses < 1e-4, (
        f"not the same model: gradients {apart:.1e} apart, losses {of_losses:.1e}"
    )
    assert losses[0][-1] < losses[0][0], f"nothing was learned: {losses[0]}"
    return {"gradients_apart": float(apart), "losses_apart": of_losses}


def rows_of(
    times: Mapping[str, Sequence[tuple[float, float]]], tokens: int
) -> list[dict[str, Any]]:
    """Returns a row for each case: tokens/s and milliseconds per step, medians with quartiles,
    the processor's milliseconds, and how many times faster than PyTorch with the same dropout:
    medians and quartiles over rounds, of ratios within a round.

    Args:
      times: for each case, seconds per step by the clock and by the processor, of each round.
      tokens: how many tokens a step has.
    """
    rows = []
    for case, found in times.items():
        like = times[LIKE_DROPOUT if "dropout" in case else LIKE_EAGER]
        (low, middle, high), (_, processor, _) = (
            statistics.quantiles(seconds, n=4) for seconds in zip(*found, strict=True)
        )
        ratios, by_processor = (
            statistics.quantiles(
                [other[clock] / own[clock] for other, own in zip(like, found, strict=True)], n=4
            )
            for clock in (0, 1)
        )
        rows.append(
            {
                "step": case,
                "tokens/s": round(tokens / middle, 1),
                "ms": round(middle * 1e3, 1),
                "quartiles (ms)": [round(low * 1e3, 1), round(high * 1e3, 1)],
                "processor (ms)": round(processor * 1e3, 1),
                "x PyTorch": round(ratios[1], 3),
                "quartiles": [round(ratios[0], 3), round(ratios[2], 3)],
                "x PyTorch by the processor": round(by_processor[1], 3),
            }
        )
    return rows


def measure(
    *,
    rounds: int = 20,  # turns of each case, at least 2
    steps: int = 2,  # of a turn
    cases: tuple[str, ...] = tuple(CASES),
    torch_python: str = sys.executable,
) -> dict[str, Any]:
    """Checks that the models are the same, and times the cases in turn."""
    if not has_torch(torch_python):
        sys.exit(
            "this comparison needs PyTorch, and the course does not: pip install torch==2.13.0"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes
    jax.config.update("jax_platforms", "cpu")
    like = [LIKE_DROPOUT if "dropout" in case else LIKE_EAGER for case in cases]
    chosen = model_of_6m()
    B, L = chosen.data.batch_size, chosen.data.seq_len
    tokens = np.random.default_rng(0).integers(
        0, chosen.model.vocab_size, (B, L + 1), dtype=np.int32
    )
    schedule = optimizers.SCHEDULES[chosen.optimizer.schedule](chosen.optimizer)
    given: dict[str, Any] = {
        "rates": [float(schedule(step)) for step in range(CHECKED_STEPS + 2 + rounds * steps)]
    }
    with contextlib.ExitStack() as stack:
        asks = {}
        with started({}, chosen, tokens, given, torch_python) as library:
            given["params"] = library("parameters")
            with started({"by": "eager"}, chosen, tokens, given, torch_python) as torch:
                same, version = check_same(library, torch), torch("version")
        for case in dict.fromkeys([*like, *cases]):
            changed = ConfigDict(chosen.to_dict())
            changed.update_from_flattened_dict(CASES[case].get("changes", {}))
            asks[case] = stack.enter_context(
                started(CASES[case], changed, tokens, given, torch_python)
            )
            asks[case]("time", 2)  # compiles
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in asks}
        order, shuffle = list(asks), random.Random(0).shuffle
        for _ in range(rounds):
            # a case does not always come after the same one, whose traces it finds in the
            # caches
            shuffle(order)
            for case in order:
                times[case].append(asks[case]("time", steps))
    notes = (
        "the step of the preset cpu with 6 layers of width 256: float32, AdamW, gradients"
        " clipped, no dropout unless named; as many threads as cores"
    )
    found = table.record(
        "torch_step", rows_of(times, B * L), notes, ("jax", "jaxlib", "flax", "optax")
    )
    found["versions"]["torch"] = version
    parameters = sum(leaf.size for leaf in given["params"].values())
    about = {"parameters": parameters, "batch": [B, L], "rounds": rounds, "steps": steps}
    return found | about | same


def has_torch(python: str) -> bool:
    """Whether an interpreter finds PyTorch."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", find], check=False).returncode == 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]))
    else:
        table.run(measure)
