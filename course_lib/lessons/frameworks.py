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


def state_bytes(shape: Shape, plan: Plan, devices: int) -> float:
    """Returns the bytes of state that a device holds during a step.

    Parameters in bfloat16 and gradients of `plan.gradient_bytes` are divided along "fsdp",
    "pipe" and "tensor". A float32 copy and two moments, 12 bytes per parameter, are divided
    over all devices.
    """
    divided = math.prod(plan.size(axis) for axis in ("fsdp", "pipe", "tensor"))
    return shape.parameters * ((2 + plan.gradient_bytes) / divided + 12 / devices)


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
    if state_bytes(shape, plan, cluster.count) > STATE_SHARE * cluster.accelerator.memory_bytes:
        return math.inf
    return step_model.breakdown(shape, plan, cluster).total


def neighbours(
    shape: Shape, cluster: Cluster, batch: int, *, fused_attention: bool = True
) -> dict[str, dict[str, float]]:
    """Returns the seconds of layouts near ZeRO 3 over all GPUs, by added axis and by name.

    "context" and "tensor" stand beside ZeRO 3, "pipe" is Megatron-LM's interleaved pipeline
    with ZeRO 1 and one sequence per microbatch. What does not divide the model or the batch is
    left out.
    """
    n = cluster.count
    fused: dict[str, Any] = {"fused_attention": fused_attention}
    found: dict[str, dict[str, float]] = {"context": {}, "tensor": {}, "pipe": {}}
    for k in SIZES:
        replicas, left = divmod(n, k)
        if left or batch % replicas:
            continue
        orders = {"fsdp": replicas, "context": k}, {"context": k, "fsdp": replicas}
        found["context"][f"context {k}"] = min(
            step_seconds(shape, cluster, batch, axes, **fused) for axes in orders
        )
        if shape.heads % k == 0:
            axes = {"fsdp": replicas, "tensor": k}
            how = fused | _along_tensor(k)
            found["tensor"][f"tensor {k}"] = step_seconds(shape, cluster, batch, axes, **how)
    for p, t, v in itertools.product(SIZES, (1, *SIZES), CHUNKS):
        replicas, left = divmod(n, p * t)
        # Chunks have equally many layers, and microbatches come in groups of p.
        if left or batch % (replicas * p) or shape.heads % t or shape.layers % (p * v):
            continue
        axes = {"data": replicas, "pipe": p, "tensor": t}
        how = fused | _along_tensor(t) | {"microbatch": 1, "gradient_bytes": 4}
        how |= {"chunks": v, "pipe_overlap": v > 1}
        name = f"pipe {p}, tensor {t}, {v} chunks".replace(" tensor 1,", "")
        found["pipe"][name] = step_seconds(shape, cluster, batch, axes, **how)
    return found


def _along_tensor(size: int) -> dict[str, bool]:
    return {"sequence_parallel": size > 1, "tensor_overlap": size > 1}
