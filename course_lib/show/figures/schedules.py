"""Pipeline schedules: one row per device, one cell per operation."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from course_lib.show.figures import style

LETTERS = 9  # points


def schedule(tables: Mapping[str, Sequence[Sequence[Any]]]) -> Figure:
    """Draws schedules below each other on one axis of time, one row per device; white is idle.

    Each cell shows the number of its microbatch, with a ' for each chunk before its own. A slot
    in which a device runs one of its v chunks is drawn 1/v as long, so that equal work has
    equal length in all panels. Cells that are too narrow show no number.

    Args:
      tables: the title of a schedule -> its table (`schedules.Schedule.table`): for each
        device a row of objects with `kind`, `microbatch` and `chunk`, or None where it idles.

    Raises:
      ValueError: if there is no schedule, or one in which nothing is done.
    """
    sizes = {
        name: sum(op is not None for row in table for op in row)
        for name, table in tables.items()
    }
    style.refuse_empty("tables", sizes, "operations")
    figure, panels = style.panels(list(tables), [len(table) for table in tables.values()], 0.21)
    longest = max(len(table[0]) * _slot(table) for table in tables.values())
    for axes, table in zip(panels, tables.values(), strict=True):
        _draw(axes, table, points=600 * _slot(table) / longest)
        axes.set_xlim(0, longest)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("time, in forwards of all layers of a device")
    drawn = {op.kind for table in tables.values() for row in table for op in row if op}
    shown = [
        Patch(
            label=f"{kind}: {name}" + (", both gradients in two slots" if kind == "BW" else ""),
            **style.op(kind),
        )
        for kind, (name, *_) in style.OPS.items()
        if kind in drawn
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=LETTERS)
    return figure


def _slot(table: Sequence[Sequence[Any]]) -> float:
    """Returns how long a slot of time is: 1/v."""
    return 1 / (1 + max(op.chunk for row in table for op in row if op))


def _draw(axes: Axes, table: Sequence[Sequence[Any]], points: float) -> None:
    """Draws one table, whose slots are so many points (1/72 inch) wide."""
    slot = _slot(table)
    for device, row in enumerate(table):
        for time, op in enumerate(row):
            if op is None or op.kind == "-":
                continue
            width = 2 if op.kind == "BW" else 1
            left = (time + 1 - width) * slot
            axes.add_patch(
                Rectangle((left, device - 0.45), width * slot, 0.9, **style.op(op.kind))
            )
            text = f"{op.microbatch}" + "'" * op.chunk
            if points * width >= LETTERS * 0.65 * len(text):
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
                middle = (left + width * slot / 2, device)
                axes.annotate(
                    text, middle, ha="center", va="center_baseline", fontsize=LETTERS, bbox=box
                )
    axes.set_ylim(len(table) - 0.45, -0.55)
    axes.set_yticks(
        range(len(table)),
        [f"device {device}" for device in range(len(table))],
        fontsize=LETTERS,
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
