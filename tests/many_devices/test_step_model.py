"""Laws of the predicted time of a training step."""

import dataclasses
import math

import pytest

from course_lib.many_devices import cluster_model, layer_model, plans, step_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.many_devices.plans import RECOMPUTE, Plan, Shape
from course_lib.measure import hardware

H100 = hardware.get("h100")
# 6.7 billion parameters
MIDDLE = Shape(
    layers=32, width=4096, heads=32, head_dim=128, mlp=16_384, vocab=128_000, seq_len=4096
)
PARTS = ("products", "memory", "optimizer", "bubble", "pipe", "data")
PARTS += ("tensor", "context", "expert")


def step(axes, shape=MIDDLE, cluster=None, **plan):
    """Returns the time on as many H100s as the axes have."""
    plan = Plan(axes, **{"batch": 512, **plan})
    return step_model.breakdown(shape, plan, cluster or h100s(axes))


def h100s(axes, **kwargs):
    return Cluster(H100, math.prod(axes.values()), **kwargs)


# By hand: the formulas for dense models without a pipeline, written down a second time.


def by_hand(zero, tensor, microbatch, full, flash, L=4096, gradient=2):
    """Returns the seconds of a step of MIDDLE on 64 H100s: ZeRO 1 along "data", or ZeRO 3. Its
    sequences have L tokens, and gradients travel with so many bytes per number.
    """
    D, F, H, V, N = 4096, 16_384, 4096, 128_000, 32  # H: heads x head_dim
    replicas, t = 64 // tensor, tensor
    tokens, steps = microbatch * L, 512 // replicas // microbatch
    rate, memory = cluster_model.PRODUCTS_SHARE * 989e12, 0.85 * 3.35e12
    weights = (4 * D * H + 2 * D * F) / t
    flops = 2 * tokens * weights + 4 * tokens * L * H / t
    core = tokens / t * (8 * H if flash else 13 * L * 32)
    moved = tokens * (2 * (2 * D + 4 * H / t + 2 * (D + F / t)) + 22 * D / t)
    moved += tokens * (4 * F + 12 * H) / t + core + 2 * weights
    forward = flops / rate + moved / memory
    backward = 2 * flops / rate + (2 * moved + 8 * weights) / memory
    nvlink, act = 360e9, 2 * tokens * D
    pair = 2 * (act * (t - 1) / t / nvlink + 20e-6) if t > 1 else 0.0
    waits = 2 * pair, 2 * pair * (2 if full else 1)  # forward and backward, along "tensor"
    if full:
        backward += flops / rate + moved / memory
    if flash:  # five products in the backward pass of attention, not four
        backward += 2 * tokens * L * H / t / rate

    # 64 / t ranks, 8 / t of them in each of eight hosts
    r = 8 // t
    port = (0.9 - 0.05) * 50e9  # eight hosts: one doubling above four

    def gather(size):
        inside = size * (r - 1) / r / nvlink
        outside = size * (replicas - 1) / replicas / (r * port)  # rings through all ranks
        return max(inside, outside) + 20e-6 * (r > 1) + 3 * 40e-6

    logits, head_weights = tokens * V / t, V * D / t
    head = 6 * logits * D / rate + (22 * logits + 6 * head_weights) / memory
    parameters = N * weights + 2 * V * D / t

    def beside(compute, traffic):
        return max(compute, traffic) + 0.25 * min(compute, traffic)

    if zero == 3:
        one, summed = gather(2 * weights), gather(gradient * weights)
        forward, backward = beside(forward, one), beside(backward, one + summed)
        # gathered, and a reduce-scatter
        head = beside(head, gather(2 * head_weights) + gather(gradient * head_weights))
        data = steps * 2 * gather(2 * head_weights)
        optimizer = parameters / replicas * 32
    else:
        data = 0.0
        for size, room in ((2, N * forward), (gradient, N * backward)):
            sent = gather(size * parameters)
            hidden = min(sent * 7 / 8, room)
            data += sent - 0.75 * hidden
        optimizer = parameters * (28 / replicas + 4)
    # The head waits for two all-reduces, as long as a pair's.
    exposed = N * sum(waits) + 2 * pair
    return steps * (N * (forward + backward) + head + exposed) + data + optimizer / memory


LAYOUTS = [
    (zero, tensor, microbatch, full, flash)
    for zero in (1, 3)
    for tensor in (1, 2, 4, 8)
    for microbatch, full, flash in ((8, True, True), (2, False, True), (8, True, False))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
# With 256 tokens, computing is too short to hide all that travels along "data".
@pytest.mark.parametrize(("length", "gradient"), [(4096, 2), (256, 4)])
def test_the_time_is_that_of_the_formulas_by_hand(layout, length, gradient):
    zero, tensor, microbatch, full, flash = layout
    data = {"data" if zero == 1 else "fsdp": 64 // tensor}
    found = step(
        data | {"tensor": tensor},
        dataclasses.replace(MIDDLE, seq_len=length),
        microbatch=microbatch,
        gradient_bytes=gradient,
        zero=1 if zero == 1 else 0,
        recompute="full" if full else "none",
        fused_attention=flash,
        sequence_parallel=True,
    )
    assert found.total == pytest.approx(by_hand(*layout, length, gradient), rel=1e-9)


# Laws


def test_a_step_is_the_sum_of_its_parts_and_none_is_negative():
    for axes, plan in (
        ({"data": 2, "fsdp": 4, "tensor": 4}, {}),
        ({"pipe": 4, "data": 4, "tensor": 2}, dict(chunks=2, zero=1)),
        ({"data": 4, "context": 4}, dict(zero=2)),
    ):
        found = step(axes, **plan)
        assert set(found.parts) == set(PARTS)
        assert min(found.parts.values()) >= 0 and min(found.hidden.values()) >= 0
        assert found.total == pytest.approx(sum(found.parts.values()))
        assert found.mfu == pytest.approx(found.model_seconds / found.total) and found.mfu < 1


def test_model_flops_are_six_per_parameter_and_token_and_attention_s():
    outside = 2 * 128_000 * 4096
    layers = MIDDLE.parameters - outside
    scores = 12 * 32 * 4096 * 4096  # 12 N D L
    assert MIDDLE.flops == 6 * (layers + outside / 2) + scores
    assert dataclasses.replace(MIDDLE, tied=True).parameters == layers + outside / 2


def test_recomputing_a_layer_costs_one_more_forward_and_others_less():
    times = {name: step({"data": 8}, recompute=name).total for name in RECOMPUTE}
    assert times["full"] == max(times.values()) and times["none"] == min(times.values())
    products = {
        name: step({"data": 8}, recompute=name, fused_attention=False).parts["products"]
        for name in ("none", "full")
    }
    head = 6 * MIDDLE.vocab * MIDDLE.width / MIDDLE.flops
    extra = products["full"] / products["none"] - 1
    assert extra == pytest.approx((1 - head) / 3)


def test_recomputing_every_second_layer_repeats_half_of_the_tensor_traffic():
    none, half, full = (
        step({"tensor": 8}, batch=8, recompute=name).parts["tensor"]
        for name in ("none", "half", "full")
    )
    assert half == pytest.approx((none + full) / 2) and full > none


def test_the_bubble_of_interleaved_1f1b_is_that_of_narayanan_et_al():
    """(p - 1) / (v m) of the work, for stages of one length."""
    even = dataclasses.replace(MIDDLE, vocab=1)
    for chunks in (1, 2, 4):
        found = step({"pipe": 8}, even, batch=64, chunks=chunks)
        work = found.total - found.parts["bubble"] - found.parts["data"]
        work -= found.parts["optimizer"]
        assert found.parts["bubble"] == pytest.approx(7 / chunks / 64 * work, rel=1e-3)


def test_this_course_s_pipeline_computes_nothing_twice_and_waits_where_layers_recompute():
    def bubble(name, **changes):
        """Returns our schedule's bubble, relative to that of 1F1B as Megatron-LM runs it."""
        planned = schedules.make(name, 4, 16)
        ours = step({"pipe": 4}, batch=16, schedule=planned, **changes)
        theirs = step({"pipe": 4}, batch=16, **changes)
        assert ours.parts["products"] == pytest.approx(theirs.parts["products"])
        return ours.parts["bubble"] / theirs.parts["bubble"]

    assert bubble("zero_bubble") < 0.9 < bubble("gpipe") < 1.01 < bubble("1f1b") < 1.15
    # B is twice as long as F then, and neighbours wait for each other in every slot.
    assert bubble("1f1b", recompute="full") > 1.5 > 1.01 > bubble("gpipe", recompute="full")


def test_fsdp_is_hidden_with_many_tokens_and_exposed_with_few():
    """Below the break-even the traffic is exposed but for what the compute covers."""
    axes, ideal = {"fsdp": 64}, dict(ideal=True, products_share=1.0)
    shares = []
    for tokens in (256, 1024, 4096, 16_384):
        shape = dataclasses.replace(MIDDLE, seq_len=tokens)
        found = step(axes, shape, h100s(axes, **ideal), batch=64)
        shares.append(found.parts["data"] / found.total)
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.5 > 0.15 > shares[-1]


def test_data_parallelism_across_hosts_costs_little_more_than_inside_one():
    """The claim of one bandwidth per axis was nine times as much."""
    one = step({"data": 8}, batch=64, microbatch=8, zero=1)
    many = step({"data": 64}, batch=512, microbatch=8, zero=1)
    assert many.total == pytest.approx(one.total, rel=0.05)
    assert many.parts["data"] < 0.05 * many.total


def test_an_overlapping_recipe_hides_its_share_of_tensor_traffic():
    axes = {"data": 8, "tensor": 8}
    plain, hiding = (step(axes, tensor_overlap=overlap) for overlap in (False, True))
    head = 64 * 4 * cluster_model.all_gather(h100s(axes).group(axes, "tensor"), 2 * 4096 * 4096)
    layers = plain.parts["tensor"] - head
    assert hiding.parts["tensor"] - head == pytest.approx(
        (1 - layer_model.TENSOR_OVERLAP) * layers
    )
    assert hiding.hidden["tensor"] == pytest.approx(layer_model.TENSOR_OVERLAP * layers)


def test_a_parallel_block_halves_what_layers_send_along_tensor():
    axes = {"tensor": 8}
    both = step(axes, batch=8), step(axes, dataclasses.replace(MIDDLE, parallel=True), batch=8)
    cluster = h100s(axes)
    head = 8 * 4 * cluster_model.all_gather(cluster.group(axes, "tensor"), 2 * 4096 * 4096)
    assert both[1].parts["tensor"] - head == pytest.approx((both[0].parts["tensor"] - head) / 2)


def test_a_ring_is_hidden_behind_long_sequences_and_exposed_by_short_ones():
    axes = {"context": 8}
    short, long = (
        step(axes, dataclasses.replace(MIDDLE, seq_len=length), batch=8)
        for length in (1024, 131_072)
    )
    assert short.parts["context"] > short.hidden["context"]
    # Of 3 x 7 + 1 transfers of a layer only the last, which brings gradients home, is exposed.
    assert 20 * long.parts["context"] < long.hidden["context"] < 22 * long.parts["context"]


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


def test_sharding_the_optimizer_saves_its_time():
    plain, sharded = (step({"data": 8}, batch=64, zero=zero) for zero in (0, 1))
    assert sharded.parts["optimizer"] < 0.4 * plain.parts["optimizer"]


def test_switches_that_add_up_help_plain_data_parallelism():
    axes = {"data": 64}
    found = [
        step(axes, cluster=h100s(axes, adds_in_switch=adds), batch=64, data_overlap=False)
        for adds in (False, True)
    ]
    latency = 2 * h100s(axes).group(axes, "data").latency
    first, second = (each.parts["data"] - latency for each in found)
    assert first / second == pytest.approx(1.3)


def test_float32_products_run_as_tensorfloat32_and_float16_needs_a_unit_for_it():
    narrow, wide = (step({"data": 8}, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert wide.parts["products"] == pytest.approx(2 * narrow.parts["products"])
    with pytest.raises(ValueError, match="dtype='bfloat16' must be one of"):
        step({"data": 1}, cluster=Cluster(hardware.get("t4"), 1))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dict(axes={"model": 8}, batch=8), r"axes=.* must be of .*, not \['model'\]"),
        (dict(axes={"data": 8}, batch=8, recompute="all"), "recompute='all' must be one of"),
        (
            dict(axes={"data": 8}, batch=8, recompute_share=2),
            "recompute_share=2 must be a number",
        ),
        (
            dict(axes={"data": 4}, batch=8, float32_gradients=False),
            "float32_gradients=False must come with one microbatch, not 2",
        ),
        (dict(axes={"data": 8}, batch=12), "batch=12 must be a multiple of 8"),
        (dict(axes={"data": 4}, batch=8, microbatch=4), "batch=8 must be a multiple of 16"),
        (dict(axes={"data": 0}, batch=8), "data=0 must be a whole number of at least 1"),
        (dict(axes={"data": 8}, batch=8, microbatch=0), "microbatch=0 must be a whole number"),
        (dict(axes={"data": 8}, batch=8, zero=3), "zero=3 .* stage 3 is the axis 'fsdp'"),
        (dict(axes={"data": 8}, batch=8, gradient_bytes=0), "gradient_bytes=0 must be 1, 2 or"),
        (
            dict(axes={"data": 8}, batch=8, embedding_bytes=3),
            "embedding_bytes=3 must be 1, 2 or",
        ),
        (
            dict(axes={"data": 8}, batch=8, update_bytes=math.nan),
            "update_bytes=nan must be 0 to",
        ),
        (
            dict(axes={"data": 8}, batch=8, dtype="bf16"),
            "dtype='bf16' must be the name of a floating dtype",
        ),
        (
            dict(axes={"data": 8}, batch=8, chunks=4),
            "chunks=4 must be 1 without an axis 'pipe'",
        ),
        (dict(axes={"data": True}, batch=8), "data=True must be a whole number of at least 1"),
        (
            dict(axes={"pipe": 4}, batch=8, schedule=schedules.make("1f1b", 4, 4)),
            r"schedule must be for \(4, 8, 1\) stages, .* not \(4, 4, 1\)",
        ),
        (
            dict(
                axes={"pipe": 4},
                batch=8,
                chunks=2,
                pipe_overlap=True,
                sums_each_microbatch=True,
            ),
            "pipe_overlap=True must come with sums_each_microbatch=False",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        Plan(**plan)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(width=-4096), "width=-4096 must be a whole number of at least 1"),
        (dict(layers=0), "layers=0 must be a whole number"),
        (dict(kv_heads=64), "kv_heads=64 must be 0 to heads=32"),
        (dict(matrices=5), "matrices=5 must be 2, or 3"),
        (dict(slots=-1.0), "slots=-1.0 must be above 0"),
        (dict(slots=math.inf), "slots=inf must be above 0, and finite"),
        (dict(slots=4.0), "slots=4.0 must be 1 without experts"),
        (dict(kv_heads=5), "kv_heads=5 must divide heads=32"),
        (dict(experts=2, slots=2.0, experts_per_token=4), "must be 0 to .* at most experts=2"),
        (dict(experts=8, slots=100.0), "slots=100.0 must be at most experts=8"),
        (dict(experts_per_token=-1), "experts_per_token=-1 must be 0 to slots=1.0"),
        (dict(experts_per_token=4), "experts_per_token=4 must be 0 to slots=1.0"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIDDLE, **sizes)


@pytest.mark.parametrize(
    ("axes", "plan", "message"),
    [
        ({"pipe": 64}, {}, "must have at most 34 stages, of 32 layers"),
        ({"pipe": 4}, dict(chunks=16), "must have at most 34 stages"),
        ({"tensor": 64}, {}, "heads=32 must be a multiple of 64"),
        ({"tensor": 3}, dict(batch=66), "heads=32 must be a multiple of 3"),
        ({"context": 8192}, {}, "seq_len=4096 must be a multiple of 16384"),
        ({"expert": 2}, {}, "experts=0 must be a multiple of 2"),
    ],
)
def test_axes_that_do_not_divide_the_model_are_refused(axes, plan, message):
    with pytest.raises(ValueError, match=message):
        step(axes, **plan)


@pytest.mark.parametrize(
    ("sizes", "plan", "message"),
    [
        (
            dict(kv_heads=4),
            dict(axes={"tensor": 8}, batch=8),
            "kv_heads=4 must be a multiple of 8",
        ),
        (
            dict(mlp=10_012),
            dict(axes={"tensor": 8}, batch=8),
            "mlp=10012 must be a multiple of 8",
        ),
        (
            dict(seq_len=4100),
            dict(axes={"context": 4}, batch=1),
            "seq_len=4100 must be a multiple of 8: in the zigzag layout",
        ),
    ],
)
def test_shares_that_no_program_computes_are_refused(sizes, plan, message):
    with pytest.raises(ValueError, match=message):
        plans.check(dataclasses.replace(MIDDLE, **sizes), Plan(**plan))
    whole = dict(kv_heads=8, mlp=16_384, seq_len=4096)
    plans.check(dataclasses.replace(MIDDLE, **whole), Plan(**plan))


def test_axes_that_do_not_fit_the_cluster_are_refused():
    with pytest.raises(ValueError, match="must multiply to the 16 accelerators"):
        step({"data": 8}, cluster=Cluster(H100, 16))
