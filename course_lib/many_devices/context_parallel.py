"""Context parallelism: each device has a part of every sequence, and keys and values travel
around a ring.

Only attention mixes positions. In *ring attention* (Liu et al., 2023,
https://arxiv.org/abs/2310.01889) each device has the queries, keys and values of its own
positions. Keys and values go around a ring of n devices, and each device attends to the part
that passes by: it never stores the keys of the whole sequence, nor all its scores. The backward
pass sends keys and values around again, together with their gradients.

With a causal mask, early positions see few keys and late ones many. For load balancing
(*zigzag*), the sequence is cut into 2n parts, and device i has parts i and 2n - 1 - i, an early
and a late one (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2; *striped attention* of
Brandon et al., 2023, https://arxiv.org/abs/2311.09431, balances in another order). Four pairs
of parts meet in each step. In each step after the first, every device computes two of them:

    keys of an earlier device    early queries see its early part, late queries too
    keys of a later device       late queries see its early part, and its late part
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from course_lib import arguments
from course_lib.many_devices import collectives
from course_lib.many_devices.axis import Asked, Axis
from course_lib.many_devices.meshes import vary
from course_lib.models.attention import IMPLEMENTATIONS
from course_lib.models.hooks import Hooks

PyTree = Any

AXIS = "context"
LENGTH = 1  # the dimension of tokens [B, L] and activations [B, L, ...] to cut
EARLY, LATE = 0, 1  # the two parts of a device
_PARTS = f"parts of the devices along {AXIS!r}"


def order(length: int, size: int) -> Int[np.ndarray, "n L_n"]:
    """Returns the positions of each device. If a `jax.shard_map` returns logits that are cut
    along the length, their positions have this order.

    Args:
      length: L.
      size: n devices.
    """
    arguments.refuse(arguments.shared("seq_len", length, 2 * size, _PARTS))
    parts = np.arange(length).reshape(2 * size, -1)
    return np.stack([np.concatenate((parts[i], parts[2 * size - 1 - i])) for i in range(size)])


def own(x: Shaped[Array, "..."], dim: int = LENGTH) -> Shaped[Array, "..."]:
    """Takes this device's positions from an array that has all positions along a dimension."""
    by_device = jnp.asarray(order(x.shape[dim], jax.lax.axis_size(AXIS)))
    return jnp.take(vary(x, AXIS), by_device[jax.lax.axis_index(AXIS)], axis=dim)


def attend(
    query: Float[Array, "B L_n H K"],
    key: Float[Array, "B L_n G K"],
    value: Float[Array, "B L_n G K"],
    *,
    causal: bool = True,
    implementation: str = "reference",
    softmax_dtype: Any = jnp.float32,
) -> Float[Array, "B L_n H K"]:
    """Computes `attention.attend` from the queries, keys and values of this device's L / n
    positions. Only "reference" is implemented; softmax and scores are float32, and so are the
    gradients of keys and values that travel.
    """
    arguments.refuse(_not_a_ring(implementation, softmax_dtype))
    batch, length, heads, width = query.shape
    groups = key.shape[2]
    parts = batch, 2, length // 2, groups
    # Keys and values travel as one array.
    both = jnp.stack((key.reshape(*parts, width), value.reshape(*parts, width)))
    return _ring(query.reshape(*parts, heads // groups, width), both, causal).reshape(
        query.shape
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _ring(query: Array, both: Array, causal: bool) -> Array:
    """Attention of queries [B 2 c G H/G K] to keys and values [2 B 2 c G K], in parts of c."""
    return ring_forward(query, both, causal)[0]


def ring_forward(query: Array, both: Array, causal: bool) -> tuple[Array, Any]:
    """Sends keys and values around the ring; returns the output and the residuals."""
    own, n = both, jax.lax.axis_size(AXIS)
    sums = jnp.moveaxis(jnp.zeros_like(query[..., 0], jnp.float32), 2, -1)  # [B 2 G H/G c]
    state = {"out": jnp.zeros_like(query, jnp.float32), "top": sums - jnp.inf, "total": sums}
    for step in range(n):
        arriving = collectives.shift(both, AXIS) if step < n - 1 else both
        for q, k, masked in block_pairs(step, causal):
            of_queries = {name: _part(x, q) for name, x in state.items()}
            key, value = (_part(x, k) for x in both)
            new = online_softmax(of_queries, _part(query, q), key, value, masked)
            state = {name: _put(state[name], q, new[name]) for name in state}
        # The next transfer waits for these products. Else all transfers could come first, and
        # all parts would be in memory at once.
        both, state = jax.lax.optimization_barrier((arriving, state))
    out = (state["out"] / _beside(state["total"])).astype(query.dtype)
    return out, (query, own, out, state["top"] + jnp.log(state["total"]))


def online_softmax(
    state: PyTree, query: Array, key: Array, value: Array, masked: bool
) -> PyTree:
    """Adds the attention of queries [B c G H/G K] to keys and values [B c G K] to the state, an
    online softmax.

    The largest score so far is subtracted from all scores, so that no exponential overflows.
    When a larger one arrives, the sums are scaled down (Milakov and Gimelshein, 2018,
    https://arxiv.org/abs/1805.02867).
    """
    scores = _scores(query, key, masked)
    top = jnp.maximum(state["top"], scores.max(axis=-1))
    weights, scale = jnp.exp(scores - top[..., None]), jnp.exp(state["top"] - top)
    seen = _product("bgrqs,bsgk->bqgrk", weights.astype(value.dtype), value)
    total = state["total"] * scale + weights.sum(axis=-1)
    return {"out": state["out"] * _beside(scale) + seen, "top": top, "total": total}


def ring_backward(causal: bool, residuals: Any, gradient: Array) -> tuple[Array, Array]:
    """Sends keys and values around again, with the sum of their gradients. The sum ends on the
    device that owns the keys.
    """
    query, both, out, log_total = residuals
    n, width = jax.lax.axis_size(AXIS), query.shape[-1]
    mean = jnp.moveaxis(
        (gradient.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1), 2, -1
    )
    of_query, of_both = jnp.zeros_like(query, jnp.float32), jnp.zeros_like(both, jnp.float32)
    for step in range(n):
        arriving = collectives.shift(both, AXIS) if step < n - 1 else both
        new = jnp.zeros_like(of_both)
        for q, k, masked in block_pairs(step, causal):
            some, seen, (key, value) = (
                _part(query, q),
                _part(gradient, q),
                (_part(x, k) for x in both),
            )
            weights = jnp.exp(_scores(some, key, masked) - _part(log_total, q)[..., None])
            of_weights = _product("bqgrk,bsgk->bgrqs", seen, value) - _part(mean, q)[..., None]
            of_scores = (weights * of_weights * width**-0.5).astype(query.dtype)
            of_query = _put(
                of_query, q, _part(of_query, q) + _product("bgrqs,bsgk->bqgrk", of_scores, key)
            )
            of_key = _product("bgrqs,bqgrk->bsgk", of_scores, some)
            of_value = _product("bgrqs,bqgrk->bsgk", weights.astype(query.dtype), seen)
            new = jnp.stack(
                [
                    _put(x, k, _part(x, k) + y)
                    for x, y in zip(new, (of_key, of_value), strict=True)
                ]
            )
        both, new, of_query, of_both = jax.lax.optimization_barrier(
            (arriving, new, of_query, of_both)
        )
        of_both = collectives.shift(of_both + new, AXIS)
    return of_query.astype(query.dtype), of_both.astype(both.dtype)


_ring.defvjp(ring_forward, ring_backward)


def block_pairs(step: int, causal: bool) -> list[tuple[Any, Any, bool]]:
    """Lists the pairs of parts (queries, keys) to compute with keys from `step` devices before,
    and whether the causal mask hides half of a pair.
    """
    if not causal:
        return [(q, k, False) for q in (EARLY, LATE) for k in (EARLY, LATE)]
    if step == 0:
        return [(EARLY, EARLY, True), (LATE, EARLY, False), (LATE, LATE, True)]
    # The keys came from an earlier device, or from a later one.
    same = jnp.where(jax.lax.axis_index(AXIS) >= step, EARLY, LATE)
    return [(LATE, EARLY, False), (same, same, False)]


def _scores(query: Array, key: Array, masked: bool) -> Array:
    """Returns scores [B G H/G c c] in float32. If `masked`, a query sees no later key."""
    scores = _product("bqgrk,bsgk->bgrqs", query, key) * query.shape[-1] ** -0.5
    if not masked:
        return scores
    past = jnp.tri(scores.shape[-1], dtype=bool)
    return jnp.where(past[None, None, None], scores, -jnp.inf)


def _product(dims: str, a: Array, b: Array) -> Array:
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)


def _part(x: Array, index: Any) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)


def _put(x: Array, index: Any, part: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, axis=1)


def _beside(x: Array) -> Array:
    """Moves one number per query from the axes of scores, [... G H/G c], to the axes of values,
    [... c G H/G 1].
    """
    return jnp.moveaxis(x, -1, -3)[..., None]


def positions(length: int) -> Int[Array, "L_n"]:
    """Returns this device's positions in a sequence of n x `length`."""
    return own(jnp.arange(length * jax.lax.axis_size(AXIS)), dim=0)


def errors(asked: Asked) -> Iterator[str]:
    """Yields what a model and a mesh must not ask of the axis."""
    size, hand, model = asked.n[AXIS], asked.by_hand, asked.model
    if "pipe" in asked.n:
        yield (
            f"mesh={dict(asked.n)} must not have both 'context' and 'pipe': stages do different"
            " work at the same time, so devices of a ring would wait for each other forever"
        )
    if asked.strategy.sequence:
        yield (
            "sequence=True must not come with a mesh axis 'context', which divides the sequence"
            " already"
        )
    if hand:
        yield from _not_a_ring(model.attention, model.softmax_dtype)
    elif not IMPLEMENTATIONS[model.attention].along_length:
        yield (
            f"attention={model.attention!r} must be 'reference' or 'xla' with a mesh axis"
            " 'context' and by='compiler', which cannot divide a kernel"
        )
    parts = 2 * size if hand else size
    yield from arguments.shared("seq_len", asked.config.data.seq_len, parts, _PARTS)


def _not_a_ring(implementation: str, softmax_dtype: Any) -> Iterator[str]:
    dtype = jnp.dtype(softmax_dtype)
    if implementation != "reference" or dtype != jnp.float32:
        yield (
            f"attention={implementation!r}, softmax_dtype={dtype.name!r} must be 'reference'"
            f" and 'float32' with a mesh axis {AXIS!r}: ring attention replaces the kernel"
        )


CONTEXT = Axis(
    AXIS,
    errors,
    activations={"length": AXIS, "positions": AXIS},
    hooks=lambda share: Hooks(attend=attend, positions=positions, attend_positions=positions),
    own=own,
)
