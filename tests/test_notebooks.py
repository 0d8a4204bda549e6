"""Each stored notebook keeps the rules of docs/design.md; its test lists all that it breaks.

`pytest --nbval notebooks` compares outputs, but skips cells that were never run.
"""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import nbformat
import pytest
import stamp

from course_lib.lessons import check
from course_lib.measure import recorded
from course_lib.show import notebook as show_notebook

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
REASONS = {"clock", "device", "versions"}  # what speaks in an output that is not compared
# the notebooks that say so in each such cell
REASONED = {"06", "07", "09", "10", "11", "12", "13", "14", "21", "23"}
COMPARED = {"nbval-ignore-output", "nbval-check-output"}
TAGS = REASONS | COMPARED | {"raises-exception", "sizes", "technique"}
PYTHON = {"display_name": "Python 3", "language": "python", "name": "python3"}
PLAIN_MODEL = "from course_lib.lessons import tiny_transformer"  # of notebook 5
PART_ONE = [name for name in NAMES if name < "07" or name == "23_memory_profiling"]
LINES_OF_TECHNIQUE = dict.fromkeys(PART_ONE, 25) | {"05_transformer": 60}
ANSWERED = re.compile(r"^(check\.|lessons\.submit\(|layouts\.submit\()", re.M)
ASSERTED = re.compile(r"^\s*assert |assert_allclose|assert_array_equal", re.M)
HERE = {str(Path.home()), str(Path(__file__).parents[2])} - {"/"}
FOLDERS = sorted({"/home", "/Users", "/tmp", "/usr/lib", "/var"} | HERE)
MACHINE = re.compile(rf"ipykernel_\d+|(?:{'|'.join(map(re.escape, FOLDERS))})/\w|site-packages")


def test_they_are_numbered_and_the_readme_links_to_each():
    numbers = [int(name[:2]) for name in NAMES]
    assert numbers == [*range(1, len(numbers) + 1)]
    readme = (FOLDER.parent / "README.md").read_text()
    assert sorted(re.findall(r"\(notebooks/(\w+)\.ipynb\)", readme)) == NAMES


def test_every_check_is_called_by_a_notebook():
    texts = " ".join(path.read_text() for path in FOLDER.glob("*.ipynb"))
    assert [name for name in dir(check) if f"check.{name}(" not in texts] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_keeps_all_rules(name, monkeypatch):
    book = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    broken = [*of_the_file(name, book, cells), *of_the_exercises(book, cells)]
    for number, cell in enumerate(cells, 1):
        broken += [f"code cell {number}: {one}" for one in of_a_cell(cell)]
    broken += [*of_shown_sources(name, cells, monkeypatch)]
    assert not broken, "\n".join([name, *broken])


def of_the_file(name, book, cells):
    """Yields what is broken: how it was run, how it opens, what it shows."""
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        yield f"was not run from top to bottom: make notebooks NB={name[:2]}"
    if book.metadata != {
        "kernelspec": PYTHON,
        "language_info": book.metadata.get("language_info"),
    }:
        yield f"does not run in any Jupyter: {dict(book.metadata)}"
    badge, setup = stamp.notebook_texts(f"{name}.ipynb", stamp.repository())
    if not book.cells[0].source.startswith("# ") or badge not in book.cells[0].source:
        yield "opens without a title and its badge: make badges"
    if cells[0].source != setup or tags(cells[0]) != {"nbval-ignore-output"}:
        yield "its first code is not the set-up: make badges"
    for cell in book.cells:
        texts = [cell.source, *map(text_of, cell.get("outputs", ()))]
        if found := [match[0] for text in texts for match in MACHINE.finditer(text)]:
            yield f"names paths of a machine: {found}"

    if "sizes" not in tags(cells[1]) or not any("technique" in tags(c) for c in cells[2:4]):
        yield "its first code is not sizes, one picture or none, the technique in plain JAX"
    for cell in cells:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if "technique" in tags(cell) and len(lines) > LINES_OF_TECHNIQUE.get(name, 30):
            yield f"the technique in plain JAX takes {len(lines)} lines"
    *assignments, stored = ast.parse(cells[1].source).body
    values = {}
    exec(cells[1].source, values)
    if not all(isinstance(node, ast.Assign) for node in assignments):
        yield "its cell of sizes does more than assign"
    if not ast.unparse(stored).startswith("as_stored = ") or values["as_stored"] is not True:
        yield "its sizes are not those of the stored outputs (as_stored)"
    if not any("image/png" in out.get("data", {}) for cell in cells for out in cell.outputs):
        yield "shows no picture"
    for cell in cells[1:] if name[:2] in REASONED else ():
        if len(tags(cell) & REASONS) != ("nbval-ignore-output" in tags(cell)):
            yield f"is not compared without one reason of {REASONS}: {cell.source[:60]!r}"
    if not any(ASSERTED.search(cell.source) for cell in cells):
        yield "asserts none of its claims"


def of_the_exercises(book, cells):
    """Yields what is broken at the end: headings, folded solutions, cells to write in."""
    markdown = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    if re.findall(r"^## (.*)$", markdown, re.M)[-3:] != ["Summary", "Exercises", "References"]:
        yield "does not close with Summary, Exercises, References"
        return
    exercises = markdown[markdown.index("## Exercises") : markdown.index("## References")]
    folded = markdown.count("<details>")
    if not 3 <= folded == exercises.count("<details>") == exercises.count("</details>"):
        yield "folds fewer than three solutions, or something else"
    answered = [cell for cell in cells if ANSWERED.search(cell.source)]
    if len(answered) != folded:
        yield f"{folded} exercises have {len(answered)} cells with a check"
    for cell in answered:
        if not "".join(out.get("text", "") for out in cell.outputs).startswith("✗ "):
            yield f"stores an answer that is not ✗: {cell.source}"


def of_a_cell(cell):
    """Yields what is broken in one cell of code."""
    raised = any(output.output_type == "error" for output in cell.outputs)
    if tags(cell) - TAGS or tags(cell) >= COMPARED:
        yield f"unknown or contradicting tags {tags(cell)}"
    if raised != ("raises-exception" in tags(cell)):
        yield "fails where the lesson is not the error, or the other way round"
    if any(output.get("name") == "stderr" for output in cell.outputs):
        yield "wrote to stderr"
    for line in cell.source.splitlines():
        if len(line) > 96 and not re.fullmatch(r"\W*https?://\S+", line):
            yield f"wider than 96 columns: {line}"
    if "technique" in tags(cell):
        if "course_lib" in cell.source.replace(PLAIN_MODEL, ""):
            yield "the technique in plain JAX calls course_lib"

    nodes = list(ast.walk(parse(cell.source)))
    asserts = [node for node in nodes if isinstance(node, ast.Assert)]
    if not all(node.msg for node in asserts):
        yield "an assert does not say what failed"
    drawn = [call.lineno for call in calls(nodes, "figures.")]
    if any(node.lineno < line for node in asserts for line in drawn):
        yield "an assert stands before the picture"

    tables = [recorded.FOLDER / f"{word}.json" for word in re.findall(r'"(\w+)"', cell.source)]
    dates = {json.loads(t.read_text())["recorded"] for t in tables if t.is_file()}
    told = set(re.findall(r"recorded on ([\d-]+)", "".join(map(text_of, cell.outputs))))
    if dates and told - dates:
        yield f"shows records of {told}; today's are of {dates}"


def of_shown_sources(name, cells, monkeypatch):
    """Yields sources that are not the library's of today, and what repeats the library."""
    shown, imported, library = [], {}, set()
    monkeypatch.setattr(show_notebook, "display", lambda markdown: shown.append(markdown.data))
    for number, cell in enumerate(cells, 1):
        nodes = list(ast.walk(parse(cell.source)))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("course_lib"):
                exec(ast.unparse(node), imported)
            if isinstance(node, ast.ImportFrom) and node.module == "course_lib":
                for alias in node.names:
                    module = importlib.import_module(f"course_lib.{alias.name}")
                    library |= {n for n, x in vars(module).items() if not inspect.ismodule(x)}
        stored = [
            undecorated(out.get("data", {}).get("text/markdown", "")) for out in cell.outputs
        ]
        for call in calls(nodes, "notebook.source"):
            eval(ast.unparse(call), imported)
            if undecorated(shown[-1]) not in stored:
                run = f"tools/execute_notebooks.py --fresh {name[:2]}"
                yield f"code cell {number} shows yesterday's code: {run}"
    if not shown:
        yield "shows no source of the library"
    code = "\n".join(cell.source for cell in cells)
    if again := set(re.findall(r"^(?:def|class) (\w+)", code, re.M)) & library:
        yield f"defines what it could import: {again}"


def tags(cell):
    return set(cell.metadata.get("tags", ()))


def text_of(output):
    data = output.get("data", {})
    return output.get("text", "") + "".join(v for k, v in data.items() if k[:5] == "text/")


def parse(code):
    """Parses a cell; JupyterLab's commands, which begin with % or !, become comments."""
    return ast.parse(re.sub(r"^(\s*)[%!]", r"\1pass  # ", code, flags=re.M))


def calls(nodes, name):
    """Returns the calls of what begins with a name."""
    found = [node for node in nodes if isinstance(node, ast.Call)]
    return [node for node in found if ast.unparse(node.func).startswith(name)]


def undecorated(code):
    """Leaves out decorators: those of classes are hidden while the tests check types."""
    return re.sub(r"^@.*\n", "", code, flags=re.M)
