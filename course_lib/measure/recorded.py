"""Recorded tables, for machines that cannot compute them.

A notebook asks for a table by name and passes the function that computes it. Where virtual
devices are available, the function runs; elsewhere the rows come from a file of this package,
which another machine wrote:

    table = recorded.live_or_recorded("donation_a5000", measure_both_steps, sizes={"B": B})
    print(table)

Recorded rows are shown only for the sizes and the accelerator that they were recorded for. For
others there are no rows, and the note says how to get them.

`COURSE_RECORD=1` in the environment makes a live run write the file (`make notebooks` does
that).

Where rows take long to compute, `partly_live` computes a few and reads the others.
"""

import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_lib.measure import hardware, virtual

FOLDER = pathlib.Path(__file__).parent / "recorded_tables"
_VERSIONS_OF = ("jax", "jaxlib", "flax", "optax")


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of a table, and where they come from."""

    # one dict per row, of JSON's types. Empty if they cannot be computed, and were not recorded
    # for these sizes and this accelerator
    rows: list[dict[str, Any]]
    live: bool  # whether all of them were computed just now
    note: str  # for the reader: computed here; or when recorded, with which versions, and why

    def __str__(self) -> str:
        """Returns the note in lines of at most 100 characters: `print(table)`."""
        return textwrap.fill(self.note, 100, break_on_hyphens=False)


def live_or_recorded(
    name: str,
    compute: Callable[[], list[dict[str, Any]]],
    accelerator: str = "a5000",
    sizes: Mapping[str, Any] | None = None,
) -> Table:
    """Computes a table for a virtual accelerator, or reads it where that cannot be done.

    Args:
      name: of the table and of its file, `recorded_tables/<name>.json`.
      compute: returns the rows, without times and dates: the same versions must give the same
        rows.
      accelerator: the name in `hardware` of the accelerator that `compute` compiles for. If it
        compiles for several, name one of them, and let each row name its own under
        "accelerator".
      sizes: all numbers and options that the rows depend on, of JSON's types. Rows that were
        recorded for other sizes are not shown.
    """
    reason = virtual.why_unavailable(accelerator)
    if reason is not None:
        return _read(name, accelerator, reason, sizes)
    rows = _compute(name, compute, _recording(), accelerator, sizes)
    older = _older(rows)
    return Table(rows, not older, _computed_here(rows, accelerator) + older)


def partly_live(
    name: str,
    compute: Callable[[str], dict[str, Any]],
    live: Sequence[str],
    *,
    cases: Sequence[str] = (),
    accelerator: str = "a5000",
    sizes: Mapping[str, Any] | None = None,
) -> Table:
    """Computes some rows of a recorded table and reads the others; else as `live_or_recorded`.

    Args:
      name: of the table and of its file.
      compute: returns the row of a case, with the case under "case".
      live: the cases to compute.
      cases: all cases, in the table's order. With `COURSE_RECORD=1` all of them are computed
        and written. () if another program records the table.
      accelerator: as in `live_or_recorded`.
      sizes: as in `live_or_recorded`. If the record is for other sizes, only the rows of `live`
        are shown.
    """
    if cases and not set(live) <= set(cases):
        raise ValueError(
            f"live={list(live)} must be among cases={list(cases)}: the table has no row of"
            " another case"
        )
    recording = bool(cases) and _recording()
    why = "only some are computed, to save time" if live else "no new row was requested"
    reason = virtual.why_unavailable(accelerator)
    if reason is not None or not (live or recording):
        return _read(name, accelerator, reason or why, sizes)

    def rows_of_cases() -> list[dict[str, Any]]:
        # XLA's compiler releases Python's lock and uses little more than one core.
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(compute, cases if recording else live))

    rows = _compute(name, rows_of_cases, recording, accelerator, sizes)
    if live and cases and set(live) == set(cases):
        return Table(rows, False, _computed_here(rows, accelerator))
    record = _read(name, accelerator, why, sizes)
    if not live:
        return record
    by_case = {row["case"]: row for row in [*record.rows, *rows]}  # in the order of the record
    computed = f"{_computed_here(rows, accelerator)}: {', '.join(map(repr, live))}"
    return Table(list(by_case.values()), False, f"{computed}; the other rows: {record.note}")


def older_row(name: str, case: str) -> dict[str, Any]:
    """Returns the recorded row of a case that the installed versions cannot compute, with its
    date under "recorded" and its versions under "versions".
    """
    record = _load(name, f"the row {case!r} cannot be computed with these versions")
    rows = [row for row in record["rows"] if row.get("case") == case]
    if not rows:
        raise ValueError(
            f"case={case!r} must be in the table {name!r}: record it with versions that can"
            " compute it"
        )
    return {"recorded": record["recorded"], "versions": record["versions"]} | rows[0]


def _compute(
    name: str,
    compute: Callable[[], list[dict[str, Any]]],
    recording: bool,
    accelerator: str,
    sizes: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(
            f"name={name!r} must have only lower-case letters, digits and underscores: it names"
            " a file"
        )
    start = time.monotonic()
    rows = _as_json(name, compute())
    if recording:
        _write(name, accelerator, rows, sizes, time.monotonic() - start)
    return rows


def _older(rows: list[dict[str, Any]]) -> str:
    """Describes the rows that were recorded on another day or with other versions."""
    days: dict[str, list[str]] = {}
    for row in rows:
        if "versions" in row:
            when = f"recorded on {row['recorded']} with {_spell(row['versions'])}"
            days.setdefault(when, []).append(repr(row["case"]))
    return "".join(f" ({', '.join(cases)} {when})" for when, cases in days.items())


def _recording() -> bool:
    return os.environ.get("COURSE_RECORD") == "1"


def _computed_here(rows: list[dict[str, Any]], accelerator: str) -> str:
    versions = _spell({"jax": importlib.metadata.version("jax")})
    return f"computed here for a virtual {_titles(rows, accelerator)}, with {versions}"


def _as_json(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows as they would come back from a file."""
    try:
        return json.loads(json.dumps(rows, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the rows of the table {name!r} must consist of numbers, strings and lists:"
            f" {error}"
        ) from error


def _load(name: str, reason: str) -> dict[str, Any]:
    try:
        return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the table {name!r} cannot be computed here ({reason}), and no record of it comes"
            " with course_lib; run this with COURSE_RECORD=1 on a machine that has virtual"
            " devices"
        ) from error


def _read(name: str, accelerator: str, reason: str, sizes: Mapping[str, Any] | None) -> Table:
    record = _load(name, reason)
    asked = {"accelerator": accelerator, **_as_json(name, [dict(sizes or {})])[0]}
    recorded_for = {"accelerator": record["accelerator"], **record.get("sizes", {})}
    if asked != recorded_for:
        # The note names only the sizes that differ: the reader changed these.
        other = [
            key for key in {**recorded_for, **asked} if asked.get(key) != recorded_for.get(key)
        ]
        return Table([], False, _not_recorded(asked, recorded_for, other, record, reason))
    note = (
        f"recorded on {record['recorded']} for a virtual {_titles(record['rows'], accelerator)}"
        f" with {_spell(record['versions'])}{_older(record['rows'])}, because here {reason}"
    )
    return Table(record["rows"], False, note)


def _not_recorded(asked, recorded_for, other, record, reason):
    """Says that no rows match, which sizes the record has, and how long computing takes."""
    mine, stored = (
        ", ".join(f"{key}={sizes.get(key)!r}" for key in other)
        for sizes in (asked, recorded_for)
    )
    takes = f"about {record['seconds']:,} s" if "seconds" in record else "minutes at most"
    return (
        f"not recorded for {mine} (the record is for {stored}), and not computed, because here"
        f" {reason}; with virtual devices it takes {takes} to compute"
    )


def _write(
    name: str,
    accelerator: str,
    rows: list[dict[str, Any]],
    sizes: Mapping[str, Any] | None,
    seconds: float,
) -> None:
    """Writes the record, unless the stored one has the same rows and sizes. So the record's
    date is that of its last change.
    """
    file = FOLDER / f"{name}.json"
    of = {"accelerator": accelerator, "sizes": _as_json(name, [dict(sizes or {})])[0]}
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        if before["rows"] == rows and {"sizes": {}, **before}.items() >= of.items():
            return
    record = {
        "recorded": datetime.date.today().isoformat(),
        "versions": {package: importlib.metadata.version(package) for package in _VERSIONS_OF},
        **of,
        "seconds": math.ceil(seconds),
        "rows": rows,
    }
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _titles(rows: list[dict[str, Any]], accelerator: str) -> str:
    """Lists the titles of the accelerators that the rows name. If they name none, returns the
    title of `accelerator`.
    """
    named = dict.fromkeys(
        row["accelerator"] for row in rows if row.get("accelerator") in hardware.names()
    )
    return ", ".join(hardware.get(name).title for name in named or (accelerator,))


def _spell(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())
