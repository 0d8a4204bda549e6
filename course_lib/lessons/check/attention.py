"""The check of notebook 05's exercise on attention."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import close, same_shapes, same_structure
from course_lib.lessons.check.exercises import Function, Outcome, change, in_case, is_wrong

B, L, H, K = 2, 6, 3, 4  # of the arrays that attention is tried with, each size another
WIDE = 8  # K of the bfloat16 arrays: its root is no bfloat16 number
PAST = np.tri(L, dtype=bool)  # which keys (columns) a query (row) sees


@np.errstate(all="ignore")
def attention(q, k, v):
    """Computes causal attention, all arrays [B L H K], in float64."""
    K, like = q.shape[-1], q.dtype
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("blhk,bmhk->bhlm", q, k) / K**0.5
    scores = np.where(PAST, scores, -1e30)
    weights = np.exp(scores - scores.max(3, keepdims=True))
    weights = weights / weights.sum(3, keepdims=True)
    return np.einsum("bhlm,bmhk->blhk", weights, v).astype(like)


NOT_SHIFTED = change(" - scores.max(3, keepdims=True)", "")
# Mistakes in the weights, and in the divisor; both at once, too.
WEIGHTS = {
    "no mask": change("PAST", "True"),
    "upper triangle": change("PAST", "PAST.T"),
    "inverted mask": change("PAST", "~PAST"),
    "without itself": change("PAST", "np.tri(L, k=-1, dtype=bool)"),
    "off by one": change("PAST", "np.tri(L, k=1, dtype=bool)"),
    "zeros": change("-1e30", "0.0"),
    "mask last": change(
        "(PAST, scores, -1e30)", "(True, scores, 0)", "weights, v", "weights * PAST, v"
    ),
    "over queries": change("(3,", "(2,"),
    "over heads": change("(3,", "(1,"),
    "over sequences": change("(3,", "(0,"),
    "not normalized": NOT_SHIFTED + change(" / weights.sum(3, keepdims=True)", ""),
    "summed heads": change("PAST, scores", "PAST, 0 * scores + scores.sum(1, keepdims=True)"),
    "transposed": change('"bhlm,bmhk->blhk"', '"bhml,bmhk->blhk"'),
}
DIVISORS = {
    "not divided": change("/ K**0.5", ""),
    "by K": change("/ K**0.5", "/ K"),
    "multiplied": change("/ K**0.5", "* K**0.5"),
    "by the width": change("/ K**0.5", "/ (H * K) ** 0.5"),
    "by H": change("/ K**0.5", "/ H**0.5"),
    "by L": change("/ K**0.5", "/ L**0.5"),
}


@functools.cache
def with_two_mistakes():
    """Returns attention with a mistake of the weights, of the divisor, and both, by rows."""
    pairs = itertools.product(
        [("", change())] + [*WEIGHTS.items()], [("", change())] + [*DIVISORS.items()]
    )
    return {(a, b): (one + other).of(attention) for (a, one), (b, other) in pairs if a + b}


def reshaped(q, k, v):
    cut = [x.reshape(B, H, L, -1).swapaxes(1, 2) for x in (q, k, v)]
    return attention(*cut).swapaxes(1, 2).reshape(B, L, H, -1)


class Attention(Outcome):
    """The result of attention, and which mistake it is like."""

    numbers = property(lambda it: np.asarray(it.result, np.float64))
    off = property(
        lambda it: (
            np.linalg.norm(it.numbers - np.float64(it.right))
            / np.linalg.norm(np.float64(it.right))
        )
    )

    @functools.cached_property
    def is_right(self):
        same = same_shapes if self.case == 2 else same_structure
        same(self.result, self.right, f"With {self.right.dtype} arrays, your result")
        return bool(self.off < 0.01 if self.case else close(self.result, self.right))

    @functools.cached_property
    def mistakes(self):
        """The rows of the weights and of the divisor that are wrong. The first or the last
        position may see nothing: anything can stand there.
        """
        middle = self.numbers[:, 1:-1]
        likely = {} if self.is_right or self.is_near else with_two_mistakes()
        results = {rows: f(*self.args)[:, 1:-1] for rows, f in likely.items()}
        found = (
            rows for off in (1e-4, 0.02) for rows, r in results.items() if close(middle, r, off)
        )
        return next(found, ("", ""))

    # 16 bits leave up to 1.5%, the smallest mistake above 10%
    is_near = property(lambda it: not it.is_right and it.off < 0.03)
    nan = property(lambda it: np.flatnonzero(np.isnan(it.numbers).any((0, 2, 3))).tolist())
    wrong_positions = property(
        lambda it: [t for t in range(L) if not close(it.numbers[:, t], it.right[:, t])]
    )
    first = property(lambda it: next(iter(it.wrong_positions), None))


def three_dtypes():
    first = np.random.default_rng(5).standard_normal((3, B, L, H, K), np.float32)
    large = 100 * first[0], first[1], first[2]
    # scores near 50, which bfloat16 rounds to multiples of 0.25; the queries are near 40, and
    # differences of keys add up to 0, so a query's rounding errors count as much as they can
    q, k, v = np.random.default_rng(6).standard_normal((3, B, L, H, WIDE), np.float32)
    k = np.concatenate([k[..., : WIDE // 2], -k[..., : WIDE // 2]], axis=-1)
    small = tuple(jnp.asarray(x, jnp.bfloat16) for x in (40 + q, 0.45 + k, v))
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
    outcome=Attention,
    rows={
        **{row: (one, is_mistake(row)) for row, one in (WEIGHTS | DIVISORS).items()},
        "exchanged": lambda q, k, v: attention(k, q, v),
        "keys": lambda q, k, v: attention(q, k, k),
        "reshape": reshaped,
        "NaN": (change("-1e30", "-np.inf", "(3,", "(1,"), in_case(0, lambda it: it.nan)),
        "weak mask": (
            change("-1e30", "-10.0"),
            in_case(0, lambda it: it.is_near and it.wrong_positions[-1] < L - 1),
        ),
        "rounded": (
            [
                change("np.float64)", "jnp.bfloat16).astype(np.float64)"),
                change(
                    "scores = np.where",
                    "scores = scores.astype(np.float16)\n    scores = np.where",
                ),
            ],
            in_case(0, lambda it: it.is_near),
        ),
        "position 0": (lambda q, k, v: k, in_case(0, lambda it: it.first == 0)),
        "position": (change("K**0.5", "32**0.5"), in_case(0)),
        "infinite": (
            NOT_SHIFTED + change("np.float64", "np.float32"),
            lambda it: it.case == 1 and not np.isfinite(it.numbers).all(),
        ),
        "large scores": (change("-1e30", "-15.0"), in_case(1)),
        "bfloat16": (
            [
                change("PAST, scores", "PAST, np.float64(scores.astype(like))"),
                change("(q, k, v))", "((q / K**0.5).astype(like), k, v))", "/ K**0.5\n", "\n"),
            ],
            is_wrong,
        ),
    },
)
