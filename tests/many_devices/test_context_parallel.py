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
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import context_parallel, data_parallel, meshes
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
    draw = np.random.default_rng(0)
    return [
        jnp.asarray(draw.normal(size=(3, length, heads, 8)), jnp.float32)
        for heads in (4, groups, groups, 4)
    ]


def values_and_gradients(attend, query, key, value, seen):
    y, transpose = jax.vjp(attend, query, key, value)
    return y, *transpose(seen)


@pytest.mark.parametrize(
    ("n", "causal", "groups"), [(3, True, 4), (2, False, 2), slow(2, True, 4)]
)
def test_a_ring_gives_attention_and_its_gradients(n, causal, groups):
    """Also where queries share keys and values."""
    given, mesh = inputs(groups=groups), one_device.grid(context=n)
    whole = functools.partial(attention.attend, causal=causal)
    with jax.default_matmul_precision("highest"):
        found, expected = one_device.jit(
            lambda: [
                values_and_gradients(attend, *given)
                for attend in (there_and_back(mesh, causal), whole)
            ]
        )()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_scores_in_the_hundreds_do_not_overflow():
    query, key, value, _ = inputs()
    ways = there_and_back(one_device.grid(context=4)), attention.attend
    found, expected = (one_device.jit(way)(100 * query, key, value) for way in ways)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)  # scores: 500 * 6e-8


def test_in_bfloat16_scores_and_sums_are_float32():
    """bfloat16: weights, the factors of keys in the backward pass, output and gradients."""
    half = [x.astype(jnp.bfloat16) for x in inputs(length=64)]
    attend = there_and_back(one_device.grid(context=4))
    found = jax.jit(functools.partial(values_and_gradients, attend))(*half)
    exact = jax.jit(functools.partial(values_and_gradients, attention.attend))
    with jax.default_matmul_precision("highest"):
        expected = exact(*(x.astype(jnp.float32) for x in half))
    # In parts of the largest error of one rounding, as root mean squares. Were scores, maxima,
    # totals, output or gradients kept in bfloat16 from step to step, at least one would be
    # beyond its bound.
    bounds = {"output": 0.52, "query": 0.8, "key": 0.75, "value": 0.65}
    for (name, bound), one, other in zip(bounds.items(), found, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(one, np.float32) - other)
        assert error < bound * 2**-8 * np.linalg.norm(other), name


def test_no_position_sees_a_later_one():
    *arrays, value, _ = inputs(length=16)
    attend = there_and_back(one_device.grid(context=4))
    jacobian = one_device.jit(jax.jacobian(lambda value: attend(*arrays, value)[0, :, 0, 0]))
    seen = jacobian(value)[:, 0, :, 0, 0] != 0
    np.testing.assert_array_equal(seen, np.tri(16, dtype=bool))


@pytest.mark.parametrize("n", [1, 8])
def test_positions_are_dealt_so_that_all_devices_see_as_many_keys(n):
    order = context_parallel.order(48, n)
    assert sorted(order.ravel()) == list(range(48))
    keys_seen = (order + 1).sum(axis=1)
    assert set(keys_seen) == {48 * 49 // 2 // n}
    # the last of n contiguous parts sees (2n - 1) / n of the mean
    in_order = (np.arange(48).reshape(n, -1) + 1).sum(axis=1)
    assert abs(in_order[-1] / in_order.mean() - (2 * n - 1) / n) < 0.02


def test_half_of_the_scores_is_not_computed():
    """On every device: one program runs on all of them, without a branch, so that none can do
    less.
    """
    n, (*arrays, _) = 4, inputs()
    cut = [x[:, context_parallel.order(48, n)].swapaxes(0, 1) for x in arrays]  # a device each
    on_all = jax.vmap(context_parallel.attend, axis_name="context")
    # scores and mean of values, of one part with one other
    part_by_part = 2 * 2 * 3 * 4 * 8 * (48 // (2 * n)) ** 2
    assert measure.flops(on_all, *cut).total == {"float32": n * (2 * n + 1) * part_by_part}
    assert " cond[" not in str(jax.make_jaxpr(on_all)(*cut))


WHOLE = one_device.small(**{"data.seq_len": 128, "model.max_seq_len": 128})


@functools.cache
def compiled_gradient(n):
    return one_device.compiled(WHOLE, dict(data=1, context=n), Strategy())


def test_keys_and_values_travel_twice_and_their_gradients_once():
    n, tokens = 4, WHOLE.data.batch_size * WHOLE.data.seq_len
    found = measure.ledger(*compiled_gradient(n))
    part = 2 * 4 * tokens // n * WHOLE.model.hidden_size  # keys and values
    steps = WHOLE.model.num_layers * (2 * (n - 1) + n)
    assert found.sent("collective-permute", "context") == steps * part
    params = training.build(WHOLE).abstract()[0].params
    gradient = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    # and the metrics; their counts may be sent once
    summed = found.payload("all-reduce", "context")
    assert summed - gradient in (12, 16)
    assert found.payload() == summed + found.payload("collective-permute", "context")


def test_the_activations_of_a_device_fall_with_the_number_of_devices():
    alone, of_four = (measure.memory(compiled_gradient(n)[0]).temporaries for n in (1, 4))
    # more than a quarter is left of what does not grow with the length
    assert of_four < alone / 3.5


@one_device.needs_h100
def test_on_gpus_transfers_run_during_products_but_for_the_last_which_brings_gradients_home():
    grid = meshes.make({"context": 3}, virtual.devices("h100", 3))
    x = jax.ShapeDtypeStruct((1, 6144, 8, 128), "bfloat16", sharding=NamedSharding(grid, CUT))
    gradients = one_device.jit(
        lambda query, key, value, seen: jax.vjp(ring(grid), query, key, value)[1](seen)
    )
    found = measure.ledger(virtual.compile(gradients.lower(x, x, x, x)), grid).entries
    # Two steps forward, two backward, and three for the gradients; but both passes start with
    # the same transfer, done once.
    assert [entry.dtype for entry in found].count("bfloat16") == 3 and len(found) == 6
    assert all("matmul" in entry.overlapped for entry in found[:-1])
    assert not found[-1].overlapped and found[-1].dtype == "float32"


def test_devices_along_context_drop_different_units():
    whole, one = one_device.small(), {"loss": (jnp.zeros(()), jnp.ones(()))}
    drawn = data_parallel.divided(
        lambda params, batch, rng: (jax.random.uniform(rng), one),
        "context",
        context_parallel.own,
    )
    grid, rng = one_device.grid(context=2), jax.random.key(3)
    mean = one_device.jit(jax.shard_map(drawn, mesh=grid, in_specs=P(), out_specs=P()))
    expected = [jax.random.uniform(jax.random.fold_in(rng, device)) for device in (0, 1)]
    found = mean({}, one_device.batch(whole), rng)[0]
    np.testing.assert_allclose(found, sum(expected) / 2, rtol=1e-6)
