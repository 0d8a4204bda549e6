"""A layout beside its neighbours, as a framework runs them."""

import dataclasses
import math

import pytest

from course_lib.lessons import frameworks
from course_lib.many_devices import step_model
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.plans import Plan, Shape
from course_lib.measure import hardware

SHAPE = Shape(24, 2048, 16, 128, 8192, 32_000, 4096)  # 24 layers, 16 heads
H100S = Cluster(hardware.get("h100"), 16)
BATCH = 32


def test_a_step_is_that_of_a_plan_which_recomputes_blocks_and_divides_the_state():
    axes = {"fsdp": 8, "tensor": 2}
    plan = Plan(axes, BATCH, microbatch=4, zero=1, recompute="block", sequence_parallel=True)
    expected = step_model.breakdown(SHAPE, plan, H100S).total
    said = frameworks.step_seconds(SHAPE, H100S, BATCH, axes, sequence_parallel=True)
    assert said == expected
    assert frameworks.step_seconds(SHAPE, H100S, BATCH, axes, recompute="none") < expected


@pytest.mark.parametrize(
    ("axes", "zero", "gradient_bytes", "per_parameter"),
    [
        ({"data": 16}, 0, 4, 6 + 12),
        ({"data": 16}, 1, 2, 4 + 12 / 16),
        ({"data": 16}, 1, 4, 6 + 12 / 16),
        ({"data": 16}, 2, 4, 2 + 16 / 16),
        ({"fsdp": 16}, 0, 2, 16 / 16),
        ({"data": 2, "pipe": 2, "tensor": 4}, 0, 4, 18 / 8),
        ({"data": 2, "pipe": 2, "tensor": 4}, 1, 4, 6 / 8 + 12 / 16),
        ({"fsdp": 4, "context": 4}, 1, 2, 4 / 4 + 12 / 16),
    ],
)
def test_state_is_divided_along_fsdp_pipe_and_tensor_and_by_zero(
    axes, zero, gradient_bytes, per_parameter
):
    plan = Plan(axes, BATCH, zero=zero, gradient_bytes=gradient_bytes)
    assert frameworks.state_bytes(SHAPE, plan) == pytest.approx(
        SHAPE.parameters * per_parameter
    )


def test_a_step_whose_state_leaves_no_room_takes_forever():
    deeper = dataclasses.replace(SHAPE, layers=360)  # 18.2e9 parameters: 4.75 bytes do not fit
    assert frameworks.step_seconds(deeper, H100S, BATCH, {"data": 16}) == math.inf
    assert frameworks.step_seconds(deeper, H100S, BATCH, {"fsdp": 16}) < math.inf


def test_the_better_order_of_a_ring_is_taken():
    found = frameworks.neighbours(SHAPE, H100S, BATCH)
    orders = [{"fsdp": 4, "context": 4}, {"context": 4, "fsdp": 4}]
    seconds = [frameworks.step_seconds(SHAPE, H100S, BATCH, axes) for axes in orders]
    assert found["context"]["context 4"] == min(seconds) < max(seconds)


def test_neighbours_are_named_and_what_divides_nothing_is_left_out():
    found = frameworks.neighbours(SHAPE, H100S, BATCH)
    assert list(found) == ["context", "tensor", "pipe"]
    assert list(found["tensor"]) == ["tensor 2", "tensor 4", "tensor 8"]
    assert "pipe 8, 3 chunks" in found["pipe"]  # 24 layers
    assert not any(name.startswith("pipe 8, 2") for name in found["pipe"])
    assert "pipe 2, tensor 8, 1 chunks" in found["pipe"]
    of_six_heads = dataclasses.replace(SHAPE, heads=6)
    found = frameworks.neighbours(of_six_heads, H100S, BATCH)
    assert list(found["tensor"]) == ["tensor 2"]
    assert not any("tensor 4" in name for name in found["pipe"])
    twelve = frameworks.neighbours(SHAPE, Cluster(H100S.accelerator, 12, gpus_per_host=4), 24)
    assert list(twelve["context"]) == ["context 2", "context 4"]
    assert not any("tensor 8" in name for name in twelve["pipe"])
    odd = dataclasses.replace(SHAPE, kv_heads=2, seq_len=1004)  # 4 x 251 positions
    found = frameworks.neighbours(odd, H100S, BATCH)
    assert list(found["context"]) == ["context 2"] and list(found["tensor"]) == ["tensor 2"]
    assert not any("tensor 4" in name for name in found["pipe"])


def test_a_pipeline_is_interleaved_and_sends_beside_computing():
    found = frameworks.neighbours(SHAPE, H100S, BATCH)["pipe"]
    axes = {"data": 4, "pipe": 2, "tensor": 2}
    plan = Plan(
        axes,
        BATCH,
        microbatch=2,  # 2 x 4096 tokens on two GPUs; four microbatches of one stage
        chunks=4,
        zero=1,
        recompute="block",
        pipe_overlap=True,
        sequence_parallel=True,
        tensor_overlap=True,
        gradient_bytes=4,
    )
    smaller = dataclasses.replace(plan, microbatch=1)
    seconds = [step_model.breakdown(SHAPE, each, H100S).total for each in (plan, smaller)]
    assert found["pipe 2, tensor 2, 4 chunks"] == min(seconds)


def test_options_of_a_pipeline_replace_the_usual_ones():
    usual = frameworks.pipelines(SHAPE, H100S, BATCH)
    exposed = frameworks.pipelines(SHAPE, H100S, BATCH, tensor_overlap=False)
    assert exposed["pipe 2, 4 chunks"] == usual["pipe 2, 4 chunks"]
    assert exposed["pipe 2, tensor 4, 4 chunks"] > usual["pipe 2, tensor 4, 4 chunks"]


def test_short_sequences_go_through_a_pipeline_several_at_once():
    short = dataclasses.replace(SHAPE, seq_len=256)
    found = frameworks.pipelines(short, H100S, 256)["pipe 2, 1 chunks"]
    axes = {"data": 8, "pipe": 2, "tensor": 1}
    one = frameworks.step_seconds(short, H100S, 256, axes, microbatch=1)
    assert found < 0.9 * one


def test_scores_in_memory_slow_every_layout_down():
    fused = frameworks.neighbours(SHAPE, H100S, BATCH)
    written = frameworks.neighbours(SHAPE, H100S, BATCH, fused_attention=False)
    for kind, times in fused.items():
        assert all(written[kind][name] > seconds for name, seconds in times.items()), kind
