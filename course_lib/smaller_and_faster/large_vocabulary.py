"""Linear layer and cross entropy in one function, which never holds all logits.

A model with a vocabulary of V computes V logits per token. In float32, with their softmax and
their gradient, they often take more memory than everything else in the step. But the loss needs
two numbers per token only: the logit of the label, and the logarithm of the sum of all
exponentials (*logsumexp*). So the logits can be computed in chunks, each used and dropped:

    loss = logsumexp(x W) - (x W)[label]            d loss / d logits = softmax - one-hot

    along="vocabulary"    a chunk has all tokens and some columns of W. The logsumexp grows from
                          chunk to chunk (*online*), as in flash attention. Each chunk gives its
                          columns of the gradient of W, and adds to the gradient of x.
    along="tokens"        a chunk has some tokens and all of W. Each chunk gives its rows of the
                          gradient of x, and adds to the gradient of W: all of it is read and
                          written once per chunk, so take few.

The backward pass computes the logits of each chunk again, from x, W and the logsumexp: 8 D V
FLOPs per token in place of 6 D V. Liger Kernel (https://arxiv.org/abs/2410.10989) computes the
gradients in the forward pass and keeps them: nothing is computed twice, but the weight of each
label must be known in advance, and the gradient of W waits in memory.

In Cut Cross-Entropy (Wijmans et al., 2024, https://arxiv.org/abs/2411.09009), chunks never
leave the chip.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

LENGTHS = {
    "vocabulary": "columns of the head on a device (num_outputs)",
    "tokens": "tokens of a sequence on a device (seq_len)",
}
ALONG = tuple(LENGTHS)


class Statistics(NamedTuple):
    """The numbers that the loss needs about the logits of each token."""

    logsumexp: Float[Array, "..."]  # logarithm of the sum of the exponentials of its logits
    of_label: Float[Array, "..."]  # the logit of its label; NaN if the head has no such column
    top: Float[Array, "..."]  # its largest logit
    best: Int[Array, "..."]  # the column of its largest logit; of several, the first


@struct.dataclass
class Factors:
    """Logits that are not computed yet: `x @ head + bias`."""

    x: Array  # activations [..., D]
    head: Array  # weights of the output layer, [D, V]
    bias: Array | None = None  # of the output layer, [V]

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.x.shape[:-1], self.head.shape[1]


def linear_cross_entropy(
    x: Float[Array, "... D"],
    head: Float[Array, "D V"],
    labels: Int[Array, "..."],
    bias: Float[Array, "V"] | None = None,
    *,
    chunks: int,
    along: str = "vocabulary",
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns the cross entropy of each label in nats, and 1.0 where the label has the largest
    logit, else 0.0.

    Equals `losses.cross_entropy(x @ head + bias, labels)`. Products take operands of the dtype
    of `x` and add up in float32, as do all other sums. As in that function, a label outside of
    the vocabulary gives NaN, and a negative one counts from the end.

    Args:
      x: activations. Along "tokens", the last dimension before D is cut.
      head: weights of the output layer; for one that is tied to the token table [V, D], its
        transpose.
      labels: columns of the head.
      bias: added to the logits.
      chunks: into how many the logits are cut.
      along: "vocabulary" or "tokens".
    """
    check_arrays(x, head, bias, labels)
    places = jnp.where(labels < 0, labels + head.shape[1], labels)
    per_token = statistics(Factors(x, head, bias), places, chunks=chunks, along=along)
    correct = per_token.best == labels
    return per_token.logsumexp - per_token.of_label, correct.astype(jnp.float32)


def statistics(
    logits: Factors, labels: Int[Array, "..."], *, chunks: int, along: str = "vocabulary"
) -> Statistics:
    """Returns the statistics of each token's logits, of which only one chunk exists at a time.

    Gradients of `logsumexp` and `of_label` reach x, head and bias; `top` has none. As
    `linear_cross_entropy`, but a negative label is outside.
    """
    x, head = logits.x, logits.head
    check_arrays(x, head, logits.bias, labels)
    length, width = x.shape[-2:] if x.ndim > 1 else (1, *x.shape)
    check(chunks, along, tokens=length, vocabulary=head.shape[1])
    # B sequences of L: a batch that is divided over devices stays divided.
    rows, places = x.reshape(-1, length, width), labels.reshape(-1, length)
    per_token = _statistics(rows, head, logits.bias, places, chunks, along)
    per_token = Statistics(*(number.reshape(labels.shape) for number in per_token))
    return per_token._replace(top=jax.lax.stop_gradient(per_token.top))


def check_arrays(x: Any, head: Any, bias: Any, labels: Any) -> None:
    """Refuses arrays with which the loss would be that of other tokens, or of other logits."""
    if x.ndim == 0 or head.ndim != 2 or head.shape[0] != x.shape[-1]:
        raise ValueError(
            f"head of shape {head.shape} must be [D, V], and x of shape {x.shape} must end in"
            " the same D; pass the transpose of a token table"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels of shape {labels.shape} must be of shape {x.shape[:-1]}, one per token"
        )
    if bias is not None and bias.shape != head.shape[1:]:
        raise ValueError(f"bias of shape {bias.shape} must be of shape {head.shape[1:]}")


def check(chunks: int, along: str, *, tokens: int, vocabulary: int, prefix: str = "") -> None:
    """Refuses chunks that cannot be cut from the tokens or the columns of a device."""
    if along not in ALONG:
        raise ValueError(f"{prefix}along={along!r} must be one of {ALONG}")
    size = {"tokens": tokens, "vocabulary": vocabulary}[along]
    if chunks < 1 or size % chunks:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        near = min(divisors, key=lambda n: abs(n - chunks))
        raise ValueError(
            f"{prefix}chunks={chunks} must divide the {size} {LENGTHS[along]}, so that all"
            f" chunks have one size; take {near}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _statistics(x, head, bias, labels, chunks, along):
    """Returns the statistics of x [B L D] and labels [B L]: one chunk of logits at a time."""
    if along == "tokens":

        def of_rows(i):
            logits = _logits(_cut(x, i, chunks, 1), head, bias)
            return _of_chunk(logits, _cut(labels, i, chunks, 1))

        def write(i, so_far):
            return jax.tree.map(lambda array, new: _put(array, new, i, 1), so_far, of_rows(i))

        return jax.lax.fori_loop(0, chunks, write, _of_nothing(x))

    size = head.shape[1] // chunks

    def add(i, so_far):
        columns, added = _cut(head, i, chunks, 1), _cut(bias, i, chunks, 0)
        new = _of_chunk(_logits(x, columns, added), labels - i * size)
        inside, later = ~jnp.isnan(new.of_label), new.top > so_far.top
        return Statistics(
            jnp.logaddexp(so_far.logsumexp, new.logsumexp),
            jnp.where(inside, new.of_label, so_far.of_label),
            jnp.maximum(so_far.top, new.top),
            jnp.where(later, new.best + i * size, so_far.best),
        )

    return jax.lax.fori_loop(0, chunks, add, _of_nothing(x))


def forward(x, head, bias, labels, chunks, along):
    """Returns the statistics, and what the backward pass reads."""
    per_token = _statistics(x, head, bias, labels, chunks, along)
    return per_token, (x, head, bias, labels, per_token.logsumexp)


def backward(chunks, along, saved, gradient):
    """Returns the gradients of x, head and bias; sums over chunks are float32."""
    x, head, bias, labels, logsumexp = saved
    of_tokens = labels, logsumexp, gradient.logsumexp, gradient.of_label
    wide = functools.partial(jnp.zeros_like, dtype=jnp.float32)

    if along == "tokens":

        def add_rows(i, so_far):
            dx, dhead, dbias = so_far
            rows = _cut(x, i, chunks, 1)
            dlogits = gradient_of_logits(
                _logits(rows, head, bias), *(_cut(number, i, chunks, 1) for number in of_tokens)
            )
            dx = _put(dx, _times_head(dlogits, head, x.dtype), i, 1)
            dbias = None if bias is None else dbias + dlogits.sum(axis=(0, 1))
            return dx, dhead + _times_rows(rows, dlogits), dbias

        zeros = jnp.zeros_like(x), wide(head), None if bias is None else wide(bias)
        dx, dhead, dbias = jax.lax.fori_loop(0, chunks, add_rows, zeros)
    else:
        size = head.shape[1] // chunks

        def add_columns(i, so_far):
            dx, dhead, dbias = so_far
            columns, added = _cut(head, i, chunks, 1), _cut(bias, i, chunks, 0)
            dlogits = gradient_of_logits(
                _logits(x, columns, added), labels - i * size, *of_tokens[1:]
            )
            dhead = _put(dhead, _times_rows(x, dlogits), i, 1)
            dbias = None if bias is None else _put(dbias, dlogits.sum(axis=(0, 1)), i, 0)
            return dx + _times_head(dlogits, columns, x.dtype), dhead, dbias

        zeros = wide(x), jnp.zeros_like(head), None if bias is None else jnp.zeros_like(bias)
        dx, dhead, dbias = jax.lax.fori_loop(0, chunks, add_columns, zeros)
    dbias = None if bias is None else dbias.astype(bias.dtype)
    return dx.astype(x.dtype), dhead.astype(head.dtype), dbias, None


_statistics.defvjp(forward, backward)


def _logits(x: Array, head: Array, bias: Array | None) -> Float[Array, "B L v"]:
    logits = _product("bld,dv->blv", x, head.astype(x.dtype))
    return logits if bias is None else logits + bias.astype(jnp.float32)[None, None]


def _times_head(dlogits: Array, head: Array, dtype: Any) -> Float[Array, "B L D"]:
    return _product("blv,dv->bld", dlogits.astype(dtype), head.astype(dtype))


def _times_rows(x: Array, dlogits: Array) -> Float[Array, "D v"]:
    return _product("bld,blv->dv", x, dlogits.astype(x.dtype))


def _product(dimensions: str, left: Array, right: Array) -> Array:
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)


def _of_chunk(logits: Float[Array, "B L v"], labels: Int[Array, "B L"]) -> Statistics:
    mine = _one_hot(logits, labels)
    return Statistics(
        jax.nn.logsumexp(logits, axis=-1),
        jnp.where(mine.any(axis=-1), jnp.where(mine, logits, 0).sum(axis=-1), jnp.nan),
        logits.max(axis=-1),
        logits.argmax(axis=-1).astype(jnp.int32),
    )


def _of_nothing(x: Float[Array, "B L D"]) -> Statistics:
    """Returns the statistics of no logits at all, which vary over devices as x does."""
    number = functools.partial(jnp.full_like, x[..., 0])
    low = number(-jnp.inf, dtype=jnp.float32)
    return Statistics(low, number(jnp.nan, dtype=jnp.float32), low, number(0, dtype=jnp.int32))


def gradient_of_logits(
    logits: Array, labels: Array, logsumexp: Array, dlogsumexp: Array, dlabel: Array
) -> Float[Array, "B L v"]:
    """The gradient of the logsumexp is the softmax, that of the label's logit is one-hot."""
    softmax = jnp.exp(logits - logsumexp[..., None])
    one_hot = jnp.where(_one_hot(logits, labels), dlabel[..., None], 0)
    return dlogsumexp[..., None] * softmax + one_hot


def _one_hot(logits: Array, labels: Array) -> Array:
    columns = jnp.arange(logits.shape[-1], dtype=labels.dtype)
    return columns[None, None] == labels[..., None]


def _cut(array: Any, i: Any, chunks: int, axis: int) -> Any:
    """Returns chunk i of an array, or None of None."""
    if array is None:
        return None
    size = array.shape[axis] // chunks
    return jax.lax.dynamic_slice_in_dim(array, i * size, size, axis)


def _put(array: Array, chunk: Array, i: Any, axis: int) -> Array:
    start = i * chunk.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(array, chunk.astype(array.dtype), start, axis)
