"""Laws of a program that is interrupted at a chosen step."""

import signal

import pytest

from course_lib.lessons import interrupted
from course_lib.program import command, journal


@pytest.fixture
def caught(tmp_path):
    """The steps that the metrics tell of, at each signal."""
    steps = []

    def note(*_):
        steps.append([line["step"] for line in journal.read(tmp_path)])

    before = signal.signal(signal.SIGUSR1, note)
    yield steps
    signal.signal(signal.SIGUSR1, before)


def test_the_signal_comes_once_when_the_metrics_tell_of_the_step(tmp_path, caught, monkeypatch):
    def train(words):
        with journal.Journal(tmp_path, 0, 3) as book:
            for step in (1, 2, 3):
                book.write(step, loss=1.0)
                book.write(step, "times", seconds=1.0)
        assert words == ["--run", "first"]
        return 7

    monkeypatch.setattr(command, "main", train)
    own = journal.Journal
    assert interrupted.main(["2", "SIGUSR1", "--run", "first"]) == 7
    assert caught == [[1, 2]]
    assert journal.Journal is own, "the next run in this process would be interrupted, too"


def test_a_signal_that_does_not_exist_is_refused_before_the_program_starts(monkeypatch):
    monkeypatch.setattr(command, "main", lambda words: pytest.fail("the program started"))
    with pytest.raises(KeyError, match="SIGNOTHING"):
        interrupted.main(["2", "SIGNOTHING"])
