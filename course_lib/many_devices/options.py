"""Which strategies exist, and which ones a mesh and a model allow: checked before anything is
compiled.
"""

import dataclasses
from collections.abc import Iterator

from ml_collections import ConfigDict

from course_lib import arguments, fields
from course_lib.arguments import nearest
from course_lib.fields import FIXED, at_least, option
from course_lib.many_devices import async_tensor_parallel, data_parallel, meshes
from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.smaller_and_faster import large_vocabulary

BY = ("hand", "compiler")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How a run uses the axes of its mesh."""

    # "hand": collectives are written out inside `jax.shard_map`; "compiler": shardings that
    # `jax.jit` respects
    by: str = option("hand", BY)
    # stage of ZeRO along "data"
    zero: int = option(0, data_parallel.STAGES)
    # with stage 3 by hand, whether layers gather their parameters again for the backward pass;
    # rematerialized blocks always do
    gather_again: bool = option(True)
    # whether norms and the residual stream are cut along the sequence, over "tensor" (sequence
    # parallelism)
    sequence: bool = option(False)
    # when the products along "tensor" communicate. "none": before or after they compute.
    # "one-way", "two-way": while they compute, around a ring, in one direction or both; needs
    # `sequence` and by "hand"
    overlap: str = option("none", async_tensor_parallel.OVERLAPS)
    # of the pipeline along "pipe"
    schedule: str = option("1f1b", schedules.SCHEDULES)
    # M; a pipeline cuts the share of each device along "data" into as many
    microbatches: int = option(1, at_least(1))
    # v, parts of the model per device of the pipeline
    chunks: int = option(1, at_least(1), FIXED)

    def __post_init__(self) -> None:
        table = fields.of_class(Strategy)
        fields.check(vars(self), fields.template(table), table)


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
    n, batch = dict(mesh.shape), (batch_size, num_minibatches)
    arguments.refuse(_of_mesh(n))
    if mesh.size == 1:
        return
    arguments.refuse(_of_data(model, n, strategy, *batch))
    arguments.refuse(_of_tensor(model, n, strategy, seq_len))
    arguments.refuse(_of_pipeline(model, n, strategy, num_minibatches, accumulator_dtype))
    arguments.refuse(_of_context(model, n, strategy, seq_len))
    arguments.refuse(_of_experts(model, n, *batch))
    if model.loss_chunks > 1:
        large_vocabulary.check(
            model.loss_chunks,
            model.loss_along,
            tokens=seq_len // n.get("context", 1),
            vocabulary=model.num_outputs // n.get("tensor", 1),
            prefix="loss_",
        )
    if "pipe" in n:  # last: tables of hundreds of microbatches take a second
        schedules.make(strategy.schedule, n["pipe"], strategy.microbatches, strategy.chunks)


def _of_mesh(n: dict[str, int]) -> Iterator[str]:
    if unknown := set(n) - set(meshes.AXES):
        yield f"mesh={n} must have axes of {meshes.AXES} only: {unknown} would do nothing"
    if "data" not in n:
        yield f"mesh={n} must have an axis 'data'; give it size 1 if the batch is not divided"


def _of_data(
    model: ConfigDict, n: dict[str, int], s: Strategy, batch_size: int, minibatches: int
) -> Iterator[str]:
    hand = s.by == "hand"
    if model.attention == "flash":
        yield (
            "attention='flash' must be 'reference' or 'xla' on several devices: the kernel does"
            " not say how it is divided; a compiler would gather all of it on every device"
        )
    if not s.gather_again and not (s.zero == 3 and hand):
        yield (
            "gather_again=False must come with zero=3 and by='hand': at other stages layers"
            " gather nothing, and the compiler decides by itself when to gather"
        )
    if s.gather_again and s.zero == 3 and hand and {"MLP", "Attn"} & set(model.remat):
        yield (
            f"remat={tuple(model.remat)!r} must be () or ('Block',) with gather_again=True,"
            " which saves all of a layer except gathered parameters; or take gather_again=False"
        )
    parts = n["data"] * minibatches * s.microbatches
    if batch_size % parts:
        yield (
            f"batch_size={batch_size} must be a multiple of {parts}: {n['data']} devices along"
            f" 'data' x {minibatches} minibatches x {s.microbatches} microbatches of one size;"
            f" take {nearest(batch_size, parts)}"
        )
    axis = {"vocabulary": "tensor", "tokens": "context"}[model.loss_along]
    if model.loss_chunks > 1 and not hand and n.get(axis, 1) > 1:
        other = {"tensor": "tokens", "context": "vocabulary"}[axis]
        yield (
            f"loss_along={model.loss_along!r} must not come with by='compiler' and a mesh axis"
            f" {axis!r}, which divides the same dimension; take by='hand', or"
            f" loss_along={other!r}"
        )


def _of_tensor(
    model: ConfigDict, n: dict[str, int], s: Strategy, seq_len: int
) -> Iterator[str]:
    hand = s.by == "hand"
    if s.sequence and "tensor" not in n:
        yield "sequence=True must come with a mesh axis 'tensor', which divides the sequence"
    if s.overlap != "none" and not (s.sequence and hand):
        yield (
            f"overlap={s.overlap!r} must come with sequence=True and by='hand': the ring moves"
            " parts of the sequence"
        )
    if "tensor" not in n:
        return
    cut = {
        "num_heads": model.num_heads,
        "mlp_expansion * hidden_size": model.mlp_expansion * model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_outputs": model.num_outputs,
        "num_kv_heads": model.num_kv_heads or model.num_heads,
    } | ({"seq_len": seq_len} if s.sequence else {})
    for name, size in cut.items():
        yield from arguments.shared(name, size, n["tensor"], "devices along 'tensor'")
    if model.flat_products and hand:
        yield (
            "flat_products=True must be False with a mesh axis 'tensor' by hand, which has"
            " products of its own"
        )


def _of_pipeline(
    model: ConfigDict, n: dict[str, int], s: Strategy, minibatches: int, sums: str
) -> Iterator[str]:
    if "pipe" not in n:
        names = ("schedule", "microbatches", "chunks")
        chosen = {name: getattr(s, name) for name in names}
        if chosen != {name: getattr(Strategy, name) for name in names}:
            yield f"{chosen} must come with a mesh axis 'pipe': without one it would do nothing"
        return
    for name, value, possible, why in (
        ("by", s.by, ["hand"], "shardings do not set the order of execution"),
        ("overlap", s.overlap, ["none"], "a ring needs all devices at once, stages differ"),
        ("zero", s.zero, [0, 1], "a stage runs per microbatch, and would send all each time"),
        ("accumulator_dtype", sums, ["float32"], "microbatches are added up in float32"),
        ("num_minibatches", minibatches, [1], "it has Strategy(microbatches=...)"),
        ("scan_layers", model.scan_layers, [True], "it cuts stacked parameters of layers"),
    ):
        if value not in possible:
            needed = " or ".join(map(repr, possible))
            yield f"{name}={value!r} must be {needed} with a mesh axis 'pipe': {why}"
    if model.remat and model.remat_policy == "offload":
        yield (
            "remat_policy='offload' must be another policy for a pipeline, which keeps what a"
            " backward reads in the device's memory; 'names' keeps the same values"
        )
    stages, layers = n["pipe"] * s.chunks, model.num_layers
    if rest := layers % stages:
        left = f"{rest} would be left over" if layers > stages else "some would have no layer"
        yield (
            f"num_layers={layers} must be a multiple of the {stages} stages, {s.chunks} on each"
            f" of {n['pipe']} devices: {left}; take {nearest(layers, stages)}"
        )


def _of_context(
    model: ConfigDict, n: dict[str, int], s: Strategy, seq_len: int
) -> Iterator[str]:
    if "context" not in n:
        return
    hand, size = s.by == "hand", n["context"]
    if "pipe" in n:
        yield (
            f"mesh={n} must not have both 'context' and 'pipe': stages do different work at the"
            " same time, and devices of a ring would wait for each other forever"
        )
    if s.sequence:
        yield (
            "sequence=True must not come with a mesh axis 'context', which divides the sequence"
            " already"
        )
    how = model.attention, model.softmax_dtype
    if how != ("reference", "float32") if hand else how[0] not in ("reference", "xla"):
        yield (
            f"attention={how[0]!r}, softmax_dtype={how[1]!r} must be 'reference' and 'float32'"
            " with a mesh axis 'context': ring attention replaces the kernel; by='compiler'"
            " takes 'xla', too, and cannot divide a kernel"
        )
    parts = size * (2 if hand else 1)
    if seq_len % parts:
        yield (
            f"seq_len={seq_len} must be a multiple of {parts}, the parts into which the {size}"
            f" devices of axis 'context' cut it; take {nearest(seq_len, parts)}"
        )


def _of_experts(
    model: ConfigDict, n: dict[str, int], batch_size: int, minibatches: int
) -> Iterator[str]:
    others = [axis for axis in ("pipe", "context", "tensor") if axis in n]
    if others and ("expert" in n or model.num_experts):
        yield (
            f"mesh={n} must have no other axes than 'data' and 'expert' with"
            f" num_experts={model.num_experts}: layers with experts are not divided along"
            f" {' and '.join(map(repr, others))}"
        )
    if "expert" not in n:
        return
    size, sequences = n["expert"], batch_size // (n["data"] * minibatches)
    if not model.num_experts:
        yield (
            f"num_experts=0 must be a multiple of the {size} devices along 'expert', or the"
            " axis left out: a model without experts has none to divide"
        )
    yield from arguments.shared(
        "num_experts", model.num_experts, size, "devices along 'expert'"
    )
    if sequences % size:
        yield (
            f"batch_size gives {sequences} sequences per minibatch to each index of 'data', and"
            f" must give a multiple of {size}: the {size} devices along 'expert' share them"
        )
