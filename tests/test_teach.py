"""A class gets notebooks without solutions; its grades are the exercises that are right."""

import re

import nbformat
import pytest
import teach
from slow_cases import slow

SETUP = "setup = 1  # notebook.setup()"
RANGE, DIVISION = "check.loss_scale_range(low, high)", "check.forgotten_division(one, four)"
IMPORT = "from course_lib.lessons import check"
STUBS = (f"{IMPORT}\nlow = high = ...\n{RANGE}", f"one = four = ...\n{DIVISION}")
RIGHT = (f"{IMPORT}\nlow, high = six, 14\n{RANGE}", f"one, four = 1, 4\n{DIVISION}")
TASKS = ("## Exercises\n\n**1.**", "**2.** Divide.")


def notebook(*code, solutions=True):
    """Returns a notebook that needs `six` from its first section."""
    cells = [nbformat.v4.new_code_cell(x) for x in (SETUP, "six = 6", "1 / 0", *code)]
    folded = "<details>\n<summary>Solution</summary>\n\nsix\n</details>\n\n" * solutions
    cells.insert(3, nbformat.v4.new_markdown_cell(TASKS[0]))
    cells.insert(5, nbformat.v4.new_markdown_cell(folded + TASKS[1]))
    return nbformat.v4.new_notebook(
        cells=[*cells, nbformat.v4.new_markdown_cell(folded or ".")]
    )


@pytest.fixture
def course(tmp_path, monkeypatch):
    (tmp_path / "course").mkdir()
    nbformat.write(notebook(*STUBS), tmp_path / "course" / "01_toy.ipynb")
    monkeypatch.setattr(teach, "FOLDER", tmp_path / "course")
    return tmp_path


def handed_in(folder, /, *code, name="01_toy", **changes):
    """Returns the path of a copy in which a student has written cells."""
    teach.hand_out(folder / "class")
    book = nbformat.read(folder / "class" / "01_toy.ipynb", 4)
    for cell, stub in zip(book.cells, ("", "", "", "", STUBS[0], "", STUBS[1]), strict=True):
        cell.source = dict(zip(STUBS, code, strict=True)).get(stub, cell.source)
    book.metadata |= changes
    nbformat.write(book, path := folder / f"{name}.ipynb")
    return path


def test_a_copy_has_the_tasks_and_the_stubs_and_no_solution(course):
    teach.hand_out(course / "class")
    cells = nbformat.read(course / "class" / "01_toy.ipynb", 4).cells
    assert [c.source for c in cells if c.cell_type == "markdown"] == list(TASKS)
    assert [c.source for c in cells if c.cell_type == "code"][3:] == list(STUBS)


def test_a_folder_with_something_in_it_is_left_as_it_is(course):
    teach.hand_out(course / "class")
    mine = course / "class" / "01_toy.ipynb"
    mine.write_text("mine")
    for folder in (course / "class", mine):
        with pytest.raises(SystemExit, match="must be new or empty: nothing was written"):
            teach.hand_out(folder)
    assert mine.read_text() == "mine"


ONE_RIGHT = ("raise SystemExit(1)\n" + RIGHT[0], RIGHT[1])
CLASS = {"right": (RIGHT, 2), "an error first": (ONE_RIGHT, 1), "no answers": (STUBS, 0)}


@pytest.mark.parametrize(("code", "right"), CLASS.values(), ids=CLASS)
def test_a_grade_counts_right_answers_whatever_the_cells_before_them_do(course, code, right):
    path = handed_in(course, *code)
    before = path.read_bytes()
    names = ["loss_scale_range", "forgotten_division"][2 - right :]
    assert teach.grade(path) == (right, 2, " ".join(names), "")
    assert path.read_bytes() == before


NOTEBOOKS = sorted(teach.FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize(
    "original",
    [path if path.name[:2] == "21" else slow(path) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_with_the_folded_solutions_as_answers_all_exercises_are_right(original, tmp_path):
    book = nbformat.read(original, 4)
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    codes = [
        "\n".join(re.findall(r"```python\n(.*?)```", x, re.S))
        for x in teach.SOLUTION.findall(text)
    ]
    for cell in book.cells:
        names = teach.CHECK.findall(cell.source) if cell.cell_type == "code" else []
        cell.source = next(
            (x for x in codes if names and f"check.{names[0]}(" in x), cell.source
        )
    nbformat.write(book, tmp_path / original.name)
    right, of, names, _ = teach.grade(tmp_path / original.name)
    assert right == of > 0, names


def test_only_what_an_exercise_needs_is_run():
    book = notebook(*RIGHT)
    assert teach.needed(book) == ["six = 6", *RIGHT]
    cells = [
        "x = slow()",
        "d = {}",
        "d['a'] = 1",
        "print(d)",
        "def f(x): return x + d",
        "f = g =",
    ]
    book.cells = [nbformat.v4.new_code_cell(x) for x in (*cells, "check.places(f)")]
    wanted = ["d = {}", "d['a'] = 1", "def f(x):\n    return x + d", "check.places(f)"]
    assert teach.needed(book) == wanted


@pytest.mark.parametrize("error", [teach.CellTimeoutError, teach.DeadKernelError])
def test_an_end_before_the_last_cell_leaves_what_was_right_before(course, error, monkeypatch):
    class Kernel:
        def __init__(self, book, **options):
            assert options["timeout_func"](None) == 60

        def execute(self):
            teach.done.add("loss_scale_range")
            raise error("gone")

    monkeypatch.setattr(teach, "NotebookClient", Kernel)
    monkeypatch.setattr(teach.time, "monotonic", lambda: 0.0)
    count, _, names, note = teach.grade(handed_in(course, *RIGHT), minutes=1)
    assert (count, names) == (1, "loss_scale_range")
    assert note in ("Stopped after 1 minutes.", "Its process died.")


def no_run(cells, minutes):
    return [], ""


OTHER = ("check.of_tomorrow(3)", RIGHT[1])
BAD = {
    "another release": (dict(course="0"), RIGHT, "Made from another release."),
    "other exercises": ({}, OTHER, "lacks loss_scale_range; has of_tomorrow."),
    "no such number": (
        dict(name="99_toy"),
        RIGHT,
        "No notebook of the course has this number.",
    ),
    "broken": ({}, None, "This is no notebook that can be read: "),
}


@pytest.mark.parametrize(("changes", "code", "note"), BAD.values(), ids=BAD)
def test_a_notebook_that_is_not_this_releases_gets_a_sentence(
    course, changes, code, note, monkeypatch
):
    monkeypatch.setattr(teach, "run", no_run)
    path = handed_in(course, *code or RIGHT, **changes)
    if code is None:
        path.write_text(path.read_text()[:-9])
    count, _, _, said = teach.grade(path)
    assert count == 0 and note in said and "\n" not in said


WRONG = {
    "class ": "FOLDER is empty: name a folder",
    "class {here}/file/x": "cannot be written",
    "grade {here}/none": "must hold STUDENT/NN_name.ipynb",
    "grade {here} --number 77": "must hold STUDENT/77_name.ipynb",
    "grade {here} --csv {here}/file": "is there already: name a new file",
    "grade {here} --csv {here}/none/x.csv": "cannot be written",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_command_that_cannot_work_says_why_and_writes_nothing(course, words, monkeypatch):
    (course / "file").write_text("mine")
    before = sorted(course.rglob("*"))
    monkeypatch.setattr("sys.argv", ["teach.py", *words.format(here=course).split(" ")])
    with pytest.raises(SystemExit, match=WRONG[words]):
        teach.main()
    assert sorted(course.rglob("*")) == before and (course / "file").read_text() == "mine"


def test_the_table_has_a_row_for_each_notebook(course, monkeypatch, capsys):
    monkeypatch.setattr(teach, "run", lambda cells, minutes: (["loss_scale_range"], ""))
    for student in ("student_1", "student_2"):
        (course / "all" / student).mkdir(parents=True)
        nbformat.write(notebook(*RIGHT), course / "all" / student / "01_toy.ipynb")
    table = course / "grades.csv"
    monkeypatch.setattr("sys.argv", ["x", "grade", str(course / "all"), "--csv", str(table)])
    teach.main()
    rows = [f"student_{i},01_toy.ipynb,1,2,loss_scale_range," for i in (1, 2)]
    assert table.read_text().splitlines() == [",".join(teach.HEADINGS), *rows]
    assert capsys.readouterr().out.count(" 1 of 2\n") == 2
