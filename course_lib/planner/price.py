"""Seconds of a step on a cluster: the price of its events, products and memory traffic.

A step is the sum of these parts (`Breakdown`):

    products    matrix multiplications (matmuls), at `cluster_model.PRODUCTS_SHARE` of the peak
                rate
    memory      reads and writes of device memory, at `MEMORY_SHARE` of its bandwidth
    optimizer   the same for parameters, gradients and optimizer state; and Muon's products
    tensor, context, expert, data, pipe
                exposed communication along an axis: the seconds that it adds to the step. The
                device computes nothing meanwhile, or more slowly: a quarter of the traffic
                beside computing counts as exposed (`OVERLAP_COST`). Two kinds of traffic do not
                pay this quarter: a ring along "context", and what `Plan.tensor_overlap` hides.
                Sums of gradients count as "data", whatever axis they cross
    bubble      waiting while the pipeline fills and empties, and for the last stage, which also
                has the output layer. Stages have equally many layers, whole or not

The formulas are within 10% of the published time for 61% of 418 published steps. Software
stacks differ more than layouts: if each prediction is divided by the median ratio of predicted
to published seconds on the accelerators of its publication, 71% are within 10%.
`lessons.backtest` computes these figures, and docs/backtest.csv lists every row. Only
`PRODUCTS_SHARE` was fitted to them, on GPUs. TPUs reach a larger share of their peak rate:
eight published steps on TPUs are predicted 22% too long, or more.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from course_lib.many_devices import cluster_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.meshes import AXES
from course_lib.planner.events import COPIES, Event, events
from course_lib.planner.plan import Plan, Shape, Step

# Assumed, not fitted. docs/backtest.md says how far other values of the first five reach.
MEMORY_SHARE = 0.85  # of the rated memory bandwidth, which kernels reach
# Elementwise operations move this many times the bytes if each is a kernel of its own, without
# fusion (PyTorch without torch.compile).
UNFUSED_FACTOR = 2
# Share of overlapped communication that still costs time: its kernels take multiprocessors and
# memory bandwidth from the matmuls beside them.
OVERLAP_COST = 0.25
GRADIENT_BUCKETS = 8  # in which a device sends its gradients (bucketing)
TENSOR_OVERLAP = 0.7  # share of the tensor traffic that `Plan.tensor_overlap` hides
# How much faster a matmul is if its operands have eight bits instead of 16: measured on an
# H200, without casts (https://nvidia.github.io/TransformerEngine, "GEMM Speedups").
EIGHT_BIT_SPEEDUP = 1.92
# Mean bytes that move per element of a matmul's input or result, in the forward pass and in
# each of the two matmuls of the backward pass. With 16-bit operands: 2. With eight bits the
# three move (2 + 1 + 1) + (1 + 1) + 2 = 8: a cast reads 2 and writes 1 twice, as it is and
# transposed; two matmuls read 1 each; one matmul writes 2, in bfloat16
# (https://github.com/pytorch/ao/blob/main/torchao/testing/training/roofline_utils.py).
EIGHT_BIT_OPERAND = 8 / 3


def rooms() -> dict[str, tuple[float, float]]:
    """Returns an event's share that can hide, and what share of it still costs time."""
    bucket = 1 - 1 / GRADIENT_BUCKETS  # no computing is left to hide the last one
    return {
        "": (0.0, 0.0),
        "scores": (1.0, 0.0),  # of attention, one step of the ring's at a time
        "scores again": (1.0, 0.0),
        "products": (TENSOR_OVERLAP, 0.0),  # all computing of a layer, but in rings
        "weights": (1.0, OVERLAP_COST),  # products that give gradients of weights
        "layer": (1.0, OVERLAP_COST),  # a neighbouring layer
        "gradients": (bucket, OVERLAP_COST),  # backward passes of the last microbatch
        "parameters": (bucket, OVERLAP_COST),  # forward passes of the first one
        "steady": (1.0, OVERLAP_COST),  # other chunks, between a pipeline's begin and end
    }


LASTS = ("forward", "backward", "head")  # passes that compute


class Work(NamedTuple):
    """FLOPs of matmuls (`narrow`: with eight-bit operands), and bytes that move in memory."""

    flops: float
    narrow: float
    bytes: float


def core(step: Step) -> Work:
    """Attention's scores, softmax and mean of values, forward. On the chip, queries, keys,
    values and results move; in memory a score moves 13 bytes: score, softmax and what dropout
    leaves of it, written and read in 16 bits, and a mask. A fused kernel counts the keys of
    `Shape.flops`.
    """
    shape, plan = step.shape, step.plan
    each = step.tokens * shape.heads / plan.size("tensor")
    moved = 8 * shape.head_dim if plan.fused_attention else 13 * step.keys
    return Work(4 * each * step.keys * shape.head_dim, 0.0, each * moved)


def work(step: Step) -> dict[str, Work]:
    """Returns the work of a layer for one microbatch on one device: "forward", "backward" (with
    what is recomputed), and the part of it that gives the gradients of weights ("weights"); and
    of the output layer ("head").
    """
    shape, plan, scores, again = step.shape, step.plan, core(step), step.recomputed
    t, item = plan.size("tensor"), jnp.dtype(plan.dtype).itemsize
    T, D = step.tokens, shape.width
    q, kv, k, m = shape.heads * shape.head_dim, shape.kv_width, shape.slots, shape.matrices
    # FLOPs: a matmul of T tokens with P parameters takes 2 T P.
    qkv, out = 2 * T * D * (q + 2 * kv) / t, 2 * T * D * q / t
    mlp = 2 * T * k * shape.expert / t
    dispatch = 4 * T * k * shape.seq_len * D if plan.dense_dispatch and shape.experts else 0.0
    # Bytes: operands and results of matmuls, and weights;
    width = EIGHT_BIT_OPERAND if plan.eight_bit else item
    stored = shape.expert * max(shape.experts, 1) / plan.size("expert") / t
    moved = (
        T * width * (D + (q + 2 * kv) / t) + item * D * (q + 2 * kv) / t,
        T * width * (q / t + D) + item * D * q / t,
        T * width * k * m * (D + shape.mlp / t) + item * stored,
    )
    # elementwise: a norm is read and written, 4; a dropout mask has 1; the residual stream and
    # the result are read and their sum is written, 6. Queries and keys turn, 8, and the heads'
    # results are rearranged, 4; an activation is read and written, with a gate two are read.
    norm = 11 * D / (t if plan.sequence_parallel else 1)
    unfused = UNFUSED_FACTOR if plan.eager else 1
    activations = 12 * q / t, (6 if m == 3 else 4) * k * shape.mlp / t
    elementwise = [T * unfused * (norm + each) for each in activations]
    # A weight's gradient is read and written in the float32 sum, or written once.
    gradient = 8 if plan.float32_gradients else plan.gradient_bytes
    summed = gradient * (shape.attention / t + stored)

    def both(linear: float, other: float, size: float) -> Work:  # only weights are narrow
        return Work(other, linear, size) if plan.eight_bit else Work(linear + other, 0.0, size)

    all_moved = sum(moved) + sum(elementwise)
    forward = both(qkv + out + mlp + dispatch, scores.flops, all_moved + scores.bytes)
    linear = again.qkv * qkv + again.out * out
    linear += (again.into * (m - 1) + again.last) / m * (mlp + dispatch)
    moved_again = again.core * scores.bytes
    for share, size in zip(
        again.moved + again.elementwise, (*moved, *elementwise), strict=True
    ):
        moved_again += share * size
    # Fused attention and rings recompute the scores in the backward pass: 5 matmuls, not 4.
    fifth = scores.flops / 2 if plan.fused_attention or plan.size("context") > 1 else 0.0
    more = both(linear, again.core * scores.flops + fifth, moved_again + summed)
    # Memory moves the logits once in bfloat16 and five times in float32; in chunks as often.
    logits, products = T * shape.vocab / t, 4 if plan.chunked_loss else 3
    of_head = products * step.itemsize * shape.vocab * D / t
    return {
        "forward": forward,
        "backward": Work(*(2 * a + b for a, b in zip(forward, more, strict=True))),
        "weights": both(qkv + out + mlp, 0.0, all_moved + summed),
        "head": Work(2 * products * logits * D, 0.0, 22 * logits + of_head),
    }


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step, one number per kind of work; `total` is their sum.

    `parts` are "products", "memory", "bubble" and "optimizer", and exposed communication by
    axis: "tensor", "context", "expert", "data" (with "fsdp") and "pipe".
    """

    parts: Mapping[str, float]
    hidden: Mapping[str, float]  # communication that computing hides, by axis
    model_seconds: float  # of one device's share of the model's matmuls, at the peak rate

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.parts[axis] for axis in AXES)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.model_seconds / self.total


class Exposure:
    """Exposed seconds, and seconds of computing that hide nothing yet, of a pass."""

    def __init__(
        self,
        once: Callable[[Event], float],  # seconds of an event that takes place once
        shares: Mapping[str, tuple[float, float]],  # `rooms`
        exposed: dict[str, float],  # seconds of the step by axis
        hidden: dict[str, float],
        free: Mapping[str, float],
    ) -> None:
        self.once, self.rooms, self.of_step, self.hidden = once, shares, exposed, hidden
        self.free = {room: max(0.0, seconds) for room, seconds in free.items()}
        self.exposed = 0.0

    def take(self, event: Event, times: int | float, copies: int | float) -> None:
        """Adds an event that takes place `times` beside what its name says. There are `copies`
        of that in a step, each beside computing of its own.
        """
        total, (share, cost) = times * self.once(event), self.rooms[event.beside]
        room = "layer" if event.beside == "products" else event.beside
        beside = min(share * total, max(0.0, self.free.get(room, 0.0)))
        # Each second of computing hides one event. All other rooms of a layer are parts of it.
        for name in {room, "layer"} if beside else ():
            if name in self.free:
                self.free[name] -= beside
        axis = event.axes[0]
        if axis == "fsdp" or (event.part == "step" and axis in ("context", "expert")):
            axis = "data"
        self.exposed += total - (1 - cost) * beside
        self.of_step[axis] += copies * (total - (1 - cost) * beside)
        self.hidden[axis] += copies * (1 - cost) * beside


def seconds(shape: Shape, plan: Plan, cluster: Cluster) -> Breakdown:
    """Prices a step. Of any model only the matrices are counted, no norms and no biases."""
    return Priced(shape, plan, cluster).seconds(plan.axes)


class Priced:
    """A step on a cluster, whose seconds depend on the order of the mesh's axes: it decides
    where the devices of a group are. What they compute and send is the same in every order.
    """

    def __init__(self, shape: Shape, plan: Plan, cluster: Cluster) -> None:
        from course_lib.measure.roofline import peak  # loads the readers of programs, too

        self.plan, self.cluster, self.step = plan, cluster, Step(shape, plan)
        self.events, works = events(self.step), work(self.step)
        layers, m, p = self.step.stage_layers, plan.microbatches, plan.size("pipe")
        memory = MEMORY_SHARE * cluster.accelerator.memory_bandwidth
        dtype = "bfloat16" if plan.eight_bit else plan.dtype
        rate = cluster.products_share * peak(cluster.accelerator, dtype)

        def products(each: Work) -> float:
            return (each.flops + each.narrow / EIGHT_BIT_SPEEDUP) / rate

        def computing(each: Work) -> float:
            return products(each) + each.bytes / memory

        # Passes of one layer and of the output layer hide their own events. In a ring, all but
        # the last step run beside a step's share of the scores: two matmuls, in the backward
        # pass five.
        n, scores = plan.size("context"), core(self.step)
        matmuls, moved = (n - 1) / n * products(scores), (n - 1) / n * scores.bytes / memory
        self.weights = computing(works["weights"])
        self.computing = {part: computing(works[part]) for part in LASTS}
        self.free = {part: {"layer": each} for part, each in self.computing.items()}
        self.free["forward"]["scores"] = matmuls + moved
        self.free["backward"] |= {
            "scores": 2.5 * matmuls + 2 * moved,
            "scores again": self.step.recomputed.qkv * (matmuls + moved),
            "weights": self.weights,
        }
        self.free["embedding"] = {}
        # Muon's float32 products run on the units that `peak` says.
        muon_seconds = muon_flops(self.step) / cluster.products_share
        muon_seconds /= peak(cluster.accelerator, "float32")
        self.count = {
            "forward": m * layers,
            "backward": m * layers,
            "head": m / p,
            "embedding": m,
        }
        count = self.count
        self.parts = {
            "products": sum(count[part] * products(works[part]) for part in LASTS),
            "memory": sum(count[part] * works[part].bytes for part in LASTS) / memory,
            "optimizer": optimizer_bytes(self.step) / memory + muon_seconds,
        }
        model = plan.batch * shape.seq_len * shape.flops / cluster.count
        self.model_seconds = model / peak(cluster.accelerator, plan.dtype)

    def seconds(self, axes: Mapping[str, int]) -> Breakdown:
        """Returns the time of the step with its axes in this order."""
        plan, layers = self.plan, self.step.stage_layers
        p, m, v = plan.size("pipe"), plan.microbatches, plan.chunks
        group = functools.cache(functools.partial(self.cluster.group, axes))

        def once(event: Event) -> float:  # by `cluster_model.all_gather` etc.
            price: Callable[..., float] = getattr(cluster_model, event.kind)
            return price(group(event.axes), event.bytes)

        # 1. Passes of one layer and of the output layer.
        exposed, hidden = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
        exposure = functools.partial(Exposure, once, rooms(), exposed, hidden)
        passes = {part: exposure(each) for part, each in self.free.items()}
        for event in self.events:
            if event.part != "step":
                passes[event.part].take(event, event.times, self.count[event.part])
        unused = {part: each.free.get("layer", 0.0) for part, each in passes.items()}
        lasts = {part: each + passes[part].exposed for part, each in self.computing.items()}

        # 2. The step. Megatron-LM's pipeline sends a chunk's gradients when that chunk's last
        # microbatch has passed: (v - 1) p passes of a chunk, each 1/v of a stage's, follow the
        # first chunk's last one (https://github.com/NVIDIA/Megatron-LM,
        # `forward_backward_pipelining_with_interleaving`). Before, 2 (p - 1 - stage) +
        # (v - 1) p chunks warm up, and as many empty the pipeline: only between the two,
        # transfers between stages run beside other chunks.
        beside = 1.0 if plan.schedule is not None else (1 + (v - 1) * p) / v
        steady = max(0.0, 1 - (p - 1 + (v - 1) * p) / (m * v))
        microbatch = layers * (unused["forward"] + unused["backward"]) + unused["head"] / p
        free = {
            "parameters": beside * layers * unused["forward"],
            "gradients": beside * layers * unused["backward"],
            "steady": steady * m * microbatch,
        }
        whole = exposure(free)
        for event in self.events:
            if event.part == "step" and event.beside == "steady":
                whole.take(event, steady * event.times, 1)
                whole.take(event._replace(beside=""), (1 - steady) * event.times, 1)
            elif event.part == "step":
                whole.take(event, 1, event.times)

        # 3. Waiting for other stages, and the sum.
        shift = sum((once(event) for event in self.events if event.axes == ("pipe",)), 0.0)
        bubble = waiting(self.step, lasts, layers * self.weights, shift)
        parts = {**self.parts, "bubble": bubble, **exposed}
        return Breakdown(parts, hidden, self.model_seconds)


def waiting(step: Step, lasts: Mapping[str, float], weights: float, shift: float) -> float:
    """Returns the bubble of a pipeline in seconds. All arguments are seconds of a microbatch:
    `lasts` of each pass of a layer, `weights` of a stage's gradients of weights, `shift` of
    one transfer to the next stage.
    """
    plan, layers = step.plan, step.stage_layers
    p, m, v = plan.size("pipe"), plan.microbatches, plan.chunks
    if p == 1:
        return 0.0
    # the mean over stages: only the last one has the output layer
    mean = layers * (lasts["forward"] + lasts["backward"]) + lasts["head"] / p
    if plan.schedule is None:  # Narayanan et al., 2021, section 2.2
        longest = m * (lasts["head"] - lasts["head"] / p)
        return (p - 1) / v * (mean + 2 * v * shift) + longest
    from course_lib.many_devices.pipeline_parallel import slots  # only a schedule needs it

    ops = {"F": layers * lasts["forward"], "W": weights}
    ops["B"] = layers * lasts["backward"] - weights
    ops = {kind: each / v for kind, each in ops.items()}
    # The output layer adds its forward and backward pass, and its weights' gradients.
    last = ops | {"B": ops["B"] + lasts["head"]}
    return slots.lockstep(plan.schedule, ops, last) - m * mean


def optimizer_bytes(step: Step) -> float:
    """Returns the bytes that the optimizer moves on one device. Per parameter, `update_bytes`
    of the plan, and its gradient is read (ZeRO divides both). A float32 sum is set to zero,
    which is 4 bytes more (stage 2 divides these, too).
    """
    plan, total = step.plan, 0.0
    read, zeroed = (4, 4) if plan.float32_gradients else (plan.gradient_bytes, 0)
    for leaf in step.leaves:
        axes = COPIES[:2] if leaf.where == "experts" else COPIES
        copies = math.prod(map(plan.size, axes))
        own = (plan.update_bytes + read) / (copies if plan.zero else 1)
        own += zeroed / (copies if plan.zero == 2 else 1)
        total += leaf.held * leaf.numbers * own
    return total


def muon_flops(step: Step) -> float:
    """Returns the FLOPs of Muon's products on one device: five steps of Newton and Schulz for
    each matrix [m n], m <= n, of the layers (`optimizers.matrix_axes`) that it has whole. A
    step multiplies x x^T, its square, and a sum of both with x.
    """
    shape, plan, D = step.shape, step.plan, step.shape.width
    if not plan.muon:
        return 0.0
    q, kv, experts = shape.heads * shape.head_dim, shape.kv_width, max(shape.experts, 1)
    heads = [(D, 3 * q)] if q == kv else [(D, q), (D, 2 * kv)]
    of_experts = experts / plan.size("expert")
    counts = [(1.0, (q, D)), *((1.0, each) for each in heads)]
    counts += [(shape.matrices * of_experts, (D, shape.mlp))]
    total = sum(5 * n * (4 * min(x) ** 2 * max(x) + 2 * min(x) ** 3) for n, x in counts)
    copies = plan.size("fsdp") * (plan.size("data") if plan.zero else 1) * plan.size("tensor")
    return step.stage_layers * total / copies
