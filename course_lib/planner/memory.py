"""Bytes that a device holds: parameters by what is kept of them, and one list of arrays per
layer.

Two habits. A framework keeps 16-bit inputs of products and norms. This course, as XLA compiles
it, keeps norms in float32 as well, and scores.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from ml_collections import ConfigDict

from course_lib import arguments
from course_lib.planner.plan import Step

# Arrays of the hidden width that the backward pass of an MLP reads, as compiled. The result of
# a comparison counts as half an array. A gate adds both factors of its product.
KEPT_BY_MLP = {"gelu": 6, "squared_relu": 2.5, "silu": 4}
FRAMEWORK_RECOMPUTE = ("none", "selective", "block")  # of `plan.RECOMPUTED`, the least first


class Kept(NamedTuple):
    """Bytes of activations, for one microbatch on one device."""

    residual: float  # between two layers
    attention: float  # inside of a layer's module
    mlp: float
    logits: float  # what the output layer works on
    outside: float = 0.0  # what a layer keeps beside its modules
    narrow: float = 0.0  # of attention: the softmax as its product reads it

    @property
    def layer(self) -> float:
        return self.outside + self.attention + self.mlp


def of_framework(step: Step) -> dict[str, float]:
    """Returns the bytes that a device holds at the peak of a step: a rough formula, which was
    not compared with measurements.

    Parameters (bfloat16) are divided along "fsdp", "pipe" and "tensor"; gradients too, and over
    all their copies with stage 2 of ZeRO. Gradients take 4 bytes, or `plan.gradient_bytes`
    without `plan.float32_gradients`. A float32 copy and two moments, 12 bytes per parameter,
    are divided over all copies with stages 1 and 2. The first stage of a pipeline has the
    embedding, the last one the output layer. With "fsdp", two layers, embedding and output
    layer are whole ("copies").

    Activations are those of Korthikanti et al. (2022, https://arxiv.org/abs/2205.05198, section
    4), without dropout: in 16 bits the inputs of a layer's products and norms, and what a fused
    kernel keeps; the softmax only if it goes to memory, and not of a ring, which computes its
    scores again. They are divided along "tensor" with `plan.sequence_parallel`, else not. Of p
    pipeline stages with v chunks, the first keeps the activations of p + (p - 1) / v
    microbatches (p with one chunk), the last those of p - (p - 1) / v, and the logits, 6 bytes
    each.
    """
    return recomputing(step)(step.plan.recompute, step.plan.recompute_share)


def recomputing(step: Step) -> Callable[[str, float], dict[str, float]]:
    """Returns the bytes of `of_framework` for any recomputation, and any share of the layers
    that do it. A search tries many.
    """
    shape, plan = step.shape, step.plan
    if shape.experts:
        raise ValueError(f"shape.experts={shape.experts} must be 0: no layout has 'expert'")
    p, f, t, v = (plan.size("pipe"), plan.size("fsdp"), plan.size("tensor"), plan.chunks)
    copies = math.prod(plan.axes.values()) / (f * p * t)
    gradient = 4 if plan.float32_gradients else plan.gradient_bytes
    # without a schedule of this course: the stage's own table
    tables = shape.vocab * shape.width * (1 if shape.tied or p > 1 else 2)
    numbers = (step.stage_layers * shape.layer + tables) / (f * t)
    whole = 2 * shape.layer + (1 if shape.tied else 2) * shape.vocab * shape.width

    cut = t if plan.sequence_parallel else 1
    T, D, q = step.tokens, shape.width, shape.heads * shape.head_dim
    fused = plan.fused_attention or plan.size("context") > 1
    softmax = 0.0 if fused else 2.0 * shape.heads * shape.seq_len * T / cut
    kept = Kept(
        2 * D * T / cut,
        4 * (D + q + shape.kv_width) * T / cut + softmax,  # norm, q, k and v, their result
        2 * (2 * D + shape.matrices * shape.mlp) * T / cut,  # norm; before, after activation
        6 * shape.vocab * T / t,
    )
    # what each layer keeps; and what the layer that is computed again has besides
    ways = {
        "none": (kept.layer, 0.0),
        "selective": (kept.layer - softmax, softmax),
        "block": (kept.residual, kept.layer),
    }
    first = p if v == 1 else p + (p - 1) / v  # microbatches at once, on the first stage
    waiting = [
        step.stage_layers * min(plan.microbatches, many) for many in (first, p - (p - 1) / v)
    ]
    state = {
        "parameters": 2 * numbers,
        "optimizer": 12 * numbers / (copies if plan.zero else 1),
        "gradients": gradient * numbers / (copies if plan.zero == 2 else 1),
        "copies": 2 * whole / t if f > 1 else 0.0,
    }

    def held(recompute: str, share: float) -> dict[str, float]:
        arguments.one_of("recompute", recompute, FRAMEWORK_RECOMPUTE)
        per_layer, working = ways[recompute]
        per_layer += (1 - share) * (kept.layer - per_layer)
        first, last = (many * per_layer + working for many in waiting)
        return {**state, "activations": max(first, last + kept.logits)}

    return held


def compiled(step: Step, model: ConfigDict) -> Kept:
    """Arrays that this course's step keeps, as XLA compiles it."""
    shape, plan, size = step.shape, step.plan, jnp.dtype(step.plan.dtype).itemsize
    t, T, D = plan.size("tensor"), int(step.tokens), shape.width
    residual = T * D * size // (t if plan.sequence_parallel else 1)
    hidden = (KEPT_BY_MLP[model.mlp_activation] + 2 * model.mlp_gate) * shape.mlp
    if model.mlp_gate and {"MLP", "Block"} & set(model.remat):
        # Computed again and used at once, a gate adds only the result of its product: XLA fuses
        # the rest into what reads it.
        hidden = shape.matrices * shape.mlp
    if shape.experts:
        # A slot has an input and an output. Two masks, in float32 and in the model's dtype,
        # send each token to its slots and fetch it.
        masks = 2 * shape.seq_len * (4 + size) / size
        hidden = shape.slots * (hidden + 2 * D + masks)
    # Fused kernels and rings keep no scores.
    fused = plan.fused_attention or plan.size("context") > 1
    scores = 0 if fused else shape.heads * step.keys
    heads = 2 * shape.heads * shape.head_dim + 2 * shape.kv_width
    # A norm keeps three arrays in float32, and its output, undivided; attention keeps its
    # softmax, and a narrow copy of it.
    norm = 3 * 4 * residual // size + T * D * size
    # The logits, their softmax and their gradient, in float32. With several chunks, those of
    # one chunk, and a float32 sum over chunks.
    logits = 3 * 4 * T * shape.vocab / t / model.loss_chunks
    if model.loss_chunks > 1:
        logits += 4 * D * (T if model.loss_along == "vocabulary" else shape.vocab / t)
    return Kept(
        residual,
        norm + T * (heads * size + scores * (4 + size)) / t,
        norm + T * hidden * size / t,
        logits,
        2 * residual,
        T * scores * size / t,
    )


def activations(
    step: Step, model: ConfigDict, waiting: Mapping[str, int] | None
) -> int | float:
    """The arrays that the backward pass reads, and those in use at once. `waiting`: in a
    pipeline, the number of slots in each buffer (`slots.Program.sizes`).
    """
    shape, plan, kept = step.shape, step.plan, compiled(step, model)
    gone = {"MLP": kept.mlp, "Attn": kept.attention}
    per_layer = kept.layer - sum(gone.get(name, 0.0) for name in set(model.remat))
    if "Block" in model.remat:
        per_layer = kept.residual
    # Everything of one layer, and the gradients inside of one of its modules. If the MLP is the
    # last one, its arrays are gone before those of attention, and the gradient of the softmax
    # takes the place of its narrow copy.
    used = kept.mlp + kept.narrow if model.attention_first else 0.0
    at_work = max(kept.layer + max(kept.attention - used, kept.mlp), kept.logits)
    layers = shape.layers // plan.size("pipe") // plan.chunks
    if waiting is None:
        return layers * per_layer + at_work
    # The gradients of the products' results wait from B to W. So do the products' inputs,
    # where B recomputed them, and gathered gradients of both row products.
    t, D, q = plan.size("tensor"), shape.width, shape.heads * shape.head_dim
    array = int(step.tokens) * jnp.dtype(plan.dtype).itemsize
    again = {"MLP", "Attn"} if "Block" in model.remat else set(model.remat)
    passed = (
        4 * kept.residual
        + array * ((shape.matrices - 1) * shape.mlp + q + 2 * shape.kv_width) / t
    )
    passed += 2 * array * D * plan.sequence_parallel
    passed += array * sum(D + {"MLP": shape.mlp, "Attn": q}[name] / t for name in again)
    between = kept.residual * (waiting["inbox"] + waiting["gradient"] + waiting["stash"] + 2)
    inside = waiting["stash"] * per_layer + waiting["passed"] * passed
    return between + layers * inside + at_work


def of_course(
    step: Step, config: ConfigDict, waiting: Mapping[str, int] | None
) -> dict[str, int]:
    """Returns the bytes of a step of this course. "copies" are the gathered parameters that
    layers compute with, kernels in the model's dtype: those of one layer, or of all where the
    backward pass does not make them again. Stage 2 of ZeRO never holds all gradients at once.
    If its update holds more than the backward pass, "copies" are the new parameters.
    """
    plan, remat, piped = step.plan, config.model.remat, waiting is not None
    of_sum = jnp.dtype(config.training.accumulator_dtype).itemsize
    size = jnp.dtype(plan.dtype).itemsize
    layers = step.shape.layers // plan.size("pipe")
    gradients, copies, waits, new = 0, 0.0, 0, 0
    for leaf in step.leaves:
        stored = int(leaf.numbers * leaf.stored)
        summed = stored * of_sum // leaf.stored
        if piped:  # adds each layer's gradient to the sum as soon as it is computed
            gradients += summed + stored // (layers if leaf.inside else 1)
        else:
            sliced = plan.zero == 2 and leaf.zero and plan.microbatches > 1
            slices = plan.size("data") if sliced else 1
            gradients += summed // slices if plan.microbatches > 1 else 0
            waits += stored // (layers if sliced and leaf.inside else 1)
            new += stored if sliced else 0
        if leaf.fsdp == 1 and not (leaf.kernel and size < leaf.stored):
            continue  # used as it is
        whole = stored * leaf.fsdp * (size / leaf.stored if leaf.kernel else 1)
        again = plan.gather_again if leaf.fsdp > 1 else leaf.module in remat
        if leaf.inside:  # in a pipeline each operation casts for itself
            again = again or piped or "Block" in remat
            whole *= (2 if again else 2 + layers // plan.chunks) / layers
        copies += whole
    kept = int(activations(step, config.model, waiting))
    if new > waits + copies + kept:
        waits, copies, kept = 0, new, 0
    return {"gradients": gradients + waits, "copies": int(copies), "activations": kept}
