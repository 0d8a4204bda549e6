"""The training program's loop: starts or resumes a run, validates, checkpoints and ends it.

    ended = train(settings.complete(configs.get("cpu")), "runs/cpu")

A run is a folder: `config.json`, the files of `course_lib.program.journal`, and `checkpoints/`.
The same call resumes a run that was killed, from its last complete checkpoint. With the same
JAX on the same devices, the resumed run computes the same numbers and writes the same
`metrics.jsonl` and `samples.jsonl`, bit for bit, as a run that was never killed (`--help` says
what that needs on GPUs). A checkpoint therefore holds everything that the next step reads:
parameters, optimizer state, random key, step, loss scale, the position in the data, and the
sums for the next line of metrics.
"""

import collections
import contextlib
import dataclasses
import json
import math
import operator
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import tokenizers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from course_lib import fields, files, optimizers, training
from course_lib.configs import check_attention
from course_lib.many_devices import meshes, strategies
from course_lib.measure import hardware
from course_lib.models import attention
from course_lib.one_device.mixed_precision import all_finite
from course_lib.program import journal, observe, preemption, processes, room, settings
from course_lib.program.checkpoints import Checkpoints, Saved
from course_lib.text import data, loading

DONE, NOT_FINITE = "done", "not finite"
PREEMPTED, INTERRUPTED = preemption.PREEMPTED, preemption.INTERRUPTED
BEHIND = 2  # so many later steps are started before the metrics of a step are read

finite = jax.jit(all_finite)


@jax.jit
def finite_with_offload(tree: Any) -> Any:
    from course_lib.smaller_and_faster import offload  # most runs do not need it

    return all_finite(offload.to_device(tree))


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a training ended."""

    # `DONE`; `PREEMPTED` by SIGTERM or `INTERRUPTED` by Ctrl-C, both with a checkpoint; or
    # `NOT_FINITE`, without one: the loss, the validation loss or the train state is not finite,
    # or `run.skips_in_a_row` updates were skipped in a row
    reason: str
    step: int  # the last one


class Refused(ValueError):
    """The run cannot work with this configuration, these devices, text, processes or folder."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a run needs except its state."""

    run: training.Run
    place: NamedSharding  # of a batch
    tokenizer: tokenizers.Tokenizer
    tokens: dict[str, np.ndarray]  # of the splits "train" and "validation"
    batches: loading.DeviceBatches  # this process's
    fixed: dict[str, Any]  # must not change between starts: `settings.fixed` and the text
    computed: dict[str, Any]  # what the rounding depends on: `settings.numerics`


def build(
    config: ConfigDict, devices: Sequence[jax.Device] | None = None
) -> tuple[training.Run, NamedSharding]:
    """Returns the run of a checked configuration, and the sharding of a batch."""
    devices = jax.devices() if devices is None else devices
    if not devices:
        raise ValueError("devices=[] must have at least one device; None takes all of them")
    check_attention(config.model, hardware.recognize(devices[0]))
    mesh = meshes.make(settings.axes(config, len(devices)), devices)
    run = strategies.build(
        config,
        mesh,
        settings.strategy(config),
        skip_not_finite=config.run.non_finite == "skip",
        gradient_norm=config.optimizer.clip_norm > 0,  # clipping computes it anyway
    )
    return run, NamedSharding(mesh, P("data"))


def train(
    config: ConfigDict,
    folder: str | os.PathLike[str],
    devices: Sequence[jax.Device] | None = None,
    builder: Callable[..., tuple[training.Run, NamedSharding]] | None = None,
) -> Ended:
    """Trains from the last checkpoint, or from the start, until all steps are done, and writes
    the report. Where several processes train, each of them calls this inside `processes.start`.

    Args:
      config: as `settings.complete` returns it.
      folder: the run's folder, which all processes see.
      devices: to run on; all that JAX has if None.
      builder: makes the run, as `build` does, which is taken if None; see `own_model`.

    Raises:
      Refused: in all processes, if the configuration cannot work, differs from that of the run
        in the folder or of another process (then nothing is written), or does not fit.
      BlockingIOError: if another program trains in that folder.
      CheckpointError, OSError: if all checkpoints are damaged, or something cannot be written.
    """
    folder, first = pathlib.Path(folder), jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        stop_reason = stack.enter_context(preemption.notices())
        inputs = prepare(config, folder, devices, stack, builder or build)
        checkpoints = stack.enter_context(
            contextlib.closing(Checkpoints(folder / "checkpoints", config.run.keep))
        )
        saved = restore(checkpoints, folder, inputs)
        if config.run.weights and not saved:
            try:
                from course_lib.program import trained  # most runs begin with random numbers

                trained.check(config, inputs.tokenizer)
            except ValueError as error:
                raise Refused(str(error)) from None
        after = saved.step if saved else 0
        total = max(config.training.steps, after)
        options: dict[str, Any] = dict(log_every=config.run.log_every, writes=first)
        if first and (logger := observe.logger(config.run.logger)):
            about = dict(project="course_lib", name=str(folder), config=config.to_dict())
            options["logger"] = logger.init(**about, resume="allow")
        book = stack.enter_context(journal.Journal(folder, after, total, **options))
        if first:
            settings.write(config, folder, inputs.tokenizer)
        if saved:
            book.say(f"{folder}: goes on after step {after} of {total}")
            before = saved.data_state["computed"]
            if changes := settings.rounded_otherwise(before, inputs.computed):
                book.say(f"from here on numbers are rounded differently: {'; '.join(changes)}")
        else:
            book.say(f"{folder}: begins, {total} steps")
            size = inputs.tokenizer.get_vocab_size()
            if first and (baseline := observe.bigram_loss(inputs.tokens, config, size)):
                book.write(0, **baseline)
        device = inputs.place.mesh.devices.flat[0]
        if note := attention.stand_in(config.model.attention, hardware.recognize(device)):
            book.say(note)
        if after < total:
            book.say("compiling the step ...")
            needs = room.step_memory(inputs.run)
            here = room.does_not_fit(needs, inputs.place.addressable_devices)
            if why := next(filter(None, processes.gather(here)), ""):
                raise Refused(
                    f"{why}. {room.smaller(config, devices, builder or build, needs.peak)}"
                )
        loop = Loop(config, inputs, checkpoints, book, saved)
        ended = Ended(loop.take_steps(stop_reason), loop.step)
        checkpoints.wait()
        # A run without a checkpoint must start again, and refuses to if there is a report.
        if ended.reason != NOT_FINITE or checkpoints.steps():
            book.report()
    return ended


def prepare(
    config: ConfigDict,
    folder: pathlib.Path,
    devices: Sequence[jax.Device] | None,
    stack: contextlib.ExitStack,
    builder: Callable[..., tuple[training.Run, NamedSharding]],
) -> Inputs:
    """Builds what a run needs, and locks its folder until the stack closes. A collective: all
    processes refuse what one refuses, or what differs between them.
    """
    compared = config.to_dict() | {"folder": os.fspath(folder), "jax": jax.__version__}
    # Another process may have the same text in another folder.
    compared["run"] = compared.get("run", {}) | {"corpus": None}
    inputs, wrong = None, None
    try:
        settings.check(config)
        files.check_name(folder)
        loading.check_apart(folder, config.run.corpus)
        observe.logger(config.run.logger)
        run, place = builder(config, devices)
        corpus, vocabulary = config.run.corpus, config.model.vocab_size
        given, kept = config.run.tokenizer, folder / "tokenizer.json"
        # The file that was given at the start may be gone when the run goes on.
        if given not in ("course", "own") and not os.path.exists(given) and kept.exists():
            given = str(kept)
        tokenizer = data.tokenizer(given, corpus, vocabulary)
        tokens = {split: data.tokens(split, corpus, tokenizer) for split in data.SPLITS}
        batches = read_batches(config, tokens["train"], place)
        # An error in the validation text should come now, not at the first validation.
        observe.validation_batches(observe.validated(tokens["validation"], config), config)
        text = {split: loading.identity(tokens[split]) for split in tokens}
        if jax.process_index() == 0:
            stack.enter_context(files.locked(folder))
        fixed = settings.fixed(config) | {"corpus": text}
        computed = settings.numerics(config, place.device_set)
        inputs = Inputs(run, place, tokenizer, tokens, batches, fixed, computed)
        compared["corpus"] = text
    except ValueError as error:  # others may be temporary, like a lost connection
        compared["refused"], wrong = str(error), error
    first, *others = map(json.loads, processes.gather(json.dumps(compared)))
    for n, other in enumerate(others, 1):
        if unlike := fields.differences(first, other, ("in process 0", f"in process {n}")):
            told = "all processes must have the same configuration"
            raise Refused(f"{told}: {'; '.join(unlike)}")
    if inputs is None:
        raise Refused(str(wrong)) from wrong
    return inputs


def read_batches(
    config: ConfigDict, tokens: np.ndarray, place: NamedSharding
) -> loading.DeviceBatches:
    """Returns this process's batches, on its devices."""
    sizes = dict(batch_size=config.data.batch_size, seq_len=config.data.seq_len)
    shard, shards = loading.shard_of(place, config.data.batch_size, config.data.seq_len)
    sizes |= dict(shard=shard, shards=shards, vocab_size=config.model.vocab_size)
    return loading.DeviceBatches(loading.batches(tokens, seed=config.seed, **sizes), place)


def restore(checkpoints: Checkpoints, folder: pathlib.Path, inputs: Inputs) -> Saved | None:
    """Restores the newest undamaged checkpoint; None if there is none and the run may begin."""
    saved = checkpoints.newest()
    if saved is None:
        if why := settings.why_not_begun(folder):
            raise Refused(why)
        return None
    if unlike := settings.changed(saved.config, inputs.fixed):
        raise Refused(
            f"the run in {folder} must go on as it began: {'; '.join(unlike)}. Set these fields"
            f" to the saved values (--config {folder / 'config.json'}), or name another folder"
        )
    return checkpoints.restore(inputs.run.abstract()[0], saved)


class Loop:
    """Takes steps, and does what is due between them."""

    step: int  # the last step taken
    best: float | None  # the lowest validation loss
    caught_up: bool  # whether the validation and the sample due after the last step are done

    def __init__(
        self,
        config: ConfigDict,
        inputs: Inputs,
        checkpoints: Checkpoints,
        book: journal.Journal,
        saved: Saved | None,
    ):
        """Starts from a restored checkpoint, or from the seed if there is none."""
        self.config, self.inputs, self.run = config, inputs, inputs.run
        self.checkpoints, self.book = checkpoints, book
        self.rate = optimizers.SCHEDULES[config.optimizer.schedule](config.optimizer)
        self.unread: collections.deque[tuple[int, training.Metrics]] = collections.deque()
        place = inputs.place
        if saved:
            self.step, self.state = saved.step, saved.state
            self.best, self.caught_up = saved.data_state["best"], saved.data_state["looked"]
            self.tally = observe.Tally(saved.data_state["tally"])
            inputs.batches.set_state(saved.data_state["batches"])
        else:
            self.step, self.best, self.caught_up = 0, None, True
            self.tally = observe.Tally()
            first = min(place.addressable_devices, key=operator.attrgetter("id"))
            with jax.default_device(first):
                self.state = self.run.init(jax.random.key(config.seed))
                if config.run.weights:
                    from course_lib.program import trained

                    self.state = trained.begin(self.state, config)
        self.total = max(config.training.steps, self.step)
        devices = len(place.device_set)
        self.speed = observe.Speed(self.run, book, self.step, devices, self.state.params)

    def take_steps(self, stop_reason: Callable[[], str]) -> str:
        """Takes steps until all are done or the run has to end, and returns why it ended."""
        if not self.caught_up:  # an earlier process ended before it validated or sampled
            if why := self.evaluate_and_save(self.due(self.step), again=True):
                return why
        while self.step < self.total:
            batch = next(self.inputs.batches)
            self.state, metrics = self.run.train_step(self.state, batch)
            self.step += 1
            self.unread.append((self.step, metrics))
            why, due = stop_reason(), self.due(self.step)
            stops = bool(why or due - {"log"})
            if not self.read_metrics(behind=0 if stops else BEHIND):
                return NOT_FINITE
            check = finite_with_offload if self.config.optimizer.offload else finite
            if stops and not check((self.state.params, self.state.opt_state)):
                self.book.say(f"the state after step {self.step} is not finite")
                return NOT_FINITE
            self.caught_up = not due & {"validate", "sample"}
            if why := why or self.evaluate_and_save(due, stop_reason):
                if why != NOT_FINITE:
                    self.save(loss=None)
                return why
        return DONE

    def due(self, step: int) -> set[str]:
        names, every = ("log", "validate", "sample", "checkpoint"), self.config.run
        return {
            name for name in names if step == self.total or step % every[f"{name}_every"] == 0
        }

    def read_metrics(self, behind: int) -> bool:
        """Reads metrics, except of the last `behind` steps; returns whether to go on."""
        while len(self.unread) > behind:
            step, metrics = self.unread.popleft()
            skipped = self.tally.skipped  # before this step
            if not self.tally.add(metrics):
                self.book.say(f"the loss of step {step} is not finite")
                return False
            if self.tally.in_a_row >= self.config.run.skips_in_a_row:
                self.book.say(
                    f"{self.tally.in_a_row} updates in a row were skipped because they were not"
                    f" finite; the last one is step {step}'s"
                )
                return False
            if "log" in self.due(step):
                line = self.tally.line()
                rate = observe.learning_rate(self.rate, step - 1 - skipped)
                self.book.write(step, **line, learning_rate=rate)
                self.speed.write(step, line | {"learning_rate": rate})
        return True

    def evaluate_and_save(
        self, due: set[str], stop_reason: Callable[[], str] = str, again: bool = False
    ) -> str:
        """Validates, samples and saves what is due; a new best loss makes a checkpoint due.
        Returns "", or why to end: a notice came, or the loss is not finite; then nothing was
        saved. `again`: an earlier process may have written this step's lines.
        """
        loss, params = None, self.state.params
        with self.speed.paused():
            if "validate" in due:
                tokens, place = self.inputs.tokens["validation"], self.inputs.place
                try:
                    metrics = observe.validate(
                        self.run, params, tokens, self.config, place, stop_reason=stop_reason
                    )
                except preemption.StopRequested as why:
                    return str(why)
                values = {f"validation_{name}": value for name, value in metrics.items()}
                self.write("metrics", again, **values)
                loss = metrics["loss"]
                self.book.say(f"step {self.step}: validation loss {loss:.3f}")
                if not math.isfinite(loss):
                    # A run that skips updates may recover, but not after its last step.
                    if self.config.run.non_finite == "stop" or self.step == self.total:
                        return NOT_FINITE
                elif self.best is None or loss < self.best:
                    self.best, due = loss, due | {"checkpoint"}
            if "sample" in due and self.config.run.sample_tokens:
                tokenizer = self.inputs.tokenizer
                text = observe.sample(self.run, params, self.config, tokenizer, self.step)
                self.write("samples", again, text=text)
        self.caught_up = True
        if "checkpoint" in due:
            self.save(loss)
        return ""

    def write(self, name: str, again: bool, **values: Any) -> None:
        """Writes a line of this step, unless an earlier process has written it."""
        lines = journal.read(self.checkpoints.folder.parent, name) if again else []
        if not any(
            line["step"] == self.step and line.keys() >= values.keys() for line in lines
        ):
            self.book.write(self.step, name, **values)

    def save(self, loss: float | None) -> None:
        data_state = {
            "batches": self.inputs.batches.get_state(),
            "tally": self.tally.state(),
            "looked": self.caught_up,
            "best": self.best,
            "computed": self.inputs.computed,
        }
        # The lines up to this step must be on the disk before the checkpoint is complete.
        self.book.sync()
        self.checkpoints.save(self.step, self.state, data_state, self.inputs.fixed, loss)
