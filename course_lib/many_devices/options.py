"""Which strategies exist, and which ones a mesh and a model allow: checked before anything is
compiled.
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
from course_lib.smaller_and_faster import large_vocabulary

BY = ("hand", "compiler")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a run uses the axes of its mesh.

    Attributes:
      by: "hand": collectives are written out inside `jax.shard_map`; "compiler": shardings that
        `jax.jit` respects.
      zero: stage of ZeRO along "data", 0 to 3.
      gather_again: with stage 3 by hand, whether layers gather their parameters again for the
        backward pass. Rematerialized blocks always do.
      sequence: whether norms and the residual stream are cut along the sequence, over "tensor"
        (sequence parallelism).
      overlap: when the products along "tensor" communicate. "none": before or after they
        compute. "one-way", "two-way": while they compute, around a ring, in one direction or
        both; needs `sequence` and by "hand".
      schedule: of the pipeline along "pipe": one of `schedules.SCHEDULES`.
      microbatches: M; a pipeline cuts the share of each device along "data" into as many.
      chunks: v, parts of the model per device of the pipeline.

    Raises:
      ValueError: if a value is not one of these, or has another type.
    """

    by: str = "hand"
    zero: int = 0
    gather_again: bool = True
    sequence: bool = False
    overlap: str = "none"
    schedule: str = "1f1b"
    microbatches: int = 1
    chunks: int = 1

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value, kind = getattr(self, each.name), type(each.default)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{each.name}={value!r} must be of type {kind.__name__}")
        _check_exists("by", self.by, BY)
        _check_exists("zero", self.zero, data_parallel.STAGES)
        _check_exists("overlap", self.overlap, async_tensor_parallel.OVERLAPS)
        _check_exists("schedule", self.schedule, schedules.SCHEDULES)
        for field in ("microbatches", "chunks"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")


def _check_exists(field: str, value: Any, known: Collection[Any]) -> None:
    if value not in known:
        raise ValueError(f"{field}={value!r} must be one of {tuple(known)}")


def check(
    model: ConfigDict,
    mesh: meshes.AnyMesh,
    strategy: Strategy,
    *,
    batch_size: int,
    seq_len: int,
    num_minibatches: int = 1,
    accumulator_dtype: str = "float32",
) -> None:
    """Refuses a strategy that this mesh and this model cannot have.

    A mesh of one device allows every strategy: there is nothing to send.

    Args:
      model: the `model` part of a configuration, which `configs.check` has passed.
      mesh: the mesh, or its shape.
      strategy: how its axes are used.
      batch_size: B, on all devices together.
      seq_len: L.
      num_minibatches: into how many the batch is cut.
      accumulator_dtype: dtype that their gradients are summed in.

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
    if unknown := set(mesh.axis_names) - set(meshes.AXES):
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have axes of {meshes.AXES} only: {unknown} would do"
            " nothing"
        )
    if "data" not in mesh.shape:
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have an axis 'data'; give it size 1 if the"
            " batch is not divided"
        )
    n = mesh.shape["data"]
    if mesh.size == 1:
        return
    if model.attention == "flash":
        raise ValueError(
            "attention='flash' must be 'reference' or 'xla' on several devices: the kernel"
            " does not say how it is divided, nor over which devices its results vary; a"
            " compiler would gather all queries, keys and values on every device"
        )
    by_hand = strategy.by == "hand"
    if strategy.sequence and "tensor" not in mesh.shape:
        raise ValueError(
            "sequence=True must come with a mesh axis 'tensor', along which it divides the"
            " sequence"
        )
    async_tensor_parallel.check(strategy.overlap, strategy.sequence and by_hand)
    if "tensor" in mesh.shape:
        tensor_parallel.check(model, seq_len, mesh, strategy.sequence)
        if model.flat_products and by_hand:
            raise ValueError(
                "flat_products=True must be False with a mesh axis 'tensor' by hand, which has"
                " products of its own"
            )
    if "pipe" in mesh.shape:
        _check_pipeline(mesh, strategy, accumulator_dtype)
        pipeline.check(model, mesh, strategy.chunks, num_minibatches)
        # Last: tables of hundreds of microbatches take a second.
        schedules.make(
            strategy.schedule, mesh.shape["pipe"], strategy.microbatches, strategy.chunks
        )
    else:
        _check_no_pipeline(strategy)
    data_parallel.check_gathering(
        strategy.zero if by_hand else 0, strategy.gather_again, model.remat
    )
    parts = n * num_minibatches * strategy.microbatches
    if batch_size % parts:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of {parts}: {n} devices along 'data' x"
            f" {num_minibatches} minibatches x {strategy.microbatches} microbatches of one"
            f" size; take {meshes.nearest(batch_size, parts)}"
        )
    if model.loss_chunks > 1:
        _check_loss(model, mesh, by_hand, seq_len)
    if "context" in mesh.shape:
        _check_context(mesh, strategy)
        context_parallel.check(model, seq_len, mesh, by_hand)
    if "expert" in mesh.shape or model.num_experts:
        _check_experts(mesh, model.num_experts)
    if "expert" in mesh.shape:
        expert_parallel.check(model, batch_size // (n * num_minibatches), mesh)


def _check_loss(model: ConfigDict, mesh: meshes.AnyMesh, by_hand: bool, seq_len: int) -> None:
    """Refuses a loss in chunks that a device cannot cut from its own part of the logits."""
    n = {axis: mesh.shape.get(axis, 1) for axis in ("context", "tensor")}
    axis = {"vocabulary": "tensor", "tokens": "context"}[model.loss_along]
    if n[axis] > 1 and not by_hand:
        raise ValueError(
            f"loss_along={model.loss_along!r} must not come with by='compiler' and a mesh axis"
            f" {axis!r}, which divides the same dimension: the compiler would gather all of it"
            f" for each chunk; take by='hand', or loss_along="
            f"{'tokens' if axis == 'tensor' else 'vocabulary'!r}"
        )
    large_vocabulary.check(
        model.loss_chunks,
        model.loss_along,
        tokens=seq_len // n["context"],
        vocabulary=model.num_outputs // n["tensor"],
        prefix="loss_",
    )


def _check_context(mesh: meshes.AnyMesh, strategy: Strategy) -> None:
    if "pipe" in mesh.shape:
        raise ValueError(
            f"mesh={dict(mesh.shape)} must not have both 'context' and 'pipe': stages do"
            " different work at the same time, so devices that pass keys around a ring would"
            " wait for each other forever"
        )
    if strategy.sequence:
        raise ValueError(
            "sequence=True must not come with a mesh axis 'context', which divides the sequence"
            " already"
        )


def _check_experts(mesh: meshes.AnyMesh, num_experts: int) -> None:
    if others := [axis for axis in ("pipe", "context", "tensor") if axis in mesh.shape]:
        raise ValueError(
            f"mesh={dict(mesh.shape)} must have no other axes than 'data' and 'expert' with"
            f" num_experts={num_experts}: layers with experts are not divided along"
            f" {' and '.join(map(repr, others))}"
        )


def _check_no_pipeline(strategy: Strategy) -> None:
    fields = ("schedule", "microbatches", "chunks")
    changed = {field: getattr(strategy, field) for field in fields}
    if changed != {field: getattr(Strategy, field) for field in fields}:
        raise ValueError(
            f"{changed} must come with a mesh axis 'pipe': without one it would do nothing"
        )


def _check_pipeline(mesh: meshes.AnyMesh, strategy: Strategy, accumulator_dtype: str) -> None:
    if strategy.by != "hand":
        raise ValueError(
            f"by={strategy.by!r} must be 'hand' with a mesh axis 'pipe': shardings do not set"
            " the order of execution"
        )
    if strategy.overlap != "none":
        raise ValueError(
            f"overlap={strategy.overlap!r} must be 'none' with a mesh axis 'pipe': a ring needs"
            " all devices of the mesh at the same time, but stages do different work then, and"
            " would wait for each other forever"
        )
    if strategy.zero > 1:
        raise ValueError(
            f"zero={strategy.zero} must be 0 or 1 with a mesh axis 'pipe': a pipeline"
            " stage runs once per microbatch, and each time ZeRO 2 would send all of its"
            " gradients, ZeRO 3 all of its parameters"
        )
    if accumulator_dtype != "float32":
        raise ValueError(
            f"accumulator_dtype={accumulator_dtype!r} must be 'float32' with a pipeline, which"
            " always adds up the gradients of microbatches in float32"
        )
