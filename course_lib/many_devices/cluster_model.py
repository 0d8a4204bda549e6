"""Seconds of collectives on a cluster: GPUs behind an NVLink switch, hosts on a network, TPUs
on a torus.

    h100s = Cluster(hardware.get("h100"), 64)            # eight hosts of eight GPUs
    axes = {"data": 8, "tensor": 8}                      # outer to inner, as for meshes.make
    group = h100s.group(axes, "tensor")                  # eight GPUs of one host
    seconds = all_reduce(group, 1e9)                     # 1 GB on each of them

The bandwidth of a group follows from where its devices are, not from the axis alone. Every GPU
of a host has its own port to the network. A group that covers whole hosts of eight GPUs leaves
each host through eight ports, a group with one GPU per host through one.

A group has n ranks, r of them behind each switch. Both levels work at the same time, and the
slower one decides:

    all-gather, reduce-scatter    max(B (r-1)/r / NVLink, B (n-1)/n / (r port)) + latency
    all-reduce                    twice that (without `ring_latency`)
    all-to-all                    max(b (r-1)/n / NVLink, b (n-r)/n / port) + latency

B is the whole array, b one rank's array before the exchange. NCCL's rings run through all n
ranks (https://github.com/NVIDIA/nccl/issues/812). On an `ideal` cluster each level has rings of
its own, which send only B (n-r)/n over the network, as the scaling book counts
(https://jax-ml.github.io/scaling-book/gpus). Links do not reach their rated bandwidth:
`NVLINK_SHARE` and `network_share` say how much NCCL gets.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from course_lib.fields import Checked, Rule, option, required
from course_lib.many_devices import meshes
from course_lib.measure import hardware, virtual
from course_lib.measure.hardware import Accelerator

AXES = (*meshes.AXES, "fsdp")
PRODUCTS_SHARE = 0.76
"""Share of the peak rate that matrix products reach. The one constant that was fitted to
published step times: see `lessons.backtest.fit`."""
NVLINK_SHARE = 0.8
"""Share of NVLink's rated bandwidth that NCCL's rings reach: 360 to 370 of 450 GB/s on an H100
(https://github.com/NVIDIA/nccl-tests/issues/212), 235 of 300 on an A100. Assumed for all GPUs,
not fitted. On a host of eight H100s, NCCL's all-reduces let the switches add up (NVLS) by
default. They then reach about 480; `Cluster.adds_in_switch` gives 468."""
SWITCH_SPEEDUP = 1.3
"""How much faster an all-reduce is if switches add up (SHARP, NVLS). Without losses it would be
2 (n-1)/n; about 1.3 is measured (https://jax-ml.github.io/scaling-book/gpus)."""
NVLINK_LATENCY, NETWORK_LATENCY = 20e-6, 40e-6
"""Start-up seconds of a collective: inside a host, and for each doubling of the number of
hosts, as in a tree. A transfer to a neighbour takes half. Assumed, not fitted. NCCL has trees
for all-reduces only: all-gathers and reduce-scatters run around a ring, except where a group
has one GPU per host (https://github.com/NVIDIA/nccl/issues/1473). `Cluster.ring_latency` can
price the steps of that ring."""
TORUS_LATENCY = 1e-6
"""Seconds per hop on a TPU's torus (https://jax-ml.github.io/scaling-book/sharding)."""


def network_share(hosts: int) -> float:
    """Returns NCCL's share of the network's rated bandwidth, for a group on that many hosts.

    Fitted to reduce-scatters on H100 hosts: a bus bandwidth of 360 GB/s on 4 hosts, 345, 320,
    300, 280, and 260 on 128 (https://github.com/NVIDIA/nccl/issues/1229). The source states
    neither ports nor sizes: eight ports of 50 GB/s are assumed, and that the steps of the ring
    are in these figures. Assumed for other GPUs and ports, too, and beyond 128 hosts.
    """
    return min(0.9, max(0.4, 0.9 - 0.05 * math.log2(hosts / 4)))


@dataclasses.dataclass(frozen=True)
class Group:
    """The devices of one collective, and the links between them.

    `link` and `hop` are of one step of a ring, where all ranks send at once. Groups that leave
    the same host share its ports.
    """

    ranks: int  # n
    per_switch: int  # r, the ranks that share a switch (or a torus)
    inside: float  # bytes/s that a rank receives from the others behind its switch
    outside: float  # bytes/s that a rank receives over its port; unused behind one switch
    link: float  # bytes/s from one rank to the next
    latency: float = 0.0  # seconds until the first byte of a collective has arrived
    hop: float = 0.0  # seconds until the first byte has arrived at the next rank
    adds_in_switch: bool = False  # the switches add up, which makes an all-reduce faster
    # on a torus, n of the n/4 hops that a message of an all-to-all takes on average
    ring: float = 0.0
    # rings inside of hosts and rings across hosts send the fewest bytes; else each ring runs
    # through all ranks
    ideal: bool = False
    step: float = 0.0  # seconds that each of the n - 1 steps of an all-gather's ring adds


def _check(size: int | float) -> None:
    if not 0 <= size < math.inf:
        raise ValueError(f"size={size} must be at least 0 bytes, and finite")


def all_gather(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-gather, or of a reduce-scatter. `size`: bytes of the whole
    array, of which each rank starts with 1/n.
    """
    _check(size)
    if group.ranks == 1:
        return 0.0
    return _transfer(group, size) + group.latency + (group.ranks - 1) * group.step


def _transfer(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-gather without latency."""
    n, r = group.ranks, group.per_switch
    inside = size * (r - 1) / r / group.inside if r > 1 else 0.0
    crossing = (n - r if group.ideal else n - 1) / n
    outside = size * crossing / (r * group.outside) if n > r else 0.0
    return max(inside, outside)


reduce_scatter = all_gather


def all_reduce(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-reduce: a reduce-scatter, then an all-gather, with the
    latency of a tree. `size`: bytes of the array that each rank has.
    """
    _check(size)
    if group.ranks == 1:
        return 0.0
    faster = SWITCH_SPEEDUP if group.adds_in_switch else 1
    return 2 * (_transfer(group, size) / faster + group.latency)


def all_to_all(group: Group, size: int | float) -> float:
    """Returns the seconds of an all-to-all. `size`: bytes of one rank's array, of which it
    sends 1/n to each rank. On a ring of n devices a message takes n/4 hops on average, and uses
    a link for each hop.
    """
    _check(size)
    n, r = group.ranks, group.per_switch
    if n == 1:
        return 0.0
    inside = size * max((r - 1) / n, group.ring / 4) / group.inside if r > 1 else 0.0
    outside = size * (n - r) / n / group.outside if n > r else 0.0
    return max(inside, outside) + group.latency


def shift(group: Group, size: int | float) -> float:
    """Returns the seconds in which each rank sends an array to the next rank: one step of a
    ring, or a transfer between two pipeline stages. `size`: bytes of the array.
    """
    _check(size)
    return size / group.link + group.hop if group.ranks > 1 else 0.0


@functools.cache
def _placed(
    axes: tuple[tuple[bool, int], ...], per_switch: int, per_host: int
) -> tuple[int, int, int]:
    """Returns the ranks of each group, those behind one switch, and its hosts. Groups may lie
    differently: the worst counts, since a step waits for all. `axes`: whether a group is along
    each axis, and its size.
    """
    along, sizes = zip(*axes, strict=True) if axes else ((), ())
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    members = numbers[tuple(slice(None) if inside else 0 for inside in along)].ravel()
    firsts = numbers[tuple(0 if inside else slice(None) for inside in along)].ravel()
    # Groups that begin at the same place of a host lie alike.
    begins = np.unique(firsts % math.lcm(per_switch, per_host))
    switches, hosts = ((members + begins[:, None]) // size for size in (per_switch, per_host))
    # 12 GPUs on hosts of 8 lie unevenly. The host with the fewest ranks has the fewest ports,
    # and decides.
    behind = min(np.unique(row, return_counts=True)[1].min() for row in switches)
    return len(members), int(behind), max(len(np.unique(row)) for row in hosts)


_SHARE = Rule(lambda x: 0 < x <= 1, "be above 0 and at most 1, the peak")
_LATENCY = Rule(lambda x: 0 <= x < 1, "be seconds, at least 0 and below 1: 5e-6")


@dataclasses.dataclass(frozen=True)
class Cluster(Checked):
    """Accelerators and the links between them."""

    accelerator: Accelerator  # a row of `hardware`
    count: int = required()
    gpus_per_host: int | None = None  # None: eight, or all if there are fewer
    # hosts that share one NVLink switch; 1 in NVIDIA's servers of eight GPUs, 18 in a GB200
    # NVL72 rack with its hosts of four
    hosts_per_switch: int = option(1)
    ports_per_host: int | None = None  # to the network. None: one per GPU
    # bytes/s of one port in one direction. None: the table's `network_bandwidth`
    port_bandwidth: float | None = None
    # whether NVLink and network switches add up (NVLS, SHARP)
    adds_in_switch: bool = option(False)
    # whether links reach their rated bandwidth, without latency, and collectives send the
    # fewest bytes, as textbook formulas assume
    ideal: bool = option(False)
    # of the peak rate, which matrix products reach
    products_share: float = option(PRODUCTS_SHARE, _SHARE)
    # seconds that each step of an all-gather or a reduce-scatter across hosts adds. 0: those in
    # the measured `network_share` are all
    ring_latency: float = option(0.0, _LATENCY)

    def _errors(self) -> Iterator[str]:
        hardware.check(self.accelerator)
        for name in ("gpus_per_host", "ports_per_host"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                yield f"{name}={value!r} must be a whole number of at least 1"
        port, latency = self.port_bandwidth, self.ring_latency
        if port is not None and not 1e6 <= port < math.inf:
            yield f"port_bandwidth={port} must be in bytes/s, at least 1e6: 50 GB/s are 50e9"
        if self.ideal and latency:
            yield f"ring_latency={latency} must be 0 on an ideal cluster: links have no latency"
        if (self.gpus_per_host or 0) > self.count:
            yield f"gpus_per_host={self.gpus_per_host} must be at most count={self.count}"
        hosts = self.gpus_per_host or self.ports_per_host or port or self.hosts_per_switch > 1
        if self.accelerator.platform == "tpu" and (hosts or self.adds_in_switch or latency):
            yield (
                f"{self.accelerator.title} must have no hosts, ports or switches: its links"
                " form a torus"
            )

    @property
    def per_host(self) -> int:
        """GPUs per host."""
        return self.gpus_per_host or min(virtual.GPUS_PER_HOST, self.count)

    @property
    def per_switch(self) -> int:
        """GPUs behind one NVLink switch."""
        return min(self.per_host * self.hosts_per_switch, self.count)

    @property
    def network(self) -> float | None:
        """Bytes/s from one GPU to other hosts while all GPUs of its host send. None: no figure
        in the table.
        """
        ports = self.ports_per_host or self.per_host
        return None if self._port is None else self._port * ports / self.per_host

    @property
    def _port(self) -> float | None:
        return self.port_bandwidth or self.accelerator.network_bandwidth

    def group(self, axes: Mapping[str, int], over: str | Sequence[str]) -> Group:
        """Returns the devices that communicate along one mesh axis, or along several axes
        together.

        Args:
          axes: sizes of the mesh's axes, outer to inner. Neighbours on the innermost axis have
            neighbouring numbers.
          over: the axis or axes. An axis of `AXES` that is not in `axes` has size 1.
        """
        asked = tuple(axes.items()), over if isinstance(over, str) else tuple(over)
        if asked in self._groups:
            return self._groups[asked]
        if math.prod(axes.values()) != self.count:
            raise ValueError(
                f"axes={dict(axes)} must multiply to the {self.count} accelerators of the"
                f" cluster, not to {math.prod(axes.values())}"
            )
        over = (over,) if isinstance(over, str) else tuple(over)
        unknown = sorted(set(over) - set(AXES) - set(axes))
        if not over or unknown:
            raise ValueError(f"over={over} must name axes of {AXES}, not {unknown}")
        place = self._on_torus if self.accelerator.platform == "tpu" else self._on_hosts
        return self._groups.setdefault(asked, place(axes, over))

    @functools.cached_property
    def _groups(self) -> dict[Any, Group]:
        return {}  # a search asks for the same groups thousands of times

    def _on_hosts(self, axes: Mapping[str, int], over: tuple[str, ...]) -> Group:
        # Axes beside each other that are both in the group, or both not, are like one.
        along = itertools.groupby(axes.items(), key=lambda axis: axis[0] in over)
        sizes = tuple((inside, math.prod(n for _, n in items)) for inside, items in along)
        if sizes in self._groups:
            return self._groups[sizes]
        ranks, behind_switch, hosts = _placed(sizes, self.per_switch, self.per_host)
        inside, outside = self.accelerator.link_bandwidth, self.network
        crosses = ranks > behind_switch
        if crosses and outside is None:
            raise ValueError(
                f"accelerator={self.accelerator.name!r} must have a figure for its network,"
                f" which {ranks} devices on {hosts} hosts need; give Cluster a port_bandwidth"
            )
        latency = NVLINK_LATENCY * (behind_switch > 1)
        if crosses:
            latency += NETWORK_LATENCY * math.ceil(math.log2(hosts))
        port, hop = outside or 0.0, (NETWORK_LATENCY if crosses else NVLINK_LATENCY) / 2
        # From host to host, a ring sends through one port. Other groups may share the ports.
        leaving = max(1, self.per_host // behind_switch)
        link = min(self.per_host / leaving * port, self._port or port)
        if self.ideal:
            group = Group(ranks, behind_switch, inside, port, link=link if crosses else inside)
        else:
            inside *= NVLINK_SHARE
            group = Group(
                ranks,
                behind_switch,
                inside,
                network_share(hosts) * port,
                latency=latency,
                link=network_share(2) * link if crosses else inside,
                hop=hop,
                step=self.ring_latency if crosses else 0.0,
            )
        group = dataclasses.replace(group, adds_in_switch=self.adds_in_switch, ideal=self.ideal)
        return self._groups.setdefault(sizes, group)

    def _on_torus(self, axes: Mapping[str, int], over: tuple[str, ...]) -> Group:
        """Returns a group of TPUs: one ring through each chip, or two for an axis over two
        dimensions. Axes take dimensions from inner to outer. A ring has both directions; a
        line, which is a part of a dimension, has half the bandwidth. k groups of an outer axis
        share links with an inner axis of k.
        """
        sides = [int(side) for side in self._torus().split("x")]
        # Ends are linked along sides of 16 in 2D, and in 3D if all sides are multiples of 4.
        closed = [
            side % 16 == 0 if len(sides) == 2 else not any(side % 4 for side in sides)
            for side in sides
        ]
        left, inner = list(sides), [1] * len(sides)
        ranks, hops = 1, 0
        rings: list[tuple[int, float]] = []  # devices and links of a chip, in each dimension
        for axis, size in reversed(list(axes.items())):
            rest, dim = size, len(sides) - 1
            while rest > 1 and dim >= 0:
                part = math.gcd(rest, left[dim])
                if part > 1 and axis in over:
                    links = 2.0 if part == sides[dim] and closed[dim] else 1.0
                    rings.append((part, links / inner[dim]))
                    hops += part
                rest, left[dim], inner[dim] = rest // part, left[dim] // part, inner[dim] * part
                if left[dim] > 1:
                    break
                dim -= 1
            if rest > 1:
                raise ValueError(
                    f"axes={dict(axes)} must lie on the torus {self._torus()}: the axes"
                    f" inside of {axis!r} leave no dimension that {size} divides"
                )
            ranks *= size if axis in over else 1
        total = sum(share for _, share in rings) or 1.0
        slowest = max((part / share for part, share in rings), default=0.0)
        link = self.accelerator.link_bandwidth
        return Group(
            ranks,
            ranks,
            total * link,
            0.0,
            latency=0.0 if self.ideal else TORUS_LATENCY * hops / 2,
            link=min([1.0, *(share for _, share in rings)]) * link,
            hop=0.0 if self.ideal else TORUS_LATENCY,
            ring=slowest * total,
        )

    def _torus(self) -> str:
        layouts = self.accelerator.target.layouts  # type: ignore[union-attr]
        if self.count not in layouts:
            raise ValueError(
                f"count={self.count} must be one of {tuple(layouts)}: the slices of"
                f" {self.accelerator.title} whose layout the table has"
            )
        return str(layouts[self.count])
