"""Formulas of `estimate`: the bytes that one device holds and sends per step, written by hand.

Bytes along two axes, side by side (R: the activations [b L D] of all sequences of a device, in
the model's dtype; n: devices along the axis; an all-reduce sends 2 (n-1)/n of an array, an
all-gather or a reduce-scatter half of that):

    data      an all-reduce of the gradients; with ZeRO 1 and 2 a reduce-scatter of them, and an
              all-gather of the new parameters; with ZeRO 3 an all-gather of the parameters in
              the dtype of the products, and another one for the backward pass: of the layers'
              kernels, or of everything that a rematerialized block reads
    tensor    per pair of products an all-reduce of R in the forward pass, one in the backward
              pass, and one where R is recomputed; outside the layers one of R, and one of the
              embedding in the dtype of its parameters; a few numbers per label
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from course_lib.many_devices.options import Strategy
from course_lib.many_devices.sharding import dim_of
from course_lib.models import routing

PyTree = Any
Sizes = Mapping[str, int]

KEPT_BY_MLP = {"gelu": 6, "squared_relu": 2.5}
"""Arrays of the hidden width that the backward pass of an MLP reads, as compiled. The
result of a comparison counts as half an array.
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """One device's part of a training step.

    Attributes:
      model: the `model` part of a configuration.
      strategy: how the axes are used.
      n: devices along each of `meshes.AXES`.
      sequences: sequences of the batch that the device works on.
      seq_len: L, the tokens of a sequence, on all devices along "context" together.
      minibatches: into how many the batch is cut.
      piped: whether there is an axis "pipe".
      sum_itemsize: bytes per number of the sum that adds up the gradients of all parts.
    """

    model: ConfigDict
    strategy: Strategy
    n: Sizes
    sequences: int
    seq_len: int
    minibatches: int
    piped: bool
    sum_itemsize: int = 4

    @property
    def width(self) -> int:
        """Bytes of a number in the model's dtype."""
        return jnp.dtype(self.model.dtype).itemsize

    @property
    def parts(self) -> int:
        """Parts that the device cuts its batch into: microbatches, or minibatches."""
        return self.strategy.microbatches if self.piped else self.minibatches

    @property
    def layers(self) -> int:
        """Layers that the device computes at once."""
        return self.model.num_layers // self.n["pipe"] // self.strategy.chunks

    @property
    def tokens(self) -> int:
        """Tokens that the device computes per step."""
        return self.sequences * self.seq_len // self.n["context"]

    @property
    def residual(self) -> int:
        """Bytes of the activations between two layers, for one part of the batch."""
        total = self.tokens // self.parts * self.model.hidden_size * self.width
        return total // self.n["tensor"] if self.strategy.sequence else total

    @property
    def slots(self) -> int:
        """Slots of all experts of a layer, per sequence."""
        model = self.model
        return model.num_experts * routing.capacity(
            self.seq_len, model.num_experts, model.experts_per_token, model.capacity_factor
        )

    @property
    def kv_width(self) -> int:
        """Numbers of the keys of one token."""
        return (self.model.num_kv_heads or self.model.num_heads) * self.model.head_dim


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter as one device holds it.

    Attributes:
      path: its name in the tree.
      bytes: of the device's part.
      itemsize: bytes of one number.
      param_spec: of the parameter.
      grad_spec: of its gradient.
    """

    path: str
    bytes: int
    itemsize: int
    param_spec: P
    grad_spec: P


def leaves(params: PyTree, param_specs: PyTree, grad_specs: PyTree, n: Sizes) -> list[Leaf]:
    """Lists parameters as one device holds them.

    Args:
      params: pytree of arrays or their shapes.
      param_specs: of the parameters.
      grad_specs: of their gradients.
      n: devices along each axis.
    """
    places = zip(
        *(
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
            for specs in (param_specs, grad_specs)
        ),
        strict=True,
    )
    listed = []
    for (path, leaf), (place, of_gradient) in zip(
        jax.tree_util.tree_leaves_with_path(params), places, strict=True
    ):
        itemsize = leaf.dtype.itemsize
        size = leaf.size * itemsize // math.prod(n[axis] for axis in place if axis)
        listed.append(Leaf(jax.tree_util.keystr(path), size, itemsize, place, of_gradient))
    return listed


def sent_for_gradients(step: Step, params: Sequence[Leaf]) -> float:
    """Returns the bytes that a device sends along "data" per step."""
    strategy, n = step.strategy, step.n["data"]
    # ZeRO 2 and 3 send once per minibatch, the other stages once per step.
    times = step.minibatches if strategy.zero >= 2 else 1
    total = 0.0
    for leaf in params:
        if dim_of(leaf.param_spec, "data") is not None:
            kernel = "kernel" in leaf.path
            again = (
                _needed_again(leaf, step.model)
                if "Block" in step.model.remat
                else (kernel or "['router']" in leaf.path) and strategy.gather_again
            )
            gathers = 1 + ("['block" in leaf.path and again)
            size = leaf.bytes * n * (step.width / leaf.itemsize if kernel else 1)
            total += times * (gathers + 1) * size
        elif dim_of(leaf.grad_spec, "data") is not None:
            total += (times + 1) * leaf.bytes
        else:
            total += times * 2 * leaf.bytes
    return (n - 1) / n * total


def _needed_again(leaf: Leaf, model: ConfigDict) -> bool:
    """Whether the backward pass of a rematerialized block reads a parameter: all but the biases
    that are added last.
    """
    last = "['attn']" in leaf.path or model.parallel_block
    return not (last and "['output_layer']['bias']" in leaf.path)


def sent_inside_layers(step: Step, params: Sequence[Leaf]) -> float:
    """Returns the bytes that a device sends along "tensor" per step; in a pipeline, as if each
    stage had the embedding and the head.
    """
    model, strategy, n = step.model, step.strategy, step.n
    if n["tensor"] == 1:
        return 0.0
    pairs = 1 if model.parallel_block else 2
    # A rematerialized part is recomputed up to its last sum, which the backward pass does not
    # read.
    if "Block" in model.remat:
        again = pairs - (0.5 if strategy.sequence else 1)
    elif strategy.zero == 3 and strategy.gather_again:
        # Gathered activations are gathered again, except those that came around a ring.
        again = 0.5 * pairs * (strategy.sequence and strategy.overlap == "none")
    else:
        again = 0.5 * len({"MLP", "Attn"} & set(model.remat)) * strategy.sequence
    layers = model.num_layers // n["pipe"] * (2 * pairs + again)
    # Outside of the layers: one activation of the head, one of the embedding in the dtype of
    # its parameters, and four numbers per label.
    wide = max(leaf.itemsize for leaf in params)
    total = step.tokens * (model.hidden_size * ((layers + 1) * step.width + wide) + 4 * 4)
    # Each device has a part of the gradients of shared parameters: of its tokens, or its heads.
    for leaf in params:
        of_all = strategy.sequence or "query_norm" in leaf.path or "key_norm" in leaf.path
        if of_all and dim_of(leaf.param_spec, "tensor") is None:
            copies = n["data"] if dim_of(leaf.param_spec, "data") is not None else 1
            total += step.parts * leaf.bytes * copies
    return 2 * (n["tensor"] - 1) / n["tensor"] * total


def sent_between_stages(step: Step, params: Sequence[Leaf], slots: int) -> float:
    """Returns the bytes that a device sends along "pipe" per step.

    In each of the schedule's `slots` an activation goes to the next stage and a gradient to the
    previous one. All stages sum the gradients of embedding and head, which each of them holds.
    """
    n = step.n["pipe"]
    outside = sum(leaf.bytes for leaf in params if "['block" not in leaf.path)
    return 2 * slots * step.residual + 2 * (n - 1) / n * outside if n > 1 else 0.0


def sent_around_a_ring(step: Step, params: Sequence[Leaf]) -> float:
    """Returns the bytes that a device sends along "context" per step.

    A layer's keys and values take n - 1 steps of the ring in the forward and in the backward
    pass; their gradients, in float32, take n. Where attention is recomputed, keys and values go
    around once more. The recomputation and the backward pass begin with the same transfer,
    which XLA sends once: n - 2 steps are added. Each minibatch sums the parameters' gradients.
    """
    size = step.n["context"]
    if size == 1:
        return 0.0
    keys = 2 * step.tokens * step.kv_width // step.n["tensor"]
    again = size - 2 if {"Block", "Attn"} & set(step.model.remat) else 0
    ring = keys * ((2 * (size - 1) + again) * step.width + 4 * size)
    summed = step.minibatches * 2 * (size - 1) / size
    return step.model.num_layers * ring + summed * sum(leaf.bytes for leaf in params)


def sent_to_experts(step: Step, params: Sequence[Leaf]) -> float:
    """Returns the bytes that a device sends along "expert" per step.

    Each layer has two all-to-alls in the forward and two in the backward pass, of the experts'
    slots for the device's tokens, and two more where the experts are recomputed. Each minibatch
    sums the gradients of all other parameters.
    """
    model, size = step.model, step.n["expert"]
    if size == 1:
        return 0.0
    slots = step.sequences * step.slots * model.hidden_size
    exchanges = 6 if {"Block", "MLP"} & set(model.remat) else 4
    exchanged = exchanges * model.num_layers * slots * step.width
    shared = sum(leaf.bytes for leaf in params if dim_of(leaf.param_spec, "expert") is None)
    return (size - 1) / size * (exchanged + 2 * step.minibatches * shared)


def gradients(step: Step, params: Sequence[Leaf]) -> int:
    """Returns the bytes of gradients: of one part of the batch, and of the sum over several.
    A pipeline adds each layer's gradient to the sum as soon as it is computed.

    Stage 2 never holds all gradients at once. But its update gathers the new parameters beside
    the old ones, which takes as many bytes at the end of the step. So all gradients are
    counted.
    """
    total = 0
    for leaf in params:
        summed = leaf.bytes * step.sum_itemsize // leaf.itemsize
        if step.piped:
            layers = step.layers * step.strategy.chunks if "['block" in leaf.path else 1
            total += summed + leaf.bytes // layers
            continue
        # Stage 2 adds up slices, the other stages full gradients.
        sliced = step.strategy.zero == 2 and dim_of(leaf.grad_spec, "data") is not None
        slices = step.n["data"] if sliced else 1
        total += leaf.bytes
        total += summed // slices if step.parts > 1 else 0
    return total


def copies(step: Step, params: Sequence[Leaf]) -> int:
    """Estimates the bytes of the parameters that layers compute with: gathered, and kernels in
    the model's dtype.

    Counts one layer's copies and gradients at a time, and the copies of all layers where the
    backward pass does not make them again. Copies of embedding and head stay.
    """
    model, total = step.model, 0.0
    for leaf in params:
        cut, kernel = dim_of(leaf.param_spec, "data") is not None, "kernel" in leaf.path
        narrow = step.width / leaf.itemsize
        if not cut and not (kernel and narrow < 1):
            continue  # used as it is
        size = leaf.bytes * (step.n["data"] if cut else 1) * (narrow if kernel else 1)
        if "['block" not in leaf.path:
            total += size
            continue
        per_layer = size * step.n["pipe"] / model.num_layers
        module = "MLP" if "['mlp']" in leaf.path else "Attn"
        again = (
            "Block" in model.remat
            or step.piped  # each op casts for itself
            or (step.strategy.gather_again if cut else module in model.remat)
        )
        total += per_layer * (2 if again else 2 + step.layers)
    return int(total)


def activations(step: Step, waiting: Mapping[str, int] | None = None) -> int:
    """Estimates the bytes of activations: kept for the backward pass, and worked on at once.

    Args:
      step: the device's part of a training step.
      waiting: in a pipeline, the number of slots in each buffer (`slots.Program.sizes`).
    """
    model, shards, width = step.model, step.n["tensor"], step.model.hidden_size
    tokens, size, residual = step.tokens // step.parts, step.width, step.residual
    of_attention = 2 * model.num_heads * model.head_dim + 2 * step.kv_width
    hidden = KEPT_BY_MLP[model.mlp_activation] * model.mlp_expansion * width
    # Fused kernels and rings keep no scores.
    fused = model.attention in ("cudnn", "flash") or step.n["context"] > 1
    scores = 0 if fused else model.num_heads * step.seq_len
    if model.num_experts:
        # A slot has an input and an output. Two masks, in float32 and in the model's dtype,
        # send each token to its slots and fetch it.
        per_token = step.slots / step.seq_len
        hidden = hidden * per_token + 2 * width * per_token + 2 * step.slots * (4 + size) / size
    # A norm keeps three arrays in float32, and its output, undivided; attention keeps its
    # softmax, and a narrow copy of it.
    norm = 3 * 4 * residual // size + tokens * width * size
    inside = {
        "MLP": norm + tokens * hidden * size / shards,
        "Attn": norm + tokens * (of_attention * size + scores * (4 + size)) / shards,
    }
    layer = 2 * residual + sum(inside.values())
    rematerialized = sum(inside[name] for name in set(model.remat) - {"Block"})
    per_layer = residual if "Block" in model.remat else layer - rematerialized
    # The logits, their softmax and their gradient, in float32. With several chunks, those of
    # one chunk, and a float32 sum over chunks.
    logits = 3 * 4 * tokens * model.num_outputs / shards / model.loss_chunks
    if model.loss_chunks > 1:
        summed = tokens if model.loss_along == "vocabulary" else model.num_outputs / shards
        logits += 4 * summed * width
    # Everything of one layer, and the gradients inside one of its modules.
    at_work = layer + max(inside.values())
    if waiting is None:
        return int(step.layers * per_layer + max(at_work, logits))
    # The gradients of the products' results wait from B to W. So do the products' inputs, where
    # B recomputed them.
    heads, mlp = model.num_heads * model.head_dim, model.mlp_expansion * width
    results = {"MLP": mlp, "Attn": heads + 2 * step.kv_width}
    inputs = {"MLP": mlp, "Attn": heads}
    again = results if "Block" in model.remat else set(model.remat)
    passed = 4 * residual + tokens * size * sum(results.values()) / shards
    if step.strategy.sequence:  # the gradients of both row products, gathered
        passed += 2 * tokens * width * size
    passed += tokens * size * sum(width + inputs[name] / shards for name in again)
    between = residual * (waiting["inbox"] + waiting["gradient"] + waiting["stash"] + 2)
    inside_layers = waiting["stash"] * per_layer + waiting["passed"] * passed
    return int(between + step.layers * inside_layers + max(at_work, logits))
