"""Which exercises a learner has done is remembered over all notebooks."""

import json
import re
from pathlib import Path

import pytest

from course_lib import lessons
from course_lib.lessons import check, done

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def board(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_SCOREBOARD", str(tmp_path / "game.json"))
    return tmp_path


def test_a_right_answer_is_remembered_and_a_wrong_one_is_not(capsys):
    check.loss_scale_range(lowest=5, highest=14)
    assert done.exercises() == []
    check.loss_scale_range(lowest=6, highest=14)
    check.loss_scale_range(lowest=6, highest=14)
    assert done.exercises() == ["loss_scale_range"]
    lessons.progress()
    text = capsys.readouterr().out
    assert "✓ loss_scale_range" in text and "· scaled_step" in text
    lessons.progress()  # still a function after the module was loaded


def test_a_damaged_file_counts_as_empty_and_an_unwritable_one_stops_no_check(board, capsys):
    for text in ("{", "5"):
        (board / done.FILE).write_text(text)
        assert done.exercises() == []
    (board / done.FILE).unlink()
    (board / done.FILE).mkdir()
    check.loss_scale_range(lowest=6, highest=14)
    assert "✓ Right" in capsys.readouterr().out


def test_a_line_of_the_table_has_the_exercises_of_its_notebook():
    assert len(NOTEBOOKS) == len(done.NOTEBOOKS)
    for path, line in zip(NOTEBOOKS, done.NOTEBOOKS, strict=True):
        cells = json.loads(path.read_text())["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        asked = set(re.findall(r"\bcheck\.(\w+)\(", text))
        assert asked == {
            name for name, module in check.modules().items() if module in line.split()
        }
