"""Linear layer and cross entropy in one function, which never holds all logits.

A model with a vocabulary of V computes V logits per token, often the largest array of a step.
But the loss needs two numbers per token only: the logit of the label, and the logarithm of the
sum of all exponentials (*logsumexp*). So the logits can be computed in chunks, each used and
dropped:

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
    ignore_index: int | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns the loss of each label in nats, and 1.0 where the label has the largest logit,
    else 0.0.

    Equals `losses.cross_entropy(x @ head + bias, labels)`. Products take operands of the dtype
    of `x` and add up in float32, as do all other sums.

    Args:
      x: activations. Along "tokens", the last dimension before D is cut.
      head: weights of the output layer; for one that is tied to the token table [V, D], its
        transpose.
      labels: columns of the head. As in `losses.cross_entropy`, a label of V or more gives NaN,
        and a negative one counts from the end.
      bias: added to the logits.
      chunks: into how many the logits are cut, at most.
      along: "vocabulary" or "tokens".
      ignore_index: a label whose loss and gradient are zero, often -100. The mean is then
        `loss.sum() / (labels != ignore_index).sum()`.
      softcap: limits the logits to `softcap * tanh(logits / softcap)`, as Gemma 2 does with 30.
      z_loss: adds this times the square of the logsumexp to the loss; PaLM takes 1e-4.
    """
    check_arrays(x, head, bias, labels)
    places = jnp.where(labels < 0, labels + head.shape[1], labels)
    per_token = statistics(
        Factors(x, head, bias), places, chunks=chunks, along=along, softcap=softcap
    )
    loss = per_token.logsumexp - per_token.of_label
    if z_loss:
        loss += z_loss * per_token.logsumexp**2
    correct = per_token.best == labels
    if ignore_index is not None:
        counts = labels != ignore_index
        loss, correct = jnp.where(counts, loss, 0), correct & counts
    return loss, correct.astype(jnp.float32)


def statistics(
    logits: Factors,
    labels: Int[Array, "..."],
    *,
    chunks: int,
    along: str = "vocabulary",
    softcap: float | None = None,
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
    per_token = _statistics(rows, head, logits.bias, places, chunks, along, softcap)
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
    """Refuses more chunks than there are tokens or columns on a device, or none."""
    if along not in ALONG:
        raise ValueError(f"{prefix}along={along!r} must be one of {ALONG}")
    size = {"tokens": tokens, "vocabulary": vocabulary}[along]
    if not 1 <= chunks <= size:
        raise ValueError(
            f"{prefix}chunks={chunks} must be between 1 and the {size} {LENGTHS[along]}; take"
            f" {min(max(chunks, 1), size)}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _statistics(x, head, bias, labels, chunks, along, softcap):
    """Returns the statistics of x [B L D] and labels [B L]: one chunk of logits at a time."""

    def write_rows(chunk, own, so_far):
        logits = _logits(_cut(x, chunk, 1), head, bias, softcap)
        new = _of_chunk(logits, _cut(labels, chunk, 1))
        return Statistics(
            *(_add(a, part, chunk, 1) for a, part in zip(so_far, new, strict=True))
        )

    def add_columns(chunk, own, so_far):
        logits = _logits(x, _cut(head, chunk, 1), _cut(bias, chunk, 0), softcap)
        new = _of_chunk(jnp.where(own, logits, -jnp.inf), labels - chunk[0])
        inside, later = ~jnp.isnan(new.of_label), new.top > so_far.top
        return Statistics(
            jnp.logaddexp(so_far.logsumexp, new.logsumexp),
            jnp.where(inside, new.of_label, so_far.of_label),
            jnp.maximum(so_far.top, new.top),
            jnp.where(later, new.best + chunk[0], so_far.best),
        )

    if along == "tokens":
        return _loop(write_rows, chunks, x.shape[1], _of_nothing(x))
    return _loop(add_columns, chunks, head.shape[1], _of_nothing(x))


def forward(x, head, bias, labels, chunks, along, softcap):
    """Returns the statistics, and what the backward pass reads."""
    per_token = _statistics(x, head, bias, labels, chunks, along, softcap)
    return per_token, (x, head, bias, labels, per_token.logsumexp)


def backward(chunks, along, softcap, saved, gradient):
    """Returns the gradients of x, head and bias; sums over chunks are float32."""
    *arrays, labels, logsumexp = saved
    of_tokens = labels, logsumexp, gradient.logsumexp, gradient.of_label
    tokens = along == "tokens"
    # The dimension that a chunk cuts: of x and what is per token, of head, of bias.
    axes = (1, None, None) if tokens else (None, 1, 0)

    def add(chunk, own, so_far):
        x, head, bias = map(_cut, arrays, [chunk] * 3, axes)
        labels, *numbers = (_cut(a, chunk, axes[0]) for a in of_tokens)
        labels, own = (labels, own[:, None]) if tokens else (labels - chunk[0], own)
        logits = _logits(x, head, bias, softcap)
        dlogits = jnp.where(own, gradient_of_logits(logits, labels, *numbers), 0)
        if softcap is not None:  # the slope of the tanh
            dlogits *= 1 - (logits / softcap) ** 2
        low = dlogits.astype(x.dtype)
        dx = _product("blv,dv->bld", low, head.astype(x.dtype))
        dhead = _product("bld,blv->dv", x, low)
        return list(map(_add, so_far, (dx, dhead, dlogits.sum(axis=(0, 1))), [chunk] * 3, axes))

    zeros = [
        a if a is None else jnp.zeros_like(a, dtype=jnp.float32 if axis is None else None)
        for a, axis in zip(arrays, axes, strict=True)
    ]
    length = arrays[0].shape[1] if tokens else arrays[1].shape[1]
    sums = _loop(add, chunks, length, zeros)
    return *jax.tree.map(lambda total, a: total.astype(a.dtype), sums, arrays), None


_statistics.defvjp(forward, backward)


def _loop(body: Any, chunks: int, length: int, start: Any) -> Any:
    """Calls `body((start, size), own, so_far)` for each chunk. All have one size. If they do
    not divide the length, the first one ends in the second, which writes there again: these
    places are not its own.
    """
    size = -(-length // chunks)
    number = -(-length // size)

    def turn(i: Any, so_far: Any) -> Any:
        end = length - (number - 1 - i) * size
        begin = jnp.maximum(end - size, 0)
        own = begin + jnp.arange(size) < end if length % size else jnp.ones(size, bool)
        return body((begin, size), own, so_far)

    return jax.lax.fori_loop(0, number, turn, start)


def _logits(
    x: Array, head: Array, bias: Array | None, softcap: float | None
) -> Float[Array, "B L v"]:
    logits = _product("bld,dv->blv", x, head.astype(x.dtype))
    logits = logits if bias is None else logits + bias.astype(jnp.float32)[None, None]
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


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


def _cut(array: Any, chunk: tuple[Any, int], axis: int | None) -> Any:
    """Returns a chunk of an array; all of it without an axis; None of None."""
    if array is None or axis is None:
        return array
    return jax.lax.dynamic_slice_in_dim(array, *chunk, axis)


def _add(total: Any, part: Array, chunk: tuple[Any, int], axis: int | None) -> Any:
    """Writes a part at its chunk's place; without an axis, adds it to the total."""
    if total is None or axis is None:
        return total if total is None else total + part
    return jax.lax.dynamic_update_slice_in_dim(total, part.astype(total.dtype), chunk[0], axis)
