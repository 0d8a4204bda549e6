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
from slow_cases import slow

from course_lib.many_devices import cluster_model, collectives, meshes
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware

AXIS = "data"
SIZES = (1, 2, 5, 8)

# Ours, and JAX's own. The result of psum is shared; vary makes it each device's own, like the
# other results.
PAIRS = {
    "all_gather": (
        functools.partial(collectives.all_gather, dim=1),
        lambda x, axis: jax.lax.all_gather(x, axis, axis=1, tiled=True),
    ),
    "reduce_scatter": (
        functools.partial(collectives.reduce_scatter, dim=1),
        lambda x, axis: jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
    ),
    "all_reduce": (
        functools.partial(collectives.all_reduce, dim=1),
        lambda x, axis: meshes.vary(jax.lax.psum(x, axis), axis),
    ),
    "all_to_all": (
        functools.partial(collectives.all_to_all, split_dim=1, concat_dim=0),
        lambda x, axis: jax.lax.all_to_all(x, axis, 1, 0, tiled=True),
    ),
    "all_to_all_direct": (
        functools.partial(collectives.all_to_all_direct, split_dim=1, concat_dim=0),
        lambda x, axis: jax.lax.all_to_all(x, axis, 1, 0, tiled=True),
    ),
}
RUNS = [(kind, {}) for kind in PAIRS] + [
    (kind, {"bidirectional": True}) for kind in PAIRS if kind != "all_to_all_direct"
]


def on_devices(fn, n):
    """Returns fn as a program on n devices: argument and result are stacks of one array a
    device.
    """
    local = lambda *stacks: jax.tree.map(lambda y: y[None], fn(*[stack[0] for stack in stacks]))  # noqa: E731
    grid = meshes.make({AXIS: n}, meshes.devices(n))
    return jax.shard_map(local, mesh=grid, in_specs=P(AXIS), out_specs=P(AXIS))


def whole_numbers(*shape):
    return np.random.default_rng(0).integers(-50, 50, shape).astype(np.float32)


def with_gradient(fn):
    """Returns a function from x and a cotangent to the result and the cotangent of x."""

    def run(x, seed):
        out, transpose = jax.vjp(fn, x)
        [back] = transpose(seed)
        return out, back

    return run


def all_results(n):
    """Returns, by kind and options, what is built here and what is JAX's: all of it as one
    program, compiled once.
    """
    x = whole_numbers(n, 2, 2 * n)  # on each device (2, 2n)
    programs, seeds = {}, {}
    for kind, options in RUNS:
        ours, jaxs = (functools.partial(fn, axis=AXIS) for fn in PAIRS[kind])
        key = kind, bool(options)
        programs[key] = [
            on_devices(with_gradient(fn), n)
            for fn in (functools.partial(ours, **options), jaxs)
        ]
        seeds[key] = whole_numbers(*jax.eval_shape(on_devices(jaxs, n), x).shape)
    run = jax.jit(
        lambda x, seeds: {
            key: [fn(x, seeds[key]) for fn in both] for key, both in programs.items()
        }
    )
    return run(x, seeds)


@pytest.mark.parametrize("n", [slow(1), 2, 5, slow(8)])
def test_a_ring_gives_what_jax_gives_forward_and_transposed(n):
    for name, (found, expected) in all_results(n).items():
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs, str(name))


def test_what_arrives_by_a_shift_is_from_the_device_before():
    for by, expected in ((1, [4, 0, 1, 2, 3]), (-2, [2, 3, 4, 0, 1])):
        shift = on_devices(lambda x, by=by: collectives.shift(x, AXIS, by), 5)
        np.testing.assert_array_equal(shift(jnp.arange(5)), expected)


def test_one_of_several_axes_can_be_gathered():
    grid, x = meshes.make({"data": 2, "tensor": 4}), whole_numbers(4, 8)
    gather = lambda x: collectives.all_gather(x, "tensor", 1, bidirectional=True)  # noqa: E731
    cut = P("data", "tensor")
    gathered = jax.jit(jax.shard_map(gather, mesh=grid, in_specs=cut, out_specs=cut))(x)
    np.testing.assert_array_equal(gathered, np.tile(x, 4))


@pytest.mark.parametrize(
    "kind", ["reduce_scatter", "all_reduce", "all_to_all", "all_to_all_direct"]
)
def test_a_dimension_that_the_devices_do_not_divide_is_refused(kind):
    ours = functools.partial(PAIRS[kind][0], axis=AXIS)
    with pytest.raises(ValueError, match=r"x.shape\[1\]=10 must .* 8 or 12"):
        jax.eval_shape(on_devices(ours, 4), whole_numbers(4, 2, 10))


# The cost model


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
def test_the_model_counts_the_messages_that_the_program_has(n):
    whole = (2, 2 * n)  # S bytes: what an all-gather leaves, and what the others begin with
    for kind, options in RUNS:
        x = whole_numbers(n, 2, 2) if kind == "all_gather" else whole_numbers(n, *whole)
        sent = messages(functools.partial(PAIRS[kind][0], axis=AXIS, **options), n, x)
        cost = collectives.cost(kind, 4 * 2 * 2 * n, n, bandwidth=1e9, latency=1e-6, **options)
        # Both directions travel at once, and the one to the right has no fewer messages.
        right = [size for by, size in sent if by == 1 or kind == "all_to_all_direct"]
        assert cost.steps == len(right), kind
        assert cost.sent_bytes == sum(size for _, size in sent), kind
        seconds = sum(1e-6 + size / 1e9 for size in right)
        assert cost.seconds == pytest.approx(seconds, rel=1e-12), kind


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
