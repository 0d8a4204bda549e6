"""A learner's notebooks and a new version of the course get along."""

import shutil
import subprocess
import sys

import pytest
import work


@pytest.fixture
def course(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name in ("01_a", "02_b"):
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text("first")
    work.main(root=tmp_path)
    return tmp_path


def texts(course):
    return [path.read_text() for path in sorted((course / "work").glob("*.ipynb"))]


def test_a_new_version_comes_where_the_learner_changed_nothing(course, capsys):
    assert texts(course) == ["first", "first"]
    (course / "work" / "01_a.ipynb").write_text("mine")
    for path in (course / "notebooks").iterdir():
        path.write_text("second")
    (course / "notebooks" / "03_c.ipynb").write_text("new")
    work.main(root=course)
    assert texts(course) == ["mine", "second", "new"]
    assert capsys.readouterr().out == (
        "work/01_a.ipynb is yours. To get the newer one beside it: make work NB=01\n"
    )


def test_a_notebook_taken_anew_keeps_the_learners_beside_it(course):
    (course / "work" / "01_a.ipynb").write_text("mine")
    (course / "notebooks" / "01_a.ipynb").write_text("second")
    work.main("01", course)
    assert texts(course) == ["second", "mine", "first"]


def test_a_learners_notebook_without_news_is_left_without_a_word(course, capsys):
    (course / "work" / "01_a.ipynb").write_text("mine")
    work.main(root=course)
    assert texts(course) == ["mine", "first"]
    assert capsys.readouterr().out == ""


def test_a_number_that_no_notebook_has_is_refused(course):
    with pytest.raises(SystemExit, match="NB='07' must begin the name of one notebook"):
        work.main("07", course)


def test_a_learners_folder_changes_nothing_for_the_linter(course):
    for name in ("pyproject.toml", "tests/test_work.py"):
        shutil.copy(work.ROOT / name, course)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "test_work.py"]
    subprocess.run(ruff, cwd=course, check=True)
