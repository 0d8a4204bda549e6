"""Rings of devices: what passes around them, and what a collective costs.

The devices of a mesh axis form a ring: each can send to the next, the last to the first. Call
these functions inside `jax.shard_map`. `hops`, `split` and `join` serve rings that compute
while parts travel (`async_tensor_parallel`). JAX derives their gradients: a shift transposes to
a shift the other way.

`cost` gives steps, bytes and seconds on one ring whose links have one bandwidth.
`cluster_model` gives the bandwidth of a group of GPUs, in one host or on several.

Sources: Thakur, Rabenseifner and Gropp, 2005, https://doi.org/10.1177/1094342005051521 (the
algorithms, and the model of latency plus bytes over bandwidth). Bytes are counted as in NCCL's
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from course_lib.many_devices import meshes

KINDS = ("ppermute", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def shift(x: Shaped[Array, "..."], axis: str, by: int = 1) -> Shaped[Array, "..."]:
    """Sends each device's array `by` devices further along the ring, and returns the array that
    arrives.
    """
    n = jax.lax.axis_size(axis)
    return jax.lax.ppermute(x, axis, [(source, (source + by) % n) for source in range(n)])


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
    """Returns the cost of a collective of S bytes on a ring of n devices:

                        one direction                both: steps, bytes in the busier one
        kind            steps      bytes sent        steps       bytes sent
        ppermute        1          S                 -
        all_gather      n - 1      S (n - 1) / n     n // 2      S (n // 2) / n
        reduce_scatter  n - 1      S (n - 1) / n     n // 2      S (n // 2) / n
        all_reduce      2 (n - 1)  2 S (n - 1) / n   2 (n // 2)  2 S (n // 2) / n
        all_to_all      n - 1      S (n - 1) / n     -           each part goes straight

    An all-reduce thus sends about 2 S per device, whatever n is. Only a switch that adds needs
    less: each device sends S (SHARP, NVLS).

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
    if bidirectional and kind in ("ppermute", "all_to_all"):
        raise ValueError(
            f"bidirectional=True must not come with kind={kind!r}: its messages go one way"
        )
    if size < 1 or bytes < 0 or bandwidth <= 0 or latency < 0:
        raise ValueError(
            f"size={size}, bytes={bytes}, bandwidth={bandwidth}, latency={latency} must be at"
            " least 1, 0, above 0, and 0"
        )
    if kind == "ppermute":
        return RingCost(1, float(bytes), latency + bytes / bandwidth)
    times, part = (2 if kind == "all_reduce" else 1), bytes / size
    steps = times * (size // 2 if bidirectional else size - 1)
    return RingCost(steps, times * (size - 1) * part, steps * (latency + part / bandwidth))
