"""Observes a run: mean metrics, speed, validation, a sample, and a bigram model's loss.

Nothing here changes the train state. Values that follow from the configuration go into the
journal's `metrics.jsonl` and `samples.jsonl`, measured ones into `times.jsonl`.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import tokenizers
from jaxtyping import Integer
from ml_collections import ConfigDict

from course_lib import measure, training
from course_lib.measure import hardware
from course_lib.models import sampling
from course_lib.program import preemption
from course_lib.program.journal import Journal
from course_lib.text import data, loading, ngrams

PyTree = Any
COUNTED = 10_000_000  # the bigram model counts at most this many tokens
# by default a run validates on at most this many tokens; the course's corpus has fewer
VALIDATED = 2**18


def logger(name: str) -> Any:
    """Returns the module of `run.logger`: `wandb`, `trackio`, or None."""
    try:
        return None if name == "none" else importlib.import_module(name)
    except ImportError as error:
        cure = f"pip install {name}, or leave it out, as metrics.jsonl has all numbers"
        raise ValueError(f"run.logger={name!r} cannot be imported ({error}): {cure}") from None


class Tally:
    """Sums of metrics since the last line, in Python's floats, which are stored exactly."""

    def __init__(self, saved: dict[str, Any] | None = None):
        saved = saved or {"sums": {}, "skipped": 0, "in_a_row": 0}
        self.skipped: int = saved["skipped"]
        self.in_a_row: int = saved["in_a_row"]  # updates skipped in a row so far
        self._sums = {name: list(pair) for name, pair in saved["sums"].items()}

    def state(self) -> dict[str, Any]:
        """Returns what `__init__` takes as `saved`."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        return {"sums": sums, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def add(self, metrics: training.Metrics) -> bool:
        """Waits for a step's metrics, adds them, and returns whether the loss is finite."""
        read = {name: list(map(float, pair)) for name, pair in jax.device_get(metrics).items()}
        skipped = int(read.pop("skipped", [0])[0])
        self.skipped += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        for name, (total, count) in read.items():
            before = self._sums.get(name, [0.0, 0.0])
            self._sums[name] = [before[0] + total, before[1] + count]
        return bool(np.isfinite(read["loss"]).all())

    def line(self) -> dict[str, Any]:
        """Returns the means, None if all steps were skipped, and empties the sums."""
        means: dict[str, Any] = {
            name: total / count if count else None
            for name, (total, count) in self._sums.items()
        }
        self._sums = {}
        return means | ({"skipped": self.skipped} if self.skipped else {})


class Speed:
    """Measures tokens/s, MFU and memory between two lines of metrics, and shows them."""

    def __init__(
        self, run: training.Run, journal: Journal, after: int, devices: int, params: PyTree
    ):
        self._journal, self._devices = journal, devices
        self._device = jax.local_devices()[0]
        self._accelerator = hardware.recognize(self._device)
        self._tokens = run.config.data.batch_size * run.config.data.seq_len
        self._flops, self._why = _flops_for_mfu(run, self._accelerator)
        # None until the first line: the steps before it also compile, so they are not timed
        self._since: tuple[int, float] | None = None
        kind = self._accelerator.title if self._accelerator else self._device.device_kind
        kind += f" ({self._why}: no MFU)" * bool(self._why)
        what = f"{devices} x {kind}, {jax.process_count()} process(es), JAX {jax.__version__}"
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        journal.write(after, "times", device=what, parameters=size, tokens_a_step=self._tokens)

    def write(self, step: int, line: dict[str, Any]) -> None:
        """Writes the measurements since the last call, and shows them with those of a line of
        metrics.
        """
        now, seconds = time.perf_counter(), None
        shown = ["skipped" if line["loss"] is None else f"loss {line['loss']:.3f}"]
        more = f", learning rate {line['learning_rate']:.2g}"
        if (norm := line.get("gradient_norm")) is not None:
            more += f", gradient norm {norm:.3g}"
        measured: dict[str, float] = {}
        if self._since is not None and now > self._since[1]:
            seconds = (now - self._since[1]) / (step - self._since[0])
            measured["tokens_per_second"] = self._tokens / seconds
            shown.append(f"{measured['tokens_per_second']:,.0f} tokens/s")
            if self._flops is not None:
                measured["mfu"] = mfu = measure.mfu(
                    self._flops, seconds * self._devices, self._accelerator
                )
                shown.append(f"MFU {mfu:.1%}")
        if memory := _memory(self._device):
            measured["memory_bytes"] = memory
            shown.append(measure.gib(memory))
        self._since = step, now
        if measured:
            self._journal.write(step, "times", **measured)
        self._journal.show(step, ", ".join(shown), more, seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves a time without steps out of the measurement."""
        start = time.perf_counter()
        yield
        if self._since is not None:
            self._since = self._since[0], self._since[1] + time.perf_counter() - start


def _flops_for_mfu(run: training.Run, accelerator: Any) -> tuple[measure.Flops | None, str]:
    """Returns the FLOPs of a step and "", or None and the reason why MFU is unknown."""
    if accelerator is None:
        return None, "unknown device"
    try:
        flops = run.flops() if run.flops else training.step_flops(run.config)
        measure.mfu(flops, 1.0, accelerator)
    except ValueError as error:  # no unit for its dtype, or products that cannot be seen
        return None, str(error).rpartition(": ")[2]
    return flops, ""


def _memory(device: Any) -> int | None:
    """Returns the device's peak bytes in use; on a CPU, those that this process uses now."""
    if stats := device.memory_stats():
        return stats.get("peak_bytes_in_use")
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return None


def learning_rate(schedule: Callable[[int], Any], step: int) -> float:
    try:  # another device would answer only after the steps that it is busy with
        [host, *_] = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX runs without its CPU backend
        host = None
    with jax.default_device(host):
        return float(schedule(step))


def validated(tokens: Integer[np.ndarray, "T"], config: ConfigDict) -> Integer[np.ndarray, "_"]:
    """Returns the part of the validation split whose labels a run validates on."""
    labels = config.run.validation_batches * config.data.batch_size * config.data.seq_len
    return tokens[: (labels or VALIDATED) + 1]


def validation_batches(
    tokens: Integer[np.ndarray, "T"], config: ConfigDict
) -> Iterator[data.Batch]:
    """Yields batches with all tokens but the first as labels; refuses bad ones at the call."""
    sizes = dict(
        # As large as a minibatch of the step: it fits into memory if the step does.
        batch_size=config.data.batch_size // config.training.num_minibatches,
        seq_len=config.data.seq_len,
        vocab_size=config.model.vocab_size,
    )
    try:
        return data.validation_batches(tokens, **sizes)
    except ValueError as error:
        raise ValueError(f"the validation split: {error}") from None


def bigram_loss(
    tokens: dict[str, np.ndarray], config: ConfigDict, vocab_size: int = data.VOCAB_SIZE
) -> dict[str, Any]:
    """Returns {"bigram_loss": a bigram model's}; {} if a split is too short for one."""
    train, validation = tokens["train"][:COUNTED], validated(tokens["validation"], config)
    if len(train) < 20 or len(validation) < 2:
        return {}
    return {"bigram_loss": ngrams.bigram_loss(train, validation, vocab_size)}


def validate(
    run: training.Run,
    params: PyTree,
    tokens: Integer[np.ndarray, "T"],
    config: ConfigDict,
    place: jax.sharding.Sharding,
    *,
    stop_reason: Callable[[], str] = str,
) -> dict[str, float]:
    """Returns mean metrics of the `validated` tokens, or raises `preemption.StopRequested`."""
    size = config.data.batch_size // config.training.num_minibatches
    shard, shards = loading.shard_of(place, size, config.data.seq_len)
    rows = slice(shard * size // shards, (shard + 1) * size // shards)

    def on_devices():
        for batch in validation_batches(validated(tokens, config), config):
            if why := stop_reason():
                raise preemption.StopRequested(why)
            yield jax.make_array_from_process_local_data(
                place, jax.tree.map(lambda array: array[rows], batch)
            )

    return training.evaluate(run.loss_fn, params, on_devices())


def sample(
    run: training.Run,
    params: PyTree,
    config: ConfigDict,
    tokenizer: tokenizers.Tokenizer,
    step: int,
) -> str:
    """Returns a text of `run.sample_tokens` tokens, the same for the same step, without those
    that the tokenizer does not know.
    """
    everywhere = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
    # A document begins after the end of another.
    prompt = jax.device_put(np.full((1, 1), data.end_of(tokenizer), np.int32), everywhere)
    rng = jax.random.fold_in(jax.random.key(config.seed), step)
    length, longest = config.run.sample_tokens, config.data.seq_len
    tokens = sampling.generate(run.apply_fn, params, prompt, length, rng, max_seq_len=longest)
    tokens = jax.jit(lambda tokens: tokens, out_shardings=everywhere)(tokens)
    return decoded(tokenizer, np.asarray(tokens)[0, 1:])


def decoded(tokenizer: tokenizers.Tokenizer, tokens: Integer[np.ndarray, "T"]) -> str:
    """Returns the text of tokens; a padded vocabulary has some without one."""
    known = tokenizer.get_vocab_size()
    return tokenizer.decode([token for token in tokens.tolist() if token < known])
