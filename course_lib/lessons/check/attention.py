"""The check of notebook 05's exercise on attention."""

import functools
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import close, same_shapes, same_structure
from course_lib.lessons.check.exercises import Function, Outcome, in_case, is_wrong

B, L, H, K = 2, 6, 3, 4  # of the arrays that attention is tried with, each size another
PAST = np.tri(L, dtype=bool)  # which keys (columns) a query (row) sees


def attention(
    q,
    k,
    v,
    *,
    seen=PAST,
    divisor=K**0.5,
    axis=3,
    hidden=-1e30,
    mask_first=True,
    normalize=True,
    subtract=True,
    sum_heads=False,
    transpose=False,
    round_scores=False,
    dtype=np.float64,
):
    """Computes causal attention, all arrays [B L H K], in float64. The options are mistakes."""
    like = q.dtype
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    scores = np.einsum("blhk,bmhk->bhlm", q, k) / dtype(divisor)
    if round_scores:
        scores = scores.astype(like).astype(dtype)
    if sum_heads:
        scores = np.broadcast_to(scores.sum(1, keepdims=True), scores.shape)
    if mask_first:
        scores = np.where(seen, scores, hidden).astype(dtype)
    subtract = subtract and normalize
    with np.errstate(all="ignore"):
        weights = np.exp(scores - (scores.max(axis, keepdims=True) if subtract else 0))
        if normalize:
            weights = weights / weights.sum(axis, keepdims=True)
        if not mask_first:
            weights = np.where(seen, weights, 0)
        out = np.einsum("bhml,bmhk->blhk" if transpose else "bhlm,bmhk->blhk", weights, v)
    return out.astype(like)


# What can be wrong with the weights, and with the divisor; both at once, too.
WEIGHTS: dict[str, Any] = {
    "no mask": dict(seen=np.ones((L, L), bool)),
    "upper triangle": dict(seen=PAST.T),
    "inverted mask": dict(seen=~PAST),
    "without itself": dict(seen=np.tri(L, k=-1, dtype=bool)),
    "off by one": dict(seen=np.tri(L, k=1, dtype=bool)),
    "zeros": dict(hidden=0.0),
    "mask last": dict(mask_first=False),
    "over queries": dict(axis=2),
    "over heads": dict(axis=1),
    "over sequences": dict(axis=0),
    "not normalized": dict(normalize=False),
    "summed heads": dict(sum_heads=True),
    "transposed": dict(transpose=True),
}
DIVISORS = {
    "not divided": 1,
    "by K": K,
    "multiplied": K**-0.5,
    "by the width": (H * K) ** 0.5,
    "by H": H**0.5,
    "by L": L**0.5,
}


def reshaped(q, k, v):
    cut = [x.reshape(B, H, L, K).swapaxes(1, 2) for x in (q, k, v)]
    return attention(*cut).swapaxes(1, 2).reshape(B, L, H, K)


class Attention(Outcome):
    """The result of attention, and which mistake it is like."""

    numbers = property(lambda it: np.asarray(it.result, np.float64))
    off = property(
        lambda it: (
            np.linalg.norm(it.numbers - np.float64(it.right))
            / np.linalg.norm(np.float64(it.right))
        )
    )

    off_in_bfloat16 = property(lambda it: it.exercise.outcome_of(it.function, 2).off)

    @functools.cached_property
    def is_right(self):
        same = same_shapes if self.case == 2 else same_structure
        same(self.result, self.right, f"With {self.right.dtype} arrays, your result")
        return bool(self.off < 0.01 if self.case else close(self.result, self.right))

    def is_like(self, *arrays, **options):
        """Whether this is attention with a mistake. The first or the last position may see
        nothing: anything can stand there.
        """
        middle = attention(*arrays, **options)[:, 1:-1]
        return not self.is_right and close(self.numbers[:, 1:-1], middle)

    @functools.cached_property
    def mistakes(self):
        """The rows of the weights and of the divisor that are wrong."""
        weights, divisors = {"": {}} | WEIGHTS, {"": K**0.5} | DIVISORS
        for (row, options), (other, divisor) in itertools.product(
            weights.items(), divisors.items()
        ):
            if row + other and self.is_like(*self.args, divisor=divisor, **options):
                return row, other
        return "", ""

    nan = property(lambda it: np.flatnonzero(np.isnan(it.numbers).any((0, 2, 3))).tolist())
    wrong_positions = property(
        lambda it: [t for t in range(L) if not close(it.numbers[:, t], it.right[:, t])]
    )
    first = property(lambda it: next(iter(it.wrong_positions), None))


def three_dtypes():
    first = np.random.default_rng(5).standard_normal((3, B, L, H, K), np.float32)
    large = 100 * first[0], first[1], first[2]
    # scores near 50, which bfloat16 rounds to multiples of 0.25
    near_50 = 5 + first[0], 5 + first[1] / 5, first[2]
    small = tuple(jnp.asarray(x, jnp.bfloat16) for x in near_50)
    return [tuple(map(jnp.asarray, first)), tuple(map(jnp.asarray, large)), small]


def is_mistake(row):
    return in_case(0, lambda it: row in it.mistakes)


class Attend(Function):
    """Says what is wrong with the weights, and with the divisor, too."""

    def say(self, row, outcome):
        more = outcome.mistakes[1] if row in WEIGHTS else None
        return super().say(row, outcome) + (f" {self.sentences[more]}" if more else "")


attend = Attend(
    "attend",
    attention,
    cases=three_dtypes,
    name=None,
    outcome=Attention,
    rows={
        **{row: (options, is_mistake(row)) for row, options in WEIGHTS.items()},
        **{row: (dict(divisor=one), is_mistake(row)) for row, one in DIVISORS.items()},
        "exchanged": (
            lambda q, k, v: attention(k, q, v),
            in_case(0, lambda it: it.is_like(it.args[1], it.args[0], it.args[2])),
        ),
        "keys": (
            lambda q, k, v: attention(q, k, k),
            in_case(0, lambda it: it.is_like(it.args[0], it.args[1], it.args[1])),
        ),
        "reshape": (
            reshaped,
            in_case(0, lambda it: not it.is_right and close(it.result, reshaped(*it.args))),
        ),
        "NaN": (dict(hidden=-np.inf, axis=1), in_case(0, lambda it: it.nan)),
        "position 0": (lambda q, k, v: k, in_case(0, lambda it: it.first == 0)),
        "position": (dict(divisor=32**0.5), in_case(0)),
        "infinite": (
            dict(subtract=False, dtype=np.float32),
            lambda it: it.case == 1 and not np.isfinite(it.numbers).all(),
        ),
        "large scores": (dict(hidden=-15.0), in_case(1)),
        "bfloat16": (dict(round_scores=True), is_wrong),
    },
)
