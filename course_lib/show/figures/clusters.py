"""Hosts of GPUs, their ports to the network, and the rings of collectives through them."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.show.figures import style

BETWEEN_HOSTS = 1.2  # where the width of a GPU is 1
SWITCH, GPU, PORT, NETWORK = 1.35, 0.0, -1.0, -2.0  # heights of what is drawn, at its middle
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.6}
FIRST = {"linewidth": 1.8, "mutation_scale": 10}  # the arrows of the first ring, and of others
OTHERS = {"color": style.GREY}


def hosts(groups: Mapping[str, Sequence[Sequence[int]]], *, gpus_per_host: int = 8) -> Figure:
    """Draws groups of GPUs: a panel per group, with its hosts beside each other.

    Each host has an NVLink switch above its GPUs, and a port below each GPU. Ports that the
    group uses are filled; the links of its first ring are thick.

    Args:
      groups: the title of a group -> its rings, each the numbers of GPUs in the order in
        which they pass arrays on; the last one sends to the first.
    """
    style.refuse_empty("groups", {name: sum(map(len, all_)) for name, all_ in groups.items()})
    figure, panels = style.canvas(8.2, 1.95 * len(groups), len(groups), titles=groups)
    for axes, rings in zip(panels, groups.values(), strict=True):
        _draw(axes, rings, gpus_per_host)
    return figure


def _draw(axes: Axes, rings: Sequence[Sequence[int]], gpus_per_host: int) -> None:
    members = {gpu for ring in rings for gpu in ring}
    count = max(members) // gpus_per_host + 1
    host_of = {gpu: gpu // gpus_per_host for gpu in range(count * gpus_per_host)}
    place = {gpu: gpu + BETWEEN_HOSTS * host for gpu, host in host_of.items()}
    links = [
        (number, source, target, host_of[source] == host_of[target])
        for number, ring in enumerate(rings)
        for source, target in zip(ring, [*ring[1:], *ring[:1]], strict=True)
    ]
    used = {gpu for _, *pair, inside in links if not inside for gpu in pair}
    right = max(place.values()) + 0.5
    _box(axes, (-0.5, right), NETWORK, "network", style.COLORS[4], 0.5)
    for host in range(count):
        first = host * gpus_per_host
        ends = (place[first] - 0.5, place[first + gpus_per_host - 1] + 0.5)
        left, width = ends[0] - 0.2, ends[1] - ends[0] + 0.4
        look = style.Look(facecolor="none", edgecolor=style.GREY, linestyle=":")
        axes.add_patch(Rectangle((left, PORT - 0.4), width, SWITCH - PORT + 0.85, **look))
        _box(axes, ends, SWITCH, f"host {host}: NVLink switch", style.COLORS[2], 0.5)
    for gpu, x in place.items():
        colour = style.COLORS[1] if gpu in members else "white"
        _box(axes, (x - 0.4, x + 0.4), GPU, f"{gpu}", colour, 0.7)
        face = style.COLORS[0] if gpu in used else "white"
        axes.add_patch(Rectangle((x - 0.3, PORT - 0.2), 0.6, 0.4, **EDGE, facecolor=face))
    drawn = set()
    for number, source, target, inside in links:
        for step in _steps(place[source], place[target], inside):
            if step not in drawn:  # the first ring is drawn first, and thick
                drawn.add(step)
                x, start, end = step
                style.arrow(axes, (x, start), (x, end), **(OTHERS if number else FIRST))
    axes.set(xlim=(-0.9, right + 0.4), ylim=(NETWORK - 0.35, SWITCH + 0.55))
    axes.set_axis_off()


def _steps(source: float, target: float, inside: bool) -> list[tuple[float, float, float]]:
    """Returns a message's path through switch or network: arrows (x, first y, last y)."""
    if inside:
        up, down = GPU + 0.35, SWITCH - 0.25
        return [(source + 0.2, up, down), (target - 0.2, down, up)]
    port, network = GPU - 0.35, NETWORK + 0.25
    return [(source + 0.15, port, network), (target - 0.15, network, port)]


def _box(
    axes: Axes, ends: tuple[float, float], y: float, text: str, colour: str, height: float
) -> None:
    corner, width = (ends[0], y - height / 2), ends[1] - ends[0]
    axes.add_patch(Rectangle(corner, width, height, alpha=0.55, facecolor=colour, **EDGE))
    axes.annotate(text, (sum(ends) / 2, y), ha="center", va="center", fontsize=9)
