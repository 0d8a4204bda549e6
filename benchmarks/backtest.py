"""Compares predicted with published step times, and makes docs/backtest.md and its picture.

    python -m benchmarks.backtest

In the page, the text between `<!-- NAME -->` and `<!-- end -->` is made here, by the function
of `BLOCKS` with that name. The words around it are written by hand, and stay.
"""

import collections
import functools
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

from matplotlib.figure import Figure

from course_lib.lessons import backtest
from course_lib.lessons.backtest import Prediction, Row
from course_lib.many_devices import cluster_model, step_model
from course_lib.many_devices.cluster_model import PRODUCTS_SHARE, Cluster
from course_lib.measure import hardware
from course_lib.show import figures
from course_lib.show.figures import style

PAGE, PICTURE = Path("docs/backtest.md"), Path("docs/backtest.png")
BOOK = {"inside a host": 2200, "across hosts": 2475}
"""Tokens per GPU from which the traffic of data parallelism is hidden, H100
(https://jax-ml.github.io/scaling-book/gpus)."""
STACKS = ("Megatron-LM", "NeMo", "PyTorch FSDP", "JAX", "others")
"""Groups of publications, by software. The picture has a marker for each."""
STACK_OF = {
    "bloom_2022": "Megatron-LM",
    "colossalai_2025": "PyTorch FSDP",
    "dgxc_benchmarking": "NeMo",
    "fms_fsdp_2024": "PyTorch FSDP",
    "gpu_recipes_2025": "JAX",
    "jax_toolbox": "JAX",
    "korthikanti_2022": "Megatron-LM",
    "llm_foundry_2023": "PyTorch FSDP",
    "maxtext_2024": "JAX",
    "megatron_core_2024": "Megatron-LM",
    "megatron_llama_2023": "Megatron-LM",
    "mt_nlg_2022": "Megatron-LM",
    "narayanan_2021": "Megatron-LM",
    "nemo_automodel_2025": "NeMo",
    "nemo_launcher_2022": "NeMo",
    "nemotron4_15b_2024": "NeMo",
    "nemotron4_2024": "NeMo",
    "torchtitan_2024": "PyTorch FSDP",
}
_LETTERS = {"pipe": "p", "data": "d", "fsdp": "f", "expert": "e", "context": "c", "tensor": "t"}


@functools.cache
def predicted(kind: str = "dense") -> list[Prediction]:
    """Returns the predictions of a kind of rows, with the constant that is shipped."""
    return backtest.predict([row for row in backtest.load() if row.kind == kind])


@functools.cache
def halves() -> dict[str, list[Prediction]]:
    """Returns the predictions of dense rows: the half that the constant was fitted to, the half
    that judges, and all.
    """
    rows = backtest.dense(backtest.load())
    seen, unseen = backtest.halves(rows)
    return {
        half: backtest.predict(part)
        for half, part in (("seen", seen), ("unseen", unseen), ("all", rows))
    }


@functools.cache
def fitted() -> float:
    """Returns the constant that fits the seen half best."""
    return backtest.fit([each.row for each in halves()["seen"]])


def constant_mfu(rows: Sequence[Row]) -> float:
    """Returns the one MFU for all rows whose median absolute error is least: what there is to
    beat.
    """
    return min(
        (n / 1000 for n in range(200, 800)),
        key=lambda mfu: statistics.median(abs(row.mfu / mfu - 1) for row in rows),
    )


def break_even(hosts: int) -> tuple[float, float]:
    """Returns the tokens per GPU from which data parallelism on H100s hides its all-reduce
    behind the backward pass, at ideal rates; and the same without the share (n-1)/n of an array
    that is sent, as the scaling book counts.

    Args:
      hosts: of eight GPUs.
    """
    cluster = Cluster(hardware.get("h100"), 8 * hosts, ideal=True)
    group = cluster.group({"data": cluster.count}, "data")
    # A parameter has a gradient of 2 bytes, and 4 FLOPs per token in the backward pass.
    tokens = (
        cluster_model.all_reduce(group, 2.0) * cluster.accelerator.peak_flops["bfloat16"] / 4
    )
    n = 8 if hosts == 1 else hosts
    return tokens, tokens * n / (n - 1)


def nemotron() -> tuple[list[Prediction], float, float]:
    """Returns Nemotron-4 340B on 1,536, 3,072 and 6,144 GPUs, and the ratio of the last step
    time to the first: published and predicted.
    """
    found = [each for each in predicted() if each.row.source == "nemotron4_2024"]
    return (
        found,
        found[-1].row.seconds / found[0].row.seconds,
        found[-1].step.total / found[0].step.total,
    )


def goals() -> str:
    """Returns what was asked before anything was predicted, and what came out."""
    of = {half: backtest.summary(found) for half, found in halves().items()}
    _, published, ratio = nemotron()
    book = list(BOOK.values())
    ours = [break_even(1), break_even(128)]
    plain = [tokens / asked - 1 for (tokens, _), asked in zip(ours, book, strict=True)]
    as_book = [tokens / asked - 1 for (_, tokens), asked in zip(ours, book, strict=True)]
    rows = [
        (
            "median error, unseen half",
            "at most 5%",
            _percent(of["unseen"].median_error),
            of["unseen"].median_error <= 0.05,
        ),
        (
            "rows within 10%, unseen half",
            "at least 85%",
            _percent(of["unseen"].within_tenth, 0),
            of["unseen"].within_tenth >= 0.85,
        ),
        (
            "rank correlation of MFU, all",
            "at least 0.85",
            f"{of['all'].rank_correlation:.2f}",
            of["all"].rank_correlation >= 0.85,
        ),
        (
            "Nemotron-4 340B, 6,144 over 1,536 GPUs",
            f"within 3% of {published:.3f}",
            f"{ratio:.3f} ({_signed(ratio / published - 1)})",
            abs(ratio / published - 1) <= 0.03,
        ),
        (
            "break-even of data parallelism, counted as the book does",
            "within 10% of 2,200 and 2,475",
            " and ".join(map(_signed, as_book)),
            max(map(abs, as_book)) <= 0.1,
        ),
        (
            "the same with our formula's (n-1)/n, 8 GPUs and 128 hosts",
            "within 10% of 2,200 and 2,475",
            " and ".join(map(_signed, plain)),
            max(map(abs, plain)) <= 0.1,
        ),
    ]
    return _table(
        ("goal", "asked", "came out", ""),
        [(*row[:3], "met" if row[3] else "**missed**") for row in rows],
    )


def summary() -> str:
    """Returns how well predictions agree: on the seen half, the unseen half, and all."""
    found = halves()
    seen = [each.row for each in found["seen"]]
    mfu = constant_mfu(seen)
    lines = []
    for half, predictions in found.items():
        of = backtest.summary(predictions)
        relative = backtest.relative_errors(predictions)
        scaled = backtest.errors_after_one_step(predictions)
        orders = backtest.orders(predictions)
        baseline = statistics.median(abs(each.row.mfu / mfu - 1) for each in predictions)
        lines.append(
            (
                half,
                of.rows,
                of.publications,
                _percent(of.median_error),
                _percent(of.within_tenth, 0),
                f"{of.rank_correlation:.2f}",
                _percent(statistics.median(map(abs, relative))),
                _percent(sum(abs(error) <= 0.1 for error in relative) / len(relative), 0),
                _percent(sum(abs(error) <= 0.1 for error in scaled) / len(scaled), 0),
                f"{_percent(sum(orders) / len(orders), 0)} of {len(orders)}",
                _percent(baseline),
            )
        )
    columns = (
        "half",
        "rows",
        "publications",
        "median error",
        "within 10%",
        "rank correlation of MFU",
        "median error, relative",
        "within 10%, relative",
        "within 10%, after one step",
        "pairs in the right order",
        f"median error of MFU {mfu:.3f} for all",
    )
    text = (
        f"The constant that fits the seen half best is {fitted():.2f};"
        f" `cluster_model.PRODUCTS_SHARE` is {PRODUCTS_SHARE:.2f}."
    )
    return f"{text}\n\n{_table(columns, lines)}"


ASSUMED: Mapping[str, tuple[ModuleType, Sequence[float]]] = {
    "MEMORY_SHARE": (step_model, (0.75, 0.95)),
    "UNFUSED_FACTOR": (step_model, (1, 3)),
    "OVERLAP_COST": (step_model, (0.0, 0.5)),
    "GRADIENT_BUCKETS": (step_model, (2, 32)),
    "TENSOR_OVERLAP": (step_model, (0.5, 0.9)),
    "NVLINK_SHARE": (cluster_model, (0.7, 0.9)),
    "NETWORK_LATENCY": (cluster_model, (0.0, 80e-6)),
}
"""Constants that were assumed, not fitted, with values to try in their place."""


def assumed() -> str:
    """Returns what other values of the assumed constants would change."""
    rows = [each.row for each in halves()["all"]]
    unseen = {id(each.row) for each in halves()["unseen"]}

    def line(name: str) -> tuple[object, ...]:
        found = backtest.predict(rows)
        errors = [abs(each.error) for each in found if id(each.row) in unseen]
        every = backtest.summary(found)
        figures = _percent(statistics.median(errors)), _percent(every.within_tenth, 0)
        return name, *figures, f"{every.rank_correlation:.2f}"

    lines = [line("as shipped")]
    for name, (module, values) in ASSUMED.items():
        for value in values:
            with mock.patch.object(module, name, value):
                lines.append(line(f"{name} = {value:g}"))
    columns = ("constant", "median error, unseen", "within 10%, all", "rank correlation, all")
    return _table(columns, lines)


def stated() -> str:
    """Returns how much of the dense rows' layouts their publications state."""
    rows = backtest.dense(backtest.load())
    layout = {"microbatch", "tensor", "pipe", "chunks", "recompute", "batch", "seq_len", "fsdp"}
    inferred = sum(bool(layout & set(row.inferred)) for row in rows)
    whole = sum(not row.inferred for row in rows)
    return (
        f"{whole} of {len(rows)} dense rows have nothing inferred. In {inferred}, part of the"
        " layout is inferred: microbatch, tensor, pipe, chunks, recomputation, batch, length or"
        " sharding."
    )


def publications() -> str:
    """Returns a line for each publication with dense rows."""
    found, titles = halves(), backtest.sources()
    unseen = {each.row.source for each in found["unseen"]}
    lines = []
    for source, predictions in _by(found["all"], lambda each: each.row.source).items():
        status = collections.Counter(each.row.status for each in predictions)
        lines.append(
            (
                f"[{titles[source]['title']}]({titles[source]['url']})",
                source,
                "unseen" if source in unseen else "seen",
                *_line(predictions),
                ", ".join(f"{number} {name}" for name, number in sorted(status.items())),
            )
        )
    return _table(("publication", "file", "half", *_COLUMNS, "status"), lines)


def accelerators() -> str:
    """Returns a line for each kind of GPU, and for each publication with several kinds."""
    lines = []
    found = predicted()
    for name, predictions in _by(found, _accelerator).items():
        lines.append(("all", name, *_line(predictions)))
    for source, predictions in _by(found, lambda each: each.row.source).items():
        parts = _by(predictions, _accelerator)
        if len(parts) > 1:
            lines += [(source, name, *_line(part)) for name, part in parts.items()]
    return _table(("file", "GPU", *_COLUMNS), lines)


def kinds() -> str:
    """Returns a line for each publication of rows that the formulas were not made for."""
    lines = []
    for kind in backtest.KINDS[1:]:
        for source, predictions in _by(predicted(kind), lambda each: each.row.source).items():
            lines.append((kind, source, *_line(predictions)))
    return _table(("kind", "file", *_COLUMNS), lines)


def break_evens() -> str:
    """Returns the break-even of data parallelism, beside that of the scaling book."""
    lines: list[Sequence[object]] = []
    for hosts in (1, 8, 16, 64, 128):
        book = list(BOOK.values())[hosts > 1]
        ours, as_book = break_even(hosts)
        lines.append(
            (
                f"{8 * hosts:,}",
                hosts,
                f"{ours:,.0f} ({_signed(ours / book - 1)})",
                f"{as_book:,.0f} ({_signed(as_book / book - 1)})",
                f"{book:,}",
            )
        )
    return _table(("GPUs", "hosts", "ours", "ours without (n-1)/n", "scaling book"), lines)


def nemotrons() -> str:
    """Returns Nemotron-4 340B at three sizes."""
    found, published, ratio = nemotron()
    lines: list[Sequence[object]] = [
        (
            f"{each.row.cluster.count:,}",
            f"{each.row.seconds:.1f}",
            f"{each.step.total:.2f}",
            _signed(each.error),
        )
        for each in found
    ]
    lines.append(
        ("last over first", f"{published:.3f}", f"{ratio:.3f}", _signed(ratio / published - 1))
    )
    return _table(("GPUs", "published (s)", "predicted (s)", "error"), lines)


def reasons() -> str:
    """Returns the reasons of rows that are more than 10% off, numbered, and how many rows of
    each kind have them.
    """
    found = [each for kind in backtest.KINDS for each in predicted(kind)]
    lines: list[Sequence[object]] = []
    for text, number in _numbers().items():
        off = [each for each in found if _is_off(each) and each.row.reason == text]
        errors = [each.error for each in off]
        lines.append(
            (number, text, len(off), f"{_signed(min(errors))} to {_signed(max(errors))}")
        )
    lines.append(("", "all", sum(map(_is_off, found)), ""))
    dense = [each for each in found if each.row.kind == "dense" and _is_off(each)]
    unexplained = sum(each.row.reason.startswith("not explained") for each in dense)
    text = (
        f"{len(dense)} dense rows are more than 10% off, and {unexplained} of these are not"
        " explained."
    )
    return f"{text}\n\n{_table(('', 'reason', 'rows that are off', 'errors'), lines)}"


def rows(kind: str) -> str:
    """Returns the table of all rows of a kind."""
    known = {id(each.row): each for each in predicted(kind)}  # `load` keeps its rows
    lines = []
    for row in backtest.load():
        if row.kind != kind:
            continue
        each = known.get(id(row))
        lines.append(
            (
                row.source,
                row.where,
                row.model,
                f"{row.cluster.count:,} {row.cluster.accelerator.name}",
                layout(row),
                f"{row.seconds:.4g}",
                f"{each.step.total:.4g}" if each else "no formula",
                _signed(each.error) if each else "",
                row.status,
                ", ".join(row.inferred),
                _numbers()[row.reason] if each and _is_off(each) else "",
            )
        )
    columns = ("file", "where", "model", "GPUs", "layout", "published (s)", "predicted (s)")
    return _table((*columns, "error", "status", "inferred", "reason"), lines)


def layout(row: Row) -> str:
    """Returns a row's layout in short: "p8 d4 t8 v3 z1 b1 full" is a pipeline of 8 stages, 4
    replicas, 8-way tensor parallelism, 3 chunks per stage, ZeRO-1, microbatches of one sequence
    and full recomputation.
    """
    plan = row.plan
    parts = [f"{_LETTERS[axis]}{size}" for axis, size in plan.axes.items() if size > 1]
    parts += [f"v{plan.chunks}"] if plan.chunks > 1 else []
    parts += [f"z{plan.zero}"] if plan.zero else []
    parts += [f"b{plan.microbatch}", f"L{row.shape.seq_len}"]
    parts += [plan.recompute] if plan.recompute != "none" else []
    return " ".join(parts + ["eager"] * plan.eager)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "goals": goals,
    "summary": summary,
    "assumed": assumed,
    "stated": stated,
    "publications": publications,
    "accelerators": accelerators,
    "break_even": break_evens,
    "nemotron": nemotrons,
    "kinds": kinds,
    "reasons": reasons,
    **{f"rows_{kind}": functools.partial(rows, kind) for kind in backtest.KINDS},
}


def page(text: str) -> str:
    """Returns the page with its tables made anew, and all other words as they are.

    Raises:
      ValueError: if the page lacks the place of a table, or has one for a table that is not
        known.
    """
    marks = re.findall(r"^<!-- (?!end -->)(\S+) -->$", text, re.M)
    if sorted(marks) != sorted(BLOCKS):
        raise ValueError(f"the page must have one place for each of {sorted(BLOCKS)}: {marks}")
    for name, block in BLOCKS.items():
        before, rest = re.split(rf"^<!-- {name} -->\n", text, maxsplit=1, flags=re.M)
        after = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {name} -->\n{block()}\n<!-- end -->{after}"
    return text


def stack(row: Row) -> str:
    """Returns the group of software that a row was measured with."""
    if any(name in row.where for name in ("maxtext", "paxml")):
        return "JAX"
    return STACK_OF.get(row.source, "others")


def points() -> list[tuple[str, str, float, float]]:
    """Returns what the picture shows: half, stack, published and predicted MFU of each dense
    row.
    """
    found = halves()
    return [
        (half, stack(each.row), round(each.row.mfu, 4), round(each.step.mfu, 4))
        for half in ("seen", "unseen")
        for each in found[half]
    ]


def digest() -> str:
    """Returns what identifies the points of the picture."""
    return hashlib.sha256(json.dumps(points()).encode()).hexdigest()


def draw() -> Figure:
    """Returns predicted against published MFU: the seen half above, the unseen half below."""
    figure = Figure(figsize=(5.2, 9.4), layout="constrained")
    found, top = points(), 0.8
    titles = {
        "seen": "Half that the constant was fitted to",
        "unseen": "Held-out half, which judges",
    }
    for axes, (half, title) in zip(figure.subplots(2, 1), titles.items(), strict=True):
        # An error of 10% in seconds is a factor of 1.1 or 0.9 in MFU, the other way round.
        axes.fill_between(
            [0, top], [0, top / 1.1], [0, top / 0.9], color="#D9D9D9", linewidth=0, zorder=0
        )
        axes.plot([0, top], [0, top], color=style.GREY, linewidth=1, zorder=1)
        for i, name in enumerate(STACKS):
            chosen = [point[2:] for point in found if point[:2] == (half, name)]
            if chosen:
                filled = half == "seen"
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


_COLUMNS = ("rows", "GPUs", "median error", "within 10%")


def _line(predictions: Sequence[Prediction]) -> tuple[object, ...]:
    counts = [each.row.cluster.count for each in predictions]
    errors = [each.error for each in predictions]
    return (
        len(predictions),
        f"{min(counts):,}" + (f" to {max(counts):,}" if max(counts) > min(counts) else ""),
        _signed(statistics.median(errors)),
        _percent(sum(abs(error) <= 0.1 for error in errors) / len(errors), 0),
    )


def _is_off(each: Prediction) -> bool:
    return abs(each.error) > 0.1


@functools.cache
def _numbers() -> dict[str, int]:
    """Returns the number of each reason, in the order in which rows need them."""
    texts = dict.fromkeys(
        each.row.reason for kind in backtest.KINDS for each in predicted(kind) if _is_off(each)
    )
    return {text: number for number, text in enumerate(texts, 1)}


def _accelerator(each: Prediction) -> str:
    return each.row.cluster.accelerator.name


def _by(
    predictions: Sequence[Prediction], key: Callable[[Prediction], str]
) -> dict[str, list[Prediction]]:
    parts: dict[str, list[Prediction]] = {}
    for each in predictions:
        parts.setdefault(key(each), []).append(each)
    return dict(sorted(parts.items()))


def _percent(value: float, digits: int = 1) -> str:
    return f"{value:.{digits}%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"


def _table(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        + [f"| {' | '.join(row)} |" for row in rows]
    )


def main() -> None:
    """Prints the tables but that of all rows, and writes the page and its picture anew."""
    for name in ("goals", "summary", "publications", "accelerators", "break_even", "nemotron"):
        print(f"{BLOCKS[name]()}\n")
    PAGE.write_text(page(PAGE.read_text()))
    figures.use_style()
    draw().savefig(PICTURE, facecolor="white", metadata={"Description": digest()})
    print(f"wrote {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
