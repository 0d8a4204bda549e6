"""Laws of the loss in chunks: the numbers of all logits, in the memory of one chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest

from course_lib import measure
from course_lib.lessons.check.large_vocabulary import all_values
from course_lib.models import losses
from course_lib.smaller_and_faster import large_vocabulary
from course_lib.smaller_and_faster.large_vocabulary import linear_cross_entropy

B, L, D, V = 2, 6, 8, 12
WAYS = [("vocabulary", 1), ("vocabulary", 3), ("tokens", 2), ("tokens", 3)]
# Chunks that do not divide: the first has 3 columns, 1 column, 3 tokens, 1 token of its own.
UNEVEN = [("vocabulary", 3, L, 13), ("vocabulary", 4, L, 10)]
UNEVEN += [("tokens", 2, 7, V), ("tokens", 5, 9, V)]
OPTIONS = {"softcap": 3.0, "z_loss": 0.01, "ignore_index": -100}


def inputs(length=L, vocab=V):
    """Returns x, head, bias and labels, of which every second one is the likeliest."""
    draw = np.random.default_rng(0)
    sizes = (B, length, D), (D, vocab), (vocab,)
    x, head, bias = (draw.normal(size=size).astype(np.float32) for size in sizes)
    labels = draw.integers(0, vocab, (B, length), np.int32)
    labels[:, ::2] = (x @ head + bias).argmax(-1)[:, ::2]
    return tuple(map(jnp.asarray, (x, head, bias, labels)))


def all_logits(x, head, bias, labels, *, softcap=None, ignore_index=None, z_loss=0.0):
    """The reference: all logits at once, in float32."""
    x, head, bias = (array.astype(jnp.float32) for array in (x, head, bias))
    logits = jnp.einsum("...d,dv->...v", x, head, precision="highest")
    logits += jnp.expand_dims(bias, range(x.ndim - 1))
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    loss, correct = losses.cross_entropy(logits, labels)
    if z_loss:
        loss += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    ignored = jnp.full(labels.shape, False) if ignore_index is None else labels == ignore_index
    return jnp.where(ignored, 0, loss), jnp.where(ignored, 0, correct)


@pytest.mark.parametrize(
    ("along", "chunks", "length", "vocab", "options"),
    [*((*way, L, V, {}) for way in WAYS), *((*way, OPTIONS) for way in UNEVEN)],
)
def test_loss_correctness_and_gradients_are_those_of_all_logits(
    along, chunks, length, vocab, options
):
    """With unequal weights of labels."""
    x, head, bias, labels = inputs(length, vocab)
    if "ignore_index" in options:
        labels = labels.at[:, ::3].set(-100)
    weights = jnp.arange(labels.size, dtype=jnp.float32).reshape(labels.shape) % 3

    def in_chunks(*args):
        return linear_cross_entropy(*args, chunks=chunks, along=along, **options)

    def weighted(loss_of):
        def mean(x, head, bias):
            loss, correct = loss_of(x, head, labels, bias)
            return (loss * weights).sum() / weights.sum(), (loss, correct)

        return jax.jit(jax.grad(mean, (0, 1, 2), has_aux=True))(x, head, bias)

    def at_once(x, head, labels, bias):
        return all_logits(x, head, bias, labels, **options)

    with jax.default_matmul_precision("highest"):
        found, (loss, correct) = weighted(in_chunks)
        expected, (each, right) = weighted(at_once)
    assert not one_device.different_leaves(found, expected)
    np.testing.assert_allclose(loss, each, rtol=2e-6)
    np.testing.assert_array_equal(correct, right)
    assert 0 < correct.sum() < correct.size


def test_an_ignored_label_changes_nothing_and_any_other_label_outside_is_not_ignored():
    x, head, bias, labels = inputs()
    labels = labels.at[0].set(-100).at[1, 0].set(-101).at[1, 1].set(V)

    def total(x, **options):
        return linear_cross_entropy(x, head, labels, bias, chunks=3, **options)[0].sum(axis=1)

    np.testing.assert_array_equal(np.isnan(total(x, ignore_index=-100)), [False, True])
    assert np.isnan(total(x)).all(), "without `ignore_index`, -100 is a label like others"
    gradient = jax.grad(lambda x: total(x, ignore_index=-100)[0])(x)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(("along", "chunks"), [("vocabulary", 4), ("tokens", 3)])
def test_large_masked_and_equal_logits_and_labels_outside_give_what_all_logits_give(
    along, chunks
):
    """A label outside of the vocabulary gives NaN, a negative one counts from the end."""
    x, head, bias, _ = inputs()
    head = head.at[:, 9].set(head[:, 8])  # of two equal logits the first counts
    # A vocabulary that is padded to a round number: a chunk of logits that are all -inf.
    bias = bias.at[:3].set(-jnp.inf).at[8:10].set(100.0)  # exp(100) is infinite
    labels = jnp.array([[0, V, -1, -V, 9, 8], [-V - 1, 5, 9, 8, -3, 1]])
    loss, correct = linear_cross_entropy(x, head, labels, bias, chunks=chunks, along=along)
    expected, expected_correct = all_logits(x, head, bias, labels)
    assert np.isnan(expected).sum() == 2 and np.isinf(expected).any()
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(correct, expected_correct)
    assert correct[0, 5] and not correct[0, 4]


@pytest.mark.parametrize("along", large_vocabulary.ALONG)
def test_a_tied_table_gets_the_gradient_of_both_uses(along):
    """Without a bias, and with tokens in one row."""
    _, head, bias, labels = inputs()
    table, labels = head.T, labels.reshape(-1)

    def loss(table, of):
        return of(jnp.tanh(table[labels[::-1]]), table.T)[0].mean()

    def in_chunks(x, head):
        return linear_cross_entropy(x, head, labels, chunks=3, along=along)

    def reference(x, head):
        return all_logits(x, head, jnp.zeros_like(bias), labels)

    with jax.default_matmul_precision("highest"):
        found, expected = jax.jit(
            lambda table: [jax.grad(loss)(table, of) for of in (in_chunks, reference)]
        )(table)
    assert not one_device.different_leaves(found, expected)


@pytest.mark.parametrize(
    ("along", "dtype"), [("tokens", jnp.bfloat16), ("vocabulary", jnp.float16)]
)
def test_narrow_numbers_are_added_up_in_float32(along, dtype):
    """Both gradients are sums of 4,096 equal terms, in 1,024 chunks along what is cut. Added up
    in bfloat16, a sum of ones stops growing at 256.
    """
    tokens, vocab = (4096, 4) if along == "tokens" else (4, 4096)
    x, head = jnp.ones((tokens, 1), dtype), jnp.ones((1, vocab), dtype)
    labels = jnp.zeros(tokens, jnp.int32)

    def loss(x, head):
        return linear_cross_entropy(x, head, labels, chunks=1024, along=along)[0].sum()

    value, (dx, dhead) = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head)
    assert dx.dtype == dhead.dtype == dtype and value.dtype == jnp.float32
    np.testing.assert_allclose(value, tokens * np.log(vocab), rtol=1e-5)
    # The softmax sums to one, as the one-hot does; each other column gets tokens / vocab.
    np.testing.assert_allclose(dx.astype(jnp.float32), 0, atol=1e-3)
    np.testing.assert_array_equal(dhead[0, 1:].astype(jnp.float32), tokens / vocab)


@pytest.mark.parametrize(
    ("along", "chunks", "message"),
    [
        ("vocabulary", 13, "chunks=13 must be between 1 and the 12 columns.* take 12"),
        ("tokens", 7, "chunks=7 must be between 1 and the 6 tokens.* take 6"),
        ("tokens", 0, "chunks=0 must be between .* take 1"),
        ("rows", 2, "along='rows'"),
    ],
)
def test_chunks_that_cannot_be_cut_are_refused(along, chunks, message):
    x, head, _, labels = inputs()
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, head, labels, chunks=chunks, along=along)


@pytest.mark.parametrize(("along", "chunks"), WAYS)
def test_the_gradient_costs_one_product_more_than_with_all_logits(along, chunks):
    x, head, _, labels = inputs()
    in_chunks = functools.partial(linear_cross_entropy, chunks=chunks, along=along)
    gradient = jax.grad(lambda x, head: in_chunks(x, head, labels)[0].mean(), (0, 1))
    assert measure.flops(gradient, x, head).total == {"float32": 8 * B * L * D * V}


@pytest.mark.parametrize("chunks", [8, 7])
@pytest.mark.parametrize("along", large_vocabulary.ALONG)
def test_no_value_of_the_gradient_is_larger_than_one_chunk_of_logits(along, chunks):
    tokens, width, vocab = 64, 2, 96
    args = jnp.ones((tokens, width)), jnp.ones((width, vocab))
    labels, bias = jnp.zeros(tokens, jnp.int32), jnp.zeros(vocab)

    def largest(loss):
        gradient = jax.grad(lambda *args: loss(*args)[0].mean(), (0, 1))
        return max(value.size for value in all_values(jax.make_jaxpr(gradient)(*args).jaxpr))

    in_chunks = functools.partial(linear_cross_entropy, chunks=chunks, along=along)
    assert largest(lambda x, head: all_logits(x, head, bias, labels)) == tokens * vocab
    length, other = (vocab, tokens) if along == "vocabulary" else (tokens, vocab)
    one_chunk = -(-length // chunks) * other
    assert largest(lambda x, head: in_chunks(x, head, labels)) == one_chunk
