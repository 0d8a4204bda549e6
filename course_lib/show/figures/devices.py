"""Arrays cut among devices."""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.show.figures import style

PANELS_IN_A_ROW = 3
Part = tuple[tuple[int, int], ...]  # (first index, one after the last) of each dimension


def who_holds_what(arrays: Mapping[str, Sequence[Any]], *, title: str = "") -> Figure:
    """Draws arrays as they are cut: one panel per array, one rectangle per part, with the
    numbers of the devices that hold it.

    Args:
      arrays: the title of an array -> its holdings (`meshes.holdings`): one mapping or
        dataclass per device, with its number as `device`, and as `ranges` the first index and
        one after the last in each of at most two dimensions.
    """
    style.refuse_empty("arrays", arrays)
    rows = -(-len(arrays) // PANELS_IN_A_ROW)
    columns = min(len(arrays), PANELS_IN_A_ROW)
    size = (max(2.6 * columns, 4), 2.3 * rows + 0.3 * bool(title))
    figure, panels = style.canvas(*size, rows, columns, titles=arrays, heading=title)
    for axes, (name, holdings) in zip(panels, arrays.items(), strict=False):
        _draw_parts(axes, name, holdings)
    for axes in panels[len(arrays) :]:
        axes.set_axis_off()
    return figure


def _draw_parts(axes: Axes, name: str, holdings: Sequence[Any]) -> None:
    parts: dict[Part, list[int]] = collections.defaultdict(list)
    for row in style.as_dicts(holdings):
        parts[tuple(tuple(pair) for pair in row["ranges"])].append(row["device"])
    dims = max(map(len, parts))
    if dims > 2:
        raise ValueError(
            f"arrays[{name!r}] must have at most two dimensions to be drawn: it has {dims}"
        )
    rectangles = {part: ((0, 1),) * (2 - dims) + part for part in parts}  # a vector is one row
    for part, devices in parts.items():
        (top, bottom), (left, right) = rectangles[part]
        look, middle = style.device(min(devices)), ((left + right) / 2, (top + bottom) / 2)
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, **look))
        style.write_in(axes, spell(devices), *middle, pad=1.5)
    vertical, horizontal = (
        {end for ranges in rectangles.values() for end in ranges[dim]} for dim in (0, 1)
    )
    axes.set(xticks=sorted(horizontal), yticks=sorted(vertical) if dims == 2 else [])
    axes.set(xlim=(0, max(horizontal)), ylim=(max(vertical), 0))  # the first row at the top
    axes.tick_params(labelsize=9)
    axes.grid(False)


def spell(devices: Sequence[int]) -> str:
    """Returns device numbers as a reader wants them: "0-3", "0, 4", "0-1, 4-5"."""
    by_run = itertools.groupby(enumerate(sorted(devices)), lambda pair: pair[1] - pair[0])
    runs = [[device for _, device in run] for _, run in by_run]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
