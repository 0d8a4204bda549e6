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
from jaxtyping import Array, Float

from course_lib.measure import virtual

WARPS = 4  # of 32 threads, per tile
STAGES = 2  # tiles of a loop that are loaded while others are computed


def product(a: Any, b: Any) -> Any:
    """Multiplies two tiles, and adds up in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def scores(q: Any, k: Any, i: Any, j: Any, causal: bool) -> Any:
    """Computes the scores of tile i of queries and tile j of keys; -inf where masked."""
    tile, width = q.shape
    s = product(q, k.T) * width**-0.5
    if not causal:
        return s
    row, column = i * tile + jnp.arange(tile), j * tile + jnp.arange(tile)
    return jnp.where(row[:, None] >= column[None, :], s, -jnp.inf)


def forward_kernel(q_ref, k_ref, v_ref, out_ref, logsumexp_ref, *, causal):
    """Computes one tile of queries: a loop over keys and values, with the online softmax."""
    q, i = q_ref[...], pl.program_id(0)
    tile, width = q.shape

    def step(j, state):
        top, total, out = state
        rows = pl.ds(j * tile, tile)
        s = scores(q, k_ref[rows, :], i, j, causal)
        new_top = jnp.maximum(top, s.max(axis=1))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(s - new_top[:, None])
        v = v_ref[rows, :]
        out = out * shrink[:, None] + product(weights.astype(v.dtype), v)
        return new_top, total * shrink + weights.sum(axis=1), out

    float32 = functools.partial(jnp.full, dtype=jnp.float32)
    state = float32((tile,), -jnp.inf), float32((tile,), 0.0), float32((tile, width), 0.0)
    end = i + 1 if causal else k_ref.shape[0] // tile  # later tiles are masked entirely
    top, total, out = lax.fori_loop(0, end, step, state)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    logsumexp_ref[...] = top + jnp.log(total)


def query_gradient_kernel(
    q_ref, k_ref, v_ref, d_out_ref, logsumexp_ref, delta_ref, d_q_ref, *, causal
):
    """Computes the gradient of one tile of queries: a loop over tiles of keys and values."""
    q, d_out, i = q_ref[...], d_out_ref[...], pl.program_id(0)
    logsumexp, delta = logsumexp_ref[...][:, None], delta_ref[...][:, None]
    tile, width = q.shape

    def step(j, d_q):
        rows = pl.ds(j * tile, tile)
        k = k_ref[rows, :]
        weights = jnp.exp(scores(q, k, i, j, causal) - logsumexp)
        d_scores = weights * (product(d_out, v_ref[rows, :].T) - delta)
        return d_q + product(d_scores.astype(k.dtype), k)

    end = i + 1 if causal else k_ref.shape[0] // tile
    d_q = lax.fori_loop(0, end, step, jnp.zeros((tile, width), jnp.float32))
    d_q_ref[...] = (d_q * width**-0.5).astype(d_q_ref.dtype)


def key_value_gradient_kernel(
    q_ref, k_ref, v_ref, d_out_ref, logsumexp_ref, delta_ref, d_k_ref, d_v_ref, *, causal
):
    """Computes the gradients of one tile of keys and values: a loop over all queries."""
    k, v, j = k_ref[...], v_ref[...], pl.program_id(0)
    tile, width = k.shape
    length, heads, _ = q_ref.shape

    def head(h, gradients):
        def step(i, gradients):
            d_k, d_v = gradients
            rows = pl.ds(i * tile, tile)
            q, d_out = q_ref[rows, h, :], d_out_ref[rows, h, :]
            weights = jnp.exp(scores(q, k, i, j, causal) - logsumexp_ref[h, rows][:, None])
            d_scores = weights * (product(d_out, v.T) - delta_ref[h, rows][:, None])
            d_k = d_k + product(d_scores.astype(q.dtype).T, q)
            return d_k, d_v + product(weights.astype(q.dtype).T, d_out)

        begin = j if causal else 0  # earlier queries do not see these keys
        return lax.fori_loop(begin, length // tile, step, gradients)

    zeros = jnp.zeros((tile, width), jnp.float32)
    d_k, d_v = lax.fori_loop(0, heads, head, (zeros, zeros))
    d_k_ref[...] = (d_k * width**-0.5).astype(d_k_ref.dtype)
    d_v_ref[...] = d_v.astype(d_v_ref.dtype)


def forward(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    *,
    causal: bool,
    tile: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B L H K"], Float[Array, "B H L"]]:
    """Returns the attended values in the query's dtype, and in float32 the logsumexp of each
    query's scores, the logarithm of its softmax's denominator.

    With `interpret`, Pallas runs the kernel as plain JAX, on any device.
    """
    (B, L, H, K), G = query.shape, key.shape[2]
    _check_tile(L, tile)
    call = _kernel_call(
        forward_kernel,
        grid=(L // tile, H, B),
        in_specs=[_own(tile, K), *[_all(L, K, H // G)] * 2],
        out_specs=[_own(tile, K), _own_numbers(tile)],
        out_shape=[_like(query), jax.ShapeDtypeStruct((B, H, L), jnp.float32)],
        products=2,
        query=query,
        causal=causal,
        tile=tile,
        interpret=interpret,
    )
    return tuple(call(query, key, value))


def backward(
    query: Float[Array, "B L H K"],
    key: Float[Array, "B L G K"],
    value: Float[Array, "B L G K"],
    out: Float[Array, "B L H K"],
    logsumexp: Float[Array, "B H L"],
    d_out: Float[Array, "B L H K"],
    *,
    causal: bool,
    tile: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B L H K"], Float[Array, "B L G K"], Float[Array, "B L G K"]]:
    """Returns the gradients of query, key and value, from the two results of `forward`.

    Both kernels compute the scores again. The gradient of a softmax needs, for each query, the
    sum over keys of weight times the weight's gradient: it equals the sum of out * d_out.
    """
    (B, L, H, K), G = query.shape, key.shape[2]
    _check_tile(L, tile)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2)  # [B H L]
    arrays = query, key, value, d_out, logsumexp, delta
    own, numbers, group = _own(tile, K), _own_numbers(tile), H // G
    options: dict[str, Any] = dict(query=query, causal=causal, tile=tile, interpret=interpret)
    d_query = _kernel_call(
        query_gradient_kernel,
        grid=(L // tile, H, B),
        in_specs=[own, *[_all(L, K, group)] * 2, own, numbers, numbers],
        out_specs=own,
        out_shape=_like(query),
        products=3,
        **options,
    )(*arrays)
    heads = pl.BlockSpec((None, L, group, K), lambda j, g, b: (b, 0, g, 0))
    their_numbers = pl.BlockSpec((None, group, L), lambda j, g, b: (b, g, 0))
    d_key, d_value = _kernel_call(
        key_value_gradient_kernel,
        grid=(L // tile, G, B),
        in_specs=[heads, own, own, heads, their_numbers, their_numbers],
        out_specs=[own, own],
        out_shape=[_like(key), _like(value)],
        products=4,
        **options,
    )(*arrays)
    return d_query, d_key, d_value


def _check_tile(length: int, tile: int) -> None:
    if length % tile:
        raise ValueError(f"tile={tile} must divide the {length} positions: pad the sequences")


def _own(tile: int, width: int) -> pl.BlockSpec:
    """Describes a program's own tile of [B L H K]: grid cell (i, h, b) has tile i of head h."""
    return pl.BlockSpec((None, tile, None, width), lambda i, h, b: (b, i, h, 0))


def _own_numbers(tile: int) -> pl.BlockSpec:
    """Describes its own tile of [B H L], one number per query."""
    return pl.BlockSpec((None, None, tile), lambda i, h, b: (b, h, i))


def _all(length: int, width: int, group: int) -> pl.BlockSpec:
    """Describes all keys that head h reads; `group` heads in a row read the same."""
    return pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h // group, 0))


def _like(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _kernel_call(
    kernel: Any, *, query: Any, products: int, causal: bool, tile: int, interpret: bool, **call
) -> Any:
    """Returns `pl.pallas_call` of a kernel, with its cost: the compiler cannot look inside."""
    B, L, H, K = query.shape
    scores = B * H * pairs_of_tiles(L // tile, causal) * tile**2  # that are computed

    def run(*arrays):
        shapes = [*arrays, *jax.tree.leaves(call["out_shape"])]
        cost = pl.CostEstimate(
            flops=2 * products * scores * K,
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in shapes),
        )
        with virtual.triton_without_gpu():
            return pl.pallas_call(
                functools.partial(kernel, causal=causal),
                compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
                cost_estimate=cost,
                interpret=interpret,
                name=kernel.__name__,
                **call,
            )(*arrays)

    return run


def pairs_of_tiles(n: int, causal: bool) -> int:
    """Counts the pairs of n tiles of queries and n of keys that are not masked entirely."""
    return n * (n + 1) // 2 if causal else n * n
