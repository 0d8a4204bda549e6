"""Line charts, loss curves, trade-offs and roofline plots."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from course_lib.measure.units import GIB
from course_lib.show.figures import style

Points = Sequence[Sequence[style.Number]]  # (x, y) each


def lines(
    series: Mapping[str, Points],
    xlabel: str,
    ylabel: str,
    *,
    logx: bool = False,
    logy: bool = False,
    ylim: tuple[style.Number, style.Number] | None = None,
    title: str = "",
) -> Figure:
    """Draws one line per series, labelled at its end.

    Args:
      series: label -> points (x, y).
      xlabel: label of the x axis, with its unit.
      ylabel: label of the y axis, with its unit.
      logx: draw x on a logarithmic axis, with a tick at each of its values.
      logy: draw y on a logarithmic axis; a linear one starts at 0. An axis of less than two
        powers of ten gets plain numbers at 1, 2 and 5 times each power.
      ylim: lowest and highest y, for a loss, whose 0 says nothing; points outside are drawn at
        the edge.
      title: of the picture.

    Raises:
      ValueError: if there is no series, or one without points.
    """
    _check(series)
    if ylim is not None:
        low, high = ylim
        series = {
            name: [(x, min(max(y, low), high)) for x, y in points]
            for name, points in series.items()
        }
    figure, axes = style.canvas()
    for i, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*points, strict=True), **style.stroke(i, name))
    if logx:
        axes.set_xscale("log")
        ticks = sorted({x for points in series.values() for x, _ in points})
        ticks = ticks[:: -(-len(ticks) // 8)]  # at most eight
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{x:g}" for x in ticks])
    if logy:
        axes.set_yscale("log")
    if ylim is not None:
        axes.set_ylim(ylim)
    elif not logy:
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if logy:
        _label_short_range(axes)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    style.label_right(axes, [_end(points) for points in series.values()], list(series))
    return figure


def loss_curve(
    train: Points,
    validation: Points,
    baselines: Mapping[str, style.Number] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draws the loss over steps, with dotted lines at the losses of simpler models.

    Args:
      train: points (step, loss in nats per token) on the training batches.
      validation: the same on the validation split.
      baselines: label -> loss in nats per token, such as a bigram model's.
      title: of the picture.

    Raises:
      ValueError: if a curve has no points.
    """
    _check({"train": train, "validation": validation})
    figure, axes = style.canvas()
    axes.plot(*zip(*train, strict=True), color=style.COLORS[0], linewidth=1)
    axes.plot(*zip(*validation, strict=True), **style.stroke(1))
    ends = [_end(train), _end(validation)]
    labels = [f"train {train[-1][1]:.2f}", f"validation {validation[-1][1]:.2f}"]
    right = max(train[-1][0], validation[-1][0])
    for name, value in (baselines or {}).items():
        axes.axhline(value, color="black", linestyle=":", linewidth=1.2)
        ends.append((right, value))
        labels.append(f"{name} {value:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    style.label_right(axes, ends, labels)
    return figure


def trace(
    points: Points,
    xlabel: str,
    ylabel: str,
    baselines: Mapping[str, style.Number] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draws one thin line without markers, from 0 up: for a value at each of many steps.

    Args:
      points: (x, y).
      xlabel: label of the x axis, with its unit.
      ylabel: label of the y axis, with its unit.
      baselines: label -> value to compare with, in the unit of y, drawn as a dotted line.
      title: of the picture.

    Raises:
      ValueError: if there are no points.
    """
    _check({"points": points})
    figure, axes = style.canvas(height=2.5)
    axes.plot(*zip(*points, strict=True), color=style.COLORS[0], linewidth=1.2)
    for value in (baselines or {}).values():
        axes.axhline(value, color="black", linestyle=":", linewidth=1.2)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if baselines:
        ends = [(_end(points)[0], value) for value in baselines.values()]
        style.label_right(
            axes, ends, [f"{name} {value:.2f}" for name, value in baselines.items()]
        )
    return figure


def tradeoff(
    rows: Sequence[Any],
    *,
    xlabel: str = "recomputed FLOPs (% of the model's)",
    ylabel: str = "memory (GiB)",
    logy: bool = False,
    title: str = "",
) -> Figure:
    """Draws one point per row, with its name beside it: recomputation against memory.

    Args:
      rows: mappings or dataclasses with `name`, `recomputed` (in the unit of `xlabel`) and
        `memory` (in bytes, drawn in GiB). Rows with the same `series` share colour and marker,
        and a line joins them in their order; a row without one stands alone.
      xlabel: label of the first axis, with its unit.
      ylabel: label of the second.
      logy: whether the second axis is logarithmic.
      title: of the picture.

    Raises:
      ValueError: if there are no rows.
    """
    if not rows:
        raise ValueError("rows=[] must hold at least one mapping: there is nothing to draw")
    rows = style.as_dicts(rows)
    figure, axes = style.canvas(height=5)
    points = [(float(row["recomputed"]), float(row["memory"]) / GIB) for row in rows]
    series: dict[str, list[tuple[float, float]]] = {}
    for row, point in zip(rows, points, strict=True):
        series.setdefault(str(row.get("series", row["name"])), []).append(point)
    for i, joined in enumerate(series.values()):
        axes.plot(
            *zip(*joined, strict=True),
            **style.stroke(i) | {"markersize": 9, "markeredgecolor": "black"},
        )
    axes.margins(x=0.08, y=0.12)
    if logy:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    style.label_points(axes, points, [str(row["name"]) for row in rows])
    return figure


def progress(
    rows: Sequence[Any],
    *,
    limit: style.Number,
    small: style.Number,
    fast: style.Number,
    first: int = 1,
    next_target: tuple[style.Number, style.Number] | None = None,
    title: str = "",
) -> Figure:
    """Draws one numbered point per version of a training step, joined in their order: the
    attainable time against the peak memory, beside the GPU's limit and two targets.

    Args:
      rows: mappings or dataclasses with `name`, `seconds` and `peak` (in bytes).
      limit: the bytes of the GPU's memory that a step may use.
      small: the target for `peak`, in bytes.
      fast: the target for `seconds`.
      first: the number of the first row.
      next_target: the seconds and the bytes that the next target allows, drawn as a corner;
        None: no corner.
      title: of the picture.

    Raises:
      ValueError: if there are no rows.
    """
    if not rows:
        raise ValueError("rows=[] must hold at least one mapping: there is nothing to draw")
    rows = style.as_dicts(rows)
    points = [(1e3 * float(row["seconds"]), float(row["peak"]) / GIB) for row in rows]
    figure, axes = style.canvas(height=4.2)
    axes.set_yscale("log", base=2)
    axes.plot(*zip(*points, strict=True), color=style.GREY, linewidth=1, zorder=2)
    for i, (point, row) in enumerate(zip(points, rows, strict=True), first):
        fits = float(row["peak"]) <= limit
        face = style.COLORS[0] if fits else "white"
        look = {"marker": "o", "markersize": 15, "markerfacecolor": face, "zorder": 3}
        axes.plot(*point, **look, markeredgecolor=style.COLORS[0])
        axes.annotate(
            str(i), point, ha="center", va="center", color="white" if fits else "black",
            fontsize=9, zorder=4,
        )  # fmt: skip
    corner = [(1e3 * next_target[0], next_target[1] / GIB)] if next_target else []
    shown = [*points, *corner, (1e3 * fast, small / GIB)]
    axes.set_ylim(
        min(y for _, y in shown) / 1.5, 1.5 * max(limit / GIB, *(y for _, y in shown))
    )
    axes.set_xlim(0, 1.12 * max(x for x, _ in shown))
    axes.axhline(limit / GIB, color=style.COLORS[5], linewidth=1.5)
    axes.axhline(small / GIB, color="black", linestyle=":", linewidth=1.2)
    axes.axvline(1e3 * fast, color="black", linestyle=":", linewidth=1.2)
    for text, y in (("the GPU's limit", limit / GIB), ("target: small", small / GIB)):
        style.write(axes, f"{text}: {y:.1f} GiB", 0, y)
    at_top = {"xycoords": ("data", "axes fraction"), "fontsize": 9, "va": "top"}
    axes.annotate(f" target: fast\n {1e3 * fast:.0f} ms", (1e3 * fast, 1), **at_top)
    for x, y in corner:
        bottom = axes.get_ylim()[0]
        axes.plot([0, x, x], [y, y, bottom], color=style.COLORS[2], linewidth=1.5)
        style.write(axes, f"next target: {y:.1f} GiB in {x:.0f} ms", x, 1.15 * bottom)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="attainable time per step (ms)", ylabel="peak memory (GiB)", title=title)
    names = [f"{i}. {row['name']}" for i, row in enumerate(rows, first)]
    style.label_right(axes, points, names)
    return figure


def roofline_plot(
    peaks: Mapping[str, style.Number],
    bandwidth: style.Number,
    points: Sequence[Any],
    *,
    title: str = "",
) -> Figure:
    """Draws a roofline plot: arithmetic intensity against FLOP/s, both axes logarithmic.

    Left of a roof's corner memory is the limit, and FLOP/s grow with intensity; right of it the
    peak rate is (Williams, Waterman and Patterson, 2009,
    https://doi.org/10.1145/1498765.1498785).

    Args:
      peaks: dtype -> peak FLOP/s, one roof for each.
      bandwidth: of device memory, in bytes/s.
      points: mappings or dataclasses with `name`, `dtype` (a key of `peaks`), `intensity` (in
        FLOPs per byte) and `rate` (in FLOP/s, measured or attainable).
      title: of the picture.

    Raises:
      ValueError: if there are no points, or one has a dtype without a peak.
    """
    points = style.as_dicts(points)
    style.refuse_none("points", len(points), "mappings with name and intensity")
    if unknown := {point["dtype"] for point in points} - set(peaks):
        raise ValueError(
            f"points: dtype={sorted(unknown)} must have a roof in peaks={list(peaks)}"
        )
    corners = [peak / bandwidth for peak in peaks.values()]
    every = [*corners, *(point["intensity"] for point in points)]
    low, high = min(every) / 3, max(every) * 20
    figure, axes = style.canvas(height=4)
    for i, ((dtype, peak), corner) in enumerate(zip(peaks.items(), corners, strict=True)):
        roof = [bandwidth * low / 1e12, peak / 1e12, peak / 1e12]
        axes.plot([low, corner, high], roof, **style.stroke(i, dtype) | {"marker": ""})
    for point in points:
        place, peak = (point["intensity"], point["rate"] / 1e12), peaks[point["dtype"]]
        look = style.stroke(list(peaks).index(point["dtype"]), point["dtype"])
        axes.plot(*place, **look | {"linestyle": "", "markersize": 8})
        # on a roof: above the highest one, below the others; on the slope: right of it
        on_roof, highest = point["rate"] > 0.99 * peak, peak == max(peaks.values())
        axes.annotate(
            f"{point['name']}, {point['dtype']}",
            place,
            (0, 8 if highest else -16) if on_roof else (9, -4),
            textcoords="offset points",
            ha="center" if on_roof else "left",
            fontsize=9,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(None, max(peaks.values()) / 1e12 * 3),
        xlabel=f"arithmetic intensity (FLOPs per byte; slope: {bandwidth / 1e9:,.0f} GB/s)",
        ylabel="TFLOP/s",
        title=title,
    )
    ends = [(high, peak / 1e12) for peak in peaks.values()]
    style.label_right(axes, ends, [f"{d}: {p / 1e12:,.3g}" for d, p in peaks.items()])
    return figure


def _label_short_range(axes: Axes) -> None:
    """Labels 1, 2 and 5 times each power of ten, where powers alone would be too few."""
    low, high = axes.get_ylim()
    if high < 100 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")


def _end(points: Points) -> Sequence[style.Number]:
    """Returns the last point that can be drawn: a run that diverges ends in NaN."""
    return [point for point in points if all(map(math.isfinite, point))][-1]


def _check(series: Mapping[str, Points]) -> None:
    finite = {
        name: sum(all(map(math.isfinite, point)) for point in points)
        for name, points in series.items()
    }
    style.refuse_empty("series", finite, "points (x, y) of finite numbers")
