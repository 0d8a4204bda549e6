"""Compares predicted with published step times, and makes docs/backtest.md and its picture.

    python -m benchmarks.backtest

In the page, the function of `BLOCKS` with that NAME makes the text between `<!-- NAME -->` and
`<!-- end -->`. All other text is written by hand.
"""

import collections
import functools
import hashlib
import itertools
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
from course_lib.many_devices import cluster_model
from course_lib.many_devices.cluster_model import PRODUCTS_SHARE, Cluster
from course_lib.measure import hardware
from course_lib.planner import price
from course_lib.show import figures
from course_lib.show.figures import style

PAGE, PICTURE = Path("docs/backtest.md"), Path("docs/backtest.png")
BOOK = {"inside a host": 2200, "across hosts": 2475}
"""Tokens per GPU from which the traffic of data parallelism is hidden, H100
(https://jax-ml.github.io/scaling-book/gpus)."""
STACKS: Mapping[str, Sequence[str]] = {
    "Megatron-LM": """bloom_2022 korthikanti_2022 megatron_core_2024 megatron_llama_2023
        mt_nlg_2022 narayanan_2021""".split(),
    "NeMo": """dgxc_benchmarking nemo_automodel_2025 nemo_launcher_2022 nemotron4_15b_2024
        nemotron4_2024""".split(),
    "PyTorch FSDP": "fms_fsdp_2024 llm_foundry_2023 torchtitan_2024".split(),
    "JAX": "gpu_recipes_2025 jax_toolbox maxtext_2024".split(),
    "others": [],
}
"""Groups of publications, by software. The picture has a marker for each."""
_LETTERS = {"pipe": "p", "data": "d", "fsdp": "f", "expert": "e", "context": "c", "tensor": "t"}


@functools.cache
def predicted(kind: str = "dense") -> list[Prediction]:
    """Returns the predictions of a kind of rows, with the library's constant."""
    return backtest.predict([row for row in backtest.load() if row.kind == kind])


@functools.cache
def halves() -> dict[str, list[Prediction]]:
    """Returns the predictions of dense rows: of the half used for fitting, the other half, and
    all.
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


def break_even(hosts: int) -> tuple[float, float]:
    """Returns the tokens per GPU from which the backward pass hides the all-reduce of data
    parallelism on H100s, at ideal rates: by our formula, and without its factor (n-1)/n, as in
    the scaling book's rule of thumb.

    Args:
      hosts: of eight GPUs.
    """
    cluster = Cluster(hardware.get("h100"), 8 * hosts, ideal=True)
    group = cluster.group({"data": cluster.count}, "data")
    # A parameter has a gradient of 2 bytes, and 4 FLOPs per token in the backward pass.
    peak = cluster.accelerator.peak_flops["bfloat16"]
    tokens = cluster_model.all_reduce(group, 2.0) * peak / 4
    n = 8 if hosts == 1 else hosts
    return tokens, tokens * n / (n - 1)


def nemotron() -> tuple[list[Prediction], float, float]:
    """Returns Nemotron-4 340B on 1,536, 3,072 and 6,144 GPUs, and the ratio of the last step
    time to the first: published and predicted.
    """
    runs = [each for each in predicted() if each.row.source == "nemotron4_2024"]
    published, by_formula = (
        [each.row.seconds for each in runs],
        [each.step.total for each in runs],
    )
    return runs, published[-1] / published[0], by_formula[-1] / by_formula[0]


def goals() -> str:
    """Returns the goals, which were set before anything was predicted, and the results."""
    unseen, every = (backtest.summary(halves()[half]) for half in ("unseen", "all"))
    _, published, ratio = nemotron()
    inside, across = BOOK.values()
    ours = break_even(1)[0] / inside - 1, break_even(128)[0] / across - 1
    rows = [
        ("median error, unseen half", "at most 5%", _percent(unseen.median_error)),
        ("rows within 10%, unseen half", "at least 85%", _percent(unseen.within_tenth, 0)),
        ("rank correlation of MFU, all", "at least 0.85", f"{every.rank_correlation:.2f}"),
        (
            "Nemotron-4 340B, 6,144 over 1,536 GPUs",
            f"within 3% of {published:.3f}",
            f"{ratio:.3f} ({_signed(ratio / published - 1)})",
        ),
        (
            "break-even of data parallelism, 8 GPUs",
            f"within 10% of {inside:,}",
            _signed(ours[0]),
        ),
        (
            "break-even of data parallelism, 128 hosts",
            f"within 10% of {across:,}",
            _signed(ours[1]),
        ),
    ]
    met = (
        unseen.median_error <= 0.05,
        unseen.within_tenth >= 0.85,
        every.rank_correlation >= 0.85,
        abs(ratio / published - 1) <= 0.03,
        *(abs(error) <= 0.1 for error in ours),
    )
    return _table(
        ("goal", "target", "result", ""),
        [(*row, "met" if ok else "**missed**") for row, ok in zip(rows, met, strict=True)],
    )


def summary() -> str:
    """Returns the agreement on the seen half, the unseen half, and all dense rows."""
    seen = [each.row for each in halves()["seen"]]
    lines, compared = [], []
    for half, predictions in halves().items():
        same = backtest.same_mfu([each.row for each in predictions], seen)
        result = backtest.summary(predictions)
        relative = backtest.relative_errors(predictions)
        pairs = backtest.pairs(predictions)
        baseline = statistics.median(abs(each.error) for each in same)
        lines.append(
            {
                "half": half,
                "rows": result.rows,
                "publications": result.publications,
                "median error": _percent(result.median_error),
                "within 10%": _percent(result.within_tenth, 0),
                "rank correlation of MFU": f"{result.rank_correlation:.2f}",
                "median error, relative": _percent(statistics.median(map(abs, relative))),
                "within 10%, relative": _within_tenth(relative),
                "within 10%, after one step": _within_tenth(
                    backtest.errors_after_one_step(predictions)
                ),
                "pairs in the right order": _in_order(pairs),
                "pairs of layouts": _in_order(backtest.of_layouts(pairs)),
            }
        )
        compared.append(
            {
                f"half, with one MFU of {same[0].mfu:.3f}": half,
                "median error": _percent(baseline),
                "within 10%, relative": _within_tenth(backtest.relative_errors(same)),
                "within 10%, after one step": _within_tenth(
                    backtest.errors_after_one_step(same)
                ),
            }
        )
    level, of_unseen = (
        statistics.median(map(abs, backtest.relative_errors(halves()[half])))
        for half in ("all", "unseen")
    )
    text = (
        f"The constant that fits the seen half best is {fitted():.2f};"
        f" `cluster_model.PRODUCTS_SHARE` is {PRODUCTS_SHARE:.2f}. Relative to the level of"
        f" each publication, the median error is {_percent(level)} (unseen half:"
        f" {_percent(of_unseen)})."
    )
    tables = (
        _table(tuple(rows[0]), [tuple(row.values()) for row in rows])
        for rows in (lines, compared)
    )
    return "\n\n".join((text, *tables))


def layouts() -> str:
    """Returns for each publication its pairs of layouts on the same number of GPUs: how many
    are in the right order, by the formulas and by the rule that needs none.
    """
    by_source: dict[str, list[tuple[Prediction, Prediction]]] = {}
    for pair in backtest.of_layouts(backtest.pairs(halves()["all"])):
        by_source.setdefault(pair[0].row.source, []).append(pair)
    by_source["all"] = list(itertools.chain(*by_source.values()))
    lines = [
        (
            source,
            len(pairs),
            sum(backtest.orders(pairs)),
            sum(backtest.orders_by_rule(pairs)),
        )
        for source, pairs in by_source.items()
    ]
    return _table(("file", "pairs", "in the right order", "by the rule"), lines)


def layout_kinds() -> str:
    """Returns a line for each kind of layout on H100s."""
    on_h100s = [each for each in halves()["all"] if _accelerator(each) == "h100"]
    lines = [
        (kind, *_line(part))
        for kind, part in _by(
            on_h100s, lambda each: backtest.layout_kind(each.row.plan)
        ).items()
    ]
    return _table(("layout", *_COLUMNS), lines)


ASSUMED: Mapping[str, tuple[ModuleType, Sequence[float]]] = {
    "MEMORY_SHARE": (price, (0.75, 0.95)),
    "UNFUSED_FACTOR": (price, (1, 3)),
    "OVERLAP_COST": (price, (0.0, 0.5)),
    "GRADIENT_BUCKETS": (price, (2, 32)),
    "TENSOR_OVERLAP": (price, (0.5, 0.9)),
    "NVLINK_SHARE": (cluster_model, (0.7, 0.9)),
    "NETWORK_LATENCY": (cluster_model, (0.0, 80e-6)),
}
"""Constants that were assumed, not fitted, with other values to try."""


def assumed() -> str:
    """Returns the agreement with other values of the assumed constants."""
    rows = [each.row for each in halves()["all"]]
    unseen = {id(each.row) for each in halves()["unseen"]}

    def line(name: str) -> tuple[object, ...]:
        predictions = backtest.predict(rows)
        errors = [abs(each.error) for each in predictions if id(each.row) in unseen]
        every = backtest.summary(predictions)
        figures = _percent(statistics.median(errors)), _percent(every.within_tenth, 0)
        return name, *figures, f"{every.rank_correlation:.2f}"

    lines = [line("as in the library")]
    for name, (module, values) in ASSUMED.items():
        for value in values:
            with mock.patch.object(module, name, value):
                lines.append(line(f"{name} = {value:g}"))
    columns = ("constant", "median error, unseen", "within 10%, all", "rank correlation, all")
    return _table(columns, lines)


def stated() -> str:
    """Returns the number of dense rows whose publications state the layout."""
    rows = backtest.dense(backtest.load())
    layout = {"microbatch", "tensor", "pipe", "chunks", "recompute", "batch", "seq_len", "fsdp"}
    inferred = sum(bool(layout & set(row.inferred)) for row in rows)
    stated = sum(not row.inferred for row in rows)
    return (
        f"{stated} of {len(rows)} dense rows have nothing inferred. In {inferred}, part of the"
        " layout is inferred: microbatch, tensor, pipe, chunks, recomputation, batch, length or"
        " sharding."
    )


def publications() -> str:
    """Returns a line for each publication with dense rows."""
    titles = backtest.sources()
    unseen = {each.row.source for each in halves()["unseen"]}
    lines = []
    for source, predictions in _by(halves()["all"], _source).items():
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
    lines = [
        ("all", name, *_line(part)) for name, part in _by(predicted(), _accelerator).items()
    ]
    for source, predictions in _by(predicted(), _source).items():
        parts = _by(predictions, _accelerator)
        if len(parts) > 1:
            lines += [(source, name, *_line(part)) for name, part in parts.items()]
    return _table(("file", "GPU", *_COLUMNS), lines)


def kinds() -> str:
    """Returns a line for each publication with rows of other kinds than dense."""
    lines = [
        (kind, source, *_line(predictions))
        for kind in backtest.KINDS[1:]
        for source, predictions in _by(predicted(kind), _source).items()
    ]
    return _table(("kind", "file", *_COLUMNS), lines)


def break_evens() -> str:
    """Returns the break-even of data parallelism, beside that of the scaling book."""
    lines = []
    for hosts in (1, 8, 16, 64, 128):
        book = BOOK["across hosts" if hosts > 1 else "inside a host"]
        both = [f"{tokens:,.0f} ({_signed(tokens / book - 1)})" for tokens in break_even(hosts)]
        lines.append((f"{8 * hosts:,}", hosts, *both, f"{book:,}"))
    return _table(("GPUs", "hosts", "ours", "ours without (n-1)/n", "scaling book"), lines)


def nemotrons() -> str:
    """Returns Nemotron-4 340B at three sizes."""
    runs, published, ratio = nemotron()
    lines = [
        (
            f"{run.row.cluster.count:,}",
            f"{run.row.seconds:.1f}",
            f"{run.step.total:.2f}",
            run.error,
        )
        for run in runs
    ]
    lines.append(("last over first", f"{published:.3f}", f"{ratio:.3f}", ratio / published - 1))
    return _table(
        ("GPUs", "published (s)", "predicted (s)", "error"),
        [(*line, _signed(error)) for *line, error in lines],
    )


def reasons() -> str:
    """Returns the numbered reasons of rows that are more than 10% off, with the number of such
    rows and their errors.
    """
    lines: list[Sequence[object]] = []
    for text, number in _numbers().items():
        errors = [each.error for each in _off() if each.row.reason == text]
        span = f"{_signed(min(errors))} to {_signed(max(errors))}"
        lines.append((number, text, len(errors), span))
    lines.append(("", "all", len(_off()), ""))
    dense = [each for each in _off() if each.row.kind == "dense"]
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
        line = {
            "file": row.source,
            "where": row.where,
            "model": row.model,
            "GPUs": f"{row.cluster.count:,} {row.cluster.accelerator.name}",
            "layout": layout(row),
            "published (s)": f"{row.seconds:.4g}",
            "predicted (s)": f"{each.step.total:.4g}" if each else "no formula",
            "error": _signed(each.error) if each else "",
            "status": row.status,
            "inferred": ", ".join(row.inferred),
            "reason": _numbers()[row.reason] if each and _is_off(each) else "",
        }
        lines.append(line)
    return _table(tuple(lines[0]), [tuple(line.values()) for line in lines])


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
    "layouts": layouts,
    "layout_kinds": layout_kinds,
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
    """Returns the page with new tables and all other text unchanged.

    Raises:
      ValueError: if the page lacks the place of a table, or has the place of an unknown one.
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
        axes.fill_between(
            [0, top], [0, top / 1.1], [0, top / 0.9], color="#D9D9D9", linewidth=0, zorder=0
        )
        axes.plot([0, top], [0, top], color=style.GREY, linewidth=1, zorder=1)
        for i, name in enumerate(STACKS):
            chosen = [point[2:] for point in points() if point[:2] == (half, name)]
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
        _within_tenth(errors),
    )


def _in_order(pairs: Sequence[tuple[Prediction, Prediction]]) -> str:
    right = backtest.orders(pairs)
    return f"{_percent(sum(right) / len(right), 0)} of {len(right)}"


def _within_tenth(errors: Sequence[float]) -> str:
    return _percent(sum(abs(error) <= 0.1 for error in errors) / len(errors), 0)


def _is_off(each: Prediction) -> bool:
    return abs(each.error) > 0.1


def _off() -> list[Prediction]:
    return [each for kind in backtest.KINDS for each in predicted(kind) if _is_off(each)]


@functools.cache
def _numbers() -> dict[str, int]:
    """Returns the number of each reason, in the order in which rows need them."""
    texts = dict.fromkeys(each.row.reason for each in _off())
    return {text: number for number, text in enumerate(texts, 1)}


def _source(each: Prediction) -> str:
    return each.row.source


def _accelerator(each: Prediction) -> str:
    return each.row.cluster.accelerator.name


def _by(
    predictions: Sequence[Prediction], key: Callable[[Prediction], str]
) -> dict[str, list[Prediction]]:
    """Groups predictions by a key, in order of keys."""
    return {
        name: list(part)
        for name, part in itertools.groupby(sorted(predictions, key=key), key=key)
    }


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
    """Prints the tables without single rows, and writes the page and its picture."""
    for name in ("goals", "summary", "publications", "accelerators", "break_even", "nemotron"):
        print(f"{BLOCKS[name]()}\n")
    PAGE.write_text(page(PAGE.read_text()))
    figures.use_style()
    draw().savefig(PICTURE, facecolor="white", metadata={"Description": digest()})
    print(f"wrote {PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
