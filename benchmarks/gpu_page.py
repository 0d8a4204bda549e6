"""Makes the tables and the picture of docs/gpu.md from docs/results/gpu/*.json.

    python -m benchmarks.gpu_page    after `benchmarks.gpu` predicted or measured

Each GPU that was measured has a prediction beside it, compiled where there was no GPU.
"""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import gpu, gpu_cases, table
from course_lib.measure import GIB, MIB, hardware
from course_lib.measure.roofline import peak
from course_lib.show.figures import style

RESULTS, PAGE, PICTURE = Path("docs/results/gpu"), Path("docs/gpu.md"), Path("docs/gpu.png")
APART = 0.08  # attainable times that are closer count as equal
TWICE = ("bfloat16", "rematerialized blocks")  # "no remat" and "remat Block" again
OFF = 1.4  # points that are further off than this factor get their name in the picture
STEPS = ("techniques", "ladder", "one step for speed", "2.5 billion parameters")

Row = Mapping[str, Any]
Pair = tuple[Row, Row | None]


def pairs(name: str, results: Path = RESULTS) -> list[Pair]:
    """Returns what was measured on a GPU, each row beside its prediction.

    Args:
      name: of the GPU, as in `hardware`.
      results: the folder.

    Returns:
      (measured, predicted) for each case that ran, in the order of the predictions. There is
        no prediction for what cannot be compiled without a GPU: cuDNN's attention, and PyTorch.
    """
    measured, predicted = (
        json.loads((results / f"{name}-{kind}.json").read_text())["rows"]
        for kind in ("measured", "predicted")
    )
    cases = [(row["group"], row["case"]) for row in predicted]
    groups = [group for group, _ in cases]
    by_case = {
        case: row for case, row in zip(cases, predicted, strict=True) if row["not_run"] is None
    }

    def place(row: Row) -> tuple[int, int]:
        case = row["group"], row["case"]
        return groups.index(row["group"]), cases.index(case) if case in cases else len(cases)

    return [
        (row, by_case.get((row["group"], row["case"])))
        for row in sorted(measured, key=place)
        if row["not_run"] is None
    ]


def steps(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """Returns the table of training steps."""
    return [
        {
            "step": row["case"],
            "predicted (GiB)": before and f"{before['peak_bytes'] / GIB:.2f}",
            "measured (GiB)": f"{row['measured_peak_bytes'] / GIB:.2f}",
            "more (MiB)": before and round(more_bytes(row, before) / MIB),
            "attainable (ms)": before and f"{before['attainable_seconds'] * 1e3:.1f}",
            "measured (ms)": f"{row['seconds']['median'] * 1e3:.1f}",
            "measured / attainable": before and f"{slower(row, before):.2f}",
            "MFU": row.get("mfu") and f"{row['mfu']:.1%}",
        }
        for row, before in found
        if row["group"] in STEPS
    ]


def more_bytes(row: Row, before: Row) -> int:
    """Returns how many bytes more than predicted a program took."""
    return row["measured_peak_bytes"] - before["peak_bytes"]


def slower(row: Row, before: Row) -> float:
    """Returns how many times the attainable seconds a program took."""
    return row["seconds"]["median"] / before["attainable_seconds"]


def programs(found: Sequence[Pair], group: str) -> list[dict[str, Any]]:
    """Returns the table of attention or of the loss."""
    return [
        {
            "program": row["case"],
            "predicted (GiB)": before and f"{before['peak_bytes'] / GIB:.2f}",
            "measured (GiB)": f"{row['measured_peak_bytes'] / GIB:.2f}",
            "attainable (ms)": before and f"{before['attainable_seconds'] * 1e3:.2f}",
            "measured (ms)": f"{row['seconds']['median'] * 1e3:.2f}",
            "measured / attainable": before and f"{slower(row, before):.2f}",
            "TFLOP/s": round(row["flops"] / row["seconds"]["median"] / 1e12),
        }
        for row, before in found
        if row["group"] == group
    ]


def rates(found: Sequence[Pair], accelerator: hardware.Accelerator) -> list[dict[str, Any]]:
    """Returns the table of rates, each beside the peak of the GPU's data sheet."""
    link = hardware.host_link("pcie5").bandwidth
    rows = []
    for row, _ in found:
        if row["group"] != "rates":
            continue
        dtype = row["case"].removeprefix("products in ")
        if dtype != row["case"]:
            done, most = row["flops"], peak(accelerator, dtype)
        elif row["host_bytes"]:
            done, most = row["host_bytes"], link
        else:
            done, most = row["traffic_bytes"], accelerator.memory_bandwidth
        rate = done / row["seconds"]["median"]
        rows.append(
            {
                "what": row["case"],
                "reached": f"{rate / 1e12:.3g} T{'FLOP' if row['flops'] else 'B'}/s",
                "of the peak": f"{rate / most:.0%}",
            }
        )
    return rows


def missing(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """Returns the cases of `benchmarks.gpu` that did not run."""
    ran = {(row["group"], row["case"]) for row, _ in found}
    every = {group: [*cases] for group, cases in gpu_cases.groups().items()}
    every[gpu.SPEED] += gpu.TORCH
    return [
        {"group": group, "case": case}
        for group, cases in every.items()
        for case in cases
        if (group, case) not in ran
    ]


def compared(found: Sequence[Pair]) -> list[tuple[Row, Row]]:
    """Returns the training steps that have a prediction, each once."""
    return [
        (row, before)
        for row, before in found
        if before is not None and row["group"] in STEPS and row["case"] not in TWICE
    ]


def summary(name: str, found: Sequence[Pair]) -> dict[str, Any]:
    """Returns in figures how far the predictions of training steps were off."""
    known = compared(found)
    more = [more_bytes(*pair) / MIB for pair in known]
    times = [slower(*pair) for pair in known]
    apart = [
        (a, b)
        for a, b in itertools.combinations(known, 2)
        if abs(a[1]["attainable_seconds"] / b[1]["attainable_seconds"] - 1) > APART
    ]
    right = [_is_faster(*a, *b) for a, b in apart]
    return {
        "GPU": hardware.get(name).title,
        "steps": len(known),
        "more memory than predicted, median (MiB)": round(statistics.median(more)),
        "least, most (MiB)": f"{min(more):,.0f}, {max(more):,.0f}",
        "measured / attainable time, median": f"{statistics.median(times):.2f}",
        "least, most": f"{min(times):.2f}, {max(times):.2f}",
        f"pairs over {APART:.0%} apart in the right order": f"{sum(right)} of {len(right)}",
    }


def _is_faster(row: Row, before: Row, other: Row, other_before: Row) -> bool:
    """Whether two programs took their times in the order that was predicted."""
    predicted = before["attainable_seconds"] < other_before["attainable_seconds"]
    return predicted == (row["seconds"]["median"] < other["seconds"]["median"])


def tables(name: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Returns the tables of a GPU, as `benchmarks.table` takes them."""
    found = pairs(name, results)
    about = json.loads((results / f"{name}-measured.json").read_text())
    dates, versions, before = (
        ", ".join(sorted(set(each)))
        for each in (
            (row["date"] for row, _ in found),
            (row["versions"]["jax"] for row, _ in found),
            (row["versions"]["jax"] for _, row in found if row is not None),
        )
    )
    contents = {
        "summary": [summary(name, found)],
        "steps": steps(found),
        "attention": programs(found, "attention"),
        "loss": programs(found, "loss"),
        "rates": rates(found, hardware.get(name)),
        "missing": missing(found),
    }
    return [
        {
            "name": f"{name}-{part}",
            "date": dates,
            "device": f"{about['device']}, predicted without it by JAX {before}",
            "versions": {"measured with JAX": versions},
            "rows": rows,
            "notes": NOTES[part],
        }
        for part, rows in contents.items()
    ]


NOTES = {
    "summary": "All training steps below that could be predicted, each once:",
    "steps": (
        "The Transformer of 155.9 million parameters (the preset `155m`), 64 sequences of 512"
        " tokens per step. From *float32* to *attention flash*, each step changes one thing of"
        " the preset. From *first writing* to *unrolled* they are rungs of notebook 19, each"
        " one change of an earlier rung; some of those were not measured. *bfloat16* is the"
        " same step as *no remat*, and *rematerialized blocks* the same as *remat Block*. The"
        " last two are one step, in this library and in PyTorch. It computes in bfloat16,"
        " rematerializes nothing, and has one minibatch and no dropout. Its flash attention is"
        " cuDNN's here, and PyTorch's own there. MFU is the model's FLOPs per second, with"
        " masked scores and without recomputed products, as a share of the peak rate of their"
        " dtype."
    ),
    "attention": (
        "Forward and backward pass over 32,768 tokens in sequences of the named length, 8 heads"
        " of width 128, in bfloat16 and causal. JAX's kernel for Hopper is in float16 and not"
        " causal, with tiles that nobody tuned. TFLOP/s count six products over the scores that"
        " the mask leaves, whatever a kernel computes."
    ),
    "loss": (
        "Loss and gradient of the output layer of Gemma 2 2B: 8,192 tokens, D = 2304,"
        " V = 256000, bfloat16. TFLOP/s count three products for all logits, and four with"
        " chunks."
    ),
    "missing": "Cases of `benchmarks.gpu` that were not measured, since the time was over:",
    "rates": (
        "Products of 8,192 x 8,192 matrices; a pass over 4 GiB; 1 GiB to pinned memory of the"
        " host. Peaks are those of the data sheets; float32 products run as TensorFloat-32."
    ),
}


def draw(name: str, results: Path = RESULTS) -> Figure:
    """Returns the picture: what was measured against what was predicted, memory and time."""
    kinds = {"training steps": STEPS, "attention": ("attention",), "the loss": ("loss",)}
    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    memory, time = figure.subplots(1, 2)
    named: dict[Axes, list[Any]] = {memory: [], time: []}
    for i, (kind, groups) in enumerate(kinds.items()):
        chosen = [(row, b) for row, b in pairs(name, results) if b and row["group"] in groups]
        bytes_ = [(b["peak_bytes"], row["measured_peak_bytes"]) for row, b in chosen]
        seconds = [(b["attainable_seconds"], row["seconds"]["median"]) for row, b in chosen]
        for axes, points, one in ((memory, bytes_, GIB), (time, seconds, 1e-3)):
            axes.plot(
                *zip(*[(x / one, y / one) for x, y in points], strict=True),
                linestyle="none",
                marker=style.MARKERS[i],
                color=style.COLORS[i],
                markeredgecolor="black",
                markeredgewidth=0.5,
                markersize=7,
                alpha=0.8,
                label=kind,
            )
            if kind != "attention":  # where all are off
                off = [
                    ((x / one, y / one), row["case"])
                    for (x, y), (row, _) in zip(points, chosen, strict=True)
                    if y / x > OFF
                ]
                named[axes] += off
    for axes, unit, said in ((memory, "GiB", "predicted"), (time, "ms", "attainable")):
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        for i, (point, case) in enumerate(sorted(named[axes], key=lambda one: -one[0][1])):
            axes.annotate(
                case,
                point,
                (0.45, 0.95 - 0.055 * i),  # in a column: names of close points do not touch
                textcoords="axes fraction",
                ha="right",
                va="center",
                fontsize="small",
                arrowprops={
                    "arrowstyle": "-",
                    "color": style.GREY,
                    "linewidth": 0.8,
                    "relpos": (1, 0.5),
                },
            )
        ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), axes.get_xlim()[1]]
        axes.plot(ends, ends, color=style.GREY, linewidth=1, zorder=0)
        axes.set_xlabel(f"{said}, without a GPU ({unit})")
        axes.set_ylabel(f"measured on an {hardware.get(name).title} ({unit})")
    memory.set_title("Peak memory")
    time.set_title("Time")
    memory.legend(loc="lower right")
    return figure


def main() -> None:
    """Writes the page anew, and the picture."""
    names = sorted(path.name.split("-measured")[0] for path in RESULTS.glob("*-measured.json"))
    made = [each for name in names for each in tables(name)]
    PAGE.write_text(table.page(PAGE.read_text(), made))
    draw(names[0]).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
