"""Laws of every picture: its pixels are those of the gallery, and a reader can read it, without
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

import gallery
import matplotlib.pyplot as plt
import numpy as np
import PIL.Image
import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.colors import to_hex
from matplotlib.text import Annotation, Text
from traitlets.config import Config

from course_lib.measure.units import GIB, MIB
from course_lib.show import figures
from course_lib.show.figures import style

STORED = json.loads(gallery.STORED.read_text())


@pytest.fixture(autouse=True)
def styled():
    figures.use_style()


def test_the_gallery_has_every_picture():
    not_pictures = {"Lane", "PHASES", "moving", "use_style"}
    not_pictures |= {"lanes_of_layers", "lanes_of_schedule", "lanes_of_step"}
    assert {name.partition(",")[0] for name in gallery.PICTURES} | not_pictures == set(
        figures.__all__
    )
    assert set(STORED["pixels"]) == set(gallery.PICTURES)


@pytest.mark.skipif(
    gallery.HERE != STORED["at"], reason=f"pixels are stored for {STORED['at']} alone"
)
@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_has_the_pixels_of_the_gallery(name, tmp_path):
    figure, pixels = gallery.drawn(name)
    if pixels != STORED["pixels"][name]:
        figure.savefig(tmp_path / "now.png")
        pytest.fail(
            f"look at {tmp_path}/now.png; tests/helpers/gallery.py says how to store it"
        )


def texts(figure):
    """Yields each text that is seen, and its box."""
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks() + axis.get_minor_ticks():
                if not axes.axison or not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible() and text not in hidden:
            box = Text if isinstance(text, Annotation) else type(text)
            yield text, box.get_window_extent(text)


@pytest.mark.parametrize("name", gallery.PICTURES)
def test_letters_are_large_enough_lie_inside_and_do_not_cover_each_other(name):
    figure, _ = gallery.drawn(name)
    width, height = figure.get_size_inches() * figure.dpi
    seen = list(texts(figure))
    for text, box in seen:
        assert text.get_fontsize() >= 9
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
    for (one, a), (other, b) in itertools.combinations(seen, 2):
        shared = (min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0))
        assert min(shared) <= 1, f"{one.get_text()!r} covers {other.get_text()!r}: {shared}"


BARS = [
    "formats",
    "lanes",
    "memory_bars",
    "memory_breakdown",
    "overlap",
    "roofline",
    "schedule",
]


@pytest.mark.parametrize("name", BARS)
def test_bars_of_different_kinds_have_different_hatches(name):
    for axes in gallery.drawn(name)[0].axes:
        bars = [patch for patch in axes.patches if patch.get_width() > 0]
        kinds = {(patch.get_facecolor(), patch.get_hatch()) for patch in bars}
        assert len({hatch for _, hatch in kinds}) == len(kinds) >= 2


def test_lines_points_and_devices_that_share_a_colour_differ_in_shape_or_hatch():
    strokes = {(style.stroke(i)["color"], style.stroke(i)["marker"]) for i in range(14)}
    looks = {(style.device(i)["facecolor"], style.device(i)["hatch"]) for i in range(56)}
    assert (len(strokes), len(looks)) == (14, 56)
    assert len({style.stroke(i)["marker"] for i in range(14)}) == 14


def test_a_format_a_phase_and_a_kind_keep_a_colour_of_their_own_in_each_place():
    own = style.PHASES | style.FORMATS | {name: c for name, (c, _) in style.KINDS.items()}
    assert len({color.upper() for color in own.values()}) == len(own)
    assert not set(style.COLORS) & {*style.PHASES.values(), *style.FORMATS.values()}
    for name, color in own.items():
        for i in range(8):
            assert style.color(i, name) == style.fill(i, name)["facecolor"] == color
            assert style.stroke(i, name)["color"] == color
    assert style.color(3, "float16, scaled") == style.FORMATS["float16"]
    assert {style.fill(i, style.IDLE)["facecolor"] for i in range(8)} == {"white"}


def test_a_forward_and_a_backward_keep_their_colours_in_schedules_lanes_and_timelines():
    table = gallery.TABLES["in one go"]
    lanes = figures.lanes({"": figures.lanes_of_schedule(table)})
    phases = {figures.PHASES[name].upper() for name in ("forward", "backward")}
    for figure in (figures.schedule({"": table}), lanes):
        bars = [bar for bar in figure.axes[0].patches if bar.get_width() > 0]
        assert {to_hex(bar.get_facecolor()).upper() for bar in bars} == phases
    [axes] = gallery.drawn("step_timeline, phases")[0].axes
    first = [to_hex(drawn.get_facecolor()[0]).upper() for drawn in axes.collections]
    assert set(first[:2]) == phases


def test_pictures_leave_nothing_open_and_are_the_same_twice():
    first, second = (gallery.drawn.__wrapped__("memory_bars")[1] for _ in range(2))
    assert first == second and plt.get_fignums() == []


def test_lanes_of_a_schedule_keep_a_microbatch_from_its_forward_to_its_last_backward():
    one_go, split, chunks = map(figures.lanes_of_schedule, gallery.TABLES.values())
    assert one_go["device 0"].blocks == [(0, 1, "forward", "0"), (4, 2, "backward", "0")]
    assert one_go["device 0"].kept == [(0, 0), (0, 1), (6, 0)]
    kinds = [kind for _, _, kind, _ in split["device 1"].blocks]
    assert kinds == ["forward", "backward to the input", "backward to the weights"]
    assert split["device 1"].kept == [(0, 0), (1, 1), (3, 1), (4, 0)]
    assert max(live for _, live in chunks["device 0"].kept) == 2


def test_lanes_of_layers_hold_a_layer_from_the_start_of_its_gather_until_it_is_computed():
    # the second gather runs beside the first layer, the third begins when the second is done
    rows = figures.lanes_of_layers([(0, 1), (1, 1), (5, 1)], [(1, 2), (3, 2), (6, 2)], 10)
    assert rows["gather"].blocks[1] == (1, 1, "gather", "1")
    assert rows["compute"].blocks[2] == (6, 2, "compute", "2")
    assert dict(rows["memory"].kept) == {0: 10, 1: 20, 3: 10, 5: 10, 8: 0}


def test_lanes_of_a_step_add_up_to_its_parts_and_hidden_traffic_stands_above_computing():
    parts, hidden = gallery.PARTS, gallery.HIDDEN
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
    assert sum(block[2] for block in blocks if block[3] == "bubble") == parts["bubble"]


def test_labels_that_would_collide_are_spread_in_their_order():
    low, high, middle = style.spread([0.50, 0.99, 0.51], gap=0.1)
    assert low == 0.50 and middle == pytest.approx(0.60) and high == pytest.approx(0.99)
    assert style.spread([0.99, 0.98], gap=0.1) == pytest.approx([1.0, 0.9])


def test_units_are_chosen_for_the_reader():
    sizes = [style.size(n) for n in (20.6 * GIB, 96 * MIB, 2048, 12)]
    assert sizes == ["20.6 GiB", "96.0 MiB", "2.0 KiB", "12 B"]
    times = [style.duration(s) for s in (2.1, 0.73, 3.4e-6)]
    assert times == ["2.1 s", "730 ms", "3.4 µs"]


def test_in_a_notebook_use_style_makes_figures_display_as_png():
    # no database of the reader's own, which IPython 7 would leave open
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        figures.use_style()
        data, _ = shell.display_formatter.format(gallery.drawn("rungs")[0])
        assert data["image/png"]
    finally:
        type(shell).clear_instance()


def moving(name="depth"):
    frames = {n: figures.lines({"a": [(1, n)]}, "x", "y") for n in (1, 2)}
    return figures.moving({f"{n} {name}": f for n, f in frames.items()}, name=name, still=1)


def parts(page):
    """Returns a page's HTML, the size and the colours of its picture, and its script."""
    assert "http" not in page and len(page) < 100_000
    markup, script = page.split("<script>")
    [still] = re.findall(r'src="data:image/png;base64,([^"]*)"', markup)
    with PIL.Image.open(io.BytesIO(base64.b64decode(still))) as image:
        return markup, image.size, len(image.getcolors()), script, still


def test_without_a_script_a_moving_picture_is_its_still_picture_and_holds_all_frames():
    markup, size, colors, script, still = parts(moving()._repr_html_())
    frames = json.loads(re.findall(r"frames = (\[.*?\]), labels", script)[0])
    assert still == frames[1] and len(set(frames)) == 2 and size == (750, 350) and colors > 4
    assert "data-lm-suppress-shortcuts" in script  # else JupyterLab takes the arrow keys
    assert "depth <b>2 depth</b>, one of 2 pictures" in markup


def test_without_a_script_an_explorer_is_the_picture_of_its_first_selection():
    page = gallery.explored(first={"GPUs": 64})._repr_html_()
    markup, size, colors, script, _ = parts(page)
    assert size in [(750, 229), (750, 230)] and colors > 4  # 229.99...: 3.10 rounds it down
    assert "base64" not in script and "GPUs 64, network fast" in markup
    assert page == gallery.explored(first={"GPUs": 64})._repr_html_()


@pytest.mark.parametrize("shown", [moving, lambda text: gallery.explored(unit=text)])
def test_no_text_ends_a_script_early_and_two_pages_share_no_id(shown):
    pages = [shown(text)._repr_html_() for text in ("plain", "</script><i>")]
    ids = [set(re.findall(r"explorer-\w+", page)) for page in pages]
    assert not ids[0] & ids[1] and max(map(len, ids)) <= 1
    for page in pages:
        assert page.count("</script>") == 1 and "<i>" not in page


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
    script = parts(gallery.explored()._repr_html_())[3].partition("</script>")[0]
    program = PAGE_FOR_NODE.replace("SCRIPT", script)
    output = subprocess.run(["node", "-"], input=program, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    choices = itertools.product((64, 8), ("slow", "fast"))
    for (gpus, network), (pressed, texts, widths) in zip(
        choices, json.loads(output.stdout), strict=True
    ):
        assert pressed == [str(gpus), network]
        rows = [r for r in gallery.EXPLORED if (r["GPUs"], r["network"]) == (gpus, network)]
        assert [text.split("|")[0] for text in texts] == [row["layout"] for row in rows]
        for row, text in zip(rows, texts, strict=True):
            if isinstance(row["time"], str):
                assert text.endswith(row["time"])
                continue
            sums = f"work {row['work']:.1f} + bubble {row['bubble']:.1f}; {row['MFU']}"
            assert f"{row['time']:.1f}" in text and text.endswith(sums)
        numbers = [row for row in rows if "work" in row]
        longest = max(row["time"] for row in numbers)
        expected = [80 * row[part] / longest for row in numbers for part in ("work", "bubble")]
        np.testing.assert_allclose(sum(widths, []), expected)


def test_an_explorer_reads_numbers_of_numpy_and_needs_neither_parts_nor_a_note():
    rows = [{"n": np.int64(n), "name": "a", "time": np.float64(n)} for n in (1, 2)]
    explorer = figures.explorer(rows, settings=["n"], label="name", value="time", unit="s")
    assert '"rows":[[1,"a",1.0],[2,"a",2.0]]' in explorer._repr_html_()


EXPLORED = gallery.EXPLORED
NAN = [EXPLORED[0] | {"time": math.nan}]
NOTHING, CHAIN = "nothing to draw", "chained rows of MLP must come first"


def branch(*chained):
    return [{"part": "MLP", "name": "a", "bytes": 1, "chained": value} for value in chained]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.attention_pairs({}), NOTHING),
        (lambda: figures.memory_levels({"HBM": []}), NOTHING),
        (lambda: figures.token_routing([], [], experts=2, capacity=1), NOTHING),
        (lambda: figures.block([]), NOTHING),
        (lambda: figures.dependencies({}, x="key", y="query"), NOTHING),
        (lambda: figures.formats([]), NOTHING),
        (lambda: figures.gradient_histogram({"g": [0.0, np.nan]}, gallery.FLOAT16), NOTHING),
        (lambda: figures.hosts({"nobody": [[]]}), NOTHING),
        (lambda: figures.progress([], limit=1, small=1, fast=1), NOTHING),
        (lambda: figures.rungs([], limit=1), NOTHING),
        (lambda: figures.lines({}, "x", "y"), NOTHING),
        (lambda: figures.lines({"a": [(0, math.nan)]}, "x", "y"), NOTHING),
        (lambda: figures.memory_bars([]), NOTHING),
        (lambda: figures.residuals([]), NOTHING),
        (lambda: figures.step_timeline({}), NOTHING),
        (lambda: figures.lanes({"idle": {"device 0": figures.Lane([])}}), NOTHING),
        (lambda: figures.overlap({"idle": {"sends": []}}), NOTHING),
        (lambda: figures.schedule({"idle": [[None]]}), NOTHING),
        (lambda: figures.tape({"empty": {"bytes": {}, "backward": None, "peak": 0}}), NOTHING),
        (lambda: figures.tradeoff([]), NOTHING),
        (lambda: figures.who_holds_what({"x": []}), NOTHING),
        (lambda: gallery.explored([]), NOTHING),
        # would be drawn, but not as it is
        (lambda: gallery.explored(EXPLORED[:-1]), "= .64, 'slow', 'pipe'.: 0"),
        (lambda: gallery.explored(EXPLORED + EXPLORED[:1]), "= .8, 'fast', 'data'.: 2"),
        (lambda: gallery.explored(parts=["work"]), "time=24.0 must be the sum of .'work'"),
        (lambda: gallery.explored(first={"GPUs": 9}), "first={'GPUs': 9} must select"),
        (lambda: gallery.explored(NAN), "time=nan must be the sum"),
        (lambda: figures.moving({}), "must hold at least two"),
        (lambda: figures.block(branch(False, True)), CHAIN),
        (lambda: figures.block(branch(False)), CHAIN),
        (lambda: figures.lanes_of_layers([(0, 1)], [], 10), "gathers has 1 layers, computes 0"),
        (
            lambda: figures.lanes_of_step({}, {"context": 1.0}),
            r"no traffic along \['context'\]",
        ),
    ],
)
def test_a_picture_of_nothing_or_of_something_else_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
