"""One of each picture, and its pixels at the versions of requirements/reference.txt.

    python tests/helpers/gallery.py        stores the pixels of today's pictures

Look at every picture that changed before you store it.
"""

import functools
import hashlib
import json
import platform
from pathlib import Path
from types import SimpleNamespace as Object

import matplotlib
import numpy as np
from matplotlib import ft2font
from matplotlib.backends.backend_agg import FigureCanvasAgg

from course_lib.measure.units import GIB, MIB
from course_lib.one_device import mixed_precision
from course_lib.show import figures

STORED = Path(__file__).parents[1] / "data" / "pictures.json"
# Letters are drawn by FreeType, with the font that is part of matplotlib.
HERE = {
    "matplotlib": matplotlib.__version__,
    "FreeType": ft2font.__freetype_version__,
    "machine": f"{platform.system()} {platform.machine()}",
}

COLUMNS = {
    "name": ("no remat, no scan", "remat Block, scan"),
    "published": (20.6 * GIB, None),
    "compiled": (20.2 * GIB, 5.0 * GIB),
    "arguments": (2.5 * GIB, 2.5 * GIB),
    "temporaries": (17.7 * GIB, 2.5 * GIB),
    "compute_seconds": (0.3, 0.4),
    "memory_seconds": (0.5, 0.2),
    "published_seconds": (2.1, None),
    "recomputed": (0.0, 33.0),
    "memory": (20.2 * GIB, 5.0 * GIB),
}
ROWS = [{key: values[i] for key, values in COLUMNS.items()} for i in range(2)]
SERIES = [
    {"name": str(n), "memory": n * GIB, "recomputed": n, "series": series}
    for n, series in ((1, "tokens"), (2, "tokens"), (3, "vocabulary"))
]
ARRAYS = [
    {
        "bytes": 2**20 * n,
        "shape": (n, 256, 1024),
        "dtype": "float32",
        "why": f"output of op {n}",
    }
    for n in (8, 4, 4, 2, 1)
]
EVENTS = [
    Object(op=op, start=start, duration=end - start, self_time=own, container=op == "while.1")
    for op, start, end, own in [
        ("while.1", 0.0, 0.008, 0.001),
        ("fusion.1", 0.0, 0.004, 0.004),
        ("fusion.2", 0.005, 0.007, 0.002),
        ("dot.3", 0.009, 0.010, 0.001),
    ]
]
FORMATS = [mixed_precision.describe(name) for name in ("float32", "float16", "bfloat16")]
FLOAT16 = FORMATS[1]
LOST = [2.0**-30, 2.0**-26, 2.0**-20, 1.0, 0.0, np.inf, -1e6, -(2.0**-3), np.nan]

# An array of shape (4, 8), cut in two ways over two rows of four devices, and a vector that all
# hold.
HOLDINGS = {
    "P('data', 'tensor')": [
        Object(device=4 * r + c, ranges=((2 * r, 2 * r + 2), (2 * c, 2 * c + 2)))
        for r in range(2)
        for c in range(4)
    ],
    "P(None, 'tensor')": [
        {"device": d, "ranges": [[0, 4], [2 * (d % 4), 2 * (d % 4) + 2]]} for d in range(8)
    ],
    "P()": [Object(device=d, ranges=((0, 8),)) for d in range(8)],
    "P(('data', 'tensor'))": [Object(device=d, ranges=((d, d + 1),)) for d in range(8)],
}


def op(text):
    """Returns an op of a schedule: "F0", or "F0'" of the next chunk; None for ""."""
    if not text:
        return None
    kind = text.rstrip("0'")
    return Object(kind=kind, microbatch=0, chunk=text.count("'"))


# Two devices: backwards in one go, then split; and one device with two chunks.
TABLES = {
    name: [[op(text) for text in row] for row in rows]
    for name, rows in {
        "in one go": [["F0", "", "", "", "-0", "BW0"], ["", "F0", "-0", "BW0", "", ""]],
        "split": [["F0", "", "", "B0", "W0"], ["", "F0", "B0", "W0", ""]],
        "two chunks": [["F0", "F0'", "-0'", "BW0'", "-0", "BW0"]],
    }.items()
}
LANES = {
    "ring": {
        "device 0": figures.Lane([(0, 1, "sends", "a")], [(0, 1), (1, 2)]),
        "device 1": figures.Lane([(0, 1, "sends", "b"), (1, 1, "adds", "a")], [(0, 1), (1, 4)]),
    },
    "table": figures.lanes_of_schedule(TABLES["in one go"]),
}
PASS = {"passes": {"ring": [(1, "device 0", 1, "device 1")]}, "amount": "shards"}
PARTS = {"products": 4.0, "memory": 2.0, "bubble": 2.0, "optimizer": 0.5}
PARTS |= {"data": 2.0, "pipe": 1.0, "tensor": 0.25}
HIDDEN = {"data": 1.0, "pipe": 0.75, "tensor": 3.0}
SPANS = {
    "waits": {"sends": [(0.0, 2e-5)], "multiplies": [(2e-5, 4e-5)]},
    "ring": {"sends": [(0.0, 1e-5)], "multiplies": [(0.0, 2e-5), (2e-5, 2e-5)]},
}
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
GAME = {"limit": 21 * GIB, "small": 4 * GIB, "fast": 0.4}
INTENSITIES = [
    {"name": name, "dtype": dtype, "intensity": intensity, "rate": rate}
    for name, dtype, intensity, rate in [
        ("a product", "float32", 500.0, 5e13),
        ("a product", "bfloat16", 1000.0, 1e14),
        ("a sum", "float32", 0.1, 1e11),
        ("a sum", "bfloat16", 0.2, 2e11),
    ]
]
PAIRS = [
    {"queries": queries, "keys": keys, "device": queries, "step": queries - keys}
    for queries, keys in [(0, 0), (1, 0), (1, 1)]
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
    {"part": "attention", "name": "weights", "bytes": GIB, "chained": False},
    {"part": "MLP", "name": "hidden layer", "bytes": GIB},
]
CURVE, DIVERGED = ([(0, 8.0), (9, 4.5), (99, last)] for last in (4.6, np.nan))
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


def by_kind(event):
    return {"dot.3": "matmul", "fusion.1": "fill"}.get(event.op, "a kernel")


def by_phase(event):
    return "backward" if event.op == "dot.3" else "forward"


TILED = [{"name": n, "bytes": 64, "tiles": range(3), "now": [i]} for i, n in enumerate("qk")]
make = functools.partial
PICTURES = {
    "attention_pairs": make(figures.attention_pairs, {"in order": PAIRS}, title="a mask"),
    "attention_pairs, step": make(figures.attention_pairs, {"x": PAIRS}, step=1, part="tile"),
    "block": make(figures.block, BLOCK, title="a block"),
    "block, most": make(figures.block, BLOCK, most=6 * GIB, title="a block"),
    "dependencies": make(figures.dependencies, {"causal": np.tri(4)}, x="key", y="query"),
    "explorer": lambda: explored().picture(),
    "explorer, first": lambda: explored(first={"GPUs": 64, "network": "slow"}).picture(),
    "formats": make(figures.formats, FORMATS),
    "gradient_histogram": make(
        figures.gradient_histogram, {"g": [1e-9, 1], "h": LOST}, FLOAT16
    ),
    "hosts": make(figures.hosts, GROUPS, gpus_per_host=4),
    "lanes": make(figures.lanes, LANES, title="two", **PASS),
    "lanes, until": make(figures.lanes, LANES, until=1, **PASS),
    "lanes, step": lambda: figures.lanes({"step": figures.lanes_of_step(PARTS, HIDDEN)}),
    "lines": make(figures.lines, {"a": [(1, 1), (4, 4)], "b": CURVE}, "x", "s", logx=True),
    "lines, ylim": make(figures.lines, {"a": CURVE, "b": DIVERGED}, "x", "y", ylim=(5, 9)),
    "lines, short": make(figures.lines, {"a": [(0, 0.3), (1, 6)]}, "x", "y", logy=True),
    "lines, long": make(figures.lines, {"a": [(0, 1e-3), (1, 10)]}, "x", "y", logy=True),
    "loss_curve": make(figures.loss_curve, CURVE, DIVERGED, {"bigram": 4.9, "unigram": 6.3}),
    "memory_levels": make(figures.memory_levels, {"HBM": TILED, "registers": TILED[:1]}),
    "memory_bars": make(figures.memory_bars, ROWS, capacity=24 * GIB),
    "memory_breakdown": make(figures.memory_breakdown, ROWS),
    "memory_breakdown, MiB": make(
        figures.memory_breakdown,
        [{"name": str(n), "old": n * MIB, "new": 4 * MIB} for n in (540, 5)],
        values=("old", "new"),
        kinds={"new": "results"},
    ),
    "overlap": make(figures.overlap, SPANS, title="a product"),
    "overlap, ms": make(figures.overlap, {"x": {"sends": [(0.0, 2e-3), (3e-3, 1e-3)]}}),
    "progress": make(figures.progress, VERSIONS, **GAME),
    "progress, next": make(figures.progress, VERSIONS, **GAME, next_target=(0.3, 3 * GIB)),
    "residuals": make(figures.residuals, ARRAYS),
    "residuals, top": make(figures.residuals, ARRAYS, top=2),
    "roofline": make(figures.roofline, ROWS),
    "roofline_plot": make(
        figures.roofline_plot, {"float32": 5e13, "bfloat16": 1e14}, 1e12, INTENSITIES
    ),
    "rungs": make(figures.rungs, VERSIONS, limit=21 * GIB, title="steps"),
    "rungs, GB": make(figures.rungs, VERSIONS, unit="GB", first=5),
    "schedule": make(figures.schedule, TABLES),
    "schedule, narrow": make(figures.schedule, {"narrow": [[op("F0")] * 200]}),
    "step_timeline": make(figures.step_timeline, {"a": EVENTS, "b": EVENTS[2:]}, by_kind),
    "step_timeline, busy": make(figures.step_timeline, {"a": EVENTS}, title="one step"),
    "step_timeline, phases": make(figures.step_timeline, {"a": EVENTS}, by_phase),
    "tape": make(figures.tape, {"one": TAPE, "two": vars(TAPE)}, title="two steps"),
    "token_routing": make(
        figures.token_routing, [0, 1, 0, 0], [0, 0, 1, -1], experts=2, capacity=2, title="two"
    ),
    "trace": make(
        figures.trace, [(n, 4e-4 * 0.99**n) for n in range(300)], "n", "rate", {"highest": 4e-4}
    ),
    "tradeoff": make(figures.tradeoff, [*ROWS, ROWS[1] | {"name": "a neighbour"}]),
    "tradeoff, series": make(figures.tradeoff, [ROWS[0], *SERIES], logy=True),
    "who_holds_what": make(figures.who_holds_what, HOLDINGS, title="(4, 8) on 2 x 4 devices"),
}


@functools.cache
def drawn(name):
    """Returns a picture that has been drawn, and the digest of its pixels."""
    figures.use_style()
    figure = PICTURES[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return figure, hashlib.sha256(canvas.buffer_rgba()).hexdigest()[:16]


if __name__ == "__main__":
    pixels = {name: drawn(name)[1] for name in PICTURES}
    STORED.write_text(json.dumps({"at": HERE, "pixels": pixels}, indent=1) + "\n")
