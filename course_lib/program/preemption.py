"""Notices to end: Ctrl-C, SIGTERM or SIGUSR1 from a cluster, SIGHUP from a closed terminal.

    with preemption.notices() as stop_reason:
        for step in range(1, steps + 1):
            ...
            if why := stop_reason():
                ...    # in all processes after the same step: save a checkpoint, and end

Little time is left after SIGTERM: 30 s by default in Kubernetes; under Slurm, the site decides.
"""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

PREEMPTED, INTERRUPTED = "SIGTERM", "Ctrl-C"
LIKE_SIGTERM = [signal.SIGHUP, signal.SIGUSR1]

# The C library's `signal`: Python neither sees nor restores the handler that JAX sets in C++.
_set_handler = ctypes.CDLL(None).signal
_set_handler.argtypes, _set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p


class StopRequested(Exception):
    """Raised inside work that can be repeated later; its text is the reason to end."""


@contextlib.contextmanager
def notices() -> Iterator[Callable[[], str]]:
    """Turns signals into notices while a `with` lasts. Yields a function that all processes
    call after each step, and during work that takes long: it returns "", or why to end,
    `INTERRUPTED` where somebody pressed Ctrl-C, else `PREEMPTED`.

    Until the first step is done there is nothing to save, and each signal ends the process at
    once, even during a compilation. After that, a second Ctrl-C does. A signal that the process
    ignores stays ignored: SIGINT in a shell's background, SIGHUP under nohup. Of several
    processes, JAX tells all of a SIGTERM to any, and they agree on a step.
    """
    seen: list[int] = []
    calls = itertools.count(1)
    several = jax.process_count() > 1
    signals = [signal.SIGINT, *LIKE_SIGTERM, *[signal.SIGTERM] * (not several)]
    # Elsewhere Python handles no signals.
    in_main = threading.current_thread() is threading.main_thread()
    before = {
        number: handler
        for number in signals
        if in_main and (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }

    def note(number, frame):
        seen.append(number)
        if number == signal.SIGTERM:
            return
        name, more = f"{signal.Signals(number).name}, taken as SIGTERM", ""
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            name, more = "Ctrl-C", ". Again: ends at once, without one"
        with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
            os.write(2, f"\n{name}: ends after this step, with a checkpoint{more}\n".encode())
        if several:  # JAX tells the others
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_reason() -> str:
        if (call := next(calls)) == 1:  # the first step is done
            if several:
                _set_handler(signal.SIGTERM, jax_handler)
            for number in before:
                signal.signal(number, note)
        if not (multihost_utils.reached_preemption_sync_point(call) if several else seen):
            return ""
        return INTERRUPTED if signal.SIGINT in seen else PREEMPTED

    # None as an argument: SIG_DFL.
    jax_handler = _set_handler(signal.SIGTERM, None) if several else None
    try:
        yield stop_reason
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if several:
            _set_handler(signal.SIGTERM, jax_handler)
