"""Bars: how much memory, how many bytes, how much time, case by case."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.measure.units import GIB, MIB
from course_lib.show.figures import style

Rows = Sequence[Any]  # mappings or dataclasses


def memory_bars(
    rows: Rows,
    *,
    label: str = "name",
    values: Sequence[str] = ("published", "compiled"),
    capacity: style.Number | None = None,
    title: str = "",
) -> Figure:
    """Draws the memory of each row as bars side by side, one for each of `values`.

    Args:
      rows: one mapping or dataclass a case; a value that is None draws no bar and says "not
        known".
      label: the key that holds a row's name.
      values: the keys that hold bytes; they are the legend, too.
      capacity: bytes of memory that the accelerator has, drawn as a line.
      title: what the picture shows.

    Raises:
      ValueError: if there are no rows, or a row lacks a key.
    """
    rows = style.as_dicts(rows)
    figure, axes = _case_axes(rows, label, values, height_per_row=0.22 * len(values) + 0.2)
    thickness = 0.8 / len(values)
    for i, key in enumerate(values):
        centers = [y + (i - (len(values) - 1) / 2) * thickness for y in range(len(rows))]
        widths = [(row[key] or 0) / GIB for row in rows]
        axes.barh(centers, widths, thickness * 0.92, label=key, **style.fill(i))
        for y, width, row in zip(centers, widths, rows, strict=True):
            style.write(
                axes, "not known" if row[key] is None else style.size(row[key]), width, y
            )
    _finish(figure, axes, capacity, title)
    return figure


def memory_breakdown(
    rows: Rows,
    *,
    label: str = "name",
    values: Sequence[str] = ("arguments", "temporaries"),
    capacity: style.Number | None = None,
    xlabel: str = "memory (GiB)",
    title: str = "",
) -> Figure:
    """Draws the memory of each row as one bar, made of `values` one after the other, with their
    sum at its end.

    Args:
      rows: one mapping or dataclass a case.
      label: the key that holds a row's name.
      values: the keys that hold bytes; they are the legend, too.
      capacity: bytes of memory that the accelerator has, drawn as a line.
      xlabel: what the bytes are, drawn in GiB.
      title: what the picture shows.

    Raises:
      ValueError: if there are no rows, or a row lacks a key.
    """
    rows = style.as_dicts(rows)
    figure, axes = _case_axes(rows, label, values, height_per_row=0.45)
    left = [0.0] * len(rows)
    for i, key in enumerate(values):
        widths = [row[key] / GIB for row in rows]
        axes.barh(range(len(rows)), widths, 0.62, left=left, label=key, **style.fill(i))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        style.write(axes, style.size(total * GIB), total, y)
    _finish(figure, axes, capacity, title, xlabel)
    return figure


def roofline(
    rows: Rows,
    *,
    label: str = "name",
    compute: str = "compute_seconds",
    memory: str = "memory_seconds",
    measured: str = "published_seconds",
    title: str = "",
) -> Figure:
    """Draws, for each row, the time that its FLOPs and its bytes take at least, and the time
    that was measured.

    Args:
      rows: one mapping or dataclass a case; times in seconds; a measured time may be None.
      label: the key that holds a row's name.
      compute: the key of FLOPs / peak FLOP/s.
      memory: the key of bytes moved / memory bandwidth.
      measured: the key of the measured time, drawn as a diamond.
      title: what the picture shows.

    Raises:
      ValueError: if there are no rows, or a row lacks a key.
    """
    rows = style.as_dicts(rows)
    figure, axes = _case_axes(rows, label, (compute, memory, measured), height_per_row=0.6)
    for i, (key, name) in enumerate(
        ((compute, "floor: FLOPs / peak"), (memory, "floor: bytes / bandwidth"))
    ):
        centers = [y + (i - 0.5) * 0.36 for y in range(len(rows))]
        axes.barh(centers, [row[key] for row in rows], 0.34, label=name, **style.fill(i))
    points = [(row[measured], y) for y, row in enumerate(rows) if row[measured] is not None]
    if points:
        name = measured.removesuffix("_seconds")
        axes.plot(
            *zip(*points, strict=True),
            "D",
            color="black",
            markersize=8,
            linestyle="",
            label=name,
        )
    for y, row in enumerate(rows):
        floor = max(row[compute], row[memory])
        known = "" if row[measured] is None else f"{style.duration(row[measured])}, "
        text = f"{known}floor {style.duration(floor)}"
        style.write(axes, text, max(floor, row[measured] or 0), y, shift=11)
    axes.margins(x=0.3)
    axes.set(xlim=(0, None), xlabel="time a step (s)", title=title)
    _legend(figure)
    return figure


def residuals(arrays: Rows, *, top: int = 10, title: str = "") -> Figure:
    """Draws the arrays that a function saves for its backward pass
    (`rematerialization.residuals`), largest first.

    Arrays of the same shape, dtype and reason share a bar; what is beyond the first `top` bars
    shares the last one.

    Args:
      arrays: mappings or dataclasses with `bytes`, `shape`, `dtype`, `why`.
      top: how many bars to draw.
      title: what the picture shows.

    Raises:
      ValueError: if there are no arrays.
    """
    return _array_bars(style.as_dicts(arrays), "why", top, title)


def largest_arrays(arrays: Rows, *, top: int = 10, title: str = "") -> Figure:
    """Draws the arrays that are alive when memory peaks (`measure.heap(...).arrays`), largest
    first.

    Args:
      arrays: mappings or dataclasses with `bytes`, `shape`, `dtype`, `scope`.
      top: how many bars to draw; the rest shares the last one.
      title: what the picture shows.

    Raises:
      ValueError: if there are no arrays.
    """
    return _array_bars(style.as_dicts(arrays), "scope", top, title)


def top_ops(ops: Rows, *, title: str = "") -> Figure:
    """Draws the operations that take most of a step (`profiling.Trace.top_ops`), and where in
    the source they are.

    Args:
      ops: mappings or dataclasses with `op`, `scope` (may be empty), `seconds` (self time a
        step), `share` (of all).
      title: what the picture shows.

    Raises:
      ValueError: if there are no operations.
    """
    rows = [row | {"name": _two_lines(row["op"], row["scope"])} for row in style.as_dicts(ops)]
    figure, axes = _case_axes(rows, "name", ("seconds", "share"), height_per_row=0.42)
    axes.barh(range(len(rows)), [row["seconds"] * 1e3 for row in rows], 0.6, **style.fill(0))
    for y, row in enumerate(rows):
        style.write(
            axes,
            f"{style.duration(row['seconds'])}, {row['share']:.0%}",
            row["seconds"] * 1e3,
            y,
        )
    axes.margins(x=0.25)
    axes.set(xlim=(0, None), xlabel="self time a step (ms)", title=title)
    return figure


def _two_lines(name: str, scope: str) -> str:
    """A name, and under it where it comes from: without the leading `jit(step)/`, and shortened
    in the middle.
    """
    return "\n".join(
        style.shorten(line, 56)
        for line in (name, re.sub(r"^jit\([^()]*\)/", "", scope))
        if line
    )


def _array_bars(arrays: list[dict[str, Any]], reason_key: str, top: int, title: str) -> Figure:
    """One bar for arrays of equal shape, dtype and reason."""
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for array in arrays:
        shape = (
            f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
            if array["dtype"]
            else "small arrays"
        )
        total[shape, array[reason_key]] += array["bytes"]
        count[shape, array[reason_key]] += 1
    rows: list[dict[str, Any]] = []
    for (shape, reason), num_bytes in total.most_common(top):
        times = f"{count[shape, reason]} × " if count[shape, reason] > 1 else ""
        rows.append({"name": _two_lines(times + shape, reason), "bytes": num_bytes})
    rest = total.most_common()[top:]
    if rest:
        num_arrays = sum(count[key] for key, _ in rest)
        rows.append(
            {"name": f"{num_arrays} others", "bytes": sum(num_bytes for _, num_bytes in rest)}
        )
    figure, axes = _case_axes(rows, "name", ("bytes",), height_per_row=0.42)
    axes.barh(range(len(rows)), [row["bytes"] / MIB for row in rows], 0.6, **style.fill(0))
    for y, row in enumerate(rows):
        style.write(axes, style.size(row["bytes"]), row["bytes"] / MIB, y)
    axes.margins(x=0.15)
    axes.set(xlim=(0, None), xlabel="MiB", title=title)
    return figure


def _case_axes(
    rows: Rows, label: str, values: Sequence[str], height_per_row: style.Number
) -> tuple[Figure, Axes]:
    """Axes with one horizontal place a row, the first at the top, tall enough for all."""
    if not rows:
        raise ValueError("rows=[] must hold at least one case: there is nothing to draw")
    for row in rows:
        missing = [key for key in (label, *values) if key not in row]
        if missing:
            raise ValueError(
                f"rows: {dict(row)!r} lacks {missing}: name the keys to draw with `label` and"
                " `values`"
            )
    figure, axes = style.canvas(height=1.1 + height_per_row * len(rows))
    axes.set_yticks(range(len(rows)), [str(row[label]) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _finish(
    figure: Figure,
    axes: Axes,
    capacity: style.Number | None,
    title: str,
    xlabel: str = "memory (GiB)",
) -> None:
    if capacity is not None:
        text = f"capacity {style.size(capacity)}"
        axes.axvline(capacity / GIB, color="black", linestyle="--", linewidth=1.2, label=text)
    axes.margins(x=0.15)
    axes.set(xlim=(0, None), xlabel=xlabel, title=title)
    _legend(figure)


def _legend(figure: Figure) -> None:
    """A legend under the axes: no bar can hide behind it."""
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
