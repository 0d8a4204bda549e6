"""Sequences that many devices divide give what whole ones give, every device does the same
work, and memory falls.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict

from course_lib import measure, training
from course_lib.many_devices import context_parallel, data_parallel, meshes, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import virtual
from course_lib.models import attention

CUT = P(None, "context")


def ring(grid, causal=True):
    """Returns attention of arrays that are cut in the order of the ring."""
    return jax.shard_map(
        functools.partial(context_parallel.attend, causal=causal),
        mesh=grid,
        in_specs=(CUT,) * 3,
        out_specs=CUT,
    )


def there_and_back(grid, causal=True):
    """Returns attention of whole arrays: to the order of the ring, and back."""

    def whole(*arrays):
        to = context_parallel.order(arrays[0].shape[1], grid.shape["context"]).ravel()
        return ring(grid, causal)(*(x[:, to] for x in arrays))[:, np.argsort(to)]

    return whole


def inputs(length=48, groups=4):
    shapes = (
        (3, length, 4, 8),
        (3, length, groups, 8),
        (3, length, groups, 8),
        (3, length, 4, 8),
    )
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def values_and_gradients(attend, query, key, value, seen):
    y, transpose = jax.vjp(attend, query, key, value)
    return y, *transpose(seen)


@pytest.mark.parametrize(("n", "causal"), [(2, True), (3, True), (2, False)])
def test_a_ring_gives_attention_and_its_gradients(n, causal):
    given = inputs()
    with jax.default_matmul_precision("highest"):
        found = one_device.jit(
            lambda: values_and_gradients(
                there_and_back(one_device.grid(context=n), causal), *given
            )
        )()
        expected = values_and_gradients(
            functools.partial(attention.attend, causal=causal), *given
        )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_heads_that_share_keys_give_what_repeated_keys_give():
    query, key, value, _ = inputs(groups=2)
    attend = one_device.jit(there_and_back(one_device.grid(context=2)))
    repeated = (jnp.repeat(x, 2, axis=2) for x in (key, value))
    np.testing.assert_allclose(attend(query, key, value), attend(query, *repeated), atol=1e-6)


def test_scores_in_the_hundreds_do_not_overflow():
    query, key, value, _ = inputs()
    found = one_device.jit(there_and_back(one_device.grid(context=4)))(100 * query, key, value)
    # scores: 500 * 6e-8
    np.testing.assert_allclose(
        found, attention.attend(100 * query, key, value), rtol=1e-3, atol=1e-3
    )


def test_in_bfloat16_scores_and_sums_are_float32():
    """bfloat16: weights, the factors of keys in the backward pass, output and gradients."""
    half = [x.astype(jnp.bfloat16) for x in inputs(length=64)]
    found = jax.jit(
        lambda: values_and_gradients(there_and_back(one_device.grid(context=4)), *half)
    )()
    with jax.default_matmul_precision("highest"):
        expected = values_and_gradients(
            attention.attend, *(x.astype(jnp.float32) for x in half)
        )
    # In parts of the largest error of one rounding, as root mean squares. Were scores, maxima,
    # totals, output or gradients kept in bfloat16 from step to step, at least one would be
    # beyond its bound.
    bounds = {"output": 0.52, "query": 0.8, "key": 0.75, "value": 0.65}
    for (name, bound), one, other in zip(bounds.items(), found, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        assert jnp.linalg.norm(
            one.astype(jnp.float32) - other
        ) < bound * 2**-8 * jnp.linalg.norm(other), name


def test_no_position_sees_a_later_one():
    *arrays, seen = inputs(length=16)
    grid = one_device.grid(context=4)
    jacobian = one_device.jit(
        jax.jacobian(lambda value: there_and_back(grid)(*arrays[:2], value)[0, :, 0, 0])
    )
    np.testing.assert_array_equal(
        jacobian(arrays[2])[:, 0, :, 0, 0] != 0, np.tri(16, dtype=bool)
    )


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_positions_are_dealt_so_that_all_devices_see_as_many_keys(n):
    order = context_parallel.order(48, n)
    assert sorted(order.ravel()) == list(range(48))
    keys_seen = (order + 1).sum(axis=1)
    assert set(keys_seen) == {48 * 49 // 2 // n}
    # the last of n contiguous parts sees (2n - 1) / n of the mean
    in_order = (np.arange(48).reshape(n, -1) + 1).sum(axis=1)
    assert abs(in_order[-1] / in_order.mean() - (2 * n - 1) / n) < 0.02


@pytest.mark.parametrize("n", [2, 4])
def test_half_of_the_scores_is_not_computed(n):
    """On every device: one program runs on all of them, without a branch, so that none can do
    less.
    """
    *arrays, _ = inputs()
    cut = [x[:, context_parallel.order(48, n)].swapaxes(0, 1) for x in arrays]  # a device each
    on_all = jax.vmap(context_parallel.attend, axis_name="context")
    # scores and mean of values, of one part with one other
    part_by_part = 2 * 2 * 3 * 4 * 8 * (48 // (2 * n)) ** 2
    assert measure.flops(on_all, *cut).total == {"float32": n * (2 * n + 1) * part_by_part}
    assert " cond[" not in str(jax.make_jaxpr(on_all)(*cut))


CUDNN = {"model.attention": "cudnn", "model.dtype": "bfloat16"}
WHOLE = one_device.small(**{"data.seq_len": 128, "model.max_seq_len": 128})


@functools.cache
def compiled_gradient(n):
    grid = one_device.grid(data=1, context=n)
    state, batch = strategies.build(WHOLE, grid).abstract()
    return (
        one_device.jit(strategies.gradient(WHOLE, grid))
        .lower(state.params, batch, jax.random.key(0))
        .compile()
    )


def test_keys_and_values_travel_twice_and_their_gradients_once():
    n, tokens = 4, WHOLE.data.batch_size * WHOLE.data.seq_len
    found = measure.ledger(compiled_gradient(n), one_device.grid(data=1, context=n))
    part = 2 * 4 * tokens // n * WHOLE.model.hidden_size  # keys and values
    assert found.sent("collective-permute", "context") == WHOLE.model.num_layers * part * (
        2 * (n - 1) + n
    )
    params, _, _ = one_device.reference(FrozenConfigDict(WHOLE))
    gradient = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    # and the metrics; their counts may be sent once
    assert found.payload("all-reduce", "context") - gradient in (12, 16)
    assert found.payload() == found.payload("all-reduce", "context") + found.payload(
        "collective-permute", "context"
    )


def test_the_activations_of_a_device_fall_with_the_number_of_devices():
    alone, of_four = (measure.memory(compiled_gradient(n)).temporaries for n in (1, 4))
    # more than a quarter is left of what does not grow with the length
    assert of_four < alone / 3.5


@pytest.mark.skipif(
    virtual.why_unavailable("h100") is not None, reason=str(virtual.why_unavailable("h100"))
)
def test_on_gpus_transfers_run_during_products_but_for_the_last_which_brings_gradients_home():
    grid = meshes.make({"context": 3}, virtual.devices("h100", 3))
    x = jax.ShapeDtypeStruct((1, 6144, 8, 128), "bfloat16", sharding=NamedSharding(grid, CUT))
    gradients = one_device.jit(
        lambda query, key, value, seen: jax.vjp(ring(grid), query, key, value)[1](seen)
    )
    found = measure.ledger(gradients.lower(x, x, x, x).compile(), grid).entries
    # Two steps forward, two backward, and three for the gradients; but both passes start with
    # the same transfer, done once.
    assert [entry.dtype for entry in found].count("bfloat16") == 3 and len(found) == 6
    assert all("matmul" in entry.overlapped for entry in found[:-1])
    assert not found[-1].overlapped and found[-1].dtype == "float32"


def test_devices_along_context_drop_different_units():
    whole = one_device.small(**{"model.dropout_rate": 0.5})
    one = {"loss": (jnp.zeros(()), jnp.ones(()))}
    drawn = data_parallel.divided(
        lambda params, batch, rng: (jax.random.uniform(rng), one),
        "context",
        context_parallel.own,
    )
    grid, rng = one_device.grid(context=2), jax.random.key(3)
    mean = one_device.jit(jax.shard_map(drawn, mesh=grid, in_specs=P(), out_specs=P()))(
        {}, one_device.batch(whole), rng
    )[0]
    expected = [jax.random.uniform(jax.random.fold_in(rng, device)) for device in (0, 1)]
    np.testing.assert_allclose(mean, sum(expected) / 2, rtol=1e-6)


def test_evaluation_takes_whole_sequences():
    whole = one_device.small()
    run = strategies.build(whole, one_device.grid(data=2, context=2))
    params, _, metrics = one_device.reference(FrozenConfigDict(whole))
    found = training.evaluate(run.loss_fn, params, [one_device.batch(whole)])
    assert found == pytest.approx(training.mean_metrics(metrics), rel=1e-5)


@pytest.mark.parametrize(
    ("axes", "chosen", "changes", "message"),
    [
        (
            dict(data=1, context=4),
            Strategy(),
            {"data.seq_len": 12},
            r"seq_len=12 must be a multiple of 8, .* take 8 or 16",
        ),
        (
            dict(data=1, context=8),
            Strategy(by="compiler"),
            {"data.seq_len": 12},
            r"seq_len=12 must be a multiple of 8, ",
        ),
        (
            dict(data=1, context=2, pipe=2),
            Strategy(),
            {},
            r"must not have both 'context' and 'pipe'",
        ),
        (
            dict(data=1, context=2, tensor=2),
            Strategy(sequence=True),
            {},
            r"sequence=True must not come with .* 'context'",
        ),
        (
            dict(data=1, context=2),
            Strategy(),
            {"model.attention": "xla"},
            r"attention='xla', .* must be 'reference' and",
        ),
        (
            dict(data=1, context=2),
            Strategy(),
            {"model.softmax_dtype": "bfloat16"},
            r"softmax_dtype='bfloat16' must be",
        ),
        (
            dict(data=1, context=2),
            Strategy(by="compiler"),
            CUDNN,
            r"attention='cudnn' must be 'reference' or 'xla'",
        ),
    ],
)
def test_what_cannot_work_is_refused(axes, chosen, changes, message):
    with pytest.raises(ValueError, match=message):
        strategies.build(one_device.small(**changes), one_device.grid(**axes), chosen)
