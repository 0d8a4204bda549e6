"""The loop of the training program: begun or resumed, validated, checkpointed, and ended as it
should be.

    ended = train(settings.whole(configs.get("cpu")), "runs/cpu")

A run is a folder: `config.json`, what `course_lib.program.journal` writes, and `checkpoints/`.
A run that was killed is resumed by the same call: it goes on from the last whole checkpoint,
and on the same devices (of a CPU, as many cores) what it learns and writes is, bit for bit,
what a run would that was never killed. So a checkpoint holds all that the next step follows
from: parameters, optimizer, random key, step, loss scale, the place in the data, and the sums
for the next line of metrics. On GPUs that takes `XLA_FLAGS=--xla_gpu_deterministic_ops=true`.
Without, sums of atomic additions come in any order, and each start may time kernels anew and
choose others; with it steps are slower (https://openxla.org/xla/determinism).

The devices never wait for this loop: the numbers of a step are read when later ones are on
their way.
"""

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from course_lib import files, optimizers, training
from course_lib.configs import check_attention
from course_lib.many_devices import meshes, strategies
from course_lib.measure import hardware
from course_lib.one_device.mixed_precision import all_finite
from course_lib.program import journal, observe, preemption, settings
from course_lib.program.checkpoints import CheckpointError, Checkpoints
from course_lib.text import data, loading

DONE, NOT_FINITE = "done", "not finite"
PREEMPTED, INTERRUPTED = preemption.PREEMPTED, preemption.INTERRUPTED
BEHIND = 2  # steps that are on their way while the numbers of the one before them are read

_finite = jax.jit(all_finite)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a training ended.

    Attributes:
      reason: `DONE`; `PREEMPTED` by SIGTERM or `INTERRUPTED` by Ctrl-C, with a checkpoint; or
        `NOT_FINITE`, with the checkpoints from before: a loss, parameters, or as many updates
        left out as `run.skips_in_a_row` says.
      step: the last one.
    """

    reason: str
    step: int


class Refused(ValueError):
    """What was asked for cannot work: with these devices, this text, these processes, or what
    the run folder holds.
    """


def build(
    config: ConfigDict, devices: Sequence[jax.Device] | None = None
) -> tuple[training.Run, NamedSharding]:
    """Returns the run, and where a batch lies: cut along "data" of a mesh, of one device or of
    many.

    Args:
      config: as `settings.whole` returns it, and `settings.check` has passed it.
      devices: to run on; all that JAX has if None.

    Raises:
      ValueError: if the configuration does not fit the devices.
    """
    devices = jax.devices() if devices is None else devices
    check_attention(config, hardware.recognize(devices[0]))
    grid = meshes.make(settings.axes(config, len(devices)), devices)
    run = strategies.of_checked(
        settings.part_of_model(config),
        grid,
        settings.strategy(config),
        skip_not_finite=config.run.non_finite == "skip",
    )
    return run, NamedSharding(grid, P("data"))


def train(
    config: ConfigDict,
    folder: str | os.PathLike[str],
    devices: Sequence[jax.Device] | None = None,
) -> Ended:
    """Trains until all steps are done, from the last checkpoint on if there is one, and writes
    the report.

    With several processes all of them call it, inside of `processes.start`.

    Args:
      config: as `settings.whole` returns it.
      folder: of the run, which all processes see.
      devices: to run on; all that JAX has if None.

    Raises:
      Refused: if the configuration cannot work, or is not that of the run in the folder, or of
        another process, naming the fields; or if the folder holds something else. In all
        processes, and before anything there is changed.
      BlockingIOError: if another program trains in that folder. That may pass, as a lock of a
        host that is gone does.
      loading.Changed: if the text changes while it is read; in this process alone, as any error
        of JAX's.
      CheckpointError: if all checkpoints are damaged, or the last one cannot be written.
    """
    folder, first = pathlib.Path(folder), jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        told_to_end = stack.enter_context(preemption.notices())
        run, place, tokens, batches, text = _prepared(config, folder, devices, stack)
        checkpoints = stack.enter_context(
            contextlib.closing(Checkpoints(folder / "checkpoints", config.run.keep))
        )
        same = settings.fixed(config) | {"corpus": text}
        saved = checkpoints.newest()
        if saved and (unlike := settings.changed(saved.config, same)):
            raise Refused(
                f"the run in {folder} must go on as it began: {'; '.join(unlike)}. Give what"
                " was saved, or another folder"
            )
        if not saved and (why := settings.why_not_begun(folder)):
            raise Refused(why)
        saved = checkpoints.restore(run.abstract()[0], saved) if saved else None
        after = saved.step if saved else 0
        total = max(config.training.steps, after)
        book = stack.enter_context(journal.Journal(folder, after, total, writes=first))
        if first:
            settings.write(config, folder)
        how = settings.computed(config, place.device_set)
        now = f"goes on after step {after} of {total}" if saved else f"begins, {total} steps"
        book.say(f"{folder}: {now}")
        if saved and (
            otherwise := settings.rounded_otherwise(saved.data_state["computed"], how)
        ):
            book.say(
                "from here on numbers are rounded otherwise than before:"
                f" {'; '.join(otherwise)}"
            )
        if first and not saved and (baseline := observe.bigram_loss(tokens, config)):
            book.write(0, **baseline)
        loop = _Loop(
            config, run, place, tokens, batches, checkpoints, book, same, how, saved, total
        )
        ended = Ended(loop.go(told_to_end), loop.step)
        checkpoints.wait()
        # No report of a run that begins anew: it reached nothing.
        if ended.reason != NOT_FINITE or checkpoints.steps():
            book.report()
    return ended


def _prepared(config, folder, devices, stack):
    """Returns what a run needs beside its state: refused in all processes, unless it works in
    all and is the same in all.
    """
    told, found, wrong = (
        config.to_dict() | {"folder": os.fspath(folder), "jax": jax.__version__},
        None,
        None,
    )
    told["run"] = told.get("run", {}) | {"corpus": None}  # the same text may lie elsewhere
    try:
        settings.check(config)
        files.check_name(folder)
        loading.check_apart(folder, config.run.corpus)
        run, place = build(config, devices)
        tokens = {split: loading.token_file(split, config.run.corpus) for split in data.SPLITS}
        batches = _batches(config, tokens["train"], place)
        # Fails now, and not when they are due.
        observe.validation_batches(tokens["validation"], config)
        text = {split: loading.identity(of_split) for split, of_split in tokens.items()}
        if jax.process_index() == 0:
            stack.enter_context(files.locked(folder))
        found, told["corpus"] = (run, place, tokens, batches, text), text
    except ValueError as error:
        # Another error may pass, as a lost connection or a text that somebody writes to.
        told["refused"], wrong = str(error), error
    if unlike := settings.unlike(told):
        raise Refused(f"all processes must be told the same: {'; '.join(unlike)}")
    if wrong:
        raise Refused(str(wrong)) from wrong
    return found


def _batches(config, tokens, place):
    """Returns the batches of this process, on its devices."""
    size, length = config.data.batch_size, config.data.seq_len
    shard, shards = loading.shard_of(place, size, length)
    where = dict(
        shard=shard, shards=shards, seed=config.seed, vocab_size=config.model.vocab_size
    )
    return loading.to_devices(
        loading.batches(tokens, batch_size=size, seq_len=length, **where), place
    )


class _Loop:
    """Steps, and what comes between them."""

    def __init__(
        self, config, run, place, tokens, batches, checkpoints, book, same, how, saved, total
    ):
        self.config, self.run, self.place, self.tokens, self.batches = (
            config,
            run,
            place,
            tokens,
            batches,
        )
        self.checkpoints, self.book, self.same, self.how, self.total = (
            checkpoints,
            book,
            same,
            how,
            total,
        )
        self.rate = optimizers.SCHEDULES[config.optimizer.schedule](config.optimizer)
        self.late: collections.deque[tuple[int, training.Metrics]] = collections.deque()
        self.looked = True  # at all that was due after the last step
        if saved:
            self.step, self.state, self.looked = (
                saved.step,
                saved.state,
                saved.data_state["looked"],
            )
            self.best, self.tally = (
                saved.data_state["best"],
                observe.Tally(saved.data_state["tally"]),
            )
            self.batches.set_state(saved.data_state["batches"])
        else:
            self.step, self.tally = 0, observe.Tally()
            self.best = None  # the lowest validation loss
            with jax.default_device(
                min(place.addressable_devices, key=lambda device: device.id)
            ):
                self.state = run.init(jax.random.key(config.seed))
        self.speed = observe.Speed(
            config, book, self.step, len(place.device_set), self.state.params
        )

    def go(self, told_to_end: Callable[[], str]) -> str:
        """Steps until all are done or it has to end, and returns why it ended."""
        if not self.looked:
            self._look(self._due(self.step), again=True)
        self.book.compiling()
        while self.step < self.total:
            self.state, metrics = self.run.train_step(self.state, next(self.batches))
            self.step += 1
            self.late.append((self.step, metrics))
            why, due = told_to_end(), self._due(self.step)
            stops = bool(why or due - {"log"})
            if not self._read(behind=0 if stops else BEHIND):
                return NOT_FINITE
            if stops and not _finite((self.state.params, self.state.opt_state)):
                self.book.say(f"the parameters after step {self.step} are not finite")
                return NOT_FINITE
            self.looked = not due & {"validate", "sample"}
            if why := why or self._look(due, told_to_end):
                self._save(loss=None, must=True)
                return why
        return DONE

    def _due(self, step: int) -> set[str]:
        """Returns what is to be done after a step; after the last, everything."""
        names, every = ("log", "validate", "sample", "checkpoint"), self.config.run
        return {
            name for name in names if step == self.total or step % every[f"{name}_every"] == 0
        }

    def _read(self, behind: int) -> bool:
        """Waits for the metrics of all steps but the last `behind`, and writes them; returns
        whether the run may go on.
        """
        while len(self.late) > behind:
            step, metrics = self.late.popleft()
            skipped = self.tally.skipped  # of the steps before
            if not self.tally.add(metrics):
                self.book.say(f"the loss of step {step} is not finite")
                return False
            if self.tally.in_a_row >= self.config.run.skips_in_a_row:
                self.book.say(
                    f"{self.tally.in_a_row} updates in a row, the last of step {step}, were"
                    " left out as not finite"
                )
                return False
            if "log" in self._due(step):
                line = self.tally.line()
                self.book.write(
                    step,
                    **line,
                    learning_rate=observe.learning_rate(self.rate, step - 1 - skipped),
                )
                self.speed.write(step, line["loss"])
        return True

    def _look(
        self, due: set[str], told_to_end: Callable[[], str] = str, again: bool = False
    ) -> str:
        """Does what is due; `again` if another process may have done so before it was killed,
        and written lines.

        Returns:
          Why to end if that was told meanwhile, with nothing done; else "".
        """
        found: dict[str, float] = {}
        with self.speed.paused():
            if "validate" in due:
                # Else a best one that was not saved counts.
                with self._saying_errors(unless=False):
                    self.checkpoints.wait()
                given = (
                    self.run,
                    self.state.params,
                    self.tokens["validation"],
                    self.config,
                    self.place,
                )
                try:
                    found = observe.validate(*given, told_to_end)
                except preemption.ToldToEnd as told:
                    return str(told)
                self._write(
                    "metrics",
                    again,
                    **{f"validation_{name}": value for name, value in found.items()},
                )
                self.book.say(f"step {self.step}: validation loss {found['loss']:.3f}")
                if math.isfinite(found["loss"]) and (
                    self.best is None or found["loss"] < self.best
                ):
                    # The best checkpoint is kept besides the last ones.
                    self.best, due = found["loss"], due | {"checkpoint"}
            if "sample" in due and self.config.run.sample_tokens:
                text = observe.sample(
                    self.run, self.state.params, self.config, self.step, self.place
                )
                self._write("samples", again, text=text)
        self.looked = True
        if "checkpoint" in due:
            self._save(found.get("loss"), must=self.step == self.total)
        return ""

    def _write(self, name: str, again: bool, **values: Any) -> None:
        """Writes a line, but not again."""
        there = journal.read(self.checkpoints.folder.parent, name) if again else []
        if not any(
            line["step"] == self.step and line.keys() >= values.keys() for line in there
        ):
            self.book.write(self.step, name, **values)

    def _save(self, loss: float | None, must: bool) -> None:
        """Begins to write a checkpoint, which must succeed if it is the last."""
        data_state = {"batches": self.batches.get_state(), "tally": self.tally.state()}
        data_state |= {"looked": self.looked, "best": self.best, "computed": self.how}
        with self._saying_errors(unless=False):  # of the one before
            self.checkpoints.wait()
        with self._saying_errors(unless=must):
            # A checkpoint is never whole before the lines up to its step.
            if not self.book.sync():
                raise CheckpointError(
                    f"step {self.step} is not saved, as the lines up to it cannot be written"
                )
            self.checkpoints.save(self.step, self.state, data_state, self.same, loss)

    @contextlib.contextmanager
    def _saying_errors(self, unless: bool) -> Iterator[None]:
        """Says that a checkpoint could not be written, and lets training go on: a disk that is
        full may have room later.
        """
        try:
            yield
        except CheckpointError as error:
            if unless or jax.process_count() > 1:
                raise
            self.book.say(f"{error}; training goes on")
            self.best = self.checkpoints.best()
