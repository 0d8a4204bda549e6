"""Layouts that frameworks offer, priced by formula.

    found = frameworks.search(shape, cluster, batch=512)     # those that fit, the fastest first
    print(found[0].name, found[0].seconds, found[0].memory)

`estimate.choose` prices programs of this course. Here are layouts that it does not try: rings
over "context", ZeRO 3 inside of groups (*hybrid sharding*), and interleaved pipelines whose
transfers overlap. Attention may be a fused kernel, and each layout recomputes as little as its
memory allows. Not tried: experts, "context" beside "pipe", ZeRO 2 and 3 inside of a pipeline,
stages of unequal length, and more than 16 stages, 8 chunks, or 8 GPUs along "tensor" and
"context".
"""

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from course_lib.many_devices import step_model
from course_lib.many_devices.cluster_model import Cluster, check_type
from course_lib.many_devices.plans import Plan, Shape

KINDS = ("data", "tensor", "context", "pipe")
"""Kinds of layouts: ZeRO alone ("data"), or ZeRO beside the axis of that name. Those with
"context" or "pipe" may have "tensor", too."""
CAPACITY_SHARE = 0.9  # of a GPU's memory; the rest is for CUDA and NCCL
RECOMPUTE = ("none", "selective", "block")  # of `plans.RECOMPUTE`, the least first
SIZES = (2, 4, 8)  # along "tensor" and "context"
STAGES = 16  # of a pipeline, at most
CHUNKS = 8  # per stage, at most


@dataclasses.dataclass(frozen=True)
class Layout:
    """A plan and what it costs.

    Attributes:
      plan: how the model is trained.
      seconds: of a step, by `step_model`.
      memory: bytes on a device, by `memory_bytes`.
    """

    plan: Plan
    seconds: float
    memory: float

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
        """What the layers recompute, and how many of them: "none", "block, 45% of layers"."""
        what, share = self.plan.recompute, self.plan.recompute_share
        return what if what == "none" or share == 1 else f"{what}, {share:.0%} of layers"


def memory_bytes(shape: Shape, plan: Plan) -> float:
    """Returns the bytes that a device holds at the peak of a step: a rough formula, which was
    not compared with measurements.

    Parameters (bfloat16) are divided along "fsdp", "pipe" and "tensor"; gradients too, and over
    all their copies with stage 2 of ZeRO. Gradients take 4 bytes, or `plan.gradient_bytes`
    without `plan.float32_gradients`. A float32 copy and two moments, 12 bytes per parameter,
    are divided over all copies with stages 1 and 2. The first stage of a pipeline has the
    embedding, the last one the output layer. With "fsdp", two layers, embedding and output
    layer are whole.

    Activations are those of Korthikanti et al. (2022, https://arxiv.org/abs/2205.05198, section
    4), without dropout: in 16 bits the inputs of a layer's products and norms, and what a fused
    kernel keeps; the softmax only if it goes to memory, and not of a ring, which computes its
    scores again. They are divided along "tensor" with
    `plan.sequence_parallel`, else not. Of p pipeline stages with v chunks, the first keeps the
    activations of p + (p - 1) / v microbatches (p with one chunk), the last those of
    p - (p - 1) / v, and the logits, 6 bytes each.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if `plan.recompute` is not of `RECOMPUTE`, or the model has experts.
    """
    check_type("shape", shape, Shape, "a Shape: the sizes of the model")
    check_type("plan", plan, Plan, "a Plan: how the model is trained")
    _check_no_experts(shape)
    if plan.recompute not in RECOMPUTE:
        raise ValueError(f"recompute={plan.recompute!r} must be of {', '.join(RECOMPUTE)}")
    p, t, f = plan.size("pipe"), plan.size("tensor"), plan.size("fsdp")
    copies = math.prod(plan.axes.values()) / (f * p * t)
    gradient = 4 if plan.float32_gradients else plan.gradient_bytes
    tables = shape.vocab * shape.width * (1 if shape.tied or p > 1 else 2)
    held = (shape.layers / p * shape.layer + tables) / (f * t)
    held *= 2 + gradient / (copies if plan.zero == 2 else 1) + 12 / (copies if plan.zero else 1)
    if f > 1:
        held += 2 * (2 * shape.layer + 2 * shape.vocab * shape.width) / t

    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    D, queries = shape.width, shape.heads * shape.head_dim
    keys = (shape.kv_heads or shape.heads) * shape.head_dim
    # inputs of two norms; of the products for q, k and v; q, k, v; of the output's product; of
    # the MLP's; and its hidden values before and after the activation function
    kept = 2 * (4 * D + 2 * queries + 2 * keys + shape.matrices * shape.mlp)
    again = plan.fused_attention or plan.size("context") > 1
    softmax = 0.0 if again else 2.0 * shape.heads * shape.seq_len
    # what each layer keeps; and what the layer that is computed again has besides
    a_layer, working = {
        "none": (kept + softmax, 0.0),
        "selective": (kept, softmax),
        "block": (2 * D, kept + softmax),
    }[plan.recompute]
    a_layer += (1 - plan.recompute_share) * (kept + softmax - a_layer)
    v, m = plan.chunks, plan.microbatches
    first = p if v == 1 else p + (p - 1) / v  # microbatches at once, on the first stage
    last = p - (p - 1) / v
    cut = t if plan.sequence_parallel else 1
    first, last = (
        (shape.layers / p * min(m, at_once) * a_layer + working) / cut
        for at_once in (first, last)
    )
    logits = 6 * shape.vocab / t
    return held + tokens * max(first, last + logits)


def price(shape: Shape, plan: Plan, cluster: Cluster) -> Layout:
    """Returns a plan with its seconds and its memory. Errors are those of `memory_bytes` and of
    `step_model.breakdown`.
    """
    seconds = step_model.breakdown(shape, plan, cluster).total
    return Layout(plan, seconds, memory_bytes(shape, plan))


def search(
    shape: Shape,
    cluster: Cluster,
    batch: int,
    *,
    kinds: Sequence[str] = KINDS,
    recompute: Sequence[str] = RECOMPUTE,
    fused_attention: bool = True,
    tensor_overlap: bool = True,
    gradient_bytes: int = 2,
) -> list[Layout]:
    """Returns the layouts that fit, the fastest first.

    Of each mesh, number of chunks and microbatch, prices the plan that recomputes least and
    fits: the first of `recompute` that fits, in as few layers as it can. A single microbatch
    has no float32 sum of gradients, unless they travel in float32. Without a pipeline, skips
    microbatches that only make room. What does not divide the model or the batch is left out.

    Args:
      shape: sizes of the model, without experts.
      cluster: the GPUs.
      batch: sequences per step.
      kinds: of `KINDS`.
      recompute: what the backward pass may recompute: names of `RECOMPUTE`, in its order.
      fused_attention: whether scores stay on the chip.
      tensor_overlap: whether rings hide most of the traffic along "tensor", inside of a host.
      gradient_bytes: per number, when gradients travel: 1, 2 or 4, for all layouts alike.

    Raises:
      TypeError: if `shape` or `cluster` is of another type.
      ValueError: if `batch` is no whole number of at least 1; no name is given, one is
        unknown, or `recompute` has another order; an option is neither True nor False; the
        model has experts; or the accelerators are no GPUs.
    """
    check_type("shape", shape, Shape, "a Shape: the sizes of the model")
    check_type("cluster", cluster, Cluster, "a Cluster: Cluster(hardware.get('h100'), 64)")
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch={batch!r} must be a whole number of sequences, at least 1")
    _check_names("kinds", kinds, KINDS)
    _check_names("recompute", recompute, RECOMPUTE)
    if list(recompute) != sorted(recompute, key=RECOMPUTE.index):
        raise ValueError(f"recompute={recompute!r} must be in the order of {RECOMPUTE}")
    for name, value in (
        ("fused_attention", fused_attention),
        ("tensor_overlap", tensor_overlap),
    ):
        if type(value) is not bool:
            raise ValueError(f"{name}={value!r} must be True or False")
    _check_no_experts(shape)
    if cluster.accelerator.platform != "gpu":
        raise ValueError(f"cluster must have GPUs, not {cluster.accelerator.title}")
    room = CAPACITY_SHARE * cluster.accelerator.memory_bytes
    found = []
    for axes, zero, chunks in meshes(shape, cluster.count, kinds):
        tensor = axes.get("tensor", 1) > 1
        # Rings hide traffic only where links are fast (`async_tensor_parallel`).
        group = cluster.group(axes, "tensor")
        rings = tensor and tensor_overlap and group.per_switch == group.ranks
        share, left = divmod(batch, axes.get("data", 1) * axes.get("fsdp", 1))
        stages = axes.get("pipe", 1)
        for sequences in () if left else _microbatches(share, stages, chunks):
            usual = Plan(
                axes,
                batch,
                sequences,
                chunks,
                zero,
                fused_attention=fused_attention,
                sequence_parallel=tensor,
                tensor_overlap=rings,
                pipe_overlap=chunks > 1,
                gradient_bytes=gradient_bytes,
                float32_gradients=sequences < share or gradient_bytes == 4,
            )
            plan = _recomputing_least(shape, usual, recompute, room)
            if plan is None:
                continue
            found.append(price(shape, plan, cluster))
            if stages == 1 and plan.recompute == recompute[0]:
                break  # without a pipeline, smaller microbatches only make room
    return sorted(found, key=lambda layout: layout.seconds)


def _recomputing_least(
    shape: Shape, plan: Plan, recompute: Sequence[str], room: float
) -> Plan | None:
    """Returns the plan with the least recomputation that fits, or None if none fits."""
    layers = shape.layers // plan.size("pipe")
    for what in recompute:

        def in_layers(count: int, what: str = what) -> Plan:
            return dataclasses.replace(plan, recompute=what, recompute_share=count / layers)

        every = in_layers(layers)
        if memory_bytes(shape, every) > room:
            continue
        if what == "none":
            return every
        # The more layers recompute, the less memory the plan takes.
        fewest = bisect.bisect_left(
            range(layers), -room, lo=1, key=lambda count: -memory_bytes(shape, in_layers(count))
        )
        return in_layers(fewest)
    return None


def best(layouts: Iterable[Layout]) -> dict[str, Layout]:
    """Returns the fastest layout of each kind, in the order of `KINDS`.

    Args:
      layouts: the fastest first, as `search` returns them.
    """
    found: dict[str, Layout] = {}
    for layout in layouts:
        found.setdefault(layout.kind, layout)
    return {kind: found[kind] for kind in KINDS if kind in found}


def meshes(
    shape: Shape, count: int, kinds: Sequence[str] = KINDS
) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yields the axes of each layout (outer to inner), its stage of ZeRO along "data", and its
    chunks per pipeline stage.

    Args:
      shape: sizes of the model.
      count: number of GPUs.
      kinds: of `KINDS`.

    Raises:
      ValueError: if `kinds` are not of `KINDS`, or `count` is no whole number of at least 1.
    """
    _check_names("kinds", kinds, KINDS)
    if type(count) is not int or count < 1:
        raise ValueError(f"count={count!r} must be a whole number of GPUs, at least 1")
    heads = (shape.heads, shape.kv_heads or shape.heads, shape.mlp)
    tensor = [t for t in SIZES if not any(size % t for size in heads)]
    for kind in kinds:
        for t in {"data": [1], "tensor": tensor}.get(kind, [1, *tensor]):
            if kind == "pipe":
                yield from _pipelines(shape, count, t)
                continue
            for c in (1,) if kind != "context" else SIZES:
                replicas, left = divmod(count, t * c)
                if left or (c > 1 and shape.seq_len % (2 * c)):
                    continue
                for f in (f for f in range(1, replicas + 1) if replicas % f == 0):
                    inner = {"data": replicas // f, "fsdp": f}
                    orders = [inner | {"context": c, "tensor": t}]
                    if c > 1 and replicas > 1:
                        orders.append({"context": c} | inner | {"tensor": t})
                    if t > 1 and replicas * c > 1:
                        orders.append({"tensor": t} | inner | {"context": c})
                    for axes in orders:
                        for zero in (1, 2) if f < replicas else (1,):
                            yield {a: n for a, n in axes.items() if n > 1}, zero, 1


def _pipelines(shape: Shape, count: int, t: int) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yields Megatron-LM's pipelines, with ZeRO 1: "pipe" inside of "data", and outside, and
    "tensor" inside of both, and outside.
    """
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
                    yield {a: n for a, n in axes.items() if n > 1}, 1, v


def _microbatches(share: int, p: int, chunks: int) -> list[int]:
    """Returns the sizes of a microbatch that divide a replica's share of the batch, the largest
    first. A pipeline has at least p microbatches; chunks take them in groups of p.
    """
    numbers = [m for m in range(1, share + 1) if share % m == 0]
    if p > 1:
        numbers = [m for m in numbers if m >= p and (chunks == 1 or m % p == 0)]
    return [share // m for m in numbers]


def _check_names(argument: str, given: Any, known: Sequence[str]) -> None:
    names = given if isinstance(given, tuple | list) else ()
    if not names or any(name not in known for name in names):
        raise ValueError(f"{argument}={given!r} must be a tuple of {', '.join(known)}")


def _check_no_experts(shape: Shape) -> None:
    if shape.experts:
        raise ValueError(f"shape.experts={shape.experts} must be 0: no layout has 'expert'")
