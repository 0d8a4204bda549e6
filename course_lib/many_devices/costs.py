"""The formulas of `estimate`: what one device holds and sends in a step that is written by
hand.

Beside each other they read (R: an activation [b L D] of all sequences of a device, in the
model's dtype; n: devices of the axis; an all-reduce sends 2 (n-1)/n of an array, an all-gather
or a reduce-scatter half of that):

    data      an all-reduce of the gradients; with ZeRO 1 and 2 a reduce-scatter of them, and an
              all-gather of the new parameters; with ZeRO 3 one of what was computed with, once
              more for the kernels of layers, or for all that a rematerialized block needs
    tensor    for each pair of products an all-reduce of R forward, one backward, and one where
              it is computed again; around the layers one of R, and one of the embedding in
              float32; a few numbers for each label
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
"""How many arrays of the hidden width the backward pass of an MLP needs, as compiled: a
comparison's bits count half.
"""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: its path, the bytes of it that a device holds, and the specs of it and of
    its gradient.
    """

    path: str
    bytes: int
    held: P
    kept: P


def leaves(params: PyTree, held: PyTree, kept: PyTree, n: Sizes) -> list[Leaf]:
    """Lists parameters as devices hold them."""
    places = zip(
        *(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)) for specs in (held, kept)),
        strict=True,
    )
    found = []
    for (path, leaf), (place, of_gradient) in zip(
        jax.tree_util.tree_leaves_with_path(params), places, strict=True
    ):
        size = leaf.size * leaf.dtype.itemsize // math.prod(n[axis] for axis in place if axis)
        found.append(Leaf(jax.tree_util.keystr(path), size, place, of_gradient))
    return found


def sent_for_gradients(
    config: ConfigDict, chosen: Strategy, params: Sequence[Leaf], n: int
) -> float:
    """Returns the bytes that a device sends along "data"."""
    # ZeRO 2 and 3 send once a minibatch, the other stages once a step.
    times = config.training.num_minibatches if chosen.zero >= 2 else 1
    narrow = jnp.dtype(config.model.dtype).itemsize / 4
    total = 0.0
    for leaf in params:
        if dim_of(leaf.held, "data") is not None:
            kernel = "kernel" in leaf.path
            again = (
                _needed_again(leaf, config)
                if "Block" in config.model.remat
                else (kernel or "['router']" in leaf.path) and chosen.gather_again
            )
            gathers = 1 + ("['block" in leaf.path and again)
            total += times * (gathers + 1) * leaf.bytes * n * (narrow if kernel else 1)
        elif dim_of(leaf.kept, "data") is not None:
            total += (times + 1) * leaf.bytes
        else:
            total += times * 2 * leaf.bytes
    return (n - 1) / n * total


def _needed_again(leaf: Leaf, config: ConfigDict) -> bool:
    """Whether the backward pass of a rematerialized block needs a parameter: all but biases
    that are added last.
    """
    last = "['attn']" in leaf.path or config.model.parallel_block
    return not (last and "['output_layer']['bias']" in leaf.path)


def sent_inside_layers(
    config: ConfigDict,
    chosen: Strategy,
    params: Sequence[Leaf],
    n: Sizes,
    parts: int,
    piped: bool,
) -> float:
    """Returns the bytes that a device sends along "tensor"; in a pipeline, as if each stage had
    embedding and head.
    """
    if n["tensor"] == 1:
        return 0.0
    model, tokens = config.model, config.data.batch_size // n["data"] * config.data.seq_len
    pairs = 1 if model.parallel_block else 2
    # Computed again is all but what the backward pass does not need, the last sum of what is
    # rematerialized.
    if "Block" in model.remat:
        again = pairs - (0.5 if chosen.sequence else 1)
    elif chosen.zero == 3 and chosen.gather_again:
        # Nothing that was gathered is kept, along "tensor" neither; what a ring brings is.
        again = 0.5 * pairs * (chosen.sequence and chosen.overlap == "none")
    else:
        again = 0.5 * len({"MLP", "Attn"} & set(model.remat)) * chosen.sequence
    layers = model.num_layers // n["pipe"] * (2 * pairs + again + piped * pairs)
    head = 1.5 if piped and chosen.sequence else 1
    width = jnp.dtype(model.dtype).itemsize
    total = tokens * (
        model.hidden_size * ((layers + head) * width + 4) + 4 * (6 if piped else 4)
    )
    # Gradients of what all devices use, each for its part of the sequence, or for its heads.
    for leaf in params:
        of_all = chosen.sequence or "query_norm" in leaf.path or "key_norm" in leaf.path
        if of_all and dim_of(leaf.held, "tensor") is None:
            total += (
                parts * leaf.bytes * (n["data"] if dim_of(leaf.held, "data") is not None else 1)
            )
    return 2 * (n["tensor"] - 1) / n["tensor"] * total


def sent_between_stages(params: Sequence[Leaf], slots: int, residual: int, n: int) -> float:
    """Returns the bytes that a device sends along "pipe": an activation to the next stage and a
    gradient to the one before in each slot of the schedule, and the gradients of embedding and
    head, which all stages hold.
    """
    outside = sum(leaf.bytes for leaf in params if "['block" not in leaf.path)
    return 2 * slots * residual + 2 * (n - 1) / n * outside if n > 1 else 0.0


def sent_around_a_ring(config: ConfigDict, params: Sequence[Leaf], n: Sizes) -> float:
    """Returns the bytes that a device sends along "context".

    Keys and values of a layer take n - 1 steps of the ring, forward and backward; their
    gradients, in float32, take n. Gradients of parameters are summed for each minibatch.
    """
    model, size = config.model, n["context"]
    tokens = config.data.batch_size // n["data"] * config.data.seq_len // size
    keys = 2 * tokens * (model.num_kv_heads or model.num_heads) * model.head_dim // n["tensor"]
    ring = keys * (2 * (size - 1) * jnp.dtype(model.dtype).itemsize + 4 * size)
    summed = config.training.num_minibatches * 2 * (size - 1) / size
    sent = model.num_layers * ring + summed * sum(leaf.bytes for leaf in params)
    return sent if size > 1 else 0.0


def sent_to_experts(config: ConfigDict, params: Sequence[Leaf], n: Sizes) -> float:
    """Returns the bytes that a device sends along "expert".

    Each layer has two all-to-alls forward and two backward, of the slots that experts have for
    the device's tokens. Gradients of all but the experts are summed for each minibatch.
    """
    model, size, length = config.model, n["expert"], config.data.seq_len
    if size == 1:
        return 0.0
    room = routing.capacity(
        length, model.num_experts, model.experts_per_token, model.capacity_factor
    )
    sequences = config.data.batch_size // n["data"] // size
    slots = sequences * model.num_experts * room * model.hidden_size
    exchanged = 4 * model.num_layers * slots * jnp.dtype(model.dtype).itemsize
    shared = sum(leaf.bytes for leaf in params if dim_of(leaf.held, "expert") is None)
    return (size - 1) / size * (exchanged + 2 * config.training.num_minibatches * shared)


def gradients(chosen: Strategy, params: Sequence[Leaf], n: int, summed: bool) -> int:
    """Returns the bytes of gradients: those of the part of the batch at hand, and if there are
    several parts the sum.
    """
    total = 0
    for leaf in params:
        # Stage 2 adds up slices, the others whole gradients.
        slices = n if chosen.zero == 2 and dim_of(leaf.kept, "data") is not None else 1
        total += leaf.bytes + (leaf.bytes // slices if summed else 0)
    return total


def copies(
    config: ConfigDict, chosen: Strategy, params: Sequence[Leaf], layers: int, n: Sizes
) -> int:
    """Returns about the bytes of parameters as layers compute with them: gathered, and kernels
    in the model's dtype.

    One layer's at a time, and as much of their gradients; those of all layers where the
    backward pass does not make them again. What stands around the layers stays.

    Args:
      config: a whole configuration.
      chosen: the strategy.
      params: parameters as devices hold them.
      layers: that the device computes at once.
      n: devices of each axis.
    """
    model, narrow = config.model, jnp.dtype(config.model.dtype).itemsize / 4
    total = 0.0
    for leaf in params:
        cut, kernel = dim_of(leaf.held, "data") is not None, "kernel" in leaf.path
        if not cut and not (kernel and narrow < 1):
            continue  # used as it is held
        size = leaf.bytes * (n["data"] if cut else 1) * (narrow if kernel else 1)
        if "['block" not in leaf.path:
            total += size
            continue
        of_one = size * n["pipe"] / model.num_layers
        module = "MLP" if "['mlp']" in leaf.path else "Attn"
        again = "Block" in model.remat or (
            chosen.gather_again if cut else module in model.remat
        )
        total += of_one * (2 if again else 2 + layers)
    return int(total)


def activations(config: Any, layers: int, tokens: int, residual: int, n: Sizes) -> int:
    """Returns about what a device keeps inside of its layers, and works on at once.

    Args:
      config: a whole configuration.
      layers: that the device computes at once.
      tokens: that it computes at once.
      residual: bytes of their activation between layers, as the device holds it.
      n: devices of each axis.
    """
    model, shards = config.model, n["tensor"]
    size, width, heads = (
        jnp.dtype(model.dtype).itemsize,
        model.hidden_size,
        model.num_heads * model.head_dim,
    )
    of_attention = 2 * heads + 2 * (model.num_kv_heads or model.num_heads) * model.head_dim
    hidden = KEPT_BY_MLP[model.mlp_activation] * model.mlp_expansion * width
    # Kernels and rings keep no scores.
    fused = model.attention in ("cudnn", "pallas") or n["context"] > 1
    scores = 0 if fused else model.num_heads * config.data.seq_len
    if model.num_experts:
        room = routing.capacity(
            config.data.seq_len,
            model.num_experts,
            model.experts_per_token,
            model.capacity_factor,
        )
        places = model.num_experts * room
        # Each slot has an input and an output; each token is sent to and fetched from places
        # by two masks, in float32 and in the model's dtype.
        hidden = hidden * places / config.data.seq_len
        hidden += 2 * width * places / config.data.seq_len + 2 * places * (4 + size) / size
    # A norm keeps three arrays in float32, and its output, whole; attention its softmax, and a
    # narrow copy to multiply with.
    norm = 3 * 4 * residual // size + tokens * width * size
    inside = {
        "MLP": norm + tokens * hidden * size / shards,
        "Attn": norm + tokens * (of_attention * size + scores * (4 + size)) / shards,
    }
    layer = 2 * residual + sum(inside.values())
    kept = (
        residual
        if "Block" in model.remat
        else layer - sum(inside[name] for name in model.remat)
    )
    # The logits, their softmax and their gradient, in float32.
    logits = 3 * 4 * tokens * model.num_outputs / shards
    # All of one layer, and gradients inside of one of its modules.
    at_work = layer + max(inside.values())
    return int(layers * kept + max(at_work, logits))
