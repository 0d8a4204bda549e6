"""Predicted against published step times: how far the formulas of `planner` can be trusted.

The folder `published_steps` holds step times that others measured: one file per publication,
with the place of each figure and the layout that it was measured with. Here each is predicted.

    rows = load()
    seen, unseen = halves(rows)
    share = fit(seen)                 # the one constant
    print(summary(predict(unseen, share)))

Every second publication, in alphabetical order, is used for fitting; the others judge. No row
was chosen by its error. The `kind` of a row keeps apart what the formulas were not made for:
experts, eight-bit products, offload, TPUs. docs/backtest.md lists all rows with predictions.
"""

import dataclasses
import functools
import importlib.resources
import itertools
import math
import statistics
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
_REQUIRED = {"where", "status", "kind", "model", "unit", "published", "accelerator", "gpus"}
_REQUIRED |= {"batch", "seq_len", "microbatch"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
      source: name of the publication's file.
      where: the table and row in it.
      status: "checked" at its source, or "from notes": read where others quote it.
      kind: one of `KINDS`.
      model: its name.
      shape: sizes of the model.
      plan: how it was trained.
      cluster: the devices.
      published: the figure, in `unit`.
      unit: "seconds" per step, "TFLOP/s" per GPU, "MFU", or "tokens/s" per GPU.
      flops: how the source counts the FLOPs of "TFLOP/s" and "MFU": a name of `FLOPS`.
      inferred: fields that the source does not state, taken from the software's defaults.
      reason: how the row differs from the others, or what may explain its error. A row without
        one has the reason of its publication.
    """

    source: str
    where: str
    status: str
    kind: str
    model: str
    shape: "planner.Shape"
    plan: "planner.Plan"
    cluster: Cluster
    published: float
    unit: str
    flops: str
    inferred: tuple[str, ...]
    reason: str

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

    @property
    def peak(self) -> float:
        """The peak rate to which MFU refers, in FLOP/s: that of bfloat16."""
        return self.cluster.accelerator.peak_flops["bfloat16"]


def _narayanan(shape: "planner.Shape", passes: int) -> float:
    N, D, L, V = shape.layers, shape.width, shape.seq_len, shape.vocab
    # The output layer is not computed again: 16 is 96 / 6, and 12 is 72 / 6.
    logits = {4: 16, 3: 12}[passes]
    return 24 * passes * N * D * D * (1 + L / (6 * D) + V / (logits * N * D))


FLOPS: Mapping[str, Callable[..., float]] = {
    "narayanan": functools.partial(_narayanan, passes=4),
    "narayanan-model": functools.partial(_narayanan, passes=3),
    "6N+12lhs": lambda shape: 6 * shape.parameters + _scores(shape),
    "6N+6lhs": lambda shape: 6 * shape.parameters + _scores(shape) / 2,
    "6M+12lhs": lambda shape: shape.flops,
}
"""FLOPs per token, as publications count them: Narayanan et al. (2021, section 5.1) with and
without recomputation; 6 per parameter (6M: without the embedding) plus attention in full
(12lhs) or its causal half (6lhs).
"""


def _scores(shape: "planner.Shape") -> float:
    return 12.0 * shape.layers * shape.heads * shape.head_dim * shape.seq_len


def _publications() -> dict[str, dict[str, Any]]:
    """Returns the publications by file name, in alphabetical order."""
    files = (file for file in FOLDER.iterdir() if file.name.endswith(".toml"))
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8"))
        for file in sorted(files, key=lambda file: file.name)
    }


@functools.cache
def load() -> tuple[Row, ...]:
    """Returns all rows, publications in alphabetical order.

    Raises:
      ValueError: naming file and row, if a layout does not multiply to its GPUs, or a field is
        unknown.
    """
    rows = []
    for source, publication in _publications().items():
        for number, fields in enumerate(publication["rows"], 1):
            try:
                rows.append(_row(source, publication, fields))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{source}.toml, row {number}: {error!r}") from error
    return tuple(rows)


def sources() -> dict[str, dict[str, str]]:
    """Returns title, url and note of each publication, by the name of its file."""
    return {
        name: {key: publication.get(key, "") for key in ("title", "url", "note")}
        for name, publication in _publications().items()
    }


def _row(source: str, publication: Mapping[str, Any], fields: Mapping[str, Any]) -> Row:
    row = {**DEFAULTS, "reason": publication.get("reason", ""), **fields}
    sizes = dict(publication["models"][row["model"]])
    sizes["matrices"] = 3 if sizes.pop("gated", False) else 2
    sizes["slots"] = float(sizes.pop("experts_per_token", 1))
    fsdp = max(row["fsdp"], 1)
    others = row["tensor"] * row["pipe"] * row["context"] * row["expert"]
    if fsdp * others > row["gpus"]:  # fsdp counts the devices along "context", too
        fsdp //= row["context"]
    axes = {"pipe": row["pipe"], "data": row["gpus"] // (others * fsdp), "fsdp": fsdp}
    axes |= {axis: row[axis] for axis in ("expert", "context", "tensor")}
    dtype = "float8_e4m3fn" if row["kind"] == "fp8" else "bfloat16"
    plan = planner.Plan(axes, dtype=dtype, **{name: row[name] for name in _PLAN})
    accelerator = hardware.get(row["accelerator"])
    if row["memory_bandwidth"]:
        accelerator = dataclasses.replace(accelerator, memory_bandwidth=row["memory_bandwidth"])
    if math.prod(axes.values()) != row["gpus"]:
        raise ValueError(f"axes={axes} must multiply to gpus={row['gpus']}")
    for name, known in (("kind", KINDS), ("unit", UNITS)):
        if row[name] not in known:
            raise ValueError(f"{name}={row[name]!r} must be one of {known}")
    if row["unit"] in ("TFLOP/s", "MFU") and row["flops"] not in FLOPS:
        raise ValueError(f"flops={row['flops']!r} must be one of {tuple(FLOPS)}")
    if unknown := set(row) - set(DEFAULTS) - _REQUIRED:
        raise ValueError(f"{sorted(unknown)} must be fields of a row")
    return Row(
        source=source,
        shape=planner.Shape(seq_len=row["seq_len"], **sizes),
        plan=plan,
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


def predict(rows: Sequence[Row], share: float = PRODUCTS_SHARE) -> list[Prediction]:
    """Predicts the step of each row, except on several TPU slices or on a slice whose layout is
    not in `hardware`.

    Args:
      rows: of `load`.
      share: share of the peak rate that products reach.

    Raises:
      TypeError: if something else than a `Row` is among the rows.
    """
    predictions = []
    for row in rows:
        cluster = dataclasses.replace(row.cluster, products_share=share)
        target = cluster.accelerator.target
        slices = row.plan.size("data")  # of TPUs
        if isinstance(target, TpuTarget) and (
            slices > 1 or cluster.count not in target.layouts
        ):
            continue
        step = planner.seconds(planner.step(row.shape, row.plan), cluster)
        predictions.append(Prediction(row, step))
    return predictions


def same_mfu(rows: Sequence[Row], fitted_to: Sequence[Row]) -> list[SameMfu]:
    """Predicts all rows by the one MFU that fits some of them with the least median error, to a
    thousandth.

    Raises:
      ValueError: if `fitted_to` is empty.
    """
    if not fitted_to:
        raise ValueError("fitted_to must have at least one published step")
    mfu = min(
        (n / 1000 for n in range(200, 800)),
        key=lambda mfu: statistics.median(abs(SameMfu(row, mfu).error) for row in fitted_to),
    )
    return [SameMfu(row, mfu) for row in rows]


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
    """Returns the share of the peak rate with the least median error, to a hundredth.

    Raises:
      ValueError: if there is no row.
    """
    if not rows:
        raise ValueError("rows must have at least one published step to fit to")

    def misfit(share: float) -> float:
        return statistics.median(abs(each.error) for each in predict(rows, share))

    return min((n / 100 for n in range(50, 100)), key=misfit)


@dataclasses.dataclass(frozen=True)
class Summary:
    """How well predictions agree with publications.

    Attributes:
      rows, publications: how many were compared.
      median_error: median of the absolute errors, as a fraction.
      within_tenth: share of rows with an error of at most 10%.
      rank_correlation: Spearman's rank correlation of published and predicted MFU.
    """

    rows: int
    publications: int
    median_error: float
    within_tenth: float
    rank_correlation: float


def summary(predictions: Sequence[Prediction]) -> Summary:
    """Compares predictions with their publications.

    Raises:
      ValueError: if there are fewer than two predictions, which have no rank correlation.
    """
    if len(predictions) < 2:
        raise ValueError(f"predictions must be at least two, not {len(predictions)}")
    errors = [abs(each.error) for each in predictions]
    published, predicted = (
        np.array(values)
        for values in zip(*((each.row.mfu, each.step.mfu) for each in predictions), strict=True)
    )
    return Summary(
        len(predictions),
        len({each.row.source for each in predictions}),
        statistics.median(errors),
        sum(error <= 0.1 for error in errors) / len(errors),
        float(np.corrcoef(rankdata(published), rankdata(predicted))[0, 1]),
    )


def relative_errors(predictions: Sequence[Prediction | SameMfu]) -> list[float]:
    """Returns errors relative to the level of each publication on each accelerator: predicted
    over published seconds, divided by the median of this ratio over its other rows, less 1.

    One constant cannot fit several software stacks. This error is mostly about the rest: more
    GPUs, other parallelism, longer sequences, another model.

    Args:
      predictions: of any rows. Levels of fewer than three rows are left out.
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


def errors_after_one_step(predictions: Sequence[Prediction | SameMfu]) -> list[float]:
    """Returns the errors that remain if one layout of a model is measured, and the predictions
    of its other layouts are scaled by that measurement.

    One value for each ordered pair of rows with the same publication, accelerator, model and
    sequence length.
    """
    return [
        (1 + one.error) / (1 + other.error) - 1
        for one, other in itertools.permutations(predictions, 2)
        if _compared(one.row) == _compared(other.row)
    ]


def pairs(predictions: Sequence[Prediction]) -> list[tuple[Prediction, Prediction]]:
    """Returns the pairs of comparable rows: with the same publication, accelerator, model and
    sequence length, and published MFUs that differ by more than 5%.
    """
    found = []
    for one, other in itertools.combinations(predictions, 2):
        if _compared(one.row) == _compared(other.row):
            published = one.row.mfu / other.row.mfu
            if max(published, 1 / published) > 1.05:
                found.append((one, other))
    return found


def of_layouts(
    found: Sequence[tuple[Prediction, Prediction]],
) -> list[tuple[Prediction, Prediction]]:
    """Returns the pairs with other axes or chunks, but as many GPUs, the same batch and the
    same recomputation. Most differ in their microbatch, too, and those of dgxc_benchmarking in
    the release of the software. `planner.ranked` asks for their order.
    """

    def task(row: Row) -> tuple[int, int, str]:
        return row.cluster.count, row.plan.batch, row.plan.recompute

    def layout(row: Row) -> tuple[Mapping[str, int], int]:
        return row.plan.axes, row.plan.chunks

    return [
        (one, other)
        for one, other in found
        if task(one.row) == task(other.row) and layout(one.row) != layout(other.row)
    ]


def orders(found: Sequence[tuple[Prediction, Prediction]]) -> list[bool]:
    """Returns for each of `pairs` whether the prediction has the same one faster."""
    return [
        (one.row.mfu > other.row.mfu) == (one.step.mfu > other.step.mfu) for one, other in found
    ]


def orders_by_rule(found: Sequence[tuple[Prediction, Prediction]]) -> list[bool]:
    """Returns the same for a rule in place of the formulas, the baseline of an order: the
    faster layout has the smaller "tensor", else the fewer pipeline stages, else the more
    chunks. A pair without a difference counts as wrong.
    """

    def key(row: Row) -> tuple[int, int, int]:
        return row.plan.size("tensor"), row.plan.size("pipe"), -row.plan.chunks

    return [
        key(one.row) < key(other.row)
        if one.row.mfu > other.row.mfu
        else key(other.row) < key(one.row)
        for one, other in found
    ]


def layout_kind(plan: "planner.Plan") -> str:
    """Returns how a plan divides the state: "pipeline", "stage 3", "stage 3 in groups", "stages
    1 and 2", or "no ZeRO".
    """
    if plan.size("pipe") > 1:
        return "pipeline"
    if plan.size("fsdp") > 1:
        return "stage 3 in groups" if plan.size("data") > 1 else "stage 3"
    return "stages 1 and 2" if plan.zero else "no ZeRO"


def _compared(row: Row) -> tuple[str, str, str, int]:
    return row.source, row.cluster.accelerator.name, row.model, row.shape.seq_len
