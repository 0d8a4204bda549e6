"""When programs communicate and when they compute, on one axis of time."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.show.figures import style

Spans = Sequence[Sequence[style.Number]]  # (start, duration) each, in seconds


def overlap(programs: Mapping[str, Mapping[str, Spans]], *, title: str = "") -> Figure:
    """Draws programs below each other on one axis of time, with one row per activity; white is
    idle.

    Args:
      programs: the title of a program -> the label of a row -> when it is busy, as (start,
        duration) in seconds.
      title: of the picture.

    Raises:
      ValueError: if there is no program, or one in which nothing happens.
    """
    sizes = {name: sum(map(len, rows.values())) for name, rows in programs.items()}
    style.refuse_empty("programs", sizes, "spans of time")
    ends = {
        name: max(sum(span) for spans in rows.values() for span in spans)
        for name, rows in programs.items()
    }
    titles = [f"{name}: {style.duration(end)}" for name, end in ends.items()]
    figure, panels = style.panels(titles, [len(rows) for rows in programs.values()], 0.3)
    resources = dict.fromkeys(row for rows in programs.values() for row in rows)
    looks = {row: style.fill(i) for i, row in enumerate(resources)}
    longest = max(ends.values())
    scale, unit = (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")
    for axes, rows in zip(panels, programs.values(), strict=True):
        _draw(axes, rows, looks, scale)
    panels[-1].set_xlim(0, scale * longest * 1.01)
    panels[-1].set_xlabel(f"time ({unit})")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _draw(
    axes: Any, rows: Mapping[str, Spans], looks: Mapping[str, dict[str, Any]], scale: float
) -> None:
    """Draws the rows of one program, with `scale` units of the axis per second."""
    for y, (row, spans) in enumerate(rows.items()):
        for start, duration in spans:
            axes.add_patch(
                Rectangle((scale * start, y - 0.42), scale * duration, 0.84, **looks[row])
            )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
