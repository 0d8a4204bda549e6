"""Checks the stored notebooks: run in one go, tagged, and laid out as docs/design.md says.

`pytest --nbval notebooks` compares their outputs, but skips cells that were never run. These
tests find such cells.
"""

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
import stamp

from course_lib.measure import recorded
from course_lib.show import notebook as show_notebook

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
TAGS = {"nbval-ignore-output", "nbval-check-output", "raises-exception", "sizes", "technique"}
# Each notebook begins with its technique in plain JAX, which may take this many lines.
TECHNIQUE_LINES = {
    "01_mixed_precision": 25,
    "02_rematerialization": 25,
    "03_gradient_accumulation": 25,
    "04_buffer_donation": 25,
    "05_transformer": 60,
    "06_profiling": 25,
    "07_collectives": 30,
    "08_data_parallel": 30,
    "09_pipeline_parallel": 30,
    "10_tensor_parallel": 30,
    "11_async_tensor_parallel": 30,
    "12_3d_parallelism": 30,
    "13_context_parallel": 30,
    "14_expert_parallel": 30,
    "15_large_vocabulary": 25,
    "16_flash_attention": 25,
    "17_optimizer_memory": 25,
    "18_offload": 25,
    "19_smallest_step": 25,
    "21_train_for_real": 25,
}
assert set(TECHNIQUE_LINES) == set(NAMES)
PLAIN_MODEL = "from course_lib.lessons import tiny_transformer"  # of notebook 5
CLOSING = ["Summary", "Exercises", "References"]
# Folders that differ between machines.
FOLDERS = {
    "/home",
    "/Users",
    "/tmp",
    "/usr/lib",
    "/var",
    str(Path.home()),
    str(Path(__file__).parents[2]),
} - {"/"}
MACHINE = re.compile(
    rf"ipykernel_\d+|(?:{'|'.join(map(re.escape, sorted(FOLDERS)))})/\w|site-packages"
)
MOST_BYTES = 1_000_000
PYPROJECT = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
WIDTH = PYPROJECT["tool"]["ruff"]["line-length"]

each = pytest.mark.parametrize("name", NAMES)


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def code_cells(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def tags(cell):
    return set(cell.metadata.get("tags", ()))


def output_text(output):
    return "".join(
        [
            output.get("text", ""),
            *(v for k, v in output.get("data", {}).items() if k.startswith("text/")),
        ]
    )


def test_they_are_numbered_and_the_readme_links_to_each():
    numbers = [int(name[:2]) for name in NAMES]
    *lessons, for_real = numbers
    # 20 is kept free
    assert (lessons, for_real) == (list(range(1, len(numbers))), 21)
    readme = (FOLDER.parent / "README.md").read_text()
    assert re.findall(r"\(notebooks/(\w+)\.ipynb\)", readme) == NAMES


@each
def test_it_was_run_from_top_to_bottom(name):
    nb = read(name)
    nbformat.validate(nb)
    counts = [cell.execution_count for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1)), f"run make notebooks NB={name[:2]}"


@each
def test_it_runs_in_any_jupyter(name):
    metadata = read(name).metadata
    assert metadata.kernelspec == {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    assert set(metadata) == {"kernelspec", "language_info"}
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MOST_BYTES


@each
def test_its_tags_are_known_and_do_not_contradict_each_other(name):
    for cell in code_cells(name):
        assert tags(cell) <= TAGS
        assert not {"nbval-ignore-output", "nbval-check-output"} <= tags(cell)


@each
def test_it_fails_only_where_the_lesson_is_the_error(name):
    for cell in code_cells(name):
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == ("raises-exception" in tags(cell)), cell.source


@each
def test_nothing_was_written_to_stderr(name):
    for cell in code_cells(name):
        assert not [output.text for output in cell.outputs if output.get("name") == "stderr"], (
            cell.source
        )


@each
def test_it_names_no_path_of_a_machine(name):
    for cell in read(name).cells:
        texts = [cell.source, *map(output_text, cell.get("outputs", ()))]
        assert not [match[0] for text in texts for match in MACHINE.finditer(text)]


@each
def test_no_cell_ends_in_a_semicolon_which_nbval_does_not_understand(name):
    for cell in code_cells(name):
        assert not cell.source.rstrip().endswith(";"), cell.source


@each
def test_its_code_is_no_wider_than_the_librarys_unless_a_line_is_one_url(name):
    wide = [
        line
        for cell in code_cells(name)
        for line in cell.source.splitlines()
        if len(line) > WIDTH and not re.fullmatch(r"\W*https?://\S+", line)
    ]
    assert not wide


@each
def test_it_opens_with_title_badge_and_set_up(name):
    title, *_ = read(name).cells
    badge, setup = stamp.notebook_texts(f"{name}.ipynb", stamp.repository())
    first = code_cells(name)[0]
    assert (
        title.cell_type == "markdown"
        and title.source.startswith("# ")
        and badge in title.source
    ), "run make badges"
    assert first.source == setup and tags(first) == {"nbval-ignore-output"}, "run make badges"


@each
def test_it_closes_with_summary_exercises_references(name):
    markdown = "\n".join(
        cell.source for cell in read(name).cells if cell.cell_type == "markdown"
    )
    headings = re.findall(r"^## (.*)$", markdown, re.M)
    assert headings[-3:] == CLOSING
    exercises = markdown[markdown.index("## Exercises") : markdown.index("## References")]
    solutions = exercises.count("<details>")
    assert solutions == exercises.count("</details>") >= 3
    assert len(re.findall(r"<summary>.*?</summary>", exercises)) == solutions
    assert markdown.count("<details>") == solutions, "only solutions are folded"


@pytest.mark.parametrize("name", TECHNIQUE_LINES)
def test_each_exercise_has_a_cell_to_write_in_and_a_check_that_answers(name):
    answered = re.compile(r"^(check\.|lessons\.submit\(|layouts\.submit\()", re.M)
    cells = [cell for cell in code_cells(name) if answered.search(cell.source)]
    solutions = "\n".join(cell.source for cell in read(name).cells).count("<details>")
    assert len(cells) == solutions
    for cell in cells:
        assert "".join(output.get("text", "") for output in cell.outputs).startswith("✗ ")


@pytest.mark.parametrize("name", TECHNIQUE_LINES)
def test_its_first_code_is_a_cell_of_sizes_and_the_technique_in_plain_jax(name):
    _, sizes, technique, *_ = code_cells(name)
    assert "sizes" in tags(sizes) and "technique" in tags(technique)
    *assignments, stored = ast.parse(sizes.source).body
    assert all(isinstance(node, ast.Assign) for node in assignments)
    assert ast.unparse(stored).startswith("as_stored = ")
    values = {}
    exec(sizes.source, values)
    assert values["as_stored"] is True, "the sizes differ from those of the stored outputs"
    for cell in (cell for cell in code_cells(name) if "technique" in tags(cell)):
        assert "course_lib" not in cell.source.replace(PLAIN_MODEL, "")
        lines = [line for line in cell.source.splitlines() if line.strip()]
        assert len(lines) <= TECHNIQUE_LINES[name]


@pytest.mark.parametrize("name", TECHNIQUE_LINES)
def test_each_assert_says_what_failed_and_stands_after_the_picture(name):
    for cell in code_cells(name):
        asserts = [
            node for node in ast.walk(_tree(cell.source)) if isinstance(node, ast.Assert)
        ]
        pictures = [
            node.lineno
            for node in ast.walk(_tree(cell.source))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("figures.")
        ]
        assert all(node.msg for node in asserts), cell.source
        assert all(a.lineno > p for a in asserts for p in pictures), cell.source


def _tree(code):
    """Parses a cell; JupyterLab's commands, which begin with % or !, become comments."""
    return ast.parse(re.sub(r"^(\s*)[%!]", r"\1pass  # ", code, flags=re.M))


@each
def test_it_shows_pictures_and_asserts_its_claims(name):
    cells = code_cells(name)
    assert any(
        "image/png" in output.get("data", {}) for cell in cells for output in cell.outputs
    )
    assert any(
        re.search(r"^\s*assert |assert_allclose|assert_array_equal", cell.source, re.M)
        for cell in cells
    )


@each
def test_it_shows_the_library_instead_of_repeating_it(name):
    """A notebook defines nothing that it could import."""
    code = "\n".join(cell.source for cell in code_cells(name))
    imported = {
        module
        for line in re.findall(r"^from course_lib import (.*)$", code, re.M)
        for module in line.split(", ")
    }
    library = {
        public
        for module in imported
        for public in dir(importlib.import_module(f"course_lib.{module}"))
    }
    assert not set(re.findall(r"^(?:def|class) (\w+)", code, re.M)) & library
    assert "notebook.source(" in code


@each
def test_it_shows_public_functions_only(name):
    cells = [cell.source for cell in code_cells(name) if "notebook.source(" in cell.source]
    assert cells
    for call in (call for cell in cells for call in _source_calls(cell)):
        assert not [argument for argument in map(ast.unparse, call.args) if "._" in argument]


@each
def test_the_sources_that_it_stores_are_the_librarys_of_today(name, monkeypatch):
    shown = []
    monkeypatch.setattr(show_notebook, "display", lambda markdown: shown.append(markdown.data))
    imported = {}
    for cell in code_cells(name):
        for node in ast.walk(_tree(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("course_lib"):
                exec(ast.unparse(node), imported)
        stored = [
            _undecorated(output.data["text/markdown"])
            for output in cell.outputs
            if "text/markdown" in output.get("data", {})
        ]
        for call in _source_calls(cell.source):
            eval(ast.unparse(call), imported)
            assert _undecorated(shown.pop()) in stored, (
                f"run make notebooks NB={name[:2]}: {cell.source}"
            )


@each
def test_the_records_that_it_shows_are_those_of_today(name):
    for cell in code_cells(name):
        tables = [
            recorded.FOLDER / f"{word}.json" for word in re.findall(r'"(\w+)"', cell.source)
        ]
        dates = {json.loads(t.read_text())["recorded"] for t in tables if t.is_file()}
        text = "".join(map(output_text, cell.outputs))
        if dates:
            assert set(re.findall(r"recorded on ([\d-]+)", text)) <= dates, cell.source


def _undecorated(code):
    """Leaves out decorators: those of classes are hidden while the tests check types."""
    return re.sub(r"^@.*\n", "", code, flags=re.M)


def _source_calls(code):
    """Returns the calls in a cell that show sources of the library."""
    return [
        node
        for node in ast.walk(_tree(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "notebook.source"
    ]
