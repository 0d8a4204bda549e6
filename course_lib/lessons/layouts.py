"""The layout game: find a mesh and a strategy for a model on a cluster.

    layouts.submit({"data": 64}, Strategy(zero=3), minibatches=4, level=1)

A submission is refused with a reason, or scored by formula (`planner`): memory per GPU and
time per step, beside those of the best layout that `planner.ranked` finds. The last line is a
hint. With `compile=True` the step is also compiled for the GPUs, which need not be there.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from course_lib import configs, measure, planner
from course_lib.lessons.check.answers import WrongAnswer, exercise, require
from course_lib.many_devices import meshes, strategies
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import hardware, virtual
from course_lib.show import notebook

CLOSE = 1.05  # a submission wins if its step takes at most this many times the best one's


@dataclasses.dataclass(frozen=True)
class Level:
    """A model and the GPUs for it."""

    title: str
    config: ConfigDict  # the model and its batch
    cluster: Cluster


@functools.cache
def levels() -> dict[int, Level]:
    """Returns the levels by number."""
    h100s = functools.partial(Cluster, hardware.get("h100"))
    few = "6.7B on 64 H100s, 256 tokens per GPU"
    return {
        1: Level("6.7B on 8 H100s", _model(32, 4096, 4096, 64), h100s(8)),
        2: Level("6.7B on 64 H100s", _model(32, 4096, 4096, 512), h100s(64)),
        3: Level(few, _model(32, 4096, 256, 64), h100s(64)),
        4: Level("70B on 512 H100s", _model(96, 8192, 4096, 1024), h100s(512)),
    }


def _model(layers: int, width: int, length: int, batch: int) -> ConfigDict:
    config = configs.nemotron_340b()
    config.model.update(num_layers=layers, hidden_size=width, num_heads=width // 128)
    config.model.update(head_dim=128, num_kv_heads=8, max_seq_len=length)
    config.model.update(vocab_size=128_000, num_outputs=128_000)
    config.data.update(seq_len=length, batch_size=batch)
    return config


@functools.cache
def best(level: int) -> "planner.Estimate":
    """Returns the fastest layout of a level that the planner finds and that fits."""
    chosen = levels()[level]
    return next(
        each
        for each in planner.ranked(planner.Course(chosen.config), chosen.cluster)
        if each.memory <= limit(chosen.cluster)
    )


def limit(cluster: Cluster) -> int:
    """Returns the bytes of a GPU's memory that a step may use."""
    return cluster.accelerator.usable_bytes


@exercise
def submit(
    axes: Any,
    strategy: Strategy | None = None,
    minibatches: int = 1,
    *,
    level: int = 1,
    compile: bool = False,
) -> str:
    """Scores a layout beside the best one that the planner finds. Prints; never raises.

    Args:
      axes: sizes of the mesh's axes by name, outer to inner: "data", "pipe", "tensor".
      strategy: how the axes are used; `Strategy()` if None.
      minibatches: into how many the batch is cut, without a pipeline.
      level: one of `levels()`.
      compile: whether to compile the step for the GPUs as well, which takes up to a minute.
    """
    require(level in levels(), f"level={level!r} must be one of {sorted(levels())}.")
    chosen, strategy = levels()[level], Strategy() if strategy is None else strategy
    gpus = chosen.cluster.count
    require(
        isinstance(axes, Mapping),
        f'No layout yet. Begin with {{"data": {gpus}}}: the sizes of the axes data, pipe and'
        f" tensor multiply to {gpus}.",
    )
    require(
        "data" in axes,
        'The axis data is missing. Add "data": 1 if the batch is not divided.',
    )
    require(
        math.prod(axes.values()) == gpus,
        f"{' x '.join(map(str, axes.values()))} is {math.prod(axes.values())} GPUs; this level"
        f" has {gpus}.",
    )
    config = chosen.config.copy_and_resolve_references()
    config.training.num_minibatches = minibatches
    try:
        yours = planner.estimate(config, axes, strategy, chosen.cluster)
    except ValueError as error:
        raise WrongAnswer(f"This layout cannot be: {error}.") from error
    if yours not in _submissions.setdefault(level, []):
        _submissions[level].append(yours)
    target = best(level)
    _table(level, target)
    if compile:
        _compile(config, yours, chosen.cluster)
    room = limit(chosen.cluster)
    if yours.memory > room:
        largest = max(yours.bytes, key=lambda use: yours.bytes[use])
        raise WrongAnswer(
            f"It does not fit: {measure.gib(yours.memory)} of {measure.gib(room)}."
            f" The largest part is {largest}, {measure.gib(yours.bytes[largest])}."
            f" {SMALLER[largest]}"
        )
    ratio = yours.step / target.step
    if ratio > CLOSE:
        part = max(yours.time.parts, key=lambda p: yours.time.parts[p] - target.time.parts[p])
        raise WrongAnswer(
            f"It fits, and takes {ratio:.2f} times as long as the best layout. Most of the"
            f" difference is {part!r}: {yours.time.parts[part]:.3g} s beside"
            f" {target.time.parts[part]:.3g}. {FASTER[part]}"
        )
    return (
        f"{yours.step:.3g} s per step. The planner's best is {_named(target)}:"
        f" {target.step:.3g} s."
    )


# How to make each part of the memory smaller.
SMALLER = {
    "parameters": "ZeRO 3, tensor and pipe cut the parameters.",
    "optimizer": "ZeRO 1 cuts the optimizer's moments along data.",
    "batch": "A longer axis data gives each GPU fewer sequences.",
    "gradients": "ZeRO 2 and 3 cut the gradients along data; tensor and pipe do, too.",
    "copies": "These are parameters in the dtype that layers compute in: tensor cuts them.",
    "activations": "More minibatches, or more microbatches of a pipeline, make them smaller;"
    " sequence=True cuts them along tensor.",
}

# How to spend less time in each part of a step.
FASTER = {
    "products": "Is something computed twice, or by every GPU?",
    "memory": "A GPU reads all its parameters for each minibatch: fewer minibatches, or fewer"
    " parameters per GPU, read less.",
    "bubble": "More microbatches, fewer stages, or chunks make the bubble smaller.",
    "optimizer": "ZeRO, tensor and pipe cut the parameters that a GPU updates.",
    "data": "ZeRO 0 and 1 send 8 bytes per parameter and step, ZeRO 3 sends 6 per parameter and"
    " minibatch. A group of whole hosts sends through all of their ports.",
    "tensor": "Products wait for it: make the axis shorter, and keep it inside a host.",
    "pipe": "Fewer stages send less.",
    "context": "No sequence here is long enough to be cut.",
    "expert": "This model has no experts.",
}

_submissions: dict[int, list[Any]] = {}


def _named(layout: "planner.Estimate") -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.axes.items())
    parts = f", {layout.parts} parts" if layout.parts > 1 else ""
    return f"{axes}, ZeRO {layout.strategy.zero}{parts}"


def _table(level: int, target: "planner.Estimate") -> None:
    """Prints the submissions of a level below its target."""
    rows = [("target", target)]
    rows += [(f"{i}. {_named(each)}", each) for i, each in enumerate(_submissions[level], 1)]
    notebook.table(
        [
            {
                "layout": name,
                "memory": measure.gib(each.memory),
                "step (s)": each.step,
                "exposed": f"{each.time.exposed / each.step:.0%}",
                "MFU": f"{each.mfu:.0%}",
            }
            for name, each in rows
        ],
        title=f"Level {level}: {levels()[level].title}",
        formats={"step (s)": ".3g"},
    )


def _compile(config: ConfigDict, layout: "planner.Estimate", cluster: Cluster) -> None:
    """Prints the compiled peak beside the estimated one, or why there is none."""
    if reason := virtual.why_unavailable("h100"):
        print(f"It is not compiled, because here {reason}.")
        return
    mesh = meshes.make(layout.axes, virtual.devices("h100", cluster.count))
    run = strategies.build(config, mesh, layout.strategy)
    step: Any = run.train_step
    memory = measure.memory(virtual.compile(step.lower(*run.abstract())))
    print(
        f"The compiler's peak is {measure.gib(memory.peak)}, the estimate"
        f" {measure.gib(layout.memory)}."
    )
