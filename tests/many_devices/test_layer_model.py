"""Laws of a layer's predicted work and traffic, and of the parameters that a device holds."""

import dataclasses
import math

import pytest

from course_lib.many_devices import cluster_model, layer_model, step_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.plans import Plan, Shape
from course_lib.measure import hardware

# A model with experts, a gate and grouped queries.
MIXED = Shape(
    layers=8,
    width=1024,
    heads=16,
    head_dim=96,
    kv_heads=4,
    mlp=2560,
    matrices=3,
    experts=6,
    slots=2.0,
    vocab=32_000,
    seq_len=2048,
)
ATTENTION = 1024 * (1536 + 384 + 384 + 1536)  # query, key, value and output
EXPERT = 3 * 1024 * 2560


def step(axes, shape, **plan):
    """Returns the time on as many H100s as the axes have."""
    cluster = Cluster(hardware.get("h100"), math.prod(axes.values()))
    return step_model.breakdown(shape, Plan(axes, **plan), cluster)


# Work, by hand, product by product.


def mixed(context=2, tensor=2, **plan):
    """Returns the work of a layer of MIXED, four sequences at once, three experts a device."""
    axes = {"expert": 2, "context": context, "tensor": tensor}
    plan = Plan(axes, **{"batch": 8, "microbatch": 4, "sequence_parallel": True, **plan})
    return layer_model.layer_work(MIXED, plan)


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


def moved_by_parts(fused):
    """Returns the bytes of a layer, forward, by parts that can be computed again."""
    tokens, t = 4 * 2048 / 2, 2
    moved = mixed_by_hand(fused)[1]
    mlp = 2 * tokens * 2 * (1024 + 2 * 2560 / t + 2560 / t + 1024 + 1024)
    mlp += tokens * (11 * 1024 + 2 * 6 * 2560) / t + 2 * 3 * EXPERT / t
    return {
        "": 0,
        "all": sum(moved.values()),
        "elementwise": moved["norms"] + moved["activations"],
        "core": moved["core"],
        "mlp": mlp,
        "attention": sum(moved.values()) - mlp,
        # read and written by a matmul, and its weights
        "qkv": 2 * tokens * (1024 + (1536 + 2 * 384) / t) + 2 * 1024 * (1536 + 2 * 384) / t,
    }


AGAIN = {  # products that are computed again, and bytes that move again
    "none": ("", ""),
    "minimal": ("", "elementwise"),
    "selective": ("scores mean", "core"),
    "attention": ("qkv scores mean", "attention"),
    "mlp": ("gate in", "mlp"),
    "mlp-in": ("gate in scores mean", "mlp core"),
    "all-but-qkv": ("gate in scores mean out", "all -qkv"),
    "gathers": ("", ""),
    "modules": ("qkv scores mean gate in", "all"),
    "block": ("qkv scores mean out gate in", "all"),
    "full": ("qkv scores mean out gate in down", "all"),
}


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.parametrize("fused", [True, False])
def test_the_work_of_a_layer_is_that_of_its_products_by_hand(recompute, fused):
    flops, moved = mixed_by_hand(fused)
    forward, backward = mixed(recompute=recompute, fused_attention=fused)
    assert forward.flops == pytest.approx(sum(flops.values()))
    assert forward.bytes == pytest.approx(sum(moved.values()))
    again, parts = AGAIN[recompute]
    of_again = sum(flops[name] for name in again.split())
    of_again += flops["scores"]  # once more, whatever else is computed again: fused, or a ring
    assert backward.flops == pytest.approx(2 * sum(flops.values()) + of_again)
    of_parts = moved_by_parts(fused)
    more = sum(
        -of_parts[part[1:]] if part[:1] == "-" else of_parts[part] for part in parts.split(" ")
    )
    # gradients of weights in float32, read and written: four times their two bytes
    twice = 2 * sum(moved.values()) + 4 * moved["weights"]
    assert backward.bytes == pytest.approx(twice + more)


def test_an_empty_slot_is_work_but_not_the_model_s():
    roomy = dataclasses.replace(MIXED, slots=2.5, experts_per_token=2)
    assert roomy.flops == MIXED.flops
    assert step({"data": 8}, roomy, batch=8).mfu < step({"data": 8}, MIXED, batch=8).mfu


def test_every_second_layer_and_every_second_product_are_half_of_the_work():
    flops, moved = mixed_by_hand(fused=False)
    linear = sum(flops.values()) - flops["scores"] - flops["mean"]
    elementwise = moved["norms"] + moved["activations"]
    matmuls = moved["operands"] + moved["weights"]
    for recompute, half, bytes_again in (
        ("half", sum(flops.values()) / 2, sum(moved.values()) / 2),
        ("op", linear / 2, matmuls / 2 + elementwise),
    ):
        none, found = (
            mixed(recompute=name, fused_attention=False)[1] for name in ("none", recompute)
        )
        assert found.flops - none.flops == pytest.approx(half)
        assert found.bytes - none.bytes == pytest.approx(bytes_again)


@pytest.mark.parametrize("recompute", ["block", "full", "mlp", "selective"])
@pytest.mark.parametrize("axis", ["tensor", "expert", "context"])
def test_half_of_the_layers_recompute_half_as_much(recompute, axis):
    axes = {"data": 2, axis: 2}
    none, half, all_of_them = (
        layer_model.layer_costs(
            MIXED,
            Plan(axes, batch=24, recompute=recompute, recompute_share=share),
            Cluster(hardware.get("h100"), 4),
        )[1]
        for share in (0.0, 0.5, 1.0)
    )
    for of in (lambda cost: cost.flops, lambda cost: cost.bytes):
        assert of(half) == pytest.approx((of(none) + of(all_of_them)) / 2)
    assert half.exposed.get(axis, 0.0) == pytest.approx(
        (none.exposed.get(axis, 0.0) + all_of_them.exposed.get(axis, 0.0)) / 2
    )
    assert all_of_them.bytes > half.bytes


def test_one_microbatch_s_gradient_is_written_once():
    plan = Plan({"data": 24}, batch=24)
    summed, written = (
        layer_model.layer_work(MIXED, dataclasses.replace(plan, float32_gradients=flag))
        for flag in (True, False)
    )
    weights = ATTENTION + 6 * EXPERT
    assert summed[0] == written[0]
    assert summed[1].bytes - written[1].bytes == pytest.approx((8 - 2) * weights)
    of_weights = [
        layer_model.weight_gradient_work(
            MIXED, dataclasses.replace(plan, float32_gradients=flag)
        ).bytes
        for flag in (True, False)
    ]
    assert of_weights[0] - of_weights[1] == pytest.approx((8 - 2) * weights)


@pytest.mark.parametrize("fused", [True, False])
def test_recomputing_more_costs_more(fused):
    for names in (
        ("none", "selective", "attention", "modules", "block", "full"),
        ("minimal", "op", "full"),
        ("none", "mlp", "mlp-in", "all-but-qkv", "block"),
    ):
        costs = [mixed(recompute=name, fused_attention=fused)[1] for name in names]
        for of in ("flops", "bytes"):
            values = [getattr(cost, of) for cost in costs]
            assert values == sorted(values), (names, of)


def test_what_is_elementwise_moves_twice_as_much_in_kernels_of_its_own():
    _, moved = mixed_by_hand(fused=True)
    eager, compiled = (mixed(eager=eager)[0] for eager in (True, False))
    extra = moved["norms"] + moved["activations"]
    assert eager.bytes - compiled.bytes == pytest.approx(extra)
    assert eager.flops == compiled.flops


def test_dense_dispatch_multiplies_all_tokens_with_a_slot_for_each_of_two_experts():
    # [2 L, L] x [L, D] to the slots and [L, 2 L] x [2 L, D] back, for two of four sequences'
    # tokens: the context is divided, the sequence's slots are not
    extra = 2 * (4 / 2) * (4096 * 2048 * 1024) * 2
    dense, sparse = (mixed(tensor=1, dense_dispatch=dispatch)[0] for dispatch in (True, False))
    assert dense.flops - sparse.flops == pytest.approx(extra)


def test_grouped_queries_have_fewer_parameters_and_flops():
    assert (MIXED.attention, MIXED.expert) == (ATTENTION, EXPERT)
    assert MIXED.parameters == 8 * (ATTENTION + 6 * EXPERT) + 2 * 32_000 * 1024
    products = 8 * (ATTENTION + 2 * EXPERT) + 32_000 * 1024
    assert MIXED.flops == 6 * products + 8 * 12 * 2048 * 1536


def test_a_device_holds_its_part_of_layers_experts_and_embedding():
    axes = {"pipe": 2, "data": 2, "fsdp": 2, "expert": 3, "tensor": 2}
    dense = dataclasses.replace(MIXED, experts=0, slots=1.0)
    tied = dataclasses.replace(dense, tied=True)
    table, layer = 32_000 * 1024, ATTENTION + EXPERT
    everywhere = ("data", "context", "expert")
    for shape, mesh, parameters in (
        (dense, {}, 8 * layer + 2 * table),
        (tied, {}, 8 * layer + table),
        (dense, {"pipe": 4}, 2 * layer + table),  # the first stage's or the last's
        (tied, {"pipe": 4}, 2 * layer + table),
        (dense, {"data": 2, "fsdp": 2, "tensor": 4}, (8 * layer + 2 * table) / 8),
    ):
        assert step_model.device_parameters(shape, Plan(mesh, batch=24)) == [
            (parameters, everywhere)
        ]
    attention, experts = step_model.device_parameters(MIXED, Plan(axes, batch=24))
    assert attention == ((4 * ATTENTION + table) / 4, everywhere)
    assert experts == (4 * 2 * EXPERT / 4, ("data", "context"))
    # ZeRO divides the state of attention by six, of experts, which are in two places, by two
    moved = step_model.optimizer_bytes(MIXED, Plan(axes, batch=24, zero=1))
    by_hand = (4 * ATTENTION + table) / 4 * (28 / 6 + 4) + 2 * EXPERT * (28 / 2 + 4)
    assert moved == pytest.approx(by_hand)
    # stage 2 divides the gradients, too
    moved = step_model.optimizer_bytes(MIXED, Plan(axes, batch=24, zero=2))
    by_hand = (4 * ATTENTION + table) / 4 * (24 + 8) / 6 + 2 * EXPERT * (24 + 8) / 2
    assert moved == pytest.approx(by_hand)
    # Lion in float32: one moment
    moved = step_model.optimizer_bytes(MIXED, Plan(axes, batch=24, zero=1, update_bytes=16))
    by_hand = (4 * ATTENTION + table) / 4 * (20 / 6 + 4) + 2 * EXPERT * (20 / 2 + 4)
    assert moved == pytest.approx(by_hand)
    # one microbatch's gradient in bfloat16: read, and not set to zero
    for zero, (a, b) in enumerate([(1, 1), (6, 2), (6, 2)]):
        plan = Plan(axes, batch=24, microbatch=2, zero=zero, float32_gradients=False)
        moved = step_model.optimizer_bytes(MIXED, plan)
        by_hand = (4 * ATTENTION + table) / 4 * 26 / a + 2 * EXPERT * 26 / b
        assert moved == pytest.approx(by_hand)


# Eight bits, by hand.


@pytest.mark.parametrize("recompute", AGAIN)
def test_matmuls_with_weights_have_eight_bit_operands_and_attention_has_none(recompute):
    flops, moved = mixed_by_hand(fused=True)
    forward, backward = mixed(recompute=recompute, dtype="float8_e4m3fn")
    attention = flops["scores"] + flops["mean"]
    again = AGAIN[recompute][0].split()
    scores_again = sum(flops[name] for name in again if name in ("scores", "mean"))
    assert forward.flops == pytest.approx(attention)
    assert forward.narrow_flops == pytest.approx(sum(flops.values()) - attention)
    assert backward.flops == pytest.approx(2 * attention + flops["scores"] + scores_again)
    linear_again = sum(flops[name] for name in again) - scores_again
    assert backward.narrow_flops == pytest.approx(2 * forward.narrow_flops + linear_again)


def test_an_eight_bit_operand_is_cast_twice_and_read_twice_and_its_gradient_is_bfloat16():
    _, moved = mixed_by_hand(fused=True)
    narrow, wide = (
        mixed(fused_attention=True, dtype=dtype) for dtype in ("float8_e4m3fn", "bfloat16")
    )
    elements = moved["operands"] / 2
    cast, read, written = 2 + 1 + 1, 1 + 1, 2  # as it is, and transposed
    more = elements * (cast + read + written - 6)
    # Weights are read three times, with one byte less. Their cast is outside of the microbatch.
    less = 3 * moved["weights"] / 2
    found = sum(cost.bytes for cost in narrow) - sum(cost.bytes for cost in wide)
    assert found == pytest.approx(more - less)


def test_an_eight_bit_step_sends_and_computes_its_output_layer_in_bfloat16():
    axes, dense = {"tensor": 8}, dataclasses.replace(MIXED, experts=0, slots=1.0, kv_heads=0)
    narrow, wide = (
        step(axes, dense, batch=8, dtype=dtype) for dtype in ("float8_e4m3fn", "bfloat16")
    )
    assert narrow.parts["tensor"] == wide.parts["tensor"]
    layers = 6 * 8 * 2048 * 8 * (1024 * 4 * 1536 + EXPERT) / 8
    rate = cluster_model.PRODUCTS_SHARE * 989e12
    faster = layers / rate * (1 - 1 / layer_model.EIGHT_BIT_SPEEDUP)
    assert wide.parts["products"] - narrow.parts["products"] == pytest.approx(faster)


# Traffic, by hand, inside of a host: 360 GB/s, 20 us.


@pytest.mark.parametrize("recompute, times", [("none", 4), ("attention", 4), ("block", 6)])
def test_recomputed_experts_exchange_their_tokens_again(recompute, times):
    eight = dataclasses.replace(MIXED, experts=8)
    found = step({"expert": 4, "tensor": 2}, eight, batch=8, recompute=recompute)
    one = 2 * 2048 * 2 * 1024 * 3 / 4 / 360e9 + 20e-6
    assert found.parts["expert"] == pytest.approx(2 * 8 * times * one)


# all-reduces of a layer in both passes, without and with sequence parallelism
SUMS = {
    "none": (4, 4),
    "selective": (4, 4),
    "gathers": (4, 5),  # two all-gathers, each half an all-reduce
    "attention": (4, 4.5),
    "mlp": (4, 4.5),
    "modules": (4, 5),
    "block": (5, 5.5),
    "half": (5, 5),
    "full": (6, 6),
}


@pytest.mark.parametrize("recompute", SUMS)
@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_recomputed_is_summed_again_but_for_the_sum_at_its_end(recompute, sequence):
    shape = dataclasses.replace(MIXED, experts=0, slots=1.0, kv_heads=8)
    plan = dict(batch=8, sequence_parallel=sequence)
    found = step({"tensor": 8}, shape, recompute=recompute, **plan).parts["tensor"]
    one = 2 * (2 * 2048 * 1024 * 7 / 8 / 360e9 + 20e-6)
    head = 8 * 2 * one  # microbatches
    assert found - head == pytest.approx(8 * 8 * SUMS[recompute][sequence] * one)


def test_parameters_that_are_kept_are_gathered_once():
    kept, twice = (
        step({"fsdp": 8}, batch=8, shape=MIXED, data_overlap=False, gather_again=again)
        for again in (False, True)
    )
    layers = 8 * (ATTENTION + 6 * EXPERT)
    gathers = 2 * layers * 7 / 8 / 360e9 + 8 * 20e-6
    assert twice.parts["data"] - kept.parts["data"] == pytest.approx(gathers)


def test_experts_exchange_the_tokens_that_a_device_has():
    axes = {"expert": 4, "tensor": 2}
    for parallel, own in ((True, 1024), (False, 2048)):
        eight = dataclasses.replace(MIXED, experts=8)
        found = step(axes, eight, batch=8, sequence_parallel=parallel)
        # two microbatches, eight layers, there and back, forward and backward
        one = 2 * own * 2 * 1024 * 3 / 4 / 360e9 + 20e-6  # bfloat16, two experts
        assert found.parts["expert"] == pytest.approx(2 * 8 * 4 * one)


@pytest.mark.parametrize(
    "recompute, again, attended",
    [
        ("none", 0, 0),
        ("mlp", 0, 0),
        ("attention", 2, 1),
        ("block", 2, 1),
        ("full", 3, 1),
        ("half", 1.5, 0.5),
    ],
)
@pytest.mark.parametrize("gradient_bytes", [2, 4])
def test_a_ring_sends_keys_and_values_forward_and_they_and_their_gradients_backward(
    recompute, again, attended, gradient_bytes
):
    axes = {"context": 4, "tensor": 2}
    shape = dataclasses.replace(MIXED, seq_len=512, experts=0, slots=1.0)
    found = step(axes, shape, batch=8, recompute=recompute, ring_gradient_bytes=gradient_bytes)
    numbers = 128 * (384 + 384) / 2
    one, home = (size * numbers / 360e9 + 10e-6 for size in (2, gradient_bytes))
    # Four devices: three steps bring everything to everyone, and have products beside them. The
    # fourth brings gradients home. The backward pass has five matmuls in place of two, and
    # twice the traffic of memory.
    products = 3 / 4 * 4 * 128 * 512 * 1536 / 2 / (cluster_model.PRODUCTS_SHARE * 989e12)
    moved = 3 / 4 * 128 * 8 * 1536 / 2 / (0.85 * 3.35e12)
    sent = 3 * one + (3 * one + 4 * home) + again * one
    room = (1 + 2.5 + attended) * products + (1 + 2 + attended) * moved
    assert found.parts["context"] == pytest.approx(8 * 8 * (sent - room))
    assert found.hidden["context"] == pytest.approx(8 * 8 * room)


def test_zero_2_sums_gradients_after_each_microbatch_but_in_a_pipeline_once():
    shape = dataclasses.replace(MIXED, experts=0, slots=1.0)
    layers, table = 8 * (ATTENTION + EXPERT), 32_000 * 1024

    def gather(parameters, n):
        return 2 * parameters * (n - 1) / n / 360e9 + 20e-6

    plan = dict(batch=24, data_overlap=False)
    for axes, zero, seconds in (
        ({"data": 8}, 1, 2 * gather(layers + 2 * table, 8)),
        ({"data": 8}, 2, (1 + 3) * gather(layers + 2 * table, 8)),  # three microbatches
        ({"pipe": 2, "data": 4}, 2, 2 * gather(layers / 2 + table, 4)),
    ):
        assert step(axes, shape, zero=zero, **plan).parts["data"] == pytest.approx(seconds)


def test_fsdp_gathers_the_experts_of_its_device_alone():
    found = step({"fsdp": 4, "expert": 2}, MIXED, batch=16, data_overlap=False)
    table = 32_000 * 1024

    def gather(parameters, n=4):
        return 2 * parameters * (n - 1) / n / 360e9 + 20e-6

    # two microbatches; gathered forward and backward, gradients summed
    seconds = 2 * 8 * 3 * gather(ATTENTION + 3 * EXPERT)
    # output layer and embedding: gathered once, gradients summed
    seconds += 2 * 2 * gather(table) + 2 * 2 * gather(table)
    # what is no expert's is there twice along "expert"
    seconds += 2 * gather((8 * ATTENTION + 2 * table) / 4, 2)
    assert found.parts["data"] == pytest.approx(seconds)


@pytest.mark.parametrize("sequence_parallel, share", [(False, 1), (True, 1 / 2)])
def test_the_backward_pass_hides_its_sums_along_tensor_behind_gradients_of_weights(
    sequence_parallel, share
):
    wide = Shape(8, 8192, heads=64, head_dim=128, mlp=32_768, vocab=32_000, seq_len=2048)
    plan = dict(batch=8, sequence_parallel=sequence_parallel, recompute="full")
    plain, hiding = (
        step({"tensor": 8}, wide, wgrad_overlap=on, **plan) for on in (False, True)
    )
    pair = 2 * (2 * 2048 * 8192 * 7 / 8 / 360e9 + 20e-6)
    hidden = 0.75 * share * 8 * 8 * 2 * pair  # microbatches, layers, pairs
    assert hiding.hidden["tensor"] == pytest.approx(hidden)
    assert plain.parts["tensor"] - hiding.parts["tensor"] == pytest.approx(hidden)


@pytest.mark.parametrize("port", [50e9, 5e9])
@pytest.mark.parametrize("length", [256, 2048, 16_384])
@pytest.mark.parametrize(
    ("axes", "plan"),
    [
        ({"data": 64}, {}),
        ({"data": 8, "fsdp": 8}, {}),
        ({"fsdp": 8, "context": 8}, dict(fused_attention=False)),
        ({"data": 4, "fsdp": 4, "context": 4}, {}),
        ({"data": 16, "tensor": 4}, dict(wgrad_overlap=True)),
        ({"fsdp": 8, "tensor": 8}, dict(wgrad_overlap=True)),
        ({"fsdp": 8, "tensor": 8}, dict(tensor_overlap=True)),
        (
            {"tensor": 4, "context": 8, "fsdp": 8},
            dict(wgrad_overlap=True, fused_attention=False),
        ),
        ({"pipe": 4, "fsdp": 4, "context": 4}, dict(chunks=2, pipe_overlap=True)),
        ({"data": 16, "pipe": 4}, dict(chunks=2, pipe_overlap=True)),
    ],
)
def test_a_second_of_computing_hides_one_transfer(axes, plan, length, port):
    shape = dataclasses.replace(MIXED, seq_len=length, slots=1.0, experts=0, kv_heads=8)
    cluster = Cluster(hardware.get("h100"), math.prod(axes.values()), port_bandwidth=port)
    options = dict(zero=1, sequence_parallel=True) | plan
    found = step_model.breakdown(shape, Plan(axes, 64, **options), cluster)
    free = {"context"} | ({"tensor"} if plan.get("tensor_overlap") else set())
    beside = sum(
        seconds / (1 if axis in free else 0.75) for axis, seconds in found.hidden.items()
    )
    computed = found.parts["products"] + found.parts["memory"]
    assert 0 < beside <= computed * (1 + 1e-9)
    assert "context" not in axes or found.hidden["context"] > 0


@pytest.mark.parametrize("fused, factor", [(False, (2 * 8 + 1) / (4 * 8)), (True, 1)])
def test_a_ring_computes_only_scores_that_it_needs(fused, factor):
    """Eight devices compute 17 of 32 parts; all else is an eighth."""
    shape = dataclasses.replace(MIXED, seq_len=16_384, slots=1.0, experts=0)
    one, ring = (
        layer_model.layer_work(shape, Plan(axes, 1, fused_attention=fused))[0]
        for axes in ({}, {"context": 8})
    )
    scores = 4 * 16_384**2 * shape.heads * shape.head_dim
    assert ring.flops == pytest.approx((one.flops - scores + factor * scores) / 8)


def test_switches_do_not_add_up_what_sequence_parallelism_scatters():
    shape = dataclasses.replace(MIXED, experts=0, slots=1.0, kv_heads=8)
    usual, adding = (
        Cluster(hardware.get("h100"), 8, adds_in_switch=adds, ideal=True)
        for adds in (False, True)
    )
    plain, whole, cut = (
        step_model.breakdown(shape, Plan({"tensor": 8}, 8, sequence_parallel=on), cluster)
        for on, cluster in ((True, usual), (False, adding), (True, adding))
    )
    assert whole.parts["tensor"] == pytest.approx(plain.parts["tensor"] / 1.3)
    assert cut.parts["tensor"] == plain.parts["tensor"]


def test_experts_and_all_else_share_the_computing_that_hides_their_gradients():
    """Both all-reduces together outlast the backward pass, one alone does not."""
    axes, short = {"data": 8, "expert": 8}, dataclasses.replace(MIXED, seq_len=128, experts=64)
    found = step(axes, short, batch=64)
    assert 0 < found.hidden["data"] <= 0.75 * (found.parts["products"] + found.parts["memory"])


def test_parameters_that_do_not_overlap_are_exposed_whole():
    shape = dataclasses.replace(MIXED, experts=0, slots=1.0)
    plain, exposed = (
        step({"data": 8}, shape, batch=32, zero=1, parameter_overlap=on) for on in (True, False)
    )
    parameters = 8 * (ATTENTION + EXPERT) + 2 * 32_000 * 1024
    gather = 2 * parameters * 7 / 8 / 360e9 + 20e-6
    hidden = 0.75 * 7 / 8 * gather
    assert exposed.parts["data"] - plain.parts["data"] == pytest.approx(hidden)
    assert exposed.total - plain.total == pytest.approx(hidden)


def test_tensor_traffic_is_hidden_in_one_way_only():
    with pytest.raises(
        ValueError, match="wgrad_overlap=True must come with tensor_overlap=False"
    ):
        Plan({"tensor": 2}, 8, tensor_overlap=True, wgrad_overlap=True)
