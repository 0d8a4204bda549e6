"""Which device attends to which keys, and which expert gets which token."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
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
      title: of the picture.

    Raises:
      ValueError: if there is no layout, or one without pairs.
    """
    sizes = {name: len(pairs) for name, pairs in layouts.items()}
    style.refuse_empty("layouts", sizes, "pairs")
    figure = Figure(figsize=(3.5 * len(layouts), 3.6), layout="compressed")
    panels = figure.subplots(1, len(layouts), squeeze=False).ravel()
    for axes, (name, pairs) in zip(panels, layouts.items(), strict=True):
        axes.set_title(name, fontsize=10)
        _draw_pairs(axes, style.as_dicts(pairs), step)
        axes.set(xlabel=f"{part} of the keys", ylabel=f"{part} of the queries")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _draw_pairs(axes: Axes, pairs: list[dict[str, Any]], step: int | None) -> None:
    parts = 1 + max(max(pair["queries"], pair["keys"]) for pair in pairs)
    for pair in pairs:
        if step is not None and pair["step"] > step:
            continue
        alpha = 1.0 if step in (None, pair["step"]) else PALE
        corner = (pair["keys"] - 0.5, pair["queries"] - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, alpha=alpha, **style.device(pair["device"])))
        axes.text(
            pair["keys"],
            pair["queries"],
            str(pair["device"]),
            ha="center",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
        )
    axes.plot([-0.5, parts - 0.5], [-0.5, parts - 0.5], color=style.GREY, linewidth=1)
    axes.set(xlim=(-0.5, parts - 0.5), ylim=(parts - 0.5, -0.5), aspect="equal")
    axes.set_xticks(range(parts))
    axes.set_yticks(range(parts))
    axes.grid(visible=False)


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
      experts: number of experts.
      capacity: places per expert.
      title: of the picture.

    Raises:
      ValueError: if there is no token.
    """
    style.refuse_none("chosen", len(chosen), "tokens")
    figure, axes = style.canvas(8, 2.9)
    width = len(chosen)  # of the picture, in tokens
    room = width / experts
    slot = min(0.8, 0.9 * room / capacity)
    for token, (expert, place) in enumerate(zip(chosen, places, strict=True)):
        look = style.fill(expert)
        if place < 0:
            look |= {"facecolor": "white", "hatch": ""}
        axes.add_patch(Rectangle((token + 0.1, 2), 0.8, 0.5, **look))
        axes.text(token + 0.5, 2.62, str(token), ha="center", va="bottom", fontsize=9)
        if place < 0:
            axes.plot([token + 0.2, token + 0.8], [2.06, 2.44], color="black", linewidth=1.2)
            axes.plot([token + 0.2, token + 0.8], [2.44, 2.06], color="black", linewidth=1.2)
            continue
        x = _left(expert, room, slot, capacity) + (place + 0.5) * slot
        axes.plot([token + 0.5, x], [2, 0.5], color=style.color(expert), linewidth=1.2)
    taken = {(e, p) for e, p in zip(chosen, places, strict=True) if p >= 0}
    for expert in range(experts):
        left = _left(expert, room, slot, capacity)
        for place in range(capacity):
            full = (expert, place) in taken
            box = Rectangle((left + place * slot, 0), slot, 0.5, linewidth=0.8)
            box.set(facecolor=style.color(expert) if full else "white", edgecolor=style.GREY)
            box.set_hatch("" if full else "////")
            axes.add_patch(box)
        middle = left + capacity * slot / 2
        axes.text(middle, -0.12, f"expert {expert}", ha="center", va="top", fontsize=9)
    axes.text(-0.15, 2.25, "tokens", ha="right", va="center", fontsize=9)
    axes.text(-0.15, 0.25, "places", ha="right", va="center", fontsize=9)
    axes.set(xlim=(-1.6, width), ylim=(-0.55, 3.0), xticks=[], yticks=[])
    axes.set_axis_off()
    axes.set_title(title, fontsize=10)
    return figure


def _left(expert: int, room: float, slot: float, capacity: int) -> float:
    """Returns where the first place of an expert begins."""
    return expert * room + (room - capacity * slot) / 2
