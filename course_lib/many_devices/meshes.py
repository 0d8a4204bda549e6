"""Meshes: devices in a grid whose axes have names, and who holds what on them.

A strategy speaks of axes ("sum over data"), not of devices, so the same code runs on simulated,
virtual and real ones:

    meshes.simulate(8)                              # before JAX starts: this CPU is 8 devices
    grid = meshes.make({"data": 2, "tensor": 4})    # 8 devices, 4 neighbours in each row
    grid = meshes.make({"data": 2, "tensor": 4}, virtual.devices("h100", 8))

The axes are of the type `Auto`: outside `jax.shard_map` the compiler decides how to divide what
a program computes (https://docs.jax.dev/en/latest/parallel.html). Inside it the program
decides, and JAX tracks over which axes a value varies from device to device
(https://docs.jax.dev/en/latest/notebooks/shard_map.html).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

PyTree = Any

Shape = Mesh | AbstractMesh  # where only the sizes of axes count, no device is needed
AXES = ("data", "pipe", "expert", "context", "tensor")  # the names that the course uses


def simulate(count: int = 8) -> None:
    """Makes this process's CPU show as several devices. Must come before JAX starts, that is,
    before it computes.

    The devices share the CPU's cores and memory: they show what each device holds and sends,
    not how fast it is.

    Args:
      count: number of devices.

    Raises:
      ValueError: if `count` is below 1.
      RuntimeError: if JAX runs already, with another number of CPU devices.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        found = len(jax.devices("cpu"))
        if found != count:
            raise RuntimeError(
                f"count={count} comes too late: JAX runs already, with {found} CPU"
                f" device{'s' * (found > 1)}, and cannot change that. Restart the kernel and"
                f" call meshes.simulate({count}) first, before anything computes or asks for"
                " devices"
            ) from None


def devices(count: int | None = None) -> list[jax.Device]:
    """Returns GPUs or TPUs where there are enough of them, else simulated CPU devices.

    Args:
      count: how many. If None, as many as `simulate` made of the CPU.

    Raises:
      ValueError: if there are too few of either.
    """
    cpus = jax.devices("cpu")
    count = len(cpus) if count is None else count
    found = next((some for some in (jax.devices(), cpus) if len(some) >= count), None)
    if count < 1 or found is None:
        raise ValueError(
            f"count={count} must be between 1 and the {max(len(jax.devices()), len(cpus))}"
            f" devices that there are: meshes.simulate({max(count, 1)}), called before JAX"
            " starts, makes as many of the CPU"
        )
    return found[:count]


_devices = devices  # `make` has an argument of that name


def make(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a mesh over all of the devices.

    Args:
      axes: the size of each axis by its name, one of `AXES`, outer to inner. Neighbours on the
        innermost axis are neighbouring devices, which share a host:
        `cluster_model.Cluster.group` says what links them.
      devices: real, simulated or virtual ones. If None, those of `meshes.devices()`.

    Raises:
      ValueError: if a name is unknown, a size is below 1, or the sizes do not multiply to the
        number of devices.
    """
    axes = dict(axes)
    found = list(_devices() if devices is None else devices)
    unknown = [name for name in axes if name not in AXES]
    if unknown or not axes:
        why = f"{', '.join(unknown)} is not one of them" if unknown else "it has none"
        raise ValueError(f"axes={axes} must have names among {', '.join(AXES)}: {why}")
    if small := [name for name, size in axes.items() if size < 1]:
        raise ValueError(
            f"axes={axes} must have sizes of at least 1: {', '.join(small)} holds no device"
        )
    product = math.prod(axes.values())
    if product != len(found):
        others = {name: product // size for name, size in axes.items()}
        fits = [
            f"{name}={len(found) // other}"
            for name, other in others.items()
            if len(found) % other == 0
        ]
        raise ValueError(
            f"axes={axes} must multiply to the number of devices: they make {product}, there"
            f" are {len(found)}; "
            + (
                f"{' or '.join(fits)} would do"
                if fits
                else f"each size must divide {len(found)}"
            )
        )
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=found,
    )


def axis_size(mesh: Shape, axis: str) -> int:
    """Returns the number of devices along an axis.

    Raises:
      ValueError: if the mesh has no such axis.
    """
    if axis not in mesh.shape:
        raise ValueError(
            f"axis={axis!r} must be an axis of the mesh: {', '.join(mesh.axis_names)}"
        )
    return mesh.shape[axis]


def check_divides(shape: Sequence[int], dim: int, axis: str, size: int, name: str) -> None:
    """Checks that a mesh axis cuts a dimension of an array into equal parts.

    Args:
      shape: of the array.
      dim: the dimension that is cut.
      axis: the mesh axis.
      size: the number of devices along it.
      name: what to call the array, as in "query kernel".

    Raises:
      ValueError: if the array has no such dimension, or `size` does not divide it.
    """
    shape = tuple(shape)
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"dim={dim} must be a dimension of {name}: its shape is {shape}")
    if rest := shape[dim] % size:
        below, above = shape[dim] - rest, shape[dim] - rest + size
        raise ValueError(
            f"{name} of shape {shape} must have a dimension {dim} that the {size} devices of"
            f" axis {axis!r} divide: {shape[dim]} leaves {rest} over; take"
            f" {f'{below} or ' * (below > 0)}{above}"
        )


def varying(x: Any) -> frozenset[str]:
    """Returns the mesh axes over which an array varies from device to device, inside
    `jax.shard_map`.
    """
    kind = jax.typeof(x)
    # `vma` in JAX 0.7.2, `manual_axis_type` in newer versions.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def vary(tree: PyTree, axes: str | Sequence[str]) -> PyTree:
    """Marks values that all devices along some axes share as each device's own, inside
    `jax.shard_map`.

    Nothing moves: the values stay as they are. What changes is the gradient. A shared value
    that every device uses has one gradient, the sum over devices, so this function's transpose
    is `jax.lax.psum` (in Megatron-LM's words it is f, and `psum` is g:
    https://arxiv.org/abs/1909.08053, section 3).

    Args:
      tree: pytree of arrays. A leaf that varies over an axis already stays as it is.
      axes: name or names of mesh axes.

    Raises:
      ValueError: if this does not run inside a `jax.shard_map` over these axes.
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    here = jax.sharding.get_abstract_mesh().manual_axes
    if missing := [axis for axis in axes if axis not in here]:
        where = (
            f"the axes of this jax.shard_map: {', '.join(here)}"
            if here
            else "axes of a jax.shard_map: this is outside"
        )
        raise ValueError(f"axes={axes} must be {where}; {', '.join(missing)} is unknown here")

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
    """What one device holds of an array.

    Attributes:
      device: its number, `jax.Device.id`.
      ranges: for each dimension, the first index that it holds and the one after the last.
      bytes: of that part.
    """

    device: int
    ranges: tuple[tuple[int, int], ...]
    bytes: int


def holdings(array: jax.Array | jax.ShapeDtypeStruct) -> list[Holding]:
    """Returns which device holds which part of an array, read from the array's sharding, in
    order of devices.

    Args:
      array: on any devices; one that is only described (`jax.ShapeDtypeStruct`) must have a
        sharding.

    Raises:
      ValueError: if it has none.
    """
    if array.sharding is None:
        raise ValueError(
            f"array={array} must have a sharding: without one no device holds it; see"
            " virtual.abstract"
        )
    parts = array.sharding.devices_indices_map(tuple(array.shape))
    rows = []
    for device, indices in sorted(parts.items(), key=lambda part: part[0].id):
        ranges = tuple(
            index.indices(size)[:2] for index, size in zip(indices, array.shape, strict=True)
        )
        count = math.prod(stop - start for start, stop in ranges)
        rows.append(Holding(device.id, ranges, count * array.dtype.itemsize))
    return rows
