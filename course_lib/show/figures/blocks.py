"""A Transformer block, and the bytes that each operation saves for the backward pass."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from course_lib.show.figures import style


def block(
    operations: Iterable[Mapping[str, Any]], *, most: int | None = None, title: str = ""
) -> Figure:
    """Draws the operations of a block from top to bottom, and beside each the bytes that it
    keeps for the backward pass. Dashed: what is computed again instead.

    Args:
      operations: mappings with "part" (a kind of `measure.tape.KINDS`, such as "attention"),
        "name", "bytes" saved for the backward pass, and optionally "again": the bytes that a
        rematerialization policy drops and computes again. Consecutive rows of one part form a
        branch beside the residual stream, a chain from the first to the last. A row with
        "chained" False, such as a copy of the weights, is no part of the chain: it stands below
        it, after the last chained row of its part, in a grey box without arrows.
      most: the bytes of the longest bar, for pictures with one scale. None: this picture's.
    """
    rows = [{"again": 0, "chained": True, **row} for row in operations]
    style.refuse_empty("operations", rows)
    branches = _branches(rows)
    beside = style.Look(columns=2, width_ratios=(1, 1.6), sharey=True)
    figure, [flow, bars] = style.canvas(8.5, 1.0 + 0.42 * len(rows), heading=title, **beside)
    flow.set(xlim=(0, 1), ylim=(len(rows) - 0.4, -0.9))
    flow.axis("off")
    most = most or max(row["bytes"] + row["again"] for row in rows) or 1
    for y, row in enumerate(rows):
        color, hatch = style.KINDS[row["part"]]
        flow.add_patch(_box(y, color if row["chained"] else None))
        flow.text(0.64, y, row["name"], ha="center", va="center", fontsize=9)
        if row["chained"] and all(y != first for first, *_ in branches):
            flow.add_patch(_arrow((0.64, y - 0.7), (0.64, y - 0.3)))
        bar = style.Look(color=color, hatch=hatch, edgecolor="white", linewidth=0)
        bars.barh(y, row["bytes"], height=0.6, **bar)
        text = style.size(row["bytes"]) if row["bytes"] else "nothing"
        if row["again"]:
            bar = style.Look(facecolor="none", edgecolor=color, linestyle="--", linewidth=1.2)
            bars.barh(y, row["again"], height=0.6, left=row["bytes"], **bar)
            text += f", {style.size(row['again'])} recomputed"
        style.write(bars, text, row["bytes"] + row["again"], y)
    for first, last, end in branches:
        part = style.Look(color=style.KINDS[rows[first]["part"]][0], rotation=90, weight="bold")
        flow.text(0, (first + last) / 2, rows[first]["part"], ha="center", va="center", **part)
        flow.add_patch(_arrow((0.12, first - 0.75), (0.12, end + 0.75)))
        flow.add_patch(_arrow((0.12, first - 0.5), (0.3, first)))
        flow.add_patch(_arrow((0.3, last), (0.12, last + 0.55)))
        flow.text(0.06, last + 0.5, "+", ha="center", va="center", fontsize=12)
    bars.set(xlim=(0, 1.45 * most), xticks=[], xlabel="kept for the backward pass")
    bars.xaxis.set_label_position("top")
    bars.tick_params(left=False, labelleft=False)
    bars.grid(visible=False)
    bars.spines[["left", "bottom"]].set_visible(False)
    return figure


def _box(y: int, color: str | None = None) -> FancyBboxPatch:
    """Returns the box of a row: white with a coloured edge, or grey without an edge."""
    shape = "round,pad=0.0,rounding_size=0.05"
    look = style.Look(facecolor="white" if color else "#ECECEC", edgecolor=color or "none")
    return FancyBboxPatch((0.3, y - 0.3), 0.68, 0.6, boxstyle=shape, linewidth=1.6, **look)


def _arrow(start: style.Point, end: style.Point) -> FancyArrowPatch:
    look = style.Look(color=style.GREY, linewidth=1.2)
    return FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, **look)


def _branches(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, int]]:
    """Returns for each part the first row, the last chained row, and the last row."""
    branches, end = [], -1
    for part, group in itertools.groupby(rows, key=lambda row: row["part"]):
        chained = [row["chained"] for row in group]
        first, end = end + 1, end + len(chained)
        last = first + sum(chained) - 1
        if not chained[0] or not all(chained[: last - first + 1]):
            raise ValueError(
                f"operations: the chained rows of {part} must come first, and there must be"
                " one: the others stand below the chain"
            )
        branches.append((first, last, end))
    return branches
