"""Scaled dot-product attention, with several implementations.

Every position takes a weighted mean of values, with weights that are a softmax of products of
queries and keys (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762). The implementation
"reference" stores these weights, B x H x L x L numbers. Flash attention (Dao et al.,
2022, https://arxiv.org/abs/2205.14135) goes through them tile by tile and never stores them.
"""

import ctypes.util
import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from course_lib import arguments
from course_lib.measure import hardware
from course_lib.measure.hardware import Accelerator, GpuTarget
from course_lib.one_device import mixed_precision


class Implementation(NamedTuple):
    """The abilities of an implementation of attention."""

    written_out: bool = False  # in this file; the softmax in a dtype of choice
    fused: bool = False  # one kernel, which never stores the scores
    on_mesh: bool = True  # whether a compiler knows how to divide it over devices
    along_length: bool = False  # also along the sequence
    block: int = 0  # causal queries that attend at once, to the keys that they see; 0: to all


# Queries per block of "blocks". On average it skips half of the keys, less half a block.
BLOCK = 64
IMPLEMENTATIONS = {
    "reference": Implementation(written_out=True, along_length=True),
    # like reference, for one block of queries at a time, without the keys after it
    "blocks": Implementation(written_out=True, block=BLOCK),
    # jax.nn.dot_product_attention, left to XLA
    "xla": Implementation(along_length=True),
    # flash attention of NVIDIA's cuDNN, through jax.nn.dot_product_attention
    "cudnn": Implementation(fused=True),
    # notebook 16's: a kernel on NVIDIA GPUs, the same tiles in JAX elsewhere
    "flash": Implementation(fused=True, on_mesh=False),
}


def why_unavailable(
    implementation: str, accelerator: Accelerator | None, dtype: Any = jnp.float32
) -> str | None:
    """Returns why one of `IMPLEMENTATIONS` does not work with this JAX on an accelerator (None:
    a CPU or an unknown one), and what to do; None if it works.
    """
    arguments.one_of("attention", implementation, IMPLEMENTATIONS)
    hardware.check(accelerator)
    if accelerator is None or not isinstance(accelerator.target, GpuTarget):
        if implementation != "cudnn":  # tiles in JAX stand in for the kernel of "flash"
            return None
        return (
            "cudnn attention needs an NVIDIA GPU that course_lib.measure.hardware knows: use"
            " 'reference' or 'xla' here, or add the GPU's row to"
            " course_lib/measure/hardware/accelerators.toml"
        )
    old = accelerator.target.compute_capability < (8, 0)
    if implementation == "xla" and old and jnp.dtype(dtype) == jnp.bfloat16:
        return (
            f"xla attention asks for products of bfloat16 numbers, and the {accelerator.title}"
            " has no unit for them: use 'reference' or 'blocks', or dtype 'float16'"
        )
    if IMPLEMENTATIONS[implementation].fused and old:
        return (
            f"{implementation} attention needs compute capability 8.0 (A100, A5000 or newer), "
            f"the {accelerator.title} has less: use 'reference' or 'blocks'"
        )
    return _why_not_installed(implementation)


def _why_not_installed(implementation: str) -> str | None:
    if implementation != "cudnn":
        return None
    wheel = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")
    if wheel or ctypes.util.find_library("cudnn"):
        return None
    return "cudnn attention needs cuDNN, also to compile: install jax[cuda13], or use 'xla'"


def stand_in(implementation: str, accelerator: Accelerator | None) -> str | None:
    """Returns a sentence about what runs in place of a kernel, or None if nothing does."""
    if implementation != "flash":
        return None
    reason = _flash().why_no_kernel(accelerator)
    return reason and f"flash attention runs as tiles in JAX, not as a kernel: {reason}"


def _flash() -> Any:
    """Returns the module of notebook 16, which is loaded when a model is traced."""
    from course_lib.smaller_and_faster import flash_attention

    return flash_attention


def errors(
    implementation: str, *, dtype: Any, softmax_dtype: Any, head_dim: int
) -> Iterator[str]:
    """Yields what an implementation cannot do on any accelerator."""
    dtype, softmax_dtype = jnp.dtype(dtype).name, jnp.dtype(softmax_dtype).name
    if softmax_dtype != "float32" and not IMPLEMENTATIONS[implementation].written_out:
        yield (
            f"softmax_dtype={softmax_dtype!r} must be 'float32' for"
            f" attention={implementation!r}; 'reference' and 'blocks' have others"
        )
    if implementation == "cudnn" and dtype not in ("float16", "bfloat16"):
        yield f"dtype={dtype!r} must be 'bfloat16' or 'float16' for attention='cudnn'"
    if implementation == "flash":
        _flash().tile_for(head_dim, dtype)  # refuses heads that are too wide


def attend(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    *,
    causal: bool = True,
    implementation: str = "reference",
    softmax_dtype: Any = jnp.float32,
    window: int = 0,
) -> Float[Array, "B L H K"]:
    """Computes softmax(Q K^T / sqrt(K)) V for every head.

    Args:
      query, key, value: of one dtype. G divides H: H / G consecutive heads of queries read the
        same keys and values.
      causal: whether a position sees only itself and the positions before it.
      implementation: one of `IMPLEMENTATIONS`. All but the first two accumulate and take the
        softmax in float32.
      softmax_dtype: dtype of the scores and of the softmax in "reference" and "blocks".
      window: with `causal`, a position sees itself and `window - 1` before it; 0: all.
    """
    arguments.one_of("attention", implementation, IMPLEMENTATIONS)
    mixed_precision.describe(softmax_dtype, "softmax_dtype")
    _flash().check_arrays(query, key, value)
    _, length, heads, width = query.shape
    asked = dict(dtype=query.dtype, softmax_dtype=softmax_dtype)
    arguments.refuse(errors(implementation, **asked, head_dim=width))
    if reason := _why_not_installed(implementation):
        raise ValueError(f"attention={implementation!r} cannot be had: {reason}")
    if IMPLEMENTATIONS[implementation].written_out:
        if (groups := key.shape[2]) != heads:
            key, value = (jnp.repeat(x, heads // groups, axis=2) for x in (key, value))
        if implementation == "blocks" and causal:
            return _blocks(query, key, value, softmax_dtype, window)
        mask = _past(length, window) if causal else None
        return reference(query, key, value, mask, softmax_dtype)
    if implementation == "flash":
        return _flash().attend(query, key, value, causal=causal, window=window or None)
    options: dict[str, Any] = {"is_causal": causal, "implementation": implementation}
    if window:
        options["local_window_size"] = window - 1, 0
    return jax.nn.dot_product_attention(query, key, value, **options)


def _past(length, window):
    """Returns which keys [1, L] a query [L, 1] sees: its own and those before it."""
    position = jnp.arange(length)
    past = position[:, None] >= position[None, :]
    if window == 0:
        return past
    return past & (position[:, None] - position[None, :] < window)


def reference(query, key, value, mask, softmax_dtype):
    """Computes attention step by step, with all weights [B H L L] in memory. Where the mask is
    False, a query does not see a key.
    """
    dtype, width = query.dtype, query.shape[-1]
    # Scores are sums of K products, and the softmax takes their exponentials: both in
    # softmax_dtype.
    query = query.astype(softmax_dtype) * width**-0.5
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key.astype(softmax_dtype))
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(softmax_dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights, value)


def _blocks(query, key, value, softmax_dtype, window):
    """Computes attention for one block of queries at a time, without the keys after it and
    those before its window.
    """
    length = query.shape[1]
    mask, parts = _past(length, window), []
    for start in range(0, length, BLOCK):
        own = slice(start, start + BLOCK)
        seen = slice(max(0, start - window + 1) if window else 0, start + BLOCK)
        arrays = query[:, own], key[:, seen], value[:, seen], mask[own, seen]
        parts.append(reference(*arrays, softmax_dtype))
    return jnp.concatenate(parts, axis=1)
