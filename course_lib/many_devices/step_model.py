"""Seconds of a Transformer's training step on a cluster, by formula.

    step = breakdown(shape, plan, Cluster(hardware.get("h100"), 64))
    print(step.total, step.mfu, step.exposed)

A step is the sum of these parts (`Breakdown`):

    products    matrix multiplications (matmuls), at `cluster_model.PRODUCTS_SHARE` of the peak
                rate
    memory      reads and writes of device memory, at `layer_model.MEMORY_SHARE` of its
                bandwidth
    optimizer   the same for parameters, gradients and optimizer state
    tensor, context, expert, data, pipe
                exposed communication along an axis: the seconds that it adds to the step. The
                device computes nothing meanwhile, or more slowly: a quarter of the traffic
                beside computing counts as exposed (`layer_model.OVERLAP_COST`). Two kinds of
                traffic do not pay this quarter: a ring along "context", and what
                `Plan.tensor_overlap` hides
    bubble      waiting while the pipeline fills and empties, and for the last stage, which also
                has the output layer. Stages have equally many layers, whole or not

The formulas are within 10% of the published time for 61% of 418 published steps. Software
stacks differ more than layouts: if each prediction is divided by the median ratio of predicted
to published seconds on the accelerators of its publication, 71% are within 10%.
`lessons.backtest` computes these figures, and docs/backtest.md lists every row. Only
`PRODUCTS_SHARE` was fitted to them, on GPUs. TPUs reach a larger share of their peak rate:
eight published steps on TPUs are predicted 22% too long, or more.
"""

import dataclasses
import math
from collections.abc import Mapping

from course_lib.many_devices import plans
from course_lib.many_devices.cluster_model import (
    Cluster,
    all_gather,
    all_reduce,
    check_type,
    reduce_scatter,
    shift,
)
from course_lib.many_devices.layer_model import (
    activation_bytes,
    duration,
    free_computing,
    head_cost,
    layer_costs,
    overlap,
    rates,
    seconds_of_products,
    weight_gradient_work,
)
from course_lib.many_devices.pipeline_parallel import slots
from course_lib.many_devices.plans import Plan, Shape
from course_lib.measure.roofline import peak

# Assumed, not fitted; docs/backtest.md shows the effect of other values.
GRADIENT_BUCKETS = 8
"""Number of buckets in which a device sends its gradients (bucketing)."""


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step, one number per kind of work; `total` is their sum.

    Attributes:
      parts: "products", "memory", "bubble" and "optimizer", and exposed communication by axis:
        "tensor", "context", "expert", "data" and "pipe".
      hidden: seconds of communication that computing hides, by axis; "data" includes "fsdp".
      model_seconds: seconds that one device needs for its share of the model's matmuls, at the
        peak rate.
    """

    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    model_seconds: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.parts[axis] for axis in ("tensor", "context", "expert", "data", "pipe"))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.model_seconds / self.total


def breakdown(shape: Shape, plan: Plan, cluster: Cluster) -> Breakdown:
    """Returns the time of a training step.

    Args:
      shape: sizes of the model.
      plan: how it is trained.
      cluster: the devices, as many as the product of `plan.axes`.

    Raises:
      TypeError: if an argument is of another type, such as two that changed places.
      ValueError: if the axes do not fit the cluster; "tensor", "context" or "expert" does not
        divide heads, sequence or experts; a stage would have no layer; there is no figure for a
        link; or the accelerator has no unit for `plan.dtype`.
    """
    check_type("shape", shape, Shape, "a Shape: the sizes of the model")
    check_type("plan", plan, Plan, "a Plan: how the model is trained")
    check_type("cluster", cluster, Cluster, "a Cluster: Cluster(hardware.get('h100'), 64)")
    plans.check(shape, plan)
    p, microbatches = plan.size("pipe"), plan.microbatches
    forward, backward = layer_costs(shape, plan, cluster)
    head = head_cost(shape, plan, cluster)
    per_stage = shape.layers / p
    stage = forward * per_stage, backward * per_stage
    # The mean over stages. Only the last stage has the head, so each stage gets 1/p of it.
    microbatch = (forward + backward) * per_stage + head * (1 / p)
    pipe, hidden_pipe, bubble = pipeline(
        plan,
        cluster,
        activation_bytes(shape, plan),
        forward=duration(stage[0], plan, cluster),
        backward=duration(stage[1], plan, cluster),
        of_weights=duration(weight_gradient_work(shape, plan) * per_stage, plan, cluster),
        head=duration(head, plan, cluster),
        room=free_computing(microbatch, plan, cluster),
        tables=_vocabulary_parameters(shape, plan) / plan.size("tensor"),
    )
    beside = _passes_beside_data(plan)
    free = [beside * free_computing(cost, plan, cluster) for cost in stage]
    data, hidden = along_data(shape, plan, cluster, *free)
    _, memory = rates(plan, cluster)
    work = microbatch * microbatches
    parts = {
        "products": seconds_of_products(work, plan, cluster),
        "memory": work.bytes / memory,
        "optimizer": optimizer_bytes(shape, plan) / memory,
        "bubble": bubble,
        "pipe": pipe,
        "data": data + work.exposed.get("fsdp", 0.0),
        **{axis: work.exposed.get(axis, 0.0) for axis in ("tensor", "context", "expert")},
    }
    model = plan.batch * shape.seq_len * shape.flops / cluster.count
    return Breakdown(
        parts,
        {"data": hidden + work.hidden.get("fsdp", 0.0), "pipe": hidden_pipe}
        | {axis: work.hidden.get(axis, 0.0) for axis in ("tensor", "context")},
        model / peak(cluster.accelerator, plan.dtype),
    )


def pipeline(
    plan: Plan,
    cluster: Cluster,
    activation: float,
    *,
    forward: float,
    backward: float,
    of_weights: float,
    head: float,
    room: float,
    tables: float,
) -> tuple[float, float, float]:
    """Returns three numbers of seconds: exposed transfers between stages, hidden ones, and the
    bubble (all other waiting).

    Args:
      plan: how the model is trained.
      cluster: the devices.
      activation: bytes of a microbatch's residual stream.
      forward: seconds of one stage's forward pass of one microbatch.
      backward: seconds of its backward pass.
      of_weights: seconds of the part of it that computes the gradients of weights, W.
      head: seconds of the output layer, which only the last stage computes.
      room: seconds of computing in one microbatch, forward and backward, that hide nothing
        yet.
      tables: parameters of the embedding and the output layer on one device.
    """
    p, m, v, t = plan.size("pipe"), plan.microbatches, plan.chunks, plan.size("tensor")
    if p == 1:
        return 0.0, 0.0, 0.0
    link = cluster.group(plan.axes, "pipe")
    mean = forward + backward + head / p
    if plan.schedule is None:
        # Narayanan et al., 2021, sections 2.2 and 4.1: each of the t devices sends 1/t of
        # the activation.
        one = 2 * v * shift(link, activation / t)
        bubble = (p - 1) / v * (mean + one) + m * (head - head / p)
        if not plan.pipe_overlap:
            return m * one, 0.0, bubble
        # Megatron-LM's warm-up: 2 (p - 1 - stage) + (v - 1) p chunks forward, as many backward
        # when the pipeline empties. Only transfers between the two run beside other chunks.
        steady = max(0.0, 1 - (p - 1 + (v - 1) * p) / (m * v))
        # Before and after, chunks may hide traffic along "data".
        exposed, hidden = overlap(steady * m * one, steady * m * room)
        return (1 - steady) * m * one + exposed, hidden, bubble
    one = 2 * shift(link, activation / (t if plan.sequence_parallel else 1))
    # All stages hold the embedding and the output layer, and sum their gradients.
    summed = all_reduce(link, plan.gradient_bytes * tables)
    usual = {"F": forward / v, "B": (backward - of_weights) / v, "W": of_weights / v}
    # The head adds its forward and backward pass, and the gradients of its weights.
    last = usual | {"B": usual["B"] + head}
    waiting = slots.lockstep(plan.schedule, usual, last) - m * mean
    return len(plan.schedule.table[0]) * one + summed, 0.0, waiting


def along_data(
    shape: Shape, plan: Plan, cluster: Cluster, forward: float, backward: float
) -> tuple[float, float]:
    """Returns the seconds of sending gradients and new parameters: exposed, then hidden.

    Gradients are sent in buckets during the last microbatch's backward pass, new parameters
    during the first microbatch's forward pass; with chunks, beside those of
    `_passes_beside_data`. No computation is left to hide the last bucket.

    Args:
      shape: sizes of the model.
      plan: how it is trained.
      cluster: the devices.
      forward: seconds of computing that hide nothing yet, in the forward passes beside which
        parameters are sent.
      backward: the same of gradients, in backward passes.
    """
    # Without a pipeline, ZeRO-2 sums the gradients of each microbatch.
    times = plan.microbatches if plan.zero == 2 and plan.size("pipe") == 1 else 1
    left = {
        "forward": forward * (plan.data_overlap and plan.parameter_overlap),
        "backward": backward * plan.data_overlap,
    }
    # Seconds of a transfer, how often, and the pass whose computing it runs beside.
    traffic: list[tuple[float, int, str]] = []
    for parameters, axes in device_parameters(shape, plan):
        gradients = plan.gradient_bytes * parameters
        if plan.sums_each_microbatch:
            for axis in axes[1:]:
                summed = all_reduce(cluster.group(plan.axes, axis), gradients)
                traffic.append((summed, plan.microbatches, "backward"))
            axes = axes[:1]
        group = cluster.group(plan.axes, axes)
        if plan.zero:
            new = all_gather(group, plan.parameter_bytes * parameters)
            traffic.append((new, 1, "forward"))
            traffic.append((reduce_scatter(group, gradients), times, "backward"))
        else:
            traffic.append((all_reduce(group, gradients), 1, "backward"))
    exposed = hidden = 0.0
    for sent, count, direction in traffic:
        beside = min(left[direction], sent * (1 - 1 / GRADIENT_BUCKETS))
        left[direction] -= beside  # a second of computing hides one transfer
        a, b = overlap(sent, beside)
        exposed, hidden = exposed + count * a, hidden + count * b
    if plan.size("fsdp") > 1:
        # The embedding comes first, and its gradient last: no computing hides them.
        group = cluster.group(plan.axes, "fsdp")
        size = plan.embedding_bytes * shape.vocab * shape.width / plan.size("tensor")
        first, last = all_gather(group, size), reduce_scatter(group, size)
        exposed += plan.microbatches * (first + last)
    return exposed, hidden


def _passes_beside_data(plan: Plan) -> float:
    """Returns how many passes of one stage may hide gradients, or new parameters.

    Without chunks it is one: the last microbatch's. Megatron-LM's pipeline sends a chunk's
    gradients when that chunk's last microbatch has passed. The last group of p microbatches
    passes the v chunks one after the other. So (v - 1) p passes of a chunk follow the first
    chunk's last one, and each pass of a chunk is 1/v of a stage's
    (https://github.com/NVIDIA/Megatron-LM, `forward_backward_pipelining_with_interleaving`).
    This course's pipeline sends everything beside one pass.
    """
    if plan.schedule is not None:
        return 1.0
    return (1 + (plan.chunks - 1) * plan.size("pipe")) / plan.chunks


def device_parameters(shape: Shape, plan: Plan) -> list[tuple[float, tuple[str, ...]]]:
    """Returns pairs: the number of parameters on one device, before ZeRO divides them, and the
    axes that replicate these parameters. One pair is for the experts, if the model has any, and
    one for all other parameters.
    """
    t, p = plan.size("tensor"), plan.size("pipe")
    experts = shape.layers / p * shape.expert * max(shape.experts, 1)
    rest = shape.layers / p * shape.attention + _vocabulary_parameters(shape, plan)
    if not shape.experts:
        experts, rest = 0.0, rest + experts
    parts = [
        (rest / t / plan.size("fsdp"), ("data", "context", "expert")),
        (experts / t / plan.size("fsdp") / plan.size("expert"), ("data", "context")),
    ]
    return [part for part in parts if part[0]]


def _vocabulary_parameters(shape: Shape, plan: Plan) -> int:
    """Returns the parameters of the embedding and the output layer that a stage holds. In
    Megatron-LM's pipeline the first stage has one of them and the last the other; in this
    course's every stage has both.
    """
    one_each = plan.size("pipe") > 1 and plan.schedule is None
    return shape.vocab * shape.width * (1 if one_each or shape.tied else 2)


def optimizer_bytes(shape: Shape, plan: Plan) -> float:
    """Returns the bytes that the optimizer moves on one device. Per parameter, `update_bytes`
    of the plan, and its gradient is read (ZeRO divides both). A float32 sum is set to zero,
    which is 4 bytes more (stage 2 divides these, too).
    """
    total = 0.0
    read, zeroed = (4, 4) if plan.float32_gradients else (plan.gradient_bytes, 0)
    for parameters, axes in device_parameters(shape, plan):
        copies = math.prod(plan.size(axis) for axis in axes)
        own = (plan.update_bytes + read) / (copies if plan.zero else 1)
        total += parameters * (own + zeroed / (copies if plan.zero == 2 else 1))
    return total
