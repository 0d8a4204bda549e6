"""Measures the training step against the same model in PyTorch, on the CPU of this machine.

    pip install torch==2.13.0          the course itself does not need it
    python -m benchmarks.torch_step    writes docs/results/benchmarks/torch_step.json,
                                       in minutes on two idle cores

PyTorch may be installed for another Python, with the course's packages beside it:

    python -m benchmarks.torch_step --torch-python .venv-py311/bin/python

Before anything is timed, PyTorch gets the library's initial parameters, and gradients and the
losses of the next steps have to agree. Each case is a process of its own that trains on while
the others wait, a few steps in turn, so that a slow moment of the machine slows all of them.
Ratios are taken within a round, and seconds of the processor stand beside those of the clock:
under other load they say more, though a thread of PyTorch that waits for another one uses them
up too.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import multiprocessing.connection
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from course_lib import configs, optimizers
from course_lib.measure import hardware

# glibc then keeps what a step frees, instead of giving it back to the system after each step.
KEEP = {"MALLOC_TRIM_THRESHOLD_": "-1", "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
LIKE_EAGER, LIKE_DROPOUT = "PyTorch, eager", "PyTorch, eager, dropout 0.1"
DROPOUT = {"model.dropout_rate": 0.1}
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
"""Timed cases: by PyTorch or the library, with which changes of the model, and whether the
process keeps its memory.
"""

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
        import jax

        from course_lib import training
        from course_lib.text.data import Batch

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
        import jax

        jax.block_until_ready(self.state)


def by_name(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a tree of dicts by their paths: "block_0/mlp/output_layer/bias"."""
    import jax

    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def serve(pipe: int) -> None:
    """Trains one case, in a process of its own, as it is asked through a pipe: ("version" |
    "parameters" | "gradients" | "losses" | "time", the number of steps).

    Args:
      pipe: its file descriptor.
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
            connection.send(
                (
                    (time.perf_counter() - clock) / steps,
                    (time.process_time() - processor) / steps,
                )
            )
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
      case: of `CASES`.
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
    next steps.

    Returns:
      The largest difference of a gradient, relative to its norm, and of a loss.
    """
    ours, theirs = library("gradients"), torch("gradients")
    assert ours.keys() == theirs.keys()
    # A bias of keys moves all scores of a query alike: its gradient is 0, up to rounding, so it
    # is compared with the others.
    apart = max(
        np.linalg.norm(theirs[name] - ours[name]) / (np.linalg.norm(ours[name]) + 1e-3)
        for name in ours
    )
    losses = (
        np.array(library("losses", CHECKED_STEPS)),
        np.array(torch("losses", CHECKED_STEPS)),
    )
    of_losses = float(np.abs(losses[1] / losses[0] - 1).max())
    assert apart < 1e-4 and of_losses < 1e-4, (
        f"not the same model: gradients {apart:.1e} apart, losses {of_losses:.1e}"
    )
    assert losses[0][-1] < losses[0][0], f"nothing was learned: {losses[0]}"
    return {"gradients_apart": float(apart), "losses_apart": of_losses}


def rows_of(
    times: Mapping[str, Sequence[tuple[float, float]]], tokens: int
) -> list[dict[str, Any]]:
    """Returns a row for each case.

    Args:
      times: for each case, seconds per step by the clock and by the processor, of each round.
      tokens: how many tokens a step has.

    Returns:
      Tokens/s and milliseconds per step, medians with quartiles, the processor's milliseconds,
      and how many times faster than PyTorch with the same dropout: medians and quartiles over
      rounds, of ratios within a round.
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


def measure_here(
    chosen: ConfigDict,
    cases: Sequence[str],
    rounds: int,
    steps: int,
    torch_python: str = sys.executable,
) -> dict[str, Any]:
    """Checks that the models are the same, and times the cases in turn.

    Args:
      chosen: the configuration that the cases change.
      cases: of `CASES`.
      rounds: turns of each.
      steps: of a turn.
      torch_python: the interpreter that has PyTorch.
    """
    size = chosen.data.batch_size, chosen.data.seq_len
    tokens = np.random.default_rng(0).integers(
        0, chosen.model.vocab_size, (size[0], size[1] + 1), dtype=np.int32
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
        for case in cases:
            changed = ConfigDict(chosen.to_dict())
            changed.update_from_flattened_dict(CASES[case].get("changes", {}))
            asks[case] = stack.enter_context(
                started(CASES[case], changed, tokens, given, torch_python)
            )
            asks[case]("time", 2)  # compiles
        times: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
        order, shuffle = list(asks), random.Random(0).shuffle
        for _ in range(rounds):
            # a case does not always come after the same one, whose traces it finds in the
            # caches
            shuffle(order)
            for case in order:
                times[case].append(asks[case]("time", steps))
    parameters = sum(leaf.size for leaf in given["params"].values())
    return (
        {"parameters": parameters, "batch": size, "rounds": rounds, "steps": steps}
        | {"torch": version}
        | same
        | {"rows": rows_of(times, size[0] * size[1])}
    )


def processor() -> str:
    """Returns the name of this machine's processor and how many cores this process may use."""
    cores = hardware.cores()
    with contextlib.suppress(OSError):
        found = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
        return f"{found[1] if found else 'CPU'}, {cores} cores"
    return f"CPU, {cores} cores"


def has_torch(python: str) -> bool:
    """Whether an interpreter finds PyTorch."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", find], check=False).returncode == 0


def main() -> int:
    """Measures, prints a line for each case, writes the results, and returns an exit code: 2
    where there is no PyTorch.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each case, at least 2")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CASES),
        choices=CASES,
        metavar="CASE",
        help=f"of {list(CASES)}",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("docs/results/benchmarks"),
        help="folder",
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, help="the Python that has PyTorch"
    )
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.serve is not None:
        serve(options.serve)
        return 0
    if not has_torch(options.torch_python):
        print(
            "this comparison needs PyTorch, which the course does not: pip install"
            " torch==2.13.0",
            file=sys.stderr,
        )
        return 2
    like = [LIKE_DROPOUT if "dropout" in case else LIKE_EAGER for case in options.cases]
    found = measure_here(
        model_of_6m(),
        list(dict.fromkeys([*like, *options.cases])),
        options.rounds,
        options.steps,
        options.torch_python,
    )
    for row in found["rows"]:
        print(
            f"{row['step']:28}",
            "; ".join(f"{name}: {value}" for name, value in row.items() if name != "step"),
        )
    about = {
        "name": "torch_step",
        "date": datetime.date.today().isoformat(),
        "device": processor(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "optax")
        }
        | {"torch": found.pop("torch")},
        "notes": (
            "the step of the preset cpu with 6 layers of width 256: float32, AdamW, gradients"
            " clipped, no dropout unless named; as many threads as cores"
        ),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "torch_step.json").write_text(json.dumps(about | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
