"""Laws of tensor parallelism: the bytes it sends, and parts equal to one device's."""

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

# Options of later models, all at once. Heads are 8 wide: two numbers, normalized, are 1 and -1,
# whatever they were.
LATER = {
    "model.hidden_size": 64,
    "model.head_dim": 8,
    "data.batch_size": 2,
    "model.qk_norm": True,
    "model.parallel_block": True,
    "model.num_kv_heads": 4,
    "model.mlp_activation": "squared_relu",
    "model.positions": "rotary",
    "model.use_bias": False,
}


@pytest.fixture(autouse=True)
def draws_anew():
    global DRAW
    DRAW = np.random.default_rng(0)


def normal(*shape):
    return DRAW.normal(size=shape).astype(np.float32)


def on_devices(fn, in_specs, out_specs, n=4):
    mesh = one_device.grid(tensor=n)
    return one_device.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@pytest.mark.parametrize(
    ("sequence", "parallel", "chunks"),
    [(False, False, 4), slow(False, True, 1), slow(True, False, 4), (True, True, 1)],
)
def test_a_block_sums_two_residuals_in_each_pass_and_a_parallel_block_one(
    sequence, parallel, chunks
):
    """Along the sequence an all-reduce becomes a gather and a scatter of the same bytes. A loss
    in chunks sends what all logits do: each device cuts its own part of the vocabulary.
    """
    whole = one_device.small(**{"model.parallel_block": parallel, "model.loss_chunks": chunks})
    chosen = Strategy(sequence=sequence)
    found = measure.ledger(*one_device.compiled(whole, dict(data=1, tensor=4), chosen))
    tokens = 4 * whole.data.batch_size * whole.data.seq_len
    # Around the blocks: the embedding forward, and the output layer backward.
    residuals = (2 if parallel else 4) * whole.model.num_layers + 2
    residuals *= tokens * whole.model.hidden_size
    for kind in ("all-gather", "reduce-scatter"):
        assert found.payload(kind, "tensor") == residuals * sequence
        assert found.sent(kind) == residuals * sequence * 3 // 4
    if not sequence:  # and four numbers a token in the loss
        assert found.payload("all-reduce", "tensor") == residuals + 4 * tokens
        assert found.payload() == found.payload("all-reduce")


@pytest.mark.parametrize(
    ("axes", "chosen", "changes"),
    [
        (dict(data=1, tensor=2), Strategy(sequence=True, overlap="one-way"), LATER),
        slow(dict(data=1, tensor=4), Strategy(), LATER),
        slow(dict(data=1, tensor=2), Strategy(by="compiler", sequence=True), LATER),
        slow(dict(data=1, pipe=2, tensor=2), Strategy(microbatches=2), LATER),
        # a length that nothing divides
        (dict(data=1, tensor=8), Strategy(), {"data.batch_size": 1, "data.seq_len": 13}),
    ],
)
def test_with_the_options_of_later_models_the_gradient_is_one_devices(axes, chosen, changes):
    one_device.check_gradient(one_device.small(**changes), axes, chosen)


@pytest.mark.parametrize(("along", "chunks"), [(None, 1), ("vocabulary", 2), ("tokens", 3)])
def test_a_divided_head_gives_the_loss_of_all_logits(along, chunks):
    """Also where logits are large or equal, and where a label is outside of the vocabulary: one
    below 0 counts from the end.
    """
    x, head = normal(2, 3, 8), 10 * normal(8, 16)
    head[:, 3] *= 3
    head[:, 12] = head[:, 3]  # of two equal logits the first counts
    x[0, 1:] = 50 * head[:, 3] / (head[:, 3] @ head[:, 3])  # these two are the largest
    x[1, 1] = 1e4
    labels = jnp.array([[0, 12, 3], [16, -1, -17]])

    def score(x, head, labels):
        if not along:
            return tensor_parallel.cross_entropy(x @ head, labels)
        factors = tensor_parallel.factors(x, head, None)
        return tensor_parallel.linear_cross_entropy(factors, labels, chunks=chunks, along=along)

    specs = P(), P(None, "tensor"), P()
    with jax.default_matmul_precision("highest"):
        found = on_devices(score, specs, (P(), P()))(x, head, labels)
        expected = training.cross_entropy(jnp.asarray(x) @ head, labels)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    assert np.isnan(expected[0][1]).tolist() == [True, False, True]
    assert expected[1][0, 1:].tolist() == [0, 1]


def test_each_device_looks_up_its_own_rows_and_a_token_without_one_gives_nan():
    table, tokens = normal(8, 3), jnp.array([[0, 7, 3, 4, 8, -1, -9]])
    lookup = on_devices(
        lambda *args: jax.lax.psum(tensor_parallel.lookup(*args), "tensor"),
        (P("tensor"), P()),
        P(),
    )
    np.testing.assert_array_equal(lookup(table, tokens), jnp.take(table, tokens, axis=0))


@pytest.mark.parametrize("sequence", [False, True])
def test_devices_along_tensor_drop_the_same_units_of_what_they_share(sequence):
    """Whole residuals: the same masks, so the loss is one device's. Parts of the sequence: each
    its own mask.
    """
    whole = one_device.small(**{"model.dropout_rate": 0.5})
    params, _, _ = one_device.reference(FrozenConfigDict(one_device.small()))
    batch, rng = one_device.batch(whole), jax.random.key(3)
    mesh, chosen = one_device.grid(data=1, tensor=4), Strategy(sequence=sequence)
    run = strategies.build(whole, mesh, chosen)
    loss = one_device.jit(run.loss_fn)(params, batch, rng)[0]
    key = jax.random.fold_in(rng, 0)  # of the first device along "data"
    alone = one_device.jit(training.build(whole).loss_fn)(params, batch, key)[0]
    assert np.isfinite(loss) and (abs(loss - alone) < 1e-5 * alone) == (not sequence)


def test_each_part_of_the_sequence_has_its_own_key():
    own_key = tensor_parallel.hooks(one_device.grid(tensor=4), sequence=True).own_key
    draws = on_devices(lambda key: jax.random.uniform(own_key(key), (1,)), P(), P("tensor"))
    assert len(set(draws(jax.random.key(0)).tolist())) == 4
