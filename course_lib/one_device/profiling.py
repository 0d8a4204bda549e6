"""Profiling: record where the time of a step goes, and read it in Python.

`trace` records a few steps with JAX's profiler, and `read` opens the record without a browser.
XProf opens the same record (https://docs.jax.dev/en/latest/profiling.html).
"""

import contextlib
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from course_lib import xla_flags
from course_lib.measure import program

STEP = "train"  # the name of a step in a record


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of one operation of a compiled program."""

    op: str  # its instruction in the compiled program, such as "fusion.12"
    start: float  # seconds
    duration: float  # seconds until it was done, with the operations inside it (a loop's body)
    self_time: float  # its part of these: operations that run at once get equal parts
    line: str  # the thread (CPU) or stream (GPU) that started it
    program: str = ""  # its compiled program, such as "jit_train_step"; empty if not known
    program_id: int = 0  # tells programs of one name apart
    container: bool = False  # it only runs other operations, as a loop or a conditional does


@dataclasses.dataclass(frozen=True)
class Busy:
    """Busy and idle time of one step, in seconds."""

    seconds: float  # the whole step
    busy: float  # at least one operation was running
    gaps: tuple[tuple[float, float], ...]  # (start in the step, length), longest first

    @property
    def idle(self) -> float:
        """Seconds in which no operation was running."""
        return self.seconds - self.busy


@dataclasses.dataclass(frozen=True)
class Trace:
    """The steps of a trace and the operations that ran in it."""

    device: str  # "/host:CPU", "/device:GPU:0"
    spans: tuple[tuple[float, float], ...]  # (start, end) of each step in seconds
    events: tuple[Event, ...]  # those that began in a step, by their start

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of each step, from its dispatch until its results are there."""
        return tuple(end - start for start, end in self.spans)

    def during(self, step: int) -> list[Event]:
        """Returns the operations of one step (0 is the first), timed from the step's start."""
        start, end = self.spans[step]
        events = (event for event in self.events if start <= event.start < end)
        return [dataclasses.replace(event, start=event.start - start) for event in events]

    def busy(self) -> list[Busy]:
        """Returns compute against idle time for each step.

        A step is busy while at least one operation runs, on any thread or stream; containers,
        such as a `while`, do not count. On a CPU several threads share one operation, and the
        profile does not say how many worked.
        """
        return [busy_time(self.during(i), seconds) for i, seconds in enumerate(self.steps)]


def trace(logdir: str | Path, step: Any, state: Any, batch: Any, *, steps: int = 3) -> Any:
    """Records a few training steps with JAX's profiler, and returns the last state.

    One step runs before the recording, which then contains no compilation. `trace` waits for
    each step before it dispatches the next, so that operations lie within their step. A
    training loop that does not wait hides the dispatch of a step behind the previous one.

    Args:
      logdir: a folder; the record goes to `plugins/profile/<time>/` in it, where XProf
        looks.
      step: a compiled `step(state, batch) -> (state, metrics)`.
      state: the first state, which a donating step overwrites.
      batch: the batch for every step.
      steps: how many steps to record.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1: nothing would be recorded")
    if jax.default_backend() == "gpu" and not xla_flags.kernels_have_names():
        raise RuntimeError(
            "XLA may run this step as CUDA graphs, whose kernels have no names, and which may"
            " not survive a recording: call xla_flags.name_kernels() before JAX starts"
        )
    state, _ = jax.block_until_ready(step(state, batch))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own frames are many, and slow the step down
    with _quiet():
        jax.profiler.start_trace(str(logdir), profiler_options=options)
    try:
        for i in range(steps):
            with jax.profiler.StepTraceAnnotation(STEP, step_num=i):
                state, _ = jax.block_until_ready(step(state, batch))
    finally:
        with _quiet():
            jax.profiler.stop_trace()
    return state


def read(logdir: str | Path) -> Trace:
    """Reads the newest record under a folder that `trace` wrote to, for the first device that
    computed. An operation inside which others ran, on the same thread, is a container.
    One that still runs at the end of its step is cut there.
    """
    files = list(Path(logdir).glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(
            f"logdir={str(logdir)!r} must hold plugins/profile/*/*.xplane.pb: run"
            " profiling.trace"
        )
    newest = max(files, key=lambda file: file.stat().st_mtime)
    planes = list(ProfileData.from_file(str(newest)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    devices.sort(key=lambda plane: plane.name)
    hosts = [plane for plane in planes if plane.name == "/host:CPU"]
    with warnings.catch_warnings():
        # JAX 0.7.2 on Python 3.13 warns: "event_stats has no __module__".
        warnings.simplefilter("ignore", DeprecationWarning)
        annotations = (
            e for plane in hosts for line in plane.lines for e in line.events if e.name == STEP
        )
        spans = sorted(
            (e.start_ns * 1e-9, e.end_ns * 1e-9)
            for e in annotations
            if "step_num" in dict(e.stats)
        )
        # Devices first: where there is one, the host only launches operations.
        for plane in devices + hosts:
            operations = sorted(_ops(plane), key=lambda event: event.start)
            if events := [e for span in spans for e in _in_step(operations, *span)]:
                return Trace(plane.name, tuple(spans), tuple(events))
    raise ValueError(
        f"logdir={str(logdir)!r} must hold steps named {STEP!r}, with operations in them"
    )


def op_scopes(
    compiled: jax.stages.Compiled | jax.stages.Lowered,
) -> dict[tuple[str, str], str]:
    """Returns the scope in the source of each instruction of a compiled program:
    `{("jit_step", "fusion.12"): "jit(step)/transpose(jvp(Net))/mlp/dot_general"}`.

    A fusion has the scope of its last operation. Instructions added by the compiler are
    missing. A step that is only lowered is compiled without JAX's persistent cache, which may
    return a program with another program's names.
    """
    module = program.read(compiled).module
    scopes = {name: one.scope for name, one in module.instructions.items()}
    return {(module.name, name): scope for name, scope in scopes.items() if scope}


def _ops(plane: Any) -> list[Event]:
    """Returns the operations of a plane of a record, of its first device."""
    # The other lines of a GPU repeat those of its streams.
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    lines = [
        (line.name, [(e, dict(e.stats)) for e in line.events])
        for line in streams or plane.lines
    ]
    every = [one for _, events in lines for one in events]
    # A host's threads work for all of its CPU devices.
    devices = {
        s["device_ordinal"] for _, s in every if {"hlo_op", "device_ordinal"} <= s.keys()
    }
    first = min(devices, default=0)
    # An event of a CPU ends when its thread goes on to the next. The operation, which other
    # threads may run, is done at the event "end: ...".
    done = {s["_c"]: e.end_ns for e, s in every if "_c" in s and e.name.startswith("end: ")}
    found, around = [], set()
    for name, events in lines:
        inside: list[tuple[float, tuple[str, int, str]]] = []  # of these, on this thread
        for e, stats in sorted(events, key=lambda one: (one[0].start_ns, -one[0].end_ns)):
            # A copy on a GPU, or a CUDA graph, is no instruction: it keeps its own name.
            op = stats.get("hlo_op", e.name if streams else None)
            if op is None or stats.get("device_ordinal", first) != first:
                continue
            key = str(stats.get("hlo_module", "")), int(stats.get("program_id", 0)), str(op)
            while inside and inside[-1][0] <= e.start_ns:
                inside.pop()
            around |= {outer for end, outer in inside[-1:] if e.end_ns <= end}
            inside.append((e.end_ns, key))
            end = max(e.end_ns, done.get(stats.get("_p"), 0))
            found.append((e.start_ns * 1e-9, (end - e.start_ns) * 1e-9, name, key))
    return [
        Event(op, start, seconds, 0.0, name, module, number, (module, number, op) in around)
        for start, seconds, name, (module, number, op) in found
    ]


def _in_step(operations: list[Event], begin: float, end: float) -> list[Event]:
    """Returns the operations that begin in a step, cut at its end, with their self time."""
    events = [event for event in operations if begin <= event.start < end]
    changes = [
        (time, number)
        for number, event in enumerate(events)
        if not event.container
        for time in (event.start, min(event.start + event.duration, end))
    ]
    own, running, before = [0.0] * len(events), set[int](), begin
    for time, number in sorted(changes):
        for one in running:
            own[one] += (time - before) / len(running)
        running ^= {number}  # it starts, or it is done
        before = time
    return [
        dataclasses.replace(e, self_time=part, duration=min(e.duration, end - e.start))
        for e, part in zip(events, own, strict=True)
    ]


def busy_time(events: Iterable[Event], seconds: float) -> Busy:
    """Divides a step of `seconds` by the union of its events, timed from its start."""
    busy, reached, gaps = 0.0, 0.0, []
    for event in sorted(events, key=lambda event: event.start):
        end = min(event.start + event.duration, seconds)
        if not event.container and end > reached:
            if event.start > reached:
                gaps.append((reached, event.start - reached))
            busy += end - max(event.start, reached)
            reached = end
    if seconds > reached:
        gaps.append((reached, seconds - reached))
    return Busy(seconds, busy, tuple(sorted(gaps, key=lambda gap: -gap[1])))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discards stderr of C++ libraries: some versions of the profiler log their start."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
