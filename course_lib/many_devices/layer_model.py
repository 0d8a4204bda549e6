"""Work and communication of one layer of a Transformer, and of its head, on one device of a
cluster. `step_model` adds them up to a step.

    forward, backward = layer_costs(shape, plan, Cluster(hardware.get("h100"), 64))
    print(forward.flops, forward.bytes, forward.exposed, forward.hidden)
"""

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp

from course_lib.many_devices.cluster_model import (
    Cluster,
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    shift,
)
from course_lib.many_devices.plans import Plan, Shape
from course_lib.measure.roofline import peak

# Assumed, not fitted. docs/backtest.md shows the effect of other values of the first four.
MEMORY_SHARE = 0.85
"""Share of the rated memory bandwidth that kernels reach."""
UNFUSED_FACTOR = 2
"""Elementwise operations move this many times the bytes if each is a kernel of its own, without
fusion (PyTorch without torch.compile)."""
OVERLAP_COST = 0.25
"""Share of overlapped communication that still costs time: its kernels take multiprocessors and
memory bandwidth from the matmuls that run beside them. It counts for gradients, parameters,
transfers between stages, and sums along "tensor" with `Plan.wgrad_overlap`."""
TENSOR_OVERLAP = 0.7
"""Share of the tensor traffic that `Plan.tensor_overlap` hides."""
EIGHT_BIT_SPEEDUP = 1.92
"""How much faster a matmul is if its operands have eight bits instead of 16: measured on an
H200, without casts (https://nvidia.github.io/TransformerEngine, "GEMM Speedups")."""
EIGHT_BIT_OPERAND = 8 / 3
"""Mean bytes that move per element of a matmul's input or result, in the forward pass and in
each of the two matmuls of the backward pass. With 16-bit operands: 2. With eight bits the three
move (2 + 1 + 1) + (1 + 1) + 2 = 8: a cast reads 2 and writes 1 twice, as it is and transposed;
two matmuls read 1 each; one matmul writes 2, in bfloat16
(https://github.com/pytorch/ao/blob/main/torchao/testing/training/roofline_utils.py)."""

BOTH_AGAIN = {"half": 0.5, "modules": 1, "block": 1, "full": 1}
ATTENTION_AGAIN = BOTH_AGAIN | {"attention": 1}
MLP_AGAIN = BOTH_AGAIN | {"mlp": 1, "mlp-in": 1, "all-but-qkv": 1}
"""How often the backward pass computes a layer's attention, or its MLP, once more, by
`Plan.recompute`."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one part of the model for one microbatch, on one device.

    Attributes:
      flops: of matmuls with operands of 16 or 32 bits.
      bytes: read from or written to device memory.
      exposed: seconds of communication that lengthen the step, by axis: nothing is computed
        meanwhile, or more slowly (`OVERLAP_COST`).
      hidden: seconds of communication that computing hides, by axis.
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


def layer_costs(shape: Shape, plan: Plan, cluster: Cluster) -> tuple[Cost, Cost]:
    """Returns the cost of a layer, forward and backward: work and communication."""
    forward, backward = (
        work + sent
        for work, sent in zip(
            layer_work(shape, plan), layer_traffic(shape, plan, cluster), strict=True
        )
    )
    if plan.tensor_overlap:
        # No more hides than computing lasts.
        forward, backward = (
            cost + Cost(exposed={"tensor": excess}, hidden={"tensor": -excess})
            for cost in (forward, backward)
            for excess in [max(0.0, _occupied(cost, plan) - computing(cost, plan, cluster))]
        )
    if plan.size("fsdp") > 1:
        # Prefetch: the next layer's parameters are gathered while this one is computed.
        group, size = cluster.group(plan.axes, "fsdp"), _weights(shape, plan)
        gather = all_gather(group, plan.parameter_bytes * size)
        scatter = reduce_scatter(group, plan.gradient_bytes * size)
        again = gather if plan.gather_again else 0.0
        forward = _with_fsdp(forward, gather, plan, cluster)
        backward = _with_fsdp(backward, again + scatter, plan, cluster)
    return forward, backward


def layer_work(shape: Shape, plan: Plan) -> tuple[Cost, Cost]:
    """Returns a layer's matmuls and memory traffic, forward and backward. The backward pass
    includes recomputation.
    """
    t, item = plan.size("tensor"), jnp.dtype(plan.dtype).itemsize
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    D, k, m = shape.width, shape.slots, shape.matrices
    queries = shape.heads * shape.head_dim
    keys = (shape.kv_heads or shape.heads) * shape.head_dim

    # FLOPs: a matmul of T tokens with P parameters takes 2 T P.
    scores = _core_flops(shape, plan)
    projections = 2 * tokens * shape.attention / t
    mlp = 2 * tokens * k * shape.expert / t
    mlp += 4 * tokens * k * shape.seq_len * D if plan.dense_dispatch and shape.experts else 0

    # Bytes per token of attention and of the MLP. Operands and results of matmuls:
    width = EIGHT_BIT_OPERAND if plan.eight_bit else item
    of_qkv = width * (D + (queries + 2 * keys) / t)
    operands = of_qkv + width * (queries / t + D), width * k * m * (D + shape.mlp / t)
    # Each norm is read and written, 4 bytes; a dropout mask has 1; the residual stream and the
    # result are read and their sum is written, 6. An activation is read and written, with a
    # gate two are read. Queries and keys turn, 8 bytes, and the heads' results are rearranged.
    unfused = UNFUSED_FACTOR if plan.eager else 1
    norm = 11 * D / (t if plan.sequence_parallel else 1)
    activations = 12 * queries / t, (6 if m == 3 else 4) * k * shape.mlp / t
    elementwise = [tokens * unfused * (norm + each) for each in activations]
    core = _core_bytes(shape, plan)
    weights = shape.attention / t, _weights(shape, plan) - shape.attention / t
    attention, expert = (
        tokens * of_matmuls + others + item * size
        for of_matmuls, others, size in zip(operands, elementwise, weights, strict=True)
    )
    attention += core
    moved = attention + expert

    # A recomputed part skips its last matmul: the backward pass does not need that result.
    mlp_again, out = mlp * (m - 1) / m, 2 * tokens * D * queries / t
    modules = projections - out + mlp_again
    but_qkv = moved - tokens * of_qkv - item * D * (queries + 2 * keys) / t
    every_second = (moved - core + sum(elementwise)) / 2
    again = {
        "none": Cost(),
        "gathers": Cost(),
        "minimal": Cost(0, sum(elementwise)),
        "selective": Cost(scores, core),
        "attention": _work(plan, projections - out, scores, attention),
        "mlp": _work(plan, mlp_again, 0, expert),
        "mlp-in": _work(plan, mlp_again, scores, core + expert),
        "all-but-qkv": _work(plan, mlp_again + out, scores, but_qkv),
        "op": _work(plan, (projections + mlp) / 2, 0, every_second),
        "half": _work(plan, (projections + mlp) / 2, scores / 2, moved / 2),
        "modules": _work(plan, modules, scores, moved),
        # Side by side, attention and MLP end together, and both last matmuls are skipped.
        "block": _work(plan, modules + (0 if shape.parallel else out), scores, moved),
        "full": _work(plan, projections + mlp, scores, moved),
    }[plan.recompute] * plan.recompute_share
    forward = _work(plan, projections + mlp, scores, moved)
    # Fused attention and rings recompute the scores in the backward pass: 5 matmuls, not 4.
    if plan.fused_attention or plan.size("context") > 1:
        again += Cost(scores / 2)
    gradients = Cost(0, _gradient_bytes(plan) * sum(weights))
    return forward, forward * 2 + gradients + again


def _gradient_bytes(plan: Plan) -> int:
    """Returns the bytes of memory that the gradient of one weight moves, per microbatch: read
    and written in the float32 sum, or written once.
    """
    return 8 if plan.float32_gradients else plan.gradient_bytes


def _core_flops(shape: Shape, plan: Plan) -> float:
    """Returns the FLOPs of attention's core (scores and mean of values), forward."""
    tokens = plan.microbatch * shape.seq_len / plan.size("context") / plan.size("tensor")
    keys = shape.seq_len * _computed_scores(plan)
    return 4 * tokens * keys * shape.heads * shape.head_dim


def _core_bytes(shape: Shape, plan: Plan) -> float:
    """Returns the bytes that attention's core (scores, softmax, mean of values) moves forward.
    On the chip, queries, keys, values and results move. In memory, a score moves 13 bytes: the
    score, its softmax and what dropout leaves of it are written and read, 2 each; a mask.
    (Without dropout, but with the score in float32, it would be 12.)
    """
    tokens = plan.microbatch * shape.seq_len / plan.size("context") / plan.size("tensor")
    if plan.fused_attention:
        return tokens * 8 * shape.heads * shape.head_dim
    return tokens * 13 * shape.seq_len * shape.heads * _computed_scores(plan)


def _computed_scores(plan: Plan) -> float:
    """Returns the share of a sequence's scores that the devices compute. A ring of n devices
    leaves out parts in which each token would look ahead: (2 n + 1) / 4 n are left. A fused
    kernel counts in full (`Shape.flops`).
    """
    n = plan.size("context")
    return 1.0 if n == 1 or plan.fused_attention else (2 * n + 1) / (4 * n)


def _work(plan: Plan, linear: float | int, scores: float | int, moved: float | int) -> Cost:
    """Returns the cost of matmuls with weights and of attention's (FLOPs), and of bytes moved.
    Only matmuls with weights can have eight-bit operands.
    """
    if plan.eight_bit:
        return Cost(scores, moved, narrow_flops=linear)
    return Cost(linear + scores, moved)


def weight_gradient_work(shape: Shape, plan: Plan) -> Cost:
    """Returns what a pipeline computes in W: the matmuls of a layer's backward pass that give
    the gradients of weights, their sums, and an assumed memory traffic, that of the forward
    pass without attention's core.
    """
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    products = 2 * tokens * (shape.attention + shape.slots * shape.expert) / plan.size("tensor")
    forward, _ = layer_work(shape, plan)
    moved = forward.bytes - _core_bytes(shape, plan)
    moved += _gradient_bytes(plan) * _weights(shape, plan)
    return Cost(0, moved, narrow_flops=products) if plan.eight_bit else Cost(products, moved)


def layer_traffic(shape: Shape, plan: Plan, cluster: Cluster) -> tuple[Cost, Cost]:
    """Returns a layer's communication along "tensor", "expert" and "context", forward and
    backward. The backward pass repeats the communication of recomputed layers.
    """
    t, c, item = plan.size("tensor"), plan.size("context"), _activation_itemsize(plan)
    tokens = plan.microbatch * shape.seq_len / c
    group = {axis: cluster.group(plan.axes, axis) for axis in ("tensor", "expert", "context")}

    # Attention and MLP are a pair of matmuls each, which ends in an all-reduce along "tensor";
    # side by side they share one. With sequence parallelism a pair ends in a reduce-scatter,
    # and the next pair begins with an all-gather: the same bytes. (Megatron-LM gathers inputs
    # once more in the backward pass, beside other work: Korthikanti et al., 2022, 4.2.2.)
    pairs = 1 if shape.parallel else 2
    one = _tensor_all_reduce(plan, group["tensor"], activation_bytes(shape, plan))
    hidden = TENSOR_OVERLAP if plan.tensor_overlap else 0.0
    tensor = Cost(exposed={"tensor": (1 - hidden) * one}, hidden={"tensor": hidden * one})
    # A recomputed part begins with its all-gather. It leaves out the sum at its end.
    start = 0.5 * plan.sequence_parallel
    more = {
        "gathers": pairs * start,
        "attention": start,
        "mlp": start,
        "mlp-in": start,
        "all-but-qkv": pairs - 1,
        "half": pairs / 2,
        "modules": 2 * start,
        "block": pairs - 1 + start,
        "full": pairs,
    }
    again = more.get(plan.recompute, 0) * plan.recompute_share
    forward, backward = tensor * pairs, tensor * (pairs + again)
    if plan.wgrad_overlap:
        # The gradient's all-reduce, or its reduce-scatter, runs beside the next matmul.
        beside = pairs * (one / 2 if plan.sequence_parallel else one)
        room = computing(weight_gradient_work(shape, plan), plan, cluster)
        exposed, hidden = overlap(beside, room)
        backward += Cost(exposed={"tensor": exposed - beside}, hidden={"tensor": hidden})
    if shape.experts:
        # Tokens travel to their experts and back.
        own = tokens / (t if plan.sequence_parallel else 1)
        there = all_to_all(group["expert"], item * own * shape.slots * shape.width)
        again = MLP_AGAIN.get(plan.recompute, 0) * plan.recompute_share
        forward += Cost(exposed={"expert": 2 * there})
        backward += Cost(exposed={"expert": 2 * there * (1 + again)})
    if c > 1:
        # Keys and values go around a ring while scores are computed. The backward pass has five
        # matmuls in place of two. There the gradients go around, too, and one step more: home.
        numbers = 2 * tokens * (shape.kv_heads or shape.heads) * shape.head_dim / t
        step = shift(group["context"], item * numbers)
        home = shift(group["context"], plan.ring_gradient_bytes * numbers)
        rate, memory = rates(plan, cluster)
        # Recomputation repeats the ring. The backward pass has the same first step, and a
        # compiler sends it once.
        again = ATTENTION_AGAIN.get(plan.recompute, 0) * plan.recompute_share
        steps = again * (c - 1 if plan.recompute in ("half", "full") else c - 2)
        # Each transfer runs beside a step's share of attention's core, but the last, which
        # brings gradients home: then nothing is left to compute.
        products, moved = _core_flops(shape, plan) / rate, _core_bytes(shape, plan) / memory
        products, moved = (c - 1) / c * products, (c - 1) / c * moved
        forward += _beside_scores((c - 1) * step, products + moved)
        backward += _beside_scores((c - 1) * (step + home), 2.5 * products + 2 * moved)
        backward += _beside_scores(steps * step, again * (products + moved))
        backward += Cost(exposed={"context": home})
    return forward, backward


def _tensor_all_reduce(plan: Plan, group: Group, size: float) -> float:
    """Returns the seconds of an all-reduce along "tensor". With sequence parallelism it is a
    reduce-scatter and an all-gather: the same bytes, but switches do not add them up.
    """
    if plan.sequence_parallel:
        return reduce_scatter(group, size) + all_gather(group, size)
    return all_reduce(group, size)


def _beside_scores(ring: float, room: float) -> Cost:
    """Returns the cost of transfers along "context" that take `ring` seconds beside attention's
    core, which takes `room`.
    """
    return Cost(exposed={"context": max(ring - room, 0.0)}, hidden={"context": min(ring, room)})


def _weights(shape: Shape, plan: Plan) -> float:
    """Returns how many of a layer's parameters one device uses in matmuls."""
    experts = shape.expert * max(shape.experts, 1) / plan.size("expert")
    return (shape.attention + experts) / plan.size("tensor")


def _with_fsdp(cost: Cost, traffic: float, plan: Plan, cluster: Cluster) -> Cost:
    """Adds traffic along "fsdp" to a cost. The cost's own computation may hide part of the
    traffic, as far as it hides nothing yet.
    """
    exposed, hidden = overlap(traffic, free_computing(cost, plan, cluster) * plan.data_overlap)
    return cost + Cost(exposed={"fsdp": exposed}, hidden={"fsdp": hidden})


def overlap(traffic: float, computing: float) -> tuple[float, float]:
    """Returns the exposed and the hidden seconds of traffic that runs beside computing."""
    hidden = (1 - OVERLAP_COST) * min(traffic, computing)
    return traffic - hidden, hidden


def head_cost(shape: Shape, plan: Plan, cluster: Cluster) -> Cost:
    """Returns the cost of the output layer and the loss, forward and backward, and of the
    embedding's communication along "tensor".
    """
    t, item = plan.size("tensor"), _activation_itemsize(plan)
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    logits, weights = tokens * shape.vocab / t, shape.vocab * shape.width / t
    # Forward, an all-reduce of the embedding's output; backward, one of the gradient of the
    # output layer's input.
    group, size = cluster.group(plan.axes, "tensor"), tokens * shape.width
    sent = _tensor_all_reduce(plan, group, plan.embedding_bytes * size) + _tensor_all_reduce(
        plan, group, item * size
    )
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
        # The backward pass begins with the output layer, so its weights are gathered once.
        cost = _with_fsdp(cost, gather + scatter, plan, cluster)
    return cost


def activation_bytes(shape: Shape, plan: Plan) -> float:
    """Returns the bytes of a microbatch's residual stream [b, L, D] on a device."""
    tokens = plan.microbatch * shape.seq_len / plan.size("context")
    return _activation_itemsize(plan) * tokens * shape.width


def _activation_itemsize(plan: Plan) -> int:
    """Returns the bytes of an element between matmuls. Eight-bit matmuls return bfloat16."""
    return 2 if plan.eight_bit else jnp.dtype(plan.dtype).itemsize


def rates(plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Returns FLOP/s of matmuls, those with eight-bit operands aside, and bytes/s of memory."""
    dtype = "bfloat16" if plan.eight_bit else plan.dtype
    return (
        cluster.products_share * peak(cluster.accelerator, dtype),
        MEMORY_SHARE * cluster.accelerator.memory_bandwidth,
    )


def seconds_of_products(cost: Cost, plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds of a cost's matmuls."""
    return (cost.flops + cost.narrow_flops / EIGHT_BIT_SPEEDUP) / rates(plan, cluster)[0]


def computing(cost: Cost, plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds of a cost's computation: matmuls, and traffic of device memory."""
    return seconds_of_products(cost, plan, cluster) + cost.bytes / rates(plan, cluster)[1]


def _occupied(cost: Cost, plan: Plan) -> float:
    """Returns the seconds of computation that hide a cost's communication. A transfer that pays
    `OVERLAP_COST` needs more of them than it hides.
    """
    unpaid = ("context", "tensor") if plan.tensor_overlap else ("context",)
    return math.fsum(
        seconds / (1 if axis in unpaid else 1 - OVERLAP_COST)
        for axis, seconds in cost.hidden.items()
    )


def free_computing(cost: Cost, plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds of a cost's computation that hide nothing yet: each second hides one
    transfer.
    """
    return max(0.0, computing(cost, plan, cluster) - _occupied(cost, plan))


def duration(cost: Cost, plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds of a cost, including exposed communication."""
    return computing(cost, plan, cluster) + sum(cost.exposed.values())
