"""Devices as lanes: what each one does, keeps and passes on, over time.

One view for all strategies. A lane is a device, or one resource of a device. Its blocks say
what it does, the area below them how much it keeps, and arrows between lanes what is passed on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_lib.show.figures import style

LETTERS = 9  # points
WIDTH = 5.6  # inches: readable on a telephone, at two thirds of this size
BLOCKS, KEPT = 0.42, 0.34  # heights in a lane of height 1

Number = int | float
Block = tuple[Number, Number, str, str]  # start, duration, kind, text in it
Pass = tuple[Number, str, Number, str]  # time and lane of departure, time and lane of arrival


@dataclasses.dataclass(frozen=True)
class Lane:
    """One row of a picture.

    Attributes:
      blocks: what it does, as (start, duration, kind, text). Kinds get looks and a legend.
      kept: pairs (time, amount): it keeps that amount from that time on; empty: not drawn.
    """

    blocks: Sequence[Block]
    kept: Sequence[tuple[Number, Number]] = ()


def lanes(
    programs: Mapping[str, Mapping[str, Lane]],
    *,
    passes: Mapping[str, Sequence[Pass]] | None = None,
    time: str = "time",
    amount: str = "",
    until: Number | None = None,
    title: str = "",
) -> Figure:
    """Draws programs below each other on one axis of time, each with its lanes.

    Args:
      programs: the title of a program -> the name of a lane -> the lane.
      passes: the title of a program -> arrows between its lanes.
      time: what the axis of time counts, with its unit.
      amount: the unit of what lanes keep. The largest amount of a lane is written beside it.
      until: hides what happens later, for a moving picture; the axes stay the same.
      title: of the picture.

    Raises:
      ValueError: if there is no program, or one in which nothing is done.
    """
    sizes = {
        name: sum(len(lane.blocks) for lane in rows.values()) for name, rows in programs.items()
    }
    style.refuse_empty("programs", sizes, "blocks")
    every = [lane for rows in programs.values() for lane in rows.values()]
    end = max(start + length for lane in every for start, length, _, _ in lane.blocks)
    most = max((value for lane in every for _, value in lane.kept), default=0)
    kinds = dict.fromkeys(kind for lane in every for _, _, kind, _ in lane.blocks)
    ops = {name: kind for kind, (name, *_) in style.OPS.items()}
    looks = {
        kind: style.op(ops[kind]) if kind in ops else style.fill(i, kind)
        for i, kind in enumerate(kinds)
    }
    figure, panels = _panels(programs)
    shown = end if until is None else until
    for axes, (name, rows) in zip(panels, programs.items(), strict=True):
        for y, lane in enumerate(rows.values()):
            _draw_blocks(axes, y, lane, looks, shown, end)
            if lane.kept and most:
                _draw_kept(axes, y, lane, most, shown, amount, end)
        order = list(rows)
        for left, source, arrives, target in (passes or {}).get(name, ()):
            if arrives <= shown:
                _draw_pass(axes, (left, order.index(source)), (arrives, order.index(target)))
        axes.set_xlim(0, end)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), order, fontsize=LETTERS)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    panels[-1].set_xlabel(time)
    named = [Patch(label=kind, **look) for kind, look in looks.items() if kind]
    figure.legend(
        handles=named, loc="outside lower center", ncols=min(3, len(named)), fontsize=LETTERS
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def lanes_of_schedule(table: Sequence[Sequence[Any]]) -> dict[str, Lane]:
    """Returns a lane per device of a pipeline's schedule: its ops, one slot of time each (BW
    two), and how many microbatches are live, from their forward F to the end of their
    weight gradient W. With chunks, each chunk counts.

    Args:
      table: for each device a row of objects with `kind`, `microbatch` and `chunk`, or None
        where it idles (`schedules.Schedule.table`).
    """
    rows = {}
    for device, row in enumerate(table):
        blocks, kept, live = [], [(0, 0)], 0
        for time, op in enumerate(row):
            if op is None or op.kind == "-":
                continue
            slots = len(op.kind)
            text = f"{op.microbatch}" + "'" * op.chunk
            blocks.append((time + 1 - slots, slots, style.OPS[op.kind][0], text))
            live += (op.kind == "F") - op.kind.count("W")
            kept.append((time + (op.kind != "F"), live))
        rows[f"device {device}"] = Lane(blocks, kept)
    return rows


def lanes_of_layers(
    gathers: Sequence[tuple[Number, Number]],
    computes: Sequence[tuple[Number, Number]],
    layer: Number,
) -> dict[str, Lane]:
    """Returns the lanes of layers that are gathered and then computed, as in FSDP.

    A third lane is the memory of gathered layers: a layer takes memory from the start of its
    gather until it is computed.

    Args:
      gathers: start and duration of each layer's gather.
      computes: start and duration of each layer's computing.
      layer: the memory of one gathered layer, in the unit of the picture.

    Raises:
      ValueError: if a layer is gathered and not computed, or the reverse.
    """
    if len(gathers) != len(computes):
        raise ValueError(
            f"gathers has {len(gathers)} layers, computes {len(computes)}: each layer must be"
            " gathered and computed"
        )
    changes = [(start, layer) for start, _ in gathers]
    changes += [(start + length, -layer) for start, length in computes]
    memory: Number = 0
    over_time: list[tuple[Number, Number]] = [(0, 0)]
    for time, change in sorted(changes):  # at the same time, a layer is dropped first
        memory += change
        over_time.append((time, memory))
    rows = {
        name: Lane([(*span, name, str(i)) for i, span in enumerate(spans)])
        for name, spans in (("gather", gathers), ("compute", computes))
    }
    return rows | {"memory": Lane((), over_time)}


def lanes_of_step(parts: Mapping[str, Number], hidden: Mapping[str, Number]) -> dict[str, Lane]:
    """Returns the lanes of a training step whose parts are laid end to end: what the device
    computes, and its traffic along "tensor", "pipe" and "data".

    Traffic that is spread over the step is drawn in one piece. Half of the pipeline's idle time
    (its bubble), and half of the exposed traffic along "data" and "pipe", come before
    computing, the other half after it. Exposed traffic along "tensor" follows computing. Hidden
    traffic overlaps with computing; along "data", half of it at the start, half at the end.

    Args:
      parts: seconds of "products", "memory", "bubble", and of exposed traffic by axis
        (`planner.Breakdown.parts`). The optimizer is left out.
      hidden: seconds of hidden traffic by axis (`Breakdown.hidden`).

    Raises:
      ValueError: if there is traffic along another axis, which has no lane.
    """
    others = [axis for axis in ("context", "expert") if parts.get(axis) or hidden.get(axis)]
    if others:
        raise ValueError(
            f'parts, hidden must have no traffic along {others}: only "tensor", "pipe" and'
            ' "data" have lanes'
        )
    waits, data, pipe = parts["bubble"] / 2, parts["data"] / 2, parts["pipe"] / 2
    begin = data + waits + pipe
    end = begin + parts["products"] + parts["memory"]
    drain = end + parts["tensor"]
    last = drain + pipe + waits
    at_each_end = hidden["data"] / 2
    blocks = {
        "compute": [
            (data, waits, style.IDLE),
            (begin, end - begin, "computes"),
            (drain + pipe, waits, style.IDLE),
        ],
        "tensor": [(begin, hidden["tensor"], "hidden"), (end, parts["tensor"], "exposed")],
        "pipe": [
            (data + waits, pipe, "exposed"),
            (begin, hidden["pipe"], "hidden"),
            (drain, pipe, "exposed"),
        ],
        "data": [
            (0, data, "exposed"),
            (begin, at_each_end, "hidden"),
            (end - at_each_end, at_each_end, "hidden"),
            (last, data, "exposed"),
        ],
    }
    return {name: Lane([(*block, "") for block in row]) for name, row in blocks.items()}


def _panels(programs: Mapping[str, Mapping[str, Lane]]) -> tuple[Figure, Sequence[Axes]]:
    heights = [
        sum(1.0 if lane.kept else 0.6 for lane in rows.values()) for rows in programs.values()
    ]
    figure = Figure(
        figsize=(WIDTH, 0.62 * sum(heights) + 0.35 * len(heights) + 1.1), layout="constrained"
    )
    panels = figure.subplots(
        len(heights), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    ).ravel()
    for axes, name in zip(panels, programs, strict=True):
        axes.set_title(name, fontsize=10)
    return figure, list(panels)


def _draw_blocks(
    axes: Axes, y: int, lane: Lane, looks: Mapping[str, dict], shown: Number, end: Number
) -> None:
    top = y - 0.46 if lane.kept else y - BLOCKS
    height = BLOCKS if lane.kept else 2 * BLOCKS
    for start, length, kind, text in lane.blocks:
        if start >= shown:
            continue
        width = min(length, shown - start)
        axes.add_patch(Rectangle((start, top), width, height, **looks[kind]))
        points = 0.8 * 72 * WIDTH * width / end
        if text and points >= 0.62 * LETTERS * len(text):
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            middle = (start + width / 2, top + height / 2)
            axes.annotate(
                text, middle, ha="center", va="center_baseline", fontsize=LETTERS, bbox=box
            )


def _draw_kept(
    axes: Axes, y: int, lane: Lane, most: Number, shown: Number, amount: str, end: Number
) -> None:
    """Draws an area below the blocks of a lane, and writes its largest amount at its right."""
    points = {time: value for time, value in lane.kept if time < shown}
    if not points:
        return
    times, values = [*points, shown], list(points.values())
    base = y + 0.46
    heights = [base - KEPT * value / most for value in [*values, values[-1]]]
    area = axes.fill_between(times, heights, base, step="post")
    area.set(facecolor=style.GREY, alpha=0.35, edgecolor="black", linewidth=0.8)
    axes.annotate(
        f" {max(values):g} {amount}".rstrip(),
        (end, base - KEPT / 2),
        va="center",
        fontsize=LETTERS,
        annotation_clip=False,
    )


def _draw_pass(axes: Axes, source: tuple[Number, int], target: tuple[Number, int]) -> None:
    axes.annotate(
        "",
        target,
        source,
        arrowprops={
            "arrowstyle": "-|>",
            "color": "black",
            "linewidth": 0.8,
            "mutation_scale": 7,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )
