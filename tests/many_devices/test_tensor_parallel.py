"""Laws of tensor parallelism: the bytes it sends, and parts equal to one device's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import strategies, tensor_parallel
from course_lib.many_devices.strategies import Strategy

WIDER = {
    "model.hidden_size": 64,
    "model.head_dim": 8,
    "model.num_heads": 8,
    "data.batch_size": 2,
}
NORMED = WIDER | {"model.qk_norm": True}
LATER = NORMED | {
    "model.parallel_block": True,
    "model.num_kv_heads": 4,
    "model.mlp_activation": "squared_relu",
    "model.positions": "rotary",
    "model.use_bias": False,
}
"""Options of later models, all at once. Heads are 8 wide: two numbers, normalized, are 1
and -1, whatever they were.
"""


def on_devices(fn, mesh, in_specs, out_specs):
    return one_device.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@functools.cache
def ledger(sequence, parallel_block=False, loss_chunks=1):
    changes = {"model.parallel_block": parallel_block, "model.loss_chunks": loss_chunks}
    whole, grid = one_device.small(**changes), one_device.grid(data=1, tensor=4)
    chosen = Strategy(sequence=sequence)
    state, batch = strategies.build(whole, grid, chosen).abstract()
    grad_fn = one_device.jit(strategies.gradient(whole, grid, chosen))
    return measure.ledger(grad_fn.lower(state.params, batch, jax.random.key(0)).compile(), grid)


def sizes():
    """Returns the bytes of a residual [B, L, D] and of one number a token, and the number of
    layers.
    """
    whole = one_device.small()
    tokens = 4 * whole.data.batch_size * whole.data.seq_len
    return tokens * whole.model.hidden_size, tokens, whole.model.num_layers


def test_a_block_reduces_two_residuals_forward_and_two_backward():
    residual, token, layers = sizes()
    found = ledger(sequence=False)
    # Around the blocks: the embedding forward, the output layer backward, and four numbers a
    # token in the loss.
    assert found.payload("all-reduce", "tensor") == (4 * layers + 2) * residual + 4 * token
    assert found.payload() == found.payload("all-reduce", "tensor")


def test_along_the_sequence_each_all_reduce_becomes_a_gather_and_a_scatter_of_the_same_bytes():
    residual, _, layers = sizes()
    found = ledger(sequence=True)
    assert (
        found.payload("all-gather", "tensor")
        == found.payload("reduce-scatter", "tensor")
        == (4 * layers + 2) * residual
    )
    assert (
        found.sent("all-gather") + found.sent("reduce-scatter")
        == (4 * layers + 2) * 2 * 3 * residual // 4
    )


def test_a_parallel_block_exchanges_half_as_much():
    residual, token, layers = sizes()
    assert (
        ledger(False, parallel_block=True).payload() == (2 * layers + 2) * residual + 4 * token
    )
    found = ledger(True, parallel_block=True)
    assert (
        found.payload("all-gather", "tensor")
        == found.payload("reduce-scatter", "tensor")
        == (2 * layers + 2) * residual
    )


@pytest.mark.parametrize("sequence", [slow(False), True])
def test_a_loss_in_chunks_sends_the_same_bytes(sequence):
    """Each device cuts its own part of the vocabulary; four numbers per token are exchanged
    after the last chunk.
    """
    found, expected = ledger(sequence, loss_chunks=4), ledger(sequence)
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        assert found.payload(kind, "tensor") == expected.payload(kind, "tensor")
    assert found.payload() == expected.payload()


@pytest.mark.parametrize(
    ("changes", "axes", "chosen"),
    [
        slow(NORMED, dict(data=2, tensor=2), Strategy(zero=3, sequence=True)),
        slow(LATER, dict(data=1, tensor=4), Strategy()),
        slow(LATER, dict(data=1, tensor=2), Strategy(sequence=True)),
        (LATER, dict(data=1, tensor=2), Strategy(sequence=True, overlap="one-way")),
        slow(LATER, dict(data=1, tensor=2), Strategy(by="compiler", sequence=True)),
        slow(LATER, dict(data=1, pipe=2, tensor=2), Strategy(microbatches=2)),
    ],
)
def test_with_the_options_of_later_models_the_gradient_is_one_devices(changes, axes, chosen):
    whole = one_device.small(**changes)
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    with jax.default_matmul_precision("highest"):
        grad_fn = one_device.jit(strategies.gradient(whole, one_device.grid(**axes), chosen))
        grads, _ = grad_fn(params, one_device.batch(whole), jax.random.key(2))
    assert not one_device.different_leaves(grads, expected)


@pytest.mark.parametrize(
    ("axes", "by"),
    [
        (dict(data=1, tensor=8), "hand"),
        slow(dict(data=1, tensor=8), "compiler"),
    ],
)
def test_a_sequence_a_device_of_a_length_that_nothing_divides_gives_the_gradient_of_one_device(
    axes, by
):
    whole = one_device.small(**{"data.batch_size": axes["data"], "data.seq_len": 13})
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    with jax.default_matmul_precision("highest"):
        grad_fn = one_device.jit(
            strategies.gradient(whole, one_device.grid(**axes), Strategy(by=by))
        )
        grads, _ = grad_fn(params, one_device.batch(whole), jax.random.key(2))
    assert not one_device.different_leaves(grads, expected)


def test_heads_of_keys_and_values_that_cannot_be_divided_are_refused():
    whole = one_device.small(**{"model.num_kv_heads": 2})
    with pytest.raises(ValueError, match="num_kv_heads=2 must .* 4"):
        strategies.build(whole, one_device.grid(data=1, tensor=4))


@pytest.mark.parametrize("n", [2, 8])
def test_cross_entropy_of_a_divided_vocabulary_is_that_of_the_whole(n):
    logits = 10 * jax.random.normal(jax.random.key(0), (4, 16))
    logits = logits.at[1, 3].set(50.0).at[1, 12].set(50.0)  # of two equal ones the first counts
    labels = jnp.array([0, 12, 3, 15])
    score = on_devices(
        tensor_parallel.cross_entropy,
        one_device.grid(tensor=n),
        (P(None, "tensor"), P()),
        (P(), P()),
    )
    loss, correct = score(logits, labels)
    expected, expected_correct = training.cross_entropy(logits, labels)
    # One device takes a logit from the logarithm of a sum, both about 50, in float32.
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=np.spacing(np.float32(50)))
    np.testing.assert_array_equal(correct, expected_correct)


@pytest.mark.parametrize(("along", "chunks"), [("vocabulary", 2), ("tokens", 3)])
def test_a_divided_head_in_chunks_gives_the_loss_of_all_logits(along, chunks):
    keys = jax.random.split(jax.random.key(0))
    x, head = jax.random.normal(keys[0], (2, 3, 8)), jax.random.normal(keys[1], (8, 16))
    head = head.at[:, 12].set(head[:, 3])  # of two equal logits the first counts
    labels = jnp.array([[0, 12, 3], [16, -1, -17]])

    def score(x, head, labels):
        factors = tensor_parallel.factors(x, head, None)
        return tensor_parallel.linear_cross_entropy(factors, labels, chunks=chunks, along=along)

    found = on_devices(
        score, one_device.grid(tensor=4), (P(), P(None, "tensor"), P()), (P(), P())
    )(x, head, labels)
    expected = training.cross_entropy(x @ head, labels)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    assert np.isnan(expected[0][1]).tolist() == [True, False, True]


def test_large_logits_do_not_overflow_on_any_device():
    logits = jnp.array([[1e4, 0.0, 0.0, -1e4]])
    score = on_devices(
        tensor_parallel.cross_entropy,
        one_device.grid(tensor=4),
        (P(None, "tensor"), P()),
        (P(), P()),
    )
    np.testing.assert_array_equal(score(logits, jnp.array([0]))[0], [0.0])
    np.testing.assert_array_equal(score(logits, jnp.array([3]))[0], [2e4])


def test_each_device_looks_up_its_own_rows():
    table, tokens = jax.random.normal(jax.random.key(0), (8, 3)), jnp.array([[0, 7, 3, 4]])
    lookup = on_devices(
        lambda *args: jax.lax.psum(tensor_parallel.lookup(*args), "tensor"),
        one_device.grid(tensor=4),
        (P("tensor"), P()),
        P(),
    )
    np.testing.assert_array_equal(lookup(table, tokens), table[tokens])


def test_a_token_or_label_outside_of_the_vocabulary_gives_nan_as_on_one_device():
    table, logits = jnp.arange(24.0).reshape(8, 3), jnp.arange(32.0).reshape(1, 4, 8) ** 0.5
    tokens = jnp.array([[7, 8, -1, -9]])
    grid = one_device.grid(tensor=4)
    lookup = on_devices(
        lambda *args: jax.lax.psum(tensor_parallel.lookup(*args), "tensor"),
        grid,
        (P("tensor"), P()),
        P(),
    )
    np.testing.assert_array_equal(lookup(table, tokens), jnp.take(table, tokens, axis=0))
    score = on_devices(
        tensor_parallel.cross_entropy, grid, (P(None, None, "tensor"), P()), (P(), P())
    )
    expected = training.cross_entropy(logits, tokens)[0]
    # those below 0 count from the end
    assert np.isnan(expected).tolist() == [[False, True, False, True]]
    np.testing.assert_allclose(score(logits, tokens)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("sequence", [False, True])
def test_devices_along_tensor_drop_the_same_units_of_what_they_share(sequence):
    """Whole residuals: the same masks, so the gradient is one device's. Parts of the sequence:
    each its own mask.
    """
    whole = one_device.small(**{"model.dropout_rate": 0.5})
    params, _, _ = one_device.reference(FrozenConfigDict(one_device.small()))
    batch, rng = one_device.batch(whole), jax.random.key(3)
    run = strategies.build(
        whole, one_device.grid(data=1, tensor=4), Strategy(sequence=sequence)
    )
    loss = one_device.jit(run.loss_fn)(params, batch, rng)[0]
    key = jax.random.fold_in(rng, 0)  # of the first device along "data"
    alone = one_device.jit(training.build(whole).loss_fn)(params, batch, key)[0]
    assert np.isfinite(loss) and (abs(loss - alone) < 1e-5 * alone) == (not sequence)


def test_each_part_of_the_sequence_has_its_own_key():
    grid = one_device.grid(tensor=4)
    own_key = tensor_parallel.hooks(grid, sequence=True).own_key
    draws = on_devices(
        lambda key: jax.random.uniform(own_key(key), (1,)), grid, P(), P("tensor")
    )
    assert len(set(draws(jax.random.key(0)).tolist())) == 4
