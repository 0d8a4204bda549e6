"""Tensor parallelism: every device computes every token, with its share of the heads, hidden
width and vocabulary.

Two matrix multiplications (matmuls) in a row need one exchange (Shoeybi et al., 2019,
https://arxiv.org/abs/1909.08053). Cut the first by its columns: each device computes its own
outputs from the whole input, and nothing is sent. Cut the second by its rows: each device
multiplies its own inputs, and an all-reduce adds up the results. An MLP is such a pair, and so
is attention, whose queries, keys and values are cut by heads.

    column    x is whole, y = x W[:, own]                backward: gradients of x are summed
    row       x is cut, y = sum over devices x W[own]    backward: nothing is sent

Between the pairs, norms and residuals are the same on all devices. With *sequence parallelism*
(Korthikanti et al., 2022, https://arxiv.org/abs/2205.05198) each device keeps a part of the
sequence there instead: a column matmul first gathers the sequence, and a row matmul scatters
its sum. The number of bytes sent is the same, and norms and residuals are divided, too.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from course_lib import arguments
from course_lib.many_devices import sharding
from course_lib.many_devices.axis import Asked, Axis, Share
from course_lib.many_devices.meshes import vary
from course_lib.models.hooks import Hooks
from course_lib.models.losses import Score
from course_lib.models.parameters import mlp_width
from course_lib.smaller_and_faster import large_vocabulary
from course_lib.smaller_and_faster.large_vocabulary import Factors

AXIS = "tensor"
LENGTH = 1  # sequence parallelism cuts this dimension of an activation [B, L, ...]


def column(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Multiplies the whole input with this device's columns of a kernel."""
    return jax.lax.dot_general(vary(x, AXIS), kernel, dimension_numbers, **options)


def row(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Multiplies this device's inputs with its rows of a kernel, and sums over devices. The
    layer adds its bias to the sum, once.
    """
    return jax.lax.psum(jax.lax.dot_general(x, kernel, dimension_numbers, **options), AXIS)


def gather_column(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Does the same as `column` for an input that is cut along the sequence."""
    x = jax.lax.all_gather(x, AXIS, axis=LENGTH, tiled=True)
    return jax.lax.dot_general(x, kernel, dimension_numbers, **options)


def row_scatter(x: Array, kernel: Array, dimension_numbers: Any, **options: Any) -> Array:
    """Does the same as `row`, and leaves each device with its part of the sequence."""
    partial = jax.lax.dot_general(x, kernel, dimension_numbers, **options)
    return jax.lax.psum_scatter(partial, AXIS, scatter_dimension=LENGTH, tiled=True)


def lookup(table: Float[Array, "V D"], tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    """Looks up this device's rows of the token table, and gives zeros for other tokens. The sum
    over devices is the embedding.

    As on one device, a token outside of the vocabulary gives NaN, and a negative one counts
    from the end.

    Args:
      table: this device's rows of the token table.
      tokens: from the whole vocabulary.
    """
    tokens = _from_the_end(tokens, table.shape[0])
    index = vary(tokens, AXIS) - jax.lax.axis_index(AXIS) * table.shape[0]
    mine = (index >= 0) & (index < table.shape[0])
    rows = jnp.take(table, jnp.where(mine, index, 0), axis=0)
    others = _zero_or_nan(tokens, table.shape[0])[..., None].astype(rows.dtype)
    return jnp.where(mine[..., None], rows, others)


def _from_the_end(tokens: Int[Array, "..."], size: int) -> Int[Array, "..."]:
    """Counts negative tokens from the end of the vocabulary, like `jnp.take`."""
    return jnp.where(tokens < 0, tokens + size * jax.lax.axis_size(AXIS), tokens)


def _zero_or_nan(tokens: Int[Array, "..."], size: int) -> Float[Array, "..."]:
    """Returns 0 for tokens of the vocabulary, of which a device has `size` rows, else NaN."""
    return jnp.where((tokens >= 0) & (tokens < size * jax.lax.axis_size(AXIS)), 0.0, jnp.nan)


def cross_entropy(
    logits: Float[Array, "... V"], labels: Int[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns cross entropy and correctness of each label, from logits that are divided along
    the vocabulary.

    The result equals that of `training.cross_entropy` on all logits. But no device ever has all
    logits: devices exchange four numbers per label. As in `training.cross_entropy`, a label
    outside of the vocabulary gives NaN, and a negative one counts from the end.

    Args:
      logits: of this device's part of the vocabulary.
      labels: from the whole vocabulary.
    """
    size = logits.shape[-1]
    offset = jax.lax.axis_index(AXIS) * size
    own_top = jax.lax.stop_gradient(logits).max(axis=-1)
    top = jax.lax.pmax(own_top, AXIS)
    total = jax.lax.psum(jnp.exp(logits - top[..., None]).sum(axis=-1), AXIS)
    places = _from_the_end(labels, size)
    index = vary(places, AXIS) - offset
    mine = (index >= 0) & (index < size)
    own = jnp.take_along_axis(logits, jnp.where(mine, index, 0)[..., None], axis=-1)[..., 0]
    of_label = jax.lax.psum(jnp.where(mine, own - top, 0), AXIS)
    # If several logits are the largest, the first counts, as in an argmax over all logits.
    best = jnp.where(
        own_top == top, offset + jnp.argmax(logits, axis=-1), jnp.iinfo(jnp.int32).max
    )
    correct = jax.lax.pmin(best, AXIS) == labels
    return jnp.log(total) - of_label + _zero_or_nan(places, size), correct.astype(jnp.float32)


def factors(x: Array, kernel: Array, bias: Array | None) -> Factors:
    """Returns the factors of this device's logits, whose product is as that of `column`."""
    return Factors(vary(x, AXIS), kernel, bias)


def gather_factors(x: Array, kernel: Array, bias: Array | None) -> Factors:
    """Does the same as `factors` for an input that is cut along the sequence."""
    return Factors(jax.lax.all_gather(x, AXIS, axis=LENGTH, tiled=True), kernel, bias)


def linear_cross_entropy(
    logits: Factors, labels: Int[Array, "..."], *, chunks: int, along: str = "vocabulary"
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns what `cross_entropy` returns, and never holds all of this device's logits either.

    Each device cuts its own part of the vocabulary, or the tokens, into chunks. Only then the
    devices exchange the same four numbers per label.

    Args:
      logits: factors of this device's logits.
      labels: from the whole vocabulary.
      chunks: into how many a device cuts its logits.
      along: "vocabulary" or "tokens".
    """
    size = logits.head.shape[1]
    offset = jax.lax.axis_index(AXIS) * size
    places = _from_the_end(labels, size)
    index = vary(places, AXIS) - offset
    mine = (index >= 0) & (index < size)
    own = large_vocabulary.statistics(logits, index, chunks=chunks, along=along)
    top = jax.lax.pmax(own.top, AXIS)
    total = jax.lax.psum(jnp.exp(own.logsumexp - top), AXIS)
    of_label = jax.lax.psum(jnp.where(mine, own.of_label - top, 0), AXIS)
    best = jnp.where(own.top == top, offset + own.best, jnp.iinfo(jnp.int32).max)
    correct = jax.lax.pmin(best, AXIS) == labels
    return jnp.log(total) - of_label + _zero_or_nan(places, size), correct.astype(jnp.float32)


def hooks(mesh: Mesh, *, sequence: bool = False) -> Hooks:
    """Returns the hooks of one device's part of a tensor-parallel Transformer.

    Args:
      mesh: with an axis "tensor" of n devices.
      sequence: whether norms and residuals are divided along the sequence.
    """
    n = mesh.shape[AXIS]
    if not sequence:
        return Hooks(
            shards=n,
            column=column,
            row=row,
            lookup=lambda *args: jax.lax.psum(lookup(*args), AXIS),
        )

    def lookup_scatter(table: Array, tokens: Array) -> Array:
        return jax.lax.psum_scatter(
            lookup(table, tokens), AXIS, scatter_dimension=LENGTH, tiled=True
        )

    def positions(length: int) -> Array:
        return jax.lax.axis_index(AXIS) * (length // n) + jnp.arange(length // n)

    def own_key(key: Any) -> Any:
        # Without it devices drop the same values, as they must where they hold the same values.
        return None if key is None else jax.random.fold_in(key, jax.lax.axis_index(AXIS))

    return Hooks(
        shards=n,
        column=gather_column,
        row=row_scatter,
        lookup=lookup_scatter,
        positions=positions,
        own_key=own_key,
    )


def _hooks(share: Share) -> Hooks:
    """Returns the hooks, with factors in place of logits if the loss takes them."""
    strategy = share.strategy
    if strategy.overlap == "none":
        own = hooks(share.mesh, sequence=strategy.sequence)
    else:
        from course_lib.many_devices import async_tensor_parallel

        two_way = strategy.overlap == "two-way"
        own = async_tensor_parallel.hooks(share.mesh, bidirectional=two_way)
    if share.model.loss_chunks == 1:
        return own
    return dataclasses.replace(own, output=gather_factors if strategy.sequence else factors)


def _score(share: Share) -> Score:
    chunks, along = share.model.loss_chunks, share.model.loss_along
    if chunks == 1:
        return cross_entropy
    return functools.partial(linear_cross_entropy, chunks=chunks, along=along)


def errors(asked: Asked) -> Iterator[str]:
    """Yields what a model and a mesh must not ask of the axis."""
    model, strategy = asked.model, asked.strategy
    if strategy.overlap != "none" and not (strategy.sequence and asked.by_hand):
        yield (
            f"overlap={strategy.overlap!r} must come with sequence=True and by='hand': the ring"
            " moves parts of the sequence"
        )
    cut = {
        "num_heads": model.num_heads,
        "mlp_size" if model.mlp_size else "mlp_expansion * hidden_size": mlp_width(model),
        "vocab_size": model.vocab_size,
        "num_outputs": model.num_outputs,
        "num_kv_heads": model.num_kv_heads or model.num_heads,
    } | ({"seq_len": asked.config.data.seq_len} if strategy.sequence else {})
    for name, size in cut.items():
        yield from arguments.shared(name, size, asked.n[AXIS], f"devices along {AXIS!r}")
    if model.z_loss and asked.by_hand:
        yield f"z_loss={model.z_loss} must be 0 with a mesh axis 'tensor' by hand"
    if model.flat_products and asked.by_hand:
        yield (
            "flat_products=True must be False with a mesh axis 'tensor' by hand, which has"
            " products of its own"
        )


TENSOR = Axis(
    AXIS,
    errors,
    params=sharding.TENSOR,
    activations=sharding.TENSOR,
    hooks=_hooks,
    score=_score,
)
