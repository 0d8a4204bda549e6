"""The tape of a step: memory over the instructions of a program, by kind."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from course_lib.show.figures import style


def tape(tapes: Mapping[str, Any], *, title: str = "") -> Figure:
    """Draws what one or several steps hold in memory at each instruction, by kind.

    Kinds of less than a thousandth of the peak are left out.

    Args:
      tapes: title of a panel -> `measure.Tape`, or a mapping with its attributes. All panels
        have one scale.
    """
    steps = {
        name: row if isinstance(row, Mapping) else vars(row) for name, row in tapes.items()
    }
    style.refuse_empty("tapes", {name: row["bytes"] for name, row in steps.items()})
    # narrow, so that a telephone hardly shrinks the letters
    size = (5.6, 1.6 + 2.1 * len(steps))
    figure, panels = style.canvas(*size, len(steps), sharey=True, heading=title)
    occurring = [
        kind
        for kind in style.KINDS
        if any(max(row["bytes"].get(kind, [0])) > row["peak"] / 1000 for row in steps.values())
    ]
    top = max(row["peak"] for row in steps.values())
    unit, unit_name = style.unit(top)
    handles: dict[str, Any] = {}
    for axes, (name, row) in zip(panels, steps.items(), strict=True):
        levels = {kind: np.array(level) / unit for kind, level in row["bytes"].items()}
        length = len(next(iter(levels.values())))
        kinds = [kind for kind in occurring if kind in levels]
        areas = axes.stackplot(range(length), *(levels[kind] for kind in kinds), linewidth=0)
        for area, kind in zip(areas, kinds, strict=True):
            color, hatch = style.KINDS[kind]
            area.set(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
            handles[kind] = area
        highest = int(np.sum(list(levels.values()), axis=0).argmax())
        peak, place = row["peak"] / unit, highest / max(length - 1, 1)
        axes.plot(highest, peak, marker="v", color="black", markersize=7)
        # written above the highest point, where nothing is drawn
        text = f"peak {peak:{',.0f' if peak >= 100 else '.3g'}} {unit_name}"
        ha = "left" if place < 0.15 else "right" if place > 0.85 else "center"
        look = style.Look(textcoords="offset points", ha=ha, va="bottom", fontsize=11)
        axes.annotate(text, (highest, peak), (0, 6), bbox=style.ON_WHITE, **look)
        if row["backward"] is not None:
            axes.axvline(row["backward"], color="black", linewidth=0.9, linestyle=":")
            # near the right edge there is room for one word
            updates = "optimizer state" in row["bytes"] and row["backward"] < 0.6 * length
            after = " backward and update" if updates else " backward"
            at_top = style.Look(xycoords=("data", "axes fraction"), va="top", fontsize=11)
            axes.annotate("forward ", (row["backward"], 1), ha="right", **at_top)
            axes.annotate(after, (row["backward"], 1), ha="left", **at_top)
        axes.tick_params(labelsize=11)
        axes.yaxis.label.set_fontsize(11)
        axes.set(title=name, ylabel=unit_name, xlim=(0, length - 1), xticks=[])
        axes.grid(visible=False)
    panels[0].set_ylim(0, 1.35 * top / unit)  # room for two lines of text
    panels[-1].set_xlabel("instructions, in the order of the program", fontsize=11)
    legend = {kind: handles[kind] for kind in reversed(occurring)}
    below = style.Look(loc="outside lower center", ncols=2, fontsize=11)
    figure.legend(legend.values(), legend.keys(), **below)
    return figure
