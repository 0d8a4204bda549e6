"""Laws of the command line `python -m course_lib.measure`."""

import json
import re
from pathlib import Path

import pytest
from shapes import needs_virtual

from course_lib import measure
from course_lib.measure import virtual
from course_lib.own_step import command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Writes the example of docs/your_model.md into a file, as a reader would."""
    text = (ROOT / "docs" / "your_model.md").read_text()
    file = tmp_path_factory.mktemp("own") / "my_step.py"
    file.write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    return file


@needs_virtual
def test_the_example_of_the_page_works_as_text_as_json_and_as_a_page(page, capsys):
    asked = [f"{page}:make_step", "--target", "a5000", "--no-tries"]
    assert command.main([*asked, "--json", "--report", str(page.parent / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert command.main([*asked, "--fail-over=1MB"]) == command.OVER
    printed = capsys.readouterr()
    assert printed.out == command.text(found) + "\n"
    assert re.fullmatch(r"error: the peak of .* is over --fail-over 0.95 MiB\n", printed.err)
    for value in found["peak_bytes"], found["donation"]["missed_bytes"], found["traffic_bytes"]:
        assert measure.gib(value) in printed.out
    html = (page.parent / "out" / "report.html").read_text()
    assert html.count('src="data:image/png;base64,') == 2 and "http" not in html
    assert all(line in html for line in printed.out.replace(">", "&gt;").splitlines()[1:4])


def test_the_error_of_a_prediction_is_the_one_that_was_measured():
    text = (ROOT / "docs" / "gpu.md").read_text()
    row = re.search(r"\| NVIDIA H200 SXM \| (.*) \|", text)[1].split(" | ")
    steps, _, more, median, ratio, _ = row
    assert f"{steps} steps" in command.ERROR
    assert "{} to {} MiB more".format(*more.split(", ")) in command.ERROR
    least, most = ratio.split(", ")
    assert (
        f"{least} to {most} times the attainable time (docs/gpu.md), the median {median}"
        in (command.ERROR)
    )


HEAD = "import jax, jax.numpy as jnp\nx = jnp.ones((8, 8))\ndef make_step():\n    return "
MESH = (
    "import jax\nfrom jax.sharding import NamedSharding, PartitionSpec as P\n"
    "def make_step():\n"
    "    cut = NamedSharding(jax.make_mesh((2,), ('data',)), P('data'))\n"
)
BAD = {
    "no function": ("", "my_step.py", "my_step.py must be FILE.py:FUNCTION or MODULE:FUNCTION"),
    "no file": ("", "none.py:make_step", "none.py: there is no such file in "),
    "no module": (
        "",
        "nothing.here:make_step",
        "importing nothing.here raised ModuleNotFoundError: No module named 'nothing'",
    ),
    "another name": (HEAD + "0", "my_step.py:step", "has no function step; it has make_step"),
    "a script": ("import sys; sys.exit(3)", "", "importing .* raised SystemExit: 3"),
    "a make_step that raises": (HEAD + "1 / 0", "", r"make_step\(\) raised ZeroDivisionError"),
    "no arguments": (
        HEAD + "jnp.sin",
        "",
        "must return the step and the arguments of one call",
    ),
    "a pair": (
        HEAD + "lambda state, batch: x, (x, x)",
        "",
        "cannot be called with the 1 arguments after it .*missing a required argument: 'batch'",
    ),
    "no arrays": (HEAD + "lambda a: x, 'text'", "", "the arguments a hold no array or shape"),
    "another library's array": (
        "class Tensor:\n    shape, dtype = (8,), 'torch.float32'\n"
        + HEAD
        + "jnp.sin, Tensor()",
        "",
        r"argument x holds a my_step.Tensor: pass arrays of JAX or NumPy, or shapes",
    ),
    "Python's if": (
        HEAD + "lambda a: a if a.sum() > 0 else x, x",
        "",
        "tracing <lambda> for jax.jit raised TracerBoolConversionError",
    ),
    "a callback": (
        HEAD + "lambda a: (jax.debug.print('{}', a), a), x",
        "",
        "compiling <lambda>: a GPU that is not there calls no Python: remove jax.debug.print",
    ),
    "no results": (HEAD + "lambda a: None, x", "", "<lambda> returns no array"),
    "words": (
        "import numpy\n" + HEAD + "jnp.sin, numpy.array(['a'])",
        "",
        "argument x holds a numpy.ndarray",
    ),
    "this machine's mesh": (
        MESH + "    shape = jax.ShapeDtypeStruct((8,), 'float32', sharding=cut)\n"
        "    return jax.jit(jax.numpy.sin, in_shardings=cut), shape",
        "--devices=2",
        "compiling sin: it names this machine's devices: make its mesh of the parameter",
    ),
    "another mesh than its jit's": (
        MESH + "    shape = jax.ShapeDtypeStruct((8,), 'float32')\n"
        "    return jax.jit(jax.numpy.sin, out_shardings=cut), shape",
        "--devices=2",
        "compiling sin: it names this machine's devices: make its mesh of the parameter",
    ),
    "too large for XLA": (
        "import jax\ndef make_step():\n"
        "    return lambda x: 2 * x, jax.ShapeDtypeStruct((10**10, 10**10), 'float32')",
        "--target=a5000",
        r"--target a5000: its compiler refuses the step: .*dimensions=\[10000000000",
    ),
    "an unknown target": (
        HEAD + "jnp.sin, x",
        "--target=h1",
        "name='h1' must be an accelerator of the table: t4, ",
    ),
    "too many devices": (HEAD + "jnp.sin, x", "--devices=9", "count=9 must be"),
    "no such batch": (
        HEAD + "lambda a, b: a, x, x",
        "--batch=x",
        "--batch x must be an argument: a, b",
    ),
    "no mesh": (
        HEAD + "jnp.sin, x",
        "--devices=2",
        "--devices 2: no argument, in_shardings or out_shardings name a mesh of 2",
    ),
    "another mesh": (
        MESH + "    return jax.numpy.sin, jax.ShapeDtypeStruct((8,), 'float32', sharding=cut)",
        "--devices=4",
        "--devices 4: an argument is on a mesh of 2 devices; add --devices 2",
    ),
}


@needs_virtual
@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_sentence_and_the_traceback_of_ones_own_error(
    name, tmp_path, monkeypatch, capsys
):
    code, option, message = BAD[name]
    (tmp_path / "my_step.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    where = option if option and "--" not in option else "my_step.py:make_step"
    assert (
        command.main([where, *[option] * (where != option and bool(option))]) == command.USAGE
    )
    *trace, last = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{message}", last)
    raised = " raised " in last
    assert bool(trace) == raised and "course_lib" not in "".join(trace)
    assert not raised or name == "no module" or 'my_step.py", line ' in "".join(trace)


@needs_virtual
def test_what_fits_says_the_limit_of_jax_and_the_variable_that_lifts_it(page, capsys):
    assert command.main([f"{page}:make_step", "--target=a5000", "--no-tries", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for peak, verdict in (
        (17, "fits"),
        (20, "fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"),
        (23, "DOES NOT FIT"),
    ):
        found |= {"peak_bytes": peak * 2**30, "fits": peak < 21}
        line = f"peak             {peak}.00 GiB of 21.19 GiB, by default 17.66 GiB: {verdict}"
        assert line in command.text(found).splitlines()


def test_without_a_compiler_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(virtual, "why_unavailable", lambda name: "there is none")
    assert command.main(["x.py:make_step"]) == command.USAGE
    error = capsys.readouterr().err
    assert "there is none" in error and 'pip install "course-lib[virtual]"' in error


@pytest.mark.parametrize("written", ["20 bananas", "GiB", "-1GiB", "", "20"])
def test_a_size_has_a_number_and_a_unit(written, capsys):
    assert command.size("1.5GiB") == 1.5 * 2**30 and command.size("7B") == 7
    with pytest.raises(SystemExit, match="2"):
        command.main(["x.py:f", f"--fail-over={written}"])
    assert "must be a size, as 20GiB" in capsys.readouterr().err
