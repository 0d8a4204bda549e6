"""Laws of the files that a run writes."""

import contextlib
import json
import os
import time
import types

import pytest
from small_run import full_disk
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from course_lib.program import journal
from course_lib.program.journal import Journal


def write(folder, after, last, scale=1.0):
    with Journal(folder, after, 100) as book:
        if not after:
            book.write(0, bigram_loss=4.5)
        for step in range(after + 1, last + 1):
            book.write(step, loss=scale / step, learning_rate=0.1)
            book.write(step, "times", tokens_per_second=1000.0 * step)
            if step % 5 == 0:
                book.write(step, validation_loss=2 / step)
                book.write(step, "samples", text=f"first\nsecond \u2028 é {step}")


def assert_same_files(folder, other):
    for name in (f"{each}.jsonl" for each in journal.FILES):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_lines_after_the_restored_step_are_cut_off_and_written_again(tmp_path):
    write(tmp_path / "unbroken", 0, 20)
    write(tmp_path / "killed", 0, 13, scale=7.0)
    write(tmp_path / "killed", 0, 17)
    write(tmp_path / "killed", 12, 20)
    assert_same_files(tmp_path / "killed", tmp_path / "unbroken")


def test_damaged_and_half_lines_are_left_out_and_it_is_said(tmp_path, capsys):
    write(tmp_path, 0, 10)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    half, zeros, no_line = lines[3][:9], b"\0" * 20 + b"\n", b"[3]\n"
    damaged = [*lines[:6], half, lines[6], zeros, no_line, *lines[7:], b'{"step": 11, "los']
    path.write_bytes(b"".join(damaged))
    assert journal.read(tmp_path) == [json.loads(line) for line in lines[:6] + lines[7:]]
    write(tmp_path, 10, 10)
    assert path.read_bytes() == b"".join(lines[:6] + lines[7:])
    assert "metrics.jsonl: 3 damaged line(s) left out" in capsys.readouterr().err
    path.unlink()
    write(tmp_path, 10, 10)
    said = "metrics.jsonl is not there: its lines up to step 10 are lost\n"
    assert capsys.readouterr().err == said


def test_a_full_disk_ends_the_run_with_a_sentence_and_costs_no_line_before_it(
    tmp_path, capsys, monkeypatch
):
    write(tmp_path / "unbroken", 0, 20)
    write(tmp_path / "full", 0, 8)
    told = r"of .*full cannot be written \(.*too large\): when it can, the same command goes on"
    with full_disk(), pytest.raises(OSError, match=f"events {told}"):
        Journal(tmp_path / "full", 6, 100)  # it has cut lines, which needs no room
    assert [line["step"] for line in journal.read(tmp_path / "full")][-1] == 6
    with pytest.raises(OSError, match=f"metrics {told}"):
        with Journal(tmp_path / "full", 6, 100) as book, full_disk():
            book.write(7, loss=1 / 7, learning_rate=0.1)
    with Journal(tmp_path / "full", 6, 100) as book:
        with full_disk(), pytest.raises(OSError, match="the report of .*full cannot be"):
            book.report()
        # The log may lie on the same disk; closing it fails again.
        with contextlib.suppress(OSError), open("/dev/full", "w") as full:
            monkeypatch.setattr("sys.stderr", full)
            book.say("into a log on a full disk")
            monkeypatch.undo()
    write(tmp_path / "full", 6, 20)
    assert_same_files(tmp_path / "full", tmp_path / "unbroken")


@pytest.mark.parametrize("name", ["events", "metrics", "times"])
def test_what_is_in_a_files_way_is_named(tmp_path, name):
    if name == "events":
        (tmp_path / name).touch()
    else:
        (tmp_path / f"{name}.jsonl").mkdir()
        assert journal.read(tmp_path, name) == []
    with pytest.raises(OSError, match=rf"^{name} of .* cannot be written \(.*{name}"):
        Journal(tmp_path, 5, 10)


def test_a_line_is_there_when_write_returns_and_what_is_not_finite_is_null(tmp_path):
    with Journal(tmp_path, 0, 10) as book:
        book.write(1, loss=0.1 + 0.2, bad=float("nan"), other=float("inf"), none=None)
        text = (tmp_path / "metrics.jsonl").read_text()
        assert json.loads(text, parse_constant=pytest.fail) == {
            **{"step": 1, "loss": 0.1 + 0.2},  # the same float
            **dict.fromkeys(("bad", "other", "none")),
        }


def test_a_logger_gets_the_numbers_of_each_line_and_its_end(tmp_path):
    got = []
    logger = types.SimpleNamespace(
        log=lambda numbers, step: got.append((step, numbers)), finish=lambda: got.append("end")
    )
    with Journal(tmp_path, 0, 10, logger=logger) as book:
        book.write(1, loss=0.5, learning_rate=0.1)
        book.write(1, "times", device="cpu", tokens_per_second=8.0)
        book.write(1, "samples", text="no number")
    line = (1, dict(loss=0.5, learning_rate=0.1))
    assert got == [line, (1, dict(tokens_per_second=8.0)), "end"]


def test_all_lines_are_on_the_disk_when_sync_returns(tmp_path, monkeypatch):
    fsync, synced = os.fsync, set()

    def noted(file):
        fsync(file)
        synced.add((os.fstat(file).st_ino, os.fstat(file).st_size))

    with Journal(tmp_path, 0, 10) as book:
        for name in journal.FILES:
            book.write(1, name, value=0.5)
        paths = [*tmp_path.glob("*.jsonl"), *tmp_path.glob("events/*")]
        assert len(paths) == 4 and all(path.stat().st_size for path in paths)
        monkeypatch.setattr(os, "fsync", noted)
        book.sync()
        assert synced == {(path.stat().st_ino, path.stat().st_size) for path in paths}
        monkeypatch.undo()


def test_tensorboard_reads_the_same_numbers_and_forgets_what_was_cut_off(tmp_path):
    write(tmp_path, 0, 9)
    write(tmp_path, 5, 10)
    first, second = (
        [event for event in EventFileLoader(str(path)).Load()]
        for path in sorted(
            (tmp_path / "events").iterdir(), key=lambda path: int(path.name.rpartition(".")[2])
        )
    )
    assert [event.step for event in second if event.HasField("session_log")] == [6]
    tags = {value.tag for event in first for value in event.summary.value}
    assert tags == set(
        "bigram_loss loss learning_rate tokens_per_second validation_loss".split()
    )
    losses = {event.step: v for event in second for v in event.summary.value if v.tag == "loss"}
    assert list(losses) == [6, 7, 8, 9, 10]


def test_a_journal_that_does_not_write_leaves_nothing(tmp_path, capsys):
    with Journal(tmp_path / "run", 0, 10, writes=False) as book:
        book.write(1, loss=1.0)
        book.show(1, "loss 1")
        book.say("aloud")
        book.report()
    assert not (tmp_path / "run").exists() and capsys.readouterr().err == ""


def test_without_a_terminal_lines_come_at_even_steps_not_too_often(
    tmp_path, capsys, monkeypatch
):
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now, time=time.time)
    monkeypatch.setattr(journal, "time", clock)
    with Journal(tmp_path, 0, 300, log_every=10) as book:
        for step in range(10, 301, 10):
            clock.now += 3.0
            book.show(step, f"loss {step}", ", more", 0.3)
        book.say("aloud")
    *lines, last, said = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1]) for line in lines] == [10, 50, 100, 150, 200, 250]
    assert lines[1] == "step 50 of 300: loss 50, more, 01:15 left"
    assert last == "step 300 of 300: loss 300, more" and said == "aloud"


def test_the_report_says_what_the_lines_say_and_shows_it(tmp_path):
    write(tmp_path, 0, 20)
    with Journal(tmp_path, 20, 20) as book:
        book.write(20, "times", device="1 x abacus", parameters=1234, tokens_a_step=5678)
    path = journal.report(tmp_path)
    text = path.read_text()
    for row in (
        "| parameters | 1,234 |",
        "| steps | 20 |",
        "| tokens per step | 5,678 |",
        "| validation loss | 0.100 nats per token |",
        "| step of the best validation loss | 20 |",
        "| bigram model's validation loss | 4.500 nats per token |",
        "| ran on | 1 x abacus |",
        "| tokens/s, median | 10,500 |",
    ):
        assert row in text
    assert "skipped" not in text and "    first\n    second" in text
    for name in ("loss.png", "learning_rate.png", "tokens_per_second.png"):
        assert f"({name})" in text and (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_report_leaves_out_what_there_is_not(tmp_path):
    write(tmp_path, 0, 10)
    path = tmp_path / "samples.jsonl"  # the last one is damaged
    path.write_bytes(b'"tgxt"'.join(path.read_bytes().rsplit(b'"text"', 1)))
    assert "A sample, after step 5:" in journal.report(tmp_path).read_text()
    write(tmp_path, 0, 3)
    text = journal.report(tmp_path).read_text()
    assert "| validation loss" not in text and "(loss.png)" in text
    with pytest.raises(ValueError, match="there is nothing to report"):
        journal.report(tmp_path / "nothing")
