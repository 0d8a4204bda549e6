"""Sizes of a Transformer (`Shape`), and how devices divide its training (`Plan`)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from course_lib.many_devices.cluster_model import AXES, check_type
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


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Transformer.

    Attributes:
      layers, width, heads, head_dim, vocab, seq_len: N, D, H, K, V and L.
      kv_heads: heads of keys and values; 0: as many as `heads`.
      mlp: F, the hidden width of the MLP, or of one expert.
      matrices: of the MLP: 2, or 3 with a gate (SwiGLU).
      experts: number of experts of a layer; 0: one MLP that computes every token.
      slots: slots of the experts per token: k, times the capacity factor.
      experts_per_token: k, if the slots are more; an empty slot is work, but not the model's.
      tied: whether the output layer is the embedding.
      parallel: whether attention and MLP stand side by side, which halves tensor traffic.
    """

    layers: int
    width: int
    heads: int
    head_dim: int
    mlp: int
    vocab: int
    seq_len: int
    kv_heads: int = 0
    matrices: int = 2
    experts: int = 0
    slots: float = 1.0
    experts_per_token: int = 0
    tied: bool = False
    parallel: bool = False

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "head_dim", "mlp", "vocab", "seq_len")
        _check_counts({name: getattr(self, name) for name in sizes})
        for name in ("kv_heads", "experts", "experts_per_token"):
            if type(value := getattr(self, name)) is not int:
                raise ValueError(f"{name}={value!r} must be a whole number")
        if not 0 <= self.kv_heads <= self.heads:
            raise ValueError(f"kv_heads={self.kv_heads} must be 0 to heads={self.heads}")
        if self.matrices not in (2, 3):
            raise ValueError(f"matrices={self.matrices} must be 2, or 3 with a gate")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.experts < 0:
            raise ValueError(f"experts={self.experts} must be at least 0")
        if not 0 < self.slots < math.inf:
            raise ValueError(f"slots={self.slots} must be above 0, and finite")
        if not self.experts and self.slots != 1:
            raise ValueError(f"slots={self.slots} must be 1 without experts")
        if self.experts and self.slots > self.experts:
            raise ValueError(f"slots={self.slots} must be at most experts={self.experts}")
        if not 0 <= self.experts_per_token <= min(self.slots, self.experts):
            raise ValueError(
                f"experts_per_token={self.experts_per_token} must be 0 to slots={self.slots},"
                f" and at most experts={self.experts}"
            )
        _check_flags({name: getattr(self, name) for name in ("tied", "parallel")})

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        return 2 * self.width * self.head_dim * (self.heads + (self.kv_heads or self.heads))

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
        runs at half the rate of other matmuls.
        """
        layer = 2 * (self.attention + (self.experts_per_token or self.slots) * self.expert)
        scores = 4 * self.seq_len * self.heads * self.head_dim
        return 3.0 * (self.layers * (layer + scores) + 2 * self.vocab * self.width)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a model is trained.

    Attributes:
      axes: the mesh, sizes by name, outer to inner. "data" replicates the parameters, "fsdp"
        divides them (ZeRO-3); "pipe", "expert", "context" and "tensor" as in the course.
      batch: sequences per step, on all devices together.
      microbatch: sequences that a replica computes at once.
      chunks: parts of the model per pipeline stage (interleaving).
      zero: stage along "data": 1 divides the optimizer's state, 2 the gradients too.
      recompute: what the backward pass recomputes: a name of `RECOMPUTE`.
      recompute_share: share of the layers that recompute it; the others keep all.
      fused_attention: whether scores stay on the chip (FlashAttention).
      eager: whether each elementwise operation is its own kernel, neither written by hand nor
        fused by a compiler.
      sequence_parallel: whether norms and residuals are divided along "tensor".
      tensor_overlap: whether most of the tensor traffic is hidden behind products.
      wgrad_overlap: whether the backward pass sums the gradients of activations along "tensor"
        while it computes those of weights (Korthikanti et al., 2022, section 6.2).
      data_overlap: whether gradients and parameters travel while layers compute.
      parameter_overlap: with `data_overlap`: whether the new parameters do, too.
      pipe_overlap: whether interleaved stages send to each other while they compute another
        chunk, as with Megatron-LM's `overlap_p2p_comm`.
      sums_each_microbatch: whether each microbatch sums its gradients along "context" and along
        "expert", before the sum along "data"; else one sum per step goes along all three.
      gather_again: whether the backward pass gathers again the parameters that "fsdp" divides.
      gradient_bytes, parameter_bytes: per element, when they travel along "data".
      float32_gradients: whether a device adds each microbatch's gradients to a float32 sum, as
        Megatron-LM does even for one microbatch. If not, the gradients of the only microbatch
        stay as they travel.
      embedding_bytes: per number of the embedding: of its parameters and gradients along
        "fsdp", and of its output, which is summed along "tensor". This course's is as
        wide as its parameters.
      ring_gradient_bytes: per number, when gradients of keys and values travel along "context".
      update_bytes: bytes per parameter that the optimizer reads and writes, without the
        gradient. Adam in float32: 24, of the parameter and two moments.
      dtype: of the operands of matmuls. If they have eight bits, the matmuls with weights have
        them, inside the layers; attention and the output layer compute in bfloat16.
      schedule: of this course's pipeline, where neighbours wait for each other. None:
        Megatron-LM's, whose bubble is (p-1)/v stages.
      chunked_loss: whether the backward pass computes the logits again, chunk by chunk.
      dense_dispatch: whether products send tokens to their experts, as in this course.
    """

    axes: Mapping[str, int]
    batch: int
    microbatch: int = 1
    chunks: int = 1
    zero: int = 0
    recompute: str = "none"
    recompute_share: int | float = 1
    fused_attention: bool = True
    eager: bool = False
    sequence_parallel: bool = False
    tensor_overlap: bool = False
    wgrad_overlap: bool = False
    data_overlap: bool = True
    parameter_overlap: bool = True
    pipe_overlap: bool = False
    sums_each_microbatch: bool = False
    gather_again: bool = True
    gradient_bytes: int = 2
    parameter_bytes: int = 2
    float32_gradients: bool = True
    embedding_bytes: int = 2
    ring_gradient_bytes: int = 2
    update_bytes: int | float = 24
    dtype: str = "bfloat16"
    schedule: Schedule | None = None
    chunked_loss: bool = False
    dense_dispatch: bool = False

    def __post_init__(self) -> None:
        check_type("axes", self.axes, Mapping, 'a mapping of sizes by name: {"data": 64}')
        if unknown := set(self.axes) - set(AXES):
            raise ValueError(f"axes={dict(self.axes)} must be of {AXES}, not {sorted(unknown)}")
        counts = {name: getattr(self, name) for name in ("batch", "microbatch", "chunks")}
        _check_counts({**self.axes, **counts})
        if type(self.zero) is not int or self.zero not in (0, 1, 2):
            raise ValueError(
                f"zero={self.zero!r} must be 0, 1 or 2: stage 3 is the axis 'fsdp'"
            )
        _check_flags({name: getattr(self, name) for name in FLAGS})
        if not isinstance(self.recompute, str) or self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r} must be one of {tuple(RECOMPUTE)}")
        share = self.recompute_share
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise ValueError(f"recompute_share={share!r} must be a number from 0 to 1")
        per_number = ("gradient_bytes", "parameter_bytes", "embedding_bytes")
        for name in (*per_number, "ring_gradient_bytes"):
            if type(value := getattr(self, name)) is not int or value not in (1, 2, 4):
                raise ValueError(f"{name}={value!r} must be 1, 2 or 4")
        if type(self.update_bytes) not in (int, float) or not 0 <= self.update_bytes < 1e3:
            raise ValueError(f"update_bytes={self.update_bytes!r} must be 0 to 1000 bytes")
        try:
            known = jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating)
        except TypeError:
            known = False
        if not known or not isinstance(self.dtype, str):
            raise ValueError(f"dtype={self.dtype!r} must be the name of a floating dtype")
        if self.chunks > 1 and self.size("pipe") == 1:
            raise ValueError(f"chunks={self.chunks} must be 1 without an axis 'pipe' above 1")
        if self.batch % (self.replicas * self.microbatch):
            raise ValueError(
                f"batch={self.batch} must be a multiple of {self.replicas * self.microbatch}:"
                f" {self.replicas} replicas, each with microbatches of {self.microbatch}"
            )

        if not self.float32_gradients and self.microbatches > 1:
            raise ValueError(
                f"float32_gradients=False must come with one microbatch, not"
                f" {self.microbatches}: several are summed in float32"
            )
        if self.wgrad_overlap and self.tensor_overlap:
            raise ValueError(
                "wgrad_overlap=True must come with tensor_overlap=False, which hides the same"
                " traffic"
            )
        if self.pipe_overlap and (self.chunks == 1 or self.schedule is not None):
            raise ValueError(
                f"pipe_overlap=True must come with chunks of at least 2, not {self.chunks}, and"
                " without a schedule of this course: one chunk has nothing else to compute"
            )
        if self.pipe_overlap and self.sums_each_microbatch:
            raise ValueError(
                "pipe_overlap=True must come with sums_each_microbatch=False: both would hide"
                " behind the same computing of each microbatch"
            )
        if schedule := self.schedule:
            how = "a Schedule: schedules.make('1f1b', stages, microbatches)"
            check_type("schedule", schedule, Schedule, how)
            theirs = schedule.stages, schedule.microbatches, schedule.chunks
            ours = self.size("pipe"), self.microbatches, self.chunks
            if theirs != ours:
                raise ValueError(
                    f"schedule must be for {ours} stages, microbatches and chunks, not {theirs}"
                )

    def size(self, axis: str) -> int:
        """Returns the number of devices along an axis, 1 if there is no such axis."""
        return self.axes.get(axis, 1)

    @property
    def eight_bit(self) -> bool:
        """Whether matmuls with weights have eight-bit operands."""
        return jnp.dtype(self.dtype).itemsize == 1

    @property
    def replicas(self) -> int:
        """The number of groups of devices that compute different sequences."""
        return self.size("data") * self.size("fsdp") * self.size("expert")

    @property
    def microbatches(self) -> int:
        """Microbatches per replica and step."""
        return self.batch // self.replicas // self.microbatch


FLAGS = tuple(f.name for f in dataclasses.fields(Plan) if isinstance(f.default, bool))
"""Names of the fields of `Plan` that are True or False."""


def check(shape: Shape, plan: Plan) -> None:
    """Refuses a plan whose devices cannot share the model. A vocabulary or a sequence
    that "tensor" does not divide is not refused: each device is charged for its exact fraction.

    Raises:
      ValueError: naming what an axis does not divide.
    """
    # In some pipelines, the embedding and the output layer each count as one layer.
    if plan.size("pipe") * plan.chunks > shape.layers + 2:
        raise ValueError(
            f"axes={dict(plan.axes)}, chunks={plan.chunks} must have at most"
            f" {shape.layers + 2} stages, of {shape.layers} layers, embedding and output layer"
        )
    for axis, name in (
        ("tensor", "heads"),
        ("tensor", "kv_heads"),
        ("tensor", "mlp"),
        ("expert", "experts"),
    ):
        count, size = getattr(shape, name), plan.size(axis)
        if name == "kv_heads":
            count = count or shape.heads
        if size > 1 and (not count or count % size):
            raise ValueError(
                f"{name}={count} must be a multiple of {size}, the devices along {axis!r}"
            )
    if (size := plan.size("context")) > 1 and shape.seq_len % (2 * size):
        raise ValueError(
            f"seq_len={shape.seq_len} must be a multiple of {2 * size}: in the zigzag layout,"
            f" each of {size} devices along 'context' has two pieces of the sequence"
        )


def _check_flags(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if type(value) is not bool:
            raise ValueError(f"{name}={value!r} must be True or False")


def _check_counts(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
