"""Searches for the fastest layout that fits: among programs of this course, and among layouts
that frameworks offer.
"""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from course_lib import configs
from course_lib.fields import Checked, option, required
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.planner import course, memory, price
from course_lib.planner.course import Estimate, in_minibatches
from course_lib.planner.memory import FRAMEWORK_RECOMPUTE
from course_lib.planner.plan import Plan, Shape, Step, check
from course_lib.planner.price import Breakdown

KINDS = ("data", "tensor", "context", "pipe")
"""Kinds of layouts: ZeRO alone ("data"), or ZeRO beside the axis of that name. Those with
"context" or "pipe" may have "tensor", too."""
CAPACITY_SHARE = 0.9  # of a GPU's memory; the rest is for CUDA and NCCL
SIZES = (2, 4, 8)  # along "tensor" and "context"
LAYOUT_ERROR = 0.12
"""How far the formula is off when it compares two layouts of one model on the same GPUs with
the same batch: no more than this in two of three published pairs
(`lessons.backtest.layout_pairs`)."""
STAGES = 16  # of a pipeline, at most
CHUNKS = 8  # per stage, at most


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


@dataclasses.dataclass(frozen=True)
class Course:
    """Programs of this course on a cluster.

    All meshes data x pipe x tensor that divide the model, with "tensor" inside of a switch.
    Each mesh takes the order of its axes with the fastest step, since the order decides which
    groups share a host; without `reorder`, "data" is the outermost and "tensor" the innermost,
    as in the training program. Without a pipeline, ZeRO 0, 1 and 3, each with the number of
    minibatches that fits and is the fastest; with one, 1F1B with ZeRO 1 and as many
    microbatches as possible, at most eight per stage. Recomputation and attention stay as
    configured. Not tried: "context", "expert", ZeRO 2, rings along "tensor", chunks.
    """

    config: ConfigDict
    reorder: bool = True

    def __post_init__(self) -> None:
        course.check_counted(self.config)
        # below, an error means that a mesh cannot run the model
        configs.check(in_minibatches(self.config, 1))

    def families(self, cluster: Cluster) -> Iterator[list[Estimate]]:
        if cluster.count > 1 and self.config.model.attention == "flash":
            raise ValueError(
                "model.attention='flash' must be 'reference' or 'xla' on several devices: no"
                " layout runs the kernel"
            )
        for tensor in _divisors(math.gcd(cluster.count, cluster.per_switch)):
            for pipe in _divisors(cluster.count // tensor):
                axes = {"data": cluster.count // tensor // pipe, "pipe": pipe, "tensor": tensor}
                axes = {axis: n for axis, n in axes.items() if axis == "data" or n > 1}
                for strategy, parts in self._strategies(axes):
                    tried = (self._estimates(axes, strategy, m, cluster) for m in parts)
                    yield [each for found in tried for each in found]

    def _strategies(self, axes: Mapping[str, int]) -> Iterator[tuple[Strategy, list[int]]]:
        """Yields strategies for a mesh, each with numbers of minibatches."""
        parts, sequence = (
            _divisors(self.config.data.batch_size // axes["data"]),
            "tensor" in axes,
        )
        if "pipe" in axes:
            few = [m for m in parts if m <= 8 * axes["pipe"]]  # a bubble of a ninth
            if few:
                yield Strategy(zero=1, sequence=sequence, microbatches=max(few)), [1]
            return
        again = not {"MLP", "Attn"} & set(self.config.model.remat)
        for zero in (0, 1, 3) if axes["data"] > 1 else (0,):
            gathers = again or zero < 3
            yield Strategy(zero=zero, sequence=sequence, gather_again=gathers), parts

    def _estimates(
        self, axes: Mapping[str, int], strategy: Strategy, minibatches: int, cluster: Cluster
    ) -> list[Estimate]:
        """The estimate, or nothing if the model does not divide or does not fit."""
        try:
            step = course.step_of(in_minibatches(self.config, minibatches), axes, strategy)
        except ValueError:
            return []
        if sum(course.held(step).values()) > cluster.accelerator.memory_bytes:
            return []
        orders = list(map(dict, itertools.permutations(axes.items())))
        return [course.fastest(step, orders if self.reorder else [axes], cluster)]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A framework's plan and what it costs."""

    plan: Plan
    time: Breakdown
    memory: float  # bytes on a device (`memory.of_framework`)

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.time.total

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        axes = self.plan.axes
        return next((kind for kind in ("pipe", "context", "tensor") if kind in axes), "data")

    @property
    def name(self) -> str:
        """The axes above 1, outer to inner, with chunks and the stage of ZeRO along "data"."""
        words = [f"{axis} {size}" for axis, size in self.plan.axes.items() if size > 1]
        words += [f"{self.plan.chunks} chunks"] * (self.plan.chunks > 1)
        words += [f"ZeRO {self.plan.zero}"] * (self.plan.size("data") > 1)
        return ", ".join(words)

    @property
    def recomputes(self) -> str:
        """The parts that layers recompute, and their share: "none", "block, 45% of layers"."""
        what, share = self.plan.recompute, self.plan.recompute_share
        return what if what == "none" or share == 1 else f"{what}, {share:.0%} of layers"


def layout(shape: Shape, plan: Plan, cluster: Cluster) -> Layout:
    """Returns a framework's plan with its seconds and its memory."""
    check(shape, plan)
    held = memory.of_framework(Step(shape, plan))
    return Layout(plan, price.seconds(shape, plan, cluster), sum(held.values()))


@dataclasses.dataclass(frozen=True)
class Frameworks(Checked):
    """Layouts that frameworks offer. Two of them this course's programs do not have: ZeRO 3
    inside of groups (*hybrid sharding*), and Megatron-LM's pipelines, whose chunks send beside
    each other. Not tried: experts, "context" beside "pipe", ZeRO 2 and 3 inside of a
    pipeline, and stages of unequal length.

    Of each mesh, number of chunks and microbatch, takes the plan that recomputes least and
    fits into 0.9 of the memory: the first of `recompute` that fits, in as few layers as it can.
    Gradients are summed, and travel, in float32, as in most frameworks. What does not divide
    the model or the batch is left out.
    """

    shape: Shape
    batch: int = required()  # sequences per step
    kinds: Sequence[str] = KINDS
    recompute: Sequence[str] = FRAMEWORK_RECOMPUTE  # the least first
    fused_attention: bool = option(True)  # scores stay on the chip
    # inside of a host, rings hide most traffic along "tensor"
    tensor_overlap: bool = option(True)
    # per number, when gradients travel; with 2, one microbatch's have no float32 sum
    gradient_bytes: int = option(4, (1, 2, 4))
    # fields of every plan: {"data_overlap": False}
    software: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def _errors(self) -> Iterator[str]:
        for name, known in (("kinds", KINDS), ("recompute", FRAMEWORK_RECOMPUTE)):
            given = getattr(self, name)
            if not given or isinstance(given, str) or not set(given) <= set(known):
                yield f"{name}={given!r} must be a tuple of {', '.join(known)}"
        if list(self.recompute) != sorted(self.recompute, key=FRAMEWORK_RECOMPUTE.index):
            yield f"recompute={self.recompute!r} must be in the order of {FRAMEWORK_RECOMPUTE}"

    def families(self, cluster: Cluster) -> Iterator[list[Layout]]:
        if cluster.accelerator.platform != "gpu":
            raise ValueError(f"cluster must have GPUs, not {cluster.accelerator.title}")
        tried: dict[Any, tuple[price.Priced, float] | None] = {}
        for axes, zero, chunks in layouts(self.shape, cluster.count, self.kinds):
            for each in self.on(axes, cluster, zero, chunks, tried):
                yield [each]

    def on(
        self,
        axes: Mapping[str, int],
        cluster: Cluster,
        zero: int = 1,
        chunks: int = 1,
        tried: dict[Any, tuple[price.Priced, float] | None] | None = None,
    ) -> Iterator[Layout]:
        """Yields the layouts on a mesh that fit, one for each size of a microbatch, the largest
        first. `zero` is the stage along "data". `tried`: what fits and what does not on meshes
        with other orders of axes.
        """
        tried = {} if tried is None else tried
        share, left = divmod(self.batch, axes.get("data", 1) * axes.get("fsdp", 1))
        if left:
            return
        # Rings hide traffic only where links are fast (`async_tensor_parallel`).
        group, tensor = cluster.group(axes, "tensor"), axes.get("tensor", 1) > 1
        rings = tensor and self.tensor_overlap and group.per_switch == group.ranks
        for sequences in _microbatches(share, axes.get("pipe", 1), chunks):
            alike = frozenset(axes.items()), zero, chunks, rings, sequences
            if alike not in tried:
                plan = Plan(
                    axes,
                    self.batch,
                    sequences,
                    chunks,
                    zero,
                    **dict(
                        fused_attention=self.fused_attention,
                        sequence_parallel=tensor,
                        tensor_overlap=rings,
                        pipe_overlap=chunks > 1,
                        gradient_bytes=self.gradient_bytes,
                        float32_gradients=sequences < share or self.gradient_bytes == 4,
                    )
                    | dict(self.software),
                )
                tried[alike] = self._recomputing_least(plan, cluster)
            if fitting := tried[alike]:
                priced, size = fitting
                plan = priced.plan
                if list(axes) != list(plan.axes):
                    plan = dataclasses.replace(plan, axes=axes)
                yield Layout(plan, priced.seconds(axes), size)
                if "pipe" not in axes and plan.recompute == self.recompute[0]:
                    return  # without a pipeline, smaller microbatches only make room

    def _recomputing_least(
        self, plan: Plan, cluster: Cluster
    ) -> tuple[price.Priced, float] | None:
        """Returns the plan that recomputes least and fits, and its bytes."""
        room = CAPACITY_SHARE * cluster.accelerator.memory_bytes
        held = memory.recomputing(Step(self.shape, plan))
        layers = max(self.shape.layers // plan.size("pipe"), 1)

        def size(what: str, count: int) -> float:
            return sum(held(what, count / layers).values())

        for what in self.recompute:
            if size(what, layers) <= room:
                # The more layers recompute, the less memory the plan takes.
                few = layers
                if what != "none":
                    counts = range(layers)
                    few = bisect.bisect_left(counts, -room, lo=1, key=lambda n: -size(what, n))
                    plan = dataclasses.replace(
                        plan, recompute=what, recompute_share=few / layers
                    )
                return price.Priced(self.shape, plan, cluster), size(what, few)
        return None


def ranked(space: Course | Frameworks, cluster: Cluster) -> list[Any]:
    """Returns the layouts of `Course(config)` or `Frameworks(shape, batch)` that fit, the
    fastest first.
    """

    def seconds(each: Estimate | Layout) -> float:
        return each.time.total

    fitting: Iterator[list[Any]] = filter(None, space.families(cluster))
    return sorted((min(family, key=seconds) for family in fitting), key=seconds)


def best(layouts: Iterable[Layout]) -> dict[str, Layout]:
    """Returns the fastest layout of each kind, in the order of `KINDS`.

    Args:
      layouts: the fastest first, as `ranked` returns them.
    """
    found: dict[str, Layout] = {}
    for each in layouts:
        found.setdefault(each.kind, each)
    return {kind: found[kind] for kind in KINDS if kind in found}


def tied(layouts: Sequence[Layout]) -> list[Layout]:
    """Returns the fastest layout of each kind that the formula cannot tell from the fastest of
    all: those worth a measurement, the fastest first.

    Args:
      layouts: the fastest first, as `ranked` returns them.
    """
    of_kinds = sorted(best(layouts).values(), key=lambda each: each.seconds)
    most = (1 + LAYOUT_ERROR) * of_kinds[0].seconds if of_kinds else 0.0
    return [each for each in of_kinds if each.seconds <= most]


def layouts(
    shape: Shape, count: int, kinds: Sequence[str] = KINDS
) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yields the axes of each layout on `count` GPUs (outer to inner), its stage of ZeRO along
    "data", and its chunks per pipeline stage.
    """
    heads = shape.heads, shape.kv_heads or shape.heads, shape.mlp
    tensor = [t for t in SIZES if not any(size % t for size in heads)]
    for kind in kinds:
        for t in {"data": [1], "tensor": tensor}.get(kind, [1, *tensor]):
            if kind == "pipe":
                yield from _pipelines(shape, count, t)
                continue
            for c in SIZES if kind == "context" else (1,):
                replicas, left = divmod(count, t * c)
                if left or (c > 1 and shape.seq_len % (2 * c)):
                    continue
                for f in _divisors(replicas):
                    inner = {"data": replicas // f, "fsdp": f}
                    orders = [inner | {"context": c, "tensor": t}]
                    if c > 1 and replicas > 1:
                        orders.append({"context": c} | inner | {"tensor": t})
                    if t > 1 and replicas * c > 1:
                        orders.append({"tensor": t} | inner | {"context": c})
                    for axes in orders:
                        for zero in (1, 2) if f < replicas else (1,):
                            yield _above_one(axes), zero, 1


def _above_one(axes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in axes.items() if size > 1}


def _pipelines(shape: Shape, count: int, t: int) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yields Megatron-LM's pipelines, with ZeRO 1, in three orders of the axes."""
    for p in (p for p in range(2, STAGES + 1) if shape.layers % p == 0):
        replicas, left = divmod(count, p * t)
        if left:
            continue
        orders = [{"data": replicas, "pipe": p, "tensor": t}]
        if replicas > 1:
            orders.append({"pipe": p, "data": replicas, "tensor": t})
        if t > 1:
            orders.append({"tensor": t, "pipe": p, "data": replicas})
        for axes in orders:
            for v in range(1, CHUNKS + 1):
                if shape.layers % (p * v) == 0:
                    yield _above_one(axes), 1, v


def _microbatches(share: int, p: int, chunks: int) -> list[int]:
    """Sizes of a microbatch, largest first: at least p, in groups of p with chunks."""
    numbers = [m for m in _divisors(share) if p == 1 or m >= p]
    return [share // m for m in numbers if chunks == 1 or m % p == 0]
