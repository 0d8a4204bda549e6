"""Checks of notebook 05's exercises."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import tiny_transformer
from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    same_shapes,
)

B, L, H, K = 2, 6, 3, 4  # of the arrays that attention is tried with, each size another
_PAST = np.tri(L, dtype=bool)  # which keys (columns) a query (row) sees
_WRONG_WEIGHTS = (  # options of `_attention`, and what is wrong with them
    (
        dict(seen=np.ones((L, L), bool)),
        "There is no mask: a position sees the later ones, too.",
    ),
    (
        dict(seen=_PAST.T),
        "The mask is the wrong way round: a position sees itself and the later ones. With"
        " queries as rows and keys as columns, keep the lower triangle.",
    ),
    (
        dict(seen=~_PAST),
        "The mask is the wrong way round: a position sees only the later ones."
        " `jnp.where(mask, a, b)` takes a where the mask is true.",
    ),
    (
        dict(seen=np.tri(L, k=-1, dtype=bool)),
        "A position does not see itself: keep the diagonal, too.",
    ),
    (
        dict(seen=np.tri(L, k=1, dtype=bool)),
        "The mask is off by one: a position sees the next one, which is its label.",
    ),
    (
        dict(hidden=0.0),
        "A hidden score is 0, and exp(0) = 1, so hidden positions get a weight. Hide them with"
        " -inf: its exponential is 0.",
    ),
    (
        dict(mask_first=False),
        "The mask comes after the softmax, so the weights of a position do not sum to one. Hide"
        " the scores, before the softmax.",
    ),
    (
        dict(axis=2),
        "The softmax runs over the queries. It should run over the keys: all weights of one"
        " query sum to one.",
    ),
    (dict(axis=1), "The softmax runs over the heads. It should run over the keys."),
    (dict(axis=0), "The softmax runs over the sequences. It should run over the keys."),
    (
        dict(normalize=False),
        "The weights are exponentials that do not sum to one: divide them by their sum.",
    ),
    (
        dict(sum_heads=True),
        "The scores are summed over the heads, so all heads share their weights. Each head has"
        " scores of its own: [B H L L].",
    ),
    (
        dict(transpose=True),
        "The weights are applied the wrong way round: a position sums over the queries that see"
        " it. It should sum over the keys that it sees.",
    ),
)
_WRONG_DIVISORS = (
    (1, "The scores are not divided by the square root of K."),
    (K, "The scores are divided by K. Divide them by its square root."),
    (K**-0.5, "The scores are multiplied by the square root of K. Divide them by it."),
    (
        (H * K) ** 0.5,
        "The scores are divided by the square root of H K, the model's width. A score is a sum"
        " of K products.",
    ),
    (H**0.5, "The scores are divided by the square root of H. K is the last axis of q."),
    (L**0.5, "The scores are divided by the square root of L. K is the last axis of q."),
)


def _attention(
    q,
    k,
    v,
    *,
    seen=_PAST,
    divisor=K**0.5,
    axis=3,
    hidden=-1e30,
    mask_first=True,
    normalize=True,
    sum_heads=False,
    transpose=False,
):
    """Computes causal attention in float64. Other options than these are mistakes."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("blhk,bmhk->bhlm", q, k) / divisor
    if sum_heads:
        scores = np.broadcast_to(scores.sum(1, keepdims=True), scores.shape)
    if mask_first:
        scores = np.where(seen, scores, hidden)
    largest = scores.max(axis, keepdims=True) if normalize else 0.0
    weights = np.exp(scores - largest)
    if normalize:
        weights /= weights.sum(axis, keepdims=True)
    if not mask_first:
        weights = np.where(seen, weights, 0)
    return np.einsum("bhml,bmhk->blhk" if transpose else "bhlm,bmhk->blhk", weights, v)


@exercise
def attend(your_attend):
    """Checks `your_attend(q, k, v)`, all [B L H K]: causal attention of every head, in the
    dtype of the arrays, with scores and softmax in float32.
    """
    rng = np.random.default_rng(5)
    first = rng.standard_normal((3, B, L, H, K), np.float32)
    q, k, v = map(jnp.asarray, first)
    hint = "Begin with the scores, one for each query and key of a head: [B H L L]."
    with jax.default_matmul_precision("highest"):
        yours = call(your_attend, q, k, v, hint=hint)
    same_shapes(yours, q, "Your result")
    _require_attention(np.asarray(yours, np.float64), q, k, v)

    with jax.default_matmul_precision("highest"):
        large = call(your_attend, jnp.asarray(100 * first[0]), k, v, hint="")
    require(
        jnp.isfinite(large).all(),
        "Right, but not for scores of 100 and more: the result is not a number. In float32"
        " exp(89) is infinite, and exp(-104) is 0. What may be subtracted from all scores of a"
        " query, so that its weights stay, and the sum of exponentials over the positions that"
        " it sees is neither?",
    )
    exact = _attention(jnp.asarray(100 * first[0]), k, v)
    off = np.linalg.norm(np.asarray(large, np.float64) - exact) / np.linalg.norm(exact)
    require(
        off < 0.01,
        f"Right, but not for scores of 100 and more: there the result is {off:.0%} off. Hide"
        " the later positions with -inf, not with a number that a score can be below, and cut"
        " no score.",
    )

    # scores near 50, which bfloat16 rounds to multiples of 0.25
    near_50 = 5 + first[0], 5 + first[1] / 5, first[2]
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in near_50)
    yours = call(your_attend, q, k, v, hint="")
    same_shapes(yours, q, "With bfloat16 arrays, your result")
    right = _attention(q, k, v)
    error = np.linalg.norm(np.asarray(yours, np.float64) - right) / np.linalg.norm(right)
    require(
        error < 0.01,
        f"Right in float32. With bfloat16 arrays the result is {error:.1%} off; float32 scores"
        " and a float32 softmax leave less than 1%. A bfloat16 score near 50 is rounded to a"
        " multiple of 0.25. In which dtype does your product of q and k leave its result?",
    )
    return f"in float32 to rounding; with bfloat16 arrays {error:.1%} off."


def _require_attention(yours, q, k, v):
    """Raises `WrongAnswer`, and names the mistake, unless the array is their attention."""
    right = _attention(q, k, v)
    if close(yours, right):
        return

    def is_attention(*arrays, **options):
        # the first or the last position may see nothing: any number or none can stand there
        return close(yours[:, 1:-1], _attention(*arrays, **options)[:, 1:-1])

    for options, reason in (({}, ""), *_WRONG_WEIGHTS):
        for divisor, why in ((K**0.5, ""), *_WRONG_DIVISORS):
            wrong = is_attention(q, k, v, divisor=divisor, **options)
            require(not (wrong and reason + why), f"{reason} {why}")
    require(
        not is_attention(k, q, v),
        "Queries and keys are exchanged: the softmax of a query runs over its scores with all"
        " keys.",
    )
    require(
        not is_attention(q, k, k), "The weights multiply the keys. They belong to the values."
    )
    cut = [np.asarray(x).reshape(B, H, L, K).swapaxes(1, 2) for x in (q, k, v)]
    require(
        not close(yours, _attention(*cut).swapaxes(1, 2).reshape(B, L, H, K)),
        "`reshape` does not exchange two axes: it cuts the positions into H pieces. Use"
        " `swapaxes` or `transpose`.",
    )
    nan = np.flatnonzero(np.isnan(yours).any((0, 2, 3))).tolist()
    require(
        not nan,
        f"The result is not a number (NaN) at positions {nan}. Is every score on the softmax's"
        " axis -inf, or is -inf multiplied by 0?",
    )
    require(
        close(yours[:, 0], right[:, 0]),
        "Position 0 sees only itself, so its result is its own value, v[:, 0]. Yours is not.",
    )
    first = next(t for t in range(L) if not close(yours[:, t], right[:, t]))
    require(False, f"Position {first} is the first whose result is wrong.")


@exercise
def count_parameters(your_count):
    """Checks `your_count(N, D, V, L)`: parameters of N layers of width D, V tokens, L learned
    positions.

    Norms have a scale alone, no dense layer has a bias, and the output is the embedding of the
    tokens, used again. The MLP is four times as wide.
    """
    hint = "Read `init` at the top of this notebook. Which of its arrays does this model have?"
    for N, D, V, L in ((24, 512, 2048, 512), (6, 1024, 2048, 512), (2, 128, 1000, 64)):
        yours = call(your_count, N, D, V, L, hint=hint)
        arrays = jax.eval_shape(
            lambda key, sizes=(N, D, 4, V, L): tiny_transformer.init(key, *sizes),
            jax.random.key(0),
        )
        right = sum(array.size for name, array in arrays.items() if name != "output")
        missing = right - yours
        amount = f"{abs(missing):,} too {'few' if missing > 0 else 'many'}"
        for mistakes in _up_to_three_mistakes(N, D, V, L):
            why = "; ".join(reason for _, reason in mistakes)
            require(
                missing == 0 or missing != sum(number for number, _ in mistakes),
                f"{N} layers of width {D}: {amount}: {why}.",
            )
        require(
            missing == 0,
            f"{N} layers of width {D}: you count {yours:,}, the model has {right:,}; {amount}.",
        )
    return (
        "24 layers of width 512 and 6 of 1024 differ by 2%: the wide one's embedding is larger."
    )


def _up_to_three_mistakes(N, D, V, L):
    """Returns lists of mistakes, the shortest first. A mistake is the number of parameters that
    the answer lacks (if negative: has too many), and the reason.
    """
    groups = (  # a list holds at most one of each
        [(L * D, "each of the L positions has D parameters, too")],
        [
            (2 * N * D, "the norms of the layers have scales"),
            (N * D, "each layer has two norms, and each of them a scale"),
            (-N * D, "each layer has no more than two norms"),
            (-2 * N * D, "the norms of the layers have scales and no biases"),
            (-(2 * N + 1) * D, "an RMS norm has a scale and no bias"),
        ],
        [
            (D, "one more norm follows the last layer"),
            (-D, "the norm after the last layer has D parameters"),
        ],
        [
            (8 * N * D**2, "each layer has an MLP: two matrices, one up and one down"),
            (
                4 * N * D**2,
                "in each layer, attention is missing (queries, keys, values and the output), or"
                " one of the MLP's two matrices",
            ),
            *(
                (
                    n * N * D**2,
                    "attention has four matrices (queries, keys, values and the output), and"
                    " the MLP is four times as wide",
                )
                for n in (1, 2, 3)
            ),
        ],
        [
            (V * D, "each of the V tokens has an embedding of D parameters"),
            (-V * D, "the output is the embedding of the tokens, and is counted once"),
            (-V * D - V, "the output is the embedding of the tokens, and has no bias"),
        ],
        [
            (-9 * N * D, "no dense layer has a bias"),
            (
                -(11 * N * D + D + V * D + V),
                "this is the model of the case study, with biases and an output of its own",
            ),
        ],
    )
    lists = [
        [mistake for mistake in mistakes if mistake is not None]
        for mistakes in itertools.product(*([None, *group] for group in groups))
    ]
    return sorted((one for one in lists if 1 <= len(one) <= 3), key=len)


@exercise
def scores_outgrow_mlp(length):
    """Checks from which length on the float32 scores of a layer are as large as its bfloat16
    MLP activations.
    """
    predicted(
        length, hint="Compute both for one sequence of 512 tokens first: which is larger?"
    )
    require(
        length != 512,
        "512: the scores are float32, 4 bytes each; the MLP's activations have 2.",
    )
    require(length != 1024, "1024: the bytes per number are the wrong way round.")
    require(
        length != 2048,
        "2048: there is one matrix of scores for each of the 8 heads.",
    )
    require(
        0 < length < float("inf"),
        f"{length}: a sequence has at least one token, and finitely many.",
    )
    H, F = 8, 4096
    scores, mlp = 4 * H * length**2, 2 * length * F
    require(
        scores == mlp,
        f"At {length} tokens the scores take {scores / 2**20:,.1f} MiB per sequence, the"
        f" MLP's activations {mlp / 2**20:,.1f}.",
    )
    return "at 512 tokens, as in the case study, the scores are twice as large."


@exercise
def looks_ahead(your_test):
    """Checks `your_test(forward, x) -> bool`: whether any output of `forward(x [L D]) -> [L
    D]` depends on a later input.
    """
    x = jax.random.normal(jax.random.key(0), (6, 4))

    def causal(x):
        return jnp.tanh(jnp.cumsum(x, axis=0))

    def mixes_all(x):
        return x + x.mean(0)

    def only_the_last(x):
        return causal(x).at[-2].add(0.1 * x[-1])

    def cancels(x):
        later = jnp.concatenate([x[1:, :1], jnp.zeros((1, 1))])
        return causal(x) + later * jnp.array([1.0, -1.0, 0.0, 0.0])

    def skips(x):
        return causal(x).at[1, 2].add(-0.1 * x[3, 3])

    hint = (
        "Take three positions and `lambda x: x[::-1]` first: which derivatives, of which output"
        " with respect to which input, are not zero there?"
    )
    for name, forward, right in (
        ("a causal function", causal, False),
        ("a function that mixes all positions", mixes_all, True),
        ("a function that leaks at the last position only", only_the_last, True),
        ("a leak from two positions ahead, with a negative gradient", skips, True),
        ("a leak that cancels in the sum over the features", cancels, True),
    ):
        yours = call(your_test, forward, x, hint=hint)
        require(
            np.ndim(yours) == 0,
            f"Return True or False, not an array of shape {np.shape(yours)}.",
        )
        require(
            bool(yours) == right,
            f"{name[0].upper() + name[1:]}: your test says {bool(yours)}."
            + (" Which two derivatives add up to 0 there?" if forward is cancels else "")
            + (" Look at every position t." if forward is only_the_last else "")
            + (
                " Which positions do you compare, and which signs do you count?"
                if forward is skips
                else ""
            )
            + (
                " Position t may read position t and those before it."
                if forward is causal
                else ""
            ),
        )
    return "every position and every feature is looked at."


@exercise
def scan_over_layers(your_forward):
    """Checks `your_forward(layer, w, x)`: N layers `layer(w[i], x) -> x` in a program whose
    length does not grow with N.
    """

    def layer(w, x):
        return x + jnp.tanh(x @ w)

    def length(N):
        shapes = (
            jax.ShapeDtypeStruct((N, 8, 8), jnp.float32),
            jax.ShapeDtypeStruct((4, 8), jnp.float32),
        )
        lowered = jax.jit(lambda w, x: your_forward(layer, w, x)).lower(*shapes)
        return len(lowered.as_text().splitlines())

    w, x = jax.random.normal(jax.random.key(0), (5, 8, 8)), jnp.ones((4, 8))

    def one_after_another(w):
        y = x
        for matrix in w:
            y = layer(matrix, y)
        return y

    expected = one_after_another(w)
    hint = "Read `forward` at the top of this notebook: how does it apply its layers?"
    yours = call(your_forward, layer, w, x, hint=hint)
    require(
        not isinstance(yours, tuple | list),
        "Return the last x alone. `jax.lax.scan` returns a pair: the carry and the outputs.",
    )
    require(
        jnp.shape(yours) == x.shape,
        f"Return the last x, of shape {x.shape}; yours has shape {jnp.shape(yours)}.",
    )
    require(
        not close(yours, layer(w[0], x)) and not close(yours, layer(w[-1], x)),
        "Only one layer was applied. What does the scan carry on?",
    )
    require(
        close(yours, expected), "Not the result of the layers one after another, first to last."
    )
    three = call(your_forward, layer, w[:3], x, hint="")
    require(
        close(three, one_after_another(w[:3])),
        "Right for 5 layers and wrong for 3: take the number of layers from w.",
    )
    short, long = length(4), length(16)
    require(
        long <= short,
        f"4 layers are {short} lines of program, 16 are {long}: the compiler reads every"
        " layer.",
    )
    return f"{short} lines of program for 4 layers and for 16."
