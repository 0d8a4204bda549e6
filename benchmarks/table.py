"""Makes the tables of docs/benchmarks.md from docs/results/benchmarks/*.json.

    python -m benchmarks.table          after a program of this folder was run with --out

Each file is one measurement, as `record` returns it. In the page, what stands between
`<!-- NAME -->` and `<!-- end -->` is made here; the words around it are written by hand.
"""

import argparse
import datetime
import importlib.metadata
import inspect
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from course_lib.measure import hardware

RESULTS, PAGE = Path("docs/results/benchmarks"), Path("docs/benchmarks.md")
LOAD = round(os.getloadavg()[0], 1)  # before anything is measured: what else the machine does

Row = Mapping[str, Any]


def run(measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Measures as the command line says: each keyword argument of the function is an option.
    Prints the result as one line of JSON; `--out FOLDER` stores it.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules[measure.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        one, nargs = (default[0], "+") if isinstance(default, tuple) else (default, None)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(one),
            nargs=nargs,
            default=default,
            help=f"default: {default!r}",
        )
    parser.add_argument("--out", type=Path, help="a folder for the result")
    options = vars(parser.parse_args())
    folder = options.pop("out")
    result = measure(**options)
    print(json.dumps(result))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def record(
    name: str,
    rows: list[dict[str, Any]],
    notes: str,
    packages: Sequence[str] = ("jax", "jaxlib"),
) -> dict[str, Any]:
    """Returns a measurement with where and when it was made."""
    return {
        "name": name,  # of the file, and of its place in the page
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "load": LOAD,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "rows": rows,
        "notes": notes,  # a sentence or two above the table
    }


def device() -> str:
    """Returns what JAX runs on: of a CPU its model, as Linux tells it, and how many cores this
    process may use.
    """
    found = jax.local_devices()[0]
    if found.platform != "cpu":
        return found.device_kind
    told = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    known = re.search(r"^model name\s*: (.*)$", told, re.M)
    model = known[1].strip() if known else platform.machine()
    return f"{model}, {hardware.cores()} cores"


def markdown(rows: Sequence[Row]) -> str:
    """Returns rows as a table in Markdown, with the columns of all of them."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        + [f"| {' | '.join(line)} |" for line in lines]
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "\\|")


def block(result: Mapping[str, Any]) -> str:
    """Returns a measurement in Markdown."""
    about = [result["device"]]
    about += [f"load average before {result['load']}"] if "load" in result else []
    about += [", ".join(f"{name} {version}" for name, version in result["versions"].items())]
    about += [result["date"]]
    return f"{result['notes']}\n\n{markdown(result['rows'])}\n\n{'; '.join(about)}"


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Returns a page with these blocks in their places, and all other words as they are.

    Raises:
      ValueError: if the page and the blocks do not have the same names.
    """
    marks = re.findall(r"^<!-- (?!end -->)(\S+) -->$", text, re.M)
    if sorted(marks) != sorted(blocks):
        raise ValueError(f"the page must have one place for each of {[*blocks]}: {marks}")
    for name, made in blocks.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        text = (
            f"{before}<!-- {name} -->\n{made}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
        )
    return text


def page(text: str, results: Path = RESULTS) -> str:
    """Returns docs/benchmarks.md with the tables of the stored results."""
    stored = [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))]
    return fill(text, {result["name"]: block(result) for result in stored})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
