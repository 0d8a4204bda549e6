"""Laws of collectives built from shifts along a ring.

The arrays hold small whole numbers, whose sums float32 holds exactly in any order: what is
equal is equal to the bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from course_lib.many_devices import cluster_model, collectives, meshes
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware

AXIS = "data"
SIZES = (1, 2, 5, 8)


def on_devices(fn, n):
    """Returns fn as a program on n devices: argument and result are stacks of one array a
    device.
    """
    local = lambda *stacks: jax.tree.map(lambda y: y[None], fn(*[stack[0] for stack in stacks]))  # noqa: E731
    grid = meshes.make({AXIS: n}, meshes.devices(n))
    return jax.shard_map(local, mesh=grid, in_specs=P(AXIS), out_specs=P(AXIS))


def whole_numbers(*shape):
    return np.random.default_rng(0).integers(-50, 50, shape).astype(np.float32)


def test_what_arrives_by_a_shift_is_from_the_device_before():
    for by, expected in ((1, [4, 0, 1, 2, 3]), (-2, [2, 3, 4, 0, 1])):
        shift = on_devices(lambda x, by=by: collectives.shift(x, AXIS, by), 5)
        np.testing.assert_array_equal(shift(jnp.arange(5)), expected)


def gather(x, both_ways=False):
    """An all-gather of shifts: a device passes on what arrived last."""
    right, left = collectives.hops(AXIS, both_ways)
    before, after = [x], [x]
    for _ in range(right):
        before.append(collectives.shift(before[-1], AXIS))
    for _ in range(left):
        after.append(collectives.shift(after[-1], AXIS, -1))
    return collectives.join(before[::-1] + after[1:], -right, AXIS, 1)


def scatter(x, both_ways=False):
    """A reduce-scatter of shifts: sums travel, and each device adds its part."""
    right, _ = collectives.hops(AXIS, both_ways)
    parts = collectives.split(x, AXIS, 1)
    total = parts[0]
    for way, by in ((parts[right:0:-1], 1), (parts[right + 1 :], -1)):
        travelling = 0
        for part in way:
            travelling = collectives.shift(travelling + part, AXIS, by)
        total += travelling
    return total


def exchange(x):
    """An all-to-all: each part goes to its device at once."""
    parts = collectives.split(x, AXIS, 1)
    arrived = [collectives.shift(part, AXIS, by) for by, part in enumerate(parts) if by]
    return collectives.join([*arrived[::-1], parts[0]], 1 - len(parts), AXIS, 0)


RINGS = {
    "all_gather": (gather, lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True)),
    "reduce_scatter": (
        scatter,
        lambda x: jax.lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True),
    ),
    "all_to_all": (exchange, lambda x: jax.lax.all_to_all(x, AXIS, 1, 0, tiled=True)),
}


def test_a_dimension_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"x.shape\[1\]=10 must .* 8 or 12"):
        jax.eval_shape(on_devices(exchange, 4), whole_numbers(4, 2, 10))


def messages(fn, n, x):
    """Returns (direction, bytes) of each ppermute in a program, and the direction is by how
    many devices it shifts.
    """
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "ppermute":
                (source, target), *_ = equation.params["perm"]
                aval = equation.invars[0].aval
                found.append(((target - source) % n, aval.size * aval.dtype.itemsize))
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner))

    walk(jax.make_jaxpr(on_devices(fn, n))(x).jaxpr)
    return found


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in RINGS]
    + [(kind, {"both_ways": True}) for kind in ("all_gather", "reduce_scatter")],
    ids=str,
)
def test_the_model_counts_the_messages_of_a_ring_that_gives_what_jax_gives(kind, options, n):
    ring, jaxs = RINGS[kind]
    ring = functools.partial(ring, **options)
    x = whole_numbers(n, 2, 2 if kind == "all_gather" else 2 * n)
    np.testing.assert_array_equal(on_devices(ring, n)(x), on_devices(jaxs, n)(x))
    sent, size = messages(ring, n, x), 4 * 2 * 2 * n  # S of each kind, as `cost` counts it
    cost = collectives.cost(kind, size, n, 1e9, latency=1e-6, bidirectional=bool(options))
    # Opposite directions travel at once, and the one to the right has no fewer messages.
    right = [bytes for by, bytes in sent if by == 1 or kind == "all_to_all"]
    assert cost.steps == len(right)
    assert cost.sent_bytes == sum(bytes for _, bytes in sent)
    assert cost.seconds == pytest.approx(cost.steps * (1e-6 + size / n / 1e9), rel=1e-12)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(n, both_ways):
    x, options = whole_numbers(n, 2, 2 * n), dict(latency=1e-6, bidirectional=both_ways)
    both = lambda x: gather(scatter(x, both_ways), both_ways)  # noqa: E731
    summed = np.broadcast_to(x.sum(0), x.shape)
    np.testing.assert_array_equal(on_devices(both, n)(x), summed)
    whole, *halves = (
        collectives.cost(kind, 1000, n, 1e9, **options)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    for name in ("steps", "sent_bytes", "seconds"):
        assert getattr(whole, name) == pytest.approx(sum(getattr(h, name) for h in halves))


def test_a_ppermute_costs_one_message():
    found = collectives.cost("ppermute", 1000, 8, 1e9, latency=1e-6)
    assert found == collectives.RingCost(1, 1000.0, 1e-6 + 1000 / 1e9)


BAD = [
    ({"kind": "broadcast"}, "kind='broadcast'"),
    ({"kind": "ppermute", "bidirectional": True}, "bidirectional=True"),
    ({"size": 0}, "size=0"),
    ({"bytes": -1}, "bytes=-1"),
    ({"bandwidth": 0.0}, "bandwidth=0.0"),
    ({"latency": -1e-6}, "latency=-1e-06"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_a_cost_that_makes_no_sense_is_refused(arguments, message):
    given = {"kind": "all_gather", "bytes": 8, "size": 4, "bandwidth": 1e9} | arguments
    with pytest.raises(ValueError, match=message):
        collectives.cost(**given)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_inside_a_host_and_with_one_gpu_per_host_the_ring_and_the_cluster_agree(kind):
    h100, axes = hardware.get("h100"), {"data": 8, "tensor": 8}
    links = {"tensor": h100.link_bandwidth, "data": h100.network_bandwidth}
    for axis, bandwidth in links.items():
        group = Cluster(h100, 64, ideal=True).group(axes, axis)
        ring = collectives.cost(kind, 2**30, 8, bandwidth).seconds
        assert getattr(cluster_model, kind)(group, 2.0**30) == pytest.approx(ring)
