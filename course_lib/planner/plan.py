"""Sizes of a Transformer (`Shape`), how devices divide its training (`Plan`), and both together
with the parameters that one device holds (`Step`).
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from course_lib import arguments
from course_lib.fields import Checked, Rule, at_least, option, required
from course_lib.many_devices.cluster_model import AXES
from course_lib.many_devices.pipeline_parallel.schedules import Schedule


class Recomputed(NamedTuple):
    """How much of a layer the backward pass computes again."""

    qkv: float  # FLOPs of products: queries, keys and values;
    out: float  # attention's output;
    into: float  # the MLP's first products;
    last: float  # its last one
    core: float  # FLOPs and bytes of attention's scores, softmax and mean of values
    moved: tuple[float, float, float]  # bytes of products: qkv, out, MLP
    elementwise: tuple[float, float]  # other bytes: of attention, of the MLP
    gathers: float  # along "tensor", where attention and MLP begin
    sums: float  # there, where they end
    layers: float = 1.0  # the share of layers that do so


RECOMPUTED = {
    #                     qkv out in last core  moved      elementwise  gathers, sums
    "none": Recomputed(0, 0, 0, 0, 0, (0, 0, 0), (0, 0), 0, 0),
    "gathers": Recomputed(0, 0, 0, 0, 0, (0, 0, 0), (0, 0), 2, 0),  # along "tensor"
    "minimal": Recomputed(0, 0, 0, 0, 0, (0, 0, 0), (1, 1), 0, 0),
    "selective": Recomputed(0, 0, 0, 0, 1, (0, 0, 0), (0, 0), 0, 0),
    "attention": Recomputed(1, 0, 0, 0, 1, (1, 1, 0), (1, 0), 1, 0),
    "mlp": Recomputed(0, 0, 1, 0, 0, (0, 0, 1), (0, 1), 1, 0),
    "mlp-in": Recomputed(0, 0, 1, 0, 1, (0, 0, 1), (0, 1), 1, 0),  # and the scores
    "all-but-qkv": Recomputed(0, 1, 1, 0, 1, (0, 1, 1), (1, 1), 1, 1),
    "op": Recomputed(0.5, 0.5, 0.5, 0.5, 0, (0.5, 0.5, 0.5), (1, 1), 0, 0),  # half of products
    "modules": Recomputed(1, 0, 1, 0, 1, (1, 1, 1), (1, 1), 2, 0),
    "block": Recomputed(1, 1, 1, 0, 1, (1, 1, 1), (1, 1), 2, 1),
    "full": Recomputed(1, 1, 1, 1, 1, (1, 1, 1), (1, 1), 2, 2),
    "half": Recomputed(1, 1, 1, 1, 1, (1, 1, 1), (1, 1), 2, 2, layers=0.5),
}
"""Parts that the backward pass recomputes, by name. The last product of a recomputed part, and
the sum along "tensor" after it, are work for nothing: the backward pass does not read their
result. A compiler leaves them out (JAX: "modules", "block"), a framework that runs the forward
pass again does not ("full")."""


def _is_floating(name: str) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(name), jnp.floating)
    except TypeError:
        return False


@dataclasses.dataclass(frozen=True)
class Shape(Checked):
    """Sizes of a Transformer."""

    layers: int = required()  # N
    width: int = required()  # D
    heads: int = required()  # H
    head_dim: int = required()  # K
    mlp: int = required()  # F, the hidden width of the MLP, or of one expert
    vocab: int = required()  # V
    seq_len: int = required()  # L
    kv_heads: int = option(0)  # heads of keys and values; 0: as many as `heads`
    matrices: int = option(2, (2, 3))  # of the MLP: 3 with a gate (SwiGLU)
    experts: int = option(0)  # of a layer; 0: one MLP computes every token
    slots: float | int = option(1.0)  # per token: k x capacity factor
    # k, if the slots are more: an empty slot is work, but not the model's
    experts_per_token: int = option(0)
    tied: bool = option(False)  # whether the output layer is the embedding
    # whether attention and MLP stand side by side, which halves traffic along "tensor"
    parallel: bool = option(False)
    window: int = option(0)  # positions that a token sees, its own the last; 0: all

    def _errors(self) -> Iterator[str]:
        if self.kv_heads and self.heads % self.kv_heads:
            yield f"kv_heads={self.kv_heads} must divide heads={self.heads}"
        if not self.experts and self.slots != 1:
            yield f"slots={self.slots} must be 1 without experts"
        if 0 < self.experts < self.slots:
            yield f"slots={self.slots} must be at most experts={self.experts}"
        if self.experts_per_token > (most := min(self.slots, self.experts)):
            yield f"experts_per_token={self.experts_per_token} must be at most {most:g}"

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
    def keys(self) -> float:
        """Keys that count per query: all, or with a window the same share of them as of the
        pairs of a query and a key that it sees.
        """
        length, window = self.seq_len, min(self.window or self.seq_len, self.seq_len)
        return window * (2 * length - window + 1) / (length + 1)

    @property
    def flops(self) -> float:
        """FLOPs per token, forward and backward, of the products that the model needs.

        Attention counts in full. A causal kernel skips half of it; counting all assumes that it
        runs at half the rate of other products.
        """
        layer = 2 * (self.attention + (self.experts_per_token or self.slots) * self.expert)
        scores = 4 * self.keys * self.heads * self.head_dim
        return 3.0 * (self.layers * (layer + scores) + 2 * self.vocab * self.width)


@dataclasses.dataclass(frozen=True)
class Plan(Checked):
    """How a model is trained. Along "data" parameters are replicated, along "fsdp" divided
    (ZeRO 3); "pipe", "expert", "context" and "tensor" are as in the course.
    """

    axes: Mapping[str, int]  # the mesh: sizes by name, outer to inner
    batch: int = required()  # sequences per step, on all devices together
    microbatch: int = option(1)  # sequences that a replica computes at once
    chunks: int = option(1)  # of the model per pipeline stage (interleaving)
    zero: int = option(0, (0, 1, 2))  # stage along "data"
    recompute: str = option("none", RECOMPUTED)
    recompute_share: int | float = option(
        1.0, Rule(lambda x: 0 <= x <= 1, "be from 0 to 1")
    )  # of the layers; others keep all
    fused_attention: bool = option(True)  # scores stay on the chip (FlashAttention)
    # unfused: queries that attend at once, to the keys that they see; 0: all, to all keys
    attention_block: int = option(0)
    eager: bool = option(False)  # each elementwise operation is a kernel of its own
    sequence_parallel: bool = option(False)  # "tensor" divides norms and residuals
    # rings hide most traffic along "tensor" behind products
    tensor_overlap: bool = option(False)
    # the backward pass sums activations' gradients along "tensor" while it computes those of
    # weights (Korthikanti et al., 2022, section 6.2)
    wgrad_overlap: bool = option(False)
    data_overlap: bool = option(True)  # gradients, parameters travel beside computing
    parameter_overlap: bool = option(True)  # new parameters do, too
    # chunks send to the next stage beside other chunks (Megatron-LM's `overlap_p2p_comm`)
    pipe_overlap: bool = option(False)
    # bytes per number of the gradients that each microbatch sums along "context" and "expert";
    # 0: one sum per step goes along all axes
    sums_each_microbatch: int = option(0, (0, 1, 2, 4))
    gather_again: bool = option(True)  # "fsdp" gathers for the backward pass again
    gradient_bytes: int = option(2, (1, 2, 4))  # per number, when gradients travel
    parameter_bytes: int = option(2, (1, 2, 4))  # per number, when parameters travel
    # each microbatch's gradients are added to a float32 sum; without, those of the only
    # microbatch stay as they travel
    float32_gradients: bool = option(True)
    embedding_bytes: int = option(2, (1, 2, 4))  # per number of the embedding and its output
    ring_gradient_bytes: int = option(2, (1, 2, 4))  # of gradients of keys and values
    # per parameter, read and written by the optimizer; Adam in float32: 24
    update_bytes: int | float = option(24.0, at_least(0))
    # how often Muon moves a matrix (`muon.on_stacks`): twice, with weight decay three times
    muon: int = option(0, (0, 2, 3))
    # of products' operands; with eight bits only of products with weights, inside of layers
    dtype: str = option("bfloat16", Rule(_is_floating, "be the name of a floating dtype"))
    schedule: Schedule | None = None  # of this course's pipeline; None: Megatron-LM's
    chunked_loss: bool = option(False)  # the backward pass computes logits again
    dense_dispatch: bool = option(False)  # products send tokens to experts

    def _errors(self) -> Iterator[str]:
        if unknown := sorted(set(self.axes) - set(AXES)):
            yield f"axes={dict(self.axes)} must be of {AXES}, not {unknown}"
        if wrong := {a: n for a, n in self.axes.items() if type(n) is not int or n < 1}:
            yield f"axes={wrong} must have whole sizes of at least 1"
        if self.chunks > 1 and self.size("pipe") == 1:
            yield f"chunks={self.chunks} must be 1 without an axis 'pipe' above 1"
        if self.batch % (least := self.replicas * self.microbatch):
            yield (
                f"batch={self.batch} must be a multiple of {least}: {self.replicas} replicas,"
                f" each with microbatches of {self.microbatch}"
            )
        if not self.float32_gradients and self.microbatches > 1:
            yield (
                f"float32_gradients=False must come with one microbatch, not"
                f" {self.microbatches}: several are summed in float32"
            )
        if self.wgrad_overlap and self.tensor_overlap:
            yield "wgrad_overlap=True must come without tensor_overlap: both hide one traffic"
        made = self.schedule
        if self.pipe_overlap and (self.chunks == 1 or made or self.sums_each_microbatch):
            yield (
                "pipe_overlap=True must come with chunks of at least 2, without a schedule of"
                " this course, and with sums_each_microbatch=0"
            )
        ours = self.size("pipe"), self.microbatches, self.chunks
        if made and (theirs := (made.stages, made.microbatches, made.chunks)) != ours:
            yield f"schedule must be for {ours} stages, microbatches and chunks, not {theirs}"

    def size(self, axis: str) -> int:
        """Returns the number of devices along an axis, 1 if there is no such axis."""
        return self.axes.get(axis, 1)

    @functools.cached_property
    def eight_bit(self) -> bool:
        """Whether products with weights have eight-bit operands."""
        return jnp.dtype(self.dtype).itemsize == 1

    @functools.cached_property
    def replicas(self) -> int:
        """The number of groups of devices that compute different sequences."""
        return self.size("data") * self.size("fsdp") * self.size("expert")

    @functools.cached_property
    def microbatches(self) -> int:
        """Microbatches per replica and step."""
        return self.batch // self.replicas // self.microbatch


def check(shape: Shape, plan: Plan) -> None:
    """Refuses a plan whose devices cannot share the model. A vocabulary or a sequence that
    "tensor" does not divide is not refused: each device is charged for its exact fraction.
    """
    arguments.refuse(_not_shared(shape, plan))


def _not_shared(shape: Shape, plan: Plan) -> Iterator[str]:
    # In some pipelines, the embedding and the output layer each count as one layer.
    if plan.size("pipe") * plan.chunks > shape.layers + 2:
        yield (
            f"axes={dict(plan.axes)}, chunks={plan.chunks} must have at most"
            f" {shape.layers + 2} stages, of {shape.layers} layers, embedding and output layer"
        )
    if plan.size("expert") > 1 and not shape.experts:
        yield "experts=0 must be above 0: the devices along 'expert' have none to divide"
    if (n := plan.size("context")) > 1:
        yield from arguments.shared("seq_len", shape.seq_len, 2 * n, "parts along 'context'")
    for axis, name, total in (
        ("tensor", "heads", shape.heads),
        ("tensor", "kv_heads", shape.kv_heads or shape.heads),
        ("tensor", "mlp", shape.mlp),
        ("expert", "experts", shape.experts),
    ):
        yield from arguments.shared(name, total, plan.size(axis), f"devices along {axis!r}")


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
    def keys(self) -> float:
        """Keys whose scores are computed per query, on average. A ring, which knows no windows,
        leaves out parts in which each token would look ahead.
        """
        shape, n, block = self.shape, self.plan.size("context"), self.plan.attention_block
        if self.plan.fused_attention:
            return shape.keys
        length, window = shape.seq_len, shape.window or shape.seq_len
        if n > 1 or not block:
            return length * (1.0 if n == 1 else (2 * n + 1) / (4 * n))
        blocks = ((start, min(start + block, length)) for start in range(0, length, block))
        scores = sum((end - i) * (end - max(0, i - window + 1)) for i, end in blocks)
        return scores / length

    @functools.cached_property
    def recomputed(self) -> Recomputed:
        """What `Plan.recompute` computes again. Side by side, attention and MLP begin and end
        together: one gather, one sum, and a compiler skips both last products.
        """
        row = RECOMPUTED[self.plan.recompute]
        share = self.plan.recompute_share * row.layers
        if self.shape.parallel:
            out = 0.0 if self.plan.recompute == "block" else row.out
            row = row._replace(out=out, gathers=min(row.gathers, 1), sums=max(row.sums - 1, 0))
        return Recomputed._make(
            tuple(share * x for x in v) if isinstance(v, tuple) else share * v for v in row
        )

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
        head = table._replace(where="head", held=both)
        if shape.tied and plan.size("pipe") == 1:  # one array, gathered and scattered once
            head = head._replace(gathered=0, scattered=0)
        return (
            usual,
            usual._replace(
                where="experts" if shape.experts else "layers",
                numbers=experts / plan.size("expert"),
            ),
            table._replace(where="embedding", gathered=wide, scattered=wide),
            head,
        )
