"""Checks of the notebooks' exercises: each runs the learner's answer and says what is wrong.

    from course_lib.lessons import check

    check.accumulation(your_accumulate)

A check prints one line and never raises. `check.x` loads only the module that has `x`: a module
has a text file beside it, with the sentences of each of its exercises under its name.
"""

import functools
import importlib
import pathlib
import re
import tomllib
from typing import Any

FOLDER = pathlib.Path(__file__).parent


@functools.cache
def modules() -> dict[str, str]:
    """Returns the module of each exercise."""
    texts = {file.stem: file.read_text() for file in FOLDER.glob("*.toml")}
    names = {stem: re.findall(r"^\[(\w+)\]$", text, re.M) for stem, text in texts.items()}
    return {one: stem for stem, listed in names.items() for one in listed}


@functools.cache
def sentences(module: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / f"{module}.toml").read_text())


def __getattr__(name: str) -> Any:
    if name not in modules():
        raise AttributeError(f"There is no exercise {name!r}: {', '.join(sorted(modules()))}")
    return getattr(importlib.import_module(f"{__name__}.{modules()[name]}"), name)


def __dir__() -> list[str]:
    return sorted(modules())
