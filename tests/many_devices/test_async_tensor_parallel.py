"""Products that communicate while they compute give what those give that wait, and their
transfers run meanwhile.
"""

import functools

import jax
import numpy as np
import one_device
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib import measure
from course_lib.many_devices import async_tensor_parallel, meshes, tensor_parallel
from course_lib.measure import virtual

DIMENSIONS = (((2,), (0,)), ((), ()))
WHOLE_X, PART_X = P(None, None, "tensor"), P(None, "tensor")
COLUMNS, ROWS = P(None, "tensor"), P("tensor")


def gather(grid, product):
    product = functools.partial(product, dimension_numbers=DIMENSIONS)
    return jax.shard_map(product, mesh=grid, in_specs=(PART_X, COLUMNS), out_specs=WHOLE_X)


def scatter(grid, product):
    product = functools.partial(product, dimension_numbers=DIMENSIONS)
    return jax.shard_map(product, mesh=grid, in_specs=(WHOLE_X, ROWS), out_specs=PART_X)


PAIRS = {"gather": (gather, tensor_parallel.gather_column, async_tensor_parallel.gather_column)}
PAIRS["scatter"] = (scatter, tensor_parallel.row_scatter, async_tensor_parallel.row_scatter)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("name", PAIRS)
def test_a_ring_gives_the_product_and_the_gradients_of_the_collective(name, n):
    on_devices, waiting, ring = PAIRS[name]
    grid, draw = one_device.grid(tensor=n), np.random.default_rng(0)
    x, kernel, seed = (
        draw.normal(size=shape).astype(np.float32)
        for shape in ((2, 2 * n, n), (n, 3 * n), (2, 2 * n, 3 * n))
    )

    def values_and_gradients(product):
        y, transpose = jax.vjp(on_devices(grid, product), x, kernel)
        return y, transpose(seed)

    ways = waiting, ring, functools.partial(ring, bidirectional=True)
    with jax.default_matmul_precision("highest"):
        expected, *others = jax.jit(lambda: [values_and_gradients(way) for way in ways])()
    for found in others:
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def on_h100s(name, product, options=None):
    grid = meshes.make({"tensor": 8}, virtual.devices("h100", 8))
    both = {"gather": ((PART_X, (1, 8192, 4096)), (COLUMNS, (4096, 16384)))}
    both["scatter"] = ((WHOLE_X, (1, 8192, 16384)), (ROWS, (16384, 4096)))
    shapes = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(grid, spec))
        for spec, shape in both[name]
    ]
    lowered = jax.jit(PAIRS[name][0](grid, product)).lower(*shapes)
    return measure.ledger(virtual.compile(lowered, options), grid).entries


@one_device.needs_h100
@pytest.mark.parametrize("name", PAIRS)
def test_on_gpus_transfers_run_during_products_and_send_the_same_bytes(name):
    _, waiting, ring = PAIRS[name]
    (alone,) = on_h100s(name, waiting)
    assert not alone.overlapped
    found = on_h100s(name, ring)
    assert len(found) == 7 and all("matmul" in entry.overlapped for entry in found)
    assert sum(entry.sent_bytes for entry in found) == alone.sent_bytes


@one_device.needs_h100
@pytest.mark.parametrize("name", PAIRS)
def test_two_ways_need_two_transfers_in_flight(name):
    ring = functools.partial(PAIRS[name][2], bidirectional=True)
    one, two = on_h100s(name, ring), on_h100s(name, ring, async_tensor_parallel.TWO_TRANSFERS)
    assert len(one) == len(two) == 7
    assert not all(entry.overlapped for entry in one)
    assert all("matmul" in entry.overlapped for entry in two)
