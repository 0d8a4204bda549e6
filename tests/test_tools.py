"""What `make notebooks` stores: one whole run, and nothing when nothing has changed."""

import execute_notebooks
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError


def write(path, *sources, tags=()):
    cells = [nbformat.v4.new_markdown_cell("# Toy")]
    cells += [
        nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)} if tags else {})
        for source in sources
    ]
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))


@pytest.fixture
def path(tmp_path, monkeypatch):
    # its set-up takes seconds
    monkeypatch.setattr(execute_notebooks.stamp, "stamp_notebook", lambda nb, name, repo: None)
    return tmp_path / "toy.ipynb"


def test_a_second_run_leaves_the_file_alone_though_the_measurements_differ(path):
    write(path, "import time; print(time.time_ns())", tags=["nbval-ignore-output"])
    assert execute_notebooks.store(path) == "stored"
    first = path.read_text()
    assert '"execution_count": 1' in first and "iopub" not in first
    assert execute_notebooks.store(path) == "unchanged"
    assert path.read_text() == first
    assert execute_notebooks.store(path, fresh=True) == "stored"
    assert path.read_text() != first


def test_a_fact_that_changed_is_stored(path):
    write(path, "print(1 + 1)")
    execute_notebooks.store(path)
    path.write_text(path.read_text().replace('"2\\n"', '"3\\n"'))
    assert execute_notebooks.store(path) == "stored"
    assert '"2\\n"' in path.read_text()


def test_a_notebook_that_fails_is_left_as_it_was(path):
    write(path, "print(1)", "1 / 0")
    before = path.read_text()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute_notebooks.store(path)
    assert path.read_text() == before
