"""One look for every picture of the course.

People with any common kind of colour blindness can tell the colours of Okabe and Ito apart
(https://jfly.uni-koeln.de/color/). No picture relies on colours alone: bars have hatches, lines
have markers and labels.

A picture is a `matplotlib.figure.Figure` outside of pyplot: there is nothing to show or close.
A notebook displays it as the last line of a cell.
"""

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import matplotlib.style
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from course_lib.measure.units import GIB, MIB

Number = int | float
Point = tuple[Number, Number]
Look = dict[str, Any]  # options of Matplotlib

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
DEVICES = (*COLORS, "#999999")  # of a host: Okabe and Ito's seven colours, and grey
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "++", "oo")

# Phases, number formats and kinds of memory keep their colours in all pictures of the course.
PHASES = {
    "forward": "#5E3C99",
    "backward": "#8C510A",
    "recomputation": "#B5A642",
    "optimizer": "#7A0177",
    "other": "#999999",
}
"""The parts of a train step, in the order of a picture, with their colours."""
OPS = {
    "F": ("forward", PHASES["forward"], ""),
    "BW": ("backward", PHASES["backward"], "////"),
    "B": ("backward to the input", "#BF812D", "...."),
    "W": ("backward to the weights", "#DFC27D", "xxx"),
}
"""The ops of a pipeline: name, colour and hatch. The two parts of a backward pass have lighter
shades of its colour."""
FORMATS = {"float32": "#1A1A1A", "bfloat16": "#00838F", "float16": "#B2182B"}
KINDS = {
    "parameters": ("#4C566A", ""),
    "optimizer state": ("#8F9BB3", "///"),
    "results": ("#D55E00", "ooo"),
    "residual stream": ("#56B4E9", ""),
    "attention": ("#0072B2", "..."),
    "MLP": ("#009E73", ""),
    "logits and loss": ("#CC79A7", "xxx"),
    "gradients": ("#E69F00", "\\\\\\"),
    "recomputed by XLA": ("#882255", "+++"),
    "other activations, batch": ("#D9D9D9", ""),
}
"""The kinds of memory (`measure.tape`), in the order of a picture, with colours and hatches."""
IDLE = "bubble"
"""The name of bars that show idle time. They are white, like the empty cells of a schedule."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
"""Shapes of points, more than colours: where a colour comes again, its shape is another."""
DASHES = ("-", "--", "-.", ":", "-", "--", "-.")
GREY = "#5F5F5F"
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
BYTES = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"), (1, "B"))
SECONDS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

_STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 100,
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same letters on every machine
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "grid.color": "#D9D9D9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
}


def use_style() -> None:
    """Sets the style for all pictures made from here on, in this process."""
    matplotlib.style.use(_STYLE)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:  # tell the notebook to display a Figure as a PNG
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})


def canvas(
    width: Number = 7.5,
    height: Number = 3.5,
    rows: int = 1,
    columns: int = 1,
    *,
    titles: Iterable[str] = (),
    heading: str | None = None,
    layout: Any = "constrained",
    **subplots: Any,
) -> tuple[Figure, list[Axes]]:
    """Returns an empty figure of `width` x `height` inches, with a `heading`, and its axes with
    their `titles`, row by row.
    """
    figure = Figure(figsize=(width, height), layout=layout)
    every = list(figure.subplots(rows, columns, squeeze=False, **subplots).flat)
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(title, fontsize=10)
    if heading is not None:
        figure.suptitle(heading, x=0.01, ha="left", fontsize=11)
    return figure, every


def refuse_empty(argument: str, entries: Mapping[Any, Any] | Sequence[Any]) -> None:
    """Refuses an argument without entries, or a mapping with an entry that is 0 or empty."""
    empty = [k for k, v in entries.items() if not v] if isinstance(entries, Mapping) else []
    if empty or not len(entries):
        where = f" for {empty}" if empty else ""
        raise ValueError(f"{argument} is empty{where}: there is nothing to draw")


def color(i: int, name: str = "") -> str:
    """Returns the colour of the i-th thing in a picture: that of its kind, format or phase, by
    the name's first word ("float16, scaled"), or the i-th of `COLORS`.
    """
    if name in KINDS:
        return KINDS[name][0]
    return (PHASES | FORMATS).get(name.split(",")[0].split(" ")[0], COLORS[i % 7])


def fill(i: int, name: str = "") -> dict[str, Any]:
    """Returns the look of the i-th kind of bar: colour (`color`, or white: idle), hatch."""
    idle = name == IDLE
    look = {"facecolor": color(i, name), "hatch": HATCHES[i % 7]}
    look |= {"facecolor": "white", "hatch": ""} if idle else {}
    return look | {"edgecolor": "black", "linewidth": 0.6}


def device(number: int) -> dict[str, Any]:
    """Returns the look of a device's rectangle; no two of the first 56 are alike."""
    hatch = HATCHES[(number + number // 8) % 7]
    return fill(0) | {"facecolor": DEVICES[number % 8], "hatch": hatch}


def op(kind: str) -> dict[str, Any]:
    """Returns the look of a pipeline's op: "F", "BW", "B" or "W"."""
    _, facecolor, hatch = OPS[kind]
    return fill(0) | {"facecolor": facecolor, "hatch": hatch}


def stroke(i: int, name: str = "") -> dict[str, Any]:
    """Returns the look of the i-th line: colour (`color`), dash pattern, marker."""
    shape = {"linestyle": DASHES[i % 7], "marker": MARKERS[i % len(MARKERS)]}
    return {"color": color(i, name), "markeredgecolor": "white"} | shape


def as_dicts(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns rows (mappings or dataclasses) as dicts."""
    return [dict(row) if isinstance(row, Mapping) else dict(vars(row)) for row in rows]


def size(num_bytes: Number) -> str:
    """Returns bytes as text: "1.2 GiB", "96 MiB", "512 B"."""
    return _in_units(num_bytes, BYTES)


def duration(seconds: Number) -> str:
    """Returns seconds as text: "1.2 s", "96 ms", "3.4 µs"."""
    return _in_units(seconds, SECONDS)


def _in_units(value: Number, units: Sequence[tuple[Number, str]]) -> str:
    for one, name in units[:-1]:
        if value >= one:
            return f"{value / one:.{int(value / one < 99.95)}f} {name}"
    one, name = units[-1]
    return f"{value / one:.0f} {name}"


def unit(num_bytes: Number) -> tuple[Number, str]:
    """Returns the unit in which all numbers of a picture are written, by its largest one."""
    return next((unit for unit in BYTES if num_bytes >= 2 * unit[0]), BYTES[-1])


def shorten(text: str, width: int) -> str:
    """Returns `text` in at most `width` letters, with an ellipsis in the middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return text[: width - 1 - tail] + "…" + text[-tail:]


def name_rows(axes: Axes, names: Sequence[str], room: Number = 0.5, **ticks: Any) -> None:
    """Gives axes one row per name, the first at the top, and `room` around the rows."""
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 1 + room, -room)
    axes.tick_params(axis="y", **ticks)
    axes.grid(visible=False, axis="y")


def write(axes: Axes, text: str, x: Number, y: Number, shift: Number = 5, **look: Any) -> None:
    """Writes a small text on white `shift` points right of (x, y), such as the end of a bar."""
    own = Look(ha="left", va="center", fontsize=9, bbox=ON_WHITE)
    axes.annotate(text, (x, y), (shift, 0), textcoords="offset points", **own | look)


def write_in(axes: Axes, text: str, x: Number, y: Number, pad: Number, **look: Any) -> None:
    """Writes a small text in the middle of a rectangle, on white with a margin."""
    write(axes, text, x, y, 0, bbox=ON_WHITE | {"pad": pad}, **{"ha": "center"} | look)


def cell(axes: Axes, span: Point, y: Number, height: Number, look: Any, text: str = "") -> None:
    """Draws a bar over a span of time (start, duration), with a text in it, or "" for none."""
    axes.barh(y, span[1], height, left=span[0], **look)
    if text:
        write_in(axes, text, span[0] + span[1] / 2, y, pad=0.4, va="center_baseline")


def arrow(axes: Axes, start: Point, end: Point, **look: Any) -> None:
    """Draws an arrow from point to point."""
    own = {"arrowstyle": "-|>", "color": "black", "linewidth": 0.8, "mutation_scale": 7}
    axes.annotate("", end, start, arrowprops=own | {"shrinkA": 0, "shrinkB": 0} | look)


def label_right(axes: Axes, ends: Sequence[Sequence[Number]], labels: Sequence[str]) -> None:
    """Writes each label right of the axes, level with its point, joined by a thin line."""
    axes.get_ylim()  # makes Matplotlib choose the limits, which transLimits uses
    to_axes = axes.transScale + axes.transLimits
    points: list[Any] = [to_axes.transform(tuple(end)) for end in ends]
    gap = max(label.count("\n") + 1 for label in labels) * 13 / _axes_points(axes)[1]
    heights = spread([y for _, y in points], gap)
    # the line begins at the label's left edge, so that it crosses no label
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.7, "relpos": (0, 0.5)}
    look = Look(xycoords="axes fraction", va="center", fontsize=9, arrowprops=line)
    for point, height, label in zip(points, heights, labels, strict=True):
        axes.annotate(label, point, (1.04, height), **look)


def spread(positions: Iterable[Number], gap: Number, top: Number = 1.0) -> list[Number]:
    """Moves positions at least `gap` apart and not above `top`, in the same order."""
    values = list(positions)
    order = sorted(range(len(values)), key=values.__getitem__)
    for lower, upper in itertools.pairwise(order):
        values[upper] = max(values[upper], values[lower] + gap)
    limit = top
    for i in reversed(order):
        values[i] = min(values[i], limit)
        limit = values[i] - gap
    return values


def label_points(axes: Axes, points: Sequence[Sequence[Number]], labels: Sequence[str]) -> None:
    """Writes each label beside its point, where it covers no other point or label."""
    width, height = _axes_points(axes)
    to_axes = axes.transScale + axes.transLimits
    centers = [to_axes.transform(tuple(point)) * (width, height) for point in points]
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in centers]
    for (x, y), label in zip(centers, labels, strict=True):
        length = 5.5 * len(label)  # points: the mean width of a letter at size 9
        sides = [(x + 9, y + dy) for dy in (0, 11, -11, 22, -22)]
        sides += [(x - 9 - length, y + dy) for dy in (0, 11, -11)]
        boxes = [Bbox.from_bounds(left, middle - 6, length, 12) for left, middle in sides]
        inside = [box for box in boxes if box.x0 >= 0 and box.x1 <= width]
        box = next((box for box in inside if not box.count_overlaps(taken)), boxes[0])
        taken.append(box)
        place = (box.x0 / width, (box.y0 + 6) / height)
        look = Look(va="center", fontsize=9, bbox=ON_WHITE)
        axes.annotate(label, place, xycoords="axes fraction", **look)
        if not y - 6 <= box.y0 + 6 <= y + 6:  # moved away: join them
            edge = (box.x0 if box.x0 > x else box.x1) / width
            ends = ([x / width, edge], [y / height, place[1]])
            axes.plot(*ends, color=GREY, linewidth=0.7, transform=axes.transAxes)


def _axes_points(axes: Axes) -> tuple[float, float]:
    """Estimates width and height of axes in points (1/72 inch), before the layout is known."""
    width, height = cast(Figure, axes.figure).get_size_inches()
    return 0.85 * 72 * width, 0.75 * 72 * height
