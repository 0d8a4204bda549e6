"""Laws of meshes, simulated devices, and of who holds what."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib.many_devices import meshes
from course_lib.measure import virtual


def run_alone(code):
    """Runs code in a Python of its own, on a CPU, with warnings as errors. Returns what it
    printed, and its errors.
    """
    kept = {name: os.environ[name] for name in os.environ if name[:4] not in ("JAX_", "XLA_")}
    kept |= {"JAX_PLATFORMS": "cpu"}
    kept |= {"PYTHONPATH": str(pathlib.Path(virtual.__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    return done.stdout, done.stderr


# Simulated devices


def test_a_cpu_shows_as_eight_devices_on_which_a_mesh_computes_without_a_warning():
    out, err = run_alone("""
from course_lib.many_devices import meshes
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
meshes.simulate()
meshes.simulate(6)  # JAX has not started: the last word counts
meshes.simulate(8)
grid = meshes.make({"data": 2, "tensor": 4})
both = ("data", "tensor")
add = lambda x: jax.lax.psum(x, both)
sums = jax.shard_map(add, mesh=grid, in_specs=P(both), out_specs=P())
meshes.simulate(8)  # as many as there are: nothing to do
print(len(meshes.devices()), len(meshes.devices(3)), sums(jnp.arange(8)))
""")
    assert out == "8 3 [28]\n", err
    # XLA's word that the machine stood still
    assert [line for line in err.splitlines() if "rendezvous.cc" not in line] == []


def test_simulated_devices_asked_for_after_jax_has_started_are_an_error_that_says_how():
    out, err = run_alone("""
import jax
from course_lib.many_devices import meshes
jax.devices()
meshes.simulate(1)
try:
    meshes.simulate(8)
except RuntimeError as error:
    print(error)
""")
    assert "count=8 comes too late: JAX runs already, with 1 CPU device, " in out, err
    assert "Restart the kernel and call meshes.simulate(8) first" in out


def test_devices_are_the_first_of_those_that_there_are():
    assert meshes.devices(2) == meshes.devices()[:2]
    assert len(meshes.devices()) == len(jax.devices("cpu")) == 8
    for count in (0, 4096):
        with pytest.raises(ValueError, match=rf"count={count} must be between 1 and the \d+"):
            meshes.devices(count)
    with pytest.raises(ValueError, match="count=0 must be at least 1"):
        meshes.simulate(0)


# Meshes


def test_the_last_axis_joins_neighbours_and_all_axes_are_the_compilers():
    grid = meshes.make({"data": 2, "tensor": 4})
    assert grid.axis_names == ("data", "tensor") and grid.axis_types == (AxisType.Auto,) * 2
    assert [[device.id for device in row] for row in grid.devices] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@one_device.needs_h100
def test_a_mesh_of_virtual_gpus_is_made_by_the_same_code():
    grid = meshes.make({"data": 64, "pipe": 12, "tensor": 8}, virtual.devices("h100", 6144))
    assert grid.shape == {"data": 64, "pipe": 12, "tensor": 8}
    hosts = grid.devices.reshape(-1, 8)
    assert all(len({device.process_index for device in row}) == 1 for row in hosts)


BAD = [
    ({"data": 2, "tensor": 2}, "they make 4, there are 8"),
    ({"data": 8, "tensor": 0}, "sizes of at least 1"),
    ({"model": 8}, "names among data, "),
    ({}, "names among data, "),
]


@pytest.mark.parametrize(("axes", "message"), BAD)
def test_axes_that_make_no_mesh_are_refused_with_sizes_that_would(axes, message):
    with pytest.raises(ValueError, match=rf"axes=.* must .*{message}"):
        meshes.make(axes)


def test_a_dimension_that_an_axis_does_not_divide_is_refused_with_the_nearest_sizes_that_work():
    meshes.check_divides((6, 8), -1, "tensor", 4, "kernel")
    refused = r"kernel.shape\[0\]=6 must be .* the 4 devices along 'tensor'; take 4 or 8"
    with pytest.raises(ValueError, match=refused):
        meshes.check_divides((6, 8), 0, "tensor", 4, "kernel")


def test_the_same_devices_with_axes_that_are_auto():
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), kinds, devices=jax.devices("cpu"))
    same = meshes.auto(mesh)
    assert same.axis_types == (AxisType.Auto,) * 2 and same.axis_names == mesh.axis_names
    assert (same.devices == mesh.devices).all() and meshes.auto(same) is same


def test_a_function_on_explicit_axes_takes_arrays_wherever_they_lie():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu"))
    add = lambda x: jax.lax.psum(x, "data")  # noqa: E731
    summed = meshes.shard_map(add, mesh, P("data"), P())
    numbers = np.arange(8)
    for x in (numbers, jax.device_put(numbers, NamedSharding(mesh, P("data")))):
        assert summed(x) == 28 and jax.typeof(summed(x)).sharding.mesh == mesh.abstract_mesh
        with jax.set_mesh(mesh):
            assert summed(x) == 28


# Values that vary


def on_eight(fn, *args, out=None):
    """Runs fn on a mesh of 2 x 4, the arguments shared by all devices."""
    grid = meshes.make({"data": 2, "tensor": 4})
    out = P(("data", "tensor")) if out is None else out
    return jax.jit(jax.shard_map(fn, mesh=grid, in_specs=P(), out_specs=out))(*args)


def test_a_leaf_varies_over_the_axes_that_were_asked_for_and_keeps_those_that_it_has():
    seen = []

    def look(x):
        y = meshes.vary(x, "data")
        tree = meshes.vary({"shared": x, "data": y}, ("data", "tensor"))
        seen.extend(meshes.varying(leaf) for leaf in (x, y, *tree.values()))
        assert meshes.vary(y, "data") is y and meshes.vary(x, ()) is x
        return tree["data"]

    x = jnp.arange(3.0)
    np.testing.assert_array_equal(on_eight(look, x), np.tile(x, 8))
    assert seen == [frozenset(), {"data"}, {"data", "tensor"}, {"data", "tensor"}]


def test_the_gradient_of_a_shared_value_is_the_sum_over_the_devices_that_use_it():
    def gradients(w):
        number = 1.0 + jax.lax.axis_index("tensor").astype(jnp.float32)  # 1, 2, 3, 4
        shared = jax.grad(lambda w: meshes.vary(w, "tensor") * number)(w)
        own = jax.grad(lambda w: w * number)(meshes.vary(w, "tensor"))
        return shared[None], own[None]

    shared, own = on_eight(gradients, jnp.float32(3), out=(P(), P("tensor")))
    np.testing.assert_array_equal(shared, [10])
    np.testing.assert_array_equal(own, [1, 2, 3, 4])


def test_varying_over_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="'pipe',.* must be axes of a jax.shard_map"):
        on_eight(lambda x: meshes.vary(x, "pipe"), jnp.ones(3))


# Places of devices and arrays


def test_a_device_holds_what_its_sharding_says():
    grid = meshes.make({"data": 2, "tensor": 4})
    x = jax.device_put(
        np.arange(32.0, dtype=np.float32).reshape(4, 8),
        NamedSharding(grid, P("data", "tensor")),
    )
    rows = meshes.holdings(x)
    assert rows[5] == meshes.Holding(5, ((2, 4), (2, 4)), 16)
    for row, shard in zip(
        rows, sorted(x.addressable_shards, key=lambda shard: shard.device.id), strict=True
    ):
        (top, bottom), (start, stop) = row.ranges
        assert row.device == shard.device.id and row.bytes == shard.data.nbytes
        np.testing.assert_array_equal(np.asarray(x)[top:bottom, start:stop], shard.data)


def test_what_is_not_divided_is_held_by_every_device():
    halves = NamedSharding(meshes.make({"data": 2, "tensor": 4}), P("data"))
    rows = meshes.holdings(jax.ShapeDtypeStruct((4, 6), jnp.bfloat16, sharding=halves))
    assert [row.ranges for row in rows] == [((0, 2), (0, 6))] * 4 + [((2, 4), (0, 6))] * 4
    assert sum(row.bytes for row in rows) == 4 * (4 * 6 * 2)  # four copies
