"""The messages of a plan's devices: one list of events.

    found = events(step)
    sent(step)                # bytes per step along each axis: the sum of the list
    price.seconds(...)        # prices the list on a cluster, without its smallest entries

An event is one collective. It belongs to a pass of one layer ("forward", "backward"), to the
output layer ("head") or to the embedding, and takes place `times` in each of them, for each
microbatch; or it belongs to the whole "step".
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from course_lib.many_devices import meshes
from course_lib.planner.plan import Leaf, Step

SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How many times (n-1)/n of its array a device sends. In a "shift" it sends the whole array."""


class Event(NamedTuple):
    """One collective, several times."""

    kind: str  # of SENT, or "shift"
    axes: tuple[str, ...]
    bytes: float  # of the whole array; of one rank's for an "all_to_all" or a "shift"
    times: float = 1
    part: str = "step"  # "forward", "backward", "head", "embedding" or "step"
    beside: str = ""  # what is computed meanwhile: a name of `price.rooms`; "": nothing


def context(step: Step) -> Iterator[Event]:
    """Keys and values go around a ring while scores are computed; in the backward pass their
    gradients do, too, and one step more: home.
    """
    shape, plan, n = step.shape, step.plan, step.plan.size("context")
    numbers = 2 * step.tokens * shape.kv_width / plan.size("tensor")
    keys, home = step.itemsize * numbers, plan.ring_gradient_bytes * numbers
    # Recomputation repeats the ring. The backward pass has the same first step, and a compiler
    # sends it once.
    again = 0.0 if plan.recompute == "op" else step.recomputed.qkv
    steps = again * (n - 1 if plan.recompute in ("half", "full") else n - 2)
    ring = "shift", ("context",)
    yield Event(*ring, keys, n - 1, "forward", "scores")
    yield Event(*ring, keys, n - 1, "backward", "scores")
    yield Event(*ring, home, n - 1, "backward", "scores")
    yield Event(*ring, keys, steps, "backward", "scores again")
    yield Event(*ring, home, 1, "backward")


def tensor(step: Step) -> Iterator[Event]:
    """Attention and MLP are a pair of products each, which ends in an all-reduce along
    "tensor". With sequence parallelism each begins with an all-gather, and ends in a
    reduce-scatter: the same bytes.
    """
    shape, plan, again = step.shape, step.plan, step.recomputed
    size, pairs = step.tokens * shape.width, 1 if shape.parallel else 2
    usual = "products" if plan.tensor_overlap else ""
    # the sums of activations' gradients, beside the gradients of weights
    last = "weights" if plan.wgrad_overlap else usual
    divided = plan.sequence_parallel
    begin, end = ("all_gather", "reduce_scatter") if divided else ("", "all_reduce")
    passes = [
        (begin, pairs, "forward", usual),
        (end, pairs, "forward", usual),
        (begin, pairs + again.gathers, "backward", usual),
        (end, pairs, "backward", last),
        (end, again.sums, "backward", usual),
    ]
    for kind, times, part, beside in passes:
        yield Event(kind, ("tensor",), step.itemsize * size, times, part, beside)
    # outside of the layers: the embedding's output, the gradient of the output layer's input
    for per_number in (plan.embedding_bytes, step.itemsize):
        yield Event(begin, ("tensor",), per_number * size, 1, "head")
        yield Event(end, ("tensor",), per_number * size, 1, "head")
    if step.exact:
        # Each device has a part of the gradients of norms and biases; this course's loss sums
        # four numbers per label.
        shared = sum(x.numbers * x.stored * x.fsdp for x in step.exact if x.undivided)
        for summed in (shared, 4 * 4 * step.tokens):
            yield Event("all_reduce", ("tensor",), summed, plan.microbatches)


def expert(step: Step) -> Iterator[Event]:
    """Tokens travel to their experts and back."""
    plan = step.plan
    own = step.tokens / (plan.size("tensor") if plan.sequence_parallel else 1)
    slots = step.itemsize * own * step.shape.slots * step.shape.width
    again = 0.0 if plan.recompute == "op" else step.recomputed.into
    yield Event("all_to_all", ("expert",), slots, 2, "forward")
    yield Event("all_to_all", ("expert",), slots, 2 + 2 * again, "backward")


def fsdp(step: Step) -> Iterator[Event]:
    """Each microbatch gathers a layer before its forward and its backward pass, and scatters
    its gradients. The backward pass begins with the output layer, so that is gathered once; the
    embedding comes first and last, and no computing hides it.
    """
    found: dict[Event, float] = {}  # what travels alike travels together
    for leaf in (leaf for leaf in step.leaves if leaf.fsdp > 1):
        if leaf.inside:
            size = leaf.numbers * leaf.fsdp / step.stage_layers
            passes = [("forward", 1, 0), ("backward", int(leaf.again), 1)]
        else:
            size = leaf.numbers * leaf.fsdp
            passes = [("head" if leaf.where == "head" else "embedding", 1, 1)]
        for part, gathers, scatters in passes:
            hides = step.plan.data_overlap and part != "embedding"
            for kind, times, width in (
                ("all_gather", gathers, leaf.gathered),
                ("reduce_scatter", scatters, leaf.scattered),
            ):
                event = Event(kind, ("fsdp",), 0.0, times, part, "layer" if hides else "")
                found[event] = found.get(event, 0.0) + width * size
    for event, size in found.items():
        yield event._replace(bytes=size)


def data(step: Step) -> Iterator[Event]:
    """Gradients are summed over all copies of a parameter. ZeRO 1 and 2 scatter them, and
    gather the new parameters.
    """
    plan = step.plan
    # Without a pipeline, ZeRO 2 sums the gradients of each microbatch.
    times = plan.microbatches if plan.zero == 2 and plan.size("pipe") == 1 else 1
    old = "gradients" if plan.data_overlap else ""
    new = "parameters" if plan.data_overlap and plan.parameter_overlap else ""
    for experts in (False, True):
        axes: tuple[str, ...] = ("data", "context") if experts else COPIES
        of = [x for x in step.leaves if x.held and (x.where == "experts") == experts]
        if wide := plan.sums_each_microbatch:
            # Along each axis. What ZeRO 3 cannot divide is summed along its axis, too.
            for axis in (*axes[1:], "fsdp"):
                size = wide * sum(x.numbers for x in of if x.fsdp == 1 or axis != "fsdp")
                yield Event("all_reduce", (axis,), size, plan.microbatches, "step", old)
            axes = axes[:1]
        cut = _bytes(x for x in of if x.zero)
        fresh = cut * plan.parameter_bytes / plan.gradient_bytes
        yield Event("all_gather", axes, fresh, 1, "step", new)
        yield Event("reduce_scatter", axes, cut, times, "step", old)
        yield Event("all_reduce", axes, _bytes(x for x in of if not x.zero), times, "step", old)


COPIES = ("data", "context", "expert")
"""Axes along which devices hold the same parameters; experts differ along "expert"."""


def _bytes(leaves: Iterator[Leaf]) -> float:
    return sum((leaf.numbers * leaf.stored for leaf in leaves), 0.0)


def pipe(step: Step) -> Iterator[Event]:
    """Activations go to the next stage, their gradients to the previous one.

    In Megatron-LM's pipeline each of the devices along "tensor" sends its part (Narayanan et
    al., 2021, section 4.1). In this course's there is a transfer each way in every slot of the
    schedule, and all stages sum the gradients of embedding and output layer, which each holds.
    """
    plan, size = step.plan, step.itemsize * step.tokens * step.shape.width
    if plan.schedule is None:
        beside = "steady" if plan.pipe_overlap else ""
        times = 2 * plan.chunks * plan.microbatches
        yield Event("shift", ("pipe",), size / plan.size("tensor"), times, "step", beside)
        return
    cut = plan.size("tensor") if plan.sequence_parallel else 1
    yield Event("shift", ("pipe",), size / cut, 2 * len(plan.schedule.table[0]))
    outside = (x for x in step.leaves if x.held and not x.inside)
    summed = sum(x.numbers * x.fsdp * x.stored for x in outside)
    yield Event("all_reduce", ("pipe",), summed)


def muon(step: Step) -> Iterator[Event]:
    """Gradients of a layer's matrices go to where each matrix is whole, and updates come back;
    so does a parameter that decays, if it is cut. Numbers are float32.
    """
    matrices = [leaf for leaf in step.leaves if leaf.kernel and leaf.inside]
    for axis in ("fsdp", "data", "expert", "tensor") if step.plan.muon else ():
        cut = sum(
            leaf.numbers / (step.plan.size("data") if leaf.zero else 1)
            for leaf in matrices
            if leaf.fsdp > 1 or axis != "fsdp"
            if leaf.zero or axis != "data"
            if leaf.where == "experts" or axis != "expert"
        )
        yield Event("all_to_all", (axis,), 4 * cut, 2 if axis == "data" else step.plan.muon)


STRATEGIES = {context: "context", tensor: "tensor", expert: "expert", fsdp: "fsdp"}
STRATEGIES |= {data: "", pipe: "pipe", muon: ""}
"""In the order in which their events take computing to hide behind; each with the axis along
which all of its events are."""


def events(step: Step) -> list[Event]:
    """Lists everything that a device sends in a step."""
    sizes = {axis for axis, size in step.plan.axes.items() if size > 1} | {""}
    used = (strategy for strategy, axis in STRATEGIES.items() if axis in sizes)
    found = (event for strategy in used for event in strategy(step))
    return [x for x in found if x.kind and x.bytes and x.times and sizes.intersection(x.axes)]


def _ranks(step: Step, axes: Sequence[str]) -> int:
    return math.prod(map(step.plan.size, axes))


def per_step(step: Step, part: str) -> int | float:
    """How often a device computes a part per step."""
    if part == "step":
        return 1
    inside = part in ("forward", "backward")
    return step.plan.microbatches * (step.stage_layers if inside else 1)


def sent(step: Step) -> dict[str, int]:
    """Returns the bytes that a device sends per step, along each axis of the mesh. An event
    along several axes counts for the first of them, "fsdp" as "data".
    """
    total = dict.fromkeys(meshes.AXES, 0.0)
    for event in events(step):
        n = _ranks(step, event.axes)
        each = SENT[event.kind] * (n - 1) / n if event.kind in SENT else 1
        axis = "data" if event.axes[0] == "fsdp" else event.axes[0]
        total[axis] += each * event.bytes * event.times * per_step(step, event.part)
    # a sum of whole numbers, less what floating point lost
    return {axis: int(round(size, 3)) for axis, size in total.items()}
