"""Makes the tables of docs/benchmarks.md from docs/results/benchmarks/*.json.

    python -m benchmarks.table          after a program of this folder was run with --out

Each file is one measurement, as `record` returns it:

    {"name", "date", "device", "load", "versions": {package: version},
     "rows": [{column: value}, ...], "notes"}

In the page, what stands between `<!-- NAME -->` and `<!-- end -->` is made here; the words
around it are written by hand, and stay. A file that the page does not name yet gets a section
at its end.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

RESULTS, PAGE = Path("docs/results/benchmarks"), Path("docs/benchmarks.md")
LOAD = round(os.getloadavg()[0], 1)  # before anything is measured: what else the machine does


def record(
    name: str,
    rows: list[dict[str, Any]],
    notes: str,
    packages: Sequence[str] = ("jax", "jaxlib"),
) -> dict[str, Any]:
    """Returns a measurement with where and when it was made.

    Args:
      name: of the file, and of its place in the page.
      rows: of the table, with the same columns.
      notes: a sentence or two that stand above it.
      packages: whose versions matter.
    """
    return {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "device": device(),
        "load": LOAD,
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "rows": rows,
        "notes": notes,
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{known.group(1).strip() if known else platform.machine()}, {cores} cores"


def store(result: dict[str, Any], folder: Path | None) -> None:
    """Prints a measurement as one line of JSON, and writes it into a folder if one is given."""
    print(json.dumps(result))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")


def block(result: dict[str, Any]) -> str:
    """Returns a measurement as Markdown, between its marks."""
    columns = list(dict.fromkeys(column for row in result["rows"] for column in row))
    lines = [
        f"<!-- {result['name']} -->",
        result["notes"],
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    lines += [
        f"| {' | '.join(_cell(row.get(column)) for column in columns)} |"
        for row in result["rows"]
    ]
    where = (
        result["device"]
        if isinstance(result["device"], str)
        else ", ".join(map(str, result["device"].values()))
    )
    versions = ", ".join(
        f"{package} {version}" for package, version in result["versions"].items()
    )
    load = f"load average before {result['load']}; " if "load" in result else ""
    return "\n".join(
        [*lines, "", f"{where}; {load}{versions}; {result['date']}", "<!-- end -->"]
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def page(text: str, results: Sequence[dict[str, Any]]) -> str:
    """Returns the page with the tables of these measurements in their places, and all other
    words as they are.

    Raises:
      ValueError: if the page has a place for a measurement that is not there.
    """
    marks = re.findall(r"^<!-- (?!end -->)(\S+) -->$", text, re.M)
    if missing := set(marks) - {result["name"] for result in results}:
        raise ValueError(
            f"the page must only name measurements that there are, not {sorted(missing)}"
        )
    for result in results:
        name = re.escape(result["name"])
        if result["name"] not in marks:
            text = (
                f"{text.rstrip()}\n\n## {result['name']}\n\n<!-- {result['name']} -->\n<!-- end"
                " -->\n"
            )
        before, rest = re.split(rf"^<!-- {name} -->\n", text, maxsplit=1, flags=re.M)
        text = before + block(result) + rest.partition("<!-- end -->")[2]
    return text


def main(results: Path = RESULTS, path: Path = PAGE) -> None:
    """Writes the page anew."""
    path.write_text(
        page(
            path.read_text(),
            [json.loads(file.read_text()) for file in sorted(results.glob("*.json"))],
        )
    )


if __name__ == "__main__":
    main()
