"""Laws of the loss in chunks: the numbers of all logits, in the memory of one chunk."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest

from course_lib import measure
from course_lib.models import losses
from course_lib.smaller_and_faster import large_vocabulary
from course_lib.smaller_and_faster.large_vocabulary import Factors, linear_cross_entropy

B, L, D, V = 2, 6, 8, 12
WAYS = [
    (along, chunks)
    for along, size in (("vocabulary", V), ("tokens", L))
    for chunks in (1, 2, 3, size)
]


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x, head, bias = (
        jax.random.normal(key, shape).astype(dtype)
        for key, shape in zip(keys[:3], [(B, L, D), (D, V), (V,)], strict=True)
    )
    labels = jax.random.randint(keys[3], (B, L), 0, V)
    return x, head, bias, labels


def all_logits(x, head, bias, labels):
    """The reference: all logits at once, in float32."""
    x, head, bias = (array.astype(jnp.float32) for array in (x, head, bias))
    logits = jnp.einsum("...d,dv->...v", x, head, precision="highest")
    return losses.cross_entropy(logits + jnp.expand_dims(bias, range(x.ndim - 1)), labels)


def weighted(loss_of, weights):
    """A mean of the losses that weighs labels unequally; some weigh nothing."""
    return lambda *args: (loss_of(*args)[0] * weights).sum() / weights.sum()


@pytest.mark.parametrize(("along", "chunks"), WAYS)
def test_loss_and_correctness_of_each_label_are_those_of_all_logits(along, chunks):
    args = inputs()
    loss, correct = linear_cross_entropy(*_as_called(args), chunks=chunks, along=along)
    expected, expected_correct = all_logits(*args)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_array_equal(correct, expected_correct)
    assert 0 < correct.sum() < correct.size


def _as_called(args):
    x, head, bias, labels = args
    return x, head, labels, bias


@pytest.mark.parametrize(("along", "chunks"), WAYS)
def test_gradients_with_unequal_label_weights_are_those_of_all_logits(along, chunks):
    x, head, bias, labels = inputs()
    weights = jnp.arange(B * L, dtype=jnp.float32).reshape(B, L) % 3

    def in_chunks(x, head, bias):
        return linear_cross_entropy(x, head, labels, bias, chunks=chunks, along=along)

    with jax.default_matmul_precision("highest"):
        found = jax.jit(jax.grad(weighted(in_chunks, weights), (0, 1, 2)))(x, head, bias)
    expected = jax.grad(weighted(lambda *args: all_logits(*args, labels), weights), (0, 1, 2))(
        x, head, bias
    )
    assert not one_device.different_leaves(found, expected)


@pytest.mark.parametrize("along", large_vocabulary.ALONG)
def test_a_head_without_bias_and_tokens_without_sequences_have_the_same_gradient(along):
    x, head, bias, labels = inputs()
    flat, places = x.reshape(-1, D), labels.reshape(-1)

    def in_chunks(x, head):
        return linear_cross_entropy(x, head, places, chunks=4, along=along)[0].mean()

    def reference(x, head):
        return all_logits(x, head, jnp.zeros_like(bias), places)[0].mean()

    with jax.default_matmul_precision("highest"):
        found = jax.grad(in_chunks, (0, 1))(flat, head)
    assert not one_device.different_leaves(found, jax.grad(reference, (0, 1))(flat, head))


@pytest.mark.parametrize("along", large_vocabulary.ALONG)
def test_a_tied_table_gets_the_gradient_of_both_uses(along):
    _, head, bias, labels = inputs()
    table, tokens = head.T, labels[:, ::-1]

    def loss(table, of):
        return of(jnp.tanh(table[tokens]), table.T)[0].mean()

    def in_chunks(x, head):
        return linear_cross_entropy(x, head, labels, chunks=3, along=along)

    with jax.default_matmul_precision("highest"):
        found = jax.grad(loss)(table, in_chunks)

    def reference(x, head):
        return all_logits(x, head, jnp.zeros_like(bias), labels)

    assert not one_device.different_leaves(found, jax.grad(loss)(table, reference))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("along", large_vocabulary.ALONG)
def test_narrow_numbers_are_added_up_in_float32(along, dtype):
    """Both gradients are sums of 4,096 equal terms, in 1,024 chunks along what is cut. Added up
    in bfloat16, a sum of ones stops growing at 256.
    """
    tokens, vocab = (4096, 4) if along == "tokens" else (4, 4096)
    x, head = jnp.ones((tokens, 1), dtype), jnp.ones((1, vocab), dtype)
    labels = jnp.zeros(tokens, jnp.int32)

    def loss(x, head):
        return linear_cross_entropy(x, head, labels, chunks=1024, along=along)[0].sum()

    value, (dx, dhead) = jax.value_and_grad(loss, (0, 1))(x, head)
    assert dx.dtype == dhead.dtype == dtype and value.dtype == jnp.float32
    np.testing.assert_allclose(value, tokens * np.log(vocab), rtol=1e-5)
    # The softmax sums to one, as the one-hot does; each other column gets tokens / vocab.
    np.testing.assert_allclose(dx.astype(jnp.float32), 0, atol=1e-3)
    np.testing.assert_array_equal(dhead[0, 1:].astype(jnp.float32), tokens / vocab)


def test_a_gradient_through_the_logsumexp_alone_is_the_softmax():
    """The z-loss and other terms of the logsumexp need nothing more."""
    x, head, bias, labels = inputs()

    def logsumexp(bias):
        factors = Factors(x, head, bias)
        return large_vocabulary.statistics(factors, labels, chunks=4).logsumexp.sum()

    logits = jnp.einsum("bld,dv->blv", x, head) + bias[None, None]
    np.testing.assert_allclose(
        jax.grad(logsumexp)(bias), jax.nn.softmax(logits).sum(axis=(0, 1)), rtol=1e-5
    )


@pytest.mark.parametrize(("along", "chunks"), [("vocabulary", 4), ("tokens", 3)])
def test_large_and_masked_logits_give_the_loss_of_all_logits(along, chunks):
    x, head, bias, labels = inputs()
    # A vocabulary that is padded to a round number: a chunk of logits that are all -inf.
    bias = bias.at[:3].set(-jnp.inf).at[3].set(1e4)
    loss, correct = linear_cross_entropy(x, head, labels, bias, chunks=chunks, along=along)
    expected, expected_correct = all_logits(x, head, bias, labels)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_array_equal(correct, expected_correct)
    assert np.isinf(expected).any() and (expected == 0).any()


@pytest.mark.parametrize(("along", "chunks"), [("vocabulary", 3), ("tokens", 2)])
def test_of_equal_largest_logits_the_first_counts(along, chunks):
    """All twelve logits are equal: an argmax over all takes column 0, whatever the chunks."""
    labels = jnp.arange(V).reshape(B, L)
    _, correct = linear_cross_entropy(
        jnp.zeros((B, L, D)), jnp.zeros((D, V)), labels, chunks=chunks, along=along
    )
    np.testing.assert_array_equal(correct, labels == 0)


@pytest.mark.parametrize(("along", "chunks"), [("vocabulary", 3), ("tokens", 2)])
def test_a_label_outside_of_the_vocabulary_gives_nan_and_a_negative_one_counts_from_the_end(
    along, chunks
):
    x, head, bias, _ = inputs()
    labels = jnp.array([[0, V, -1, -V, -V - 1, 5]] * B)
    loss, correct = linear_cross_entropy(x, head, labels, bias, chunks=chunks, along=along)
    expected, expected_correct = all_logits(x, head, bias, labels)
    assert np.isnan(expected[0]).tolist() == [False, True, False, False, True, False]
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    np.testing.assert_array_equal(correct, expected_correct)


@pytest.mark.parametrize(
    ("along", "chunks", "fix"),
    [("vocabulary", 5, "12 columns.* take 4"), ("tokens", 4, "6 tokens.* take 3")],
)
def test_a_chunk_that_does_not_divide_is_refused_with_the_nearest_that_does(along, chunks, fix):
    x, head, _, labels = inputs()
    with pytest.raises(ValueError, match=f"chunks={chunks} must divide the {fix}"):
        linear_cross_entropy(x, head, labels, chunks=chunks, along=along)


def test_an_unknown_dimension_and_no_chunks_are_refused():
    x, head, _, labels = inputs()
    with pytest.raises(ValueError, match="along='rows' must be one of"):
        linear_cross_entropy(x, head, labels, chunks=2, along="rows")
    with pytest.raises(ValueError, match="chunks=0 must divide .* take 1"):
        linear_cross_entropy(x, head, labels, chunks=0)


def products(along, chunks):
    """Returns the FLOPs of loss and gradient in units of D V per token."""
    x, head, _, labels = inputs()
    in_chunks = functools.partial(linear_cross_entropy, chunks=chunks, along=along)
    gradient = jax.grad(lambda x, head: in_chunks(x, head, labels)[0].mean(), (0, 1))
    return measure.flops(gradient, x, head).total["float32"] / (B * L * D * V)


@pytest.mark.parametrize(("along", "chunks"), WAYS)
def test_the_gradient_costs_one_product_more_than_with_all_logits(along, chunks):
    assert products(along, chunks) == 8


@pytest.mark.parametrize("along", large_vocabulary.ALONG)
def test_no_value_of_the_gradient_is_as_large_as_all_logits(along):
    tokens, width, vocab, chunks = 64, 2, 96, 8
    args = jnp.ones((tokens, width)), jnp.ones((width, vocab))
    labels = jnp.zeros(tokens, jnp.int32)

    def largest(loss):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*args)
        return max(v.aval.size for eqn in _equations(jaxpr.jaxpr) for v in eqn.outvars)

    in_chunks = functools.partial(linear_cross_entropy, chunks=chunks, along=along)
    bias = jnp.zeros(vocab)
    assert (
        largest(lambda x, head: all_logits(x, head, bias, labels)[0].mean()) == tokens * vocab
    )
    assert (
        largest(lambda x, head: in_chunks(x, head, labels)[0].mean())
        == tokens * vocab // chunks
    )


def _equations(jaxpr):
    """All equations, also those inside loops and calls."""
    for eqn in jaxpr.eqns:
        yield eqn
        values = itertools.chain.from_iterable(
            value if isinstance(value, tuple | list) else (value,)
            for value in eqn.params.values()
        )
        for value in values:
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
