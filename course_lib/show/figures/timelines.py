"""Pictures along an axis of time: lanes, schedules of pipelines, the operations of a step.

Lanes are one view for all strategies. A lane is a device, or one resource of a device. Its
blocks say what it does, the area below them how much it keeps, and arrows between lanes what is
passed on.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from course_lib.show.figures import style

ANY = "any operation"
COMPUTES, MOVES = "#264653", "#2EC4B6"
OPERATIONS = dict.fromkeys(("matmul", "elementwise", "reduce"), COMPUTES)
OPERATIONS |= dict.fromkeys(("copy", "fill", "dynamic-update-slice", "dynamic-slice"), MOVES)
"""The colours of kinds of operations (`measure.traffic`)."""
WIDTH = 5.6  # inches: readable on a telephone, at two thirds of this size
BLOCKS, KEPT = 0.42, 0.34  # heights in a lane of height 1

Number = int | float
Block = tuple[Number, Number, str, str]  # start, duration, kind, text in it
Pass = tuple[Number, str, Number, str]  # time and lane of departure, time and lane of arrival
Spans = Sequence[Sequence[Number]]  # (start, duration) each, in seconds


@dataclasses.dataclass(frozen=True)
class Lane:
    """One row of a picture: its activities, and how much it keeps over time."""

    blocks: Sequence[Block]  # each kind gets a look and a place in the legend
    kept: Sequence[tuple[Number, Number]] = ()  # (time, amount from then on); empty: not drawn


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
    """
    blocks = {
        name: [block for lane in rows.values() for block in lane.blocks]
        for name, rows in programs.items()
    }
    style.refuse_empty("programs", blocks)
    every = [block for row in blocks.values() for block in row]
    end = max(start + length for start, length, _, _ in every)
    shown = end if until is None else until
    kept = [lane.kept for rows in programs.values() for lane in rows.values()]
    most = max((value for pairs in kept for _, value in pairs), default=0)
    ops = {name: kind for kind, (name, *_) in style.OPS.items()}
    looks = {
        kind: style.op(ops[kind]) if kind in ops else style.fill(i, kind)
        for i, kind in enumerate(dict.fromkeys(kind for _, _, kind, _ in every))
    }
    heights = [
        sum(1.0 if lane.kept else 0.6 for lane in rows.values()) for rows in programs.values()
    ]
    figure, panels = _below(programs, heights, (WIDTH, 0.62, 0.35, 1.1), heading=title)
    for axes, (name, rows) in zip(panels, programs.items(), strict=True):
        for y, lane in enumerate(rows.values()):
            _draw_blocks(axes, y, lane, looks, shown, end)
            if lane.kept and most:
                _draw_kept(axes, y, lane, most, shown, amount, end)
        order = list(rows)
        for left, source, arrives, target in (passes or {}).get(name, ()):
            if arrives <= shown:
                ends = (left, order.index(source)), (arrives, order.index(target))
                style.arrow(axes, *ends)
        axes.set_xlim(0, end)
        style.name_rows(axes, order, length=0)
    panels[-1].set_xlabel(time)
    named = [Patch(label=kind, **look) for kind, look in looks.items() if kind]
    columns = min(3, len(named))
    figure.legend(handles=named, loc="outside lower center", ncols=columns, fontsize=9)
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
    """
    if len(gathers) != len(computes):
        raise ValueError(f"gathers has {len(gathers)} layers, computes {len(computes)}")
    changes = [(start, layer) for start, _ in gathers]
    changes += [(start + length, -layer) for start, length in computes]
    changes.sort()  # at the same time, a layer is dropped first
    memory = itertools.accumulate(change for _, change in changes)
    over_time = [(0, 0), *zip((time for time, _ in changes), memory, strict=True)]
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
    """
    others = [axis for axis in ("context", "expert") if parts.get(axis) or hidden.get(axis)]
    if others:
        raise ValueError(f"parts, hidden must have no traffic along {others}: it has no lane")
    waits, data, pipe = parts["bubble"] / 2, parts["data"] / 2, parts["pipe"] / 2
    begin = data + waits + pipe
    end = begin + parts["products"] + parts["memory"]
    drain = end + parts["tensor"]
    last = drain + pipe + waits
    half = hidden["data"] / 2
    blocks = [(data, waits, style.IDLE, ""), (begin, end - begin, "computes", "")]
    rows = {"compute": Lane([*blocks, (drain + pipe, waits, style.IDLE, "")])}
    for axis, overlaps, exposed in (
        ("tensor", [(begin, hidden["tensor"])], [(end, parts["tensor"])]),
        ("pipe", [(begin, hidden["pipe"])], [(data + waits, pipe), (drain, pipe)]),
        ("data", [(begin, half), (end - half, half)], [(0, data), (last, data)]),
    ):
        blocks = [(*span, "hidden", "") for span in overlaps]
        rows[axis] = Lane(sorted(blocks + [(*span, "exposed", "") for span in exposed]))
    return rows


def schedule(tables: Mapping[str, Sequence[Sequence[Any]]]) -> Figure:
    """Draws schedules below each other on one axis of time, one row per device; white is idle.

    Each cell shows the number of its microbatch, with a ' for each chunk before its own. A slot
    in which a device runs one of its v chunks is drawn 1/v as long, so that equal work has
    equal length in all panels. Cells that are too narrow show no number.

    Args:
      tables: the title of a schedule -> its table (`schedules.Schedule.table`): for each
        device a row of objects with `kind`, `microbatch` and `chunk`, or None where it idles.
    """
    ops = {name: [op for row in table for op in row if op] for name, table in tables.items()}
    style.refuse_empty("tables", ops)
    slots = {name: 1 / (1 + max(op.chunk for op in all_)) for name, all_ in ops.items()}
    longest = max(len(table[0]) * slots[name] for name, table in tables.items())
    figure, panels = _below(tables, list(map(len, tables.values())), (9, 0.21, 0.42, 0.7))
    looks = {name: style.op(kind) for kind, (name, *_) in style.OPS.items()}
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        slot, devices = slots[name], lanes_of_schedule(table)
        for y, lane in enumerate(devices.values()):
            for start, length, kind, text in lane.blocks:
                fits = 600 * slot / longest * length >= 5.85 * len(text)  # points
                span = (slot * start, slot * length)
                style.cell(axes, span, y, 0.9, looks[kind], text if fits else "")
        style.name_rows(axes, list(devices), 0.55, length=0)
        axes.set_xlim(0, longest)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("time, in forwards of all layers of a device")
    drawn = {op.kind for every in ops.values() for op in every}
    both = {"BW": ", both gradients in two slots"}
    shown = [
        Patch(label=f"{kind}: {name}{both.get(kind, '')}", **style.op(kind))
        for kind, (name, *_) in style.OPS.items()
        if kind in drawn
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown), fontsize=9)
    return figure


def overlap(programs: Mapping[str, Mapping[str, Spans]], *, title: str = "") -> Figure:
    """Draws programs below each other on one axis of time, with one row per activity; white is
    idle.

    Args:
      programs: the title of a program -> the label of a row -> when it is busy, as (start,
        duration) in seconds.
    """
    sizes = {name: sum(map(len, rows.values())) for name, rows in programs.items()}
    style.refuse_empty("programs", sizes)
    ends = {
        name: max(sum(span) for spans in rows.values() for span in spans)
        for name, rows in programs.items()
    }
    titles = [f"{name}: {style.duration(end)}" for name, end in ends.items()]
    heights = [len(rows) for rows in programs.values()]
    figure, panels = _below(titles, heights, (9, 0.3, 0.42, 0.7), heading=title)
    resources = dict.fromkeys(row for rows in programs.values() for row in rows)
    looks = {row: style.fill(i) for i, row in enumerate(resources)}
    longest = max(ends.values())
    scale, unit = (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")
    for axes, rows in zip(panels, programs.values(), strict=True):
        for y, (row, spans) in enumerate(rows.items()):
            for start, duration in spans:
                look = looks[row]
                if duration < longest / 100:  # a black edge would hide it
                    look = {**look, "edgecolor": look["facecolor"], "linewidth": 0.3}
                style.cell(axes, (scale * start, scale * duration), y, 0.84, look)
        style.name_rows(axes, list(rows), length=0)
    panels[-1].set(xlim=(0, scale * longest * 1.01), xlabel=f"time ({unit})")
    return figure


def step_timeline(
    steps: Mapping[str, Sequence[Any]],
    row: Callable[[Any], str] | None = None,
    *,
    title: str = "",
) -> Figure:
    """Draws the operations of steps over time, below each other on one axis, one row for each
    kind: dark where it computes, light where it moves arrays (`OPERATIONS`).

    Phases (`style.PHASES`) and kinds have the same order and colours in each picture. The
    lowest row shows when any operation runs: its white parts are gaps. An operation that only
    contains others, such as the `while` of a scan, is not drawn.

    Args:
      steps: title of a step -> objects with `start`, `duration`, `self_time` (seconds) and
        `container` (`profiling.Trace.during`).
      row: names an event's kind. None draws the lowest row alone.
    """
    style.refuse_empty("steps", steps)
    name_of = row or (lambda event: "")
    own: dict[str, Counter[str]] = {name: Counter() for name in steps}
    spans: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for step, event in ((n, e) for n, events in steps.items() for e in events):
        if not event.container:
            own[step][name_of(event)] += event.self_time
            for name in {name_of(event), ANY}:
                spans[step, name].append((event.start * 1e3, event.duration * 1e3))
    names = [name for name, _ in sum(own.values(), Counter[str]()).most_common()]
    for known in (style.PHASES, OPERATIONS):
        if set(names) <= set(known):
            names = [name for name in known if name in names]
    rows = [*(names if row else ()), ANY]
    size = (WIDTH, 0.3, 0.35, 0.75)
    figure, panels = _below(steps, [len(rows)] * len(steps), size, heading=title)
    for axes, step in zip(panels, steps, strict=True):
        for y, name in enumerate(rows):
            color = (OPERATIONS | {ANY: "black"}).get(name) or style.color(y, name)
            look = style.Look(facecolor=color, edgecolor=color, linewidth=0.3)
            axes.broken_barh(spans[step, name], (y - 0.38, 0.76), **look)
            seconds = sum(own[step].values()) if name == ANY else own[step][name]
            place = style.Look(xycoords=axes.get_yaxis_transform(), va="center", fontsize=9)
            axes.annotate(f"{1e3 * seconds:,.1f} ms", (1.01, y), **place)
        style.name_rows(axes, rows, 0.6)
    panels[-1].set_xlim(left=0)  # the time before the first operation is a gap, too
    panels[-1].set_xlabel("ms since the step began; right: the row's part of the busy ms")
    return figure


def _below(
    titles: Iterable[str], heights: Sequence[Number], size: Sequence[Number], **heading: Any
) -> tuple[Figure, list[Axes]]:
    """Returns panels below each other, which share their axis of time."""
    width, unit, title, rest = size  # inches
    total = unit * sum(heights) + title * len(heights) + rest
    ratios = style.Look(height_ratios=heights, sharex=True)
    return style.canvas(width, total, len(heights), titles=titles, **ratios, **heading)


def _draw_blocks(
    axes: Axes, y: int, lane: Lane, looks: Mapping[str, dict], shown: Number, end: Number
) -> None:
    middle, height = (y - 0.25, BLOCKS) if lane.kept else (y, 2 * BLOCKS)
    for start, length, kind, text in lane.blocks:
        if start < shown:
            width = min(length, shown - start)
            fits = 0.8 * 72 * WIDTH * width / end >= 5.58 * len(text)
            style.cell(axes, (start, width), middle, height, looks[kind], text if fits else "")


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
    text, place = f" {max(values):g} {amount}".rstrip(), (end, base - KEPT / 2)
    axes.annotate(text, place, va="center", fontsize=9, annotation_clip=False)
