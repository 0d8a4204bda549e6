"""Checks of notebook 15's exercises."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib import measure
from course_lib.lessons.check.answers import (
    call,
    close,
    equations,
    exercise,
    predicted,
    require,
)
from course_lib.smaller_and_faster import large_vocabulary

MIB = 2**20


@exercise
def bytes_of_logits(all_logits, in_chunks):
    """Checks predictions for the head of Llama 3 8B, in MiB: the float32 logits of 8,192
    tokens; and one chunk of 32 along the vocabulary, with the float32 sum for the gradient of
    x.
    """
    tokens, width, vocab, chunks = 8_192, 4_096, 128_256, 32
    predicted(
        all_logits,
        in_chunks,
        hint="How many logits does one token have, and how many bytes does each take?",
    )
    right = measured_bytes(tokens, width, vocab, 1)[0] / MIB
    require(
        abs(all_logits / right * 2 - 1) > 0.03,
        f"{all_logits:,.0f} MiB would be logits of 2 bytes: the loss needs them in float32.",
    )
    require(
        abs(all_logits / right * 1e6 / MIB - 1) > 0.01,
        f"{all_logits:,.0f} would be MB of 10^6 bytes. One MiB has 2^20.",
    )
    require(
        abs(all_logits * 1024 / right - 1) > 0.03,
        f"{all_logits:,.2f} would be GiB. Answer in MiB.",
    )
    require(
        abs(all_logits / right - 1) <= 0.03,
        f"{all_logits:,.0f} MiB of logits are too {_many(all_logits, right)}, compared with the"
        " traced program. It has one float32 number for each token and each column.",
    )
    chunk, summed = (size / MIB for size in measured_bytes(tokens, width, vocab, chunks))
    is_chunk = abs(in_chunks - chunk) < abs(in_chunks - summed)
    require(
        not is_chunk or abs(in_chunks / chunk - 1) > 0.03,
        f"{in_chunks:,.0f} MiB is one chunk of logits. The float32 sum for the gradient of x"
        " is missing: each chunk adds to it, so it lives as long as the loop.",
    )
    require(
        abs(in_chunks / (chunk + summed / 2) - 1) > 0.03,
        f"{in_chunks:,.0f} MiB would be a sum in bfloat16: 32 additions would round 32 times.",
    )
    require(
        is_chunk or abs(in_chunks / summed - 1) > 0.03,
        f"{in_chunks:,.0f} MiB is the float32 sum for the gradient of x. The chunk of logits is"
        " missing: both exist at once.",
    )
    require(
        abs(in_chunks / (chunk + summed) - 1) <= 0.03,
        f"{in_chunks:,.0f} MiB are too {_many(in_chunks, chunk + summed)} for a chunk and the"
        " sum, compared with the traced program. Which shape has each of the two?",
    )
    return f"{right:,.0f} MiB become {chunk + summed:,.0f}."


def _many(yours: int | float, right: int | float) -> str:
    return "many" if yours > right else "few"


def measured_bytes(tokens: int, width: int, vocab: int, chunks: int) -> tuple[int, int]:
    """Returns the bytes of the largest float32 values with a dimension of the vocabulary, and
    without one, in the traced gradient of a head in bfloat16.
    """
    x, head = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, width), (width, vocab))
    )
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(x, head, labels):
        per_label, _ = large_vocabulary.linear_cross_entropy(x, head, labels, chunks=chunks)
        return per_label.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, head, labels)
    values = [v for v in all_values(jaxpr.jaxpr) if v.dtype == jnp.float32]
    logits = [v.size * 4 for v in values if v.shape[-2:] == (tokens, vocab // chunks)]
    others = [v.size * 4 for v in values if v.shape[-2:] == (tokens, width)]
    return max(logits), max(others)


def all_values(jaxpr) -> list:
    """Lists the shapes and dtypes of all values of a program, inner programs included."""
    outputs = [v.aval for eqn in equations(jaxpr) for v in eqn.outvars]
    return [aval for aval in outputs if hasattr(aval, "dtype")]


@exercise
def online_logsumexp(your_add):
    """Checks `your_add(largest, total, logits)`: the running maximum, and the running sum of
    exponentials relative to it, after one more chunk of logits [T v].
    """
    first = np.array([[1.0, 3.0, 2.0], [500.0, 499.0, 0.0], [-700.0, -701.0, -702.0]])
    chunks = jnp.float32([first, first[:, ::-1] + 3, first - 40])
    largest, total = jnp.full(3, -jnp.inf), jnp.zeros(3)
    hint = (
        "`total` is relative to the old maximum, the chunk's sum to another one. Which one"
        " number can both be made relative to? Try it by hand: maximum 1 and sum 1, then the"
        " logits 3 and 2."
    )
    for chunk in chunks:
        result = call(your_add, largest, total, chunk, hint=hint)
        require(
            isinstance(result, tuple) and len(result) == 2,
            "Return two arrays: the maximum and the sum.",
        )
        largest, total = result
        require(
            not close(total, chunk.max(axis=-1)),
            "This is the maximum where the sum should be: return the maximum first.",
        )
        require(
            not jnp.isnan(total).any(),
            "`total` is NaN. The first maximum is -inf: what is the exponential of the"
            " difference of the two maxima then?",
        )
    expected = jax.nn.logsumexp(jnp.concatenate(chunks, axis=-1), axis=-1)
    yours = largest + jnp.log(total)
    top = jnp.concatenate(chunks, axis=-1).max(axis=-1)
    require(
        jnp.isfinite(total).all() and (total > 0).all(),
        "A sum overflows or vanishes: with logits of 500 or -700, subtract the maximum before"
        " `jnp.exp`.",
    )
    require(
        close(largest, top),
        f"The maximum of all chunks is {top.tolist()}, not {jnp.asarray(largest).tolist()}.",
    )
    require(
        close(yours, expected, 1e-6),
        f"The logsumexp is {expected.tolist()}, not {yours.tolist()}. Which maximum is the old"
        " sum relative to, which one the chunk's, and which one the result?",
    )
    return "three chunks give the logsumexp of all logits, of any size."


@exercise
def one_pass(your_gradient):
    """Checks `your_gradient(x, head, labels, weights)`: the weighted mean loss, and its
    gradients by x and head, with three products per chunk of tokens and never all logits.
    """
    tokens, width, vocab = 64, 8, 96
    keys = jax.random.split(jax.random.key(0), 4)
    x, head = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, ((tokens, width), (width, vocab)), strict=False)
    )
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab)
    weights = jax.random.randint(keys[3], (tokens,), 0, 3).astype(jnp.float32)

    def reference(x, head, weights=weights):
        losses, _ = large_vocabulary.linear_cross_entropy(x, head, labels, chunks=1)
        return (losses * weights).sum() / weights.sum()

    args = x, head, labels, weights
    hint = "Scan over chunks of tokens; in each, compute logits, loss and both gradients."
    result = call(your_gradient, *args, hint=hint)
    require(
        isinstance(result, tuple) and len(result) == 3,
        "Return three things: loss, gradient of x, gradient of head.",
    )
    loss, (dx, dhead) = jax.value_and_grad(reference, (0, 1))(x, head)
    plain = jax.grad(lambda x, head: reference(x, head, jnp.ones(tokens)), (0, 1))(x, head)
    require(
        not close(result[2], plain[1]),
        "This is the gradient of the unweighted mean: multiply each token's gradient of the"
        " logits by its weight.",
    )
    require(
        not close(result[2], dhead * weights.sum()),
        f"The gradients are {weights.sum():.0f} times too large: divide by the sum of all"
        " weights.",
    )
    require(close(result[0], loss), f"The loss is {float(loss):.4f}, not {result[0]}.")
    require(close(result[1], dx), "The gradient of x is not that of the weighted mean loss.")
    require(
        close(result[2], dhead), "The gradient of head is not that of the weighted mean loss."
    )
    jaxpr = jax.make_jaxpr(your_gradient)(*args)
    largest = max(v.size for v in all_values(jaxpr.jaxpr))
    require(
        largest <= tokens * vocab // 4,
        f"A value has {largest:,} numbers; all logits would be {tokens * vocab:,}. Four chunks"
        " or more keep it small.",
    )
    require(
        any(eqn.primitive.name in ("scan", "while") for eqn in equations(jaxpr.jaxpr)),
        "In a loop of Python, all chunks' logits may exist at once: scan over the chunks.",
    )
    flops = sum(measure.flops(your_gradient, *args).total.values())
    products = flops / (2 * tokens * width * vocab)
    require(
        products <= 3.01,
        f"{products:.1f} products per chunk: three are enough. Are the logits computed a second"
        " time, by you or by autodiff?",
    )
    return "the same gradients, with three products in place of four."
