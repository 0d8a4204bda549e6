"""Laws of the notebooks' helpers: a checked environment, source that is the live one,
tables that line up.
"""

import dataclasses
import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from course_lib.show import notebook


def shown(capsys, monkeypatch, *objects):
    monkeypatch.setattr(notebook, "display", lambda markdown: print(markdown.data))
    notebook.source(*objects)
    return capsys.readouterr().out


def test_setup_says_in_one_line_what_runs_here(capsys):
    notebook.setup()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert (
        f"jax {jax.__version__}" in out
        and jax.devices()[0].device_kind in out
        and "virtual GPUs: " in out
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone returns memory")
@pytest.mark.parametrize("kept", [False, True])
def test_an_array_gets_the_pages_of_the_one_before_if_memory_is_kept(kept):
    program = f"""
import resource
import numpy as np
from course_lib.show import notebook
if {kept}:
    notebook.keep_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array = np.ones(2**23)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del array
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    output = subprocess.check_output(
        [sys.executable, "-c", program], text=True, env=environment
    )
    first, second = map(int, output.split())
    assert second < first / 10 if kept else second > first / 2


def test_setup_leaves_a_gpus_memory_to_other_processes_unless_the_user_decided(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    notebook.setup()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    notebook.setup()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"


def test_a_jax_that_is_too_old_is_refused_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 1))
    with pytest.raises(RuntimeError, match=r"jax .* is too old.*pip install 'jax>=0.7.2'"):
        notebook.setup()


def test_source_shows_the_file_and_the_text_of_the_live_function(capsys, monkeypatch):
    out = shown(capsys, monkeypatch, notebook.setup)
    assert out.startswith("`course_lib/show/notebook.py`\n```python\ndef setup() -> None:")
    assert "raise RuntimeError(" in out and out.rstrip().endswith("```")


def test_source_looks_through_jit(capsys, monkeypatch):
    assert shown(capsys, monkeypatch, jax.jit(notebook.setup)) == shown(
        capsys, monkeypatch, notebook.setup
    )


def test_several_sources_are_shown_in_order(capsys, monkeypatch):
    out = shown(capsys, monkeypatch, notebook.table, notebook.source)
    assert 0 < out.index("def table(") < out.index("def source(")


@pytest.mark.parametrize("thing", [3, len, jnp.float32(1)])
def test_what_has_no_source_is_refused(thing):
    with pytest.raises(ValueError, match="must be a function, class or module"):
        notebook.source(notebook.table, thing)


def test_a_table_lines_up_numbers_on_the_right_and_text_on_the_left(capsys):
    rows = [
        dict(name="weights", bytes=155_877_376, share=2 / 3),
        dict(name="a", bytes=12, share=None),
    ]
    notebook.table(rows, title="Where the memory goes")
    assert (
        capsys.readouterr().out == "Where the memory goes\n"
        "name           bytes   share\n"
        "-------  -----------  ------\n"
        "weights  155,877,376  0.6667\n"
        "a                 12       -\n"
    )


@dataclasses.dataclass(frozen=True)
class Row:
    step: int
    loss: jax.Array
    ok: bool = True


def test_the_names_of_a_wide_table_are_broken_at_spaces(capsys):
    row = {"a layout": "x" * 60, "best with context (s)": 1.5, "step without overlap": "two"}
    notebook.table([row])
    assert capsys.readouterr().out.splitlines() == [
        " " * 62 + "  best with  step without",
        "a layout" + " " * 54 + "context (s)  overlap",
        "-" * 60 + "  -----------  ------------",
        "x" * 60 + "          1.5  two",
    ]
    notebook.table([row | {"a layout": "x" * 51}])
    fits = capsys.readouterr().out.splitlines()
    assert len(fits) == 3 and len(fits[0]) == 96
    assert fits[0].endswith("  best with context (s)  step without overlap")
    notebook.table([{"": 1, "x": "y" * 120}])
    assert capsys.readouterr().out.splitlines()[0] == "   x"


def test_a_table_takes_dataclasses_chooses_columns_and_formats_scalars_of_any_kind(capsys):
    notebook.table(
        [Row(1000, jnp.float32(2.5)), Row(2, jnp.bfloat16(0.5))],
        ["loss", "ok"],
        formats={"loss": ".2f"},
    )
    assert capsys.readouterr().out == "loss  ok\n----  ----\n2.50  True\n0.50  True\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(rows=[]), "rows=.. must hold at least one row"),
        (
            dict(rows=[{"a": 1}, {"b": 2}]),
            r"rows\[1\] must have the columns \['a'\]: it lacks \['a'\], adds \['b'\]",
        ),
        (dict(rows=[{"a": 1}], columns=["c"]), r"rows\[0\] must have the columns \['c'\]"),
        (dict(rows=[{"a": 1}], formats={"A": ".1f"}), r"formats=\['A'\] must name columns"),
        (dict(rows=[3]), "must be a dict or a dataclass"),
        (dict(rows=[("a", 1)]), "must be a dict or a dataclass"),
        (dict(rows=[Row]), "must be a dict or a dataclass"),
    ],
)
def test_a_table_that_would_drop_something_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        notebook.table(**arguments)
