"""Predicted against published step times: how far the formulas of `planner` can be trusted.

The folder `published_steps` holds step times that others measured: one file per publication,
with the place of each figure and the layout that it was measured with. Here each is predicted.

    rows = load()
    seen, unseen = halves(rows)
    share = fit(seen)                 # the one constant
    print(summary(predict(unseen, share)))

Every second publication, in alphabetical order, is used for fitting; the others judge. No row
was chosen by its error. The `kind` of a row keeps apart what the formulas were not made for:
experts, eight-bit products, offload, TPUs. docs/backtest.csv lists all rows with predictions.
"""

import dataclasses
import functools
import importlib.resources
import itertools
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.scipy.stats import rankdata

from course_lib import planner
from course_lib.many_devices.cluster_model import PRODUCTS_SHARE, Cluster
from course_lib.measure import hardware
from course_lib.measure.hardware import TpuTarget

FOLDER = importlib.resources.files("course_lib.lessons") / "published_steps"
KINDS = ("dense", "moe", "fp8", "offload", "tpu")
UNITS = ("seconds", "TFLOP/s", "MFU", "tokens/s")
# Fields that a row may leave out.
DEFAULTS: Mapping[str, Any] = (
    dict.fromkeys(("tensor", "pipe", "context", "expert", "chunks"), 1)
    | dict(fsdp=0, zero=0, recompute="none", sequence_parallel=False, fused_attention=False)
    | dict(eager=False, tensor_overlap=False, wgrad_overlap=False, pipe_overlap=False)
    | dict(data_overlap=True, parameter_overlap=True, gradient_bytes=2)
    | dict(network=None, memory_bandwidth=None, flops="", inferred=(), reason="")
)
_PLAN = """batch microbatch chunks zero recompute fused_attention eager sequence_parallel
    tensor_overlap wgrad_overlap data_overlap parameter_overlap pipe_overlap
    gradient_bytes""".split()
_ROW = "where status kind model unit flops reason".split()
_REQUIRED = """where status kind model unit published accelerator gpus batch seq_len
    microbatch""".split()


@dataclasses.dataclass(frozen=True)
class Row:
    """A published measurement."""

    source: str  # name of the publication's file
    where: str  # the table and row in it
    status: str  # "checked" at its source, or "from notes": read where others quote it
    kind: str  # one of `KINDS`
    model: str
    shape: "planner.Shape"
    plan: "planner.Plan"
    cluster: Cluster
    published: float  # in `unit`
    unit: str  # "seconds" per step; "TFLOP/s" or "tokens/s" per GPU; "MFU"
    flops: str  # how the source counts the FLOPs of "TFLOP/s" and "MFU": a name of `FLOPS`
    inferred: tuple[str, ...]  # not stated by the source: defaults of its software
    reason: str  # what may explain its error; a row without one has its publication's

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.plan.batch * self.shape.seq_len

    @property
    def seconds(self) -> float:
        """Published seconds per step."""
        if self.unit == "seconds":
            return self.published
        if self.unit == "tokens/s":
            return self.tokens / (self.published * self.cluster.count)
        rate = self.published * (1e12 if self.unit == "TFLOP/s" else self.peak)
        return self.tokens * FLOPS[self.flops](self.shape) / (rate * self.cluster.count)

    @property
    def mfu(self) -> float:
        """Published MFU, with FLOPs as `Shape.flops` counts them."""
        return self.tokens * self.shape.flops / (self.seconds * self.cluster.count * self.peak)

    @functools.cached_property
    def step(self) -> "planner.Step":
        """The work and the transfers of a device; no constant of a prediction changes them."""
        return planner.step(self.shape, self.plan)

    @property
    def peak(self) -> float:
        """The peak rate to which MFU refers, in FLOP/s: that of bfloat16."""
        return self.cluster.accelerator.peak_flops["bfloat16"]


def _narayanan(passes: int, logits: int, shape: "planner.Shape") -> float:
    N, D, L, V = shape.layers, shape.width, shape.seq_len, shape.vocab
    return 24 * passes * N * D * D * (1 + L / (6 * D) + V / (logits * N * D))


def _scores(shape: "planner.Shape") -> float:
    return 12.0 * shape.layers * shape.heads * shape.head_dim * shape.seq_len


# FLOPs per token, as publications count them: Narayanan et al. (2021, section 5.1) with and
# without recomputation (the output layer is not computed again: 16 is 96 / 6, and 12 is 72 /
# 6); 6 per parameter (6M: without the embedding) plus attention in full (12lhs) or its causal
# half (6lhs).
FLOPS: Mapping[str, Callable[..., float]] = {
    "narayanan": functools.partial(_narayanan, 4, 16),
    "narayanan-model": functools.partial(_narayanan, 3, 12),
    "6N+12lhs": lambda shape: 6 * shape.parameters + _scores(shape),
    "6N+6lhs": lambda shape: 6 * shape.parameters + _scores(shape) / 2,
    "6M+12lhs": lambda shape: shape.flops,
}


def publications() -> dict[str, dict[str, Any]]:
    """Returns the files of `published_steps` by name, in alphabetical order."""
    files = sorted(FOLDER.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".toml")
    }


@functools.cache
def load() -> tuple[Row, ...]:
    """Returns all rows, publications in alphabetical order."""
    rows = []
    for source, publication in publications().items():
        for number, fields in enumerate(publication["rows"], 1):
            try:
                rows.append(_row(source, publication, fields))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{source}.toml, row {number}: {error!r}") from error
    return tuple(rows)


def _row(source: str, publication: Mapping[str, Any], fields: Mapping[str, Any]) -> Row:
    row = {**DEFAULTS, "reason": publication.get("reason", ""), **fields}
    if unknown := row.keys() - DEFAULTS.keys() - set(_REQUIRED):
        raise ValueError(f"{sorted(unknown)} must be fields of a row")
    for name, known in (("kind", KINDS), ("unit", UNITS)):
        if row[name] not in known:
            raise ValueError(f"{name}={row[name]!r} must be one of {known}")
    sizes = dict(publication["models"][row["model"]])
    sizes["matrices"] = 3 if sizes.pop("gated", False) else 2
    sizes["slots"] = float(sizes.pop("experts_per_token", 1))
    fsdp = max(row["fsdp"], 1)
    others = row["tensor"] * row["pipe"] * row["context"] * row["expert"]
    if fsdp * others > row["gpus"]:  # fsdp counts the devices along "context", too
        fsdp //= row["context"]
    axes = {"pipe": row["pipe"], "data": row["gpus"] // (others * fsdp), "fsdp": fsdp}
    axes |= {axis: row[axis] for axis in ("expert", "context", "tensor")}
    if math.prod(axes.values()) != row["gpus"]:
        raise ValueError(f"axes={axes} must multiply to gpus={row['gpus']}")
    accelerator = hardware.get(row["accelerator"])
    if row["memory_bandwidth"]:
        accelerator = dataclasses.replace(accelerator, memory_bandwidth=row["memory_bandwidth"])
    dtype = "float8_e4m3fn" if row["kind"] == "fp8" else "bfloat16"
    return Row(
        source=source,
        shape=planner.Shape(seq_len=row["seq_len"], **sizes),
        plan=planner.Plan(axes, dtype=dtype, **{name: row[name] for name in _PLAN}),
        cluster=Cluster(accelerator, row["gpus"], port_bandwidth=row["network"]),
        published=float(row["published"]),
        inferred=tuple(row["inferred"]),
        **{name: row[name] for name in _ROW},
    )


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A published row and its predicted step."""

    row: Row
    step: "planner.Breakdown"

    @property
    def error(self) -> float:
        """Predicted over published seconds, less 1."""
        return self.step.total / self.row.seconds - 1


@dataclasses.dataclass(frozen=True)
class SameMfu:
    """The baseline that knows no formula: every step reaches the same MFU."""

    row: Row
    mfu: float

    @property
    def error(self) -> float:
        """Predicted over published seconds, less 1."""
        return self.row.mfu / self.mfu - 1


Predictions = Sequence[Prediction | SameMfu]


def predict(rows: Sequence[Row], share: float = PRODUCTS_SHARE) -> list[Prediction]:
    """Predicts the step of each row, if products reach this share of the peak rate. Left out:
    several TPU slices, and slices whose layout is not in `hardware`.
    """
    predictions = []
    for row in rows:
        cluster = dataclasses.replace(row.cluster, products_share=share)
        target = cluster.accelerator.target
        one_slice = row.plan.size("data") == 1
        if not isinstance(target, TpuTarget) or (one_slice and cluster.count in target.layouts):
            predictions.append(Prediction(row, planner.seconds(row.step, cluster)))
    return predictions


def median_error(predictions: Predictions) -> float:
    """Returns the median of the absolute errors, as a fraction."""
    return statistics.median(abs(each.error) for each in predictions)


def same_mfu(rows: Sequence[Row], fitted_to: Sequence[Row]) -> list[SameMfu]:
    """Predicts all rows by the one MFU that fits some of them with the least median error, to a
    thousandth.
    """

    def all_at(mfu: float, rows: Sequence[Row]) -> list[SameMfu]:
        return [SameMfu(row, mfu) for row in rows]

    mfus = (n / 1000 for n in range(200, 800))
    return all_at(min(mfus, key=lambda mfu: median_error(all_at(mfu, fitted_to))), rows)


def dense(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows by which the formulas are judged."""
    return [row for row in rows if row.kind == "dense"]


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Divides rows by publication: first, third, ... in alphabetical order, and the others."""
    seen = set(sorted({row.source for row in rows})[::2])
    return (
        [row for row in rows if row.source in seen],
        [row for row in rows if row.source not in seen],
    )


def fit(rows: Sequence[Row]) -> float:
    """Returns the share of the peak rate with the least median error, to a hundredth."""
    shares = (n / 100 for n in range(50, 100))
    return min(shares, key=lambda share: median_error(predict(rows, share)))


@dataclasses.dataclass(frozen=True)
class Summary:
    """How well predictions agree with publications."""

    rows: int
    publications: int
    median_error: float  # of the absolute errors, as a fraction
    within_tenth: float  # share of rows with an error of at most 10%
    rank_correlation: float  # Spearman's, of published and predicted MFU


def summary(predictions: Sequence[Prediction]) -> Summary:
    """Compares predictions, at least two, with their publications."""
    if len(predictions) < 2:
        raise ValueError(f"predictions must be at least two, not {len(predictions)}")
    published = rankdata(np.array([each.row.mfu for each in predictions]))
    predicted = rankdata(np.array([each.step.mfu for each in predictions]))
    return Summary(
        len(predictions),
        len({each.row.source for each in predictions}),
        median_error(predictions),
        within_tenth([each.error for each in predictions]),
        float(np.corrcoef(published, predicted)[0, 1]),
    )


def within_tenth(errors: Sequence[float]) -> float:
    """Returns the share of errors of at most 10%."""
    return sum(abs(error) <= 0.1 for error in errors) / len(errors)


def relative_errors(predictions: Predictions) -> list[float]:
    """Returns errors relative to the level of each publication on each accelerator: predicted
    over published seconds, divided by the median of this ratio over its other rows, less 1.
    Levels of fewer than three rows are left out.

    One constant cannot fit several software stacks. This error is mostly about the rest: more
    GPUs, other parallelism, longer sequences, another model.
    """
    by_level: dict[tuple[str, str], list[float]] = {}
    for each in predictions:
        level = each.row.source, each.row.cluster.accelerator.name
        by_level.setdefault(level, []).append(math.log1p(each.error))
    return [
        math.expm1(error - statistics.median(errors[:i] + errors[i + 1 :]))
        for errors in by_level.values()
        if len(errors) >= 3
        for i, error in enumerate(errors)
    ]


def _compared(row: Row) -> tuple[str, str, str, int]:
    return row.source, row.cluster.accelerator.name, row.model, row.shape.seq_len


def task(row: Row) -> tuple[Any, ...]:
    """Returns what a layout is chosen for: model, GPUs and batch of a publication."""
    return *_compared(row), row.cluster.count, row.plan.batch


def _layout(row: Row) -> tuple[Mapping[str, int], int]:
    return row.plan.axes, row.plan.chunks


class Pair(NamedTuple):
    """Two layouts of one task, and how many times as long as the second the first takes."""

    one: Row
    other: Row
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """0.1 if one of the two ratios is 1.1 times the other."""
        return math.expm1(abs(math.log(self.predicted / self.published)))

    @property
    def apart(self) -> float:
        """0.1 if the formula prices one of the two layouts 1.1 times as long as the other."""
        return math.expm1(abs(math.log(self.predicted)))

    @property
    def in_order(self) -> bool:
        """Whether the formula calls that layout the faster one which was."""
        return (self.predicted > 1) == (self.published > 1)


def layout_pairs(predictions: Sequence[Prediction]) -> list[Pair]:
    """Returns all pairs of steps with other axes or chunks and the same task. The errors of two
    of three are at most `planner.LAYOUT_ERROR`.
    """
    return [
        Pair(
            one.row,
            other.row,
            one.step.total / other.step.total,
            one.row.seconds / other.row.seconds,
        )
        for one, other in itertools.combinations(predictions, 2)
        if task(one.row) == task(other.row) and _layout(one.row) != _layout(other.row)
    ]
