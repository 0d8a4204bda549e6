"""Writes a run's metrics: lines in its folder, a bar on the terminal, and a report.

    metrics.jsonl       JSON lines with "step", losses and learning rate: numbers that follow
                        from the configuration alone
    samples.jsonl       JSON lines with "step" and a text that the model generated
    times.jsonl         JSON lines with "step" and measurements: tokens/s, MFU, memory. The
                        first line of each start names the device
    events/             the numbers of all three, for TensorBoard
    report.md, *.png    made from the lines by `report`

A run that is killed may have written lines beyond its last checkpoint, and half of one more
line. They are removed when the run resumes, so in the end `metrics.jsonl` and `samples.jsonl`
are those of a run that was never killed, byte for byte. A full disk does not end a training:
lines wait in memory until there is room.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import socket
import statistics
import sys
import time
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tqdm import tqdm

from course_lib import files
from course_lib.measure.units import GIB

FILES = ("metrics", "samples", "times")
# Leaves room for the text of a line in 80 columns.
BAR = "|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
QUIET = 10  # seconds between two lines where there is no terminal to draw a bar on


class Journal:
    """Writes the files of a run and shows its progress; a context, which closes the files."""

    def __init__(
        self, folder: str | os.PathLike[str], after: int, total: int, *, writes: bool = True
    ):
        """Opens the files of a run folder.

        Args:
          folder: of the run.
          after: the restored step; 0 for a new run. Lines of later steps are removed; for a
            new run, all lines are.
          total: steps of the run, for the bar.
          writes: False in all processes but one: then nothing is written or shown.
        """
        self._writes = writes
        if not writes:
            return
        self._folder, self._last_print = pathlib.Path(folder), time.monotonic()
        shown = dict(bar_format=BAR, dynamic_ncols=True, disable=not sys.stderr.isatty())
        self._bar: tqdm = tqdm(initial=after, total=total, **shown)
        (self._folder / "events").mkdir(parents=True, exist_ok=True)
        number = len(list((self._folder / "events").iterdir()))
        # The name that TensorBoard expects.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{number}"
        self._files = {"events": _File(self._folder / "events" / name)}
        for name in FILES:
            path = self._folder / f"{name}.jsonl"
            if damaged := _cut(path, after):
                self.say(f"{path.name}: {damaged} damaged line(s) left out")
            self._files[name] = _File(path)
        self._failing: set[str] = set()
        self._event(0, file_version="brain.Event:2")
        # TensorBoard then drops what an earlier process wrote of later steps.
        self._event(after + 1, session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *error: object) -> None:
        if self._writes:
            self.sync()
            for name, file in self._files.items():
                if lost := file.close():
                    self.say(f"{name}: {lost} bytes could not be written and are lost")
            self._bar.close()

    def write(self, step: int, name: str = "metrics", **values: Any) -> None:
        """Writes a line before it returns; a number that is not finite becomes null.

        If the disk is full, that is reported, and the line is written when there is room.

        Args:
          step: the step after which this holds.
          name: of the file: one of `FILES`.
          **values: numbers, None, strings.
        """
        if not self._writes:
            return
        line = {"step": step} | {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in values.items()
        }
        self._add(name, (json.dumps(line, ensure_ascii=False) + "\n").encode())
        numbers = [
            Summary.Value(tag=key, simple_value=x)
            for key, x in values.items()
            if isinstance(x, int | float)
        ]
        if numbers:
            self._event(step, summary=Summary(value=numbers))

    def sync(self) -> bool:
        """Flushes all lines to the disk, and returns whether that succeeded. Call it before a
        checkpoint of the same step is complete.
        """
        return not self._writes or all(
            [self._add(name, b"", sync=True) for name in self._files]
        )

    def _event(self, step: int, **what: Any) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(
            Event(wall_time=time.time(), step=step, **what).SerializeToString()
        )
        self._add("events", record.getvalue())

    def _add(self, name: str, what: bytes, sync: bool = False) -> bool:
        """Appends to a file, and returns whether that succeeded. Prints a line when writing
        begins to fail, and another one when it works again.
        """
        try:
            self._files[name].add(what, sync)
        except OSError as error:
            if name not in self._failing:
                self.say(
                    f"{name} cannot be written ({error.strerror}): training goes on, and new"
                    " lines wait in memory until there is room"
                )
            self._failing.add(name)
            return False
        if name in self._failing:
            self.say(f"{name} are written again, none is lost")
        self._failing.discard(name)
        return True

    def report(self) -> None:
        """Writes the report if there are metrics. If that fails, prints a line, and raises
        nothing.
        """
        if self._writes and pairs(read(self._folder), "loss"):
            try:
                report(self._folder)
            except OSError as error:
                self.say(f"the report cannot be written ({error.strerror})")

    def compiling(self) -> None:
        """Says that the first step compiles, if a step is left."""
        if not self._writes or self._bar.n >= self._bar.total:
            return
        if self._bar.disable:
            self.say("compiling the step ...")
        else:
            self._bar.set_postfix_str("compiling the step ...")

    def show(self, step: int, text: str) -> None:
        """Moves the bar to a step, with a text behind it. Without a terminal, prints a line
        every `QUIET` seconds instead.
        """
        if not self._writes:
            return
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._last_print > QUIET:
            self.say(f"step {step} of {self._bar.total}: {text}")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._writes:
            self._last_print = time.monotonic()
            with contextlib.suppress(OSError):  # a log may be on the disk that is full
                self._bar.write(text, file=sys.stderr)
                sys.stderr.flush()


class _File:
    """A file that only grows. Bytes that the disk has no room for wait in memory, so no line
    stays half written between others.
    """

    def __init__(self, path: pathlib.Path):
        self._file = path.open("ab", buffering=0)
        self._waiting, self._written = b"", b""  # since the last sync

    def add(self, what: bytes, sync: bool) -> None:
        """Raises OSError unless all that was ever added is written."""
        self._waiting += what
        while self._waiting:
            count = self._file.write(self._waiting)
            self._written += self._waiting[:count]
            self._waiting = self._waiting[count:]
        if sync:
            try:
                os.fsync(self._file.fileno())
            except OSError:
                # Lines written since the last sync may be lost: write them again.
                self._file.truncate(os.fstat(self._file.fileno()).st_size - len(self._written))
                self._waiting, self._written = self._written, b""
                raise
            self._written = b""

    def close(self) -> int:
        """Closes the file and returns how many bytes are lost."""
        self._file.close()
        return len(self._waiting)


def read(folder: str | os.PathLike[str], name: str = "metrics") -> list[dict[str, Any]]:
    """Returns the lines of a file, except damaged and half-written ones; [] if there is no such
    file.

    Args:
      folder: of the run.
      name: one of `FILES`.
    """
    lines, _ = _lines(pathlib.Path(folder) / f"{name}.jsonl")
    return [values for _, values in lines if values is not None]


def _lines(path: pathlib.Path) -> tuple[list[tuple[bytes, dict[str, Any] | None]], bytes]:
    """Returns (line, its values) for each line, and the file as it is. The values are None if
    the line is damaged, for example by a power cut, which may leave zeros.
    """

    def values(line):
        try:
            parsed = json.loads(line.decode())
        except ValueError:
            return None
        return (
            parsed if isinstance(parsed, dict) and isinstance(parsed.get("step"), int) else None
        )

    content = path.read_bytes() if path.exists() else b""
    *lines, _ = content.split(b"\n")  # the last one is not complete
    return [(line + b"\n", values(line)) for line in lines], content


def _cut(path: pathlib.Path, after: int) -> int:
    """Removes the lines of steps above `after`, or all lines if `after` is 0. Returns how many
    of the lines it read were damaged.
    """
    lines, content = _lines(path) if after else ([], b"")
    wanted = b"".join(line for line, values in lines if values and values["step"] <= after)
    if path.exists() and content.startswith(wanted):
        os.truncate(path, len(wanted))  # for which any disk has room
    else:
        with files.atomic_write(path) as file:
            file.write(wanted)
    return sum(values is None for _, values in lines)


def pairs(lines: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """Returns (step, value) of all lines that have a value of that name."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def report(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `report.md` and its pictures from the lines of a run, complete or not, and returns
    its path.

    Raises:
      ValueError: if there are no metrics yet.
    """
    folder = pathlib.Path(folder)
    metrics, times = read(folder), read(folder, "times")
    train, validation = pairs(metrics, "loss"), pairs(metrics, "validation_loss")
    if not train:
        raise ValueError(
            f"folder={str(folder)!r} must hold metrics.jsonl with a line of a step: there is"
            " nothing to report"
        )

    def last(name):
        return [value for _, value in pairs(metrics + times, name)][-1:]

    def median(name):
        values = [value for _, value in pairs(times, name)]
        return [statistics.median(values)] if values else []

    nats = "{:.3f} nats per token"
    best = [min(validation, key=lambda point: point[1])] if validation else []
    rows = [  # title, format, no or one value
        ("parameters", "{:,}", last("parameters")),
        ("steps", "{:,}", [train[-1][0]]),
        ("tokens per step", "{:,}", last("tokens_a_step")),
        ("loss of the last training batches", nats, last("loss")),
        ("validation loss", nats, last("validation_loss")),
        ("best validation loss", nats, [loss for _, loss in best]),
        ("step of the best validation loss", "{:,}", [step for step, _ in best]),
        ("bigram model's validation loss", nats, last("bigram_loss")),
        (
            "updates skipped as not finite",
            "{:,}",
            [count for count in last("skipped") if count],
        ),
        ("ran on", "{}", last("device")),
        ("tokens/s, median", "{:,.0f}", median("tokens_per_second")),
        ("model FLOPs utilization, median", "{:.1%}", median("mfu")),
        ("memory in GiB, median", "{:.2f}", [x / GIB for x in median("memory_bytes")]),
    ]
    text = [f"# {folder.absolute().name}", "", "| | |", "|---|---|"]
    text += [f"| {title} | {form.format(x)} |" for title, form, values in rows for x in values]
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
    for name, title in (
        ("learning_rate", "Learning rate"),
        ("tokens_per_second", "Tokens per second"),
    ):
        if points := pairs(metrics + times, name):
            curve = figures.trace(points, "step", title.lower(), title=title)
            drawn[f"{name}.png", title] = curve
    for (name, _), figure in drawn.items():
        with files.atomic_write(folder / name) as file:
            figure.savefig(file, format="png")
    return list(drawn)
