"""Seconds of a Transformer's training step on a cluster, by formula.

    step = breakdown(shape, plan, Cluster(hardware.get("h100"), 64))
    print(step.total, step.mfu, step.exposed)

A step is the sum of these parts (`Breakdown`):

    products    matrix multiplications (matmuls), at `cluster_model.PRODUCTS_SHARE` of the peak
                rate
    memory      reads and writes of device memory, at `MEMORY_SHARE` of its bandwidth
    optimizer   the same for parameters, gradients and optimizer state
    tensor, context, expert, data, pipe
                exposed communication along an axis: the device computes nothing during it
    bubble      waiting for the first and last microbatch, and for the slowest stage

The formulas are within 10% of the published time for 62% of 418 published steps. Software
stacks differ more than layouts: if each prediction is divided by the median ratio of predicted
to published seconds on the accelerators of its publication, 73% are within 10%.
`lessons.backtest` computes these figures, and docs/backtest.md lists every row. Only
`PRODUCTS_SHARE` was fitted to them.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp

from course_lib.many_devices.cluster_model import (
    Cluster,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    shift,
)
from course_lib.many_devices.pipeline_parallel import slots
from course_lib.many_devices.plans import Plan, Shape
from course_lib.measure.roofline import peak

# Assumed, not fitted; docs/backtest.md shows the effect of other values.
MEMORY_SHARE = 0.85
"""Share of the rated memory bandwidth that kernels reach."""
UNFUSED_FACTOR = 2
"""Elementwise operations move this many times the bytes if each is a kernel of its own, without
fusion (PyTorch without torch.compile)."""
OVERLAP_COST = 0.25
"""Share of overlapped communication that still costs time: its kernels take multiprocessors and
memory bandwidth from the matmuls that run beside them. It counts for gradients, parameters and
transfers between stages."""
GRADIENT_BUCKETS = 8
"""Number of buckets in which a device sends its gradients (bucketing)."""
TENSOR_OVERLAP = 0.7
"""Share of the tensor traffic that `Plan.tensor_overlap` hides."""
EIGHT_BIT_SPEEDUP = 1.92
"""How much faster a matmul is if its operands have eight bits instead of 16: measured on an
H200, without casts (https://nvidia.github.io/TransformerEngine, "GEMM Speedups")."""
EIGHT_BIT_OPERAND = 8 / 3
"""Bytes that move per element of a matmul's input or result, in the forward pass and in each of
the two matmuls of the backward pass. With 16-bit operands it is 2. With eight bits, 8 in all:
a cast reads 2 and writes the element twice, as it is and transposed; two matmuls read it, 1
each; one matmul writes it, or its gradient, in bfloat16
(https://github.com/pytorch/ao/blob/main/torchao/testing/training/roofline_utils.py)."""


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step, one number per kind of work; `total` is their sum.

    Attributes:
      parts: "products", "memory", "bubble" and "optimizer", and exposed communication by axis:
        "tensor", "context", "expert", "data" and "pipe".
      hidden: seconds of communication that runs beside matmuls, by axis; "data" includes
        "fsdp".
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


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one part of the model for one microbatch, on one device.

    Attributes:
      flops: of matmuls with operands of 16 or 32 bits.
      bytes: read from or written to device memory.
      exposed: seconds of communication that no computation hides, by axis.
      hidden: seconds of communication that runs beside matmuls, by axis.
      narrow_flops: of matmuls with eight-bit operands.
    """

    flops: int | float = 0.0
    bytes: int | float = 0.0
    exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hidden: Mapping[str, float] = dataclasses.field(default_factory=dict)
    narrow_flops: int | float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        exposed, hidden = (
            {axis: a.get(axis, 0.0) + b.get(axis, 0.0) for axis in {**a, **b}}
            for a, b in ((self.exposed, other.exposed), (self.hidden, other.hidden))
        )
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            exposed,
            hidden,
            self.narrow_flops + other.narrow_flops,
        )

    def __mul__(self, times: int | float) -> "Cost":
        exposed, hidden = (
            {axis: times * t for axis, t in side.items()}
            for side in (self.exposed, self.hidden)
        )
        return Cost(
            times * self.flops,
            times * self.bytes,
            exposed,
            hidden,
            times * self.narrow_flops,
        )


def breakdown(shape: Shape, plan: Plan, cluster: Cluster) -> Breakdown:
    """Returns the time of a training step.

    Args:
      shape: sizes of the model.
      plan: how it is trained.
      cluster: the devices, as many as the product of `plan.axes`.

    Raises:
      ValueError: if the axes do not fit the cluster or the model, there is no figure for a
        link, or the accelerator has no unit for `plan.dtype`.
    """
    p, microbatches = plan.size("pipe"), plan.microbatches
    # In some pipelines, the embedding and the output layer each count as one layer.
    if p * plan.chunks > shape.layers + 2 or plan.size("tensor") > shape.heads:
        raise ValueError(
            f"axes={dict(plan.axes)}, chunks={plan.chunks} must not exceed the {shape.layers}"
            f" layers and {shape.heads} heads: a device would have none"
        )
    forward, backward = layer_costs(shape, plan, cluster)
    head = head_cost(shape, plan, cluster)
    per_stage = shape.layers / p
    seconds = (
        _busy(forward * per_stage, plan, cluster),
        _busy(backward * per_stage, plan, cluster),
    )
    # The mean over stages. Only the last stage has the head, so each stage gets 1/p of it.
    microbatch = (forward + backward) * per_stage + head * (1 / p)
    pieces = (*seconds, _busy(weight_gradient_work(shape, plan) * per_stage, plan, cluster))
    pipe, hidden_pipe, bubble = pipeline(
        plan, cluster, _activation(shape, plan), *pieces, _busy(head, plan, cluster)
    )
    data, hidden = along_data(shape, plan, cluster, *seconds)
    _, memory = _rates(plan, cluster)
    work = microbatch * microbatches
    parts = {
        "products": _products(work, plan, cluster),
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


def layer_costs(shape: Shape, plan: Plan, cluster: Cluster) -> tuple[Cost, Cost]:
    """Returns the cost of a layer, forward and backward: work and communication."""
    forward, backward = (
        work + sent
        for work, sent in zip(
            layer_work(shape, plan), layer_traffic(shape, plan, cluster), strict=True
        )
    )
    if plan.size("fsdp") > 1:
        # Prefetch: the next layer's parameters are gathered while this one is computed.
        group, size = cluster.group(plan.axes, "fsdp"), _weights(shape, plan)
        gather = all_gather(group, plan.parameter_bytes * size)
        scatter = reduce_scatter(group, plan.gradient_bytes * size)
        forward = _beside(forward, gather, plan, cluster)
        backward = _beside(backward, gather + scatter, plan, cluster)
    return forward, backward


def layer_work(shape: Shape, plan: Plan) -> tuple[Cost, Cost]:
    """Returns a layer's matmuls and memory traffic, forward and backward. The backward pass
    includes recomputation.
    """
    t, item = plan.size("tensor"), jnp.dtype(plan.dtype).itemsize
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    D, L, k, m = shape.width, shape.seq_len, shape.slots, shape.matrices
    queries = shape.heads * shape.head_dim
    keys = (shape.kv_heads or shape.heads) * shape.head_dim

    # FLOPs: a matmul of T tokens with P parameters takes 2 T P.
    scores = 4 * tokens * L * queries / t
    projections = 2 * tokens * shape.attention / t
    mlp = 2 * tokens * k * shape.expert / t
    mlp += 4 * tokens * k * L * D if plan.dense_dispatch and shape.experts else 0

    # Bytes: operands and results of matmuls; norms, residuals and activations; scores.
    weights = _weights(shape, plan)
    operands = 2 * D + 2 * (queries + keys) / t + k * m * (D + shape.mlp / t)
    operands *= EIGHT_BIT_OPERAND if plan.eight_bit else item
    unfused = UNFUSED_FACTOR if plan.eager else 1
    norms = unfused * 22 * D / (t if plan.sequence_parallel else 1)
    activations = unfused * ((6 if m == 3 else 4) * k * shape.mlp + 12 * queries) / t
    core = tokens / t * (8 * queries if plan.fused_attention else 13 * L * shape.heads)
    moved = tokens * (operands + norms + activations) + core + item * weights

    # A recomputed module skips its last matmul: the backward pass does not need that result.
    # Elementwise operations are about a quarter of a layer's memory traffic.
    mlp_again, out = mlp * (m - 1) / m, 2 * tokens * D * queries / t
    again = {
        "none": Cost(),
        "minimal": Cost(0, moved / 4),
        "selective": Cost(scores, core),
        "attention": _work(plan, projections - out, scores, core + moved / 4),
        "mlp": _work(plan, mlp_again, 0, moved / 4),
        "mlp-in": _work(plan, mlp_again, scores, core + moved / 4),
        "all-but-qkv": _work(plan, mlp_again + out, scores, moved / 2),
        "op": _work(plan, (projections + mlp) / 2, 0, moved / 2),
        "half": _work(plan, (projections + mlp) / 2, scores / 2, moved / 2),
        "full": _work(plan, projections + mlp, scores, moved),
    }[plan.recompute]
    forward = _work(plan, projections + mlp, scores, moved)
    if plan.fused_attention:  # its backward pass recomputes the scores: 5 matmuls, not 4
        again += Cost(scores / 2)
    # Gradients of weights are summed in float32: 4 bytes read, 4 written.
    return forward, forward * 2 + Cost(0, 8 * weights) + again


def _work(plan: Plan, linear: float | int, scores: float | int, moved: float | int) -> Cost:
    """Returns the cost of matmuls with weights and of attention's (FLOPs), and of bytes moved.
    Only matmuls with weights can have eight-bit operands.
    """
    if plan.eight_bit:
        return Cost(scores, moved, narrow_flops=linear)
    return Cost(linear + scores, moved)


def weight_gradient_work(shape: Shape, plan: Plan) -> Cost:
    """Returns the part of a layer's backward pass that a pipeline computes in W: the gradients
    of weights, with half of the traffic that does not come from recomputation.
    """
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    products = 2 * tokens * (shape.attention + shape.slots * shape.expert) / plan.size("tensor")
    forward, _ = layer_work(shape, plan)
    moved = forward.bytes + 8 * _weights(shape, plan)
    return Cost(0, moved, narrow_flops=products) if plan.eight_bit else Cost(products, moved)


def layer_traffic(shape: Shape, plan: Plan, cluster: Cluster) -> tuple[Cost, Cost]:
    """Returns a layer's communication along "tensor", "expert" and "context", forward and
    backward. The backward pass repeats the communication of recomputed layers.
    """
    t, c, item = plan.size("tensor"), plan.size("context"), _item(plan)
    tokens = plan.microbatch * shape.seq_len / c
    group = {axis: cluster.group(plan.axes, axis) for axis in ("tensor", "expert", "context")}

    # Attention and MLP are a pair of matmuls each, which ends in an all-reduce along "tensor";
    # side by side they share one. With sequence parallelism a pair ends in a reduce-scatter,
    # and the next pair begins with an all-gather: the same bytes.
    pairs = 1 if shape.parallel else 2
    tensor = pairs * all_reduce(group["tensor"], _activation(shape, plan))
    hidden = TENSOR_OVERLAP * tensor if plan.tensor_overlap else 0.0
    sent = Cost(exposed={"tensor": tensor - hidden}, hidden={"tensor": hidden})
    if shape.experts:
        # Tokens travel to their experts and back.
        own = tokens / (t if plan.sequence_parallel else 1)
        to_experts = all_to_all(group["expert"], item * own * shape.slots * shape.width)
        sent += Cost(exposed={"expert": 2 * to_experts})
    again = {"full": 1.0, "half": 0.5}.get(plan.recompute, 0.0)  # forward passes repeated
    forward, backward = sent, sent * (1 + again)
    if plan.wgrad_overlap:
        # The gradient's all-reduce, or its reduce-scatter, runs beside the next matmul.
        beside = tensor / 2 if plan.sequence_parallel else tensor
        exposed, hidden = _overlap(beside, beside)
        backward += Cost(exposed={"tensor": exposed - beside}, hidden={"tensor": hidden})
    if c > 1:
        # Keys and values go around a ring while scores are computed. In the backward pass their
        # gradients go with them.
        keys = (shape.kv_heads or shape.heads) * shape.head_dim / t
        ring = (c - 1) * shift(group["context"], item * tokens * 2 * keys)
        scores = 4 * tokens * shape.seq_len * shape.heads * shape.head_dim / t
        room = scores / _rates(plan, cluster)[0]
        again += plan.recompute == "attention"
        ring_cost = Cost(
            exposed={"context": max(ring - room, 0.0)}, hidden={"context": min(ring, room)}
        )
        forward, backward = forward + ring_cost, backward + ring_cost * (2 + again)
    return forward, backward


def _weights(shape: Shape, plan: Plan) -> float:
    """Returns how many of a layer's parameters one device uses in matmuls."""
    experts = shape.expert * max(shape.experts, 1) / plan.size("expert")
    return (shape.attention + experts) / plan.size("tensor")


def _beside(cost: Cost, traffic: float, plan: Plan, cluster: Cluster) -> Cost:
    """Adds traffic along "fsdp" to a cost. The cost's own computation may hide part of the
    traffic.
    """
    exposed, hidden = _overlap(traffic, _busy(cost, plan, cluster) * plan.data_overlap)
    return cost + Cost(exposed={"fsdp": exposed}, hidden={"fsdp": hidden})


def _overlap(traffic: float, computing: float) -> tuple[float, float]:
    """Splits seconds of traffic, which run beside seconds of computing: exposed, hidden."""
    hidden = (1 - OVERLAP_COST) * min(traffic, computing)
    return traffic - hidden, hidden


def head_cost(shape: Shape, plan: Plan, cluster: Cluster) -> Cost:
    """Returns the cost of the output layer and the loss, forward and backward, and of the
    embedding's communication along "tensor".
    """
    t, item = plan.size("tensor"), _item(plan)
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    logits, weights = tokens * shape.vocab / t, shape.vocab * shape.width / t
    # One all-reduce of the embedding in the forward pass, one of the output layer's gradient in
    # the backward pass. Each costs two all-gathers: 4 in all.
    sent = 4 * all_gather(cluster.group(plan.axes, "tensor"), _activation(shape, plan))
    # Memory moves the logits once in bfloat16 and five times in float32. In chunks, they are
    # written and read as often: twice written, but never kept.
    products = 4 if plan.chunked_loss else 3
    cost = Cost(
        2 * products * logits * shape.width,
        22 * logits + products * item * weights,
        {"tensor": sent},
    )
    if plan.size("fsdp") > 1:
        group = cluster.group(plan.axes, "fsdp")
        gather = all_gather(group, plan.parameter_bytes * weights)
        scatter = reduce_scatter(group, plan.gradient_bytes * weights)
        cost = _beside(cost, 2 * gather + scatter, plan, cluster)
    return cost


def pipeline(
    plan: Plan,
    cluster: Cluster,
    activation: float,
    forward: float,
    backward: float,
    of_weights: float,
    head: float,
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
      head: seconds of the output layer, which only the last stage has.
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
        exposed, hidden = _overlap(steady * m * one, steady * m * mean)
        return (1 - steady) * m * one + exposed, hidden, bubble
    one = 2 * shift(link, activation / (t if plan.sequence_parallel else 1))
    busy = {"F": forward, "B": backward - of_weights, "W": of_weights}
    busy = {kind: time / v for kind, time in busy.items()}
    last = busy | {"B": busy["B"] + head}  # forward, backward and the gradients of its weights
    waiting = slots.lockstep(plan.schedule, busy, last) - m * mean
    return len(plan.schedule.table[0]) * one, 0.0, waiting


def along_data(
    shape: Shape, plan: Plan, cluster: Cluster, forward: float, backward: float
) -> tuple[float, float]:
    """Returns the seconds of sending gradients and new parameters: exposed, then hidden.

    Gradients are sent in buckets during the last microbatch's backward pass, new parameters
    during the first microbatch's forward pass. No computation is left to hide the last bucket.

    Args:
      shape: sizes of the model.
      plan: how it is trained.
      cluster: the devices.
      forward: seconds of one stage's forward pass of one microbatch.
      backward: seconds of its backward pass.
    """
    # Without a pipeline, ZeRO-2 sums the gradients of each microbatch.
    times = plan.microbatches if plan.zero == 2 and plan.size("pipe") == 1 else 1
    exposed = hidden = 0.0
    for parameters, axes in device_parameters(shape, plan):
        group = cluster.group(plan.axes, axes)
        gradients = plan.gradient_bytes * parameters
        if plan.zero:
            new = plan.parameter_bytes * parameters
            traffic = [(all_gather(group, new), 1), (reduce_scatter(group, gradients), times)]
        else:
            traffic = [(0.0, 1), (all_reduce(group, gradients), 1)]
        overlap = plan.data_overlap and plan.parameter_overlap, plan.data_overlap
        for (sent, count), computing, overlaps in zip(
            traffic, (forward, backward), overlap, strict=True
        ):
            beside = min(computing, sent * (1 - 1 / GRADIENT_BUCKETS)) * overlaps
            a, b = _overlap(sent, beside)
            exposed, hidden = exposed + count * a, hidden + count * b
    if plan.size("fsdp") > 1:
        # The embedding comes first, and its gradient last: no computing hides them.
        group, size = cluster.group(plan.axes, "fsdp"), shape.vocab * shape.width
        first = all_gather(group, plan.parameter_bytes * size / plan.size("tensor"))
        last = reduce_scatter(group, plan.gradient_bytes * size / plan.size("tensor"))
        exposed += plan.microbatches * (first + last)
    return exposed, hidden


def device_parameters(shape: Shape, plan: Plan) -> list[tuple[float, tuple[str, ...]]]:
    """Returns pairs: the number of parameters on one device, before ZeRO divides them, and the
    axes that replicate these parameters. One pair is for the experts, if the model has any, and
    one for all other parameters.
    """
    t, p = plan.size("tensor"), plan.size("pipe")
    outside = shape.vocab * shape.width * (1 if p > 1 or shape.tied else 2)
    experts = shape.layers / p * shape.expert * max(shape.experts, 1)
    rest = shape.layers / p * shape.attention + outside
    if not shape.experts:
        experts, rest = 0.0, rest + experts
    parts = [
        (rest / t / plan.size("fsdp"), ("data", "context", "expert")),
        (experts / t / plan.size("fsdp") / plan.size("expert"), ("data", "context")),
    ]
    return [part for part in parts if part[0]]


def optimizer_bytes(shape: Shape, plan: Plan) -> float:
    """Returns the bytes that the optimizer moves on one device. Per parameter, `update_bytes`
    of the plan (ZeRO divides them), and 8 that read and zero its float32 gradient.
    """
    total = 0.0
    for parameters, axes in device_parameters(shape, plan):
        copies = math.prod(plan.size(axis) for axis in axes) if plan.zero else 1
        total += parameters * (plan.update_bytes / copies + 8)
    return total


def _activation(shape: Shape, plan: Plan) -> float:
    """Returns the bytes of a microbatch's residual stream [b, L, D] on a device."""
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    return _item(plan) * tokens * shape.width


def _item(plan: Plan) -> int:
    """Returns the bytes of an element between matmuls. Eight-bit matmuls return bfloat16."""
    return 2 if plan.eight_bit else jnp.dtype(plan.dtype).itemsize


def _rates(plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Returns FLOP/s of matmuls, those with eight-bit operands aside, and bytes/s of memory."""
    dtype = "bfloat16" if plan.eight_bit else plan.dtype
    return (
        cluster.products_share * peak(cluster.accelerator, dtype),
        MEMORY_SHARE * cluster.accelerator.memory_bandwidth,
    )


def _products(cost: Cost, plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds of a cost's matmuls."""
    return (cost.flops + cost.narrow_flops / EIGHT_BIT_SPEEDUP) / _rates(plan, cluster)[0]


def _busy(cost: Cost, plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds of a cost, including exposed communication."""
    memory = cost.bytes / _rates(plan, cluster)[1]
    return _products(cost, plan, cluster) + memory + sum(cost.exposed.values())
