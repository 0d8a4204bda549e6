"""What a run writes down: metrics in a folder, a bar on the terminal, and a report with
pictures in the end.

    metrics.jsonl       a line of JSON each: "step", and losses, learning rate; what follows
                        from the configuration alone
    samples.jsonl       a line each: "step", and what the model writes
    times.jsonl         a line each: "step", and what was measured: tokens/s, MFU, memory; and
                        first, on which device
    events/             the numbers of all three, for TensorBoard
    report.md, *.png    made from the lines by `report`

A run that was killed has written lines beyond its last checkpoint, the last one perhaps half.
When it is resumed, they are cut off, so that in the end `metrics.jsonl` and `samples.jsonl` are
those of a run that was never killed, byte for byte. A disk that is full ends no training: lines
wait in memory until there is room again.
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
# leaves room for the words of a line in 80 columns
BAR = "|{bar}| {n_fmt}/{total_fmt} [{remaining} left{postfix}]"
QUIET = 10  # seconds between two lines where there is no terminal to draw a bar on


class Journal:
    """The writing hand of a run; a context, which closes the files."""

    def __init__(
        self, folder: str | os.PathLike[str], after: int, total: int, *, writes: bool = True
    ):
        """Opens the files of a run folder.

        Args:
          folder: of the run.
          after: the step that was restored, 0 at the start; later lines are cut off, and all of
            them at the start.
          total: steps of the whole run, for the bar.
          writes: False in all processes but one, where nothing is written or shown.
        """
        self._writes = writes
        if not writes:
            return
        self._folder, self._said = pathlib.Path(folder), time.monotonic()
        shown = dict(bar_format=BAR, dynamic_ncols=True, disable=not sys.stderr.isatty())
        self._bar: tqdm = tqdm(initial=after, total=total, **shown)
        (self._folder / "events").mkdir(parents=True, exist_ok=True)
        paths = {name: self._folder / f"{name}.jsonl" for name in FILES}
        for path in paths.values():
            if damaged := _cut(path, after):
                self.say(f"{path.name}: {damaged} damaged line(s) left out")
        number = len(list((self._folder / "events").iterdir()))
        # The name that TensorBoard wants.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{number}"
        self._files = {name: _File(path) for name, path in paths.items()}
        self._files["events"] = _File(self._folder / "events" / name)
        self._failing: set[str] = set()
        self._event(0, file_version="brain.Event:2")
        # Tells TensorBoard to forget what an earlier process has written of later steps.
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
        """Writes a line, whole, before it returns; what is not finite is written as null.

        If the disk is full that is said, and the line is written when there is room again.

        Args:
          step: after which step.
          name: of the file: one of `FILES`.
          **values: numbers, None, strings.
        """
        if not self._writes:
            return
        finite = {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in values.items()
        }
        self._add(
            name, (json.dumps({"step": step} | finite, ensure_ascii=False) + "\n").encode()
        )
        numbers = [
            Summary.Value(tag=key, simple_value=x)
            for key, x in values.items()
            if isinstance(x, int | float)
        ]
        if numbers:
            self._event(step, summary=Summary(value=numbers))

    def sync(self) -> bool:
        """Returns whether all lines are on the disk now, which they must be before a checkpoint
        that implies them is whole.
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
        """Adds to a file, says when that begins to fail, and when it ends, and returns whether
        it did not.
        """
        try:
            self._files[name].add(what, sync)
        except OSError as error:
            if name not in self._failing:
                self.say(
                    f"{name} cannot be written ({error.strerror}): training goes on, and they"
                    " wait until there is room"
                )
            self._failing.add(name)
            return False
        else:
            if name in self._failing:
                self.say(f"{name} are written again, none is lost")
            self._failing.discard(name)
            return True

    def report(self) -> None:
        """Writes the report, if there is something to report, or says why it cannot: the
        training is done all the same.
        """
        if self._writes and pairs(read(self._folder), "loss"):
            try:
                report(self._folder)
            except OSError as error:
                self.say(f"the report cannot be written ({error.strerror})")

    def compiling(self) -> None:
        """Says that the first step compiles, behind the bar or in a line; nothing if no step is
        left.
        """
        if not self._writes or self._bar.n >= self._bar.total:
            return
        if self._bar.disable:
            self.say("compiling the step ...")
        else:
            self._bar.set_postfix_str("compiling the step ...")

    def show(self, step: int, text: str) -> None:
        """Moves the bar to a step, with a few words behind it; without a terminal it prints a
        line now and then.
        """
        if not self._writes:
            return
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
        elif time.monotonic() - self._said > QUIET:
            self.say(f"step {step} of {self._bar.total}: {text}")

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._writes:
            self._said = time.monotonic()
            with contextlib.suppress(OSError):  # a log may be on the disk that is full
                self._bar.write(text, file=sys.stderr)
                sys.stderr.flush()


class _File:
    """A file that only grows. What the disk has no room for waits here, so that nothing stands
    half in the middle.
    """

    def __init__(self, path: pathlib.Path):
        self._file = path.open("ab", buffering=0)
        self._waiting, self._written = b"", b""  # since the last sync

    def add(self, what: bytes, sync: bool) -> None:
        """Raises OSError if not all that was ever added is written."""
        self._waiting += what
        while self._waiting:
            count = self._file.write(self._waiting)
            self._written, self._waiting = (
                self._written + self._waiting[:count],
                self._waiting[count:],
            )
        if sync:
            try:
                os.fsync(self._file.fileno())
            except OSError:
                # What was written since the last sync may be lost: it is to be written again.
                self._file.truncate(os.fstat(self._file.fileno()).st_size - len(self._written))
                self._waiting, self._written = self._written, b""
                raise
            self._written = b""

    def close(self) -> int:
        """Returns how many bytes there was no room for."""
        self._file.close()
        return len(self._waiting)


def read(folder: str | os.PathLike[str], name: str = "metrics") -> list[dict[str, Any]]:
    """Returns the lines of a file, but for those that are damaged or half written; none if
    there is no such file.

    Args:
      folder: of the run.
      name: one of `FILES`.
    """
    lines = map(_parsed, _lines(pathlib.Path(folder) / f"{name}.jsonl")[:-1])
    return [line for line in lines if line is not None]


def _lines(path: pathlib.Path) -> list[bytes]:
    """Returns the lines of a file, and what stands behind the end of the last one: half a line,
    or nothing.
    """
    return path.read_bytes().split(b"\n") if path.exists() else [b""]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns what a line says; None if it is damaged, as by a power cut, which may leave
    zeros.
    """
    try:
        found = json.loads(line.decode())
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _cut(path: pathlib.Path, after: int) -> int:
    """Leaves the lines up to a step, at the start none, and returns how many were damaged."""
    lines = _lines(path)
    steps = [None if found is None else found["step"] for found in map(_parsed, lines[:-1])]
    kept = b"".join(
        line + b"\n"
        for line, step in zip(lines, steps, strict=False)
        if step is not None and after >= step
    )
    kept = kept if after else b""
    if path.exists() and b"\n".join(lines).startswith(kept):
        os.truncate(path, len(kept))  # for which there is room on any disk
    else:
        with files.whole_file(path) as file:
            file.write(kept)
    return steps.count(None) if after else 0


def pairs(lines: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    """Returns (step, value) of all lines that have a value of that name."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def report(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `report.md` and its pictures from the lines of a run, whether it has ended or not,
    and returns its path.

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
    bigram = pairs(metrics, "bigram_loss")
    rows = [f"| parameters | {size:,} |" for _, size in pairs(times, "parameters")[-1:]]
    each = [f" of {size:,} tokens" for _, size in pairs(times, "tokens_a_step")[-1:]]
    rows += [f"| steps | {train[-1][0]:,}{''.join(each)} |"]
    rows += [f"| loss of the last training batches | {train[-1][1]:.3f} nats a token |"]
    if validation:
        best = min(validation, key=lambda point: point[1])
        rows += [
            f"| validation loss | {validation[-1][1]:.3f} nats a token; the best {best[1]:.3f},"
            f" after step {best[0]:,} |"
        ]
    rows += [
        f"| bigram model's validation loss | {loss:.3f} nats a token |"
        for _, loss in bigram[-1:]
    ]
    rows += [
        f"| updates left out as not finite | {count} |"
        for _, count in pairs(metrics, "skipped")[-1:]
        if count
    ]
    rows += [f"| ran on | {line['device']} |" for line in times if "device" in line][-1:]
    for name, title, form in _MEASURED:
        if found := [value for _, value in pairs(times, name)]:
            rows.append(f"| {title} | {form(statistics.median(found))} |")
    pictures = _draw(folder, metrics, times)
    text = [f"# {folder.absolute().name}", "", "| | |", "|---|---|", *rows, ""]
    for name, title in pictures:
        text += [f"![{title}]({name})", ""]
    for step, sample in pairs(read(folder, "samples"), "text")[-1:]:
        text += [
            f"A sample, after step {step:,}:",
            "",
            *(f"    {line}" for line in sample.splitlines()),
            "",
        ]
    with files.whole_file(folder / "report.md") as file:
        file.write("\n".join(text).encode())
    return folder / "report.md"


_MEASURED = (
    ("tokens_per_second", "tokens/s, median", "{:,.0f}".format),
    ("mfu", "model FLOPs utilization, median", "{:.1%}".format),
    ("memory_bytes", "memory, median", lambda value: f"{value / GIB:.2f} GiB"),
)


def _draw(
    folder: pathlib.Path, metrics: list[dict[str, Any]], times: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Draws what there is to draw, and returns names of files and titles."""
    # Imported here only: Matplotlib takes a second, in which a run could have begun.
    from course_lib.show import figures

    figures.use_style()
    train, validation = pairs(metrics, "loss"), pairs(metrics, "validation_loss")
    baselines = dict(
        zip(["bigram"], [loss for _, loss in pairs(metrics, "bigram_loss")], strict=False)
    )
    loss, rate, speed = "Loss", "Learning rate", "Tokens a second"
    drawn = {}
    if validation:
        drawn["loss.png", loss] = figures.loss_curve(train, validation, baselines, title=loss)
    else:
        drawn["loss.png", loss] = figures.lines(
            {"train": train}, "step", "loss (nats a token)", title=loss
        )
    series = (("learning_rate", metrics, rate), ("tokens_per_second", times, speed))
    for name, lines, title in series:
        if points := pairs(lines, name):
            drawn[f"{name}.png", title] = figures.trace(
                points, "step", title.lower(), title=title
            )
    for (name, _), figure in drawn.items():
        with files.whole_file(folder / name) as file:
            figure.savefig(file, format="png")
    return list(drawn)
