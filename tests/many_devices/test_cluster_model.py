"""Laws of the time of collectives on a cluster."""

import dataclasses
import math

import pytest

from course_lib.many_devices import cluster_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware

H100, B200, V5E, V5P, L4 = (hardware.get(name) for name in ("h100", "b200", "v5e", "v5p", "l4"))
NVLINK, PORT = 450e9, 50e9  # bytes/s of an H100 in one direction
GB = 1e9
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift")


def ideal(count=64, **kwargs):
    return Cluster(H100, count, ideal=True, **kwargs)


def test_a_group_of_whole_hosts_uses_all_of_their_ports_and_one_per_host_uses_one():
    whole = ideal().group({"data": 64}, "data")
    thin = ideal().group({"data": 8, "tensor": 8}, "data")
    assert (whole.ranks, whole.per_switch, thin.ranks, thin.per_switch) == (64, 8, 8, 1)
    # 7 of 8 hosts' shares arrive from outside, through eight ports or one
    assert cluster_model.all_gather(whole, GB) == pytest.approx(GB * 56 / 64 / (8 * PORT))
    assert cluster_model.all_gather(thin, GB) == pytest.approx(GB * 7 / 8 / PORT)


def test_a_switch_that_adds_up_makes_an_all_reduce_faster_and_nothing_else():
    plain = Cluster(H100, 8).group({"data": 8}, "data")
    adding = Cluster(H100, 8, adds_in_switch=True).group({"data": 8}, "data")
    seconds = [cluster_model.all_reduce(group, GB) for group in (plain, adding)]
    first, second = (each - 2 * plain.latency for each in seconds)
    assert first / second == pytest.approx(1.3)
    assert cluster_model.all_reduce(adding, 0) == cluster_model.all_reduce(plain, 0) > 0
    assert cluster_model.all_gather(plain, GB) == cluster_model.all_gather(adding, GB)


def test_an_all_to_all_crosses_the_network_through_each_gpu_s_own_port():
    group = ideal(16).group({"expert": 16}, "expert")
    # half of the 16 ranks are on the other host
    assert cluster_model.all_to_all(group, GB) == pytest.approx(GB * 8 / 16 / PORT)
    inside = ideal(8).group({"expert": 8}, "expert")
    assert cluster_model.all_to_all(inside, GB) == pytest.approx(GB * 7 / 8 / NVLINK)


def test_each_step_of_a_ring_across_hosts_adds_its_latency_to_all_but_all_reduces():
    """NCCL's all-reduces have trees, its all-gathers and reduce-scatters have none."""
    slow = Cluster(H100, 64, ring_latency=5e-6)
    for axes, steps in (({"data": 64}, 63), ({"data": 8, "tensor": 8}, 7)):
        plain, added = (cluster.group(axes, "data") for cluster in (Cluster(H100, 64), slow))
        for of in (cluster_model.all_gather, cluster_model.reduce_scatter):
            assert of(added, GB) - of(plain, GB) == pytest.approx(steps * 5e-6)
        for of in (cluster_model.all_reduce, cluster_model.all_to_all):
            assert of(added, GB) == of(plain, GB)
    inside = {"data": 8, "tensor": 8}
    assert slow.group(inside, "tensor") == Cluster(H100, 64).group(inside, "tensor")


def test_a_step_of_a_ring_starts_in_half_of_the_time_of_a_collective():
    axes = {"pipe": 2, "data": 8}
    across, inside = (Cluster(H100, 16).group(axes, axis) for axis in ("pipe", "data"))
    # one GPU of each of two hosts: 40 us for one doubling; inside of a host 20 us
    assert cluster_model.shift(across, 0) == pytest.approx(20e-6)
    assert cluster_model.shift(inside, 0) == pytest.approx(10e-6)
    assert cluster_model.shift(across, GB) == pytest.approx(GB / (0.9 * PORT) + 20e-6)


def test_a_ring_over_whole_hosts_has_a_port_alone_and_rings_of_one_gpu_per_host_share_it():
    one_port = Cluster(H100, 64, ports_per_host=1, ideal=True)
    alone = one_port.group({"context": 64}, "context")
    shared = one_port.group({"context": 8, "data": 8}, "context")
    two_of_a_host = one_port.group({"data": 4, "context": 16}, "context")
    assert alone.link == two_of_a_host.link == 50e9
    assert shared.link == 50e9 / 8
    four_ports = Cluster(H100, 64, ports_per_host=4, ideal=True)
    # pairs of GPUs: four rings leave a host, each through a port of its own
    assert four_ports.group({"context": 4, "data": 4, "expert": 4}, "context").link == 25e9
    pairs = four_ports.group({"data": 4, "context": 8, "tensor": 2}, "context")
    assert pairs.per_switch == 4 and pairs.link == 50e9


def test_a_rack_of_eighteen_hosts_behind_one_switch_needs_no_network():
    rack = Cluster(B200, 72, gpus_per_host=4, hosts_per_switch=18, ideal=True)
    seconds = cluster_model.all_gather(rack.group({"data": 72}, "data"), GB)
    assert seconds == pytest.approx(GB * 71 / 72 / B200.link_bandwidth)


def test_of_groups_that_lie_differently_the_worst_counts():
    """GPUs 0 to 5, a pipeline, share a host. 6 to 11 lie on two, and the step waits."""
    # twelve: eight on the first host, four on the second
    assert ideal(12).group({"data": 12}, "data").per_switch == 4
    cluster = ideal(48)
    group = cluster.group({"data": 8, "pipe": 6}, "pipe")
    assert (group.ranks, group.per_switch) == (6, 2)
    real = Cluster(H100, 48).group({"data": 8, "pipe": 6}, "pipe")
    assert real.latency == pytest.approx(20e-6 + 40e-6)  # two hosts
    # Along "data", each group has one or two GPUs on each of six hosts.
    assert cluster.group({"data": 8, "pipe": 6}, "data").per_switch == 1


@pytest.mark.parametrize(("hosts", "measured"), [(4, 360), (16, 320), (128, 260)])
def test_an_all_reduce_reaches_the_bus_bandwidth_that_nccl_tests_measured(hosts, measured):
    n = 8 * hosts
    group = Cluster(H100, n).group({"data": n}, "data")
    # nccl-tests count 2 (n-1)/n of the array as sent: a ring through all GPUs.
    seconds = cluster_model.all_reduce(group, 64 * GB)
    assert 2 * 64 * (n - 1) / n / seconds == pytest.approx(measured, rel=0.02)


def test_one_device_sends_nothing():
    alone = Cluster(H100, 8).group({"data": 8}, "tensor")
    assert alone.ranks == 1
    assert all(getattr(cluster_model, name)(alone, GB) == 0 for name in COLLECTIVES)


def test_whole_dimensions_of_a_torus_are_rings_in_both_directions():
    slice_ = Cluster(V5E, 256, ideal=True)  # 16 x 16
    link = V5E.link_bandwidth
    ring = slice_.group({"data": 16, "tensor": 16}, "tensor")
    torus = slice_.group({"data": 256}, "data")
    part = slice_.group({"data": 64, "tensor": 4}, "tensor")
    assert [group.inside for group in (ring, torus, part)] == [2 * link, 4 * link, link]
    seconds = cluster_model.all_gather(ring, GB)
    assert seconds == pytest.approx(GB * 15 / 16 / (2 * link))


@pytest.mark.parametrize(
    ("accelerator", "axes", "links"),
    [
        (V5E, {"data": 4, "tensor": 4}, 1),  # 4 x 4: a side of 4 is open
        (V5E, {"data": 8, "tensor": 16}, 2),  # 8 x 16: the side of 16 is closed, 8 is open
        (V5E, {"tensor": 128}, 3),
        (V5P, {"data": 16, "tensor": 4}, 2),  # 4 x 4 x 4: all closed
        (V5P, {"tensor": 64}, 6),
        (V5P, {"data": 4, "tensor": 4}, 1),  # 2 x 2 x 4: all open
        (V5P, {"tensor": 16}, 3),
    ],
)
def test_only_a_side_whose_ends_are_linked_is_a_ring(accelerator, axes, links):
    count = math.prod(axes.values())
    group = Cluster(accelerator, count, ideal=True).group(axes, "tensor")
    n, link = axes["tensor"], accelerator.link_bandwidth
    seconds = cluster_model.all_gather(group, GB)
    assert seconds == pytest.approx(GB * (n - 1) / n / (links * link))


def test_the_outer_part_of_a_divided_side_shares_its_links():
    # Chips 0, 4, 8 and 12 of a side of 16; so do 1, 5, 9 and 13, and two groups more, over the
    # same links.
    axes = {"data": 16, "context": 4, "tensor": 4}
    slice_, link = Cluster(V5E, 256, ideal=True), V5E.link_bandwidth
    outer, inner = (slice_.group(axes, axis) for axis in ("context", "tensor"))
    for group, share in ((outer, link / 4), (inner, link)):
        assert cluster_model.all_gather(group, GB) == pytest.approx(GB * 3 / 4 / share)
        assert cluster_model.shift(group, GB) == pytest.approx(GB / share)
    real = Cluster(V5E, 256).group(axes, "tensor")  # and one hop
    assert cluster_model.shift(real, GB) == pytest.approx(GB / link + 1e-6)


def test_an_empty_message_takes_a_microsecond_for_each_hop_to_the_far_side_of_a_torus():
    slice_ = Cluster(V5E, 256)
    ring = slice_.group({"data": 16, "tensor": 16}, "tensor")
    assert cluster_model.all_gather(ring, 0) == pytest.approx(8e-6)
    assert cluster_model.all_to_all(ring, 0) == pytest.approx(8e-6)
    whole = slice_.group({"data": 256}, "data")
    assert cluster_model.all_gather(whole, 0) == pytest.approx(16e-6)


@pytest.mark.parametrize(
    ("accelerator", "count", "across"),
    [
        (V5E, 8, 2),  # 2 x 4, cut into 2 x 2 and 2 x 2
        (V5E, 128, 16),  # 8 x 16: a closed side of 16 is cut twice
        (V5P, 16, 4),  # 2 x 2 x 4
        (V5P, 128, 32),  # 4 x 4 x 8, closed
    ],
)
def test_an_all_to_all_is_as_slow_as_the_cut_through_the_longest_side(
    accelerator, count, across
):
    # Half of the chips send half of what they have to the other half, over the links of the cut
    group = Cluster(accelerator, count, ideal=True).group({"expert": count}, "expert")
    seconds = count / 2 * GB / 2 / (across * accelerator.link_bandwidth)
    assert cluster_model.all_to_all(group, GB) == pytest.approx(seconds)


BAD = [
    (H100, dict(count=64), {"data": 8, "tensor": 4}, "must multiply to the 64 accelera"),
    (H100, dict(count=4, gpus_per_host=8), {}, "gpus_per_host=8"),
    (H100, dict(count=0), {}, "count=0"),
    (H100, dict(count=8, port_bandwidth=50.0), {}, "port_bandwidth=50.0 must be in bytes/s"),
    (H100, dict(count=8, products_share=2.0), {}, "products_share=2.0"),
    (H100, dict(count=8, ring_latency=1.0), {}, "ring_latency=1.0 must be seconds"),
    (H100, dict(count=8, ideal=True, ring_latency=5e-6), {}, "ring_latency=5e-06 must be 0"),
    (V5E, dict(count=8, gpus_per_host=4), {}, "TPU v5e must have no hosts"),
    (V5E, dict(count=12), {"data": 12}, "count=12 must be one of"),
    (L4, dict(count=16), {"data": 16}, "accelerator='l4'"),
]


@pytest.mark.parametrize(("accelerator", "given", "axes", "message"), BAD)
def test_a_topology_that_cannot_be_is_refused(accelerator, given, axes, message):
    with pytest.raises(ValueError, match=message):
        Cluster(accelerator, **given).group(axes, "data")


def test_what_would_be_silently_wrong_is_refused():
    group = Cluster(H100, 8).group({"data": 8}, "data")
    for name in COLLECTIVES:
        with pytest.raises(ValueError, match="size=-1.0 must be at least 0 bytes"):
            getattr(cluster_model, name)(group, -1.0)
    with pytest.raises(ValueError, match=r"over=\('dta',\) must name axes of"):
        Cluster(H100, 8).group({"data": 8}, "dta")
    odd = dataclasses.replace(V5E, target=dataclasses.replace(V5E.target, layouts={12: "4x4"}))
    with pytest.raises(ValueError, match=r"must lie on the torus 4x4.* that 3 divides"):
        Cluster(odd, 12).group({"data": 3, "tensor": 4}, "data")
