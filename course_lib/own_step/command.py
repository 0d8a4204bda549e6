"""Measures a train step of your own on a GPU that need not be there:

    python -m course_lib.measure my_step.py:make_step --target h100

make_step() returns the step and the arguments of one call, arrays or shapes: `return step,
state, batch`. If it has a parameter `devices`, it gets those of --devices; `dtype` and `remat`
are switched to see what that does. docs/your_model.md has an example.
"""

import argparse
import base64
import contextlib
import html
import json
import pathlib
import re
import sys
import traceback
from collections.abc import Mapping, Sequence

import jax

from course_lib import measure
from course_lib.measure import hardware, virtual
from course_lib.measure.units import gib
from course_lib.own_step import costs, reading
from course_lib.own_step.costs import Figures

# The table of docs/gpu.md.
ERROR = (
    "26 steps that were measured on an H200 took 15 to 489 MiB more memory, and 1.00 to 2.64"
    " times the attainable time (docs/gpu.md), the median 1.13"
)
NAMES = {
    "flops": "FLOPs",
    "traffic_bytes": "memory traffic",
    "attainable_seconds": "attainable time",
    "sent_bytes": "sent per device",
}
OVER, USAGE = 1, 2
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "B": 1}


def text(figures: Figures) -> str:
    """Returns figures as lines of text."""
    lines = [f"{figures['step']} on {figures['devices']} x {figures['title']}"]

    def add(name: str, *values: str) -> None:
        lines.extend(f"{'' if n else name:17}{value}" for n, value in enumerate(values))

    by_default, fits = figures["default_bytes"], "fits" if figures["fits"] else "DOES NOT FIT"
    if fits == "fits" and figures["peak_bytes"] > by_default:
        fits += f" with XLA_PYTHON_CLIENT_MEM_FRACTION={hardware.GPU_SHARE}"
    add(
        "peak",
        f"{gib(figures['peak_bytes'])} of {gib(figures['usable_bytes'])}"
        + " per device" * (figures["devices"] > 1)
        + f", by default {gib(by_default)}: {fits}",
        f"(arguments {gib(figures['argument_bytes'])}, results beside them"
        f" {gib(figures['output_bytes'] - figures['aliased_bytes'])}, temporaries"
        f" {gib(figures['temporary_bytes'])})",
    )
    add(
        "at the peak",
        *(f"{gib(row['bytes']):>11}  {_array(row)}" for row in figures["at_the_peak"]),
    )
    donation = figures["donation"]
    missed = f"; {gib(donation['missed_bytes'])} of {', '.join(donation['missed'])} could be"
    in_vain = (
        f"not used again: {gib(row['bytes'])} of {row['argument']}, since {row['why']}"
        for row in donation["in_vain"]
    )
    used = f"{gib(donation['aliased_bytes'])} used again{missed * bool(donation['missed'])}"
    add("donation", used, *in_vain)
    if (flops := figures["flops"]) is not None:
        again = figures["recomputed_flops"]
        counts = _flops(flops) + f", {again:.3g} of them recomputed" * bool(again)
        add(NAMES["flops"], counts + " (all devices, as written)" * (figures["devices"] > 1))
    if figures["devices"] > 1 and (flops := figures["compiler"]["flops"]) is not None:
        add("FLOPs per device", f"{_flops(flops)} (as compiled)")
    if (moved := figures["traffic_bytes"]) is not None:
        kinds = list(figures["traffic_by_kind"].items())[:4]
        shares = ", ".join(f"{kind} {n / moved:.0%}" for kind, n in kinds if n > moved / 200)
        add(NAMES["traffic_bytes"], f"{gib(moved)}: {shares}")
    if figures["devices"] > 1 and figures["sent_bytes"] is not None:
        sent = (f"{gib(size):>11}  {kind}" for kind, size in figures["sent_by_kind"].items())
        add("sent per device", gib(figures["sent_bytes"]), *sent)
    if (seconds := figures["attainable_seconds"]) is not None:
        add(NAMES["attainable_seconds"], _time(seconds))
    for name, why in figures["unknown"].items():
        add(NAMES[name], f"unknown: {why}")
    add("the compiler", *figures["compiler"]["text"])
    if figures["not_planned"]:
        add("in no plan", f"the workspace of {', '.join(figures['not_planned'])}")
    add("how true", ERROR)
    return "\n".join([*lines, *map(tried_lines, figures["tried"]), *not_tried_lines(figures)])


def _flops(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:.3g} in {dtype}" for dtype, count in counts.items()) or "0"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _array(row: Figures) -> str:
    many = row["arrays"] > 1
    what = f"{row['arrays']} arrays" if many else "array"
    if row["dtype"]:
        what = f"{row['arrays']} x " * many + f"{row['dtype']}{row['shape']}"
    return ", ".join(filter(None, (what, row["kind"], row["from"])))


def tried_lines(row: Figures) -> str:
    """Returns what a change came to, as two lines of text."""
    if row["error"]:
        result = f"did not work: {row['error']}"
    else:
        result = f"peak {gib(row['peak_bytes'])}"
        if (seconds := row["attainable_seconds"]) is not None:
            result += f", attainable time {_time(seconds)}"
        if flops := row["flops"]:
            most = max(flops, key=flops.get)
            result += f", most FLOPs in {most}"
            if "float32" in most and "bfloat16" in row["change"]:
                result += ": something casts back, as nnx.Embed does (notebook 20)"
    return f"{'tried':17}{row['change']}\n{'':21}{result}"


def not_tried_lines(figures: Figures) -> list[str]:
    return [f"{'not tried':17}{change}" for change in figures["not_tried"]]


def page(figures: Figures, heap: measure.Heap) -> str:
    """Returns figures as one page of HTML, with pictures of the tape and the peak."""
    from course_lib.show import figures as pictures
    from course_lib.show.figures import frames

    arrays = [vars(array) | {"why": array.line or array.scope} for array in heap.arrays]
    drawn = {"The arrays alive at the peak": pictures.residuals(arrays)}
    with contextlib.suppress(RuntimeError):  # XLA before JAX 0.10 writes no lifetimes
        drawn["The memory over the step"] = pictures.tape({"": measure.tape(heap)})
    images = "".join(
        f"<h2>{title}</h2>\n"
        f'<img alt="{title}" src="data:image/png;base64,'
        f'{base64.b64encode(frames.png(figure)).decode()}">\n'
        for title, figure in drawn.items()
    )
    title, _, lines = html.escape(text(figures)).partition("\n")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        "<style>body{max-width:60em;margin:2em auto;font-family:sans-serif}"
        "pre{white-space:pre-wrap}img{max-width:100%}</style>\n"
        f"<h1>{title}</h1>\n<pre>{lines}</pre>\n{images}"
    )


def size(written: str) -> int:
    """Reads a size: "20GiB"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", written)
    if not (match and match[2] in UNITS):
        raise argparse.ArgumentTypeError(f"{written!r} must be a size, as 20GiB or 500MiB")
    return int(float(match[1]) * UNITS[match[2]])


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("where", metavar="FILE.py:make_step", help="or MODULE:make_step")
    add("--target", metavar="NAME", default="h100", help=", ".join(hardware.names()))
    add("--devices", metavar="N", type=int, default=1, help="how many of them (default: 1)")
    add("--report", metavar="OUT", help="also writes OUT.html, or report.html in a folder OUT")
    add("--batch", metavar="NAME", help="the argument that a change halves (default: it looks)")
    add("--json", action="store_true", help="prints one JSON object; null is unknown")
    add("--no-tries", action="store_true", help="tries no changes, which take most of the time")
    add("--fail-over", metavar="SIZE", type=size, help="exits with 1 if the peak is over 20GiB")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 over the limit, 2 for a mistake."""
    parser = arguments()
    options = parser.parse_args(argv)
    try:
        if jax.config.jax_num_cpu_devices < options.devices > 1:
            with contextlib.suppress(RuntimeError):  # JAX has started
                jax.config.update("jax_num_cpu_devices", options.devices)
        _look_for_devices(options.target, options.devices)  # before the step's code runs
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):  # what the step's own code prints
            make_step = reading.load(options.where)
            figures, heap, tries = costs.measured(
                make_step, options.target, options.devices, options.batch
            )
            if not options.json:
                print(text(figures), file=out, flush=True)
            for row in () if options.no_tries else tries:
                if not options.json:
                    print(tried_lines(row), file=out, flush=True)
        for line in [json.dumps(figures)] if options.json else not_tried_lines(figures):
            print(line)
        if options.report:
            report = pathlib.Path(options.report)
            report = report if report.suffix == ".html" else report / "report.html"
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(page(figures, heap), encoding="utf-8")
    except (ValueError, virtual.NoCompiler, OSError) as error:
        if isinstance(error, reading.StepError):
            _show(error.__cause__)
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    if options.fail_over is not None and figures["peak_bytes"] > options.fail_over:
        over = f"the peak of {gib(figures['peak_bytes'])} is over --fail-over"
        print(f"error: {over} {gib(options.fail_over)}", file=sys.stderr)
        return OVER
    return 0


def _look_for_devices(target: str, devices: int) -> None:
    """Raises what `virtual.devices` raises, in the words of the command line."""
    try:
        virtual.devices(target, devices)
    except ValueError as error:
        words = str(error).replace("name=", "--target ").replace("count=", "--devices ")
        raise ValueError(words) from None


def _show(error: BaseException) -> None:
    """Prints an error's traceback from the first line of the step's own code."""
    trace, own = error.__traceback__, error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(str(pathlib.Path(__file__).parent)) or "importlib" in file:
            own = trace.tb_next
        trace = trace.tb_next
    traceback.print_exception(type(error), error, own, chain=False)
