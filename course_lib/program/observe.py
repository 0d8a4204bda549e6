"""What a run looks at beside its steps: sums of metrics, speed, validation, a sample, and what
a bigram model reaches.

All of it leaves the state as it is. What follows from the configuration goes into the journal's
`metrics.jsonl` and `samples.jsonl`, what is measured into `times.jsonl`.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Integer
from ml_collections import ConfigDict

from course_lib import measure, training
from course_lib.measure import hardware
from course_lib.models import sampling
from course_lib.program import preemption
from course_lib.program.journal import Journal
from course_lib.text import data, loading, ngrams

PyTree = Any
COUNTED = 10_000_000  # tokens that the bigram model counts, at most
VALIDATED = 2**18  # tokens of validation by default, at most; the course's corpus has fewer


class Tally:
    """Sums of metrics since the last line, in Python's floats: in a checkpoint they stay what
    they are.
    """

    def __init__(self, saved: dict[str, Any] | None = None):
        saved = saved or {"sums": {}, "skipped": 0, "in_a_row": 0}
        self.skipped: int = saved["skipped"]
        self.in_a_row: int = saved["in_a_row"]  # skipped without one between that was not
        self._sums: dict[str, list[float]] = {
            name: list(pair) for name, pair in saved["sums"].items()
        }

    def state(self) -> dict[str, Any]:
        """Returns what `__init__` takes."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        return {"sums": sums, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def add(self, metrics: training.Metrics) -> bool:
        """Adds the metrics of a step, which it waits for, and returns whether the loss is
        finite.
        """
        found = {
            name: [float(x) for x in pair] for name, pair in jax.device_get(metrics).items()
        }
        skipped = int(found.pop("skipped", [0])[0])
        self.skipped += skipped
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        for name, pair in found.items():
            self._sums[name] = [
                a + b for a, b in zip(self._sums.get(name, [0.0, 0.0]), pair, strict=True)
            ]
        return bool(np.isfinite(found["loss"]).all())

    def line(self) -> dict[str, Any]:
        """Returns the means, None where all steps were skipped, and begins anew."""
        means: dict[str, Any] = {
            name: total / count if count else None
            for name, (total, count) in self._sums.items()
        }
        self._sums = {}
        return means | ({"skipped": self.skipped} if self.skipped else {})


class Speed:
    """Measures tokens a second, MFU and memory between two lines of metrics, and shows them
    behind the bar.
    """

    def __init__(
        self, config: ConfigDict, journal: Journal, after: int, devices: int, params: PyTree
    ):
        """Writes down which device this is, and how large model and step are.

        Args:
          config: as `settings.whole` returns it.
          journal: where to.
          after: the step that was restored.
          devices: how many there are.
          params: of the model, or their shapes.
        """
        self._journal, self._devices = journal, devices
        self._device = jax.local_devices()[0]
        self._accelerator = hardware.recognize(self._device)
        self._tokens = config.data.batch_size * config.data.seq_len
        self._flops, self._why = _flops_at_a_peak(config, self._accelerator)
        self._since: tuple[int, float] | None = None  # the first steps compile
        kind = self._accelerator.title if self._accelerator else self._device.device_kind
        kind += f" ({self._why}: no MFU)" * bool(self._why)
        what = f"{devices} x {kind}, {jax.process_count()} process(es), JAX {jax.__version__}"
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        journal.write(after, "times", device=what, parameters=size, tokens_a_step=self._tokens)

    def write(self, step: int, loss: float | None) -> None:
        """Writes what was measured since the last call, and shows it."""
        now = time.perf_counter()
        words = [f"loss {loss:.3f}" if loss is not None else "skipped"]
        measured: dict[str, float] = {}
        if self._since is not None and now > self._since[1]:
            seconds = (now - self._since[1]) / (step - self._since[0])
            measured["tokens_per_second"] = self._tokens / seconds
            words.append(f"{measured['tokens_per_second']:,.0f} tokens/s")
            if self._flops is not None:
                mfu = measure.mfu(self._flops, seconds * self._devices, self._accelerator)
                measured["mfu"] = mfu
                words.append(f"MFU {mfu:.1%}")
        if memory := _memory(self._device):
            measured["memory_bytes"] = memory
            words.append(measure.gib(memory))
        self._since = step, now
        if measured:
            self._journal.write(step, "times", **measured)
        self._journal.show(step, ", ".join(words))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is done meanwhile, which is no step."""
        start = time.perf_counter()
        yield
        if self._since is not None:
            self._since = self._since[0], self._since[1] + time.perf_counter() - start


def _flops_at_a_peak(
    config: ConfigDict, accelerator: hardware.Accelerator | None
) -> tuple[measure.Flops | None, str]:
    """Returns the products of a step, and ""; or None, and why nothing can be said of their
    part of a peak.
    """
    if accelerator is None:
        return None, "unknown device"
    flops = step_flops(config)
    try:
        measure.mfu(flops, 1.0, accelerator)
    except ValueError:  # a step runs without a unit for its dtype, more slowly
        return None, f"no unit for {config.model.dtype}"
    return flops, ""


def step_flops(config: ConfigDict) -> measure.Flops:
    """Counts the products of a step on all devices together, attention written out.

    Args:
      config: as `settings.whole` returns it.
    """
    return training.step_flops(config)


def _memory(device: Any) -> int | None:
    """Returns the bytes in use: of a device that counts, at the peak; of a CPU, this process's
    now.
    """
    if stats := device.memory_stats():
        return stats.get("peak_bytes_in_use")
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return None


def learning_rate(schedule: Callable[[int], Any], step: int) -> float:
    """Returns the rate of a step, computed by the CPU: other devices would answer only after
    the steps they are busy with.
    """
    try:
        [host, *_] = jax.local_devices(backend="cpu")
    except RuntimeError:  # JAX was told to leave the CPU alone
        host = None
    with jax.default_device(host):
        return float(schedule(step))


def validated(tokens: Integer[np.ndarray, "T"], config: ConfigDict) -> Integer[np.ndarray, "_"]:
    """Returns the tokens of the validation split of which all but the first are validated on:
    always the same.

    `run.validation_batches` says how many batches; where it is 0, it is all of the split, up to
    `VALIDATED` tokens.
    """
    labels = (
        config.run.validation_batches * config.data.batch_size * config.data.seq_len
        or VALIDATED
    )
    return tokens[: labels + 1]


def validation_batches(
    tokens: Integer[np.ndarray, "T"], config: ConfigDict
) -> Iterator[data.Batch]:
    """Yields the batches of which `validate` takes the mean, as large as a minibatch of the
    step: they fit where the step does.

    Args:
      tokens: of the validation split.
      config: as `settings.whole` returns it.

    Raises:
      ValueError: if there are fewer than two tokens, or one is outside the vocabulary. At the
        call, not at the first batch.
    """
    size = config.data.batch_size // config.training.num_minibatches
    where = dict(
        batch_size=size, seq_len=config.data.seq_len, vocab_size=config.model.vocab_size
    )
    try:
        return data.validation_batches(validated(tokens, config), **where)
    except ValueError as error:
        raise ValueError(f"the validation split: {error}") from None


def bigram_loss(tokens: dict[str, np.ndarray], config: ConfigDict) -> dict[str, Any]:
    """Returns {"bigram_loss": what a bigram model reaches}, in nats a token; nothing if a text
    is too short for one.

    Args:
      tokens: of the course's tokenizer: "train", of which it counts at most `COUNTED`, and
        "validation", of which those count that are `validated`.
      config: as `settings.whole` returns it.
    """
    train, validation = tokens["train"][:COUNTED], validated(tokens["validation"], config)
    if len(train) < 20 or len(validation) < 2:
        return {}
    return {"bigram_loss": ngrams.bigram_loss(train, validation, data.VOCAB_SIZE)}


def validate(
    run: training.Run,
    params: PyTree,
    tokens: Integer[np.ndarray, "T"],
    config: ConfigDict,
    place: jax.sharding.Sharding,
    told_to_end: Callable[[], str] = str,
) -> dict[str, float]:
    """Returns the mean metrics of the validation split, or of the part of it that is
    `validated`.

    Args:
      run: as built.
      params: its parameters, wherever they lie.
      tokens: of the validation split.
      config: as `settings.whole` returns it.
      place: of a batch.
      told_to_end: asked before each batch, as of `preemption.notices`; by default it says
        nothing.

    Raises:
      preemption.ToldToEnd: if it says why to end.
    """
    size, length = (
        config.data.batch_size // config.training.num_minibatches,
        config.data.seq_len,
    )
    shard, shards = loading.shard_of(place, size, length)
    rows = slice(shard * size // shards, (shard + 1) * size // shards)

    def on_devices():
        for batch in validation_batches(tokens, config):
            if why := told_to_end():
                raise preemption.ToldToEnd(why)
            yield jax.make_array_from_process_local_data(
                place, jax.tree.map(lambda array: array[rows], batch)
            )

    return training.evaluate(run.loss_fn, params, on_devices())


def sample(
    run: training.Run,
    params: PyTree,
    config: ConfigDict,
    step: int,
    place: jax.sharding.Sharding,
) -> str:
    """Returns what the model writes at the start of a document, `run.sample_tokens` tokens; the
    same at the same step.

    Arguments as of `validate`.
    """
    everywhere = jax.sharding.NamedSharding(run.mesh, jax.sharding.PartitionSpec())
    # Token 0 is END, after which a document begins
    prompt = jax.device_put(np.zeros((1, 1), np.int32), everywhere)
    rng = jax.random.fold_in(jax.random.key(config.seed), step)
    length = config.run.sample_tokens
    tokens = sampling.generate(
        run.apply_fn, params, prompt, length, rng, max_seq_len=config.data.seq_len
    )
    whole = jax.jit(lambda tokens: tokens, out_shardings=everywhere)(tokens)
    return data.tokenizer().decode(
        [token for token in np.asarray(whole)[0, 1:].tolist() if token < data.VOCAB_SIZE]
    )
