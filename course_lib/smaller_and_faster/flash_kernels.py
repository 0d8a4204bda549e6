"""Flash attention's three kernels, in JAX's Pallas for its Triton backend.

A kernel is a program for one tile of the result; the GPU runs it once per cell of a grid. A
`Ref` points into the GPU's memory: `ref[rows, :]` loads a tile into shared memory and
registers, `ref[...] = x` stores one. All else stays on the chip: the scores never reach the
memory (Dao et al., 2022, https://arxiv.org/abs/2205.14135; the loops are those of
FlashAttention-2, Dao, 2023, https://arxiv.org/abs/2307.08691).

Import it where it is called: Pallas takes a while to import.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from course_lib.measure import virtual
from course_lib.smaller_and_faster.flash_attention import hide, width_in_kernel

WARPS = 4  # of 32 threads, per tile
STAGES = 2  # tiles of a loop that are loaded while others are computed


def product(a: Any, b: Any) -> Any:
    """Multiplies two tiles, and adds up in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def scores(q, k, i, j, tiling, keys=None, queries=None):
    """Computes the scores of tile i of queries and tile j of keys, hidden where masked."""
    return hide(product(q, k.T) * tiling.scale, i, j, tiling, keys, queries)


def reach(span_ref, axis, tile, without):
    """Returns the spans of the cell's own positions, a column (axis 1) or a row (axis 0), and
    the tiles that they touch, from the first to the one after the last.
    """
    if span_ref is None:
        return None, without
    first, last = (jnp.expand_dims(span_ref[:, end], axis) for end in (0, 1))
    return (first, last), (first.min() // tile, last.max() // tile + 1)


def forward_kernel(q_ref, k_ref, v_ref, span_ref, out_ref, logsumexp_ref, *, tiling):
    """Computes one tile of queries: a loop over keys and values, with the online softmax."""
    q, i = q_ref[...], pl.program_id(0)
    tile, width = q.shape
    end = i + 1 if tiling.causal else k_ref.shape[0] // tile  # later tiles are hidden entirely
    keys, (begin, end) = reach(span_ref, 1, tile, (0, end))

    def step(j, state):
        top, total, out = state
        rows = pl.ds(j * tile, tile)
        s = scores(q, k_ref[rows, :], i, j, tiling, keys)
        new_top = jnp.maximum(top, s.max(axis=1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(s - new_top[:, None])
        v = v_ref[rows, :]
        out = out * shrink[:, None] + product(weights.astype(v.dtype), v)
        return new_top, total * shrink + weights.sum(axis=1), out

    float32 = functools.partial(jnp.full, dtype=jnp.float32)
    state = float32((tile,), -jnp.inf), float32((tile,), 0.0), float32((tile, width), 0.0)
    top, total, out = lax.fori_loop(begin, end, step, state)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    logsumexp_ref[...] = top + jnp.log(total)


def query_gradient_kernel(
    q_ref, k_ref, v_ref, span_ref, d_out_ref, logsumexp_ref, delta_ref, d_q_ref, *, tiling
):
    """Computes the gradient of one tile of queries: a loop over tiles of keys and values."""
    q, d_out, i = q_ref[...], d_out_ref[...], pl.program_id(0)
    logsumexp, delta = logsumexp_ref[...][:, None], delta_ref[...][:, None]
    tile, width = q.shape
    end = i + 1 if tiling.causal else k_ref.shape[0] // tile
    keys, (begin, end) = reach(span_ref, 1, tile, (0, end))

    def step(j, d_q):
        rows = pl.ds(j * tile, tile)
        k = k_ref[rows, :]
        weights = jnp.exp(scores(q, k, i, j, tiling, keys) - logsumexp)
        d_scores = weights * (product(d_out, v_ref[rows, :].T) - delta)
        return d_q + product(d_scores.astype(k.dtype), k)

    d_q = lax.fori_loop(begin, end, step, jnp.zeros((tile, width), jnp.float32))
    d_q_ref[...] = (d_q * tiling.scale).astype(d_q_ref.dtype)


def key_value_gradient_kernel(
    q_ref,
    k_ref,
    v_ref,
    span_ref,
    d_out_ref,
    logsumexp_ref,
    delta_ref,
    d_k_ref,
    d_v_ref,
    *,
    tiling,
):
    """Computes the gradients of one tile of keys and values: a loop over all queries."""
    k, v, j = k_ref[...], v_ref[...], pl.program_id(0)
    tile, width = k.shape
    length, heads, _ = q_ref.shape
    begin = j if tiling.causal else 0  # earlier queries do not see these keys
    queries, (begin, end) = reach(span_ref, 0, tile, (begin, length // tile))

    def head(h, gradients):
        def step(i, gradients):
            d_k, d_v = gradients
            rows = pl.ds(i * tile, tile)
            q, d_out = q_ref[rows, h, :], d_out_ref[rows, h, :]
            s = scores(q, k, i, j, tiling, queries=queries)
            weights = jnp.exp(s - logsumexp_ref[h, rows][:, None])
            d_scores = weights * (product(d_out, v.T) - delta_ref[h, rows][:, None])
            d_k = d_k + product(d_scores.astype(q.dtype).T, q)
            return d_k, d_v + product(weights.astype(q.dtype).T, d_out)

        return lax.fori_loop(begin, end, step, gradients)

    zeros = jnp.zeros((tile, width), jnp.float32)
    d_k, d_v = lax.fori_loop(0, heads, head, (zeros, zeros))
    d_k_ref[...] = (d_k * tiling.scale).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def forward(query, key, value, span=None, *, tiling, interpret=False):
    """Returns the attended values in the query's dtype, and in float32 the logsumexp of each
    query's scores. With `interpret`, Pallas runs the kernel as plain JAX, on any device.
    """
    (B, L, H, width), tile, group = query.shape, tiling.tile, query.shape[2] // key.shape[2]
    query, key, value = map(_widen, (query, key, value))
    K = query.shape[-1]
    out, logsumexp = _call(
        forward_kernel,
        (query, key, value, span and span[0]),
        grid=(L // tile, H, B),
        in_specs=[_own(tile, K), *[_all(L, K, group)] * 2, span and _own_span(tile)],
        out_specs=[_own(tile, K), _own_numbers(tile)],
        out_shape=[query, jax.ShapeDtypeStruct((B, H, L), jnp.float32)],
        products=2,
        tiling=tiling,
        interpret=interpret,
    )
    return out[..., :width], logsumexp


def backward(query, key, value, span, logsumexp, delta, d_out, *, tiling, interpret=False):
    """Returns the gradients of query, key and value. Both kernels compute the scores again.

    `logsumexp` is from `forward`, `delta` the sum of out * d_out over the width of each head.
    """
    (B, L, H, width), G, tile = query.shape, key.shape[2], tiling.tile
    query, key, value, d_out = map(_widen, (query, key, value, d_out))
    K, group = query.shape[-1], H // G
    of_keys, of_queries = span or (None, None)
    own, numbers, own_span = _own(tile, K), _own_numbers(tile), span and _own_span(tile)
    call = functools.partial(_call, tiling=tiling, interpret=interpret)
    d_query = call(
        query_gradient_kernel,
        (query, key, value, of_keys, d_out, logsumexp, delta),
        grid=(L // tile, H, B),
        in_specs=[own, *[_all(L, K, group)] * 2, own_span, own, numbers, numbers],
        out_specs=own,
        out_shape=query,
        products=3,
    )
    heads = pl.BlockSpec((None, L, group, K), lambda j, g, b: (b, 0, g, 0))
    their_numbers = pl.BlockSpec((None, group, L), lambda j, g, b: (b, g, 0))
    d_key, d_value = call(
        key_value_gradient_kernel,
        (query, key, value, of_queries, d_out, logsumexp, delta),
        grid=(L // tile, G, B),
        in_specs=[heads, own, own, own_span, heads, their_numbers, their_numbers],
        out_specs=[own, own],
        out_shape=[key, value],
        products=4,
    )
    return d_query[..., :width], d_key[..., :width], d_value[..., :width]


def _widen(array: Any) -> Any:
    """Fills heads up with zeros, which change no score: Triton's tiles are powers of two."""
    more = width_in_kernel(array.shape[-1]) - array.shape[-1]
    return jnp.pad(array, [(0, 0)] * 3 + [(0, more)]) if more else array


def _own(tile: int, width: int) -> pl.BlockSpec:
    """Describes a program's own tile of [B L H K]: grid cell (i, h, b) has tile i of head h."""
    return pl.BlockSpec((None, tile, None, width), lambda i, h, b: (b, i, h, 0))


def _own_numbers(tile: int) -> pl.BlockSpec:
    """Describes its own tile of [B H L], one number per query."""
    return pl.BlockSpec((None, None, tile), lambda i, h, b: (b, h, i))


def _own_span(tile: int) -> pl.BlockSpec:
    """Describes its own tile of [B L 2], the same for all heads."""
    return pl.BlockSpec((None, tile, 2), lambda i, h, b: (b, i, 0))


def _all(length: int, width: int, group: int) -> pl.BlockSpec:
    """Describes all keys that head h reads; `group` heads in a row read the same."""
    return pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h // group, 0))


def _call(kernel, arrays, *, products, tiling, interpret, **call):
    """Runs a kernel, with its cost: the compiler cannot look inside."""
    (B, L, H, K), pairs = arrays[0].shape, len(tiling.pairs(arrays[0].shape[1])[0])
    if L % tiling.tile:
        raise ValueError(f"tile={tiling.tile} must divide the {L} positions: pad the sequences")
    scores = B * H * pairs * tiling.tile**2  # that are computed, if documents hide no more
    shapes = jax.tree.leaves((arrays, call["out_shape"]))
    cost = pl.CostEstimate(
        flops=2 * products * scores * K,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in shapes),
    )
    with virtual.triton_without_gpu():
        return pl.pallas_call(
            functools.partial(kernel, tiling=tiling),
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
            cost_estimate=cost,
            interpret=interpret,
            name=kernel.__name__,
            **call,
        )(*arrays)
