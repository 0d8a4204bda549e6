"""Checks of notebook 13's exercises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib import measure
from course_lib.lessons.check.answers import close
from course_lib.lessons.check.exercises import (
    Function,
    Numbers,
    Outcome,
    change,
    is_wrong,
    normal,
)
from course_lib.lessons.check.many_devices import DeviceFunction, row_of_devices
from course_lib.many_devices import context_parallel


def merged(a, b):
    """Merges the softmax of two blocks of keys."""
    top = jnp.maximum(a[0], b[0])
    base = jnp.where(top > -jnp.inf, top, 0)
    by_a, by_b = jnp.exp(a[0] - base), jnp.exp(b[0] - base)
    total = a[1] * by_a + b[1] * by_b
    out = (a[2].T * by_a + b[2].T * by_b).T
    return top, total, out


def summary(scores, values):
    """Returns the largest score, the sum of exp(score - top), and the values' weighted sum."""
    top = scores.max(-1)
    base = np.where(top > -np.inf, top, 0)[:, None]
    weights = np.exp(scores - base, dtype=np.float32)
    return top, weights.sum(-1), weights @ values


def blocks_of_keys():
    scores, values = map(np.array, normal(4, (3, 6), (6, 2)))
    scores[1] += np.array([0, 0, 0, 200, 200, 200])  # overflows if not shifted
    hidden = scores.copy()
    hidden[0, 3:] = -np.inf

    def pair(scores):
        return tuple(summary(scores[:, i : i + 3], values[i : i + 3]) for i in (0, 3))

    nothing = tuple(np.array(x, np.float32) for x in ([-np.inf], [0], [[0, 0]]))
    return [
        jax.tree.map(jnp.asarray, case)
        for case in (pair(scores), pair(hidden), pair(hidden)[::-1], (nothing, nothing))
    ]


class Merged(Outcome):
    """Top, total and output of two blocks; of queries that see all keys, those of one block
    (cases 1 and 2), and none.
    """

    sees_all = property(lambda it: it.case == 0)
    sees_none = property(lambda it: it.case == 3)
    top = property(lambda it: float(it.result[0][0]))

    def is_wrong(self, i):
        return self.sees_all and not close(self.result[i], self.right[i])

    is_finite = property(lambda it: all(np.isfinite(x).all() for x in it.result[1:]))
    is_nan = property(lambda it: any(np.isnan(x).any() for x in it.result))


merge = Function(
    "merge",
    merged,
    cases=blocks_of_keys,
    name="the merged block",
    outcome=Merged,
    rows={
        "added": [
            change("jnp.exp(a[0] - base), jnp.exp(b[0] - base)", "1, 1"),
            change("a[1] * by_a + b[1] * by_b", "a[1] + b[1]"),
            change("(a[2].T * by_a + b[2].T * by_b).T", "a[2] + b[2]"),
        ],
        "not finite": (
            change("maximum", "minimum"),
            lambda it: it.sees_all and not it.is_finite,
        ),
        "top": (change("return top", "return 2 * top"), lambda it: it.is_wrong(0)),
        "total": (change("top, total", "top, 2 * total"), lambda it: it.is_wrong(1)),
        "mean": change("total, out", "total, out / total[:, None]"),
        "output": (change("total, out", "total, 2 * out"), lambda it: it.is_wrong(2)),
        "hidden": (
            [
                change("total, out", f"total, jnp.where(jnp.isinf({block}[0]), 0, out.T).T")
                for block in "ab"
            ],
            lambda it: it.case in (1, 2) and not it.is_right,
        ),
        "NaN": (
            change("jnp.where(top > -jnp.inf, top, 0)", "top"),
            lambda it: it.sees_none and it.is_nan,
        ),
        "no zeros": (
            change("top, total", "top, total + jnp.isinf(top)"),
            lambda it: it.sees_none and any(np.any(x) for x in it.result[1:]),
        ),
        "finite top": (
            change("return top", "return base"),
            lambda it: it.sees_none and it.top != -np.inf,
        ),
    },
)


def attend(query, key, value):
    """Causal attention."""
    scores = jnp.einsum("blhk,bmhk->bhlm", query, key) / query.shape[-1] ** 0.5
    mask = jnp.tri(query.shape[1], key.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return jnp.einsum("bhlm,bmhk->blhk", weights, value)


def exchange(x, split, join):
    return jax.lax.all_to_all(x, "context", split, join, tiled=True)


def exchanged(query, key, value, attend):
    arrays = (exchange(x, 2, 1) for x in (query, key, value))
    return exchange(attend(*arrays), 1, 2)


def gathered_keys(query, key, value, attend):
    whole = [jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (query, key, value)]
    begin = jax.lax.axis_index("context") * query.shape[1]
    return jax.lax.dynamic_slice_in_dim(attend(*whole), begin, query.shape[1], 1)


cut = P(None, "context")
ulysses = DeviceFunction(
    "ulysses",
    exchanged,
    one_device=attend,
    cases=lambda: [normal(5, *[(1, 8, 4, 3)] * 3)],
    calls=lambda yours, *args: yours(*args, attend),
    axes={"context": 4},
    in_specs=(cut,) * 3,
    out_specs=cut,
    of=(0, 1, 2),
    name="the output",
    first=("not back",),
    rows={
        "not back": (
            change("return exchange(attend(*arrays), 1, 2)", "return attend(*arrays)"),
            lambda it: np.shape(it.result) == (1, 32, 1, 3),
        ),
        "own positions": lambda query, key, value, attend: attend(query, key, value),
        "gathers": gathered_keys,
        "another": change("return exchange", "return 2 * exchange"),
        "sends more": change(
            "return exchange(",
            "return exchange(exchange(exchange(",
            "1, 2)",
            "1, 2), 2, 1), 1, 2)",
        ),
        "gradient": change("exchange(x, 2, 1)", "jax.lax.stop_gradient(exchange(x, 2, 1))"),
    },
)


def pairs_in_order(n=8):
    """Counts the pairs of parts of a ring whose device i has the parts 2i and 2i + 1: of the
    slowest device, summed over steps, and of all.
    """
    parts = np.arange(2 * n).reshape(n, 2)
    pairs = [
        [(np.roll(parts, step, axis=0)[d] <= parts[d][:, None]).sum() for d in range(n)]
        for step in range(n)
    ]
    return {"pairs": int(np.max(pairs, axis=1).sum()), "of all": int(np.sum(pairs))}


work_in_order = Numbers(
    "work_in_order",
    pairs_in_order,
    rows={
        "pairs": {
            "mean": 17,
            "no mask": 32,
            "of all": lambda right: pairs_in_order()["of all"],
            "first step": 28,
            "all diagonal": 24,
            "another": [20, 40, ...],
        }
    },
)


def sent(n, numbers, width):
    """Keys and values go around twice, in n - 1 steps each; their gradients in n steps."""
    keys = 2 * (n - 1) * width
    gradients = n * 4
    return numbers * (keys + gradients)


@functools.cache
def compiled_ring(n):
    """Returns how many numbers of keys and values a device of a compiled ring has, in float32,
    and the bytes that it sends per layer.
    """
    mesh, layers = row_of_devices("context", n), 2

    def loss(x):
        def layer(x, _):
            return context_parallel.attend(x, x, 2 * x), None

        return jax.lax.scan(layer, x, length=layers)[0].sum()

    x = np.ones((1, 16, 2, 4), np.float32)
    ring = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=cut, out_specs=cut)
    ledger = measure.ledger(jax.jit(ring).lower(x).compile(), mesh)
    return 2 * x.size // n, ledger.sent("collective-permute") / layers


def of_three_rings(function):
    first = function(4, 60, 2)
    return first if first is None else [first, function(8, 60, 2), function(3, 60, 4)]


class RingBytes(Outcome):
    """Answers for rings that are compiled."""

    @functools.cached_property
    def differs(self):
        """The first compiled ring that sends something else, None if there is none."""
        for n in (2, 4):
            numbers, sent = compiled_ring(n)
            answer = self.function(n, numbers, 4)
            if answer != sent:
                return {"n": n, "numbers": numbers, "sent": sent, "answer": answer}
        return None

    of_four = property(lambda it: compiled_ring(4)[1])


ring_bytes = Function(
    "ring_bytes",
    sent,
    cases=lambda: [()],
    calls=of_three_rings,
    outcome=RingBytes,
    rows={
        "forward": change("2 * (n", "(n", "n * 4", "0"),
        "no gradients": change("n * 4", "0"),
        "keys once": change("2 * (n", "(n"),
        "narrow gradients": change("n * 4", "n * width"),
        "keys home": change("(n - 1)", "n"),
        "gradients away": change("n * 4", "(n - 1) * 4"),
        "compiled": (change("2 * (n", "3 * (n"), lambda it: it.differs),
        "float32 alone": (change("* width", "* 4"), is_wrong),
    },
)
