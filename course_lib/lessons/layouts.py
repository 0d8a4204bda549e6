"""The layout game: find a mesh for a model on a cluster.

    layouts.submit({"data": 8, "tensor": 8}, zero=1, level=2)

A submission is refused with a reason, or priced by `planner.Frameworks`, which answers every
question of notebook 12: memory per GPU and time per step, beside the best layout that
`planner.ranked` finds. It loses only if the formula's error cannot explain the difference.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from course_lib import measure, planner
from course_lib.lessons.check.answers import WrongAnswer, exercise, require
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware
from course_lib.show import notebook

AXES = ("data", "fsdp", "pipe", "context", "tensor")
# Nine of ten predicted ratios of two layouts are closer to the published one (notebook 12).
ERROR_OF_NINE_IN_TEN = 0.25


@dataclasses.dataclass(frozen=True)
class Level:
    """A model with its batch, and the GPUs for it."""

    title: str
    space: "planner.Frameworks"
    cluster: Cluster


def model(
    layers: int, width: int, seq_len: int = 4096, vocab: int = 128_000
) -> "planner.Shape":
    """Returns a Transformer like Nemotron-4's: eight heads of keys and values."""
    return planner.Shape(
        layers, width, width // 128, 128, 4 * width, vocab, seq_len=seq_len, kv_heads=8
    )


def level_of(name: str, shape: "planner.Shape", gpus: int, tokens: int) -> Level:
    """Returns a model on H100s, with so many tokens per GPU."""
    cluster = Cluster(hardware.get("h100"), gpus)
    title = f"{name} on {gpus} H100s, {tokens:,} tokens per GPU"
    return Level(title, planner.Frameworks(shape, gpus * tokens // shape.seq_len), cluster)


@functools.cache
def levels() -> dict[int, Level]:
    """Returns the levels by number."""
    return {
        1: level_of("6.7B", model(32, 4096), 8, 32_768),
        2: level_of("6.7B", model(32, 4096), 64, 4096),
        3: level_of("6.7B", model(32, 4096, 256), 64, 256),
        4: level_of("70B", model(96, 8192, 2048), 512, 2048),
    }


@functools.cache
def ranked(level: int) -> tuple["planner.Layout", ...]:
    """Returns all layouts of a level that fit, the fastest first."""
    return tuple(planner.ranked(levels()[level].space, levels()[level].cluster))


@exercise
def submit(axes: Any, zero: int = 1, chunks: int = 1, *, level: int = 1) -> str:
    """Scores a layout beside the best one that the planner finds. Prints; never raises.

    Args:
      axes: sizes of the mesh's axes by name, outer to inner: "data", "fsdp" (ZeRO 3), "pipe",
        "context", "tensor". The batch is cut into the microbatches that are the fastest.
      zero: the stage of ZeRO along "data": 0, 1 or 2.
      chunks: of the model per pipeline stage.
      level: one of `levels()`.
    """
    require(level in levels(), f"level={level!r} must be one of {sorted(levels())}.")
    chosen = levels()[level]
    gpus = chosen.cluster.count
    require(
        isinstance(axes, Mapping),
        f'No layout yet. Begin with {{"data": {gpus}}}: the sizes of the axes multiply to'
        f" {gpus}.",
    )
    require(
        not (unknown := sorted(set(axes) - set(AXES))),
        f"No axis is called {', '.join(map(repr, unknown))}. The axes are {', '.join(AXES)}.",
    )
    require(
        all(isinstance(size, int | np.integer) and size > 0 for size in axes.values()),
        f"Each size must be a whole number above 0, not {list(axes.values())}.",
    )
    require(
        math.prod(axes.values()) == gpus,
        f"These axes take {math.prod(axes.values())} GPUs; this level has {gpus}.",
    )
    require(zero != 3, f'ZeRO 3 is the axis "fsdp": {{"fsdp": {gpus}}}, say.')
    target = ranked(level)[0]
    axes = {axis: int(size) for axis, size in axes.items() if size > 1}
    shape, batch = chosen.space.shape, chosen.space.batch
    try:
        # the smallest microbatches, each layer recomputed: what needs the least memory
        plan = planner.Plan(axes, batch, 1, chunks, zero, recompute="block")
        plan = dataclasses.replace(plan, sequence_parallel=axes.get("tensor", 1) > 1)
        smallest = planner.layout(shape, plan, chosen.cluster)
        if shape.layers % (stages := chunks * axes.get("pipe", 1)):
            raise ValueError(f"{shape.layers} layers cannot be cut into {stages} equal parts")
        fitting = list(chosen.space.on(axes, chosen.cluster, zero, chunks))
    except ValueError as error:
        raise WrongAnswer(f"This layout cannot be: {error}.") from error
    if not fitting:
        held = planner.held(planner.step(shape, plan))
        largest = max(held, key=lambda use: held[use])
        raise WrongAnswer(
            f"It does not fit: at least {measure.gib(smallest.memory)} of"
            f" {measure.gib(0.9 * chosen.cluster.accelerator.memory_bytes)}."
            f" The largest part is {largest}, {measure.gib(held[largest])}. {SMALLER[largest]}"
        )
    yours = min(fitting, key=lambda each: each.seconds)
    if yours not in _submissions.setdefault(level, []):
        _submissions[level].append(yours)
    _table(level, target)
    ratio = yours.seconds / target.seconds
    further_off = "three" if ratio <= 1 + planner.LAYOUT_ERROR else "ten"
    if ratio > 1 + ERROR_OF_NINE_IN_TEN:
        part = max(yours.time.parts, key=lambda p: yours.time.parts[p] - target.time.parts[p])
        raise WrongAnswer(
            f"It fits, and takes {ratio:.2f} times as long as the best layout. Most of the"
            f" difference is {part!r}: {yours.time.parts[part]:.3g} s beside"
            f" {target.time.parts[part]:.3g}. {FASTER[part]}"
        )
    return (
        f"{yours.seconds:.3g} s per step, {ratio:.2f} times that of the planner's best,"
        f" {target.name}. At least one predicted ratio in {further_off} is further off than"
        " this: measure both."
    )


# How to make each part of the memory smaller.
SMALLER = {
    "parameters": "An axis fsdp (ZeRO 3), tensor and pipe cut the parameters.",
    "optimizer": "ZeRO 1 cuts the optimizer's state along data.",
    "gradients": "ZeRO 2 and 3 cut the gradients; tensor and pipe do, too.",
    "copies": "These are two whole layers and both tables, gathered: tensor cuts them.",
    "activations": "Tensor and context divide the tokens of a layer, pipe the layers.",
}

# How to spend less time in each part of a step.
FASTER = {
    "products": "Something is computed again: hold less of the state, and more fits.",
    "memory": "A GPU reads all its parameters for each microbatch: fewer parameters per GPU,"
    " or fewer microbatches, read less.",
    "bubble": "Fewer stages, or chunks, make the bubble smaller.",
    "optimizer": "ZeRO, tensor and pipe cut the parameters that a GPU updates.",
    "data": "The gradients of all that a host holds leave it. With a pipeline across hosts it"
    " holds less.",
    "tensor": "Products wait for it: make the axis shorter, and keep it inside a host.",
    "pipe": "Fewer stages send less.",
    "context": "The ring sends keys and values: make the axis shorter.",
    "expert": "This model has no experts.",
}

_submissions: dict[int, list["planner.Layout"]] = {}


def _table(level: int, target: "planner.Layout") -> None:
    """Prints the submissions of a level below its target, which is not named."""
    rows = [("target", target)]
    rows += [(f"{i}. {each.name}", each) for i, each in enumerate(_submissions[level], 1)]
    notebook.table(
        [
            {
                "layout": name,
                "recomputes": each.recomputes,
                "memory": measure.gib(each.memory),
                "step (s)": each.seconds,
                "exposed": f"{each.time.exposed / each.seconds:.0%}",
                "MFU": f"{each.time.mfu:.0%}",
            }
            for name, each in rows
        ],
        title=f"Level {level}: {levels()[level].title}",
        formats={"step (s)": ".3g"},
    )
