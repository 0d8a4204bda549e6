"""The formulas of `estimate`: what one device holds, sends and computes in a step that is written by hand.

Beside each other they read (R: an activation [b L D] of all sequences of a device, in the model's dtype; n: devices of the
axis; an all-reduce sends 2 (n-1)/n of an array, an all-gather or a reduce-scatter half of that):

    data      an all-reduce of the gradients; with ZeRO 1 and 2 a reduce-scatter of them, and an all-gather of the new
              parameters; with ZeRO 3 one of what was computed with, once more for the kernels of layers
    tensor    for each pair of products an all-reduce of R forward, one backward, and one where it is computed again;
              around the layers one of R, and one of the embedding in float32; a few numbers for each label
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import accumulation, measure, training
from course_lib.hardware import Accelerator
from course_lib.parallel.options import Strategy
from course_lib.parallel.sharding import dim_of

PyTree = Any
Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter: its path, the bytes of it that a device holds, and the specs of it and of its gradient."""

    path: str
    bytes: int
    held: P
    kept: P


def leaves(params: PyTree, held: PyTree, kept: PyTree, n: Sizes) -> list[Leaf]:
    """Lists parameters as devices hold them."""
    places = zip(*(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)) for specs in (held, kept)), strict=True)
    found = []
    for (path, leaf), (place, of_gradient) in zip(jax.tree_util.tree_leaves_with_path(params), places, strict=True):
        size = leaf.size * leaf.dtype.itemsize // math.prod(n[axis] for axis in place if axis)
        found.append(Leaf(jax.tree_util.keystr(path), size, place, of_gradient))
    return found


def sent_for_gradients(config: ConfigDict, chosen: Strategy, params: Sequence[Leaf], n: int) -> float:
    """Returns the bytes that a device sends along "data"."""
    times = config.training.num_minibatches if chosen.zero >= 2 else 1  # the other stages send once for all
    narrow = jnp.dtype(config.model.dtype).itemsize / 4
    total = 0.0
    for leaf in params:
        if dim_of(leaf.held, "data") is not None:
            kernel = "kernel" in leaf.path
            again = "Block" in config.model.remat or (kernel and chosen.gather_again)
            gathers = 1 + ("['block" in leaf.path and again)
            total += times * (gathers + 1) * leaf.bytes * n * (narrow if kernel else 1)
        elif dim_of(leaf.kept, "data") is not None:
            total += (times + 1) * leaf.bytes
        else:
            total += times * 2 * leaf.bytes
    return (n - 1) / n * total


def sent_inside_layers(
    config: ConfigDict, chosen: Strategy, params: Sequence[Leaf], n: Sizes, parts: int, piped: bool
) -> float:
    """Returns the bytes that a device sends along "tensor"; of a pipeline, as if each stage had embedding and head."""
    model, tokens = config.model, config.data.batch_size // n["data"] * config.data.seq_len
    pairs = 1 if model.parallel_block else 2
    # Computed again is all but what the backward pass does not need, the last sum of what is rematerialized.
    if "Block" in model.remat:
        again = pairs - (0.5 if chosen.sequence else 1)
    elif chosen.zero == 3 and chosen.gather_again:  # keeps nothing that was gathered, along "tensor" neither
        again = 0.5 * pairs * chosen.sequence
    else:
        again = 0.5 * len({"MLP", "Attn"} & set(model.remat)) * chosen.sequence
    layers = model.num_layers // n["pipe"] * (2 * pairs + again + piped * pairs)
    head = 1.5 if piped and chosen.sequence else 1
    width = jnp.dtype(model.dtype).itemsize
    total = tokens * (model.hidden_size * ((layers + head) * width + 4) + 4 * (6 if piped else 4))
    for leaf in params:  # what all devices use, each for its part of the sequence, or for its heads
        of_all = chosen.sequence or "query_norm" in leaf.path or "key_norm" in leaf.path
        if of_all and dim_of(leaf.held, "tensor") is None:
            total += parts * leaf.bytes * (n["data"] if dim_of(leaf.held, "data") is not None else 1)
    return 2 * (n["tensor"] - 1) / n["tensor"] * total


def activations(config: Any, tokens: int, residual: int, n: Sizes) -> int:
    """Returns about what a device keeps inside of its layers, and works on at once.

    Args:
      config: a whole configuration.
      tokens: that the device computes at once.
      residual: bytes of their activation between layers, as the device holds it.
      n: devices of each axis.
    """
    model = config.model
    size, t = jnp.dtype(model.dtype).itemsize, n["tensor"]
    width, heads = model.hidden_size, model.num_heads * model.head_dim
    of_attention = 2 * heads + 2 * (model.num_kv_heads or model.num_heads) * model.head_dim
    scores = 0 if model.attention in ("cudnn", "pallas") else model.num_heads * config.data.seq_len
    # A normalized input, whole; what the products make of it; scores and softmax in float32, and what multiplies the values.
    inside = {
        "MLP": (width + 2 * model.mlp_expansion * width / t) * size,
        "Attn": (width + of_attention / t) * size + scores / t * (8 + size),
    }
    layer = 2 * residual + tokens * sum(inside.values())
    kept = residual if "Block" in model.remat else layer - tokens * sum(inside[name] for name in model.remat)
    logits = 3 * 4 * tokens * model.num_outputs / t  # with their softmax and their gradient
    return int(model.num_layers // n["pipe"] * kept + max(2 * layer, logits))


def products(config: FrozenConfigDict, accelerator: Accelerator, n: Sizes, piped: bool) -> tuple[float, float]:
    """Returns seconds of products at the peak rate: a device's share of the model's, and all that the busiest device does."""
    of_model, again, of_head = (
        measure.mfu(measure.Flops({config.model.dtype: count}, {}), 1.0, accelerator) or 0.0 for count in flops(config)
    )
    layers = of_model - of_head + again
    if piped:  # a stage runs once more, from its stashed input; the head is on one of them
        layers, of_head = layers + (of_model - of_head) / 3, of_head * 4 / 3
    sequences = config.data.batch_size / n["data"] / n["tensor"]
    return sequences * of_model / n["pipe"], sequences * (layers / n["pipe"] + of_head)


@functools.cache
def flops(config: FrozenConfigDict) -> tuple[int, int, int]:
    """Returns the FLOPs of one sequence's gradient that the model needs, that are recomputed, and the output layer's.

    All in the model's dtype, as kernels of attention compute them; "reference" has its scores in float32.
    """
    one = ConfigDict(config.to_dict())
    one.data.batch_size = one.training.num_minibatches = 1
    one.model.attention = "reference"
    run = training.build(one)
    state, batch = run.abstract()
    found = measure.flops(accumulation.gradient(run.loss_fn), state.params, batch, state.rng)
    head = 3 * 2 * one.data.seq_len * one.model.hidden_size * one.model.num_outputs
    return sum(found.model.values()), sum(found.recomputed.values()), head
