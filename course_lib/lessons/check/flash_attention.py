"""Checks of notebook 16's exercises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from course_lib.lessons.check.answers import close, equations, programs_in
from course_lib.lessons.check.exercises import (
    Function,
    Numbered,
    Numbers,
    Outcome,
    change,
    in_case,
    normal,
)
from course_lib.measure import hardware
from course_lib.smaller_and_faster import flash_attention


def pairs_in_window(n, tile, window):
    return [
        (i, j) for i in range(n) for j in range(max(0, (i * tile - window + 1) // tile), i + 1)
    ]


OLDEST = "(i * tile - window + 1) // tile"


class Pairs(Outcome):
    @functools.cached_property
    def pairs(self):
        """The pairs (i, j), sorted, also of all i and all j, as from `np.nonzero`."""
        try:
            yours = [tuple(map(int, one)) for one in self.result]
            if len(yours) == 2 and len(yours[0]) != 2:
                yours = list(zip(*yours, strict=True))
            return sorted((i, j) for i, j in yours)
        except (TypeError, ValueError):
            return None

    missing = property(lambda it: sorted(set(it.right) - set(it.pairs)))
    extra = property(lambda it: sorted(set(it.pairs) - set(it.right)))
    outside = property(lambda it: [p for p in it.extra if not 0 <= min(p) <= max(p) < it.n])
    diagonal = property(lambda it: [pair for pair in it.missing if pair[0] == pair[1]])
    future = property(lambda it: [pair for pair in it.extra if pair[1] > pair[0]])


window_pairs = Function(
    "window_pairs",
    pairs_in_window,
    cases=lambda: [(8, 4, 8), (6, 4, 5), (6, 4, 7), (8, 4, 6), (6, 4, 2), (5, 2, 3), (4, 4, 1)],
    outcome=Pairs,
    rows={
        "no pairs": (lambda n, tile, window: [0, 1, 2], lambda it: it.pairs is None),
        "twice": (
            lambda *sizes: 2 * pairs_in_window(*sizes),
            lambda it: len(it.pairs) != len(set(it.pairs)),
        ),
        "outside": (change("max(0, ", "int("), lambda it: it.outside),
        "diagonal": (change("i + 1)", "i)"), lambda it: it.diagonal),
        "future": (change("i + 1)", "n)"), lambda it: it.future),
        "missing": (
            [
                change("- window + 1) //", "- window + 2) //"),
                change(OLDEST, "i - window // tile"),
            ],
            lambda it: it.missing,
        ),
        "masked": (change(OLDEST, "0"), lambda it: it.extra),
    },
)


def of_queries(q, k, v, out, logsumexp, d_out):
    """The gradient of the queries of one head of width 4."""
    weights = jnp.exp(q @ k.T / 2 - logsumexp[:, None])
    delta = jnp.sum(out * d_out, axis=1, keepdims=True)
    return (weights * (d_out @ v.T - delta)) @ k / 2


def with_two_logsumexps():
    """Returns arguments, and again with another logsumexp: the weights are others then."""
    q, k, v, d_out = normal(0, *[(8, 4)] * 4)
    weights = jnp.exp(q @ k.T / 2)
    logsumexp = jnp.log(weights.sum(1))
    out = (weights / weights.sum(1, keepdims=True)) @ v
    return [(q, k, v, out, logsumexp + more, d_out) for more in (0.0, 1.0)]


query_gradient = Function(
    "query_gradient",
    of_queries,
    cases=with_two_logsumexps,
    name="the gradient",
    first=("several",),
    rows={
        "several": lambda *args: (args[0],),
        "not finite": (
            change("exp(", "exp(-100 * "),
            lambda it: not np.isfinite(np.asarray(it.result)).all(),
        ),
        "twice": change("@ k / 2", "@ k"),
        "no delta": change(" - delta", ""),
        "delta added": change(" - delta", " + delta"),
        "sign": lambda *args: -of_queries(*args),
        "another": (change("axis=1, keepdims=True", ""), in_case(0)),
        "softmax": change(
            "jnp.exp(q @ k.T / 2 - logsumexp[:, None])", "jax.nn.softmax(q @ k.T / 2)"
        ),
    },
)

LENGTH, WIDTH, TILE = 24, 4, 8
PAST = np.tri(LENGTH, dtype=bool)
WHOLE_TILES = np.kron(np.tri(LENGTH // TILE, dtype=bool), np.ones((TILE, TILE), bool))


def of_scores(seen, q, k, v, d_out, logsumexp, deltas):
    """Returns the gradient of the queries if they see these keys."""
    scores = jnp.where(seen, q @ k.T / WIDTH**0.5, -jnp.inf)
    weights = jnp.exp(scores - logsumexp[:, None])
    return (weights * (d_out @ v.T - deltas[:, None])) @ k / WIDTH**0.5


def causal_head():
    """Returns arguments, and again with NaN in the keys and values of the last tile: who visits
    a tile of the future multiplies its zeros by them.
    """
    q, k, v, d_out = normal(0, *[(LENGTH, WIDTH)] * 4)
    weights = jnp.exp(jnp.where(PAST, q @ k.T / WIDTH**0.5, -jnp.inf))
    logsumexp = jnp.log(weights.sum(1))
    deltas = (weights / weights.sum(1, keepdims=True) @ v * d_out).sum(1)
    unseen = k.at[-TILE:].set(jnp.nan), v.at[-TILE:].set(jnp.nan)
    return [(q, *keys, d_out, logsumexp, deltas, TILE) for keys in ((k, v), unseen)]


def kernel(q, k, v, d_out, logsumexp, deltas, tile):
    """The gradient of the queries, by a kernel with one cell per tile of queries."""
    (L, K), scale = q.shape, q.shape[1] ** -0.5

    def one_tile(q_ref, k_ref, v_ref, d_ref, logsumexp_ref, delta_ref, dq_ref):
        i, q, d = pl.program_id(0), q_ref[...], d_ref[...]

        def step(j, dq):
            keys = pl.ds(j * tile, tile)
            rows, columns = i * tile + jnp.arange(tile), j * tile + jnp.arange(tile)
            past = rows[:, None] >= columns
            s = jnp.where(past, q @ k_ref[keys, :].T * scale, -jnp.inf)
            weights = jnp.exp(s - logsumexp_ref[...][:, None])
            ds = weights * (d @ v_ref[keys, :].T - delta_ref[...][:, None])
            return dq + ds @ k_ref[keys, :] * scale

        dq_ref[...] = jax.lax.fori_loop(0, i + 1, step, jnp.zeros((tile, K)))

    own_tile = pl.BlockSpec((tile, K), lambda i: (i, 0))
    whole = pl.BlockSpec((L, K), lambda i: (0, 0))
    numbers = pl.BlockSpec((tile,), lambda i: (i,))
    return pl.pallas_call(
        one_tile,
        grid=(L // tile,),
        in_specs=[own_tile, whole, whole, own_tile, numbers, numbers],
        out_specs=own_tile,
        out_shape=jax.ShapeDtypeStruct((L, K), q.dtype),
        interpret=True,
    )(q, k, v, d_out, logsumexp, deltas)


def without_a_kernel(*args):
    return of_scores(PAST, *args[:-1])


def copied(*args):
    """Computes the gradient outside of the kernel, which copies it."""
    block = pl.BlockSpec((TILE, WIDTH), lambda i: (i, 0))
    return pl.pallas_call(
        lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...]),
        grid=(LENGTH // TILE,),
        in_specs=[block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((LENGTH, WIDTH), args[0].dtype),
        interpret=True,
    )(of_scores(PAST, *args[:-1]))


def products_of_each(program):
    """Counts the products that each cell computes, whatever its place in the grid."""
    total = 0
    for eqn in program.eqns:
        if eqn.primitive.name not in ("cond", "while"):
            inner = sum(map(products_of_each, programs_in(eqn)))
            total += (eqn.primitive.name == "dot_general") + inner * eqn.params.get("length", 1)
    return total


def chosen_afterwards(_, count, step, dq):
    """A loop over all tiles, which drops what the future ones add."""
    for j in range(LENGTH // TILE):
        dq = jnp.where(j < count, step(j, dq), dq)
    return dq


class Kernel(Outcome):
    """The gradient, and the kernel that computes it."""

    @functools.cached_property
    def kernels(self):
        *arrays, tile = self.args
        program = jax.make_jaxpr(lambda *arrays: self.function(*arrays, tile))(*arrays).jaxpr
        return [eqn for eqn in equations(program) if eqn.primitive.name == "pallas_call"]

    grid = property(lambda it: it.kernels[0].params["grid_mapping"].grid)
    body = property(lambda it: it.kernels[0].params["jaxpr"])
    has_products = property(
        lambda it: any(eqn.primitive.name == "dot_general" for eqn in equations(it.body))
    )
    # three for each tile of keys, whichever cell it is
    visits_all = property(lambda it: products_of_each(it.body) >= 3 * LENGTH // TILE)
    numbers = property(lambda it: np.asarray(it.result))
    empty = property(lambda it: np.flatnonzero(np.isnan(it.numbers).all(1)))
    finite = property(lambda it: np.isfinite(it.numbers[:-TILE]).all())

    def sees(self, seen):
        """Whether this is the gradient if queries see these keys."""
        return close(self.result, of_scores(seen, *self.args[:-1]))

    @property
    def wrong(self):
        """The number of the first tile that is wrong."""
        rows = [slice(i, i + TILE) for i in range(0, LENGTH, TILE)]
        right = [close(self.numbers[one], self.right[one]) for one in rows]
        return [*right, False].index(False)


gradient_kernel = Function(
    "gradient_kernel",
    kernel,
    cases=causal_head,
    name="the gradient",
    outcome=Kernel,
    rows={
        "kernels": (without_a_kernel, lambda it: len(it.kernels) != 1),
        "grid": (
            change("grid=(L // tile,)", "grid=(2,)"),
            lambda it: it.grid != (LENGTH // TILE,),
        ),
        "empty": (change("dq_ref[...] =", "dq ="), in_case(0, lambda it: it.empty.size)),
        "no products": (copied, lambda it: not it.has_products),
        "not divided": change(":] * scale\n", ":]\n"),
        "no mask": (
            change("(0, i + 1,", "(0, L // tile,", "jnp.where(past", "jnp.where(True"),
            in_case(0, lambda it: it.sees(np.ones_like(PAST))),
        ),
        "mask on the diagonal": (
            change("jnp.where(past", "jnp.where(True"),
            in_case(0, lambda it: it.sees(WHOLE_TILES)),
        ),
        "no diagonal": (
            change("(0, i + 1,", "(0, i,"),
            in_case(0, lambda it: it.sees(WHOLE_TILES & ~WHOLE_TILES.T)),
        ),
        "no delta": change(" - delta_ref[...][:, None]", ""),
        "a tile": (change("i * tile + jnp.arange", "jnp.arange"), in_case(0)),
        "future": (
            [
                change("(0, i + 1,", "(0, L // tile,"),
                change("jax.lax.fori_loop(0, i", "chosen_afterwards(0, i"),
            ],
            lambda it: it.visits_all or (it.case == 1 and not it.finite),
        ),
    },
)

GPUS = {f"on_{name}": hardware.get(name) for name in ("a5000", "h100")}


def needed(tile, gpu):
    """Returns the bytes of shared memory of a tile, for heads of 256 in bfloat16."""
    return flash_attention.shared_memory(int(tile), 256, jnp.bfloat16, gpu)


def room(gpu):
    """Returns the bytes of shared memory that a block may take."""
    assert isinstance(gpu.target, hardware.GpuTarget)
    return gpu.target.shared_memory_per_block


def largest_that_fit():
    return {
        name: max(tile for tile in (16, 32, 64, 128, 256) if needed(tile, gpu) <= room(gpu))
        for name, gpu in GPUS.items()
    }


class Tiles(Numbered):
    """Tiles, and the bytes that they need."""

    gpus = GPUS
    limit = {name: room(gpu) for name, gpu in GPUS.items()}
    needed = property(lambda it: {name: needed(it.yours[name], GPUS[name]) for name in GPUS})

    def is_power(self, name):
        tile = self.yours[name]
        return np.isfinite(tile) and tile == int(tile) > 0 and int(tile).bit_count() == 1


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
