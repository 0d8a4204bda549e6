"""Right and wrong answers to the exercises of notebook 16, for `test_check`."""

import jax
import jax.numpy as jnp

from course_lib.lessons import check

FUNCTIONS = [check.window_pairs, check.query_gradient]
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


def whole_sequence(n, tile, window):
    return [(i, j) for i in range(n) for j in range(n)]


def without_diagonal(n, tile, window):
    return [(i, j) for i, j in pairs()(n, tile, window) if i != j]


RIGHT = [(check.window_pairs, (pairs(),)), (check.query_gradient, (gradient(),))]
WRONG = [
    (check.window_pairs, (pairs(oldest=lambda i, tile, window: 0),), "masked entirely"),
    (
        check.window_pairs,
        (pairs(lambda i, tile, window: i - window // tile + 1),),
        "is missing",
    ),
    (check.window_pairs, (pairs(lambda i, tile, window: i - window // tile),), "is missing"),
    (check.window_pairs, (without_diagonal,), "each position sees itself"),
    (check.window_pairs, (whole_sequence,), "future"),
    (check.window_pairs, (pairs(twice=2),), "listed twice"),
    (check.query_gradient, (gradient(delta=0.0),), "own derivative"),
    (check.query_gradient, (gradient(scale=1.0),), "Twice too large"),
    (check.query_gradient, (gradient(axis=0),), "one number per row"),
    (check.query_gradient, (gradient(stored=False),), "Not the gradient"),
    (check.query_gradient, (lambda q, *rest: q.sum(1),), "not [L K]"),
    (check.query_gradient, (from_a_softmax,), "without a softmax"),
    (check.largest_tiles, (64, 64), "too many for"),
    (check.largest_tiles, (32, 128), "too many for"),
    (check.largest_tiles, (16, 64), "a larger one fits"),
    (check.largest_tiles, (32, 32), "a larger one fits"),
    (check.largest_tiles, (48, 64), "power of two"),
    (check.largest_tiles, (-32, 64), "power of two"),
]
