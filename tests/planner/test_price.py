"""Laws of the seconds of a training step: a layer's work by hand, what hides, pipelines.

`test_frozen` has the numbers of all options.
"""

import dataclasses
import math

import pytest

from course_lib import planner
from course_lib.many_devices import cluster_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.measure import hardware
from course_lib.planner import Plan, Shape, price

H100 = hardware.get("h100")
# 6.7 billion parameters
MIDDLE = Shape(
    layers=32, width=4096, heads=32, head_dim=128, mlp=16_384, vocab=128_000, seq_len=4096
)
PARTS = {"products", "memory", "optimizer", "bubble", "pipe", "data"}
PARTS |= {"tensor", "context", "expert"}


def step(axes, shape=MIDDLE, cluster=None, **plan):
    """Returns the time on as many H100s as the axes have."""
    plan = Plan(axes, **{"batch": 512, **plan})
    return planner.seconds(planner.step(shape, plan), cluster or h100s(axes))


def h100s(axes, **kwargs):
    return Cluster(H100, math.prod(axes.values()), **kwargs)


def test_a_step_is_the_sum_of_its_parts_and_none_is_negative():
    for axes, plan in (
        ({"data": 2, "fsdp": 4, "tensor": 4}, {}),
        ({"pipe": 4, "data": 4, "tensor": 2}, dict(chunks=2, zero=1)),
        ({"data": 4, "context": 4}, dict(zero=2)),
    ):
        found = step(axes, **plan)
        assert set(found.parts) == PARTS
        assert min(found.parts.values()) >= 0 and min(found.hidden.values()) >= 0
        assert found.total == pytest.approx(sum(found.parts.values()))
        assert found.mfu == pytest.approx(found.model_seconds / found.total) and found.mfu < 1


def test_a_tied_table_is_a_parameter_once_and_computes_as_much():
    tied = dataclasses.replace(MIDDLE, tied=True)
    assert MIDDLE.parameters - tied.parameters == 128_000 * 4096
    assert tied.flops == MIDDLE.flops


def test_experts_cost_their_all_to_alls_which_the_network_makes_slow():
    # 8 experts of which a token sees 2
    shape = dataclasses.replace(MIDDLE, experts=8, slots=2.0)
    inside = step({"data": 8, "expert": 8}, shape, zero=1)
    outside = step({"expert": 8, "data": 8}, shape, zero=1)
    assert outside.parts["expert"] > 3 * inside.parts["expert"] > 0
    group = h100s({"data": 8, "expert": 8}).group({"data": 8, "expert": 8}, "expert")
    one = cluster_model.all_to_all(group, 2 * 4096 * 2 * 4096)  # bytes per microbatch
    assert inside.parts["expert"] == pytest.approx(8 * 32 * 4 * one)
    # what a token needs, not what the experts hold
    dense = dataclasses.replace(MIDDLE, mlp=2 * MIDDLE.mlp)
    assert shape.flops == dense.flops and shape.parameters > dense.parameters


def test_float32_products_run_as_tensorfloat32_and_float16_needs_a_unit_for_it():
    narrow, wide = (step({"data": 8}, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert wide.parts["products"] == pytest.approx(2 * narrow.parts["products"])
    with pytest.raises(ValueError, match="no rate for bfloat16 products of NVIDIA T4"):
        step({"data": 1}, cluster=Cluster(hardware.get("t4"), 1))


# Work, by hand, product by product.

# A model with experts, a gate and grouped queries.
MIXED = Shape(
    **dict(layers=8, width=1024, heads=16, head_dim=96, kv_heads=4, mlp=2560, matrices=3),
    **dict(experts=6, slots=2.0, vocab=32_000, seq_len=2048),
)
ATTENTION = 1024 * (1536 + 384 + 384 + 1536)  # query, key, value and output
EXPERT = 3 * 1024 * 2560


def mixed(context=2, tensor=2, **plan):
    """Returns the work of a layer of MIXED, four sequences at once, three experts a device."""
    axes = {"expert": 2, "context": context, "tensor": tensor}
    plan = Plan(axes, **{"batch": 8, "microbatch": 4, "sequence_parallel": True, **plan})
    work = price.work(planner.step(MIXED, plan))
    return work["forward"], work["backward"]


def mixed_by_hand(fused):
    """Returns FLOPs by product and bytes by kind, forward, on one of 2 x 2 devices."""
    tokens, t = 4 * 2048 / 2, 2
    # of the four quarters of a ring of two's scores, five eighths are computed
    keys = 2048 * (1 if fused else 5 / 8)
    flops = {
        "qkv": 2 * tokens * 1024 * (1536 + 384 + 384) / t,
        "scores": 2 * tokens * keys * 1536 / t,
        "mean": 2 * tokens * keys * 1536 / t,
        "out": 2 * tokens * 1536 * 1024 / t,
    }
    flops |= {name: 2 * 2 * tokens * 1024 * 2560 / t for name in ("gate", "in", "down")}
    read = 1024 + 1536 / t + 2 * (1024 + 1024 + 2560 / t)  # two experts per token
    written = (1536 + 384 + 384) / t + 1024 + 2 * (2560 / t + 2560 / t + 1024)
    moved = {
        "operands": 2 * tokens * (read + written),
        "norms": tokens * 22 * 1024 / t,
        "activations": tokens * (2 * 6 * 2560 + 12 * 1536) / t,
        "core": tokens * (8 * 1536 if fused else 13 * keys * 16) / t,
        "weights": 2 * (ATTENTION + 3 * EXPERT) / t,
    }
    return flops, moved


AGAIN = {  # products that are computed again
    "none": "",
    "minimal": "",
    "selective": "scores mean",
    "attention": "qkv scores mean",
    "mlp": "gate in",
    "mlp-in": "gate in scores mean",
    "all-but-qkv": "gate in scores mean out",
    "gathers": "",
    "modules": "qkv scores mean gate in",
    "block": "qkv scores mean out gate in",
    "full": "qkv scores mean out gate in down",
}


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("fused", [True, False])
def test_the_work_of_a_layer_is_that_of_its_products_by_hand(recompute, fused):
    flops, moved = mixed_by_hand(fused)
    forward, backward = mixed(recompute=recompute, fused_attention=fused)
    assert forward.flops == pytest.approx(sum(flops.values()))
    assert forward.bytes == pytest.approx(sum(moved.values()))
    of_again = sum(flops[name] for name in AGAIN[recompute].split())
    of_again += flops["scores"]  # once more, whatever else is computed again: fused, or a ring
    assert backward.flops == pytest.approx(2 * sum(flops.values()) + of_again)
    # gradients of weights in float32, read and written: four times their two bytes
    twice = 2 * sum(moved.values()) + 4 * moved["weights"]
    more = {"none": 0, "full": sum(moved.values())}
    if recompute in more:
        assert backward.bytes == pytest.approx(twice + more[recompute])


@pytest.mark.parametrize("length", [256, 16_384])
@pytest.mark.parametrize(
    ("axes", "plan"),
    [
        ({"data": 8, "fsdp": 8}, {}),
        ({"data": 4, "fsdp": 4, "context": 4}, dict(fused_attention=False)),
        ({"fsdp": 8, "tensor": 8}, dict(tensor_overlap=True)),
        ({"tensor": 4, "context": 8, "fsdp": 8}, dict(wgrad_overlap=True)),
        ({"pipe": 4, "fsdp": 4, "context": 4}, dict(chunks=2, pipe_overlap=True)),
    ],
)
def test_a_second_of_computing_hides_one_transfer(axes, plan, length):
    shape = dataclasses.replace(MIXED, seq_len=length, slots=1.0, experts=0, kv_heads=8)
    cluster = h100s(axes, port_bandwidth=5e9)
    options = dict(zero=1, sequence_parallel=True) | plan
    found = planner.seconds(planner.step(shape, Plan(axes, 64, **options)), cluster)
    free = {"context"} | ({"tensor"} if plan.get("tensor_overlap") else set())
    beside = sum(s / (1 if axis in free else 0.75) for axis, s in found.hidden.items())
    computed = found.parts["products"] + found.parts["memory"]
    assert 0 < beside <= computed * (1 + 1e-9)
    assert "context" not in axes or found.hidden["context"] > 0


def test_a_backward_in_two_pieces_computes_nothing_twice():
    # Products alone: memory is so fast that it takes no time. The output layer takes as long as
    # six layers, so that the last stage is much slower.
    fast = Cluster(dataclasses.replace(H100, memory_bandwidth=1e24), 2)
    N, D, L, V, rate = 16, 4096, 4096, 128_000, cluster_model.PRODUCTS_SHARE * 989e12
    scores = N / 2 * 4 * L * L * D / rate
    F = N / 2 * 24 * L * D * D / rate + scores
    head = 6 * L * D * V / rate
    # FlashAttention computes the scores again: 5 products in B for 2 in F.
    B, W = F + 1.5 * scores, F - scores
    # Two stages and microbatches, column by column: the first stage beside the last.
    table = [(F, 0), (F, F), (0, B + head), (B, F), (W, B + head), (B, W), (W, W)]
    planned = schedules.make("zero_bubble", 2, 2)
    uneven = dataclasses.replace(MIDDLE, layers=N)
    found = step({"pipe": 2}, uneven, fast, batch=2, zero=1, schedule=planned)
    waited = sum(found.parts[part] for part in ("products", "bubble"))
    assert waited == pytest.approx(sum(max(column) for column in table), rel=1e-6)


# Impossible plans.

EIGHT = dict(axes={"data": 8}, batch=8)
PIPE = dict(axes={"pipe": 4}, batch=8)
BAD = [
    (dict(EIGHT, axes={"model": 8}), {}, r"axes=.* must be of .*, not \['model'\]"),
    (dict(EIGHT, axes={"data": 0}), {}, "axes={'data': 0}"),
    (dict(EIGHT, recompute="all"), {}, "recompute='all'"),
    (dict(EIGHT, recompute_share=2.0), {}, "recompute_share=2.0"),
    (dict(EIGHT, dtype="bf16"), {}, "dtype='bf16'"),
    (dict(EIGHT, chunks=4), {}, "chunks=4 must be 1 without"),
    (dict(EIGHT, batch=12), {}, "batch=12 must be a multiple of 8"),
    (dict(EIGHT, axes={"data": 4}, float32_gradients=False), {}, "float32_gradients=False"),
    (dict(EIGHT, wgrad_overlap=True, tensor_overlap=True), {}, "wgrad_overlap=True"),
    (dict(PIPE, pipe_overlap=True), {}, "pipe_overlap=True"),
    (dict(PIPE, schedule=schedules.make("1f1b", 4, 4)), {}, r"schedule .* \(4, 8, 1\)"),
    (EIGHT, dict(width=-4096), "width=-4096"),
    (EIGHT, dict(kv_heads=5), "kv_heads=5 must divide heads=32"),
    (EIGHT, dict(slots=4.0), "slots=4.0 must be 1 without experts"),
    (EIGHT, dict(experts=8, slots=100.0), "slots=100.0 must be at most experts=8"),
    (EIGHT, dict(experts_per_token=4), "experts_per_token=4"),
    (dict(EIGHT, axes={"pipe": 64}), {}, "must have at most 34 stages"),
    (dict(EIGHT, axes={"tensor": 64}), {}, "heads=32 must be a multiple of the 64"),
    (dict(EIGHT, axes={"tensor": 8}), dict(kv_heads=4), "kv_heads=4 must be .* the 8"),
    (dict(EIGHT, axes={"tensor": 8}), dict(mlp=10_012), "mlp=10012"),
    (dict(EIGHT, axes={"expert": 2}), {}, "experts=0 must be above 0"),
    (dict(EIGHT, axes={"context": 4}), dict(seq_len=4100), "seq_len=4100"),
]


@pytest.mark.parametrize(("plan", "sizes", "message"), BAD, ids=[row[2][:24] for row in BAD])
def test_a_step_that_cannot_be_is_refused(plan, sizes, message):
    with pytest.raises(ValueError, match=message):
        planner.step(dataclasses.replace(MIDDLE, **sizes), Plan(**plan))


def test_axes_that_do_not_fit_the_cluster_are_refused():
    with pytest.raises(ValueError, match="must multiply to the 16 accelerators"):
        step({"data": 8}, cluster=Cluster(H100, 16))
