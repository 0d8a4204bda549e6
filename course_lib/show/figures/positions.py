"""Which device attends to which keys, which arrays lie where, which expert gets which token."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.show.figures import style

PALE = 0.3  # how strongly a pair of an earlier step is drawn


def attention_pairs(
    layouts: Mapping[str, Sequence[Any]],
    *,
    step: int | None = None,
    part: str = "part",
    title: str = "",
) -> Figure:
    """Draws a causal mask cut into pairs of parts: a panel per layout, a square per pair.

    A square has the colour and the number of the device that computes it.

    Args:
      layouts: the title of a layout -> its pairs. A pair has the index of its part of the
        `queries` and of the `keys`, its `device`, and the `step` of the ring that computes it.
      step: draws only pairs up to this step, and those of earlier steps pale. None: all.
      part: names a part on the axes.
    """
    style.refuse_empty("layouts", layouts)
    names = style.Look(titles=layouts, heading=title)
    size, n = (3.5 * len(layouts), 3.6), len(layouts)
    figure, panels = style.canvas(*size, columns=n, layout="compressed", **names)
    for axes, pairs in zip(panels, layouts.values(), strict=True):
        _draw_pairs(axes, style.as_dicts(pairs), step)
        axes.set(xlabel=f"{part} of the keys", ylabel=f"{part} of the queries")
    return figure


def _draw_pairs(axes: Axes, pairs: list[dict[str, Any]], step: int | None) -> None:
    parts = 1 + max(max(pair["queries"], pair["keys"]) for pair in pairs)
    for pair in pairs:
        if step is not None and pair["step"] > step:
            continue
        alpha = 1.0 if step in (None, pair["step"]) else PALE
        corner = (pair["keys"] - 0.5, pair["queries"] - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, alpha=alpha, **style.device(pair["device"])))
        place, text = (pair["keys"], pair["queries"]), str(pair["device"])
        style.write_in(axes, text, *place, pad=1.2)
    axes.plot([-0.5, parts - 0.5], [-0.5, parts - 0.5], color=style.GREY, linewidth=1)
    axes.set(xticks=range(parts), yticks=range(parts), aspect="equal")
    axes.set(xlim=(-0.5, parts - 0.5), ylim=(parts - 0.5, -0.5))
    axes.grid(visible=False)


def dependencies(matrices: Mapping[str, Any], *, x: str, y: str, title: str = "") -> Figure:
    """Draws which of two positions depend on one another: a panel per matrix of booleans.

    Args:
      matrices: title of a panel -> booleans [rows, columns]; (i, j): column j depends on row i.
        A ring marks each place where an earlier column depends on a later row.
      x, y: labels of the axes: what a column is, and what a row is.
    """
    style.refuse_empty("matrices", list(matrices))
    names = style.Look(titles=matrices, heading=title)
    size, n = (3.5 * len(matrices), 3.9), len(matrices)
    figure, panels = style.canvas(*size, columns=n, sharey=True, layout="compressed", **names)
    for axes, matrix in zip(panels, matrices.values(), strict=True):
        axes.imshow(matrix, cmap=ListedColormap(["white", style.color(0)]), vmin=0, vmax=1)
        rows, columns = np.nonzero(np.tril(matrix, -1))
        axes.plot(columns, rows, "o", fillstyle="none", color=style.color(1), markersize=14)
        axes.set(xlabel=x)
        axes.grid(visible=False)
    panels[0].set_ylabel(y)
    return figure


def memory_levels(levels: Mapping[str, Sequence[Any]], *, title: str = "") -> Figure:
    """Draws where arrays lie while a kernel runs: a panel per level of memory, a bar per array.

    Args:
      levels: the name of a level, such as "registers" -> its arrays. Each has a "name", its
        "bytes" there, the "tiles" of positions that lie there, and "now": those that the kernel
        uses now. The others are pale.
    """
    style.refuse_empty("levels", levels)
    rows = [len(arrays) for arrays in levels.values()]
    look = style.Look(titles=levels, heading=title, rows=len(rows), height_ratios=rows)
    figure, panels = style.canvas(7.5, 1.4 + 0.5 * sum(rows), sharex=True, **look)
    names = {array["name"]: None for arrays in levels.values() for array in arrays}
    colors = {name: i for i, name in enumerate(names)}
    for axes, arrays in zip(panels, levels.values(), strict=True):
        for y, array in enumerate(arrays):
            for tile in array["tiles"]:
                alpha = 1.0 if tile in array["now"] else PALE
                bar = style.fill(colors[array["name"]]) | {"alpha": alpha}
                style.cell(axes, (tile - 0.5, 1), y, 0.7, bar)
            style.write(axes, style.size(array["bytes"]), max(array["tiles"]) + 0.5, y)
        style.name_rows(axes, [array["name"] for array in arrays], length=0)
        axes.grid(visible=False)
    tiles = max(
        tile for arrays in levels.values() for array in arrays for tile in array["tiles"]
    )
    panels[-1].set(
        xlim=(-0.6, 1.2 * tiles + 1), xticks=range(tiles + 1), xlabel="tile of positions"
    )
    return figure


def token_routing(
    chosen: Sequence[int],
    places: Sequence[int],
    *,
    experts: int,
    capacity: int,
    title: str = "",
) -> Figure:
    """Draws tokens above their experts, with a line from each token to its place.

    Tokens without a place have a cross; hatched places stay empty.

    Args:
      chosen: the expert that each token chose.
      places: the place of each token at its expert, below `capacity`, or -1 if it is dropped.
    """
    style.refuse_empty("chosen", chosen)
    figure, [axes] = style.canvas(8, 2.9)
    room = len(chosen) / experts  # in tokens
    slot = min(0.8, 0.9 * room / capacity)
    lefts = [expert * room + (room - capacity * slot) / 2 for expert in range(experts)]
    line = style.Look(linewidth=1.2)
    for token, (expert, place) in enumerate(zip(chosen, places, strict=True)):
        look = style.fill(expert)
        if place < 0:
            look |= {"facecolor": "white", "hatch": ""}
        axes.add_patch(Rectangle((token + 0.1, 2), 0.8, 0.5, **look))
        axes.text(token + 0.5, 2.62, str(token), ha="center", va="bottom", fontsize=9)
        if place < 0:
            for ends in ([2.06, 2.44], [2.44, 2.06]):
                axes.plot([token + 0.2, token + 0.8], ends, color="black", **line)
        else:
            x = lefts[expert] + (place + 0.5) * slot
            axes.plot([token + 0.5, x], [2, 0.5], color=style.color(expert), **line)
    taken = set(zip(chosen, places, strict=True))
    for expert, left in enumerate(lefts):
        for place in range(capacity):
            full = (expert, place) in taken
            look = {"facecolor": style.color(expert)} if full else {"facecolor": "white"}
            look |= {"hatch": "" if full else "////", "edgecolor": style.GREY, "linewidth": 0.8}
            axes.add_patch(Rectangle((left + place * slot, 0), slot, 0.5, **look))
        middle = left + capacity * slot / 2
        axes.text(middle, -0.12, f"expert {expert}", ha="center", va="top", fontsize=9)
    for y, text in ((2.25, "tokens"), (0.25, "places")):
        axes.text(-0.15, y, text, ha="right", va="center", fontsize=9)
    axes.set(xlim=(-1.6, len(chosen)), ylim=(-0.55, 3.0))
    axes.set_axis_off()
    axes.set_title(title, fontsize=10)
    return figure
