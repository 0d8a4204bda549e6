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
STEPS = ("techniques", "ladder", gpu.SPEED, "2.5 billion parameters")

Row = Mapping[str, Any]
Pair = tuple[Row, Row | None]  # measured, predicted


def stored(name: str, kind: str, results: Path = RESULTS) -> dict[str, Any]:
    return json.loads((results / f"{name}-{kind}.json").read_text())


def pairs(name: str, results: Path = RESULTS) -> list[Pair]:
    """Returns what was measured on a GPU, each row beside its prediction, for each case that
    ran, in the order of the predictions. There is no prediction for what cannot be compiled
    without a GPU: cuDNN's attention, and PyTorch.
    """
    predicted = stored(name, "predicted", results)["rows"]
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
        for row in sorted(stored(name, "measured", results)["rows"], key=place)
        if row["not_run"] is None
    ]


def more_bytes(row: Row, before: Row) -> int:
    """Returns how many bytes more than predicted a program took."""
    return row["measured_peak_bytes"] - before["peak_bytes"]


def slower(row: Row, before: Row) -> float:
    """Returns how many times the attainable seconds a program took."""
    return row["seconds"]["median"] / before["attainable_seconds"]


def _costs(row: Row, before: Row | None, digits: int) -> dict[str, Any]:
    """Returns the columns of memory and time; where there is no prediction, its are empty."""
    seconds = row["seconds"]["median"]
    return {
        "predicted (GiB)": before and f"{before['peak_bytes'] / GIB:.2f}",
        "measured (GiB)": f"{row['measured_peak_bytes'] / GIB:.2f}",
        "attainable (ms)": before and f"{before['attainable_seconds'] * 1e3:.{digits}f}",
        "measured (ms)": f"{seconds * 1e3:.{digits}f}",
        "measured / attainable": before and f"{slower(row, before):.2f}",
    }


def steps(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """Returns the table of training steps."""
    return [
        {"step": row["case"]}
        | _costs(row, before, 1)
        | {
            "more (MiB)": round(more_bytes(row, before) / MIB) if before else None,
            "MFU": row.get("mfu") and f"{row['mfu']:.1%}",
        }
        for row, before in found
        if row["group"] in STEPS
    ]


def programs(found: Sequence[Pair], group: str) -> list[dict[str, Any]]:
    """Returns the table of attention or of the loss."""
    return [
        {"program": row["case"]}
        | _costs(row, before, 2)
        | {"TFLOP/s": round(row["flops"] / row["seconds"]["median"] / 1e12)}
        for row, before in found
        if row["group"] == group
    ]


def rates(found: Sequence[Pair], accelerator: hardware.Accelerator) -> list[dict[str, Any]]:
    """Returns the table of rates, each beside the peak of the GPU's data sheet."""
    rows = []
    for row, _ in found:
        if row["group"] != "rates":
            continue
        if row["flops"]:
            dtype = row["case"].removeprefix("products in ")
            done, most = row["flops"], peak(accelerator, dtype)
        elif row["host_bytes"]:
            done, most = row["host_bytes"], hardware.host_link(gpu.LINK).bandwidth
        else:
            done, most = row["traffic_bytes"], accelerator.memory_bandwidth
        rate = done / row["seconds"]["median"]
        reached = f"{rate / 1e12:.3g} T{'FLOP' if row['flops'] else 'B'}/s"
        rows.append(
            {"what": row["case"], "reached": reached, "of the peak": f"{rate / most:.0%}"}
        )
    return rows


def missing(found: Sequence[Pair]) -> list[dict[str, Any]]:
    """Returns the cases of `benchmarks.gpu` that did not run."""
    ran = {(row["group"], row["case"]) for row, _ in found}
    every = [(group, case) for group, cases in gpu_cases.groups().items() for case in cases]
    every += [(gpu.SPEED, case) for case in gpu.TORCH]
    return [{"group": case[0], "case": case[1]} for case in every if case not in ran]


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
    seconds = [(b["attainable_seconds"], row["seconds"]["median"]) for row, b in known]
    right = [
        (a < b) == (took < other)
        for (a, took), (b, other) in itertools.combinations(seconds, 2)
        if abs(a / b - 1) > APART
    ]
    return {
        "GPU": hardware.get(name).title,
        "steps": len(known),
        "more memory than predicted, median (MiB)": round(statistics.median(more)),
        "least, most (MiB)": f"{min(more):,.0f}, {max(more):,.0f}",
        "measured / attainable time, median": f"{statistics.median(times):.2f}",
        "least, most": f"{min(times):.2f}, {max(times):.2f}",
        f"pairs over {APART:.0%} apart in the right order": f"{sum(right)} of {len(right)}",
    }


def page(text: str, name: str, results: Path = RESULTS) -> str:
    """Returns docs/gpu.md with the tables of a GPU in their places."""
    found = pairs(name, results)
    contents: dict[str, Sequence[Row]] = {
        "summary": [summary(name, found)],
        "steps": steps(found),
        "attention": programs(found, "attention"),
        "loss": programs(found, "loss"),
        "rates": rates(found, hardware.get(name)),
        "missing": missing(found),
    }
    about = stored(name, "measured", results)
    dates = {row["date"] for row in about["rows"] if row["not_run"] is None}
    measured, predicted = (
        ", ".join(sorted({row["versions"]["jax"] for row in rows if row["not_run"] is None}))
        for rows in (about["rows"], stored(name, "predicted", results)["rows"])
    )
    where = (
        f"{about['device']}, predicted without it by JAX {predicted}; measured with JAX"
        f" {measured}; {', '.join(sorted(dates))}. So are the tables below."
    )
    blocks = {f"{name}-{part}": table.markdown(rows) for part, rows in contents.items()}
    blocks[f"{name}-summary"] += f"\n\n{where}"
    return table.fill(text, blocks)


def draw(name: str, results: Path = RESULTS) -> Figure:
    """Returns the picture: what was measured against what was predicted, memory and time."""
    kinds = {"training steps": STEPS, "attention": ("attention",), "the loss": ("loss",)}
    figure = Figure(figsize=(9.6, 4.8), layout="constrained")
    memory, time = figure.subplots(1, 2)
    named: dict[Axes, list[Any]] = {memory: [], time: []}
    for i, (kind, groups) in enumerate(kinds.items()):
        chosen = [(row, b) for row, b in pairs(name, results) if b and row["group"] in groups]
        points: dict[Axes, list[Any]] = {
            memory: [(b["peak_bytes"], row["measured_peak_bytes"], GIB) for row, b in chosen],
            time: [
                (b["attainable_seconds"], row["seconds"]["median"], 1e-3) for row, b in chosen
            ],
        }
        for axes, found in points.items():
            at = [(x / one, y / one) for x, y, one in found]
            axes.plot(
                *zip(*at, strict=True),
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
                cases = [row["case"] for row, _ in chosen]
                named[axes] += [
                    (p, c) for p, c in zip(at, cases, strict=True) if p[1] / p[0] > OFF
                ]
    line = {"arrowstyle": "-", "color": style.GREY, "linewidth": 0.8, "relpos": (1, 0.5)}
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
                arrowprops=line,
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
    text = PAGE.read_text()
    PAGE.write_text(page(text, names[0]))
    draw(names[0]).savefig(PICTURE, dpi=150)


if __name__ == "__main__":
    main()
