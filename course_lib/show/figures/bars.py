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
UNITS = {"GiB": (GIB, ".1f"), "GB": (10**9, ".2f")}
"""Units of memory: their bytes, and the format of a number of them."""


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
    """
    rows, figure, axes = _cases("rows", rows, 0.22 * len(values) + 0.2)
    thickness = 0.8 / len(values)
    for i, key in enumerate(values):
        centers = [y + (i - (len(values) - 1) / 2) * thickness for y in range(len(rows))]
        widths = [(row[key] or 0) / GIB for row in rows]
        bars = axes.barh(centers, widths, thickness * 0.92, label=key, **style.fill(i, key))
        label(axes, bars, ["not known" if r[key] is None else style.size(r[key]) for r in rows])
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
    """
    rows, figure, axes = _cases("rows", rows, 0.45)
    unit, unit_name = style.unit(max(sum(row[key] for key in values) for row in rows))
    ends = [0.0] * len(rows)
    for i, key in enumerate(values):
        widths = [row[key] / unit for row in rows]
        look = style.fill(i, (kinds or {}).get(key, key))
        bars = axes.barh(range(len(rows)), widths, 0.62, left=ends, label=key, **look)
        ends = [start + width for start, width in zip(ends, widths, strict=True)]
    digits = [2 if end < 10 else int(end < 100) for end in ends]
    texts = [f"{end:,.{n}f} {unit_name}" for end, n in zip(ends, digits, strict=True)]
    label(axes, bars, texts)
    _finish(figure, axes, title, xlabel.replace("GiB", unit_name))
    return figure


def roofline(rows: Rows, *, title: str = "") -> Figure:
    """Draws the least time of each case, by FLOPs and by bytes, and the published time.

    Args:
      rows: one mapping or dataclass per case, with its name as `name`, and in seconds
        `compute_seconds`, `memory_seconds`, and `published_seconds`, which may be None.
    """
    rows, figure, axes = _cases("rows", rows, 0.6)
    names = {"compute": "floor: FLOPs / peak", "memory": "floor: bytes / bandwidth"}
    floors = {f"{key}_seconds": name for key, name in names.items()}
    for i, (key, name) in enumerate(floors.items()):
        centers = [y + (i - 0.5) * 0.36 for y in range(len(rows))]
        axes.barh(centers, [row[key] for row in rows], 0.34, label=name, **style.fill(i + 2))
    published = [row["published_seconds"] for row in rows]
    points = [(seconds, y) for y, seconds in enumerate(published) if seconds is not None]
    if points:
        look = style.Look(color=style.COLORS[1], markeredgecolor="black", markersize=8)
        axes.plot(*zip(*points, strict=True), "D", label="published", **look)
    for y, (row, seconds) in enumerate(zip(rows, published, strict=True)):
        floor = max(row[key] for key in floors)
        text = ("" if seconds is None else f"{seconds:.2f} s, ") + f"floor {floor:.2f} s"
        style.write(axes, text, max(floor, seconds or 0), y, shift=11)
    _finish(figure, axes, title, "time per step (s)", margin=0.3)
    return figure


def residuals(arrays: Rows, *, top: int = 10, title: str = "") -> Figure:
    """Draws the arrays that a function saves for its backward pass
    (`rematerialization.residuals`), largest first.

    Arrays of the same shape, dtype and reason share a bar; those after the first `top` bars
    share the last one.

    Args:
      arrays: mappings or dataclasses with `bytes`, `shape`, `dtype`, `why`.
    """
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for array in style.as_dicts(arrays):
        shape = f"{array['dtype']}[{','.join(map(str, array['shape']))}]"
        key = (shape if array["dtype"] else "small arrays", array["why"])
        total[key] += array["bytes"]
        count[key] += 1
    rows: list[dict[str, Any]] = []
    for (shape, reason), num_bytes in total.most_common(top):
        times = f"{count[shape, reason]} × " if count[shape, reason] > 1 else ""
        rows.append({"name": _two_lines(times + shape, reason), "bytes": num_bytes})
    if rest := dict(total.most_common()[top:]):
        others = f"{sum(count[key] for key in rest)} others"
        rows.append({"name": others, "bytes": sum(rest.values())})
    _, figure, axes = _cases("arrays", rows, 0.42)
    mib = [row["bytes"] / MIB for row in rows]
    bars = axes.barh(range(len(rows)), mib, 0.6, **style.fill(0))
    label(axes, bars, [f"{size:,.0f}" if size >= 10 else f"{size:.2g}" for size in mib])
    _finish(figure, axes, title, "memory (MiB)")
    return figure


def rungs(
    rows: Rows,
    *,
    limit: style.Number | None = None,
    first: int = 1,
    title: str = "",
    unit: str = "GiB",
) -> Figure:
    """Draws two bars per version of a training step, the first version at the top: the peak
    memory and the attainable time. Narrow enough for the screen of a phone.

    Args:
      rows: mappings or dataclasses with `name`, `seconds` and `peak` (in bytes).
      limit: the bytes of the GPU's memory that a step may use. The bars of a step that needs
        more are hatched. None: no limit is drawn.
      unit: of the memory: "GiB" or "GB".
    """
    style.refuse_empty("rows", rows)
    rows = style.as_dicts(rows)
    height = 1.2 + 0.3 * len(rows)
    figure, [memory, time] = style.canvas(5.4, height, columns=2, sharey=True)
    style.name_rows(memory, [f"{i}. {row['name']}" for i, row in enumerate(rows, first)], 0.6)
    size, memory_digits = UNITS[unit]
    fits = [limit is None or float(row["peak"]) <= limit for row in rows]
    for axes, values, digits, color in (
        (memory, [float(row["peak"]) / size for row in rows], memory_digits, style.COLORS[0]),
        (time, [1e3 * float(row["seconds"]) for row in rows], ".0f", style.COLORS[1]),
    ):
        faces = [color if one else "white" for one in fits]
        look = style.Look(facecolor=faces, hatch=[None if one else "///" for one in fits])
        drawn = axes.barh(range(len(rows)), values, 0.7, edgecolor=color, **look)
        label(axes, drawn, [f"{value:{digits}}" for value in values], shift=3)
        axes.set_xlim(0, 1.28 * max(values))
        axes.grid(visible=False, axis="y")
    xlabel = f"peak memory ({unit})"
    if limit is not None:
        memory.axvline(float(limit) / size, color=style.COLORS[5], linewidth=1.5)
        xlabel += f"\nline: the GPU's limit, {float(limit) / size:.1f}"
    memory.set_xlabel(xlabel, fontsize=10)
    time.set_xlabel("attainable time (ms)\nper step", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure


def label(axes: Axes, bars: Any, texts: Sequence[str], shift: style.Number = 5) -> None:
    """Writes a text `shift` points right of each bar of a call of `barh`."""
    look = style.Look(fontsize=9, bbox=style.ON_WHITE)
    axes.bar_label(bars, texts, padding=shift, **look)


def _two_lines(name: str, scope: str) -> str:
    lines = name, re.sub(r"^jit\([^()]*\)/", "", scope)
    return "\n".join(style.shorten(line, 56) for line in lines if line)


def _cases(
    argument: str, rows: Rows, height_per_row: style.Number
) -> tuple[Rows, Figure, Axes]:
    """Returns the rows as dicts, and axes with one place for each, the first at the top."""
    style.refuse_empty(argument, rows)
    rows = style.as_dicts(rows)
    figure, [axes] = style.canvas(height=1.1 + height_per_row * len(rows))
    style.name_rows(axes, [str(row["name"]) for row in rows], 0.55)
    return rows, figure, axes


def _finish(figure: Figure, axes: Axes, title: str, xlabel: str, margin: float = 0.15) -> None:
    axes.margins(x=margin)
    axes.set(xlim=(0, None), xlabel=xlabel, title=title)
    if axes.get_legend_handles_labels()[0]:  # under the axes, where it hides no bar
        figure.legend(loc="outside lower center", ncols=3, fontsize=9)
