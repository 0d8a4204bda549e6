"""Meshes: devices in a grid with named axes, and the part of an array that each device holds.

A strategy names axes ("sum over data"), not devices, so the same code runs on simulated,
virtual and real devices:

    meshes.simulate(8)                              # before JAX starts: this CPU is 8 devices
    grid = meshes.make({"data": 2, "tensor": 4})    # 8 devices, 4 neighbours in each row
    grid = meshes.make({"data": 2, "tensor": 4}, virtual.devices("h100", 8))

The axes have the type `Auto`: outside `jax.shard_map` the compiler decides how to divide a
computation (https://docs.jax.dev/en/latest/parallel.html). Inside `jax.shard_map` the program
decides, and JAX tracks over which axes a value varies from device to device
(https://docs.jax.dev/en/latest/notebooks/shard_map.html). Newer versions of `jax.make_mesh`
give `Explicit` axes: an array's type says how it is divided. Strategies accept both, and use
Auto axes inside (`auto`, `with_auto_axes`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib import arguments

PyTree = Any

AnyMesh = Mesh | AbstractMesh  # for code that needs only the sizes of axes, no devices
MODULES = {
    "data": "data_parallel",
    "pipe": "pipeline_parallel.pipeline",
    "expert": "expert_parallel",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}
"""The axes that a mesh may have, outer to inner, and the module of the strategy along each."""
AXES = tuple(MODULES)


def simulate(count: int = 8) -> None:
    """Makes this process's CPU appear as several devices. Call it before JAX starts, that
    is, before anything computes or asks for devices.

    The devices share the CPU's cores and memory: they show what each device holds and sends,
    not how fast it is.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        running = len(jax.devices("cpu"))
        if running != count:
            raise RuntimeError(
                f"count={count} comes too late: JAX runs already, with {running} CPU"
                f" device{'s' * (running > 1)}, and cannot change that. Restart the kernel and"
                f" call meshes.simulate({count}) first, before anything computes or asks for"
                " devices"
            ) from None


def devices(count: int | None = None) -> list[jax.Device]:
    """Returns GPUs or TPUs if there are enough of them, else simulated CPU devices. None: as
    many as the simulated CPU devices.
    """
    cpus = jax.devices("cpu")
    count = len(cpus) if count is None else count
    enough = next((some for some in (jax.devices(), cpus) if len(some) >= count), None)
    if count < 1 or enough is None:
        raise ValueError(
            f"count={count} must be between 1 and the {max(len(jax.devices()), len(cpus))}"
            f" devices that there are: meshes.simulate({max(count, 1)}), called before JAX"
            " starts, makes the CPU appear as that many"
        )
    return enough[:count]


_devices = devices  # `make` has an argument of that name


def make(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh over all of the devices.

    Args:
      axes: the size of each axis by its name, one of `AXES`, outer to inner. Neighbours on the
        innermost axis are neighbouring devices. They share a host if the axis divides its
        devices (`cluster_model.Cluster.group` has their links).
      devices: real, simulated or virtual devices. None: those of `meshes.devices()`.
    """
    axes = dict(axes)
    devices = list(_devices() if devices is None else devices)
    if not axes or set(axes) - set(AXES):
        raise ValueError(f"axes={axes} must have names among {', '.join(AXES)}")
    product, count = math.prod(axes.values()), len(devices)
    if product != count:
        raise ValueError(
            f"axes={axes} must have sizes of at least 1 that multiply to the number of devices:"
            f" they make {product}, there are {count}"
        )
    if len(set(devices)) < count:
        raise ValueError(f"devices={devices} must be different ones: one of them comes twice")
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=devices,
    )


def explicit(mesh: AnyMesh) -> bool:
    """Returns whether the axes of a mesh are Explicit, as those of `jax.make_mesh`, or Auto."""
    kinds = set(mesh.axis_types)
    if kinds not in ({AxisType.Auto}, {AxisType.Explicit}):
        raise ValueError(
            f"mesh must have axes of one type, Auto or Explicit, not {mesh.axis_types}: make it"
            " with jax.make_mesh without axis_types, or with meshes.make"
        )
    return kinds == {AxisType.Explicit}


def auto(mesh: Any) -> Any:
    """Returns a mesh of the same devices and axes, whose axes are Auto."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return mesh.update(axis_types=kinds) if explicit(mesh) else mesh


def with_auto_axes(
    function: Callable[..., Any], mesh: AnyMesh, out_specs: PyTree, **options: Any
) -> Callable[..., Any]:
    """Returns a compiled function of arrays on a mesh with Explicit axes, in which the axes are
    Auto. Its results lie on that mesh, as the specs say. `options` are those of `jax.jit`.
    """
    place = functools.partial(NamedSharding, mesh.abstract_mesh)  # JAX 0.7 needs it abstract
    places = jax.tree.map(place, out_specs, is_leaf=lambda x: isinstance(x, P))
    return jax.jit(jax.sharding.auto_axes(function, out_sharding=places), **options)


def shard_map(function: Any, mesh: Mesh, in_specs: PyTree, out_specs: PyTree) -> Any:
    """Returns `jax.shard_map` of a function. With Explicit axes it takes any arrays, also those
    that are not placed on the mesh.
    """
    inside = jax.shard_map(function, mesh=auto(mesh), in_specs=in_specs, out_specs=out_specs)
    return with_auto_axes(inside, mesh, out_specs) if explicit(mesh) else inside


def check_divides(shape: Sequence[int], dim: int, axis: str, size: int, name: str) -> None:
    """Refuses to cut a dimension of an array called `name` into unequal parts."""
    where = f"{name}.shape[{dim}]"
    arguments.refuse(arguments.shared(where, shape[dim], size, f"devices along {axis!r}"))


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array varies from device to device, inside
    `jax.shard_map`.
    """
    kind = jax.typeof(x)
    # `vma` in JAX 0.7.2, `manual_axis_type` in newer versions.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def vary(tree: PyTree, axes: str | Sequence[str]) -> PyTree:
    """Marks values that devices share along some axes as each device's own, inside
    `jax.shard_map`.

    The values stay as they are, and nothing is sent. Only the gradient changes: a shared value
    that every device uses has one gradient, the sum over devices, so the transpose of this
    function is `jax.lax.psum` (Megatron-LM calls this function f and `psum` g:
    https://arxiv.org/abs/1909.08053, section 3).

    Args:
      tree: pytree of arrays. A leaf that already varies over an axis does not change.
      axes: name or names of mesh axes, of the `jax.shard_map` around the call.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    here = jax.sharding.get_abstract_mesh().manual_axes
    if not set(axes) <= set(here):
        raise ValueError(f"axes={axes} must be axes of a jax.shard_map around the call: {here}")

    def vary_leaf(x: Any) -> Any:
        new = tuple(axis for axis in axes if axis not in varying(x))
        if not new:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, new, to="varying")
        return jax.lax.pvary(x, new)  # type: ignore[attr-defined]  # its name in JAX 0.7

    return jax.tree.map(vary_leaf, tree)


@dataclasses.dataclass(frozen=True)
class Holding:
    """The part of an array on one device."""

    device: int  # `jax.Device.id`
    ranges: tuple[tuple[int, int], ...]  # by dimension: first index, and the one after the last
    bytes: int


def holdings(array: jax.Array | jax.ShapeDtypeStruct) -> list[Holding]:
    """Returns the part of an array on each device, by its sharding, in order of devices."""
    parts = array.sharding.devices_indices_map(tuple(array.shape))
    rows = []
    for device, indices in sorted(parts.items(), key=lambda part: part[0].id):
        ranges = tuple(
            index.indices(size)[:2] for index, size in zip(indices, array.shape, strict=True)
        )
        count = math.prod(stop - start for start, stop in ranges)
        rows.append(Holding(device.id, ranges, count * array.dtype.itemsize))
    return rows
