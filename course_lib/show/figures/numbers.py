"""Floating-point formats: their bits, their range, and the gradients outside of it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from course_lib.show.figures import style


def formats(formats: Sequence[Any]) -> Figure:
    """Draws formats to scale: the bits of each, and its range of magnitudes.

    Args:
      formats: objects with `name`, `bits`, `exponent_bits`, `mantissa_bits`, `epsilon`,
        `largest`, `smallest_normal`, `smallest_subnormal` (`mixed_precision.describe`).
    """
    style.refuse_empty("formats", formats)
    beside = style.Look(columns=2, width_ratios=(1, 1.25), sharey=True)
    figure, [left, right] = style.canvas(9.5, 1.3 + 0.42 * len(formats), **beside)
    for y, number_format in enumerate(formats):
        _draw_bits(left, y, number_format)
        _draw_range(right, y, number_format)
    left.set_yticks(range(len(formats)), [f.name for f in formats])
    left.set_xticks(range(0, max(f.bits for f in formats) + 1, 8))
    left.set(xlim=(0, 1.25 * left.get_xlim()[1]), ylim=(len(formats) - 0.5, -0.5))
    left.set(xlabel="bits", title="bits")
    low, high = right.get_xlim()
    margin = 0.2 * (high - low)
    right.set(xlim=(low - margin, high + margin))
    right.set(xlabel="magnitude (powers of ten)", title="range")
    looks: dict[str, Any] = {}
    for axes in (left, right):
        axes.grid(visible=False, axis="y")
        handles, names = axes.get_legend_handles_labels()
        looks |= dict(zip(names, handles, strict=True))
    figure.legend(looks.values(), looks.keys(), loc="outside lower center", ncols=5, fontsize=9)
    return figure


def _draw_bits(axes: Axes, y: int, number_format: Any) -> None:
    exponent, mantissa = number_format.exponent_bits, number_format.mantissa_bits
    parts = {"sign": number_format.bits - exponent - mantissa}
    parts |= {"exponent": exponent, "mantissa": mantissa}
    start = 0
    for i, (part, bits) in enumerate(parts.items()):
        look = style.fill(i) | {"label": part, "alpha": 0.75}
        axes.barh([y] * bits, 1, 0.6, left=range(start, start + bits), **look)
        if bits > 1:
            style.write_in(axes, str(bits), start + bits / 2, y, pad=0.8)
        start += bits
    style.write(axes, f"eps $2^{{{round(math.log2(number_format.epsilon))}}}$", start, y)


def _draw_range(axes: Axes, y: int, number_format: Any) -> None:
    smallest, largest = number_format.smallest_subnormal, number_format.largest
    low, normal, high = map(math.log10, (smallest, number_format.smallest_normal, largest))
    full = style.fill(0) | {"facecolor": style.DEVICES[-1], "label": "full precision"}
    fewer = style.fill(6) | {"hatch": "////", "label": "subnormal: fewer bits"}
    axes.barh(y, high - normal, 0.5, left=normal, **full)
    axes.barh(y, normal - low, 0.5, left=low, **fewer)
    style.write(axes, f"{largest:.0f}" if largest < 1e6 else f"{largest:.1e}", high, y)
    style.write(axes, f"{smallest:.1e}", low, y, shift=-5, ha="right")


def gradient_histogram(
    gradients: Mapping[str, ArrayLike], number_format: Any, *, title: str = ""
) -> Figure:
    """Draws histograms of the entries of gradients, over the range of a format.

    Entries left of the range become zero in that format (underflow), entries right of it become
    infinite. The title of each row counts the entries that have no place on the axis: zero,
    infinite or NaN.

    Args:
      gradients: label -> entries of a gradient, any shape, in a precision that holds them all
        (float32).
      number_format: an object with `name`, `largest`, `smallest_normal`, `smallest_subnormal`
        (`mixed_precision.describe`).
    """
    magnitudes = {
        label: np.abs(np.asarray(values, np.float64)).ravel()
        for label, values in gradients.items()
    }
    shown = {label: m[np.isfinite(m) & (m > 0)] for label, m in magnitudes.items()}
    style.refuse_empty("gradients", {label: m.size for label, m in shown.items()})

    # Half of the smallest number rounds to zero.
    underflow = math.log2(number_format.smallest_subnormal) - 1
    subnormal = math.log2(number_format.smallest_normal)
    overflow = math.log2(number_format.largest)
    first = min(underflow - 3, *(math.log2(m.min()) for m in shown.values()))
    last = max(subnormal + 4, *(math.log2(m.max()) for m in shown.values()))
    edges = range(math.floor(first), math.ceil(last) + 1)
    size = (7.5, 0.9 + 1.35 * len(shown))
    figure, panels = style.canvas(*size, len(shown), sharex=True, heading=title)
    for i, (axes, (label, entries)) in enumerate(zip(panels, shown.items(), strict=True)):
        every = magnitudes[label]
        percent = np.histogram(np.log2(entries), edges)[0] / every.size * 100
        axes.stairs(percent, edges, fill=True, **style.fill(i, "gradients") | {"hatch": ""})
        _shade(axes, edges[0], underflow, "xx", "#F4C7C3")
        _shade(axes, underflow, subnormal, "//", "#FFF3C4")
        _shade(axes, overflow, edges[-1], "xx", "#F4C7C3")
        notes = [f"{np.sum(np.log2(entries) <= underflow) / every.size:.1%} underflow to 0"]
        others = {"overflow": every > number_format.largest, "are NaN": np.isnan(every)}
        others |= {"are 0 already": every == 0}
        notes += [
            f"{np.mean(is_so):.1%} {name}" for name, is_so in others.items() if is_so.any()
        ]
        axes.set_title(f"{label}: {', '.join(notes)}", fontsize=10)
        axes.set(xlim=(edges[0], edges[-1]), ylabel="% of entries")
        axes.grid(visible=False)
    axes.set_xlabel(
        f"magnitude, as a power of two   (xx: outside {number_format.name}'s range, //:"
        " subnormal in it)"
    )
    return figure


def _shade(axes: Axes, low: style.Number, high: style.Number, hatch: str, color: str) -> None:
    if low < high:
        look = style.Look(facecolor=color, hatch=hatch, edgecolor=style.GREY, linewidth=0)
        axes.axvspan(low, high, alpha=0.45, zorder=0, **look)
