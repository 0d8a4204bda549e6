"""Sizes of a Transformer (`Shape`), how devices divide its training (`Plan`), and both together
with the parameters that one device holds (`Step`).
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from course_lib.many_devices.cluster_model import AXES
from course_lib.many_devices.pipeline_parallel.schedules import Schedule

RECOMPUTE = {
    "none": "nothing",
    "minimal": "what is elementwise",
    "selective": "scores and softmax",
    "attention": "the attention of each layer",
    "mlp": "the MLP of each layer",
    "mlp-in": "the MLP, scores and softmax",
    "all-but-qkv": "the layer except its query, key and value products",
    "op": "every second product of a layer, and what is elementwise",
    "half": "every second layer",
    "gathers": 'activations that were gathered along "tensor"',
    "modules": "attention and the MLP, each without its last product",
    "block": "the layer without its last product",
    "full": "the layer",
}
"""Parts that the backward pass recomputes, by name. The last product of a recomputed part, and
the sum along "tensor" after it, are work for nothing: the backward pass does not read their
result. A compiler leaves them out (JAX: "modules", "block"), a framework that runs the forward
pass again does not ("full")."""

Rule = tuple[Callable[[Any], bool], str]


def _count(least: int) -> Rule:
    return (
        lambda value: type(value) is int and value >= least,
        f"a whole number of at least {least}",
    )


def _number(least: int | float, most: int | float) -> Rule:
    return (
        lambda value: type(value) in (int, float) and least <= value <= most,
        f"a number from {least:g} to {most:g}",
    )


def _one_of(*values: Any) -> Rule:
    # `True == 1`, so the type counts, too
    return (
        lambda value: any(type(value) is type(each) and value == each for each in values),
        "one of " + ", ".join(map(repr, values)),
    )


def _is_floating(name: Any) -> bool:
    try:
        return isinstance(name, str) and jnp.issubdtype(jnp.dtype(name), jnp.floating)
    except TypeError:
        return False


_FLAG, _BYTES = _one_of(True, False), _one_of(1, 2, 4)


def _field(rule: Rule, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule})


class _Checked:
    """A dataclass whose fields have rules, and which has rules for several fields together."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if "rule" in field.metadata:
                (allowed, what), value = field.metadata["rule"], getattr(self, field.name)
                if not allowed(value):
                    raise ValueError(f"{field.name}={value!r} must be {what}")
        for broken, why in self._broken():
            if broken:
                raise ValueError(why)

    def _broken(self) -> Iterator[tuple[bool, str]]:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Shape(_Checked):
    """Sizes of a Transformer."""

    layers: int = _field(_count(1))  # N
    width: int = _field(_count(1))  # D
    heads: int = _field(_count(1))  # H
    head_dim: int = _field(_count(1))  # K
    mlp: int = _field(_count(1))  # F, the hidden width of the MLP, or of one expert
    vocab: int = _field(_count(1))  # V
    seq_len: int = _field(_count(1))  # L
    kv_heads: int = _field(_count(0), 0)  # heads of keys and values; 0: as many as `heads`
    matrices: int = _field(_one_of(2, 3), 2)  # of the MLP: 3 with a gate (SwiGLU)
    experts: int = _field(_count(0), 0)  # of a layer; 0: one MLP computes every token
    slots: float | int = _field(_number(1e-9, 1e9), 1.0)  # per token: k x capacity factor
    # k, if the slots are more: an empty slot is work, but not the model's
    experts_per_token: int = _field(_count(0), 0)
    tied: bool = _field(_FLAG, False)  # whether the output layer is the embedding
    # whether attention and MLP stand side by side, which halves traffic along "tensor"
    parallel: bool = _field(_FLAG, False)

    def _broken(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.kv_heads > 0 and self.heads % self.kv_heads > 0,
            f"kv_heads={self.kv_heads} must divide heads={self.heads}",
        )
        yield (
            not self.experts and self.slots != 1,
            f"slots={self.slots} must be 1 without experts",
        )
        yield (
            0 < self.experts < self.slots,
            f"slots={self.slots} must be at most experts={self.experts}",
        )
        most = min(self.slots, self.experts)
        yield (
            self.experts_per_token > most,
            f"experts_per_token={self.experts_per_token} must be at most {most:g}",
        )

    @property
    def kv_width(self) -> int:
        """Numbers of the keys of one token."""
        return (self.kv_heads or self.heads) * self.head_dim

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        return 2 * self.width * (self.heads * self.head_dim + self.kv_width)

    @property
    def expert(self) -> int:
        """Parameters of a layer's MLP, or of one of its experts."""
        return self.matrices * self.width * self.mlp

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return self.attention + self.expert * max(self.experts, 1)

    @property
    def parameters(self) -> int:
        """Parameters of the model, without vectors."""
        return self.layers * self.layer + (1 if self.tied else 2) * self.vocab * self.width

    @property
    def flops(self) -> float:
        """FLOPs per token, forward and backward, of the products that the model needs.

        Attention counts in full. A causal kernel skips half of it; counting all assumes that it
        runs at half the rate of other products.
        """
        layer = 2 * (self.attention + (self.experts_per_token or self.slots) * self.expert)
        scores = 4 * self.seq_len * self.heads * self.head_dim
        return 3.0 * (self.layers * (layer + scores) + 2 * self.vocab * self.width)


@dataclasses.dataclass(frozen=True)
class Plan(_Checked):
    """How a model is trained. Along "data" parameters are replicated, along "fsdp" divided
    (ZeRO 3); "pipe", "expert", "context" and "tensor" are as in the course.
    """

    axes: Mapping[str, int]  # the mesh: sizes by name, outer to inner
    batch: int = _field(_count(1))  # sequences per step, on all devices together
    microbatch: int = _field(_count(1), 1)  # sequences that a replica computes at once
    chunks: int = _field(_count(1), 1)  # of the model per pipeline stage (interleaving)
    zero: int = _field(_one_of(0, 1, 2), 0)  # stage along "data"
    recompute: str = _field(_one_of(*RECOMPUTE), "none")
    recompute_share: int | float = _field(_number(0, 1), 1)  # of the layers; others keep all
    fused_attention: bool = _field(_FLAG, True)  # scores stay on the chip (FlashAttention)
    eager: bool = _field(_FLAG, False)  # each elementwise operation is a kernel of its own
    sequence_parallel: bool = _field(_FLAG, False)  # "tensor" divides norms and residuals
    # rings hide most traffic along "tensor" behind products
    tensor_overlap: bool = _field(_FLAG, False)
    # the backward pass sums activations' gradients along "tensor" while it computes those of
    # weights (Korthikanti et al., 2022, section 6.2)
    wgrad_overlap: bool = _field(_FLAG, False)
    data_overlap: bool = _field(_FLAG, True)  # gradients, parameters travel beside computing
    parameter_overlap: bool = _field(_FLAG, True)  # new parameters do, too
    # chunks send to the next stage beside other chunks (Megatron-LM's `overlap_p2p_comm`)
    pipe_overlap: bool = _field(_FLAG, False)
    # bytes per number of the gradients that each microbatch sums along "context" and "expert";
    # 0: one sum per step goes along all axes
    sums_each_microbatch: int = _field(_one_of(0, 1, 2, 4), 0)
    gather_again: bool = _field(_FLAG, True)  # "fsdp" gathers for the backward pass again
    gradient_bytes: int = _field(_BYTES, 2)  # per number, when gradients travel
    parameter_bytes: int = _field(_BYTES, 2)  # per number, when parameters travel
    # each microbatch's gradients are added to a float32 sum; without, those of the only
    # microbatch stay as they travel
    float32_gradients: bool = _field(_FLAG, True)
    embedding_bytes: int = _field(_BYTES, 2)  # per number of the embedding and its output
    ring_gradient_bytes: int = _field(_BYTES, 2)  # of gradients of keys and values
    # per parameter, read and written by the optimizer; Adam in float32: 24
    update_bytes: int | float = _field(_number(0, 999), 24)
    # how often Muon moves a matrix (`muon.on_stacks`): twice, with weight decay three times
    muon: int = _field(_one_of(0, 2, 3), 0)
    # of products' operands; with eight bits only of products with weights, inside of layers
    dtype: str = _field((_is_floating, "the name of a floating dtype"), "bfloat16")
    schedule: Schedule | None = None  # of this course's pipeline; None: Megatron-LM's
    chunked_loss: bool = _field(_FLAG, False)  # the backward pass computes logits again
    dense_dispatch: bool = _field(_FLAG, False)  # products send tokens to experts

    def _broken(self) -> Iterator[tuple[bool, str]]:
        unknown = sorted(set(self.axes) - set(AXES))
        yield bool(unknown), f"axes={dict(self.axes)} must be of {AXES}, not {unknown}"
        wrong = {a: n for a, n in self.axes.items() if type(n) is not int or n < 1}
        yield bool(wrong), f"axes={wrong} must have whole sizes of at least 1"
        yield (
            self.chunks > 1 and self.size("pipe") == 1,
            f"chunks={self.chunks} must be 1 without an axis 'pipe' above 1",
        )
        least = self.replicas * self.microbatch
        yield (
            self.batch % least > 0,
            f"batch={self.batch} must be a multiple of {least}: {self.replicas} replicas, each"
            f" with microbatches of {self.microbatch}",
        )
        yield (
            not self.float32_gradients and self.microbatches > 1,
            f"float32_gradients=False must come with one microbatch, not {self.microbatches}:"
            " several are summed in float32",
        )
        yield (
            self.wgrad_overlap and self.tensor_overlap,
            "wgrad_overlap=True must come with tensor_overlap=False: both hide one traffic",
        )
        yield (
            self.pipe_overlap
            and (self.chunks == 1 or bool(self.schedule or self.sums_each_microbatch)),
            "pipe_overlap=True must come with chunks of at least 2, without a schedule of this"
            " course, and with sums_each_microbatch=0",
        )
        if self.schedule is not None:
            theirs = self.schedule.stages, self.schedule.microbatches, self.schedule.chunks
            ours = self.size("pipe"), self.microbatches, self.chunks
            yield (
                theirs != ours,
                f"schedule must be for {ours} stages, microbatches and chunks, not {theirs}",
            )

    def size(self, axis: str) -> int:
        """Returns the number of devices along an axis, 1 if there is no such axis."""
        return self.axes.get(axis, 1)

    @property
    def eight_bit(self) -> bool:
        """Whether products with weights have eight-bit operands."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def replicas(self) -> int:
        """The number of groups of devices that compute different sequences."""
        return self.size("data") * self.size("fsdp") * self.size("expert")

    @property
    def microbatches(self) -> int:
        """Microbatches per replica and step."""
        return self.batch // self.replicas // self.microbatch


def check(shape: Shape, plan: Plan) -> None:
    """Refuses a plan whose devices cannot share the model. A vocabulary or a sequence that
    "tensor" does not divide is not refused: each device is charged for its exact fraction.
    """
    # In some pipelines, the embedding and the output layer each count as one layer.
    if plan.size("pipe") * plan.chunks > shape.layers + 2:
        raise ValueError(
            f"axes={dict(plan.axes)}, chunks={plan.chunks} must have at most"
            f" {shape.layers + 2} stages, of {shape.layers} layers, embedding and output layer"
        )
    for axis, name, total in (
        ("tensor", "heads", shape.heads),
        ("tensor", "kv_heads", shape.kv_heads or shape.heads),
        ("tensor", "mlp", shape.mlp),
        ("expert", "experts", shape.experts),
    ):
        if (size := plan.size(axis)) > 1 and (not total or total % size):
            raise ValueError(
                f"{name}={total} must be a multiple of {size}, the devices along {axis!r}"
            )
    if (size := plan.size("context")) > 1 and shape.seq_len % (2 * size):
        raise ValueError(
            f"seq_len={shape.seq_len} must be a multiple of {2 * size}: in the zigzag layout,"
            f" each of {size} devices along 'context' has two pieces of the sequence"
        )


class Leaf(NamedTuple):
    """Parameters that travel alike, as one device holds them."""

    where: str  # "layers", "experts", "embedding", "head" or "outside"
    numbers: float
    stored: int  # bytes of a number, and of a gradient that is summed
    gathered: int  # bytes of a number that is gathered along "fsdp"
    scattered: int  # bytes of a gradient that is scattered there
    fsdp: int = 1  # devices that divide the parameter
    zero: bool = False  # whether ZeRO 1 or 2 divides its gradient
    again: bool = True  # whether the backward pass gathers it again
    undivided: bool = False  # along "tensor", where devices have parts of its gradient
    kernel: bool = True  # whether products read it
    module: str = ""  # of a layer: "MLP" or "Attn"
    held: bool = True  # False: another leaf is the same array (tied), or another stage's

    @property
    def inside(self) -> bool:
        """Whether it is a layer's."""
        return self.where in ("layers", "experts")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, without a cluster: sizes, plan, and what one device holds of the
    parameters. `planner.step` makes it.
    """

    shape: Shape
    plan: Plan
    # of a configuration of this course: its own arrays, and what else describes its program
    exact: tuple[Leaf, ...] = ()
    program: Any = None

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every parameter of a configuration, or the matrices of a shape."""
        return self.exact or self.matrices

    def like(self, **changes: Any) -> "Step":
        """Returns the step of another program for the same model: fields of `Plan` that change.
        Only the matrices of the model are known of it.
        """
        return Step(self.shape, dataclasses.replace(self.plan, **changes))

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of a microbatch on one device."""
        return self.plan.microbatch * self.shape.seq_len / self.plan.size("context")

    @functools.cached_property
    def itemsize(self) -> int:
        """Bytes of an activation. Eight-bit products return bfloat16."""
        return 2 if self.plan.eight_bit else jnp.dtype(self.plan.dtype).itemsize

    @functools.cached_property
    def stage_layers(self) -> float:
        """Layers of a pipeline stage, whole or not."""
        return self.shape.layers / self.plan.size("pipe")

    @functools.cached_property
    def matrices(self) -> tuple[Leaf, ...]:
        """The matrices of a model of these sizes, as one device holds them."""
        shape, plan = self.shape, self.plan
        t, f = plan.size("tensor"), plan.size("fsdp")
        usual = Leaf(
            "layers",
            self.stage_layers * shape.attention / t / f,
            plan.gradient_bytes,
            plan.parameter_bytes,
            plan.gradient_bytes,
            f,
            plan.zero > 0,
            plan.gather_again,
        )
        experts = self.stage_layers * shape.expert * max(shape.experts, 1) / t / f
        table = usual._replace(numbers=shape.vocab * shape.width / t / f)
        wide = plan.embedding_bytes
        # Megatron-LM's first stage has the embedding, its last one the output layer; in this
        # course's pipeline every stage has both.
        both = not shape.tied and (plan.size("pipe") == 1 or plan.schedule is not None)
        return (
            usual,
            usual._replace(
                where="experts" if shape.experts else "layers",
                numbers=experts / plan.size("expert"),
            ),
            table._replace(where="embedding", gathered=wide, scattered=wide),
            table._replace(where="head", held=both),
        )
