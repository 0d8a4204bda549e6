"""The versions of a training step below each other, with bars of memory and time."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from course_lib.measure.units import GIB
from course_lib.show.figures import style

UNITS = {"GiB": (GIB, ".1f"), "GB": (10**9, ".2f")}
"""Units of memory: their bytes, and the format of a number of them."""


def rungs(
    rows: Sequence[Any],
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
      first: the number of the first row.
      title: of the picture.
      unit: of the memory: "GiB" or "GB".

    Raises:
      ValueError: if there are no rows, or no such unit.
    """
    if not rows:
        raise ValueError("rows=[] must hold at least one mapping: there is nothing to draw")
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} must be one of {tuple(UNITS)}")
    rows = style.as_dicts(rows)
    figure, panels = style.canvas(width=5.4, height=1.2 + 0.3 * len(rows), columns=(1, 1))
    memory, time = panels
    names = [f"{i}. {row['name']}" for i, row in enumerate(rows, first)]
    memory.set_yticks(range(len(rows)), names, fontsize=9)
    memory.set_ylim(len(rows) - 0.4, -0.6)
    size, memory_digits = UNITS[unit]
    bars = (
        (memory, [float(row["peak"]) / size for row in rows], memory_digits, style.COLORS[0]),
        (time, [1e3 * float(row["seconds"]) for row in rows], ".0f", style.COLORS[1]),
    )
    for axes, values, digits, color in bars:
        for y, (row, value) in enumerate(zip(rows, values, strict=True)):
            fits = limit is None or float(row["peak"]) <= limit
            look = {"facecolor": color if fits else "white", "edgecolor": color}
            axes.barh(y, value, height=0.7, hatch=None if fits else "///", **look)
            style.write(axes, f"{value:{digits}}", value, y, shift=3)
        axes.set_xlim(0, 1.28 * max(values))
        axes.grid(visible=False, axis="y")
    label = f"peak memory ({unit})"
    if limit is not None:
        memory.axvline(float(limit) / size, color=style.COLORS[5], linewidth=1.5)
        label += f"\nline: the GPU's limit, {float(limit) / size:.1f}"
    memory.set_xlabel(label, fontsize=10)
    time.set_xlabel("attainable time (ms)\nper step", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure
