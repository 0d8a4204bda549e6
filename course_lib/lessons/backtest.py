"""Predicted against published: how far the formulas of `step_model` can be trusted.

The folder `published_steps` holds step times that others measured, one file per publication:
where each figure stands, and the layout that it was measured with. Here each is predicted.

    rows = load()
    seen, unseen = halves(rows)
    share = fit(seen)                 # the one constant
    print(summary(predict(unseen, share)))

Every second publication, in alphabetical order, is for fitting; the others judge. No row was
chosen by its error. Rows that the formulas were not made for (experts, eight-bit products,
offload, TPUs) are kept apart by their `kind`. All rows with their predictions, and how well
they agree: docs/backtest.md.
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

from course_lib.many_devices import step_model
from course_lib.many_devices.cluster_model import PRODUCTS_SHARE, Cluster
from course_lib.many_devices.plans import Plan, Shape
from course_lib.many_devices.step_model import Breakdown
from course_lib.measure import hardware
from course_lib.measure.hardware import TpuTarget

FOLDER = importlib.resources.files("course_lib.lessons") / "published_steps"
KINDS = ("dense", "moe", "fp8", "offload", "tpu")
UNITS = ("seconds", "TFLOP/s", "MFU", "tokens/s")
DEFAULTS: Mapping[str, Any] = dict(
    tensor=1,
    pipe=1,
    context=1,
    expert=1,
    chunks=1,
    fsdp=0,
    zero=0,
    recompute="none",
    sequence_parallel=False,
    fused_attention=False,
    eager=False,
    tensor_overlap=False,
    data_overlap=True,
    gradient_bytes=2,
    network=None,
    memory_bandwidth=None,
    flops="",
    inferred=(),
    reason="",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
      source: name of the publication's file.
      where: the table and row in it.
      status: "checked" at its source, or "from notes": read where others quote it.
      kind: one of `KINDS`.
      model: its name.
      shape: its sizes.
      plan: how it was trained.
      cluster: on what.
      published: the figure, in `unit`.
      unit: "seconds" per step, "TFLOP/s" per GPU, "MFU", or "tokens/s" per GPU.
      flops: for the two in the middle, how the source counts FLOPs: a name of `FLOPS`.
      inferred: what the source does not say and was taken from the software's defaults.
      reason: what makes the row unlike the others, or may explain its error; that of its
        publication if it has none of its own.
    """

    source: str
    where: str
    status: str
    kind: str
    model: str
    shape: Shape
    plan: Plan
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
        """The peak rate that MFU is counted of, in FLOP/s: that of bfloat16."""
        return self.cluster.accelerator.peak_flops["bfloat16"]


def _narayanan(shape: Shape, passes: int) -> float:
    N, D, L, V = shape.layers, shape.width, shape.seq_len, shape.vocab
    # The output layer is not computed again: 16 is 96 / 6, and 12 is 72 / 6.
    logits = {4: 16, 3: 12}[passes]
    return 24 * passes * N * D * D * (1 + L / (6 * D) + V / (logits * N * D))


FLOPS: Mapping[str, Callable[[Shape], float]] = {
    "narayanan": functools.partial(_narayanan, passes=4),
    "narayanan-model": functools.partial(_narayanan, passes=3),
    "6N": lambda shape: 6 * shape.parameters,
    "6N+12lhs": lambda shape: 6 * shape.parameters + _scores(shape),
    "6N+6lhs": lambda shape: 6 * shape.parameters + _scores(shape) / 2,
    "6M+12lhs": lambda shape: shape.flops,
}
"""FLOPs per token, as publications count them: Narayanan et al. (2021, section 5.1) with and
without recomputation; 6 per parameter, or per parameter without the embedding; and these with
attention in full, or its causal half.
"""


def _scores(shape: Shape) -> float:
    return 12.0 * shape.layers * shape.heads * shape.head_dim * shape.seq_len


@functools.cache
def load() -> tuple[Row, ...]:
    """Returns all rows, publications in alphabetical order.

    Raises:
      ValueError: naming file and row, if a layout does not multiply to its GPUs, or a field is
        unknown.
    """
    rows = []
    for file in sorted(FOLDER.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            publication = tomllib.loads(file.read_text(encoding="utf-8"))
            for number, given in enumerate(publication["rows"], 1):
                try:
                    row = _row(file.name.removesuffix(".toml"), publication, given)
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{file.name}, row {number}: {error!r}") from error
                rows.append(row)
    return tuple(rows)


def sources() -> dict[str, dict[str, str]]:
    """Returns title, address and note of each publication, by the name of its file."""
    found = {}
    for file in sorted(FOLDER.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            text = tomllib.loads(file.read_text(encoding="utf-8"))
            found[file.name.removesuffix(".toml")] = {
                key: text.get(key, "") for key in ("title", "url", "note")
            }
    return found


def _row(source: str, publication: Mapping[str, Any], given: Mapping[str, Any]) -> Row:
    row = {**DEFAULTS, "reason": publication.get("reason", ""), **given}
    sizes = dict(publication["models"][row["model"]])
    sizes["matrices"] = 3 if sizes.pop("gated", False) else 2
    sizes["slots"] = float(sizes.pop("experts_per_token", 1))
    shape = Shape(seq_len=row["seq_len"], **sizes)
    divided = max(row["fsdp"], 1)
    others = row["tensor"] * row["pipe"] * row["context"] * row["expert"]
    if divided * others > row["gpus"]:  # parameters are divided along the context too
        divided //= row["context"]
    data = row["gpus"] // (others * divided)
    axes = {
        "pipe": row["pipe"],
        "data": data,
        "fsdp": divided,
        "expert": row["expert"],
        "context": row["context"],
        "tensor": row["tensor"],
    }
    dtype = "float8_e4m3fn" if row["kind"] == "fp8" else "bfloat16"
    plan = Plan(axes, dtype=dtype, **{name: row[name] for name in _OF_PLAN})
    accelerator = hardware.get(row["accelerator"])
    if row["memory_bandwidth"]:
        accelerator = dataclasses.replace(accelerator, memory_bandwidth=row["memory_bandwidth"])
    cluster = Cluster(accelerator, row["gpus"], port_bandwidth=row["network"])
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
        source,
        row["where"],
        row["status"],
        row["kind"],
        row["model"],
        shape,
        plan,
        cluster,
        float(row["published"]),
        row["unit"],
        row["flops"],
        tuple(row["inferred"]),
        row["reason"],
    )


_REQUIRED = {"where", "status", "kind", "model", "accelerator", "gpus", "batch", "seq_len"}
_REQUIRED |= {"microbatch", "published", "unit"}
_OF_PLAN = """batch microbatch chunks zero recompute fused_attention eager sequence_parallel
    tensor_overlap data_overlap gradient_bytes""".split()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A published row, and what the formulas say."""

    row: Row
    step: Breakdown

    @property
    def error(self) -> float:
        """Predicted over published seconds, less 1."""
        return self.step.total / self.row.seconds - 1


def predict(rows: Sequence[Row], share: float = PRODUCTS_SHARE) -> list[Prediction]:
    """Predicts the time of each row for whose devices there is a formula: not for several TPU
    slices.

    Args:
      rows: of `load`.
      share: of the peak rate that products reach.
    """
    found = []
    for row in rows:
        cluster = dataclasses.replace(row.cluster, products_share=share)
        target = cluster.accelerator.target
        several = row.plan.size("data") > 1  # slices, if these are TPUs
        if isinstance(target, TpuTarget) and (several or cluster.count not in target.layouts):
            continue
        found.append(Prediction(row, step_model.breakdown(row.shape, row.plan, cluster)))
    return found


def dense(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that the formulas are judged by."""
    return [row for row in rows if row.kind == "dense"]


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Divides rows by publication: first, third, ... in alphabetical order, and the others."""
    names = sorted({row.source for row in rows})
    seen = set(names[::2])
    return (
        [row for row in rows if row.source in seen],
        [row for row in rows if row.source not in seen],
    )


def fit(rows: Sequence[Row]) -> float:
    """Returns the share of the peak rate for which the median absolute error is least, to a
    hundredth.
    """

    def misfit(share: float) -> float:
        return statistics.median(abs(each.error) for each in predict(rows, share))

    return min((n / 100 for n in range(50, 100)), key=misfit)


@dataclasses.dataclass(frozen=True)
class Summary:
    """How well predictions agree with publications.

    Attributes:
      rows, publications: how many there are.
      median_error: of either sign, as a fraction.
      within_tenth: share of rows whose error is at most 10%.
      rank_correlation: Spearman's, of published and predicted MFU.
    """

    rows: int
    publications: int
    median_error: float
    within_tenth: float
    rank_correlation: float


def summary(predictions: Sequence[Prediction]) -> Summary:
    """Summarizes predictions."""
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


def relative_errors(predictions: Sequence[Prediction]) -> list[float]:
    """Returns errors relative to the level of the publication: predicted over published
    seconds, over the median of that for the same publication and accelerator, less 1.

    One constant cannot fit several software stacks. This error is about layouts alone: more
    GPUs, other parallelism, longer sequences.

    Args:
      predictions: of any rows. A publication with fewer than three rows on an accelerator has
        no level, and is left out.
    """
    by_level: dict[tuple[str, str], list[float]] = {}
    for each in predictions:
        level = each.row.source, each.row.cluster.accelerator.name
        by_level.setdefault(level, []).append(math.log1p(each.error))
    return [
        math.expm1(error - statistics.median(errors))
        for errors in by_level.values()
        if len(errors) >= 3
        for error in errors
    ]


def errors_after_one_step(predictions: Sequence[Prediction]) -> list[float]:
    """Returns errors relative to one other step of the same model: what remains if one layout
    is measured, and the predictions of the others are scaled by it.

    One value for each ordered pair of rows with the same publication, accelerator, model and
    sequence length.
    """
    return [
        (1 + one.error) / (1 + other.error) - 1
        for one, other in itertools.permutations(predictions, 2)
        if _compared(one.row) == _compared(other.row)
    ]


def orders(predictions: Sequence[Prediction]) -> list[bool]:
    """Returns for each pair of comparable rows whether the faster one is predicted right.

    Comparable rows have the same publication, accelerator, model and sequence length, and their
    published MFUs differ by more than 5%.
    """
    right = []
    for one, other in itertools.combinations(predictions, 2):
        if _compared(one.row) == _compared(other.row):
            published = one.row.mfu / other.row.mfu
            if max(published, 1 / published) > 1.05:
                right.append((published > 1) == (one.step.mfu > other.step.mfu))
    return right


def _compared(row: Row) -> tuple[str, str, str, int]:
    return row.source, row.cluster.accelerator.name, row.model, row.shape.seq_len
