"""Runs the folded solutions of the exercises, each in a fresh namespace; their asserts hold.

A move of the game is checked for its updates here; a slow case of `test_game` compiles it. The
move of notebook 5 has all that those of notebooks 1 to 4 have, and the move of notebook 19 what
those of 17 and 18 have, so these are slow cases. So are those that compile for seconds:
`test_tables` compiles the same for the table's own answer.
"""

import functools
import pathlib
import re
import secrets

import nbformat
import pytest
from slow_cases import slow

from course_lib.measure import virtual
from course_lib.smaller_and_faster import offload

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"<details>\s*<summary>Solution</summary>(.*?)</details>", re.S)
CODE = re.compile(r"```python\n(.*?)```", re.S)
ANSWERED = re.compile(
    r"^(?:check\.|lessons\.submit\(|layouts\.submit\()", re.M
)  # what answers with ✓ or ✗


@functools.cache
def solutions(path: pathlib.Path) -> list[str]:
    """Returns the code of each folded solution of a notebook, in order."""
    text = "\n".join(
        cell.source
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "markdown"
    )
    return ["\n".join(CODE.findall(solution)) for solution in SOLUTION.findall(text)]


REPEATED = ("01", "02", "03", "04", "17", "18")  # whose moves are parts of later ones
COMPILE_LONG = {
    "06": (2,),
    "12": (1, 2),
    "13": (3,),
    "14": (4,),
    "16": (2, 4),
    "19": (1, 2),
    "20": (2,),
}


def cases():
    for path in NOTEBOOKS:
        for number, code in enumerate(solutions(path)):
            is_repeated = "lessons.submit(" in code and path.name[:2] in REPEATED
            is_long = number in COMPILE_LONG.get(path.name[:2], ())
            yield slow(path, number) if is_repeated or is_long else (path, number)


@pytest.mark.parametrize(
    ("path", "number"), list(cases()), ids=lambda value: getattr(value, "stem", value)
)
def test_the_solution_runs_and_passes_its_check(path, number, capsys, monkeypatch):
    code = solutions(path)[number]
    assert "assert" in code or ANSWERED.search(code), "nothing checks this solution"
    if 'moments="host"' in code and (reason := offload.why_unavailable()):
        pytest.skip(f"nothing can be on the host: {reason}")
    if "lessons.submit(" in code:
        monkeypatch.setattr(secrets, "randbits", lambda bits: 0)  # the game draws its numbers
        monkeypatch.setattr(virtual, "why_unavailable", lambda name: "nothing is compiled")
    exec(compile(code, f"{path.name}, solution {number + 1}", "exec"), {"__name__": "solution"})
    answers = re.findall(r"^[✓✗].*", capsys.readouterr().out, re.M)
    assert len(answers) == len(ANSWERED.findall(code))
    assert all(answer.startswith("✓") for answer in answers), answers
