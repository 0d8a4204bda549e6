"""Right and wrong answers to the exercises of notebook 15, for `test_check`."""

import jax
import jax.numpy as jnp

from course_lib.lessons import check
from course_lib.smaller_and_faster import large_vocabulary

FUNCTIONS = [check.online_logsumexp, check.one_pass]
PREDICTIONS = {check.bytes_of_logits: 2}


def online(rescale=True, shift=True, grow=True, sign=1):
    def add(largest, total, logits):
        top = logits.max(axis=-1)
        new = jnp.maximum(largest, top) if grow else top
        chunk = jnp.exp(logits - new[:, None] * shift).sum(axis=-1)
        return new, total * (jnp.exp(sign * (largest - new)) if rescale else 1) + chunk

    return add


def by_logaddexp(largest, total, logits):
    """Keeps the logsumexp as it is, in another way: relative to the new maximum."""
    whole = jnp.logaddexp(largest + jnp.log(total), jax.nn.logsumexp(logits, axis=-1))
    new = jnp.maximum(largest, logits.max(axis=-1))
    return new, jnp.exp(whole - new)


def in_one_pass(chunks=8, weighted=True, divided=True, again=False):
    def gradient(x, head, labels, weights):
        weights = weights if weighted else jnp.ones_like(weights)
        scale = weights / weights.sum() if divided else weights

        def add(carry, part):
            loss, dhead = carry
            x, labels, scale = part
            logits = x @ head
            logsumexp = jax.nn.logsumexp(logits, axis=-1)
            one_hot = jax.nn.one_hot(labels, head.shape[1])
            of_label = ((x @ head if again else logits) * one_hot).sum(-1)
            loss += (scale * (logsumexp - of_label)).sum()
            dlogits = scale[:, None] * (jnp.exp(logits - logsumexp[:, None]) - one_hot)
            return (loss, dhead + x.T @ dlogits), dlogits @ head.T

        parts = jax.tree.map(lambda a: a.reshape(chunks, -1, *a.shape[1:]), (x, labels, scale))
        (loss, dhead), dx = jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(head)), parts)
        return loss, dx.reshape(x.shape), dhead

    return gradient


def by_the_library(x, head, labels, weights):
    def loss(x, head):
        losses, _ = large_vocabulary.linear_cross_entropy(x, head, labels, chunks=8)
        return (losses * weights).sum() / weights.sum()

    value, (dx, dhead) = jax.value_and_grad(loss, (0, 1))(x, head)
    return value, dx, dhead


def without_the_head(x, head, labels, weights):
    return in_one_pass()(x, head, labels, weights)[:2]


def in_python(x, head, labels, weights):
    """Four chunks, whose logits all exist at the same time."""
    logits = [part @ head for part in jnp.split(x, 4)]
    loss, dhead, dx = jnp.zeros(()), jnp.zeros_like(head), []
    parts = (jnp.split(a, 4) for a in (x, labels, weights / weights.sum()))
    for chunk, part, label, scale in zip(logits, *parts, strict=True):
        logsumexp = jax.nn.logsumexp(chunk, axis=-1)
        one_hot = jax.nn.one_hot(label, head.shape[1])
        loss += (scale * (logsumexp - (chunk * one_hot).sum(-1))).sum()
        dlogits = scale[:, None] * (jnp.exp(chunk - logsumexp[:, None]) - one_hot)
        dx.append(dlogits @ head.T)
        dhead += part.T @ dlogits
    return loss, jnp.concatenate(dx), dhead


ALL, CHUNK, SUM = 4_008, 125.25, 128
RIGHT = [
    (check.online_logsumexp, (by_logaddexp,)),
    (check.one_pass, (in_one_pass(chunks=4),)),
    (check.bytes_of_logits, (4_000, 250)),
]
WRONG = [
    (check.bytes_of_logits, (ALL / 2, CHUNK + SUM), "2 bytes"),
    (check.bytes_of_logits, (2 * ALL, CHUNK + SUM), "too many"),
    (check.bytes_of_logits, (ALL / 1024, CHUNK + SUM), "would be GiB"),
    (check.bytes_of_logits, (4, CHUNK + SUM), "would be GiB"),
    (check.bytes_of_logits, (ALL / 10, CHUNK + SUM), "too few"),
    (check.bytes_of_logits, (ALL * 2**20 / 1e6, CHUNK + SUM), "MB of 10^6"),
    (check.bytes_of_logits, (ALL, CHUNK), "gradient of x is missing"),
    (check.bytes_of_logits, (ALL, SUM), "chunk of logits is missing"),
    (check.bytes_of_logits, (ALL, CHUNK + SUM / 2), "bfloat16"),
    (check.bytes_of_logits, (ALL, ALL / 8), "too many for a chunk and the sum"),
    (
        check.online_logsumexp,
        (online(rescale=False),),
        "maximum is the old sum relative",
    ),
    (check.online_logsumexp, (online(shift=False),), "overflows"),
    (check.online_logsumexp, (online(grow=False),), "maximum of all chunks"),
    (check.online_logsumexp, (lambda largest, total, logits: largest,), "two arrays"),
    (check.online_logsumexp, (online(sign=-1),), "`total` is NaN"),
    (check.online_logsumexp, (lambda *a: online()(*a)[::-1],), "maximum first"),
    (check.one_pass, (in_one_pass(weighted=False),), "unweighted"),
    (check.one_pass, (in_one_pass(divided=False),), "times too large"),
    (check.one_pass, (in_one_pass(chunks=1),), "all logits"),
    (check.one_pass, (in_one_pass(again=True),), "4.0 products"),
    (check.one_pass, (by_the_library,), "4.0 products"),
    (check.one_pass, (without_the_head,), "three things"),
    (check.one_pass, (in_python,), "scan over the chunks"),
]
