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
      title: of the picture.

    Raises:
      ValueError: if there is no tape, or one is empty.
    """
    steps = {
        name: row if isinstance(row, Mapping) else vars(row) for name, row in tapes.items()
    }
    style.refuse_empty(
        "tapes", {name: len(row["bytes"]) for name, row in steps.items()}, "kinds"
    )
    figure = Figure(figsize=(8.5, 0.7 + 2.3 * len(steps)), layout="constrained")
    panels = figure.subplots(len(steps), 1, squeeze=False, sharey=True).ravel()
    occurring = [
        kind
        for kind in style.KINDS
        if any(max(row["bytes"].get(kind, [0])) > row["peak"] / 1000 for row in steps.values())
    ]
    top = max(row["peak"] for row in steps.values())
    unit, unit_name = style.unit(top)
    for axes, (name, row) in zip(panels, steps.items(), strict=True):
        levels = {kind: np.array(level) / unit for kind, level in row["bytes"].items()}
        length = len(next(iter(levels.values())))
        kinds = [kind for kind in occurring if kind in levels]
        layers = axes.stackplot(
            range(length), *(levels[kind] for kind in kinds), labels=kinds, linewidth=0
        )
        for layer, kind in zip(layers, kinds, strict=True):
            color, hatch = style.KINDS[kind]
            layer.set(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
        highest = int(np.sum(list(levels.values()), axis=0).argmax())
        peak = row["peak"] / unit
        axes.plot(highest, peak, marker="v", color="black", markersize=7)
        number = f"{peak:,.0f}" if peak >= 100 else f"{peak:.3g}"
        place = highest / max(length - 1, 1)
        axes.annotate(  # above the highest point, where nothing is drawn
            f"peak {number} {unit_name}",
            (highest, peak),
            (0, 6),
            textcoords="offset points",
            ha="left" if place < 0.15 else "right" if place > 0.85 else "center",
            va="bottom",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
        if row["backward"] is not None:
            axes.axvline(row["backward"], color="black", linewidth=0.9, linestyle=":")
            after = " backward and update" if "optimizer state" in row["bytes"] else " backward"
            for text, ha in (("forward ", "right"), (after, "left")):
                axes.annotate(
                    text,
                    (row["backward"], 1),
                    xycoords=("data", "axes fraction"),
                    ha=ha,
                    va="top",
                    fontsize=9,
                )
        axes.set(title=name, ylabel=unit_name, xlim=(0, length - 1), xticks=[])
        axes.grid(visible=False)
    panels[0].set_ylim(0, 1.35 * top / unit)  # room for two lines of text
    panels[-1].set_xlabel("instructions, in the order of the program")
    handles: dict[str, Any] = {}
    for axes in panels:
        drawn, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(
        handles=[handles[kind] for kind in reversed(occurring)],
        loc="outside right center",
        fontsize=9,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
