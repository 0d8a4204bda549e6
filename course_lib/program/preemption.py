"""A notice to end: SIGTERM, as a cluster sends before it takes a machine away, or Ctrl-C.

    with preemption.notices() as told_to_end:
        ...    # what the first step needs; until it is done, a notice ends the process at once
        for step in range(1, steps + 1):
            ...
            if why := told_to_end():
                ...    # in all processes after the same step: a checkpoint together, and end

What is left to do must be short: Kubernetes kills what has not ended 30 s after the notice,
Slurm as long as its site says. To prepare a text and to compile a step may take longer, and is
nothing that a checkpoint would keep.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from course_lib.program import processes

PREEMPTED, INTERRUPTED = "preempted", "interrupted"
EXIT_CODE = 75  # the exit code of a process that SIGTERM ends, whenever that is


class ToldToEnd(Exception):
    """Raised in the middle of what can be done again later; its text says why to end."""


@contextlib.contextmanager
def notices() -> Iterator[Callable[[], str]]:
    """Takes signals for as long as a `with` lasts; outside of the main thread, which no signals
    reach, those of others only.

    Until the first step is done, SIGTERM ends this process at once, with `EXIT_CODE`, and
    Ctrl-C (SIGINT) does what it does without this; of several processes the others see that one
    is gone. After that both are notices. Ctrl-C in one of several processes is passed on as
    SIGTERM, of which JAX tells all. A second Ctrl-C does what the first would have done without
    this. A signal that is ignored, as SIGINT in a shell's background, stays so.

    Yields:
      A function that is called after each step, and in between where something takes long, as
      often by all processes. It returns "", or why to end: `INTERRUPTED` where Ctrl-C was
      pressed, `PREEMPTED` elsewhere.
    """
    seen: list[int] = []
    calls = itertools.count(1)
    several = jax.process_count() > 1  # JAX takes SIGTERM then
    in_main = threading.current_thread() is threading.main_thread()
    takes = [
        number
        for number in (signal.SIGTERM, signal.SIGINT)
        if in_main and signal.getsignal(number) is not signal.SIG_IGN
    ]
    ctrl_c = signal.getsignal(signal.SIGINT)

    def note(number, frame):
        seen.append(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, ctrl_c)
            os.write(
                2,
                b"\nCtrl-C: ends after this step, with a checkpoint. Again: ends at once,"
                b" without one\n",
            )
            if several:
                os.kill(os.getpid(), signal.SIGTERM)

    def told_to_end() -> str:
        if (call := next(calls)) == 1:  # the first step is done
            at_once.close()
            if signal.SIGINT in takes:
                handlers.enter_context(_taken(signal.SIGINT, note))
        if not (processes.preempted(call) if several else seen):
            return ""
        return INTERRUPTED if signal.SIGINT in seen else PREEMPTED

    with contextlib.ExitStack() as handlers, contextlib.ExitStack() as at_once:
        if signal.SIGTERM in takes:
            at_once.enter_context(_ends_at_once())
            give_back = handlers.enter_context(_taken(signal.SIGTERM, note))
            if several:
                at_once.callback(give_back)  # first of all, when that ends
        yield told_to_end


@contextlib.contextmanager
def _taken(number: int, handler: Callable[[int, Any], None]) -> Iterator[Callable[[], object]]:
    """Has Python take a signal, and gives it back afterwards: to a handler in C++ perhaps, of
    which Python does not know.

    Yields:
      A function that does so before: at every instant it is taken by one or by the other.
    """
    sigaction, native = ctypes.CDLL(None).sigaction, ctypes.create_string_buffer(1024)
    sigaction(number, None, native)
    before = signal.signal(number, handler)
    try:
        yield lambda: sigaction(number, native, None)
    finally:
        signal.signal(number, before)
        sigaction(number, native, None)


@contextlib.contextmanager
def _ends_at_once() -> Iterator[None]:
    """Has a SIGTERM that Python takes end this process even in the middle of a compilation.

    Python calls a handler only when that is over, but at once it writes the signal's number
    into a pipe, where a thread waits.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)  # as Python wants it
    others = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_wait_for_sigterm, args=(read,), name="sigterm", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(others)  # from now on the handler is all that hears of it
        os.write(write, b"\0")
        thread.join()
        os.close(read)
        os.close(write)


def _wait_for_sigterm(pipe: int) -> None:
    """Reads the numbers of signals, up to a 0."""
    while number := os.read(pipe, 1)[0]:
        if number == signal.SIGTERM:
            os.write(
                2,
                b"\nSIGTERM before the first step: ends at once, as there is nothing new to"
                b" save\n",
            )
            os._exit(EXIT_CODE)
