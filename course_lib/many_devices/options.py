"""How a run uses the axes of its mesh, and what a mesh and a model allow: checked before
anything is compiled.
"""

import dataclasses
import math
from collections.abc import Iterator

from ml_collections import ConfigDict

from course_lib import arguments, fields
from course_lib.fields import FIXED, at_least, option
from course_lib.many_devices import axis, meshes
from course_lib.many_devices.axis import Asked
from course_lib.many_devices.pipeline_parallel import SCHEDULES
from course_lib.models.attention import IMPLEMENTATIONS

BY = ("hand", "compiler", "types")
STAGES = (0, 1, 2, 3)
"""Stages of ZeRO; 3 is also called FSDP."""
OVERLAPS = ("none", "one-way", "two-way")
"""How matmuls and their communication overlap: not at all ("none"), or around a ring, in one
direction or in both.
"""
OF_AXIS = dict(
    sequence="tensor", overlap="tensor", schedule="pipe", microbatches="pipe", chunks="pipe"
)
"""Fields of a `Strategy` that do nothing without the axis."""


@dataclasses.dataclass(frozen=True)
class Strategy(fields.Checked):
    """How a run uses the axes of its mesh."""

    # "hand": collectives are written out inside `jax.shard_map`; "compiler": shardings that
    # `jax.jit` respects; "types": each array's type says how it is divided (`by_types`)
    by: str = option("hand", BY)
    # stage of ZeRO along "data"
    zero: int = option(0, STAGES)
    # with stage 3 by hand or by types, whether layers gather their parameters again for the
    # backward pass; rematerialized blocks always do
    gather_again: bool = option(True)
    # whether norms and the residual stream are cut along the sequence, over "tensor" (sequence
    # parallelism)
    sequence: bool = option(False)
    # when the products along "tensor" communicate. "none": before or after they compute.
    # "one-way", "two-way": while they compute, around a ring, in one direction or both; needs
    # `sequence` and by "hand"
    overlap: str = option("none", OVERLAPS)
    # of the pipeline along "pipe"
    schedule: str = option("1f1b", SCHEDULES)
    # M; a pipeline cuts the share of each device along "data" into as many
    microbatches: int = option(1, at_least(1))
    # v, parts of the model per device of the pipeline
    chunks: int = option(1, at_least(1), FIXED)


def check(config: ConfigDict, mesh: meshes.AnyMesh, strategy: Strategy) -> None:
    """Refuses a strategy that this mesh (or its shape) and a checked configuration cannot have.
    One device allows every strategy: there is nothing to send.
    """
    n = dict(mesh.shape)
    if unknown := set(n) - set(meshes.AXES):
        raise ValueError(
            f"mesh={n} must have axes of {meshes.AXES} only: {unknown} would do nothing"
        )
    if "data" not in n:
        raise ValueError(
            f"mesh={n} must have an axis 'data'; give it size 1 if the batch is not divided"
        )
    if mesh.size > 1:
        asked = Asked(config, n, strategy)
        arguments.refuse(_errors(asked))
        if strategy.by == "types":
            from course_lib.many_devices import by_types  # most runs do not need it

            arguments.refuse(by_types.errors(asked))
        for each in axis.used(mesh):
            arguments.refuse(each.errors(asked))
        if config.model.loss_chunks > 1:
            _check_loss(asked)


def _errors(asked: Asked) -> Iterator[str]:
    """Yields an error for each rule that is broken and belongs to no single axis."""
    model, n = asked.model, asked.n
    if asked.config.optimizer.offload:
        yield (
            f"optimizer.offload=True must be False on {math.prod(n.values())} devices: moments"
            " are streamed to one device; divide them instead, with ZeRO (strategy.zero=1)"
        )
    if asked.config.training.backward == "in_place":
        yield (
            f"training.backward='in_place' must be 'autodiff' on {math.prod(n.values())}"
            " devices: the backward pass by hand does not sum gradients over devices; ZeRO"
            " stage 2 divides them (strategy.zero=2)"
        )
    if not IMPLEMENTATIONS[model.attention].on_mesh:
        yield (
            f"attention={model.attention!r} must be 'reference' or 'xla' on several devices: a"
            " compiler cannot divide its kernel, and would gather all of it on every device"
        )
    for name, needed in OF_AXIS.items():
        value = getattr(asked.strategy, name)
        if needed not in n and value != getattr(Strategy, name):
            yield (
                f"{name}={value!r} must come with a mesh axis {needed!r}: without one it would"
                " do nothing"
            )
    if model.num_experts and model.dropless and not asked.by_hand:
        yield (
            f"by={asked.strategy.by!r} must be 'hand' for dropless=True: XLA would gather the"
            " tokens of all devices to sort them by expert"
        )
    others = [name for name in n if name not in ("data", "expert")]
    if others and (model.num_experts or "expert" in n):
        yield (
            f"mesh={dict(n)} must have no other axes than 'data' and 'expert' with"
            f" num_experts={model.num_experts}: layers with experts are not divided along"
            f" {' and '.join(map(repr, others))}"
        )


def _check_loss(asked: Asked) -> None:
    """Refuses a loss in chunks that a device cannot cut from its own part of the logits."""
    from course_lib.smaller_and_faster import large_vocabulary

    model, n = asked.model, asked.n
    cut, other = {"vocabulary": ("tensor", "tokens"), "tokens": ("context", "vocabulary")}[
        model.loss_along
    ]
    if not asked.by_hand and n.get(cut, 1) > 1:
        raise ValueError(
            f"loss_along={model.loss_along!r} must not come with by='compiler' and a mesh axis"
            f" {cut!r}, which divides the same dimension; take by='hand', or"
            f" loss_along={other!r}"
        )
    large_vocabulary.check(
        model.loss_chunks,
        model.loss_along,
        tokens=asked.config.data.seq_len // n.get("context", 1),
        vocabulary=model.num_outputs // n.get("tensor", 1),
        prefix="loss_",
    )
