"""One look for every picture of the course.

People with any common kind of colour blindness can tell the colours of Okabe and Ito apart
(https://jfly.uni-koeln.de/color/). No picture relies on colours alone: bars have hatches, lines
have markers and labels.

A picture is a `matplotlib.figure.Figure` outside of pyplot: there is nothing to show or close.
A notebook displays it as the last line of a cell.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import matplotlib.style
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.measure.units import GIB, MIB

Number = int | float

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
DEVICES = (*COLORS, "#999999")
"""One colour for each device of a host: Okabe and Ito's seven, and grey."""
HATCHES = ("", "///", "...", "\\\\\\", "xxx", "++", "oo")

# Phases, formats and kinds of memory keep their colours in all pictures of the course.
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
"""Number formats, with their colours."""
KINDS = {
    "parameters": ("#4C566A", ""),
    "optimizer state": ("#8F9BB3", "///"),
    "results": ("#D55E00", "ooo"),
    "residual stream": ("#56B4E9", ""),
    "attention": ("#0072B2", "..."),
    "MLP": ("#009E73", ""),
    "logits and loss": ("#CC79A7", "xxx"),
    "gradients": ("#E69F00", "\\\\\\"),
    "other activations, batch": ("#D9D9D9", ""),
}
"""The kinds of memory (`measure.tape`), in the order of a picture, with colours and hatches."""
IDLE = "bubble"
"""The name of bars that show idle time. They are white, like the empty cells of a schedule."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*", "d", "8")
"""Shapes of points, more than colours: where a colour comes again, its shape is another."""
DASHES = ("-", "--", "-.", ":", "-", "--", "-.")
GREY = "#5F5F5F"

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
    "svg.hashsalt": "course",
}


def use_style() -> None:
    """Sets the style for all pictures made from here on, in this process."""
    matplotlib.style.use(_STYLE)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:  # tell the notebook to display a Figure as a PNG
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})


def canvas(
    width: Number = 7.5, height: Number = 3.5, columns: Sequence[Number] = (1,), rows: int = 1
) -> tuple[Figure, Any]:
    """Returns an empty figure of `width` x `height` inches, and its axes: one, or an array."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(
        rows, len(columns), width_ratios=columns, sharex="col", sharey="row"
    )


def panels(
    titles: Sequence[str], heights: Sequence[int], inches: Number
) -> tuple[Figure, Sequence[Axes]]:
    """Returns a figure with panels below each other, `inches` high per unit of height."""
    figure = Figure(
        figsize=(9, inches * sum(heights) + 0.42 * len(heights) + 0.7), layout="constrained"
    )
    every = figure.subplots(
        len(heights), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    ).ravel()
    for axes, title in zip(every, titles, strict=True):
        axes.set_title(title, fontsize=10)
    return figure, list(every)


def refuse_none(argument: str, count: int, content: str) -> None:
    """Refuses an argument without entries.

    Raises:
      ValueError: naming the argument.
    """
    if not count:
        raise ValueError(
            f"{argument} is empty and must have {content}: there is nothing to draw"
        )


def refuse_empty(argument: str, sizes: Mapping[str, int], content: str) -> None:
    """Refuses an argument without entries, or with an entry of size 0.

    Raises:
      ValueError: naming the argument and its empty entries.
    """
    refuse_none(argument, len(sizes), content)
    if empty := [name for name, size in sizes.items() if not size]:
        raise ValueError(
            f"{argument} must have {content}, and {empty} have none: there is nothing to draw"
        )


def color(i: int, name: str = "") -> str:
    """Returns the colour of the i-th thing in a picture.

    Args:
      i: its place, which gives a colour to names without one of their own.
      name: a format or a phase, perhaps with more words ("float16, scaled"); or a kind.
    """
    if name in KINDS:
        return KINDS[name][0]
    own = PHASES | FORMATS
    return own.get(name.split(",")[0].split(" ")[0], COLORS[i % 7])


def fill(i: int, name: str = "") -> dict[str, Any]:
    """Returns the look of the i-th kind of bar: colour (`color`), hatch, dark edge. A bar with
    the name `IDLE` is white.
    """
    idle = name == IDLE
    return {
        "facecolor": "white" if idle else color(i, name),
        "hatch": "" if idle else HATCHES[i % 7],
        "edgecolor": "black",
        "linewidth": 0.6,
    }


def device(number: int) -> dict[str, Any]:
    """Returns the look of a device's bar or rectangle; no two of the first 56 are alike."""
    return fill(number) | {
        "facecolor": DEVICES[number % 8],
        "hatch": HATCHES[(number + number // 8) % 7],
    }


def op(kind: str) -> dict[str, Any]:
    """Returns the look of a pipeline's op: "F", "BW", "B" or "W"."""
    _, facecolor, hatch = OPS[kind]
    return fill(0) | {"facecolor": facecolor, "hatch": hatch}


def stroke(i: int, name: str = "") -> dict[str, Any]:
    """Returns the look of the i-th line: colour (`color`), dash pattern, marker."""
    return {
        "color": color(i, name),
        "linestyle": DASHES[i % 7],
        "marker": MARKERS[i % len(MARKERS)],
        "markeredgecolor": "white",
    }


def as_dicts(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns rows (mappings or dataclasses) as dicts."""
    return [dict(row) if isinstance(row, Mapping) else dict(vars(row)) for row in rows]


def size(num_bytes: Number) -> str:
    """Returns bytes as text: "1.2 GiB", "96 MiB", "512 B"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{_short(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} B"


def unit(num_bytes: Number) -> tuple[int, str]:
    """Returns the unit in which all numbers of a picture are written, by its largest one."""
    for one, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if num_bytes >= 2 * one:
            return one, name
    return 1, "B"


def duration(seconds: Number) -> str:
    """Returns seconds as text: "1.2 s", "96 ms", "3.4 µs"."""
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{_short(seconds / unit)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def _short(number: Number) -> str:
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def shorten(text: str, width: int) -> str:
    """Returns `text` in at most `width` letters, with an ellipsis in the middle."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return text[: width - 1 - tail] + "…" + text[-tail:]


def spread(positions: Iterable[Number], gap: Number, top: Number = 1.0) -> list[Number]:
    """Moves positions at least `gap` apart and not above `top`, in the same order."""
    values = list(positions)
    order = sorted(range(len(values)), key=values.__getitem__)
    for lower, upper in zip(order, order[1:], strict=False):
        values[upper] = max(values[upper], values[lower] + gap)
    limit = top
    for i in reversed(order):
        values[i] = min(values[i], limit)
        limit = values[i] - gap
    return values


def write(
    axes: Axes, text: str, x: Number, y: Number, *, shift: Number = 5, ha: str = "left"
) -> None:
    """Writes a small text `shift` points right of (x, y), such as the end of a bar."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.annotate(
        text,
        (x, y),
        (shift, 0),
        textcoords="offset points",
        va="center",
        ha=ha,
        fontsize=9,
        bbox=box,
    )


def label_right(axes: Axes, ends: Sequence[Sequence[Number]], labels: Sequence[str]) -> None:
    """Writes each label right of the axes, level with its point, joined by a thin line."""
    axes.get_ylim()  # makes Matplotlib choose the limits, which transLimits uses
    to_axes = axes.transScale + axes.transLimits
    points = [to_axes.transform(tuple(end)) for end in ends]
    _, height = _axes_points(axes)
    gap = max(label.count("\n") + 1 for label in labels) * 13 / height
    for (x, y), text_y, label in zip(
        points, spread([p[1] for p in points], gap), labels, strict=True
    ):
        axes.annotate(
            label,
            (x, y),
            (1.04, text_y),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            ha="left",
            fontsize=9,
            arrowprops={  # from the label's left edge, so that no line crosses a label
                "arrowstyle": "-",
                "color": GREY,
                "linewidth": 0.7,
                "relpos": (0, 0.5),
            },
        )


def label_points(axes: Axes, points: Sequence[Sequence[Number]], labels: Sequence[str]) -> None:
    """Writes each label beside its point, where it covers no other point or label."""
    width, height = _axes_points(axes)
    centers = [
        (axes.transScale + axes.transLimits).transform(tuple(point)) * (width, height)
        for point in points
    ]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in centers]
    for (x, y), label in zip(centers, labels, strict=True):
        length = 5.5 * len(label)  # points: the mean width of a letter at size 9
        sides = [(x + 9, y + dy) for dy in (0, 11, -11, 22, -22)] + [
            (x - 9 - length, y + dy) for dy in (0, 11, -11)
        ]
        boxes = [(left, middle - 6, left + length, middle + 6) for left, middle in sides]
        box = next(
            (b for b in boxes if b[0] >= 0 and b[2] <= width and not _overlaps(b, taken)),
            boxes[0],
        )
        taken.append(box)
        axes.annotate(
            label,
            (box[0] / width, (box[1] + 6) / height),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over lines
        )
        if not y - 6 <= box[1] + 6 <= y + 6:  # moved away: join them
            edge = (box[0] if box[0] > x else box[2]) / width
            ends = ([x / width, edge], [y / height, (box[1] + 6) / height])
            axes.plot(*ends, color=GREY, linewidth=0.7, transform=axes.transAxes)


def _axes_points(axes: Axes) -> tuple[float, float]:
    """Estimates width and height of axes in points (1/72 inch), before the layout is known."""
    width, height = cast(Figure, axes.figure).get_size_inches()
    return 0.85 * 72 * width, 0.75 * 72 * height


def _overlaps(box: tuple[float, ...], others: Sequence[tuple[float, ...]]) -> bool:
    return any(
        box[0] < o[2] and o[0] < box[2] and box[1] < o[3] and o[1] < box[3] for o in others
    )
