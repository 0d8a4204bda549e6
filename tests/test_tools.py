"""`make notebooks` stores one complete run, and nothing if nothing changed. Environments print
no warnings of JAX.
"""

import os
import subprocess
import sys

import execute_notebooks
import make_venv
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
    # the notebook's set-up cell would take seconds
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


PRINTED = "1,024 bytes in 5 us, 17 s, 3.5 ms, 1e-05\nfsdp\nddp\n"


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ("1,024 bytes in 6 us, 18 s, 4.5 ms, 1e-07\nfsdp\nddp\n", []),
        (
            PRINTED.replace("1,024", "512"),
            ["- 512 bytes in us s ms", "+ 1,024 bytes in us s ms"],
        ),
        (PRINTED.replace("fsdp\nddp", "ddp\nfsdp"), ["+ fsdp", "- fsdp"]),
    ],
    ids=["measured", "integer", "order"],
)
def test_integers_and_orders_that_no_test_compares_are_printed(path, capsys, stored, told):
    write(path, f"print({PRINTED!r}, end='')", tags=["nbval-ignore-output"])
    execute_notebooks.store(path)
    book = nbformat.read(path, 4)
    book.cells[1].outputs[0].text = stored
    nbformat.write(book, path)
    execute_notebooks.store(path)
    assert capsys.readouterr().out.splitlines() == [f"cell-01: {line}" for line in told]


def test_a_folded_cell_stays_folded(path):
    write(path, "print(1)")
    book = nbformat.read(path, 4)
    book.cells[1].metadata = {"jupyter": {"source_hidden": True}, "other": 1}
    nbformat.write(book, path)
    execute_notebooks.store(path)
    kept = nbformat.read(path, 4).cells[1].metadata
    assert kept == {"jupyter": {"source_hidden": True}}


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


NO_GPU = not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))
DEVICES = "import jax; print(jax.devices()[0].platform)"  # as a learner begins a script


def plain_script(code, **environment):
    """Runs a script that imports only JAX, without the tests' environment variables."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "TF_", "PYTHON"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=plain | environment,
        cwd="/",
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(
    not NO_GPU, reason="with a GPU, the plugin looks for cuDNN and should warn without it"
)
def test_a_silent_installation_shows_that_it_goes_on_and_how_it_ended(capfd):
    slow = "import sys, time; time.sleep(0.5); sys.exit(3)"
    assert make_venv.wait_for([sys.executable, "-c", slow], seconds=0.1) == 3
    assert capfd.readouterr().out.startswith(".")


def test_with_the_file_of_make_venv_a_plain_script_is_quiet_where_there_is_no_gpu(tmp_path):
    make_venv.keep_quiet(tmp_path)
    done = plain_script(f"import site; site.addsitedir({str(tmp_path)!r}); {DEVICES}")
    assert (done.stdout, done.stderr) == ("cpu\n", "")
    show = "import os; print(os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'])"
    script = f"import site; site.addsitedir({str(tmp_path)!r}); {show}"
    assert [
        plain_script(script, **environment).stdout
        for environment in ({}, {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "0"})
    ] == ["1\n", "0\n"]
