"""Operations over the time of a step."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure

from course_lib.show.figures import style


def kind(op: str) -> str:
    """Returns an operation's name without its number: "fusion" for "fusion.12"."""
    return re.sub(r"(\.\d+)+(\.clone)?$", "", op)


def step_timeline(
    events: Sequence[Any],
    *,
    row: Callable[[Any], str] = lambda event: kind(event.op),
    top: int = 10,
    title: str = "",
) -> Figure:
    """Draws the operations of one step over time, one row for each kind, those with most self
    time at the top.

    Phases of a train step (`style.PHASES`) have their own order and colours, the same in each
    picture.

    The lowest row shows when any operation runs: its white parts are gaps. An operation that
    only contains others, such as the `while` of a scan, is not drawn.

    Args:
      events: objects with `op`, `start`, `duration`, `self_time` (seconds) and `container`
        (`profiling.Trace.during`).
      row: names an event's row; `lambda event: event.line` gives one row per thread or stream.
      top: how many rows to draw; the other operations share one.
      title: of the picture.

    Raises:
      ValueError: if there are no events.
    """
    if not events:
        raise ValueError("events=[] must hold at least one operation: was the step traced?")
    own: dict[str, float] = {}
    events = [event for event in events if not event.container]
    for event in events:
        own[row(event)] = own.get(row(event), 0.0) + event.self_time
    names = sorted(own, key=lambda name: -own[name])[:top]
    if set(names) <= set(style.PHASES):
        names = [name for name in style.PHASES if name in names]
    rest = [name for name in own if name not in names]
    rows = names + (["others"] if rest else []) + ["any operation"]
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for event in events:
        span = (event.start * 1e3, event.duration * 1e3)
        spans[row(event) if row(event) in names else "others"].append(span)
        spans["any operation"].append(span)
    figure, axes = style.canvas(width=8.5, height=1.0 + 0.3 * len(rows))
    for y, name in enumerate(rows):
        color = style.color(y, name)
        color = "black" if name == "any operation" else color
        axes.broken_barh(
            spans[name], (y - 0.38, 0.76), facecolor=color, edgecolor=color, linewidth=0.3
        )
    seconds = [own[name] for name in names] + (
        [sum(own[name] for name in rest)] if rest else []
    )
    for y, value in enumerate(seconds):
        axes.annotate(
            f"{1e3 * value:,.1f} ms",
            (1.01, y),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
        )
    axes.set_yticks(range(len(rows)), [style.shorten(name, 40) for name in rows], fontsize=9)
    axes.set_xlim(left=0)  # the time before the first operation is a gap, too
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="time since the step began (ms); at the right: self time", title=title)
    axes.grid(visible=False, axis="y")
    return figure
