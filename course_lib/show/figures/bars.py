"""Bar charts of memory, bytes and time, case by case."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.measure.units import GIB, MIB
from course_lib.show.figures import style

Rows = Sequence[Any]  # mappings or dataclasses


def memory_bars(
    rows: Rows,
    *,
    values: Sequence[str] = ("published", "compiled"),
    capacity: style.Number | None = None,
    title: str = "",
) -> Figure:
    """Draws the memory of each case as bars side by side, one for each of `values`.

    Args:
      rows: one mapping or dataclass per case, with its name as `name`; None as a value draws no
        bar and says "not known".
      values: the keys that hold bytes, which are also the legend.
      capacity: the accelerator's memory in bytes, drawn as a line.
      title: of the picture.

    Raises:
      ValueError: if there are no rows, or a row lacks a key.
    """
    rows = style.as_dicts(rows)
    figure, axes = _case_axes(rows, values, height_per_row=0.22 * len(values) + 0.2)
    thickness = 0.8 / len(values)
    for i, key in enumerate(values):
        centers = [y + (i - (len(values) - 1) / 2) * thickness for y in range(len(rows))]
        widths = [(row[key] or 0) / GIB for row in rows]
        axes.barh(centers, widths, thickness * 0.92, label=key, **style.fill(i, key))
        for y, width, row in zip(centers, widths, rows, strict=True):
            style.write(
                axes, "not known" if row[key] is None else style.size(row[key]), width, y
            )
    if capacity is not None:
        text = f"capacity {style.size(capacity)}"
        axes.axvline(capacity / GIB, color="black", linestyle="--", linewidth=1.2, label=text)
    _finish(figure, axes, title, "memory (GiB)")
    return figure


def memory_breakdown(
    rows: Rows,
    *,
    values: Sequence[str] = ("arguments", "temporaries"),
    kinds: Mapping[str, str] | None = None,
    xlabel: str = "memory (GiB)",
    title: str = "",
) -> Figure:
    """Draws the memory of each case as one stacked bar, with the sum at its end.

    Args:
      rows: one mapping or dataclass per case, with its name as `name`.
      values: the keys that hold bytes, which are also the legend.
      kinds: a key of `values` -> the kind (`measure.tape.KINDS`) whose colour it takes.
      xlabel: label of the axis. The unit in it, GiB, becomes that of the longest bar.
      title: of the picture.

    Raises:
      ValueError: if there are no rows, or a row lacks a key.
    """
    rows = style.as_dicts(rows)
    figure, axes = _case_axes(rows, values, height_per_row=0.45)
    unit, unit_name = style.unit(max(sum(row[key] for key in values) for row in rows))
    left = [0.0] * len(rows)
    for i, key in enumerate(values):
        widths = [row[key] / unit for row in rows]
        look = style.fill(i, (kinds or {}).get(key, key))
        axes.barh(range(len(rows)), widths, 0.62, left=left, label=key, **look)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        digits = 2 if total < 10 else 1 if total < 100 else 0
        style.write(axes, f"{total:,.{digits}f} {unit_name}", total, y)
    _finish(figure, axes, title, xlabel.replace("GiB", unit_name))
    return figure


def roofline(rows: Rows, *, title: str = "") -> Figure:
    """Draws the least time of each case, by FLOPs and by bytes, and the published time.

    Args:
      rows: one mapping or dataclass per case, with its name as `name`, and in seconds
        `compute_seconds`, `memory_seconds`, and `published_seconds`, which may be None.
      title: of the picture.

    Raises:
      ValueError: if there are no rows, or a row lacks a key.
    """
    rows = style.as_dicts(rows)
    floors = {
        "compute_seconds": "floor: FLOPs / peak",
        "memory_seconds": "floor: bytes / bandwidth",
    }
    figure, axes = _case_axes(rows, (*floors, "published_seconds"), height_per_row=0.6)
    for i, (key, name) in enumerate(floors.items()):
        centers = [y + (i - 0.5) * 0.36 for y in range(len(rows))]
        axes.barh(centers, [row[key] for row in rows], 0.34, label=name, **style.fill(i))
    points = [
        (row["published_seconds"], y)
        for y, row in enumerate(rows)
        if row["published_seconds"] is not None
    ]
    if points:
        axes.plot(*zip(*points, strict=True), "kD", markersize=8, label="published")
    for y, row in enumerate(rows):
        floor, published = max(row[key] for key in floors), row["published_seconds"]
        known = "" if published is None else f"{published:.2f} s, "
        text = f"{known}floor {floor:.2f} s"
        style.write(axes, text, max(floor, published or 0), y, shift=11)
    _finish(figure, axes, title, "time per step (s)", margin=0.3)
    return figure


def residuals(arrays: Rows, *, top: int = 10, title: str = "") -> Figure:
    """Draws the arrays that a function saves for its backward pass
    (`rematerialization.residuals`), largest first.

    Arrays of the same shape, dtype and reason share a bar; those after the first `top` bars
    share the last one.

    Args:
      arrays: mappings or dataclasses with `bytes`, `shape`, `dtype`, `why`.
      top: how many bars to draw.
      title: of the picture.

    Raises:
      ValueError: if there are no arrays.
    """
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for array in style.as_dicts(arrays):
        shape = (
            f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
            if array["dtype"]
            else "small arrays"
        )
        total[shape, array["why"]] += array["bytes"]
        count[shape, array["why"]] += 1
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
    figure, axes = _case_axes(rows, ("bytes",), height_per_row=0.42)
    axes.barh(range(len(rows)), [row["bytes"] / MIB for row in rows], 0.6, **style.fill(0))
    for y, row in enumerate(rows):
        mib = row["bytes"] / MIB
        style.write(axes, f"{mib:,.0f}" if mib >= 10 else f"{mib:.2g}", mib, y)
    _finish(figure, axes, title, "memory (MiB)")
    return figure


def _two_lines(name: str, scope: str) -> str:
    """Returns a name over its scope, shortened and without the first `jit(step)/`."""
    return "\n".join(
        style.shorten(line, 56)
        for line in (name, re.sub(r"^jit\([^()]*\)/", "", scope))
        if line
    )


def _case_axes(
    rows: Rows, values: Sequence[str], height_per_row: style.Number
) -> tuple[Figure, Axes]:
    """Returns axes with one horizontal place per row, the first at the top, tall enough."""
    if not rows:
        raise ValueError("rows=[] must hold at least one case: there is nothing to draw")
    for row in rows:
        missing = [key for key in ("name", *values) if key not in row]
        if missing:
            raise ValueError(f"rows: {dict(row)!r} lacks {missing}")
    figure, axes = style.canvas(height=1.1 + height_per_row * len(rows))
    axes.set_yticks(range(len(rows)), [str(row["name"]) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _finish(figure: Figure, axes: Axes, title: str, xlabel: str, margin: float = 0.15) -> None:
    axes.margins(x=margin)
    axes.set(xlim=(0, None), xlabel=xlabel, title=title)
    if axes.get_legend_handles_labels()[0]:  # under the axes, where it hides no bar
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
