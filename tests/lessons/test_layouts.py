"""The layout game."""

import pytest
from slow_cases import slow

from course_lib.lessons import layouts
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import virtual

FSDP = Strategy(zero=3)


@pytest.fixture(autouse=True)
def no_submissions(monkeypatch):
    monkeypatch.setattr(layouts, "_submissions", {})


def answer(capsys, *args, **kwargs):
    """Returns the last line that a submission prints."""
    capsys.readouterr()
    assert layouts.submit(*args, **kwargs) is None
    return capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    "level", [slow(each) if each % 2 == 0 else each for each in layouts.levels()]
)
def test_the_planners_best_wins_and_is_not_beaten_by_a_submission_that_does_not_fit(
    level, capsys
):
    best = layouts.best(level)
    minibatches = 1 if "pipe" in best.axes else best.parts
    said = answer(capsys, best.axes, best.strategy, minibatches, level=level)
    assert said.startswith("✓ Right") and f"{best.step:.3g} s per step" in said
    gpus = layouts.levels()[level].cluster.count
    wasteful = answer(capsys, {"data": gpus}, Strategy(zero=0), level=level)
    assert wasteful.startswith("✗ "), "whole copies of the state win: the level is no puzzle"


@pytest.mark.parametrize(
    ("submission", "options", "word"),
    [
        ((...,), {}, "No layout yet"),
        (({"data": 4},), {}, "this level has 8"),
        (({"data": 8},), {"level": 9}, "must be one of"),
        (({"data": 8, "expert": 1}, FSDP), {}, "cannot be"),
        (({"data": 1, "tensor": 8}, Strategy(by="compiler")), {}, "cannot be"),
        (({"pipe": 8}, Strategy(microbatches=8)), {}, "axis data is missing"),
        (({"data": 8}, Strategy(zero=0), 8), {}, "optimizer"),
        (({"data": 2, "pipe": 4}, Strategy(zero=1, microbatches=32)), {}, "bubble"),
        (({"data": 64}, Strategy(zero=3)), {"level": 3}, "data"),
        (({"data": 8, "tensor": 8}, Strategy(zero=1, sequence=True)), {"level": 3}, "ports"),
        (({"data": 1, "tensor": 8}, Strategy(sequence=True), 4), {}, "tensor"),
    ],
    ids=str,
)
def test_a_layout_that_does_not_win_is_told_why(submission, options, word, capsys):
    said = answer(capsys, *submission, **options)
    assert said.startswith("✗ ") and word in said, said
    assert "could not read" not in said


def test_submissions_of_a_level_are_listed_once_each(capsys):
    for _ in range(2):
        layouts.submit({"data": 8}, FSDP, 2)
    layouts.submit({"data": 8}, FSDP, 4)
    printed = capsys.readouterr().out
    assert printed.count("1. data 8, ZeRO 3, 2 parts") == 3
    assert "2. data 8, ZeRO 3, 4 parts" in printed and "3." not in printed


@pytest.mark.skipif(
    virtual.why_unavailable("h100") is not None, reason=str(virtual.why_unavailable("h100"))
)
def test_the_compiler_has_the_last_word_on_memory(capsys):
    layouts.submit({"data": 1, "tensor": 8}, Strategy(zero=0, sequence=True), 8, compile=True)
    assert "The compiler's peak is" in capsys.readouterr().out
