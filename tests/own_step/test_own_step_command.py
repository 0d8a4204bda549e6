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


HEAD = """
import functools, jax, jax.numpy as jnp, numpy
from jax.sharding import NamedSharding, PartitionSpec
class Tensor:
    shape, dtype = (8,), "torch.float32"
x, large = jnp.ones((8, 8)), jax.ShapeDtypeStruct((10**10, 10**10), "float32")
def cut():
    return NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
def shape(place=None):
    return jax.ShapeDtypeStruct((8,), "float32", sharding=place)
nameless = functools.partial(lambda n: 1 / n, 0)
def make_step():
    return """
ELSEWHERE = "compiling sin: it names this machine's devices: make its mesh of the parameter"
RETURNED = {  # by make_step, for these options
    "1 / 0": r"make_step\(\) raised ZeroDivisionError",
    "jnp.sin": "must return the step and the arguments of one call",
    "lambda state, batch: x, (x, x)": "cannot be called with the 1 arguments .*: 'batch'",
    "lambda a: x, 'text'": "the arguments a hold no array or shape",
    "jnp.sin, Tensor()": "argument x holds a my_step.Tensor: pass arrays of JAX or NumPy, or",
    "jnp.sin, numpy.array(['a'])": "argument x holds a numpy.ndarray",
    "lambda a: a if a.sum() else x, x": "tracing <lambda> for .* raised TracerBoolConversion",
    "lambda a: (jax.debug.print('{}', a), a), x": "compiling .* remove jax.debug.print",
    "lambda a: None, x": "<lambda> returns no array",
    "jax.jit(jnp.sin, in_shardings=cut()), shape(cut()) --devices=2": ELSEWHERE,
    "jax.jit(jnp.sin, out_shardings=cut()), shape() --devices=2": ELSEWHERE,
    "lambda x: 2 * x, large": r"--target h100: its compiler refuses the step: .*=\[10000000000",
    "jnp.sin, x --target=h1": "--target 'h1' must be an accelerator of the table: t4, ",
    "jnp.sin, x --devices=9": "--devices 9 must be",
    "lambda a, b: a, x, x --batch=x": "--batch x must be an argument: a, b",
    "jnp.sin, x --devices=2": "--devices 2: no argument, .* name a mesh of 2",
    "jnp.sin, shape(cut()) --devices=4": "--devices 4: an argument is on a mesh of 2 devices",
}
NAMED = {  # on the command line
    "my_step.py": "my_step.py must be FILE.py:FUNCTION or MODULE:FUNCTION",
    "none.py:make_step": "none.py: there is no such file in ",
    "nothing.here:make_step": "importing nothing.here raised ModuleNotFoundError: No module",
    "my_step.py:step": "has no function step; it has cut, shape, make_step",
    "script.py:make_step": "importing script.py raised SystemExit: 3",
    "my_step.py:nameless": r"make_step\(\) raised ZeroDivisionError",
}


@needs_virtual
@pytest.mark.parametrize(("given", "message"), (RETURNED | NAMED).items())
def test_a_mistake_is_one_sentence_and_the_traceback_of_ones_own_error(
    given, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    returned, *options = [given] if given in NAMED else given.split(" --")
    Path("my_step.py").write_text(HEAD + ("0" if given in NAMED else returned))
    Path("script.py").write_text("import sys; sys.exit(3)")
    where = given if given in NAMED else "my_step.py:make_step"
    assert command.main([where, *(f"--{each}" for each in options)]) == command.USAGE
    *trace, last = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{message}", last)
    raised = " raised " in last
    assert bool(trace) == raised and "course_lib" not in "".join(trace)
    assert not raised or "no module" in last.lower() or '.py", line ' in "".join(trace)


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
    assert re.search(r"'h100' here: there is none\. .*course-lib\[virtual\].*recorded", error)


@pytest.mark.parametrize("written", ["20 bananas", "GiB", "-1GiB", "", "20"])
def test_a_size_has_a_number_and_a_unit(written, capsys):
    assert command.size("1.5GiB") == 1.5 * 2**30 and command.size("7B") == 7
    with pytest.raises(SystemExit, match="2"):
        command.main(["x.py:f", f"--fail-over={written}"])
    assert "must be a size, as 20GiB" in capsys.readouterr().err
