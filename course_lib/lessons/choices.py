"""Published layouts beside those that the planner's search prefers.

    for each in [judged(row) for row in sweep()]:
        each.ratio      # predicted seconds of the published layout / of the fastest that fits

The search knows the model, the GPUs, the batch, and what the software overlaps and fuses. It
does not know the layout. The published one is priced as the search prices its own: with the
microbatch and the recomputation that are the fastest by the formula.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

from course_lib import planner
from course_lib.lessons import backtest
from course_lib.lessons.backtest import Row

SWEEP = "docs/benchmark_summary.svg"  # of Nanotron: the fastest layout of each cell


@dataclasses.dataclass(frozen=True)
class Choice:
    """A published layout beside the fastest one by formula."""

    row: Row
    published: "planner.Layout | None"  # None: by formula it does not fit
    best: "planner.Layout | None"  # the fastest that the search finds
    tied: tuple["planner.Layout", ...]  # `planner.tied`

    @property
    def ratio(self) -> float:
        """Predicted seconds of the published layout over the fastest one's."""
        if self.published is None:
            return math.inf
        return self.published.seconds / (self.best or self.published).seconds

    @property
    def measured(self) -> bool:
        """Whether the published layout, or one of its kind, is among those to measure."""
        kinds = {each.kind for each in self.tied}
        return self.published is not None and (
            self.ratio <= 1 + planner.LAYOUT_ERROR or self.published.kind in kinds
        )


@functools.cache
def rows() -> tuple[Row, ...]:
    """Returns the fastest dense row of each publication, model, number of GPUs and batch; of
    one publication and the same axes beside data parallelism, only the largest.
    """
    fastest: dict[Any, Row] = {}
    for row in backtest.dense(backtest.load()):
        found = fastest.setdefault(backtest.task(row), row)
        if row.mfu > found.mfu:
            fastest[backtest.task(row)] = row
    largest: dict[Any, Row] = {}
    for row in fastest.values():
        axes = tuple(row.plan.size(axis) for axis in ("pipe", "context", "tensor"))
        divided = row.plan.size("fsdp") > 1
        key = row.where if row.where.startswith(SWEEP) else (row.source, axes, divided)
        size = row.shape.parameters * row.cluster.count
        found = largest.setdefault(key, row)
        if size > found.shape.parameters * found.cluster.count:
            largest[key] = row
    return tuple(largest.values())


def sweep(chosen: Iterable[Row] | None = None) -> list[Row]:
    """Returns the rows of Nanotron's sweep, which contradict the formula most."""
    return [row for row in chosen or rows() if row.where.startswith(SWEEP)]


@functools.cache
def _offered(source: str) -> frozenset[str]:
    """Axes that a publication uses; and those that any software has."""
    used = (row.plan.axes.items() for row in backtest.load() if row.source == source)
    return frozenset(
        {axis for axes in used for axis, n in axes if n > 1} | {"data", "tensor", "pipe"}
    )


def space(row: Row) -> "planner.Frameworks":
    """Returns the layouts among which a publication chose."""
    plan = row.plan
    names = ("eager", "wgrad_overlap", "data_overlap", "parameter_overlap")
    software = {name: getattr(plan, name) for name in names}
    if plan.chunks > 1:
        software |= {} if plan.pipe_overlap else {"pipe_overlap": False}
    kinds = tuple(k for k in planner.KINDS if k != "context" or k in _offered(row.source))
    return planner.Frameworks(
        row.shape,
        plan.batch,
        kinds,
        fused_attention=plan.fused_attention,
        tensor_overlap=plan.tensor_overlap and not plan.wgrad_overlap,
        gradient_bytes=plan.gradient_bytes,
        software=software,
    )


def judged(row: Row) -> Choice:
    """Searches for a row's task, without its layout."""
    where, offered = space(row), _offered(row.source)
    axes = {axis: n for axis, n in row.plan.axes.items() if n > 1}
    zero = max(row.plan.zero, 1)
    own = list(where.on(axes, row.cluster, zero, row.plan.chunks))
    published = min(own, key=lambda each: each.seconds, default=None)
    found = [
        each for each in planner.ranked(where, row.cluster) if each.plan.axes.keys() <= offered
    ]
    if published is not None:  # the search does not try every layout
        found = sorted([*found, published], key=lambda each: each.seconds)
    tied = tuple(planner.tied(found)) if found else ()
    return Choice(row, published, found[0] if found else None, tied)
