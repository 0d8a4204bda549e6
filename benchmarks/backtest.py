"""Compares predicted with published step times, and makes docs/backtest.md, its picture, and
the table of all rows, docs/backtest.csv.

    python -m benchmarks.backtest
"""

import collections
import csv
import functools
import hashlib
import io
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from matplotlib.figure import Figure

from benchmarks import table
from course_lib.lessons import backtest
from course_lib.lessons.backtest import Prediction, Row
from course_lib.many_devices import cluster_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware
from course_lib.planner import price
from course_lib.show import figures
from course_lib.show.figures import style

PAGE, PICTURE, ROWS = (Path("docs", f"backtest.{end}") for end in ("md", "png", "csv"))
# Tokens per GPU from which the traffic of data parallelism is hidden, on H100s
# (https://jax-ml.github.io/scaling-book/gpus).
INSIDE, ACROSS = 2200, 2475
MANY = 5
# Groups of publications, by software. The picture has a marker for each.
STACKS: Mapping[str, Sequence[str]] = {
    "Megatron-LM": """bloom_2022 korthikanti_2022 megatron_core_2024 megatron_llama_2023
        mt_nlg_2022 narayanan_2021""".split(),
    "NeMo": """dgxc_benchmarking nemo_automodel_2025 nemo_launcher_2022 nemotron4_15b_2024
        nemotron4_2024""".split(),
    "PyTorch FSDP": "fms_fsdp_2024 llm_foundry_2023 torchtitan_2024".split(),
    "JAX": "gpu_recipes_2025 jax_toolbox maxtext_2024".split(),
    "others": [],
}
# Constants that were assumed, not fitted, with other values to try.
ASSUMED: Mapping[str, tuple[ModuleType, Sequence[float]]] = {
    "MEMORY_SHARE": (price, (0.75, 0.95)),
    "UNFUSED_FACTOR": (price, (1, 3)),
    "OVERLAP_COST": (price, (0.0, 0.5)),
    "GRADIENT_BUCKETS": (price, (2, 32)),
    "TENSOR_OVERLAP": (price, (0.5, 0.9)),
    "NVLINK_SHARE": (cluster_model, (0.7, 0.9)),
    "NETWORK_LATENCY": (cluster_model, (0.0, 80e-6)),
}


@functools.cache
def predicted(kind: str = "dense") -> list[Prediction]:
    return backtest.predict([row for row in backtest.load() if row.kind == kind])


@functools.cache
def halves() -> dict[str, list[Prediction]]:
    """Returns the predictions of dense rows: of the half used for fitting, the other half, and
    all.
    """
    seen = {row.source for row in backtest.halves(backtest.dense(backtest.load()))[0]}
    return {
        "seen": [each for each in predicted() if each.row.source in seen],
        "unseen": [each for each in predicted() if each.row.source not in seen],
        "all": predicted(),
    }


def break_even(hosts: int) -> tuple[float, float]:
    """Returns the tokens per GPU from which the backward pass hides the all-reduce of data
    parallelism on hosts of eight H100s, at ideal rates: by our formula, and without its factor
    (n-1)/n, as in the scaling book's rule of thumb.
    """
    cluster = Cluster(hardware.get("h100"), 8 * hosts, ideal=True)
    group = cluster.group({"data": cluster.count}, "data")
    # A parameter has a gradient of 2 bytes, and 4 FLOPs per token in the backward pass.
    peak = cluster.accelerator.peak_flops["bfloat16"]
    tokens = cluster_model.all_reduce(group, 2.0) * peak / 4
    n = 8 if hosts == 1 else hosts
    return tokens, tokens * n / (n - 1)


def nemotron() -> tuple[float, float]:
    """Returns the step time of Nemotron-4 340B on 6,144 GPUs over that on 1,536: published and
    predicted.
    """
    first, _, last = (each for each in predicted() if each.row.source == "nemotron4_2024")
    return last.row.seconds / first.row.seconds, last.step.total / first.step.total


def goals() -> str:
    """Returns the goals, which were set before anything was predicted, and the results."""
    unseen, every = (backtest.summary(halves()[half]) for half in ("unseen", "all"))
    published, ratio = nemotron()
    off = ratio / published - 1
    inside, across = break_even(1)[0] / INSIDE - 1, break_even(128)[0] / ACROSS - 1
    error, near, rank = unseen.median_error, unseen.within_tenth, every.rank_correlation
    data = "break-even of data parallelism,"
    rows = [
        ("median error, unseen half", "at most 5%", f"{error:.1%}", error <= 0.05),
        ("rows within 10%, unseen half", "at least 85%", f"{near:.0%}", near >= 0.85),
        ("rank correlation of MFU, all", "at least 0.85", f"{rank:.2f}", rank >= 0.85),
        (
            "Nemotron-4 340B, 6,144 over 1,536 GPUs",
            f"within 3% of {published:.3f}",
            f"{ratio:.3f} ({off:+.1%})",
            abs(off) <= 0.03,
        ),
        (f"{data} 8 GPUs", f"within 10% of {INSIDE:,}", f"{inside:+.1%}", abs(inside) <= 0.1),
        (
            f"{data} 128 hosts",
            f"within 10% of {ACROSS:,}",
            f"{across:+.1%}",
            abs(across) <= 0.1,
        ),
    ]
    return table.markdown(
        [
            {
                "goal": goal,
                "target": target,
                "result": result,
                "": "met" if ok else "**missed**",
            }
            for goal, target, result, ok in rows
        ]
    )


def summary() -> str:
    """Returns the agreement on the seen half, the unseen half and all dense rows, beside that
    of one MFU for all rows, and of other values of the assumed constants.
    """
    seen = [each.row for each in halves()["seen"]]
    lines = []
    for half, predictions in halves().items():
        same = backtest.same_mfu([each.row for each in predictions], seen)
        result = backtest.summary(predictions)
        relative = [backtest.relative_errors(each) for each in (predictions, same)]
        lines.append(
            {
                "half": half,
                "rows": result.rows,
                "publications": result.publications,
                "median error": f"{result.median_error:.1%}",
                f"by one MFU, {same[0].mfu:.3f}": f"{backtest.median_error(same):.1%}",
                "within 10%": f"{result.within_tenth:.0%}",
                "rank correlation of MFU": f"{result.rank_correlation:.2f}",
                "within 10%, relative": f"{backtest.within_tenth(relative[0]):.0%}",
                "relative, by one MFU": f"{backtest.within_tenth(relative[1]):.0%}",
            }
        )
    return f"{table.markdown(lines)}\n\n{assumed()}"


def assumed() -> str:
    """Returns the agreement with other values of the assumed constants."""
    rows = [each.row for each in predicted()]
    unseen = {id(each.row) for each in halves()["unseen"]}
    found = []
    for name, (module, values) in ASSUMED.items():
        for value in values:
            with mock.patch.object(module, name, value):
                predictions = backtest.predict(rows)
            error = backtest.median_error([p for p in predictions if id(p.row) in unseen])
            rank = backtest.summary(predictions).rank_correlation
            found.append((error, rank, f"{name} = {value:g}"))
    (low, _, at), (high, _, other) = min(found), max(found)
    ranks = [rank for _, rank, _ in found]
    return (
        f"With other values of {len(ASSUMED)} assumed constants, one at a time, the median"
        f" error of the unseen half is {low:.1%} (`{at}`) to {high:.1%} (`{other}`), and the"
        f" rank correlation of all rows {min(ranks):.2f} to {max(ranks):.2f}."
    )


def publications() -> str:
    """Returns a line for each publication and kind of its rows."""
    about = backtest.publications()
    unseen = {each.row.source for each in halves()["unseen"]}
    lines = []
    for kind in backtest.KINDS:
        for source, group in itertools.groupby(predicted(kind), lambda each: each.row.source):
            part = list(group)
            counts = sorted(each.row.cluster.count for each in part)
            errors = [each.error for each in part]
            lines.append(
                {
                    "publication": f"[{source}]({about[source]['url']})",
                    "rows of": (
                        kind
                        if kind != "dense"
                        else f"dense, {'unseen' if source in unseen else 'seen'}"
                    ),
                    "rows": len(part),
                    "GPUs": " to ".join(
                        f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))
                    ),
                    "median error": f"{statistics.median(errors):+.1%}",
                    "within 10%": f"{backtest.within_tenth(errors):.0%}",
                }
            )
    return table.markdown(lines)


def reasons() -> str:
    """Returns the reasons of rows that are more than 10% off, each of at least `MANY` rows."""
    off = [p for kind in backtest.KINDS for p in predicted(kind) if abs(p.error) > 0.1]
    dense = [each.row for each in off if each.row.kind == "dense"]
    unexplained = sum(row.reason.startswith("not explained") for row in dense)
    by_reason = collections.defaultdict(list)
    for each in off:
        by_reason[each.row.reason].append(each.error)
    lines: list[dict[str, Any]] = [
        {"reason": reason, "rows": len(e), "errors": f"{min(e):+.1%} to {max(e):+.1%}"}
        for reason, e in sorted(by_reason.items(), key=lambda item: -len(item[1]))
        if len(e) >= MANY
    ]
    others = len(off) - sum(line["rows"] for line in lines)
    return (
        f"{len(off)} rows are more than 10% off. {len(dense)} of them are dense, of which"
        f" {unexplained} are not explained. Reasons of at least {MANY} rows of any kind (the"
        f" CSV has those of {others} others):"
        f"\n\n{table.markdown(lines)}"
    )


def layout(row: Row) -> str:
    """Returns a row's layout in short: "p8 d4 t8 v3 z1 b1 full" is a pipeline of 8 stages, 4
    replicas, 8-way tensor parallelism, 3 chunks per stage, ZeRO-1, microbatches of one sequence
    and full recomputation.
    """
    plan = row.plan
    parts = [f"{axis[0]}{size}" for axis, size in plan.axes.items() if size > 1]
    parts += [f"v{plan.chunks}"] if plan.chunks > 1 else []
    parts += [f"z{plan.zero}"] if plan.zero else []
    parts += [f"b{plan.microbatch}", f"L{row.shape.seq_len}"]
    parts += [plan.recompute] if plan.recompute != "none" else []
    return " ".join(parts + ["eager"] * plan.eager)


def all_rows() -> str:
    """Returns the table of all rows, as CSV."""
    by_row = {id(each.row): each for kind in backtest.KINDS for each in predicted(kind)}
    lines: list[dict[str, Any]] = []
    for row in sorted(backtest.load(), key=lambda row: backtest.KINDS.index(row.kind)):
        each = by_row.get(id(row))
        lines.append(
            {
                "kind": row.kind,
                "file": row.source,
                "where": row.where,
                "model": row.model,
                "GPUs": row.cluster.count,
                "GPU": row.cluster.accelerator.name,
                "layout": layout(row),
                "published (s)": f"{row.seconds:.4g}",
                "predicted (s)": f"{each.step.total:.4g}" if each else "no formula",
                "error": f"{each.error:+.1%}" if each else "",
                "status": row.status,
                "inferred": " ".join(row.inferred),
                "reason": row.reason,
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


BLOCKS: Mapping[str, Callable[[], str]] = {
    "goals": goals,
    "summary": summary,
    "publications": publications,
    "reasons": reasons,
}


def page(text: str) -> str:
    """Returns the page with new tables and all other text unchanged."""
    return table.fill(text, {name: block() for name, block in BLOCKS.items()})


def stack(row: Row) -> str:
    """Returns the group of software that a row was measured with."""
    if any(name in row.where for name in ("maxtext", "paxml")):
        return "JAX"
    return next((name for name, files in STACKS.items() if row.source in files), "others")


def points() -> list[tuple[str, str, float, float]]:
    """Returns half, stack, published and predicted MFU of each dense row."""
    return [
        (half, stack(each.row), round(each.row.mfu, 4), round(each.step.mfu, 4))
        for half in ("seen", "unseen")
        for each in halves()[half]
    ]


def digest() -> str:
    """Returns a checksum of the points, which the picture carries."""
    return hashlib.sha256(json.dumps(points()).encode()).hexdigest()


def draw() -> Figure:
    """Returns predicted against published MFU: the seen half above, the unseen half below."""
    figure = Figure(figsize=(5.2, 9.4), layout="constrained")
    top = 0.8
    titles = {"seen": "Half used to fit the constant", "unseen": "Held-out half"}
    for axes, (half, title) in zip(figure.subplots(2, 1), titles.items(), strict=True):
        # Seconds that are 10% too long or too short divide MFU by 1.1 or 0.9.
        ends = [0, top]
        axes.fill_between(
            ends, [0, top / 1.1], [0, top / 0.9], color="#D9D9D9", linewidth=0, zorder=0
        )
        axes.plot(ends, ends, color=style.GREY, linewidth=1, zorder=1)
        filled = half == "seen"
        for i, name in enumerate(STACKS):
            if chosen := [point[2:] for point in points() if point[:2] == (half, name)]:
                axes.plot(
                    *zip(*chosen, strict=True),
                    linestyle="none",
                    marker=style.MARKERS[i],
                    markersize=7,
                    markerfacecolor=style.COLORS[i] if filled else "none",
                    markeredgecolor="black" if filled else style.COLORS[i],
                    markeredgewidth=0.6 if filled else 1.3,
                    alpha=0.8,
                    label=name,
                )
        axes.set(xlim=(0, top), ylim=(0, top), aspect="equal")
        axes.set_xlabel("published MFU", fontsize=13)
        axes.set_ylabel("predicted MFU", fontsize=13)
        axes.set_title(title, fontsize=14)
        axes.tick_params(labelsize=12)
        axes.legend(loc="lower right", fontsize=12)
        axes.annotate(
            "step time\nwithin 10%",
            (0.735, 0.735),
            (0.5, 0.745),
            fontsize=12,
            va="center",
            arrowprops={"arrowstyle": "-", "color": style.GREY, "linewidth": 0.8},
        )
    return figure


def main() -> None:
    """Writes the page, its picture and the table of all rows."""
    PAGE.write_text(page(PAGE.read_text()))
    ROWS.write_text(all_rows())
    figures.use_style()
    draw().savefig(PICTURE, facecolor="white", metadata={"Description": digest()})


if __name__ == "__main__":
    main()
