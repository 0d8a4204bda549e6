"""How long collectives take on a cluster: GPUs behind an NVLink switch, hosts on a network,
TPUs on a torus.

    h100s = Cluster(hardware.get("h100"), 64)            # eight hosts of eight GPUs
    axes = {"data": 8, "tensor": 8}                      # outer to inner, as for meshes.make
    group = h100s.group(axes, "tensor")                  # eight GPUs of one host
    seconds = all_reduce(group, 2**30)                   # 1 GiB on each of them

The bandwidth of a group follows from where its devices are, not from the axis alone. Every GPU
of a host has its own port to the network. Eight GPUs of a host that send together use eight
ports: a group that covers whole hosts leaves each host eight times as fast as a group with one
GPU per host. (https://jax-ml.github.io/scaling-book/gpus)

A group has n ranks, r of them behind each switch. NCCL lays its rings so that both levels work
at the same time, and the slower level decides:

    all-gather, reduce-scatter    max(B (r-1)/r / NVLink, B (n-r)/n / (r port)) + latency
    all-reduce                    twice that
    all-to-all                    max(b (r-1)/n / NVLink, b (n-r)/n / port) + latency

B is the whole array, b what one rank sends and keeps. Links do not reach their rated bandwidth:
`NVLINK_SHARE` and `network_share` say how much NCCL gets.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from course_lib.measure import virtual
from course_lib.measure.hardware import Accelerator

PRODUCTS_SHARE = 0.75
"""Share of the peak rate that matrix products reach. The one constant that was
fitted to published step times: see `lessons.backtest.fit`."""
NVLINK_SHARE = 0.8
"""Share of NVLink's rated bandwidth that NCCL reaches: about 360 of 450 GB/s on an H100, 235 of
300 on an A100. Assumed for all GPUs, not fitted."""
SWITCH_SPEEDUP = 1.3
"""How much faster an all-reduce is where switches add up (SHARP). It would be 2 without losses;
about 1.3 is seen in practice (https://jax-ml.github.io/scaling-book/gpus)."""
NVLINK_LATENCY, NETWORK_LATENCY = 20e-6, 40e-6
"""Seconds until the first byte has arrived: inside a host, and per doubling of hosts."""
TORUS_LATENCY = 1e-6
"""Seconds per hop on a TPU's torus (https://jax-ml.github.io/scaling-book/sharding)."""


def network_share(hosts: int) -> float:
    """Returns NCCL's share of the network's rated bandwidth, for a group on so many hosts.

    Measured on H100 hosts with eight ports of 50 GB/s: 360 GB/s on 4 hosts, 345, 320, 300, 280,
    and 260 on 128 (https://github.com/NVIDIA/nccl/issues/1229).
    """
    return min(0.9, max(0.4, 0.9 - 0.05 * math.log2(hosts / 4)))


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices of one collective, and the links between them.

    Attributes:
      ranks: n, the number of devices.
      per_switch: r, how many of them share a switch (or a torus).
      inside: bytes/s that a rank receives from the others behind its switch.
      outside: bytes/s that a rank receives over its port from other hosts. Not used if all
        ranks share a switch.
      latency: seconds until the first byte has arrived.
      adds_in_switch: whether the switches add up, which makes an all-reduce faster.
      ring: 0 behind a switch; on a torus the sum of the lengths of the rings through a chip.
    """

    ranks: int
    per_switch: int
    inside: float
    outside: float
    latency: float = 0.0
    adds_in_switch: bool = False
    ring: int = 0


def all_gather(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-gather. A reduce-scatter takes as long.

    Args:
      group: the devices.
      size: bytes of the whole array, of which each rank has a part at first.
    """
    n, r = group.ranks, group.per_switch
    if n == 1:
        return 0.0
    inside = size * (r - 1) / r / group.inside if r > 1 else 0.0
    outside = size * (n - r) / n / (r * group.outside) if n > r else 0.0
    return max(inside, outside) + group.latency


reduce_scatter = all_gather


def all_reduce(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-reduce: a reduce-scatter, then an all-gather.

    Args:
      group: the devices.
      size: bytes of the array, which each rank has.
    """
    seconds = reduce_scatter(group, size) + all_gather(group, size)
    return seconds / SWITCH_SPEEDUP if group.adds_in_switch else seconds


def all_to_all(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-to-all.

    On a ring of n devices a message takes n/4 hops on average, and keeps as many links busy.

    Args:
      group: the devices.
      size: bytes that one rank has; it sends 1/n of them to each rank.
    """
    n, r = group.ranks, group.per_switch
    if n == 1:
        return 0.0
    inside = size * max((r - 1) / n, group.ring / 4) / group.inside if r > 1 else 0.0
    outside = size * (n - r) / n / group.outside if n > r else 0.0
    return max(inside, outside) + group.latency


def shift(group: Group, size: int | float) -> float:
    """Returns the seconds in which each rank sends an array to the next one: a step of a ring,
    or the link between two pipeline stages.

    Args:
      group: the devices, in the order of the ring.
      size: bytes of the array.
    """
    if group.ranks == 1:
        return 0.0
    slowest = group.outside if group.ranks > group.per_switch else group.inside
    return size / slowest + group.latency / 2


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Accelerators, and what links them.

    Attributes:
      accelerator: a row of `hardware`.
      count: number of accelerators.
      gpus_per_host: that share a host and its ports. None: eight, or all if there are fewer.
      hosts_per_switch: hosts that share one NVLink switch; 1 in NVIDIA's servers of eight GPUs,
        18 in a GB200 NVL72 rack with its hosts of four.
      ports_per_host: None: one per GPU.
      port_bandwidth: bytes/s of one port in one direction. None: the table's
        `network_bandwidth`.
      adds_in_switch: whether NVLink and network switches add up (NVLS, SHARP).
      ideal: links reach their rated bandwidth at once. For comparison with formulas that assume
        the same.
      products_share: share of the peak rate that matrix products reach.

    Raises:
      ValueError: if a number is below 1, a host has more GPUs than there are, or TPUs are given
        hosts and ports, which their torus does not have.
    """

    accelerator: Accelerator
    count: int
    gpus_per_host: int | None = None
    hosts_per_switch: int = 1
    ports_per_host: int | None = None
    port_bandwidth: float | None = None
    adds_in_switch: bool = False
    ideal: bool = False
    products_share: float = PRODUCTS_SHARE

    def __post_init__(self) -> None:
        small = {
            name: value
            for name, value in vars(self).items()
            if name not in ("accelerator", "adds_in_switch", "ideal")
            and value is not None
            and not value > 0
        }
        if small:
            raise ValueError(f"{small} must be above 0")
        if self.gpus_per_host is not None and self.gpus_per_host > self.count:
            raise ValueError(
                f"gpus_per_host={self.gpus_per_host} must be at most count={self.count}: a host"
                " cannot have more GPUs than the cluster"
            )
        if self.accelerator.platform == "tpu" and (
            self.gpus_per_host or self.ports_per_host or self.port_bandwidth
        ):
            raise ValueError(
                f"gpus_per_host, ports_per_host and port_bandwidth must be None for"
                f" {self.accelerator.title}: its links form a torus across all hosts"
            )

    @property
    def per_host(self) -> int:
        """GPUs of a host."""
        return self.gpus_per_host or min(virtual.GPUS_PER_HOST, self.count)

    @property
    def per_switch(self) -> int:
        """GPUs that NVLink connects with each other."""
        return min(self.per_host * self.hosts_per_switch, self.count)

    @property
    def network(self) -> float | None:
        """Bytes/s that one GPU can send to other hosts if all of its host's GPUs send; None if
        the table has no figure.
        """
        port = self.port_bandwidth or self.accelerator.network_bandwidth
        ports = self.ports_per_host or self.per_host
        return None if port is None else port * ports / self.per_host

    def group(self, axes: Mapping[str, int], over: str | Sequence[str]) -> Group:
        """Returns the group that communicates along one mesh axis, or along several together.

        Args:
          axes: sizes of the mesh's axes, outer to inner. Neighbours on the innermost axis have
            neighbouring numbers.
          over: the axis or axes. A name that `axes` lacks counts as an axis of size 1.

        Raises:
          ValueError: if the axes do not multiply to `count`, or the group crosses a network for
            which there is no figure.
        """
        if math.prod(axes.values()) != self.count:
            raise ValueError(
                f"axes={dict(axes)} must multiply to the {self.count} accelerators of the"
                f" cluster, not to {math.prod(axes.values())}"
            )
        over = (over,) if isinstance(over, str) else tuple(over)
        if self.accelerator.platform == "tpu":
            return self._on_torus(axes, over)
        numbers = np.arange(self.count).reshape(tuple(axes.values()))
        members = numbers[tuple(slice(None) if axis in over else 0 for axis in axes)].ravel()
        # Groups may lie unevenly, as 12 GPUs on hosts of 8: fewest ranks, fewest ports.
        ranks_behind = np.unique(members // self.per_switch, return_counts=True)[1]
        hosts = len(np.unique(members // self.per_host))
        inside, outside = self.accelerator.link_bandwidth, self.network
        crosses = len(ranks_behind) > 1
        if crosses and outside is None:
            raise ValueError(
                f"accelerator={self.accelerator.name!r} must have a figure for its network:"
                f" axis {'+'.join(over)!r} crosses it; give Cluster a port_bandwidth"
            )
        latency = NVLINK_LATENCY * (int(ranks_behind.min()) > 1)
        if crosses:
            latency += NETWORK_LATENCY * math.ceil(math.log2(hosts))
        if self.ideal:
            shares, latency = (1.0, 1.0), 0.0
        else:
            shares = NVLINK_SHARE, network_share(hosts)
        return Group(
            len(members),
            int(ranks_behind.min()),
            shares[0] * inside,
            shares[1] * (outside or 0.0),
            latency,
            self.adds_in_switch,
        )

    def _on_torus(self, axes: Mapping[str, int], over: tuple[str, ...]) -> Group:
        """Returns a group of TPUs: a ring, or several through each chip.

        The mesh's axes take dimensions of the torus from inner to outer. An axis of two whole
        dimensions has two rings through each chip, so twice the bandwidth. Data goes around a
        ring in both directions; an axis that is a part of a dimension is a line, and gets half.
        """
        left = [int(side) for side in self._torus().split("x")]
        shortest = 16 if len(left) == 2 else 4  # the shortest dimension whose ends are linked
        ranks, ring, links = 1, 0, 0
        for axis, size in reversed(list(axes.items())):
            rest = size
            while rest > 1 and left and (part := math.gcd(rest, left[-1])) > 1:
                if axis in over:
                    links += 2 if part == left[-1] and part % shortest == 0 else 1
                    ring += part
                rest, left[-1] = rest // part, left[-1] // part
                if left[-1] == 1:
                    left.pop()
            if rest > 1:
                raise ValueError(
                    f"axes={dict(axes)} must lie on the torus {self._torus()}: the axes"
                    f" inside of {axis!r} leave no dimension that {size} divides"
                )
            ranks *= size if axis in over else 1
        latency = 0.0 if self.ideal else TORUS_LATENCY * ring / 2
        bandwidth = max(links, 1) * self.accelerator.link_bandwidth
        return Group(ranks, ranks, bandwidth, 0.0, latency, ring=ring)

    def _torus(self) -> str:
        layouts = self.accelerator.target.layouts  # type: ignore[union-attr]
        if self.count not in layouts:
            raise ValueError(
                f"count={self.count} must be one of {tuple(layouts)}: the slices of"
                f" {self.accelerator.title} whose layout the table has"
            )
        return str(layouts[self.count])
