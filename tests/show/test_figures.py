"""Laws of every picture: the data is in it, and a reader can read it, without
colour too.
"""

import base64
import io
import itertools
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace as Object

import matplotlib.pyplot as plt
import numpy as np
import PIL.Image
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Annotation, Text
from traitlets.config import Config

from course_lib.measure.units import GIB, MIB
from course_lib.one_device import mixed_precision
from course_lib.show import figures
from course_lib.show.figures import clusters, devices, style

ROWS = [
    {
        "name": "no remat, no scan",
        "published": 20.6 * GIB,
        "compiled": 20.2 * GIB,
        "arguments": 2.5 * GIB,
        "temporaries": 17.7 * GIB,
        "compute_seconds": 0.3,
        "memory_seconds": 0.5,
        "published_seconds": 2.1,
        "recomputed": 0.0,
        "memory": 20.2 * GIB,
    },
    {
        "name": "remat Block, scan",
        "published": None,
        "compiled": 5.0 * GIB,
        "arguments": 2.5 * GIB,
        "temporaries": 2.5 * GIB,
        "compute_seconds": 0.4,
        "memory_seconds": 0.2,
        "published_seconds": None,
        "recomputed": 33.0,
        "memory": 5.0 * GIB,
    },
]
ARRAYS = [
    Object(
        bytes=2**20 * n,
        shape=(n, 256, 1024),
        dtype="float32",
        why=f"output of op {n}",
        scope=f"jit(step)/block_{n}/mlp",
    )
    for n in (8, 4, 4, 2, 1)
]
EVENTS = [
    Object(op="while.1", start=0.0, duration=0.008, self_time=0.001, container=True),
    Object(op="fusion.1", start=0.0, duration=0.004, self_time=0.004, container=False),
    Object(op="fusion.2", start=0.005, duration=0.002, self_time=0.002, container=False),
    Object(op="dot.3", start=0.009, duration=0.001, self_time=0.001, container=False),
]
FORMATS = [mixed_precision.describe(name) for name in ("float32", "float16", "bfloat16")]
FLOAT16 = mixed_precision.describe("float16")

# An array of shape (4, 8), cut in two ways over two rows of four devices, and a vector that all
# hold.
HOLDINGS = {
    "P('data', 'tensor')": [
        Object(
            device=4 * row + column,
            ranges=((2 * row, 2 * row + 2), (2 * column, 2 * column + 2)),
        )
        for row in range(2)
        for column in range(4)
    ],
    "P(None, 'tensor')": [
        {"device": d, "ranges": [[0, 4], [2 * (d % 4), 2 * (d % 4) + 2]]} for d in range(8)
    ],
    "P()": [Object(device=d, ranges=((0, 8),)) for d in range(8)],
    "P(('data', 'tensor'))": [Object(device=d, ranges=((d, d + 1),)) for d in range(8)],
}


def cell(kind, microbatch, chunk=0):
    return Object(kind=kind, microbatch=microbatch, chunk=chunk)


# Two devices: backwards in one go, then split; and one device with two chunks.
TABLES = {
    "in one go": [
        [cell("F", 0), None, None, None, cell("-", 0), cell("BW", 0)],
        [None, cell("F", 0), cell("-", 0), cell("BW", 0), None, None],
    ],
    "split": [
        [cell("F", 0), None, None, cell("B", 0), cell("W", 0)],
        [None, cell("F", 0), cell("B", 0), cell("W", 0), None],
    ],
    "two chunks": [
        [
            cell("F", 0),
            cell("F", 0, 1),
            cell("-", 0, 1),
            cell("BW", 0, 1),
            cell("-", 0),
            cell("BW", 0),
        ]
    ],
}
LANES = {
    "ring": {
        "device 0": figures.Lane([(0, 1, "sends", "a")], [(0, 1), (1, 2)]),
        "device 1": figures.Lane([(0, 1, "sends", "b"), (1, 1, "adds", "a")], [(0, 1), (1, 4)]),
    },
    "table": figures.lanes_of_schedule(TABLES["in one go"]),
}
SPANS = {
    "waits": {"sends": [(0.0, 2e-5)], "multiplies": [(2e-5, 4e-5)]},
    "ring": {"sends": [(0.0, 1e-5)], "multiplies": [(0.0, 2e-5), (2e-5, 2e-5)]},
}
SECONDS = {"network": [(2, 2e-2), (8, 4e-2), (64, 5e-2)], "NVLink": [(2, 2e-3), (8, 4e-3)]}

GROUPS = {
    "one ring": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "whole hosts": [
        [4 * host + (first + i) % 4 for host in range(2) for i in range(4)]
        for first in range(4)
    ],
    "one per host": [[1, 5]],
    "inside a host": [[4, 5, 6, 7]],
}
VERSIONS = [
    {"name": "first", "seconds": 1.0, "peak": 46 * GIB},
    {"name": "second", "seconds": 0.6, "peak": 8 * GIB},
    {"name": "third", "seconds": 0.6, "peak": 3.5 * GIB},
]
INTENSITIES = [
    {"name": "a product", "dtype": "float32", "intensity": 500.0, "rate": 5e13},
    {"name": "a product", "dtype": "bfloat16", "intensity": 1000.0, "rate": 1e14},
    {"name": "a sum", "dtype": "float32", "intensity": 0.1, "rate": 1e11},
    {"name": "a sum", "dtype": "bfloat16", "intensity": 0.2, "rate": 2e11},
]

PAIRS = [
    {"queries": 0, "keys": 0, "device": 0, "step": 0},
    {"queries": 1, "keys": 0, "device": 1, "step": 1},
    {"queries": 1, "keys": 1, "device": 1, "step": 0},
]
TAPE = Object(
    bytes={
        "parameters": [GIB] * 6,
        "MLP": [0, 2 * GIB, 4 * GIB, 3 * GIB, GIB, 0],
        "gradients": [0, 0, 0, GIB, GIB, GIB],
    },
    backward=3,
    peak=5 * GIB,
)
BLOCK = [
    {"part": "attention", "name": "scores", "bytes": GIB // 2, "again": 2 * GIB},
    {"part": "attention", "name": "output layer", "bytes": 0},
    {"part": "MLP", "name": "hidden layer", "bytes": GIB},
]
PICTURES = {
    "attention_pairs": lambda: figures.attention_pairs({"in order": PAIRS}, title="a mask"),
    "token_routing": lambda: figures.token_routing(
        [0, 1, 0, 0], [0, 0, 1, -1], experts=2, capacity=2, title="two places per expert"
    ),
    "formats": lambda: figures.formats(FORMATS),
    "gradient_histogram": lambda: figures.gradient_histogram(
        {"plain": [1e-9, 1e-4], "scaled": [1e-4, 1e5]}, FLOAT16
    ),
    "hosts": lambda: figures.hosts(GROUPS, gpus_per_host=4),
    "lanes": lambda: figures.lanes(
        LANES, passes={"ring": [(1, "device 0", 1, "device 1")]}, amount="shards", title="two"
    ),
    "progress": lambda: figures.progress(VERSIONS, limit=21 * GIB, small=4 * GIB, fast=0.4),
    "rungs": lambda: figures.rungs(VERSIONS, limit=21 * GIB, title="steps"),
    "trace": lambda: figures.trace(
        [(step, 4e-4 * 0.99**step) for step in range(300)],
        "step",
        "learning rate",
        {"highest": 4e-4},
        title="Rate",
    ),
    "lines": lambda: figures.lines(
        {"loop": [(1, 1), (4, 4)], "scan": [(1, 1), (4, 1)]}, "minibatches", "s", logx=True
    ),
    "loss_curve": lambda: figures.loss_curve(
        [(0, 8.0), (9, 4.5)], [(0, 8.0), (9, 4.6)], {"bigram": 4.9, "unigram": 6.3}
    ),
    "memory_bars": lambda: figures.memory_bars(ROWS, capacity=24 * GIB),
    "memory_breakdown": lambda: figures.memory_breakdown(ROWS),
    "overlap": lambda: figures.overlap(SPANS, title="a product"),
    "residuals": lambda: figures.residuals(ARRAYS),
    "roofline": lambda: figures.roofline(ROWS),
    "roofline_plot": lambda: figures.roofline_plot(
        {"float32": 5e13, "bfloat16": 1e14}, 1e12, INTENSITIES, title="an accelerator"
    ),
    "schedule": lambda: figures.schedule(TABLES),
    "seconds_by_devices": lambda: figures.seconds_by_devices(SECONDS, host=8),
    "step_timeline": lambda: figures.step_timeline(EVENTS),
    "tradeoff": lambda: figures.tradeoff(ROWS + [ROWS[1] | {"name": "a neighbour"}]),
    "who_holds_what": lambda: figures.who_holds_what(HOLDINGS, title="(4, 8) on 2 x 4 devices"),
    "tape": lambda: figures.tape({"one": TAPE, "two": vars(TAPE)}, title="two steps"),
    "block": lambda: figures.block(BLOCK, title="a block"),
    "explorer": lambda: explored().picture(),
}

EXPLORED = [
    {"GPUs": gpus, "network": network, "layout": layout, "other": object()}
    | (
        {"time": "does not divide"}
        if (gpus, layout) == (8, "pipe")
        else {"time": 3.0 * gpus + ports, "work": 2.0 * gpus, "bubble": 1.0 * gpus + ports}
        | {"MFU": f"MFU {gpus + ports}%"}
    )
    for gpus in (8, 64)
    for network, ports in (("fast", 0), ("slow", 0.125))
    for layout in ("data", "pipe")
]


def explored(rows=EXPLORED, **changed):
    """Returns an explorer of two settings and two layouts."""
    columns = {"settings": ["GPUs", "network"], "label": "layout", "value": "time"}
    columns |= {"parts": ["work", "bubble"], "note": "MFU", "unit": "ms"}
    return figures.explorer(rows, **(columns | changed))


@pytest.fixture(autouse=True)
def styled():
    figures.use_style()


def test_a_loss_without_baselines_and_one_that_diverged_are_drawn(tmp_path):
    curve = [(0, 8.0), (9, 4.5), (99, 4.6)]
    figures.loss_curve(curve, curve).savefig(tmp_path / "without.png")
    diverged = [(0, 8.0), (9, 4.5), (99, math.nan)]
    figures.loss_curve(diverged, diverged).savefig(tmp_path / "diverged.png")
    figures.lines({"a": diverged}, "step", "loss").savefig(tmp_path / "lines.png")


def test_what_lies_outside_of_the_drawn_range_is_drawn_at_its_edge():
    figure = figures.lines({"a": [(0, 8.0), (1, 40.0), (2, 0.1)]}, "step", "loss", ylim=(4, 9))
    (axes,) = figure.axes
    assert axes.get_ylim() == (4, 9) and list(axes.lines[0].get_ydata()) == [8.0, 9, 4]


def draw(figure) -> None:
    figure.savefig(io.BytesIO(), format="png")


def texts(figure) -> list[Text]:
    """All texts that are seen, without those of an axis that another one shares."""
    found = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
    hidden = {
        id(t)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for t in _hidden_labels(axis)
    }
    return [t for t in found if id(t) not in hidden]


def _hidden_labels(axis):
    low, high = sorted(axis.get_view_interval())
    for tick in axis.get_major_ticks() + axis.get_minor_ticks():
        outside = not low - 1e-9 <= tick.get_loc() <= high + 1e-9
        yield from (
            label for label in (tick.label1, tick.label2) if outside or not label.get_visible()
        )


def boxes(figure) -> list:
    return [
        Text.get_window_extent(t) if isinstance(t, Annotation) else t.get_window_extent()
        for t in texts(figure)
    ]


def test_every_picture_of_the_package_is_checked_here():
    assert set(PICTURES) | {
        "PHASES",
        "use_style",
        "moving",
        "Lane",
        "lanes_of_layers",
        "lanes_of_schedule",
        "lanes_of_step",
    } == set(figures.__all__)


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES)
def test_letters_are_large_enough_lie_inside_and_do_not_cover_each_other(picture):
    figure = picture()
    draw(figure)
    assert min(t.get_fontsize() for t in texts(figure)) >= 9 or not texts(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for box in boxes(figure):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
    for (a, text_a), (b, text_b) in itertools.combinations(
        zip(boxes(figure), texts(figure), strict=True), 2
    ):
        shared = (min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0))
        assert min(shared) <= 1, (
            f"{text_a.get_text()!r} and {text_b.get_text()!r} overlap by {shared} pixels"
        )


@pytest.mark.parametrize(
    "name",
    ["formats", "lanes", "memory_bars", "memory_breakdown", "overlap", "roofline", "schedule"],
)
def test_bars_of_different_kinds_have_different_hatches(name):
    figure = PICTURES[name]()
    for axes in figure.axes:
        kinds = {
            (patch.get_facecolor(), patch.get_hatch())
            for patch in axes.patches
            if patch.get_width() > 0
        }
        assert len({hatch for _, hatch in kinds}) == len(kinds) >= 2


@pytest.mark.parametrize("name", ["lines", "tradeoff"])
def test_lines_and_points_have_markers_of_their_own_and_their_name_beside_them(name):
    [axes] = PICTURES[name]().axes
    markers = [line.get_marker() for line in axes.lines if line.get_marker() != "None"]
    assert len(set(markers)) == len(markers) >= 2
    names = (
        {"loop", "scan"}
        if name == "lines"
        else {"no remat, no scan", "remat Block, scan", "a neighbour"}
    )
    assert names <= {t.get_text() for t in axes.texts}


def test_ten_points_have_ten_markers_and_those_that_share_a_colour_differ_in_shape():
    rows = [{"name": str(n), "memory": n * GIB, "recomputed": n} for n in range(1, 11)]
    points = figures.tradeoff(rows).axes[0].lines[:10]
    assert len({line.get_marker() for line in points}) == 10
    assert {line.get_color() for line in points} == set(style.COLORS)


def test_pictures_leave_nothing_open_and_are_the_same_twice():
    first, second = io.BytesIO(), io.BytesIO()
    PICTURES["memory_bars"]().savefig(first, format="png")
    PICTURES["memory_bars"]().savefig(second, format="png")
    assert first.getvalue() == second.getvalue()
    assert plt.get_fignums() == []
    assert len(first.getvalue()) < 100_000


def test_memory_bars_are_as_long_as_the_memory_in_gib():
    [axes] = figures.memory_bars(ROWS, capacity=24 * GIB).axes
    assert [round(bar.get_width(), 6) for bar in axes.patches] == [20.6, 0, 20.2, 5.0]
    assert {"20.6 GiB", "not known", "20.2 GiB", "5.0 GiB"} <= {
        t.get_text() for t in axes.texts
    }
    assert [line.get_xdata()[0] for line in axes.lines] == [24]


def test_progress_numbers_its_steps_in_order_and_leaves_those_hollow_that_do_not_fit():
    [axes] = figures.progress(VERSIONS, limit=21 * GIB, small=4 * GIB, fast=0.4, first=5).axes
    written = [t.get_text() for t in axes.texts]
    assert {"5", "6", "7", "5. first", "6. second", "7. third"} <= set(written)
    joined, *points = [line for line in axes.lines if len(line.get_xdata()) != 2]
    assert joined.get_xydata().tolist() == [[1000, 46], [600, 8], [600, 3.5]]
    assert [p.get_markerfacecolor() == "white" for p in points] == [True, False, False]


def test_rungs_have_a_bar_of_memory_and_one_of_time_hatched_where_a_step_does_not_fit():
    memory, time = figures.rungs(VERSIONS, limit=21 * GIB, first=0).axes
    assert [bar.get_width() for bar in memory.patches] == [46, 8, 3.5]
    assert [bar.get_width() for bar in time.patches] == [1000, 600, 600]
    for axes in (memory, time):
        assert [bar.get_hatch() for bar in axes.patches] == ["///", None, None]
    assert [label.get_text() for label in memory.get_yticklabels()] == [
        "0. first",
        "1. second",
        "2. third",
    ]


def test_rungs_may_have_no_limit_and_decimal_units():
    memory, _ = figures.rungs(VERSIONS, unit="GB").axes
    sizes = [round(bar.get_width(), 2) for bar in memory.patches]
    assert sizes == [round(gib * GIB / 1e9, 2) for gib in (46, 8, 3.5)]
    assert {bar.get_hatch() for bar in memory.patches} == {None} and not memory.lines
    with pytest.raises(ValueError, match="unit='MB'"):
        figures.rungs(VERSIONS, unit="MB")


def test_a_tradeoff_may_have_a_logarithmic_axis_of_memory():
    rows = [{"name": "a", "memory": GIB, "recomputed": 1}]
    assert figures.tradeoff(rows, logy=True).axes[0].get_yscale() == "log"
    assert figures.tradeoff(rows).axes[0].get_yscale() == "linear"


def test_points_of_one_series_share_a_look_and_a_line_and_others_stand_alone():
    rows = [
        {"name": str(n), "memory": n * GIB, "recomputed": n, "series": series}
        for n, series in ((1, "tokens"), (2, "tokens"), (3, "vocabulary"))
    ]
    alone = {"name": "all", "memory": GIB, "recomputed": 0}
    single, tokens, vocabulary = figures.tradeoff([alone, *rows]).axes[0].lines[:3]
    assert [len(line.get_xdata()) for line in (single, tokens, vocabulary)] == [1, 2, 1]
    looks = {(line.get_color(), line.get_marker()) for line in (single, tokens, vocabulary)}
    assert len(looks) == 3


def test_memory_breakdown_stacks_its_parts_up_to_the_sum():
    [axes] = figures.memory_breakdown(ROWS).axes
    ends = [round(bar.get_x() + bar.get_width(), 6) for bar in axes.patches]
    assert ends == [2.5, 2.5, 20.2, 5.0]
    assert [t.get_text() for t in axes.texts] == ["20.2 GiB", "5.00 GiB"]


def test_all_bars_of_a_breakdown_have_the_unit_of_the_longest():
    rows = [{"name": str(n), "arguments": n * MIB, "temporaries": 4 * MIB} for n in (540, 5)]
    [axes] = figures.memory_breakdown(rows).axes
    assert [t.get_text() for t in axes.texts] == ["544 MiB", "9.00 MiB"]
    assert axes.get_xlabel() == "memory (MiB)"
    assert axes.patches[0].get_width() == 540
    rows[0]["arguments"] = 4 * GIB
    [axes] = figures.memory_breakdown(rows).axes
    assert [t.get_text() for t in axes.texts] == ["4.00 GiB", "0.01 GiB"]
    assert axes.get_xlabel() == "memory (GiB)"


def test_residuals_of_one_kind_share_a_bar_and_the_rest_is_summed_not_dropped():
    [axes] = figures.residuals(ARRAYS, top=2).axes
    assert sum(bar.get_width() for bar in axes.patches) == 8 + 4 + 4 + 2 + 1
    labels = [t.get_text().split("\n")[0] for t in axes.get_yticklabels()]
    assert labels == ["float32[8,256,1024]", "2 × float32[4,256,1024]", "2 others"]


def test_rows_of_a_recorded_table_give_the_picture_that_dataclasses_give():
    first, second = io.BytesIO(), io.BytesIO()
    figures.residuals(ARRAYS).savefig(first, format="png")
    figures.residuals([vars(array) for array in ARRAYS]).savefig(second, format="png")
    assert first.getvalue() == second.getvalue()


def test_roofline_says_the_larger_floor_and_marks_the_measured_time():
    [axes] = figures.roofline(ROWS).axes
    assert [t.get_text() for t in axes.texts] == ["2.10 s, floor 0.50 s", "floor 0.40 s"]
    assert axes.lines[0].get_xdata().tolist() == [2.1]


def test_a_roof_bends_where_memory_and_products_take_equally_long():
    [axes] = PICTURES["roofline_plot"]().axes
    single, half, *points = axes.lines
    for line, peak in ((single, 50), (half, 100)):
        intensity, rate = line.get_xdata(), line.get_ydata()
        assert rate[0] == pytest.approx(intensity[0])  # 1 TB/s: as many TFLOP/s as FLOPs/byte
        assert (intensity[1], rate[1]) == (peak, peak) and rate[2] == peak
    assert [float(point.get_ydata()[0]) for point in points] == [50, 100, 0.1, 0.2]
    assert points[0].get_color() == single.get_color() != half.get_color()


def test_a_point_of_a_dtype_without_a_roof_is_refused():
    with pytest.raises(ValueError, match="float16"):
        figures.roofline_plot({"float32": 1e12}, 1e12, [INTENSITIES[0] | {"dtype": "float16"}])


def test_formats_are_drawn_to_scale():
    left, right = figures.formats(FORMATS).axes
    assert len(left.patches) == 32 + 16 + 16  # a box a bit
    float16_normal = right.patches[2]
    assert math.isclose(float16_normal.get_width(), math.log10(65504) - math.log10(2**-14))


def test_a_gradient_histogram_counts_what_float16_loses():
    entries = np.array([2.0**-30, 2.0**-26, 2.0**-20, 1.0, 0.0, np.inf, -1e6, -(2.0**-3)])
    figure = figures.gradient_histogram({"g": entries}, FLOAT16)
    [axes] = figure.axes
    assert (
        axes.get_title(loc="left")
        == "g: 25.0% underflow to 0, 25.0% overflow, 12.5% are 0 already"
    )
    with np.errstate(over="ignore"):
        rounded = entries.astype(np.float16)
    assert (
        np.mean((rounded == 0) & (entries != 0)) == 0.25
        and np.mean(~np.isfinite(rounded)) == 0.25
    )


def test_a_gradient_histogram_tells_nan_from_overflow():
    [axes] = figures.gradient_histogram({"g": [1.0, np.nan, np.inf, 1.0]}, FLOAT16).axes
    assert axes.get_title(loc="left") == "g: 0.0% underflow to 0, 25.0% overflow, 25.0% are NaN"


def test_a_block_shows_how_much_each_operation_saves_and_says_what_is_computed_again():
    figure = figures.block(BLOCK)
    bars = figure.axes[1].patches
    assert [bar.get_width() for bar in bars] == [GIB // 2, 2 * GIB, 0, GIB]
    assert [bar.get_x() for bar in bars] == [0, GIB // 2, 0, 0]
    assert [bar.get_facecolor()[3] for bar in bars] == [1, 0, 1, 1]
    labels = {t.get_text() for t in texts(figure)}
    assert {"512 MiB, 2.0 GiB recomputed", "nothing", "1.0 GiB", "scores"} <= labels


def test_a_box_that_is_not_chained_stands_below_the_chain_without_arrows():
    weights = {"part": "attention", "name": "weights", "bytes": GIB, "chained": False}
    with_weights = figures.block([*BLOCK[:2], weights, BLOCK[2]])
    alone = figures.block(BLOCK)
    arrows, boxes = (
        [sum(isinstance(p, kind) for p in f.axes[0].patches) for f in (alone, with_weights)]
        for kind in (FancyArrowPatch, FancyBboxPatch)
    )
    assert arrows == [7, 7] and boxes == [3, 4]


@pytest.mark.parametrize("chained", [[False, True], [False, False]])
def test_a_branch_of_a_block_begins_with_its_chain(chained):
    rows = [{"part": "MLP", "name": "a", "bytes": 1, "chained": value} for value in chained]
    with pytest.raises(ValueError, match="chained rows of MLP must come first"):
        figures.block(rows)


def test_a_tape_stacks_its_kinds_up_to_the_peak_and_marks_it():
    figure = figures.tape({"one": TAPE})
    (axes,) = figure.axes
    assert [c.get_label() for c in axes.collections] == ["parameters", "MLP", "gradients"]
    top = axes.collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == 5.0 and axes.lines[0].get_xydata().tolist() == [[2, 5.0]]
    [label] = [t for t in texts(figure) if t.get_text() == "peak 5 GiB"]
    draw(figure)
    peak = axes.transData.transform((2, 5.0))[1]
    assert Text.get_window_extent(label).y0 > peak, "the label covers the tape"


def test_a_kind_keeps_its_colour_whatever_else_is_in_the_picture():
    less = Object(bytes={"gradients": [1, 2]}, backward=None, peak=2)
    colors = [
        figures.tape({"step": step}).axes[0].collections[-1].get_facecolor().tolist()
        for step in (TAPE, less)
    ]
    assert colors[0] == colors[1]


def test_formats_phases_and_kinds_have_colours_of_their_own():
    kinds = [color for color, _ in style.KINDS.values()]
    every = [*style.PHASES.values(), *style.FORMATS.values(), *kinds]
    assert len({color.upper() for color in every}) == len(every)
    assert not set(style.COLORS) & {*style.PHASES.values(), *style.FORMATS.values()}


@pytest.mark.parametrize("name", [*style.PHASES, *style.FORMATS])
def test_a_format_or_a_phase_keeps_its_colour_in_every_place_of_every_picture(name):
    own = (style.PHASES | style.FORMATS)[name]
    for names in ([name, "a", "b"], ["a", "b", name]):
        i = names.index(name)
        [axes] = figures.lines({each: [(1, 1), (2, 2)] for each in names}, "x", "y").axes
        assert axes.lines[i].get_color() == own
        rows = [{"name": "case"} | dict.fromkeys(names, GIB)]
        for bars in (figures.memory_bars, figures.memory_breakdown):
            [axes] = bars(rows, values=names).axes
            assert to_hex(axes.patches[i].get_facecolor()).upper() == own
    scaled = figures.lines({"a": [(1, 1)], f"{name}, scaled": [(1, 1)]}, "x", "y")
    assert scaled.axes[0].lines[1].get_color() == own
    if name in style.FORMATS:
        peaks = {"float8": 1e15, name: 1e14}
        point = {"name": "product", "dtype": name, "intensity": 500.0, "rate": 1e13}
        [axes] = figures.roofline_plot(peaks, 1e12, [point]).axes
        assert [line.get_color() for line in axes.lines[1:]] == [own, own]


def test_a_part_of_a_bar_takes_the_colour_of_its_kind():
    values = ("old state", "place of the new state")
    [axes] = figures.memory_breakdown(
        [{"name": "kept"} | dict.fromkeys(values, GIB)],
        values=values,
        kinds={"place of the new state": "results"},
    ).axes
    assert to_hex(axes.patches[1].get_facecolor()).upper() == style.KINDS["results"][0]


def test_a_curve_says_the_value_of_each_baseline():
    [axes] = figures.trace([(1, 5.0), (9, 3.0)], "step", "loss", {"guessing": 5.55}).axes
    assert list(axes.lines[1].get_ydata()) == [5.55, 5.55]
    assert "guessing 5.55" in [text.get_text() for text in axes.texts]


def still_and_frames(page):
    """Returns the pictures of a moving picture: those in its HTML, and those in its script."""
    markup, script = page.split("<script>")
    stills = re.findall(r'src="data:image/png;base64,([^"]*)"', markup)
    [frames] = re.findall(r"frames = (\[.*?\]), labels", script)
    return [base64.b64decode(still) for still in stills], [
        base64.b64decode(frame) for frame in json.loads(frames)
    ]


def test_a_moving_picture_is_its_still_picture_without_a_script_and_holds_all_frames():
    pictures = {f"{n} layers": figures.lines({"a": [(1, n)]}, "x", "y") for n in (1, 2, 4)}
    moving = figures.moving(pictures, name="depth", still=1)
    page = moving._repr_html_()
    [still], frames = still_and_frames(page)
    assert still == frames[1] and len(set(frames)) == 3
    for frame in frames:
        with PIL.Image.open(io.BytesIO(frame)) as image:
            assert image.size == (750, 350) and len(image.getcolors()) > 4
    assert '["1 layers", "2 layers", "4 layers"]' in page and "http" not in page
    assert "data-lm-suppress-shortcuts" in page  # else JupyterLab takes the arrow keys
    assert "depth <b>2 layers</b>, one of 3 pictures" in page.split("<script>")[0]
    assert "3 frames" in repr(moving) and len(page) < 100_000


def test_a_lane_says_the_most_that_it_keeps_until_the_time_that_is_shown():
    # Both keep 1 from the time 0 on. From the time 1 on, device 0 keeps 2 and device 1 keeps 4.
    for until, most in ((0, set()), (1, {"1"}), (2, {"2", "4"}), (None, {"2", "4"})):
        figure = figures.lanes({"ring": LANES["ring"]}, until=until)
        written = {text.get_text().strip() for axes in figure.axes for text in axes.texts}
        assert written & {"1", "2", "4"} == most, until


def test_labels_of_a_moving_picture_cannot_end_its_script():
    pictures = {
        label: figures.lines({"a": [(1, 1)]}, "x", "y") for label in ("</script>", "<b>")
    }
    page = figures.moving(pictures, name="<i>", still=1)._repr_html_()
    assert page.count("</script>") == 1 and "<i>" not in page
    assert page.count("<b>") == 1  # that of the line above the still picture


def test_a_picture_that_cannot_move_is_refused():
    one = {"one": figures.lines({"a": [(1, 1)]}, "x", "y")}
    with pytest.raises(ValueError, match=r"frames=\['one'\] must hold at least two"):
        figures.moving(one)
    with pytest.raises(ValueError, match="still=2 must be the index of one of 2"):
        figures.moving(one | {"two": one["one"]}, still=2)


def table_of(explorer):
    """Returns the table in an explorer's HTML, as a list of dicts."""
    [data] = re.findall(r"chosen} =\n    (.*);\n", explorer._repr_html_())
    table = json.loads(data)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_an_explorer_stores_the_rows_that_it_was_given_and_only_the_columns_it_shows():
    stored = [{k: v for k, v in row.items() if v is not None} for row in table_of(explored())]
    given = [{k: v for k, v in row.items() if k != "other"} for row in EXPLORED]
    assert stored == given


def test_without_a_script_an_explorer_is_the_picture_of_its_first_selection():
    explorer = explored(first={"GPUs": 64})
    page = explorer._repr_html_()
    markup, script = page.split("<script>")
    [still] = re.findall(r'src="data:image/png;base64,([^"]*)"', markup)
    with PIL.Image.open(io.BytesIO(base64.b64decode(still))) as image:
        assert image.width == 750 and len(image.getcolors()) > 4
        assert image.height in (229, 230)  # 2.3 inches: Matplotlib 3.10 rounds 229.99... down
    assert "base64" not in script and "http" not in page and len(page) < 100_000
    assert page == explored(first={"GPUs": 64})._repr_html_(), "other bytes for the same rows"
    assert "8 rows" in repr(explorer) and "GPUs 64, network fast" in markup


@pytest.mark.parametrize("gpus", [8, 64])
@pytest.mark.parametrize("network", ["fast", "slow"])
def test_the_still_picture_of_each_selection_has_the_numbers_of_its_rows(gpus, network):
    figure = explored(first={"GPUs": gpus, "network": network}).picture()
    [axes] = figure.axes
    rows = [row for row in EXPLORED if (row["GPUs"], row["network"]) == (gpus, network)]
    assert [text.get_text() for text in axes.texts] == [
        row["time"] if isinstance(row["time"], str) else f"{row['time']:.1f}; {row['MFU']}"
        for row in rows
    ]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == [row[part] for row in rows if "work" in row for part in ("work", "bubble")]


# As much of a browser as the script of an explorer needs.
PAGE_FOR_NODE = """
class Element {
  constructor() { this.children = []; this.own = ""; }
  set textContent(text) { this.own = String(text); }
  get textContent() { return this.own + this.children.map(each => each.textContent).join("|"); }
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  setAttribute(name, text) { this[name] = String(text); }
  addEventListener(_, listener) { this.click = listener; }
  querySelector() { return this.children.length ? null : this; }
  all() { return this.children.flatMap(each => [each, ...each.all()]); }
}
const box = new Element();
globalThis.document = {createElement: () => new Element(), querySelectorAll: () => [box]};
SCRIPT
const buttons = box.all().filter(each => each.click), shown = [];
const press = text => buttons.find(each => each.textContent === text).click();
for (const gpus of ["64", "8"]) for (const network of ["slow", "fast"]) {
  press(gpus); press(network);
  const pressed = buttons.filter(each => each["aria-pressed"] === "true");
  const rows = box.all().filter(each => each.className === "row");
  shown.push([pressed.map(each => each.textContent), rows.map(row => row.textContent),
    rows.map(row => row.all().map(each => parseFloat((each.style || "").slice(7)))
      .filter(width => width > 0))]);
}
console.log(JSON.stringify(shown));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script of an explorer")
def test_the_buttons_of_an_explorer_reach_each_combination_and_show_its_numbers():
    script = re.search(r"<script>(.*)</script>", explored()._repr_html_(), re.DOTALL)[1]
    program = PAGE_FOR_NODE.replace("SCRIPT", script)
    output = subprocess.run(["node", "-"], input=program, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    shown = json.loads(output.stdout)
    assert [pressed for pressed, *_ in shown] == [
        [gpus, network] for gpus in ("64", "8") for network in ("slow", "fast")
    ]
    for (gpus, network), texts, widths in shown:
        rows = [
            row for row in EXPLORED if (str(row["GPUs"]), row["network"]) == (gpus, network)
        ]
        assert [text.split("|")[0] for text in texts] == [row["layout"] for row in rows]
        for row, text in zip(rows, texts, strict=True):
            if isinstance(row["time"], str):
                assert text.endswith(row["time"])
                continue
            parts = f"work {row['work']:.1f} + bubble {row['bubble']:.1f}; {row['MFU']}"
            assert f"{row['time']:.1f}" in text and text.endswith(parts)
        numbers = [row for row in rows if "work" in row]
        longest = max(row["time"] for row in numbers)
        expected = [80 * row[part] / longest for row in numbers for part in ("work", "bubble")]
        np.testing.assert_allclose(sum(widths, []), expected)


def test_two_explorers_do_not_share_an_id_and_a_text_cannot_end_their_script():
    pages = [explored(unit=unit)._repr_html_() for unit in ("ms", "</script><b>")]
    ids = {re.search(r'id="(explorer-\w+)"', page)[1] for page in pages}
    assert len(ids) == 2 and pages[1].count("</script>") == 1 and "<b>" not in pages[1]
    for page in pages:
        assert set(re.findall(r"explorer-\w+", page)) <= ids


def test_an_explorer_whose_rows_have_no_bars_shows_their_texts():
    rows = [{"GPUs": 8, "network": "fast", "layout": "data", "time": "does not fit"}]
    [axes] = explored(rows).picture().axes
    assert [text.get_text() for text in axes.texts] == ["does not fit"]


@pytest.mark.parametrize(
    "rows, changed, message",
    [
        ([], {}, "rows, settings"),
        (EXPLORED[:-1], {}, "one row for .* = .64, 'slow', 'pipe'"),
        (EXPLORED + EXPLORED[:1], {}, "one row for .* = .8, 'fast', 'data'"),
        (EXPLORED, {"settings": ["GPUs", "ports"]}, "'ports'.* must be columns"),
        (EXPLORED, {"parts": ["work"]}, "time=24.0 must be .* the sum of .'work'"),
        (EXPLORED, {"first": {"GPUs": 9}}, "first={'GPUs': 9} must select"),
        ([EXPLORED[0] | {"time": math.nan}], {}, "time=nan must be a finite number"),
    ],
)
def test_a_table_that_an_explorer_cannot_show_is_refused(rows, changed, message):
    with pytest.raises(ValueError, match=message):
        explored(rows, **changed)


def test_an_explorer_reads_numbers_of_numpy_and_needs_neither_parts_nor_a_note():
    rows = [
        {"n": np.int64(n), "name": "a", "time": time}
        for n, time in zip((1, 2), np.array([1.5, 0.0]), strict=True)
    ]
    explorer = figures.explorer(rows, settings=["n"], label="name", value="time", unit="s")
    assert table_of(explorer) == [
        {"n": 1, "name": "a", "time": 1.5},
        {"n": 2, "name": "a", "time": 0.0},
    ]
    assert [text.get_text() for text in explorer.picture().axes[0].texts] == ["1.5"]


def test_a_step_timeline_leaves_loops_out_and_shows_the_gap_between_their_operations():
    [axes] = figures.step_timeline(EVENTS).axes
    rows = [t.get_text() for t in axes.get_yticklabels()]
    assert rows == ["fusion", "dot", "any operation"]
    spans = [path.get_extents() for path in axes.collections[-1].get_paths()]
    # ms: white from 4 to 5
    assert [(round(box.x0, 6), round(box.x1, 6)) for box in spans] == [(0, 4), (5, 7), (9, 10)]


def test_a_phase_has_its_row_and_its_colour_whichever_takes_longest():
    looks = []
    for longest in ("dot", "fusion"):
        names = {longest: "backward"}
        [axes] = figures.step_timeline(
            EVENTS, row=lambda event, names=names: names.get(event.op.split(".")[0], "forward")
        ).axes
        rows = [t.get_text() for t in axes.get_yticklabels()]
        looks.append((rows, [tuple(c.get_facecolor()[0]) for c in axes.collections]))
    assert looks[0] == looks[1] and looks[0][0] == ["forward", "backward", "any operation"]


def test_a_step_timeline_begins_with_the_step_and_not_with_its_first_operation():
    late = [Object(**vars(event) | {"start": event.start + 1}) for event in EVENTS]
    [axes] = figures.step_timeline(late).axes
    assert axes.get_xlim()[0] == 0


def test_a_step_timeline_sums_the_rows_that_have_no_place():
    [axes] = figures.step_timeline(EVENTS, top=1).axes
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "fusion",
        "others",
        "any operation",
    ]
    assert [t.get_text() for t in axes.texts] == ["6.0 ms", "1.0 ms"]


def test_who_holds_what_has_a_rectangle_a_part_and_names_all_of_its_devices():
    cut, copies, vector, spread = PICTURES["who_holds_what"]().axes[:4]
    assert [t.get_text() for t in cut.texts] == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert [t.get_text() for t in copies.texts] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert [t.get_text() for t in vector.texts] == ["0-7"]
    corners = [
        (*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in cut.patches
    ]
    assert corners == [(2 * column, 2 * row, 2, 2) for row in range(2) for column in range(4)]
    assert sum(patch.get_width() * patch.get_height() for patch in spread.patches) == 8
    assert cut.get_ylim() == (4, 0)  # the first row at the top


def test_no_two_devices_of_a_host_look_the_same():
    for axes in PICTURES["who_holds_what"]().axes[:4]:
        looks = [(patch.get_facecolor(), patch.get_hatch()) for patch in axes.patches]
        assert len(set(looks)) == len(looks)
    eight = {"x": [Object(device=d, ranges=((d, d + 1), (0, 1))) for d in range(8)]}
    colors = {patch.get_facecolor() for patch in figures.who_holds_what(eight).axes[0].patches}
    assert len(colors) == 8


def test_a_forward_and_a_backward_keep_their_colours_in_schedules_lanes_and_timelines():
    def looks(figure):
        return {p.get_facecolor() for p in figure.axes[0].patches if p.get_width() > 0}

    table = TABLES["in one go"]
    of_schedule = looks(figures.schedule({"": table}))
    of_lanes = looks(figures.lanes({"": figures.lanes_of_schedule(table)}))
    phases = {to_rgba(figures.PHASES[name]) for name in ("forward", "backward")}
    assert of_schedule == of_lanes == phases


def test_an_array_that_has_no_flat_picture_is_refused():
    with pytest.raises(
        ValueError, match=r"arrays\['x'\] must have at most two dimensions .* it has 3"
    ):
        figures.who_holds_what({"x": [Object(device=0, ranges=((0, 1), (0, 1), (0, 1)))]})


def test_device_numbers_are_spelled_in_runs():
    assert [devices.spell(d) for d in ([3], [1, 0], [0, 4], [5, 4, 0, 1])] == [
        "3",
        "0-1",
        "0, 4",
        "0-1, 4-5",
    ]


def test_time_against_devices_is_logarithmic_and_says_where_a_host_ends():
    [axes] = PICTURES["seconds_by_devices"]().axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [8]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["2", "8\none host", "64"]


def test_ports_that_a_group_uses_are_filled():
    white = (1.0, 1.0, 1.0, 1.0)
    filled = []
    for axes in PICTURES["hosts"]().axes:
        small = [patch for patch in axes.patches if abs(patch.get_width() - 0.6) < 1e-9]
        small.sort(key=lambda patch: patch.get_x())
        filled.append([number for number, p in enumerate(small) if p.get_facecolor() != white])
    assert filled == [[0, 3, 4, 7], list(range(8)), [1, 5], []]


def test_rings_that_leave_each_host_at_another_gpu_use_every_port_in_both_directions():
    used = {name: clusters.ports(rings, 4) for name, rings in GROUPS.items()}
    assert used["whole hosts"] == {gpu: {"out", "in"} for gpu in range(8)}
    assert used["one ring"] == {3: {"out"}, 4: {"in"}, 7: {"out"}, 0: {"in"}}
    assert used["inside a host"] == {}


def test_the_masks_of_two_layouts_fit_into_their_picture():
    many = [
        {"queries": q, "keys": k, "device": q // 2, "step": 0}
        for q in range(8)
        for k in range(q + 1)
    ]
    figure = figures.attention_pairs({"in order": many, "zigzag": many})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn, inches = figure.get_tightbbox(canvas.get_renderer()), figure.get_size_inches()
    assert drawn.x0 >= 0 and drawn.y0 >= 0
    assert drawn.x1 <= inches[0] and drawn.y1 <= inches[1]


def test_the_axes_of_a_mask_name_its_parts():
    [axes] = figures.attention_pairs({"in order": PAIRS}, part="tile").axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tile of the keys", "tile of the queries")


def test_a_step_of_a_ring_shows_its_own_pairs_strongly_and_later_ones_not_at_all():
    every = PICTURES["attention_pairs"]().axes[0].patches
    assert [(p.get_x() + 0.5, p.get_y() + 0.5) for p in every] == [(0, 0), (0, 1), (1, 1)]
    assert len(figures.attention_pairs({"in order": PAIRS}, step=0).axes[0].patches) == 2
    last = figures.attention_pairs({"in order": PAIRS}, step=1).axes[0].patches
    assert [p.get_alpha() == 1 for p in last] == [False, True, False]


def test_a_token_without_a_place_has_a_cross_and_an_empty_place_a_hatch():
    axes = PICTURES["token_routing"]().axes[0]
    ends = [line.get_xdata() for line in axes.lines]
    assert len(ends) == 3 + 2  # three tokens with a place, and one cross
    places = [p for p in axes.patches if p.get_y() == 0]
    assert [bool(p.get_hatch()) for p in places] == [False, False, False, True]


def test_what_runs_while_a_device_sends_stands_below_it():
    waits, ring = PICTURES["overlap"]().axes
    for axes, spans in ((waits, [(0, 20), (20, 40)]), (ring, [(0, 10), (0, 20), (20, 20)])):
        np.testing.assert_allclose(
            [(box.get_x(), box.get_width()) for box in axes.patches], spans, atol=1e-9
        )
    assert waits.get_xlim() == ring.get_xlim()
    assert [axes.get_title("left") for axes in (waits, ring)] == [
        "waits: 60.0 µs",
        "ring: 40.0 µs",
    ]
    assert waits.patches[0].get_hatch() != waits.patches[1].get_hatch()


def test_time_is_in_milliseconds_where_titles_say_milliseconds():
    slow = figures.overlap({"slow": {"sends": [(0.0, 2e-3), (3e-3, 1e-3)]}}).axes[0]
    assert (slow.get_title("left"), slow.get_xlabel()) == ("slow: 4.0 ms", "time (ms)")
    assert [(box.get_x(), box.get_width()) for box in slow.patches] == [(0, 2), (3, 1)]


def test_a_schedule_has_a_cell_for_all_that_is_done_as_long_as_it_takes():
    one_go, split, chunks = PICTURES["schedule"]().axes
    placed = [
        [(p.get_x(), round(p.get_y() + 0.45), p.get_width()) for p in axes.patches]
        for axes in (one_go, split, chunks)
    ]
    assert placed[0] == [(0, 0, 1), (4, 0, 2), (1, 1, 1), (2, 1, 2)]
    assert placed[1] == [(0, 0, 1), (3, 0, 1), (4, 0, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)]
    assert placed[2] == [(0, 0, 0.5), (0.5, 0, 0.5), (1, 0, 1), (2, 0, 1)]
    assert one_go.get_xlim() == split.get_xlim() == chunks.get_xlim() == (0, 6)
    assert one_go.get_ylim()[0] > one_go.get_ylim()[1]  # device 0 at the top


def test_cells_of_a_schedule_say_microbatch_and_chunk_if_they_are_wide_enough():
    *_, chunks = PICTURES["schedule"]().axes
    assert [t.get_text() for t in chunks.texts] == ["0", "0'", "0'", "0"]
    many = [[cell("F", m) for m in range(200)]]
    assert not figures.schedule({"narrow": many}).axes[0].texts


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((110, 1100), ["100", "200", "500", "1000"]),
        ((0.3, 6), ["0.5", "1", "2", "5"]),
        ((3e10, 9e11), ["5e+10", "1e+11", "2e+11", "5e+11"]),
    ],
)
def test_a_short_logarithmic_axis_has_several_plain_labels(values, labels):
    points = list(enumerate(values))
    [axes] = figures.lines({"a": points}, "x", "y", logy=True).axes
    low, high = axes.get_ylim()
    shown = [axes.yaxis.get_major_formatter()(y) for y in axes.get_yticks() if low <= y <= high]
    assert set(labels) <= set(shown)


def test_a_long_logarithmic_axis_has_powers_of_ten_alone():
    [axes] = figures.lines({"a": [(0, 1e-3), (1, 10.0)]}, "x", "y", logy=True).axes
    ticks = [y for y in axes.get_yticks() if 1e-3 <= y <= 10]
    np.testing.assert_allclose(ticks, [1e-3, 1e-2, 0.1, 1, 10])


def test_a_lane_shows_what_it_does_and_how_much_it_keeps():
    ring, table = PICTURES["lanes"]().axes
    blocks = [(box.get_x(), box.get_width()) for box in ring.patches if box.get_width() > 0]
    assert blocks[:3] == [(0, 1), (0, 1), (1, 1)]
    assert {"a", "b", " 2 shards", " 4 shards"} <= {t.get_text() for t in ring.texts}
    assert ring.get_xlim() == table.get_xlim() == (0, 6)


def test_lanes_of_a_schedule_keep_a_microbatch_from_its_forward_to_its_last_backward():
    one_go = figures.lanes_of_schedule(TABLES["in one go"])
    assert one_go["device 0"].blocks == [(0, 1, "forward", "0"), (4, 2, "backward", "0")]
    assert one_go["device 0"].kept == [(0, 0), (0, 1), (6, 0)]
    split = figures.lanes_of_schedule(TABLES["split"])["device 1"]
    assert [kind for _, _, kind, _ in split.blocks] == [
        "forward",
        "backward to the input",
        "backward to the weights",
    ]
    assert split.kept == [(0, 0), (1, 1), (3, 1), (4, 0)]
    chunks = figures.lanes_of_schedule(TABLES["two chunks"])["device 0"]
    assert max(live for _, live in chunks.kept) == 2


def test_lanes_of_layers_hold_a_layer_from_the_start_of_its_gather_until_it_is_computed():
    # the second gather runs beside the first layer, the third begins when the second is done
    rows = figures.lanes_of_layers([(0, 1), (1, 1), (5, 1)], [(1, 2), (3, 2), (6, 2)], 10)
    assert rows["gather"].blocks[1] == (1, 1, "gather", "1")
    assert rows["compute"].blocks[2] == (6, 2, "compute", "2")
    over_time = dict(rows["memory"].kept)
    assert over_time == {0: 10, 1: 20, 3: 10, 5: 10, 8: 0}
    with pytest.raises(ValueError, match="gathers has 1 layers, computes 0"):
        figures.lanes_of_layers([(0, 1)], [], 10)


def test_lanes_of_a_step_add_up_to_its_parts_and_hidden_traffic_stands_above_computing():
    parts = {"products": 4.0, "memory": 2.0, "bubble": 2.0, "optimizer": 0.5}
    parts |= {"data": 2.0, "pipe": 1.0, "tensor": 0.25}
    hidden = {"data": 1.0, "pipe": 0.75, "tensor": 3.0}
    rows = figures.lanes_of_step(parts, hidden)
    blocks = [(name, *block) for name, lane in rows.items() for block in lane.blocks]
    end = max(start + seconds for _, start, seconds, *_ in blocks)
    assert end == pytest.approx(sum(parts.values()) - parts["optimizer"])
    [(begin, busy)] = [block[1:3] for block in blocks if block[3] == "computes"]
    for axis in ("data", "pipe", "tensor"):
        for kind, expected in (("exposed", parts[axis]), ("hidden", hidden[axis])):
            drawn = [block[1:3] for block in blocks if (block[0], block[3]) == (axis, kind)]
            assert sum(seconds for _, seconds in drawn) == pytest.approx(expected)
            beside = [begin <= start and start + s <= begin + busy for start, s in drawn]
            assert all(beside) if kind == "hidden" else not any(beside)
    waits = [seconds for *_, seconds, kind, _ in blocks if kind == "bubble"]
    assert sum(waits) == parts["bubble"]


def test_lanes_of_a_step_refuse_traffic_that_has_no_lane():
    nothing = dict.fromkeys(("products", "memory", "bubble", "data", "pipe", "tensor"), 0.0)
    with pytest.raises(ValueError, match=r"no traffic along \['context'\]"):
        figures.lanes_of_step(nothing | {"context": 1.0}, nothing)


def test_a_bar_of_waiting_is_white_whatever_its_number():
    assert {style.fill(i, style.IDLE)["facecolor"] for i in range(4)} == {"white"}


def test_lanes_until_a_time_hide_what_is_later_and_keep_their_axes():
    early, late = (figures.lanes(LANES, until=until) for until in (1, None))
    for a, b in zip(early.axes, late.axes, strict=True):
        assert a.get_xlim() == b.get_xlim() and a.get_ylim() == b.get_ylim()
        assert len(a.patches) < len(b.patches)


def test_labels_that_would_collide_are_spread_in_their_order():
    low, high, middle = style.spread([0.50, 0.99, 0.51], gap=0.1)
    assert low == 0.50 and middle == pytest.approx(0.60) and high == pytest.approx(0.99)
    assert style.spread([0.99, 0.98], gap=0.1) == pytest.approx([1.0, 0.9])


def test_units_are_chosen_for_the_reader():
    assert [style.size(b) for b in (20.6 * GIB, 96 * 2**20, 2048, 12)] == [
        "20.6 GiB",
        "96.0 MiB",
        "2.0 KiB",
        "12 B",
    ]
    assert [style.duration(s) for s in (2.1, 0.73, 3.4e-6)] == ["2.1 s", "730 ms", "3.4 µs"]
    assert style.shorten("jit(step)/a/very/long/scope", 12) == "jit(…g/scope"


def test_in_a_notebook_use_style_makes_figures_display_as_png():
    # no database of the reader's own, which IPython 7 would leave open
    quiet = {"HistoryManager": {"enabled": False}}
    shell = InteractiveShell.instance(config=Config(quiet))
    try:
        figures.use_style()
        data, _ = shell.display_formatter.format(PICTURES["lines"]())
        assert data["image/png"]
    finally:
        type(shell).clear_instance()


@pytest.mark.parametrize(
    "draw_nothing",
    [
        lambda: figures.attention_pairs({}),
        lambda: figures.token_routing([], [], experts=2, capacity=1),
        lambda: figures.block([]),
        lambda: figures.formats([]),
        lambda: figures.gradient_histogram({"g": [0.0, np.nan]}, FLOAT16),
        lambda: figures.hosts({}),
        lambda: figures.hosts({"nobody": [[]]}),
        lambda: figures.progress([], limit=1, small=1, fast=1),
        lambda: figures.rungs([], limit=1),
        lambda: figures.lines({}, "x", "y"),
        lambda: figures.memory_bars([]),
        lambda: figures.residuals([]),
        lambda: figures.step_timeline([]),
        lambda: figures.lanes({}),
        lambda: figures.lanes({"idle": {"device 0": figures.Lane([])}}),
        lambda: figures.overlap({}),
        lambda: figures.overlap({"idle": {"sends": []}}),
        lambda: figures.schedule({}),
        lambda: figures.schedule({"idle": [[None]]}),
        lambda: figures.seconds_by_devices({}),
        lambda: figures.tape({}),
        lambda: figures.tape({"empty": {"bytes": {}, "backward": None, "peak": 0}}),
        lambda: figures.tradeoff([]),
        lambda: figures.who_holds_what({}),
        lambda: figures.who_holds_what({"x": []}),
    ],
)
def test_a_picture_of_nothing_is_refused(draw_nothing):
    with pytest.raises(ValueError, match="nothing to draw|was the step traced"):
        draw_nothing()


def test_a_row_that_lacks_a_value_is_refused_by_name():
    with pytest.raises(ValueError, match=r"lacks \['compiled'\]"):
        figures.memory_bars([{"name": "a", "published": 1}])
