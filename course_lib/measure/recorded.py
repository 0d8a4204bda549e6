"""Recorded tables, for machines that cannot compute them.

A notebook asks for a table by name and passes the function that computes it. Where virtual
devices are available, the function runs; elsewhere the rows come from a file of this package,
which another machine wrote, for the same sizes and the same accelerator. `COURSE_RECORD=1` in
the environment makes a live run write the file (`make notebooks` does that).
"""

import collections
import concurrent.futures
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from course_lib.measure import hardware, virtual
from course_lib.measure.flops import inner_jaxprs

FOLDER = pathlib.Path(__file__).parent / "recorded_tables"
Rows = list[dict[str, Any]]
_VERSIONS = ("jax", "jaxlib", "flax", "optax")
_FUNCTIONS = frozenset("dot_general exp log logistic tanh erf rsqrt".split())


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of a table, and where they come from."""

    # one dict per row, of JSON's types. Empty if they cannot be computed, and were not recorded
    # for these sizes and this accelerator
    rows: Rows
    live: bool  # whether all of them were computed just now
    note: str  # for the reader: computed here; or when recorded, with which versions, and why

    def __str__(self) -> str:
        """Returns the note in lines of at most 100 characters: `print(table)`."""
        return textwrap.fill(self.note, 100, break_on_hyphens=False)


def live_or_recorded(
    name: str,
    compute: Callable[[], Rows],
    accelerator: str = "a5000",
    sizes: Mapping[str, Any] | None = None,
) -> Table:
    """Computes a table for a virtual accelerator, or reads `recorded_tables/<name>.json` where
    that cannot be done. `compute` returns rows without times and dates: the same versions give
    the same rows. If it compiles for several accelerators, name one here, and let each row name
    its own under "accelerator". `sizes` are all numbers and options, of JSON's types, that the
    rows depend on: rows that were recorded for others are not shown.
    """
    record = _Record(name, accelerator, sizes)
    if reason := virtual.why_unavailable(accelerator):
        return record.read(reason)
    rows = record.compute(compute, _recording())
    older = _older(rows)
    return Table(rows, not older, record.computed_here(rows) + older)


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
      compute: returns the row of a case, with the case under "case".
      live: the cases to compute. If the record is for other sizes, only they are shown.
      cases: all cases, in the table's order. With `COURSE_RECORD=1` all of them are computed
        and written. () if another program records the table.
    """
    if cases and not set(live) <= set(cases):
        raise ValueError(
            f"live={list(live)} must be among cases={list(cases)}: the table has no row of"
            " another case"
        )
    record, recording = _Record(name, accelerator, sizes), bool(cases) and _recording()
    why = "only some are computed, to save time" if live else "no new row was requested"
    reason = virtual.why_unavailable(accelerator)
    if reason or not (live or recording):
        return record.read(reason or why)

    def rows_of_cases() -> Rows:
        # XLA's compiler releases Python's lock and uses little more than one core.
        with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
            return list(pool.map(compute, cases if recording else live))

    rows = record.compute(rows_of_cases, recording)
    if live and cases and set(live) == set(cases):
        return Table(rows, False, record.computed_here(rows))
    stored = record.read(why)
    if not live:
        return stored
    by_case = {row["case"]: row for row in [*stored.rows, *rows]}  # in the order of the record
    computed = f"{record.computed_here(rows)}: {', '.join(map(repr, live))}"
    return Table(list(by_case.values()), False, f"{computed}; the other rows: {stored.note}")


def fingerprint(step: jax.stages.Traced) -> str:
    """Returns a hash of a traced step, for its record: of its arguments and results, what it
    donates, its products and functions such as exp, and all operations on arrays shaped like a
    result, as the optimizer's. Its other operations differ between versions of JAX.
    """
    arguments = [(*_kind(x), x.donated) for x in jax.tree.leaves(step.args_info)]
    results = [_kind(x) for x in step.jaxpr.out_avals]
    shapes = {shape for shape, _ in results if len(shape) > 1}
    operations: collections.Counter[Any] = collections.Counter()

    def count(jaxpr: Any, times: int) -> None:
        for eqn in jaxpr.eqns:
            name, inner = eqn.primitive.name, inner_jaxprs(eqn.params)
            for body in inner:
                count(body, times * (eqn.params["length"] if name == "scan" else 1))
            for variable in () if inner else eqn.outvars:
                kind = _kind(variable.aval)
                if name in _FUNCTIONS or kind[0] in shapes:
                    operations[name, *kind] += times

    count(step.jaxpr.jaxpr, 1)
    parts = (sorted(map(str, part)) for part in (arguments, results, operations.items()))
    return hashlib.sha256(str(list(parts)).encode()).hexdigest()[:12]


def _kind(aval: Any) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", aval))


def older_row(name: str, case: str) -> dict[str, Any]:
    """Returns the recorded row of a case that the installed versions cannot compute, with its
    date under "recorded" and its versions under "versions".
    """
    record = _load(name, f"the row {case!r} cannot be computed with these versions")
    for row in record["rows"]:
        if row.get("case") == case:
            return {"recorded": record["recorded"], "versions": record["versions"]} | row
    raise ValueError(
        f"case={case!r} must be in the table {name!r}: record it with versions that can"
        " compute it"
    )


class _Record:
    """The record of a table, for the accelerator and the sizes that are asked for."""

    def __init__(self, name: str, accelerator: str, sizes: Mapping[str, Any] | None):
        self.name, self.accelerator = name, accelerator
        self.asked = {"accelerator": accelerator, "sizes": _as_json(dict(sizes or {}))}

    def compute(self, compute: Callable[[], Rows], write: bool) -> Rows:
        start = time.monotonic()
        rows = _as_json(compute())
        if write:
            self._write(rows, math.ceil(time.monotonic() - start))
        return rows

    def computed_here(self, rows: Rows) -> str:
        version = importlib.metadata.version("jax")
        return f"computed here for a virtual {self._titles(rows)}, with jax {version}"

    def read(self, reason: str) -> Table:
        """Returns the rows, if they were recorded for what is asked for; `reason` says why they
        are not computed.
        """
        record = _load(self.name, reason)
        asked = {"accelerator": self.accelerator, **self.asked["sizes"]}
        stored = {"accelerator": record["accelerator"], **record.get("sizes", {})}
        if asked != stored:
            # The note names only the sizes that differ: the reader changed these.
            other = [key for key in {**stored, **asked} if asked.get(key) != stored.get(key)]
            mine, its = (
                ", ".join(f"{key}={sizes.get(key)!r}" for key in other)
                for sizes in (asked, stored)
            )
            seconds = record.get("seconds")
            takes = f"about {seconds:,} s" if seconds else "minutes at most"
            note = (
                f"not recorded for {mine} (the record is for {its}), and not computed, because"
                f" here {reason}; with virtual devices it takes {takes} to compute"
            )
            return Table([], False, note)
        rows = record["rows"]
        note = (
            f"recorded on {record['recorded']} for a virtual {self._titles(rows)} with"
            f" {_spell(record['versions'])}{_older(rows)}, because here {reason}"
        )
        return Table(rows, False, note)

    def _write(self, rows: Rows, seconds: int) -> None:
        """Writes the record, unless the stored one has the same rows and sizes. So the record's
        date is that of its last change.
        """
        file = FOLDER / f"{self.name}.json"
        if file.exists():
            before = {"sizes": {}} | json.loads(file.read_text(encoding="utf-8"))
            if before.items() >= {"rows": rows, **self.asked}.items():
                return
        record = {
            "recorded": datetime.date.today().isoformat(),
            "versions": {package: importlib.metadata.version(package) for package in _VERSIONS},
            **self.asked,
            "seconds": seconds,
            "rows": rows,
        }
        file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def _titles(self, rows: Rows) -> str:
        """Lists the titles of the accelerators that the rows name, else of its own."""
        named = dict.fromkeys(row.get("accelerator") for row in rows)
        known = [name for name in named if name in hardware.names()] or [self.accelerator]
        return ", ".join(hardware.get(name).title for name in known)


def _load(name: str, reason: str) -> dict[str, Any]:
    try:
        return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the table {name!r} cannot be computed here ({reason}), and no record of it comes"
            " with course_lib; run this with COURSE_RECORD=1 on a machine that has virtual"
            " devices"
        ) from error


def _older(rows: Rows) -> str:
    """Describes the rows that were recorded on another day or with other versions."""
    days: dict[str, list[str]] = {}
    for row in rows:
        if "versions" in row:
            when = f"recorded on {row['recorded']} with {_spell(row['versions'])}"
            days.setdefault(when, []).append(repr(row["case"]))
    return "".join(f" ({', '.join(cases)} {when})" for when, cases in days.items())


def _recording() -> bool:
    return os.environ.get("COURSE_RECORD") == "1"


def _as_json(rows: Any) -> Any:
    """Returns what would come back from a file."""
    return json.loads(json.dumps(rows, allow_nan=False))


def _spell(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in versions.items())
