"""What must be true of a notice to end."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import jax
import pytest

from course_lib.program import preemption, processes


@pytest.fixture(autouse=True)
def as_python_starts():
    """Handlers as in a program started by hand; a shell's background ignores SIGINT."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGTERM, "preempted"), (signal.SIGINT, "interrupted")]
)
def test_a_signal_is_noticed_after_the_step_and_no_longer_taken_after_that(number, why):
    before = signal.getsignal(number)
    with preemption.notices() as told_to_end:
        assert told_to_end() == ""
        signal.raise_signal(number)
        assert told_to_end() == why
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_is_pythons_and_a_second_sigterm_changes_nothing(capfd):
    with preemption.notices() as told_to_end:
        assert told_to_end() == ""
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert (
            "ends after this step, with a checkpoint. Again: ends at once"
            in capfd.readouterr().err
        )
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert told_to_end() == preemption.INTERRUPTED


def test_what_ignores_ctrl_c_goes_on_to():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with preemption.notices() as told_to_end:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert told_to_end() == ""


def handler_in_c(number):
    action = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(number, None, action)
    return action.raw[:8]  # the address of the function comes first


@pytest.mark.parametrize("later", [False, True], ids=["as the pipe is closed", "after that"])
def test_a_sigterm_while_the_first_step_ends_is_not_lost(monkeypatch, later):
    closed, set_fd, join = [], signal.set_wakeup_fd, threading.Thread.join

    def close(fd, **more):
        before = set_fd(fd, **more)
        if fd == -1 and not later:
            closed.append(signal.raise_signal(signal.SIGTERM))
        return before

    def wait(thread, *given):
        join(thread, *given)
        if later and thread.name == "sigterm":
            closed.append(signal.raise_signal(signal.SIGTERM))

    monkeypatch.setattr(signal, "set_wakeup_fd", close)
    monkeypatch.setattr(threading.Thread, "join", wait)
    with preemption.notices() as told_to_end:
        assert told_to_end() == preemption.PREEMPTED and len(closed) == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_one_of_several_processes_tells_the_others_of_its_ctrl_c(monkeypatch):
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(os, "kill", lambda process, number: told.append((process, number)))
    monkeypatch.setattr(processes, "preempted", lambda call: call == 3)
    jaxs = handler_in_c(signal.SIGTERM)  # of which Python does not know
    with preemption.notices() as told_to_end:
        assert told_to_end() == ""
        assert handler_in_c(signal.SIGTERM) == jaxs
        signal.raise_signal(signal.SIGINT)
        assert told == [(os.getpid(), signal.SIGTERM)]
        # the call that all agree on
        assert [told_to_end() for _ in range(2)] == ["", preemption.INTERRUPTED]
    with preemption.notices() as told_to_end:
        assert [told_to_end() for _ in range(3)] == ["", "", preemption.PREEMPTED]


def test_before_the_first_step_ctrl_c_is_pythons():
    with pytest.raises(KeyboardInterrupt), preemption.notices():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


COMPILES = """
import hashlib, os
from course_lib.program import preemption
with preemption.notices() as told_to_end:
    {first}
    print("ready", flush=True)
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", {rounds})  # in C, as a compilation is
        if told_to_end():
            os._exit(3)
"""


@pytest.mark.parametrize(
    ("first", "rounds", "code"),
    [("", 1_000_000_000, preemption.EXIT_CODE), ("told_to_end()", 10_000, 3)],
    ids=["before", "after"],
)
def test_before_the_first_step_sigterm_ends_a_process_even_while_it_compiles(
    first, rounds, code
):
    command = [sys.executable, "-W", "error", "-c", COMPILES.format(first=first, rounds=rounds)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        late = threading.Timer(600, process.kill)
        late.start()
        try:
            assert process.stdout.readline() == "ready\n"
            process.terminate()
            said = process.communicate()[1]
        finally:
            late.cancel()
    assert process.returncode == code, said
    assert said.strip().startswith("SIGTERM before the first step: ends at once") is (not first)


def test_a_thread_takes_no_signals():
    found = []

    def run():
        with preemption.notices() as told_to_end:
            found.append(told_to_end())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [""]
