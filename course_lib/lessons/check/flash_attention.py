"""Checks of notebook 16's exercises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from course_lib.lessons.check.answers import close, equations
from course_lib.lessons.check.exercises import (
    Function,
    Numbered,
    Numbers,
    Outcome,
    in_case,
    is_wrong,
)
from course_lib.lessons.check.many_devices import normal
from course_lib.measure import hardware
from course_lib.smaller_and_faster import flash_attention


def pairs_in_window(
    n,
    tile,
    window,
    *,
    oldest=lambda i, tile, window: (i * tile - window + 1) // tile,
    newest=lambda i, n: i,
    result=lambda pairs: pairs,
):
    return result(
        [
            (i, j)
            for i in range(n)
            for j in range(max(0, oldest(i, tile, window)), newest(i, n) + 1)
        ]
    )


class Pairs(Outcome):
    """Pairs of tiles, compared with the right ones."""

    @functools.cached_property
    def pairs(self):
        """The pairs (i, j), sorted, also of arrays of i and of j, as from `np.nonzero`."""
        yours = self.result
        if isinstance(yours, tuple | list) and len(yours) == 2:
            if all(hasattr(one, "dtype") and np.ndim(one) == 1 for one in yours):
                yours = np.transpose(yours)
        try:
            return sorted((int(i), int(j)) for i, j in yours)
        except (TypeError, ValueError):
            return None

    at = property(lambda it: "With n={}, tile={}, window={}".format(*it.args))
    missing = property(lambda it: sorted(set(it.right) - set(it.pairs)))
    extra = property(lambda it: sorted(set(it.pairs) - set(it.right)))
    diagonal = property(lambda it: [pair for pair in it.missing if pair[0] == pair[1]])
    future = property(lambda it: [pair for pair in it.extra if pair[1] > pair[0]])


window_pairs = Function(
    "window_pairs",
    pairs_in_window,
    cases=lambda: [(8, 4, 8), (6, 4, 5), (6, 4, 7), (5, 2, 3), (4, 4, 1)],
    name=None,
    outcome=Pairs,
    rows={
        "no pairs": (
            [lambda n, tile, window: n, lambda n, tile, window: [0, 1, 2]],
            lambda it: it.pairs is None,
        ),
        "twice": (
            dict(result=lambda pairs: 2 * pairs),
            lambda it: len(it.pairs) != len(set(it.pairs)),
        ),
        "diagonal": (
            dict(result=lambda pairs: [(i, j) for i, j in pairs if i != j]),
            lambda it: it.diagonal,
        ),
        "future": (
            [
                dict(newest=lambda i, n: n - 1),
                dict(result=lambda pairs: [(j, i) for i, j in pairs]),
            ],
            lambda it: it.future,
        ),
        "missing": (
            dict(oldest=lambda i, tile, window: i - window // tile),
            lambda it: it.missing,
        ),
        "masked": (dict(oldest=lambda i, tile, window: 0), lambda it: it.extra),
    },
)


def of_queries(
    q, k, v, out, logsumexp, d_out, *, delta=1.0, scale=0.5, axis=1, weights=jnp.exp
):
    """The gradient of the queries of one head of width 4."""
    s = q @ k.T / 2
    sums = jnp.sum(out * d_out, axis=axis, keepdims=axis is not None)
    return (weights(s - logsumexp[:, None]) * (d_out @ v.T - delta * sums)) @ k * scale


def with_two_logsumexps():
    """Returns arguments, and again with another logsumexp: the weights are others then."""
    q, k, v, d_out = normal(0, *[(8, 4)] * 4)
    weights = np.exp(q @ k.T / 2)
    logsumexp = np.log(weights.sum(1))
    out = (weights / weights.sum(1, keepdims=True)) @ v
    return [tuple(map(jnp.asarray, (q, k, v, out, logsumexp + more, d_out))) for more in (0, 1)]


class Queries(Outcome):
    """The gradient of the queries."""

    finite = property(lambda it: bool(np.isfinite(np.asarray(it.result)).all()))
    first = property(lambda it: it.exercise.outcome_of(it.exercise.solve, 0).result)


query_gradient = Function(
    "query_gradient",
    of_queries,
    cases=with_two_logsumexps,
    name="the gradient",
    outcome=Queries,
    rows={
        "not finite": (dict(weights=lambda s: jnp.exp(-100 * s)), lambda it: not it.finite),
        "twice": dict(scale=1.0),
        "no delta": dict(delta=0.0),
        "another": ([dict(axis=None), dict(weights=lambda s: jnp.exp(s + 1))], in_case(0)),
        "softmax": (
            dict(weights=jax.nn.softmax),
            lambda it: it.case == 1 and close(it.result, it.first),
        ),
    },
)

LENGTH, WIDTH, TILE = 24, 4, 8
PAST = np.tri(LENGTH, dtype=bool)
WHOLE_TILES = np.kron(np.tri(LENGTH // TILE, dtype=bool), np.ones((TILE, TILE), bool))


def of_scores(seen, delta, q, k, v, d_out, logsumexp, deltas):
    """Returns the gradient of the queries if they see these keys."""
    scores = jnp.where(seen, q @ k.T / WIDTH**0.5, -jnp.inf)
    weights = jnp.exp(scores - logsumexp[:, None])
    return (weights * (d_out @ v.T - delta * deltas[:, None])) @ k / WIDTH**0.5


def causal_head():
    """Returns arguments, and again with NaN in the keys and values of the last tile: who visits
    a tile of the future multiplies its zeros by them.
    """
    q, k, v, d_out = normal(0, *[(LENGTH, WIDTH)] * 4)
    weights = np.exp(np.where(PAST, q @ k.T / WIDTH**0.5, -np.inf))
    logsumexp = np.log(weights.sum(1))
    deltas = (weights / weights.sum(1, keepdims=True) @ v * d_out).sum(1)
    unseen = k.copy(), v.copy()
    for array in unseen:
        array[-TILE:] = np.nan
    return [
        (*map(jnp.asarray, (q, *keys, d_out, logsumexp, deltas)), TILE)
        for keys in ((k, v), unseen)
    ]


def kernel(
    q,
    k,
    v,
    d_out,
    logsumexp,
    deltas,
    tile,
    *,
    ends=lambda i, n: i + 1,
    mask=lambda rows, columns: rows[:, None] >= columns,
    delta=1.0,
    divide=True,
    own=lambda i: (i, 0),
    cells=None,
    writes=True,
):
    """The gradient of the queries, by a kernel with one cell per tile of queries."""
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

        dq = jax.lax.fori_loop(0, ends(i, L // tile), step, jnp.zeros((tile, K)))
        if writes:
            dq_ref[...] = dq

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


def without_a_kernel(*args):
    return of_scores(PAST, 1, *args[:-1])


def by_an_empty_kernel(q, k, v, d_out, logsumexp, deltas, tile):
    """Multiplies outside of the kernel, which copies."""
    s = jnp.where(PAST, q @ k.T / WIDTH**0.5, -jnp.inf)
    ds = jnp.exp(s - logsumexp[:, None]) * (d_out @ v.T - deltas[:, None])
    block = pl.BlockSpec((tile, WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...]),
        grid=(LENGTH // tile,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((LENGTH, WIDTH), q.dtype),
        interpret=True,
    )(ds @ k / WIDTH**0.5)


class Kernel(Outcome):
    """The gradient, and the kernel that computes it."""

    @functools.cached_property
    def kernels(self):
        *arrays, tile = self.args
        program = jax.make_jaxpr(lambda *arrays: self.function(*arrays, tile))(*arrays).jaxpr
        return [eqn for eqn in equations(program) if eqn.primitive.name == "pallas_call"]

    num_kernels = property(lambda it: len(it.kernels))
    grid = property(lambda it: it.kernels[0].params["grid_mapping"].grid)
    has_products = property(
        lambda it: any(
            eqn.primitive.name == "dot_general"
            for eqn in equations(it.kernels[0].params["jaxpr"])
        )
    )
    numbers = property(lambda it: np.asarray(it.result))
    shape = property(lambda it: np.shape(it.result))
    empty = property(lambda it: np.flatnonzero(np.isnan(it.numbers).all(1)))
    num_empty = property(lambda it: len(it.empty))
    finite = property(lambda it: np.isfinite(it.numbers[:-TILE]).all())

    def sees(self, seen, delta=1):
        """Whether this is the gradient if queries see these keys."""
        return close(self.result, of_scores(seen, delta, *self.args[:-1]))

    @property
    def wrong(self):
        """The number of the first tile that is wrong."""
        rows = [slice(i, i + TILE) for i in range(0, LENGTH, TILE)]
        right = [close(self.numbers[one], self.right[one]) for one in rows]
        return [*right, False].index(False)


def in_first(applies):
    return lambda it: it.case == 0 and applies(it)


gradient_kernel = Function(
    "gradient_kernel",
    kernel,
    cases=causal_head,
    name=None,
    outcome=Kernel,
    rows={
        "kernels": (without_a_kernel, lambda it: it.num_kernels != 1),
        "grid": (dict(cells=2), lambda it: it.grid != (LENGTH // TILE,)),
        "shape": (lambda *args: kernel(*args).sum(1), lambda it: it.shape != (LENGTH, WIDTH)),
        "empty": (dict(writes=False), in_first(lambda it: it.num_empty)),
        "no products": (by_an_empty_kernel, lambda it: not it.has_products),
        "not divided": (
            dict(divide=False),
            in_first(lambda it: close(it.result, WIDTH**0.5 * it.right)),
        ),
        "no mask": (
            dict(ends=lambda i, n: n, mask=lambda rows, columns: True),
            in_first(lambda it: it.sees(np.ones_like(PAST))),
        ),
        "mask on the diagonal": (
            dict(mask=lambda rows, columns: True),
            in_first(lambda it: it.sees(WHOLE_TILES)),
        ),
        "no diagonal": (
            dict(ends=lambda i, n: i),
            in_first(lambda it: it.sees(WHOLE_TILES & ~WHOLE_TILES.T)),
        ),
        "no delta": (dict(delta=0.0), in_first(lambda it: it.sees(PAST, delta=0))),
        "a tile": (dict(own=lambda i: (0, 0)), in_first(is_wrong)),
        "future": (dict(ends=lambda i, n: n), lambda it: it.case == 1 and not it.finite),
    },
)

GPUS = {f"on_{name}": hardware.get(name) for name in ("a5000", "h100")}


def needed(tile, gpu):
    """Returns the bytes of shared memory of a tile, for heads of 256 in bfloat16."""
    return flash_attention.shared_memory(int(tile), 256, jnp.bfloat16, gpu)


def largest_that_fit():
    return {
        name: max(
            tile
            for tile in (16, 32, 64, 128, 256)
            if needed(tile, gpu) <= flash_attention.shared_memory_limit(gpu)
        )
        for name, gpu in GPUS.items()
    }


class Tiles(Numbered):
    """Tiles, and the bytes that they need."""

    gpus = GPUS
    limit = {name: flash_attention.shared_memory_limit(gpu) for name, gpu in GPUS.items()}
    needed = property(lambda it: {name: needed(it.yours[name], GPUS[name]) for name in GPUS})

    def is_power(self, name):
        tile = self.yours[name]
        return tile == int(tile) > 0 and int(tile).bit_count() == 1


largest_tiles = Numbers(
    "largest_tiles",
    largest_that_fit,
    outcome=Tiles,
    rows={
        name: {
            "no power of two": ([48, -32], lambda it, name=name: not it.is_power(name)),
            f"too large for {name}": (
                lambda right: 2 * right,
                lambda it, name=name: it.yours[name] > it.right[name],
            ),
            f"too small for {name}": (
                lambda right: right // 2,
                lambda it, name=name: it.yours[name] < it.right[name],
            ),
        }
        for name in GPUS
    },
)
