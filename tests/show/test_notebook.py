"""Laws of the notebooks' helpers: a checked environment, source that is the live one,
tables that line up.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

from course_lib.show import notebook


def test_setup_says_in_one_line_what_runs_here_and_leaves_a_gpus_memory_alone(
    capsys, monkeypatch
):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    notebook.setup()
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and f"jax {jax.__version__}" in out and "virtual GPUs: " in out
    assert jax.devices()[0].device_kind in out
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    notebook.setup()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true", "the user had decided"


def test_a_jax_that_is_too_old_is_refused_with_the_command_that_helps(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 1))
    with pytest.raises(RuntimeError, match=r"jax .* is too old.*pip install 'jax>=0.7.2'"):
        notebook.setup()


def test_sources_are_those_of_the_live_functions_in_order_also_inside_of_jit(monkeypatch):
    shown = []
    monkeypatch.setattr(notebook, "display", lambda markdown: shown.append(markdown.data))
    for function in (notebook.setup, jax.jit(notebook.setup)):
        notebook.source(function, notebook.table)
    assert shown[0] == shown[1]
    assert shown[0].startswith("`course_lib/show/notebook.py`\n```python\ndef setup() -> None:")
    assert 0 < shown[0].index("raise RuntimeError(") < shown[0].index("def table(")
    with pytest.raises(ValueError, match="3 has no source in Python: pass a function"):
        notebook.source(notebook.table, 3)


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


def test_a_table_takes_dataclasses_chooses_columns_and_formats_scalars_of_any_kind(capsys):
    rows = [Row(1000, jnp.float32(2.5)), Row(2, jnp.bfloat16(0.5))]
    notebook.table(rows, ["loss", "ok"], formats={"loss": ".2f"})
    assert capsys.readouterr().out == "loss  ok\n----  ----\n2.50  True\n0.50  True\n"


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": []}, "rows is empty"),
        ({"rows": [{"a": 1}, {"b": 2}]}, r"rows\[1\] must have the columns \['a'\]"),
        ({"rows": [{"a": 1}], "columns": ["c"]}, r"rows\[0\] must have the columns \['c'\]"),
        ({"rows": [{"a": 1}], "formats": {"A": ".1f"}}, "formats={'A'} must name columns"),
        ({"rows": [("a", 1)]}, "must be a dict or a dataclass"),
    ],
)
def test_a_table_that_would_drop_something_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        notebook.table(**arguments)
