"""Right and wrong answers to the exercises of notebook 16, for `test_check`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from course_lib.lessons import check

FUNCTIONS = [check.window_pairs, check.query_gradient, check.gradient_kernel]
PREDICTIONS = {check.largest_tiles: 2}


def pairs(oldest=lambda i, tile, window: (i * tile - window + 1) // tile, newest=0, twice=1):
    def listed(n, tile, window):
        first = [max(0, oldest(i, tile, window)) for i in range(n)]
        last = [min(n - 1, i + newest) for i in range(n)]
        return [(i, j) for i in range(n) for j in range(first[i], last[i] + 1)] * twice

    return listed


def gradient(delta=1.0, scale=0.5, axis=1, stored=True):
    def of_queries(q, k, v, out, logsumexp, d_out):
        s = q @ k.T / 2
        weights = jnp.exp(s - logsumexp[:, None]) if stored else jnp.exp(s)
        sums = jnp.sum(out * d_out, axis=axis, keepdims=True)
        sums = sums if axis else sums.sum()
        return (weights * (d_out @ v.T - delta * sums)) @ k * scale

    return of_queries


def from_a_softmax(q, k, v, out, logsumexp, d_out):
    return jax.vjp(lambda q: jax.nn.softmax(q @ k.T / 2) @ v, q)[1](d_out)[0]


def kernel(
    ends=lambda i, n: i + 1,
    mask=lambda rows, columns: rows[:, None] >= columns,
    delta=1.0,
    divide=True,
    own=lambda i: (i, 0),
    cells=None,
):
    """The gradient of the queries by a kernel, with places for mistakes."""

    def gradient(q, k, v, d_out, logsumexp, deltas, tile):
        (L, K), scale = q.shape, q.shape[1] ** -0.5

        def one_tile(q_ref, k_ref, v_ref, d_ref, logsumexp_ref, delta_ref, dq_ref):
            i, q, d = pl.program_id(0), q_ref[...], d_ref[...]

            def step(j, dq):
                keys = pl.ds(j * tile, tile)
                rows, columns = i * tile + jnp.arange(tile), j * tile + jnp.arange(tile)
                s = jnp.where(mask(rows, columns), q @ k_ref[keys, :].T * scale, -jnp.inf)
                weights = jnp.exp(s - logsumexp_ref[...][:, None])
                ds = weights * (d @ v_ref[keys, :].T - delta * delta_ref[...][:, None])
                return dq + ds @ k_ref[keys, :] * (scale if divide else 1)

            start = jnp.zeros((tile, K))
            dq_ref[...] = jax.lax.fori_loop(0, ends(i, L // tile), step, start)

        own_tile = pl.BlockSpec((tile, K), own)
        whole = pl.BlockSpec((L, K), lambda i: (0, 0))
        numbers = pl.BlockSpec((tile,), lambda i: (i,))
        return pl.pallas_call(
            one_tile,
            grid=(cells or L // tile,),
            in_specs=[own_tile, whole, whole, own_tile, numbers, numbers],
            out_specs=pl.BlockSpec((tile, K), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((L, K), q.dtype),
            interpret=True,
        )(q, k, v, d_out, logsumexp, deltas)

    return gradient


def without_a_kernel(q, k, v, d_out, logsumexp, deltas, tile):
    s = jnp.where(jnp.tri(len(q), dtype=bool), q @ k.T / 2, -jnp.inf)
    return (jnp.exp(s - logsumexp[:, None]) * (d_out @ v.T - deltas[:, None])) @ k / 2


def copied_by_a_kernel(q, k, v, d_out, logsumexp, deltas, tile):
    def copy(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    block = pl.BlockSpec((tile, q.shape[1]), lambda i: (i, 0))
    one = pl.pallas_call(
        copy,
        grid=(len(q) // tile,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        interpret=True,
    )
    return one(without_a_kernel(q, k, v, d_out, logsumexp, deltas, tile))


def untouched(q, k, v, d_out, logsumexp, deltas, tile):
    return pl.pallas_call(
        lambda dq_ref: None, grid=(len(q) // tile,), out_shape=jax.typeof(q), interpret=True
    )()


def whole_sequence(n, tile, window):
    return [(i, j) for i in range(n) for j in range(n)]


def without_diagonal(n, tile, window):
    return [(i, j) for i, j in pairs()(n, tile, window) if i != j]


def transposed(n, tile, window):
    return [(j, i) for i, j in pairs()(n, tile, window)]


RIGHT = [
    (check.window_pairs, (pairs(),)),
    (check.window_pairs, (lambda *a: tuple(np.transpose(pairs()(*a))),)),
    (check.query_gradient, (gradient(),)),
    (check.gradient_kernel, (kernel(),)),
    (check.gradient_kernel, (jax.jit(kernel(), static_argnums=6),)),
]
WRONG = [
    (check.window_pairs, (pairs(oldest=lambda i, tile, window: 0),), "masked entirely"),
    (
        check.window_pairs,
        (pairs(lambda i, tile, window: i - window // tile + 1),),
        "is missing",
    ),
    (check.window_pairs, (pairs(lambda i, tile, window: i - window // tile),), "is missing"),
    (check.window_pairs, (without_diagonal,), "each position sees itself"),
    (check.window_pairs, (lambda n, tile, window: n,), "a list of pairs"),
    (check.window_pairs, (lambda n, tile, window: [0, 1, 2],), "a list of pairs"),
    (check.window_pairs, (whole_sequence,), "future"),
    (check.window_pairs, (transposed,), "future"),
    (check.window_pairs, (pairs(twice=2),), "listed twice"),
    (check.query_gradient, (gradient(delta=0.0),), "own derivative"),
    (check.query_gradient, (gradient(scale=1.0),), "Twice too large"),
    (check.query_gradient, (gradient(axis=0),), "one number per row"),
    (check.query_gradient, (gradient(stored=False),), "Not the gradient"),
    (check.query_gradient, (lambda q, *rest: q.sum(1),), "not [L K]"),
    (check.query_gradient, (from_a_softmax,), "without a softmax"),
    (check.gradient_kernel, (kernel(ends=lambda i, n: n),), "masked entirely"),
    (check.gradient_kernel, (kernel(mask=lambda i, j: True),), "keys after them"),
    (
        check.gradient_kernel,
        (kernel(ends=lambda i, n: n, mask=lambda i, j: True),),
        "sees all keys",
    ),
    (check.gradient_kernel, (kernel(ends=lambda i, n: i),), "ends before n"),
    (check.gradient_kernel, (kernel(divide=False),), "sqrt(K) times too large"),
    (check.gradient_kernel, (kernel(delta=0.0),), "own derivative"),
    (check.gradient_kernel, (kernel(own=lambda i: (0, 0)),), "The tile of queries 1 is wrong"),
    (check.gradient_kernel, (kernel(cells=2),), "one cell per tile"),
    (check.gradient_kernel, (without_a_kernel,), "calls 0 kernels"),
    (check.gradient_kernel, (copied_by_a_kernel,), "multiplies no matrices"),
    (check.gradient_kernel, (untouched,), "are NaN"),
    (check.gradient_kernel, (lambda *a: kernel()(*a).sum(1),), "not [L K]"),
    (check.largest_tiles, (64, 64), "too many for"),
    (check.largest_tiles, (32, 128), "too many for"),
    (check.largest_tiles, (16, 64), "a larger one fits"),
    (check.largest_tiles, (32, 32), "a larger one fits"),
    (check.largest_tiles, (48, 64), "power of two"),
    (check.largest_tiles, (-32, 64), "power of two"),
]
