"""Steps as a training framework runs them, priced by formula: a layout beside its neighbours.

    ours = frameworks.step_seconds(shape, cluster, 512, {"fsdp": 64})
    others = frameworks.neighbours(shape, cluster, 512)

`estimate.choose` prices this course's own programs. A framework has more: a fused attention
kernel, rings over "context", interleaved pipelines whose transfers overlap.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

from course_lib.many_devices import step_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.plans import Plan, Shape

STATE_SHARE = 0.8  # of a GPU's memory: what the state may take, so that activations have room
SIZES = (2, 4, 8)  # of the axis that a neighbour adds
CHUNKS = (1, 2, 3, 4, 6, 8)  # per pipeline stage
MICROBATCH_TOKENS = 4096  # per GPU, at most: the activations of several microbatches are kept


def state_bytes(shape: Shape, plan: Plan) -> float:
    """Returns the bytes of state that a device holds during a step.

    Parameters in bfloat16 and gradients of `plan.gradient_bytes` are divided along "fsdp",
    "pipe" and "tensor". A float32 copy and two moments, 12 bytes per parameter, are divided
    over all devices from ZeRO 1 on, and the gradients from ZeRO 2 on.
    """
    parts = math.prod(plan.size(axis) for axis in ("fsdp", "pipe", "tensor"))
    devices = math.prod(plan.axes.values())
    gradients = plan.gradient_bytes / (devices if plan.zero >= 2 else parts)
    return shape.parameters * (2 / parts + gradients + 12 / (devices if plan.zero else parts))


def step_seconds(
    shape: Shape, cluster: Cluster, batch: int, axes: Mapping[str, int], **options: Any
) -> float:
    """Returns the seconds of a step, or infinity if its state takes too much memory.

    Blocks are recomputed and the optimizer's state is divided, unless `options` say otherwise.

    Args:
      shape: sizes of the model.
      cluster: the GPUs, as many as `axes` multiply to.
      batch: sequences per step. A replica computes its share at once.
      axes: sizes of the mesh by name, outer to inner.
      options: fields of `plans.Plan`.

    Raises:
      ValueError: as `Plan` and `step_model.breakdown` do.
    """
    replicas = axes.get("data", 1) * axes.get("fsdp", 1)
    usual: dict[str, Any] = {"microbatch": batch // replicas, "zero": 1, "recompute": "block"}
    plan = Plan(axes, batch, **usual | options)
    if state_bytes(shape, plan) > STATE_SHARE * cluster.accelerator.memory_bytes:
        return math.inf
    return step_model.breakdown(shape, plan, cluster).total


def neighbours(
    shape: Shape, cluster: Cluster, batch: int, *, fused_attention: bool = True
) -> dict[str, dict[str, float]]:
    """Returns the seconds of layouts near ZeRO 3 over all GPUs, by added axis and by name.

    "context" and "tensor" stand beside ZeRO 3; "pipe" are `pipelines`, which send gradients in
    float32. What does not divide the model or the batch is left out.
    """
    n = cluster.count
    fused: dict[str, Any] = {"fused_attention": fused_attention}
    by_axis: dict[str, dict[str, float]] = {"context": {}, "tensor": {}, "pipe": {}}
    for k in SIZES:
        replicas, left = divmod(n, k)
        if left or batch % replicas:
            continue
        if shape.seq_len % (2 * k) == 0:
            orders = {"fsdp": replicas, "context": k}, {"context": k, "fsdp": replicas}
            by_axis["context"][f"context {k}"] = min(
                step_seconds(shape, cluster, batch, axes, **fused) for axes in orders
            )
        if _divides(k, shape):
            axes = {"fsdp": replicas, "tensor": k}
            how = fused | _along_tensor(k)
            by_axis["tensor"][f"tensor {k}"] = step_seconds(shape, cluster, batch, axes, **how)
    by_axis["pipe"] = pipelines(shape, cluster, batch, gradient_bytes=4, **fused)
    return by_axis


def pipelines(shape: Shape, cluster: Cluster, batch: int, **options: Any) -> dict[str, float]:
    """Returns the seconds of Megatron-LM's pipelines, by name: 2 to 8 stages of up to 8 chunks,
    with and without "tensor" inside of a stage, and ZeRO 1.

    With several chunks, stages send while they compute. The microbatch is the one that takes
    the least time: one sequence or more, up to `MICROBATCH_TOKENS`. What does not divide the
    model or the batch is left out.

    Args:
      shape: sizes of the model.
      cluster: the GPUs.
      batch: sequences per step.
      options: fields of `plans.Plan`, instead of those above.
    """
    by_name: dict[str, float] = {}
    for p, t, v in itertools.product(SIZES, (1, *SIZES), CHUNKS):
        replicas, left = divmod(cluster.count, p * t)
        if left or batch % replicas or shape.layers % (p * v) or not _divides(t, shape):
            continue
        axes = {"data": replicas, "pipe": p, "tensor": t}
        name = f"pipe {p}, tensor {t}, {v} chunks".replace(" tensor 1,", "")
        how = {"chunks": v, "pipe_overlap": v > 1} | _along_tensor(t) | options
        for sequences in (1, 2, 4, 8, 16, 32):
            tokens = sequences * shape.seq_len / t  # of a GPU
            # Megatron-LM's chunks take microbatches in groups of p.
            if batch % (replicas * sequences * p) or (
                sequences > 1 and tokens > MICROBATCH_TOKENS
            ):
                continue
            seconds = step_seconds(shape, cluster, batch, axes, microbatch=sequences, **how)
            by_name[name] = min(seconds, by_name.get(name, math.inf))
    return by_name


def _divides(tensor: int, shape: Shape) -> bool:
    return not any(count % tensor for count in (shape.heads, shape.kv_heads, shape.mlp))


def _along_tensor(size: int) -> dict[str, Any]:
    return {"sequence_parallel": size > 1, "tensor_overlap": size > 1}
