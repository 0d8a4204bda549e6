"""Collectives, each built from `shift`, which passes an array along a ring.

The devices of a mesh axis form a ring: each can send to the next, the last to the first. Every
function here returns the same values as JAX's own, and the same gradient, which JAX derives: a
shift transposes to a shift the other way, so the ring that gathers transposes to the ring that
sums and scatters.

    here                         JAX's own, in jax.lax
    all_gather(x, "data", d)     all_gather(x, "data", axis=d, tiled=True)
    reduce_scatter(x, "data", d) psum_scatter(x, "data", scatter_dimension=d, tiled=True)
    all_reduce(x, "data", d)     psum(x, "data")
    all_to_all(x, "data", d, e)  all_to_all(x, "data", split_axis=d, concat_axis=e, tiled=True)

Call them inside `jax.shard_map`. They unroll into one step per hop. Links carry both directions
at once: with `bidirectional=True` half of the bytes go the other way round, in half as many
steps.

`cost` gives steps, bytes and seconds on one ring whose links have one bandwidth.
`cluster_model` gives the bandwidth of a group of GPUs, in one host or on several.

Sources: Thakur, Rabenseifner and Gropp, 2005, https://doi.org/10.1177/1094342005051521 (the
algorithms, and the model of latency plus bytes over bandwidth). Bytes are counted as in NCCL's
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from course_lib.many_devices import meshes

KINDS = (
    "ppermute",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_to_all_direct",
)


def shift(x: Shaped[Array, "..."], axis: str, by: int = 1) -> Shaped[Array, "..."]:
    """Sends each device's array `by` devices further along the ring, and returns the array that
    arrives.
    """
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(source, (source + by) % n) for source in range(n)])


def all_gather(
    x: Shaped[Array, "..."], axis: str, dim: int = 0, bidirectional: bool = False
) -> Shaped[Array, "..."]:
    """Returns the arrays of all devices, joined along a dimension in the order of devices.

    Each device passes on the array that arrived last: after k steps it has the array of the
    k-th device before it.
    """
    right, left = hops(axis, bidirectional)
    # the array of the k-th device before this one, and of the k-th after it
    before, after = [x], [x]
    for _ in range(right):
        before.append(shift(before[-1], axis, 1))
    for _ in range(left):
        after.append(shift(after[-1], axis, -1))
    return join(before[::-1] + after[1:], -right, axis, dim)


def reduce_scatter(
    x: Shaped[Array, "..."], axis: str, dim: int = 0, bidirectional: bool = False
) -> Shaped[Array, "..."]:
    """Returns this device's part, along a dimension, of the sum of all devices' arrays.

    The sum for a device starts at the farthest device. Each device on the way adds its part.
    """
    right, left = hops(axis, bidirectional)
    parts = split(x, axis, dim)

    def travel(parts: Sequence[Array], by: int) -> Array | int:
        total: Array | int = 0
        for part in parts:
            total = shift(total + part, axis, by)
        return total

    return parts[0] + travel(parts[right:0:-1], 1) + travel(parts[right + 1 :], -1)


def all_reduce(
    x: Shaped[Array, "..."], axis: str, dim: int = 0, bidirectional: bool = False
) -> Shaped[Array, "..."]:
    """Returns the sum of all devices' arrays: a reduce-scatter, then an all-gather.

    The result is the same on all devices, but JAX cannot know that and counts it as varying
    over the axis, unlike the result of `jax.lax.psum`. `meshes.vary(jax.lax.psum(x, axis),
    axis)` equals this function in every respect.
    """
    return all_gather(reduce_scatter(x, axis, dim, bidirectional), axis, dim, bidirectional)


def all_to_all(
    x: Shaped[Array, "..."],
    axis: str,
    split_dim: int,
    concat_dim: int,
    bidirectional: bool = False,
) -> Shaped[Array, "..."]:
    """Sends the k-th part of the array, along one dimension, to the k-th device, and returns
    the parts that arrive, joined along another dimension.

    Each device passes on all parts that are not for itself: one part fewer per step.
    """
    right, _ = hops(axis, bidirectional)
    parts = split(x, axis, split_dim)

    def travel(cargo: list[Array], by: int) -> list[Array]:
        arrived = []
        while cargo:
            first, *cargo = shift(jnp.stack(cargo), axis, by)
            arrived.append(first)
        return arrived

    before, after = travel(parts[1 : right + 1], 1), travel(parts[:right:-1], -1)
    return join(before[::-1] + parts[:1] + after, -right, axis, concat_dim)


def all_to_all_direct(
    x: Shaped[Array, "..."], axis: str, split_dim: int, concat_dim: int
) -> Shaped[Array, "..."]:
    """Like `all_to_all`, for devices that are all linked with each other, as by a switch: each
    part goes to its device at once.
    """
    parts = split(x, axis, split_dim)
    before = [part if by == 0 else shift(part, axis, by) for by, part in enumerate(parts)]
    return join(before[::-1], 1 - len(parts), axis, concat_dim)


def hops(axis: str, bidirectional: bool) -> tuple[int, int]:
    """Returns the steps to the right and to the left in which an array reaches all devices of
    the ring.
    """
    n = jax.lax.axis_size(axis)
    return (n // 2, (n - 1) // 2) if bidirectional else (n - 1, 0)


def split(x: Array, axis: str, dim: int) -> list[Array]:
    """Cuts an array into one part per device. The k-th part is for the k-th device after this
    one.
    """
    n = jax.lax.axis_size(axis)
    meshes.check_divides(x.shape, dim, axis, n, "x")
    return jnp.split(jnp.roll(x, -jax.lax.axis_index(axis) * (x.shape[dim] // n), dim), n, dim)


def join(parts: list[Array], first: int, axis: str, dim: int) -> Array:
    """Joins parts in the order of devices, given in an order that begins with the device
    `first` after this one.
    """
    offset = (jax.lax.axis_index(axis) + first) * parts[0].shape[dim]
    return jnp.roll(jnp.concatenate(parts, dim), offset, dim)


@dataclasses.dataclass(frozen=True)
class RingCost:
    """The cost of a collective on a ring."""

    steps: int  # messages that follow each other; opposite directions travel at once
    sent_bytes: float  # by each device, both directions together
    seconds: float  # steps * latency + bytes in the busier direction / bandwidth


def cost(
    kind: str,
    bytes: int,
    size: int,
    bandwidth: float,
    *,
    latency: float = 0.0,
    bidirectional: bool = False,
) -> RingCost:
    """Returns the cost of a function of this file, with S bytes and n devices:

                           one direction                both: steps, bytes in the busier one
        kind               steps      bytes sent        steps       bytes sent
        ppermute           1          S                 -
        all_gather         n - 1      S (n - 1) / n     n // 2      S (n // 2) / n
        reduce_scatter     n - 1      S (n - 1) / n     n // 2      S (n // 2) / n
        all_reduce         2 (n - 1)  2 S (n - 1) / n   2 (n // 2)  2 S (n // 2) / n
        all_to_all         n - 1      S (n - 1) / 2     n // 2      S h (h + 1) / 2n, h = n // 2
        all_to_all_direct  n - 1      S (n - 1) / n     -

    An all-reduce of a gradient of S bytes thus sends about 2 S per device, whatever the number
    of devices. Only a switch that adds needs less: each device sends S (SHARP, NVLS).

    The seconds are ideal: all links have the same bandwidth, and reach it at once. A rated
    bandwidth gives a lower bound. The functions of `cluster_model` count hosts, their ports,
    and NCCL's share of the rated bandwidth.

    Args:
      kind: one of `KINDS`.
      bytes: S, of one device's array before a reduce-scatter, all-reduce, all-to-all or
        ppermute, or after an all-gather.
      size: n, the devices of the axis.
      bandwidth: of the ring's slowest link in one direction, bytes/s. With `bidirectional`, the
        bandwidth of each direction: all of it if each neighbour has its own link (TPUs), half
        if one switch links all devices (NVLink on H100s).
      latency: seconds from the start of a message to the arrival of its first byte.
      bidirectional: whether each direction carries half.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
    if bidirectional and kind in ("ppermute", "all_to_all_direct"):
        raise ValueError(
            f"bidirectional=True must not come with kind={kind!r}: its messages go one way"
        )
    if size < 1 or bytes < 0 or bandwidth <= 0 or latency < 0:
        raise ValueError(
            f"size={size}, bytes={bytes}, bandwidth={bandwidth}, latency={latency} must be at"
            " least 1, 0, above 0, and 0"
        )
    right, left = (size // 2, (size - 1) // 2) if bidirectional else (size - 1, 0)
    if kind == "ppermute":
        steps, parts = 1, (size, 0)  # parts of S / n that go right, and left
    elif kind == "all_to_all":
        steps, parts = right, (right * (right + 1) // 2, left * (left + 1) // 2)
    else:
        times = 2 if kind == "all_reduce" else 1
        steps, parts = times * right, (times * right, times * left)
    part = bytes / size
    return RingCost(steps, sum(parts) * part, steps * latency + parts[0] * part / bandwidth)
