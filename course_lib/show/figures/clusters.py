"""Hosts of GPUs, their ports to the network, and the rings of collectives through them."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.show.figures import style

BETWEEN_HOSTS = 1.2  # where the width of a GPU is 1
SWITCH, GPU, PORT, NETWORK = 1.35, 0.0, -1.0, -2.0  # heights of what is drawn, at its middle


def hosts(groups: Mapping[str, Sequence[Sequence[int]]], *, gpus_per_host: int = 8) -> Figure:
    """Draws groups of GPUs: a panel per group, with its hosts beside each other.

    Each host has an NVLink switch above its GPUs, and a port below each GPU. Ports that the
    group uses are filled; the links of its first ring are thick.

    Args:
      groups: the title of a group -> its rings, each the numbers of GPUs in the order in
        which they pass arrays on; the last one sends to the first.
      gpus_per_host: of each host.

    Raises:
      ValueError: if there is no group, or one without GPUs.
    """
    sizes = {name: sum(map(len, rings)) for name, rings in groups.items()}
    style.refuse_empty("groups", sizes, "GPUs")
    figure = Figure(figsize=(8.2, 1.95 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False).ravel()
    for axes, (name, rings) in zip(panels, groups.items(), strict=True):
        _draw(axes, rings, gpus_per_host)
        axes.set_title(name, fontsize=10)
    return figure


def ports(rings: Sequence[Sequence[int]], gpus_per_host: int) -> dict[int, set[str]]:
    """Returns the GPUs whose ports carry a message, each with "out", "in" or both."""
    used: dict[int, set[str]] = {}
    for ring in rings:
        for source, target in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            if source // gpus_per_host != target // gpus_per_host:
                used.setdefault(source, set()).add("out")
                used.setdefault(target, set()).add("in")
    return used


def _draw(axes: Axes, rings: Sequence[Sequence[int]], gpus_per_host: int) -> None:
    members, used = {gpu for ring in rings for gpu in ring}, ports(rings, gpus_per_host)
    count = max(members) // gpus_per_host + 1
    place = {
        gpu: gpu + BETWEEN_HOSTS * (gpu // gpus_per_host)
        for gpu in range(count * gpus_per_host)
    }
    right = max(place.values()) + 0.5
    _box(axes, (-0.5, right), NETWORK, "network", style.COLORS[4], 0.5)
    for host in range(count):
        first = host * gpus_per_host
        ends = (place[first] - 0.5, place[first + gpus_per_host - 1] + 0.5)
        axes.add_patch(
            Rectangle(
                (ends[0] - 0.2, PORT - 0.4),
                ends[1] - ends[0] + 0.4,
                SWITCH - PORT + 0.85,
                facecolor="none",
                edgecolor=style.GREY,
                linestyle=":",
            )
        )
        _box(axes, ends, SWITCH, f"host {host}: NVLink switch", style.COLORS[2], 0.5)
    for gpu, x in place.items():
        colour = style.COLORS[1] if gpu in members else "white"
        _box(axes, (x - 0.4, x + 0.4), GPU, f"{gpu}", colour, 0.7)
        axes.add_patch(
            Rectangle(
                (x - 0.3, PORT - 0.2),
                0.6,
                0.4,
                facecolor=style.COLORS[0] if gpu in used else "white",
                edgecolor="black",
                linewidth=0.6,
            )
        )
    drawn = set()
    for number, ring in enumerate(rings):
        for source, target in zip(ring, [*ring[1:], *ring[:1]], strict=True):
            inside = source // gpus_per_host == target // gpus_per_host
            for step in _steps(place[source], place[target], inside):
                if step not in drawn:  # the first ring is drawn first, and thick
                    drawn.add(step)
                    _arrow(axes, step, thick=number == 0)
    axes.set_xlim(-0.9, right + 0.4)
    axes.set_ylim(NETWORK - 0.35, SWITCH + 0.55)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_axis_off()


def _steps(source: float, target: float, inside: bool) -> list[tuple[float, float, float]]:
    """Returns the path of a message as arrows (x, y at the start, y at the end): through the
    switch, or through ports and network.
    """
    if inside:
        return [
            (source + 0.2, GPU + 0.35, SWITCH - 0.25),
            (target - 0.2, SWITCH - 0.25, GPU + 0.35),
        ]
    return [
        (source + 0.15, GPU - 0.35, NETWORK + 0.25),
        (target - 0.15, NETWORK + 0.25, GPU - 0.35),
    ]


def _arrow(axes: Axes, step: tuple[float, float, float], thick: bool) -> None:
    x, start, end = step
    axes.annotate(
        "",
        (x, end),
        (x, start),
        arrowprops={
            "arrowstyle": "-|>",
            "color": "black" if thick else style.GREY,
            "linewidth": 1.8 if thick else 0.8,
            "mutation_scale": 10 if thick else 7,
            "shrinkA": 0,
            "shrinkB": 0,
        },
    )


def _box(
    axes: Axes, ends: tuple[float, float], y: float, text: str, colour: str, height: float
) -> None:
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "black", "linewidth": 0.6}
    axes.add_patch(
        Rectangle((ends[0], y - height / 2), ends[1] - ends[0], height, alpha=0.55, **look)
    )
    axes.annotate(text, (sum(ends) / 2, y), ha="center", va="center", fontsize=9)
