"""How a run uses the axes of its mesh: what a `Strategy` may say, and what is refused before
anything is compiled.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from course_lib.many_devices import (
    async_tensor_parallel,
    context_parallel,
    data_parallel,
    expert_parallel,
    meshes,
    tensor_parallel,
)
from course_lib.many_devices.pipeline_parallel import pipeline, schedules

BY = ("hand", "compiler")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a run uses the axes of its mesh.

    Attributes:
      by: "hand" or "compiler".
      zero: stage of ZeRO along "data", 0 to 3.
      gather_again: with stage 3 by hand, whether layers gather their parameters again for the
        backward pass. Blocks that are rematerialized do in any case.
      sequence: whether norms and residuals are divided along the sequence, over "tensor".
      overlap: with that, by hand, how the products of "tensor" communicate: "none" (before or
        after they compute), "one-way" or "two-way" (around a ring, meanwhile).
      schedule: of the pipeline along "pipe": one of `schedules.SCHEDULES`.
      microbatches: M, into how many a pipeline cuts the share of a device along "data".
      chunks: v, how many parts of the model a device of the pipeline holds.
    """

    by: str = "hand"
    zero: int = 0
    gather_again: bool = True
    sequence: bool = False
    overlap: str = "none"
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1


def check(config: ConfigDict, mesh: meshes.Shape, strategy: Strategy) -> None:
    """Refuses a strategy that does not exist, or that this mesh and this model cannot have.

    On a mesh of one device any strategy that exists will do: there is nothing to send.

    Args:
      config: a whole configuration, which `configs.check` has passed.
      mesh: the mesh, or its shape.
      strategy: how its axes are used.

    Raises:
      ValueError: naming what is wrong, its value and the fix.
    """
    if not hasattr(mesh, "axis_names"):
        raise ValueError(
            f'mesh={mesh!r} must be a mesh of devices, as meshes.make({{"data": 4}})'
            " returns one"
        )
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={strategy!r} must be a Strategy, as Strategy(zero=1)")
    _check_exists("by", strategy.by, BY)
    if config.model.attention == "pallas" and mesh.size > 1:
        raise ValueError(
            "attention='pallas' must be 'reference' or 'xla' on several devices: the kernel"
            " does not say how it is divided, nor over which devices its results vary; a"
            " compiler would gather all queries, keys and values on every device"
        )
    data_parallel.check_stage(strategy.zero)
    n = meshes.axis_size(mesh, "data")
    if unknown := set(mesh.axis_names) - set(meshes.AXES):
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have axes of {meshes.AXES} only: {unknown} would do"
            " nothing"
        )
    _check_exists("overlap", strategy.overlap, async_tensor_parallel.OVERLAPS)
    _check_exists("schedule", strategy.schedule, schedules.SCHEDULES)
    for field in ("microbatches", "chunks"):
        if getattr(strategy, field) < 1:
            raise ValueError(f"{field}={getattr(strategy, field)} must be at least 1")
    if mesh.size == 1:
        return
    if strategy.sequence and "tensor" not in mesh.shape:
        raise ValueError(
            "sequence=True must come with a mesh axis 'tensor': it divides the sequence over"
            " that"
        )
    async_tensor_parallel.check(strategy.overlap, strategy.sequence and strategy.by == "hand")
    if "tensor" in mesh.shape:
        tensor_parallel.check(config.model, config.data.seq_len, mesh, strategy.sequence)
    _check_pipeline(config, mesh, strategy)
    data_parallel.check_gathering(
        strategy.zero if strategy.by == "hand" else 0, strategy.gather_again, config.model.remat
    )
    size, minibatches = config.data.batch_size, config.training.num_minibatches
    parts = n * minibatches * strategy.microbatches
    if rest := size % parts:
        below = size - rest
        raise ValueError(
            f"batch_size={size} must be a multiple of {parts}: {n} devices along 'data' x"
            f" {minibatches} minibatches x {strategy.microbatches} microbatches of one size;"
            f" take {f'{below} or ' * (below > 0)}{below + parts}"
        )
    if "context" in mesh.shape:
        _check_context(config, mesh, strategy)
    if "expert" in mesh.shape or config.model.num_experts:
        _check_experts(config, mesh, strategy)


def _check_exists(field: str, value: Any, known: Collection[str]) -> None:
    if value not in known:
        raise ValueError(f"{field}={value!r} must be one of {tuple(known)}")


def _check_context(config: ConfigDict, mesh: meshes.Shape, strategy: Strategy) -> None:
    if "pipe" in mesh.shape:
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have one of 'context' and 'pipe': stages do"
            " different things in a slot, and devices that pass keys around a ring would wait"
            " for each other forever"
        )
    if strategy.sequence:
        raise ValueError(
            "sequence=True must not come with a mesh axis 'context', which divides the sequence"
            " already"
        )
    context_parallel.check(config.model, config.data.seq_len, mesh, strategy.by == "hand")


def _check_experts(config: ConfigDict, mesh: meshes.Shape, strategy: Strategy) -> None:
    if others := [axis for axis in ("pipe", "context", "tensor") if axis in mesh.shape]:
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have axes 'data' and 'expert' only for"
            f" num_experts={config.model.num_experts} and an axis 'expert': experts are not"
            f" divided along {' and '.join(map(repr, others))}"
        )
    if "expert" in mesh.shape:
        sequences = config.data.batch_size // (
            mesh.shape["data"] * config.training.num_minibatches
        )
        expert_parallel.check(config.model, sequences, mesh)


def _check_pipeline(config: ConfigDict, mesh: meshes.Shape, strategy: Strategy) -> None:
    given = dict(
        schedule=strategy.schedule, microbatches=strategy.microbatches, chunks=strategy.chunks
    )
    if "pipe" not in mesh.shape:
        if given != dict(schedule=Strategy.schedule, microbatches=1, chunks=1):
            raise ValueError(
                f"{given} must come with a mesh axis 'pipe', of two devices or more: it would"
                " do nothing"
            )
        return
    if strategy.by != "hand":
        raise ValueError(
            f"by={strategy.by!r} must be 'hand' with a mesh axis 'pipe': shardings do not say"
            " what runs when"
        )
    if strategy.overlap != "none":
        raise ValueError(
            f"overlap={strategy.overlap!r} must be 'none' with a mesh axis 'pipe': all devices"
            " of the mesh take a step on a ring together, but stages do different things in a"
            " slot, and would wait for each other forever"
        )
    if strategy.zero > 1:
        raise ValueError(
            f"zero={strategy.zero} must be 0 or 1 with a mesh axis 'pipe': a stage runs once a"
            " microbatch, and each time stage 2 would send all of its gradients, stage 3 all"
            " of its parameters"
        )
    if config.training.accumulator_dtype != "float32":
        raise ValueError(
            f"accumulator_dtype={config.training.accumulator_dtype!r} must be 'float32' with a"
            " pipeline, which adds up the gradients of microbatches in the dtype of the"
            " parameters"
        )
    if strategy.chunks < 1:
        raise ValueError(
            f"chunks={strategy.chunks} must be at least 1: so many parts of the model a"
            " device has"
        )
    pipeline.check(config, mesh, strategy.chunks)
    schedules.make(
        strategy.schedule, mesh.shape["pipe"], strategy.microbatches, strategy.chunks
    )
