"""Laws of notices to end."""

import ctypes
import os
import signal
import sys
import threading

import jax
import pytest
from jax.experimental import multihost_utils

from course_lib.program import preemption


@pytest.fixture(autouse=True)
def as_python_starts():
    """Handlers as in a program started by hand; a shell's background ignores SIGINT."""
    numbers = (signal.SIGINT, signal.SIGTERM, *preemption.LIKE_SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


SIGNALS = [(number, "SIGTERM") for number in (signal.SIGTERM, *preemption.LIKE_SIGTERM)]
SIGNALS += [(signal.SIGINT, "Ctrl-C")]


@pytest.mark.parametrize(("number", "why"), SIGNALS)
def test_a_signal_is_noticed_after_the_step_and_does_before_it_what_it_did(number, why):
    before = signal.getsignal(number)
    with preemption.notices() as stop_reason:
        assert signal.getsignal(number) is before
        assert stop_reason() == ""
        signal.raise_signal(number)
        assert stop_reason() == why
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_raises_and_a_second_sigterm_changes_nothing(capfd):
    with preemption.notices() as stop_reason:
        assert stop_reason() == ""
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert (
            "ends after this step, with a checkpoint. Again: ends at once"
            in capfd.readouterr().err
        )
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop_reason() == preemption.INTERRUPTED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # "&" and nohup
def test_a_process_that_ignores_a_signal_still_does(number):
    signal.signal(number, signal.SIG_IGN)
    with preemption.notices() as stop_reason:
        for _ in range(2):
            signal.raise_signal(number)
            assert stop_reason() == ""


@pytest.mark.parametrize(("number", "why"), SIGNALS[1:])  # JAX handles SIGTERM
def test_one_of_several_processes_tells_the_others_of_its_signal(monkeypatch, number, why):
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "kill", lambda process, number: told.append((process, number)))
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda call: call == 3
    )
    with preemption.notices() as stop_reason:
        assert stop_reason() == ""
        signal.raise_signal(number)
        assert told == [(os.getpid(), signal.SIGTERM)]
        # the call that all agree on
        assert [stop_reason() for _ in range(2)] == ["", why]
    with preemption.notices() as stop_reason:
        assert [stop_reason() for _ in range(3)] == ["", "", preemption.PREEMPTED]


def handler_in_c(number):
    action = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(number, None, action)
    return int.from_bytes(action.raw[:8], sys.byteorder)  # the function's address comes first


def test_jaxs_handler_of_sigterm_is_out_of_the_way_until_the_first_step_is_done(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda call: False)
    libc = ctypes.CDLL(None)
    jaxs = ctypes.cast(libc.abs, ctypes.c_void_p).value  # any function of an int
    try:
        for steps in (0, 2):
            libc.signal(signal.SIGTERM, libc.abs)
            with preemption.notices() as stop_reason:
                assert handler_in_c(signal.SIGTERM) == 0  # the default: ends at once
                for _ in range(steps):
                    stop_reason()
                    assert handler_in_c(signal.SIGTERM) == jaxs
            assert handler_in_c(signal.SIGTERM) == jaxs
    finally:
        libc.signal(signal.SIGTERM, None)


def test_a_thread_takes_no_signals():
    found = []

    def run():
        with preemption.notices() as stop_reason:
            found.append(stop_reason())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [""]
