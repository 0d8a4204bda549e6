"""Writes a run's metrics: lines in its folder, a bar on the terminal, and a report.

    metrics.jsonl       JSON lines with "step", losses and learning rate: numbers that follow
                        from the configuration alone
    samples.jsonl       JSON lines with "step" and a text that the model generated
    times.jsonl         JSON lines with "step" and measurements: tokens/s, MFU, memory. The
                        first line of each start names the device
    events/             the numbers of all three, for TensorBoard
    report.md, *.png    made from the lines by `report`

A run that is killed, or finds the disk full, may have written lines beyond its last checkpoint,
and half of one more line. They are removed when the run resumes, so in the end `metrics.jsonl`
and `samples.jsonl` are those of a run that was never stopped, byte for byte.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from typing import IO, Any

from course_lib import extras, files
from course_lib.measure.units import GIB

with extras.needed("training"):
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter
    from tqdm import tqdm

FILES = ("metrics", "samples", "times")
# Leaves room for the text of a line in 80 columns.
BAR = "|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
QUIET = 10  # seconds between two lines where there is no terminal to draw a bar on


class Journal:
    """Writes the files of a run and shows its progress; a context, which closes the files.

    What cannot be written, on a full disk for example, is an OSError that says what to do.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        after: int,
        total: int,
        *,
        log_every: int = 1,
        writes: bool = True,
        logger: Any = None,
    ):
        """Opens the files, and removes the lines of steps later than `after`, the restored one
        (0: a new run) of `total`. All processes but one write and show nothing. `logger` gets
        the numbers, too: `log(values, step=step)` and `finish()`, as `wandb` has.
        """
        self._writes = writes
        if not writes:
            return
        self._folder, self._shown = pathlib.Path(folder), -math.inf
        self._log_every, self._times, self._logger = log_every, 1, logger
        shown = dict(bar_format=BAR, dynamic_ncols=True, disable=not sys.stderr.isatty())
        self._bar: tqdm = tqdm(initial=after, total=total, **shown)
        self._files: dict[str, IO[bytes]] = {}
        try:
            self._open(after)
            self._event(0, file_version="brain.Event:2")
            # TensorBoard then drops what an earlier process wrote of later steps.
            self._event(after + 1, session_log=SessionLog(status=SessionLog.START))
        except OSError:
            self._close()
            raise

    def _open(self, after: int) -> None:
        with self._must_write("events"):
            folder = self._folder / "events"
            folder.mkdir(parents=True, exist_ok=True)
            number = len(list(folder.iterdir()))
            # The name that TensorBoard expects.
            name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{number}"
            self._files["events"] = (folder / name).open("ab")
        for name in FILES:
            with self._must_write(name):
                path = self._folder / f"{name}.jsonl"
                if after and not path.exists():
                    self.say(f"{path.name} is not there: its lines up to step {after} are lost")
                if damaged := _cut(path, after):
                    self.say(f"{path.name}: {damaged} damaged line(s) left out")
                self._files[name] = path.open("ab")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writes:
            try:
                if kind is None:
                    self.sync()
            finally:
                self._close()

    def _close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # half a line, which the next start removes
                file.close()
        self._bar.close()
        if self._logger:
            self._logger.finish()

    def write(self, step: int, name: str = "metrics", **values: Any) -> None:
        """Writes a line of numbers, None and strings into one of `FILES` before it returns. A
        number that is not finite becomes null.
        """
        if not self._writes:
            return
        line = {"step": step} | {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in values.items()
        }
        with self._must_write(name):
            self._files[name].write((json.dumps(line, ensure_ascii=False) + "\n").encode())
            self._files[name].flush()
        if numbers := {key: x for key, x in values.items() if isinstance(x, int | float)}:
            tagged = [Summary.Value(tag=key, simple_value=x) for key, x in numbers.items()]
            self._event(step, summary=Summary(value=tagged))
            if self._logger:
                self._logger.log(numbers, step=step)

    def _event(self, step: int, **what: Any) -> None:
        with self._must_write("events"):
            event = Event(wall_time=time.time(), step=step, **what)
            RecordWriter(self._files["events"]).write(event.SerializeToString())
            self._files["events"].flush()

    def sync(self) -> None:
        """Flushes all lines to the disk. Call it before a checkpoint of the same step."""
        if self._writes:
            for name, file in self._files.items():
                with self._must_write(name):
                    os.fsync(file.fileno())

    @contextlib.contextmanager
    def _must_write(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{name} of {self._folder} cannot be written ({files.why(error)}): when it can,"
                " the same command goes on from the last checkpoint"
            ) from error

    def report(self) -> None:
        """Writes the report if there are metrics."""
        if self._writes and pairs(read(self._folder), "loss"):
            with self._must_write("the report"):
                report(self._folder)

    def show(self, step: int, text: str, more: str = "", seconds: float | None = None) -> None:
        """Moves the bar to a step; without a terminal, prints a line, with `more`, `QUIET`
        seconds or more after the one before, at multiples of `log_every` times 1, 2, 5, 10,
        ..., and at the end. `seconds`: of a step, to say how many are left.
        """
        if not self._writes:
            return
        if not self._bar.disable:
            wide = (self._bar.ncols or shutil.get_terminal_size().columns) > 130
            self._bar.set_postfix_str(text + more * wide, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        last, soon = step == self._bar.total, time.monotonic() - self._shown < QUIET
        if step % (self._log_every * self._times) and not last:
            return
        if soon and not last:
            again = str(self._times).startswith("2")
            self._times = self._times * 5 // 2 if again else self._times * 2
            return
        left = (self._bar.total - step) * (seconds or 0.0)
        text += more + f", {tqdm.format_interval(left)} left" * bool(left)
        self.say(f"step {step} of {self._bar.total}: {text}")
        self._shown = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._writes:
            with contextlib.suppress(OSError):  # a log may be on the disk that is full
                self._bar.write(text, file=sys.stderr)
                sys.stderr.flush()


def read(folder: str | os.PathLike[str], name: str = "metrics") -> list[dict[str, Any]]:
    """Returns the lines of one of a run's `FILES`, except damaged and half-written ones; []
    without a file.
    """
    lines, _ = _lines(pathlib.Path(folder) / f"{name}.jsonl")
    return [values for _, values in lines if values is not None]


def _lines(path: pathlib.Path) -> tuple[list[tuple[bytes, dict[str, Any] | None]], bytes]:
    """Returns (line, its values, None if it is damaged) for each line, and the whole file."""

    def values(line):
        with contextlib.suppress(ValueError):
            parsed = json.loads(line.decode())
            if isinstance(parsed, dict) and isinstance(parsed.get("step"), int):
                return parsed
        return None

    content = path.read_bytes() if path.is_file() else b""
    *lines, _ = content.split(b"\n")  # the last one is not complete
    return [(line + b"\n", values(line)) for line in lines], content


def _cut(path: pathlib.Path, after: int) -> int:
    """Removes damaged lines, whose number it returns, and those of steps above `after`."""
    lines, content = _lines(path) if after else ([], b"")
    wanted = b"".join(line for line, values in lines if values and values["step"] <= after)
    if path.is_file() and content.startswith(wanted):
        os.truncate(path, len(wanted))  # for which any disk has room
    else:
        with files.atomic_write(path) as file:
            file.write(wanted)
    return sum(values is None for _, values in lines)


def pairs(lines: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """Returns (step, value) of all lines that have a value of that name."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def report(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `report.md` and its pictures from a run's lines, and returns its path."""
    folder = pathlib.Path(folder)
    metrics, times = read(folder), read(folder, "times")
    train, validation = pairs(metrics, "loss"), pairs(metrics, "validation_loss")
    if not train:
        raise ValueError(
            f"folder={str(folder)!r} must hold metrics.jsonl with a line of a step: there is"
            " nothing to report"
        )

    def values(name):
        return [value for _, value in pairs(metrics + times, name)]

    def median(name):
        return [statistics.median(values(name))] if values(name) else []

    nats = "{:.3f} nats per token"
    best = [min(validation, key=lambda point: point[1])] if validation else []
    rows = [  # title, format, values of which the last is shown
        ("parameters", "{:,}", values("parameters")),
        ("steps", "{:,}", [step for step, _ in train]),
        ("tokens per step", "{:,}", values("tokens_a_step")),
        ("loss of the last training batches", nats, values("loss")),
        ("validation loss", nats, values("validation_loss")),
        ("best validation loss", nats, [loss for _, loss in best]),
        ("step of the best validation loss", "{:,}", [step for step, _ in best]),
        ("bigram model's validation loss", nats, values("bigram_loss")),
        ("norm of the last gradients", "{:.3g}", values("gradient_norm")),
        ("updates skipped as not finite", "{:,}", values("skipped")),
        ("ran on", "{}", values("device")),
        ("tokens/s, median", "{:,.0f}", median("tokens_per_second")),
        ("model FLOPs utilization, median", "{:.1%}", median("mfu")),
        ("memory in GiB, median", "{:.2f}", [x / GIB for x in median("memory_bytes")]),
    ]
    text = [f"# {folder.absolute().name}", "", "| | |", "|---|---|"]
    text += [f"| {title} | {form.format(found[-1])} |" for title, form, found in rows if found]
    text += ["", *(f"![{title}]({name})\n" for name, title in _draw(folder, metrics, times))]
    for step, sample in pairs(read(folder, "samples"), "text")[-1:]:
        text += [f"A sample, after step {step:,}:", ""]
        text += [*(f"    {line}" for line in sample.splitlines()), ""]
    with files.atomic_write(folder / "report.md") as file:
        file.write("\n".join(text).encode())
    return folder / "report.md"


def _draw(
    folder: pathlib.Path, metrics: list[dict[str, Any]], times: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Draws the curves that have points, and returns names of files and titles."""
    # Imported only here: Matplotlib's import takes a second, and a run need not wait for it.
    from course_lib.show import figures

    figures.use_style()
    train, validation = pairs(metrics, "loss"), pairs(metrics, "validation_loss")
    if validation:
        bigram = [("bigram", loss) for _, loss in pairs(metrics, "bigram_loss")]
        loss = figures.loss_curve(train, validation, dict(bigram), title="Loss")
    else:
        loss = figures.lines({"train": train}, "step", "loss (nats per token)", title="Loss")
    drawn = {("loss.png", "Loss"): loss}
    for name in ("learning_rate", "gradient_norm", "tokens_per_second"):
        title = name.replace("_", " ").capitalize()
        if points := pairs(metrics + times, name):
            curve = figures.trace(points, "step", title.lower(), title=title)
            drawn[f"{name}.png", title] = curve
    for (name, _), figure in drawn.items():
        with files.atomic_write(folder / name) as file:
            figure.savefig(file, format="png")
    return list(drawn)
