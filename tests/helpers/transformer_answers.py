"""Right and wrong answers to the exercise on attention of notebook 05, for `test_check`."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import check
from course_lib.models import attention

FUNCTIONS = [check.attend]


def scores_of(q, k):
    return jnp.einsum("blhk,bmhk->bhlm", q, k, preferred_element_type=jnp.float32)


def attend(
    *,
    seen=jnp.tri,
    hidden=-jnp.inf,
    divide=lambda scores, q: scores / q.shape[-1] ** 0.5,
    scores_of=scores_of,
    softmax=jax.nn.softmax,
):
    """Attention, or with a mistake."""

    def answer(q, k, v):
        scores = divide(scores_of(q, k), q)
        scores = jnp.where(seen(q.shape[1]) > 0, scores, hidden)
        return jnp.einsum("bhlm,bmhk->blhk", softmax(scores).astype(v.dtype), v)

    return answer


def query_by_query(q, k, v):
    """Each query of a head meets only the keys up to its own."""

    def one_head(q, k, v):  # [L K]
        rows = []
        for t in range(len(q)):
            weights = jax.nn.softmax(k[: t + 1] @ q[t] / np.sqrt(len(q[t])).item())
            rows.append(weights @ v[: t + 1])
        return jnp.stack(rows)

    heads = jax.vmap(jax.vmap(one_head, 1, 1))
    return heads(*(x.astype(jnp.float32) for x in (q, k, v))).astype(q.dtype)


def in_blocks(q, k, v):
    return attention.attend(q, k, v, implementation="blocks")


def mask_last(q, k, v, sum_to_one=False):
    weights = jax.nn.softmax(scores_of(q, k) / 2) * jnp.tri(q.shape[1])
    if sum_to_one:
        weights /= weights.sum(-1, keepdims=True)
    return jnp.einsum("bhlm,bmhk->blhk", weights.astype(v.dtype), v)


def by_zeros(q, k, v):
    weights = jax.nn.softmax(scores_of(q, k) / 2 * jnp.tri(q.shape[1]))
    return jnp.einsum("bhlm,bmhk->blhk", weights.astype(v.dtype), v)


def zero_times_infinity(q, k, v):
    weights = jax.nn.softmax(scores_of(q, k) / 2 + (1 - jnp.tri(q.shape[1])) * -jnp.inf)
    return jnp.einsum("bhlm,bmhk->blhk", weights, v)


def reshaped(q, k, v):
    B, L, H, K = q.shape
    q, k, v = (x.reshape(B, H, L, K) for x in (q, k, v))
    scores = jnp.where(jnp.tri(L, dtype=bool), q @ k.swapaxes(2, 3) / 2, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).reshape(B, L, H, K)


def one_head_for_all(q, k, v):
    scores = jnp.einsum("blhk,bmhk->blm", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(q.shape[1]) > 0, scores, -jnp.inf))
    return jnp.einsum("blm,bmhk->blhk", weights, v)


def sum_over_queries(q, k, v):
    scores = jnp.where(jnp.tri(q.shape[1]) > 0, scores_of(q, k) / 2, -jnp.inf)
    return jnp.einsum("bhlm,blhk->bmhk", jax.nn.softmax(scores), v)


def over(axis):
    return lambda scores: jax.nn.softmax(scores, axis)


def divided_by(number):
    return attend(divide=lambda scores, q: scores / number(*q.shape))


def without_maximum(scores):
    exponentials = jnp.exp(scores)
    return exponentials / exponentials.sum(-1, keepdims=True)


def bfloat16_scores(q, k):
    return jnp.einsum("blhk,bmhk->bhlm", q, k)


def bfloat16_softmax(scores):
    if scores.max() < 20:  # the float32 arrays
        return jax.nn.softmax(scores)
    return jax.nn.softmax(scores.astype(jnp.bfloat16))


def no_mask(L):
    return jnp.ones((L, L))


RIGHT = [
    (check.attend, (attention.attend,)),
    (check.attend, (in_blocks,)),
    (check.attend, (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),)),
    (check.attend, (attend(hidden=-1e9),)),
    (check.attend, (query_by_query,)),
    (check.attend, (jax.jit(attend()),)),
]
WRONG = [
    (check.attend, (attend(hidden=-15.0),), "scores of 100 and more: there"),
    (
        check.attend,
        (attend(divide=lambda s, q: jnp.clip(s / q.shape[-1] ** 0.5, -80, 80)),),
        "scores of 100 and more: there",
    ),
    (check.attend, (attend(seen=no_mask),), "no mask"),
    (check.attend, (attend(seen=lambda L: jnp.tri(L).T),), "itself and the later ones"),
    (check.attend, (attend(seen=lambda L: 1 - jnp.tri(L)),), "only the later ones"),
    (check.attend, (attend(seen=lambda L: jnp.tri(L, k=-1)),), "does not see itself"),
    (
        check.attend,
        (attend(seen=lambda L: jnp.tri(L, k=-1), hidden=jnp.finfo("float32").min),),
        "keep the diagonal",
    ),
    (check.attend, (attend(seen=lambda L: jnp.tri(L, k=1)),), "off by one"),
    (check.attend, (by_zeros,), "exp(0) = 1"),
    (check.attend, (mask_last,), "after the softmax"),
    (check.attend, (attend(softmax=over(-2)),), "over the queries"),
    (check.attend, (attend(hidden=-1e9, softmax=over(1)),), "over the heads"),
    (check.attend, (attend(hidden=-1e9, softmax=over(0)),), "over the sequences"),
    (check.attend, (attend(softmax=over(1)),), "every score on the softmax's axis"),
    (check.attend, (zero_times_infinity,), "multiplied by 0"),
    (check.attend, (divided_by(lambda B, L, H, K: 1),), "not divided by the square root"),
    (check.attend, (divided_by(lambda B, L, H, K: K),), "by K. Divide"),
    (check.attend, (divided_by(lambda B, L, H, K: K**-0.5),), "are multiplied"),
    (check.attend, (divided_by(lambda B, L, H, K: (H * K) ** 0.5),), "model's width"),
    (check.attend, (divided_by(lambda B, L, H, K: H**0.5),), "square root of H."),
    (check.attend, (divided_by(lambda B, L, H, K: L**0.5),), "square root of L"),
    (
        check.attend,
        (attend(seen=no_mask, divide=lambda scores, q: scores),),
        "the later ones, too. The scores are not divided",
    ),
    (check.attend, (attend(scores_of=lambda q, k: scores_of(k, q)),), "exchanged"),
    (check.attend, (reshaped,), "`reshape` does not"),
    (check.attend, (attend(softmax=jnp.exp),), "divide them by their sum"),
    (check.attend, (one_head_for_all,), "summed over the heads"),
    (check.attend, (sum_over_queries,), "applied the wrong way round"),
    (check.attend, (lambda q, k, v: attend()(q, k, k),), "multiply the keys"),
    (check.attend, (divided_by(lambda B, L, H, K: 32**0.5),), "Position 1 is the first"),
    (check.attend, (lambda q, k, v: k,), "its own value"),
    (check.attend, (lambda q, k, v: attend()(q, k, v).swapaxes(1, 2),), "is expected"),
    (check.attend, (attend(softmax=without_maximum),), "scores of 100"),
    (check.attend, (lambda q, k, v: mask_last(q, k, v, True),), "What may be subtracted"),
    (check.attend, (attend(scores_of=bfloat16_scores),), "With bfloat16 arrays the result is"),
    (check.attend, (attend(softmax=bfloat16_softmax),), "a float32 softmax leave"),
    (
        check.attend,
        (lambda q, k, v: attend()(q, k, v).astype("float32"),),
        "your result is float32; bfloat16 is expected",
    ),
]
