"""Checks of notebook 15's exercises."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course_lib import measure
from course_lib.lessons.check.answers import WrongAnswer, call, close, equations
from course_lib.lessons.check.exercises import (
    Function,
    Numbered,
    Numbers,
    Outcome,
    change,
    normal,
)
from course_lib.smaller_and_faster import large_vocabulary

MIB = 2**20


def all_values(jaxpr):
    """Lists the shapes and dtypes of all values of a program, inner programs included."""
    outputs = [v.aval for eqn in equations(jaxpr) for v in eqn.outvars]
    return [aval for aval in outputs if hasattr(aval, "dtype")]


def measured_mib(tokens, width, vocab, chunks):
    """Returns the MiB of the largest float32 values with a dimension of the vocabulary, and
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
    return [
        max(4 * v.size for v in values if v.shape[-2:] == (tokens, columns)) / MIB
        for columns in (vocab // chunks, width)
    ]


def of_llama():
    """Returns MiB in the head of Llama 3 8B, for 8,192 tokens."""
    sizes = 8_192, 4_096, 128_256
    all_logits, _ = measured_mib(*sizes, 1)
    chunk, summed = measured_mib(*sizes, 32)
    numbers = {"all_logits": all_logits, "in_32_chunks": chunk + summed}
    return numbers | {"chunk": chunk, "summed": summed}


class Head(Numbered):
    """MiB of the head's logits."""

    def is_near(self, name, value, tolerance=0.03):
        return abs(self.yours[name] / value - 1) <= tolerance

    def is_nearest(self, name):
        """Whether the second number is near a mistake, and to no other one nearer."""
        chunk, summed = self.right["chunk"], self.right["summed"]
        mistakes = {
            "none": chunk + summed,
            "chunk": chunk,
            "two chunks": 2 * chunk,
            "sum": summed,
            "both in bfloat16": (chunk + summed) / 2,
            "sum in bfloat16": chunk + summed / 2,
            "chunk in bfloat16": chunk / 2 + summed,
        }
        nearest = min(mistakes, key=lambda n: abs(self.in_32_chunks - mistakes[n]))
        return nearest == name and self.is_near("in_32_chunks", mistakes[name])


bytes_of_logits = Numbers(
    "bytes_of_logits",
    of_llama,
    tolerance=0.005,
    near=0.03,
    outcome=Head,
    rows={
        "all_logits": {
            "2 bytes": lambda right: right / 2,
            "MB": (
                lambda right: right * MIB / 1e6,
                lambda it: it.is_near("all_logits", it.right["all_logits"] * MIB / 1e6, 0.01),
            ),
            "GiB": lambda right: right / 1024,
            "bytes": lambda right: right * MIB,
            "other logits": ...,
        },
        "in_32_chunks": {
            "chunk": (125.25, lambda it: it.is_nearest("chunk")),
            "two chunks": (250.5, lambda it: it.is_nearest("two chunks")),
            "sum": (128, lambda it: it.is_nearest("sum")),
            "both in bfloat16": (126.6, lambda it: it.is_nearest("both in bfloat16")),
            "sum in bfloat16": ([189.25, 189], lambda it: it.is_nearest("sum in bfloat16")),
            "chunk in bfloat16": ([190.6, 191], lambda it: it.is_nearest("chunk in bfloat16")),
            "other chunk": ...,
        },
    },
)


def three_chunks():
    first = np.array([[1.0, 3.0, 2.0], [500.0, 499.0, 0.0], [-700.0, -701.0, -702.0]])
    return [(jnp.float32([first, first[:, ::-1] + 3, first - 40]),)]


def add_chunk(largest, total, logits):
    new = jnp.maximum(largest, logits.max(axis=-1))
    chunk = jnp.exp(logits - new[:, None]).sum(axis=-1)
    return new, total * jnp.exp(largest - new) + chunk


class Online(Outcome):
    """The maximum and the sum after each chunk."""

    chunks = property(lambda it: it.args[0])
    all_logits = property(lambda it: np.concatenate(it.chunks, axis=-1))
    totals = property(lambda it: np.array([total for _, total in it.result], np.float32))
    total = property(lambda it: it.totals[-1])
    largest = property(lambda it: np.asarray(it.result[-1][0], np.float32))
    top = property(lambda it: it.all_logits.max(axis=-1))
    expected = property(lambda it: jax.nn.logsumexp(it.all_logits, axis=-1))
    logsumexp = property(
        lambda it: it.largest + np.log(np.where(it.total > 0, it.total, np.nan))
    )
    is_right = property(lambda it: close(it.logsumexp, it.expected, 1e-6))
    first = property(lambda it: np.log(np.float32(it.right[0][1])))
    is_logarithm = property(
        lambda it: any(close(it.totals[0], it.first + low) for low in (0, it.right[0][0]))
    )
    is_one_maximum = property(lambda it: (it.largest == it.top.max()).all())
    are_exchanged = property(
        lambda it: any(
            close(total, chunk.max(axis=-1))
            for total, chunk in zip(it.totals, it.chunks, strict=True)
        )
    )


class ForEachChunk(Function):
    """An exercise whose answer is called once for each chunk, with what it returned before."""

    def run(self, outcome):
        results: list[Any] = []
        carry: Any = jnp.full(3, -jnp.inf), jnp.zeros(3)
        for chunk in outcome.args[0]:
            carry = call(outcome.function, *carry, chunk, hint=self.first_hint)
            is_pair = (
                hasattr(carry, "__len__") and len(carry) == 2 and not isinstance(carry, dict)
            )
            if not is_pair or any(np.shape(one) != (3,) for one in carry):
                raise WrongAnswer(self.sentences["no pair"])
            carry = tuple(map(jnp.asarray, carry))
            results.append(carry)
        return results


online_logsumexp = ForEachChunk(
    "online_logsumexp",
    add_chunk,
    cases=three_chunks,
    outcome=Online,
    rows={
        "no pair": (lambda largest, total, logits: largest, lambda it: False),
        "exchanged": (lambda *args: add_chunk(*args)[::-1], lambda it: it.are_exchanged),
        "NaN": (
            change("largest - new", "new - largest"),
            lambda it: np.isnan(it.totals[0]).any(),
        ),
        "old maximum": (
            change("logits - new", "logits - largest"),
            lambda it: np.isinf(it.totals[0]).all(),
        ),
        "one maximum": (
            change("logits.max(axis=-1)", "logits.max()"),
            lambda it: not it.is_right and it.is_one_maximum,
        ),
        "maximum": (
            change("jnp.maximum(largest, ", "("),
            lambda it: not close(it.largest, it.top),
        ),
        "logarithm": (
            [
                change(
                    "return new, total * jnp.exp(largest - new) + chunk",
                    "return new, jnp.log(total * jnp.exp(largest - new) + chunk)",
                ),
                lambda largest, total, logits: (
                    jnp.maximum(largest, logits.max(axis=-1)),
                    jnp.logaddexp(
                        jnp.where(largest > -jnp.inf, total, largest),
                        jax.nn.logsumexp(logits, axis=-1),
                    ),
                ),
            ],
            lambda it: not it.is_right and it.is_logarithm,
        ),
        "overflow": (
            change("logits - new[:, None]", "logits"),
            lambda it: not (np.isfinite(it.total).all() and (it.total > 0).all()),
        ),
        "another": change(" * jnp.exp(largest - new)", ""),
    },
)

TOKENS, WIDTH, VOCAB = 64, 12, 96


def head_and_labels():
    random = np.random.default_rng(1)
    x, head = normal(0, (TOKENS, WIDTH), (WIDTH, VOCAB))
    labels, weights = random.integers(0, VOCAB, TOKENS), random.integers(0, 3, TOKENS)
    return [(x, head, jnp.asarray(labels, jnp.int32), jnp.asarray(weights, jnp.float32))]


def unrolled(add, carry, parts):
    outputs = []
    for i in range(len(parts[0])):
        carry, output = add(carry, [part[i] for part in parts])
        outputs.append(output)
    return carry, jnp.stack(outputs)


def in_one_pass(x, head, labels, weights):
    scale, chunks = weights / weights.sum(), 8

    def add(carry, part):
        loss, dhead = carry
        x, labels, scale = part
        logits = x @ head
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        one_hot = jax.nn.one_hot(labels, VOCAB)
        loss += (scale * (logsumexp - (logits * one_hot).sum(-1))).sum()
        dlogits = scale[:, None] * (jnp.exp(logits - logsumexp[:, None]) - one_hot)
        return (loss, dhead + x.T @ dlogits), dlogits @ head.T

    parts = [a.reshape(chunks, -1, *a.shape[1:]) for a in (x, labels, scale)]
    (loss, dhead), dx = jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(head)), parts)
    return loss, dx.reshape(x.shape), dhead


class OnePass(Outcome):
    """Loss and gradients, and what their program computes."""

    all_logits = TOKENS * VOCAB
    weight = property(lambda it: it.args[3].sum())
    is_triple = property(lambda it: isinstance(it.result, tuple | list) and len(it.result) == 3)

    def has(self, i):
        return close(self.result[i], self.right[i])

    @property
    def is_unweighted(self):
        x, head, labels, _ = self.args
        plain = in_one_pass(x, head, labels, jnp.ones(TOKENS))
        return close(self.result[2], plain[2])

    largest_value = functools.cached_property(
        lambda it: max(all_values(it.program), key=lambda value: value.size)
    )
    largest = property(lambda it: it.largest_value.size)
    is_large = property(lambda it: it.largest > it.all_logits // 4)
    are_stacked = property(
        lambda it: it.is_large and it.largest_value.shape[1:] == (WIDTH, VOCAB)
    )

    @functools.cached_property
    def products(self):
        try:
            flops = sum(measure.flops(self.function, *self.args).total.values())
        except ValueError as error:  # of a `while_loop`
            raise WrongAnswer(f"Right numbers, but: {error}.") from error
        return flops / (2 * TOKENS * WIDTH * VOCAB)


one_pass = Function(
    "one_pass",
    in_one_pass,
    cases=head_and_labels,
    name="your result",
    first=("no triple",),
    outcome=OnePass,
    rows={
        "no triple": (lambda *args: in_one_pass(*args)[:2], lambda it: not it.is_triple),
        "unweighted": (
            change("scale, chunks =", "scale, chunks = 1 / TOKENS + 0 *"),
            lambda it: it.is_unweighted,
        ),
        "not divided": (
            change(" / weights.sum()", ""),
            lambda it: close(it.result[2], it.right[2] * it.weight),
        ),
        "loss": (change("return loss", "return 2 * loss"), lambda it: not it.has(0)),
        "of x": (change("loss, dx.reshape", "loss, -dx.reshape"), lambda it: not it.has(1)),
        "of head": (change("(x.shape), dhead", "(x.shape), -dhead"), lambda it: not it.has(2)),
        "stacked": (
            change(
                "(loss, dhead + x.T @ dlogits), dlogits @ head.T",
                "(loss, dhead), (dlogits @ head.T, x.T @ dlogits)",
                "(loss, dhead), dx =",
                "(loss, _), (dx, dhead) =",
                "dx.reshape(x.shape), dhead",
                "dx.reshape(x.shape), dhead.sum(0)",
            ),
            lambda it: it.are_stacked,
        ),
        "large": (change(", 8", ", 1"), lambda it: it.is_large),
        "unrolled": (
            change("jax.lax.scan(", "unrolled("),
            lambda it: not {"scan", "while"} & set(it.primitives),
        ),
        "products": (
            change("(logits * one_hot)", "((x @ head) * one_hot)"),
            lambda it: it.products > 3.01,
        ),
    },
)
