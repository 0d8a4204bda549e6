"""Formulas foretell what compiled steps hold and send, and when a step takes longer."""

import functools

import one_device
import pytest

from course_lib import config, hardware, measure, virtual
from course_lib.parallel import estimate, mesh, slots, strategy
from course_lib.parallel import schedule as schedules
from course_lib.parallel.strategy import Strategy

H100 = hardware.get("h100")
BLOCK = {"model.remat": ("Block",)}
# Axes, strategy, changes of the configuration.
CASES = (
    (dict(data=4), Strategy(), {}),
    (dict(data=4), Strategy(zero=1), {"training.num_minibatches": 2}),
    (dict(data=2), Strategy(zero=2), {"training.num_minibatches": 4}),
    (dict(data=4), Strategy(zero=3), {}),
    (dict(data=2, tensor=4), Strategy(zero=3, sequence=True), {}),
    (dict(data=2, tensor=2), Strategy(zero=3, sequence=True), BLOCK | {"model.use_bias": False}),
    (dict(data=2, tensor=2), Strategy(zero=1), BLOCK),
    (dict(data=1, tensor=4), Strategy(sequence=True), BLOCK),
    (dict(data=1, tensor=2), Strategy(sequence=True), {"model.remat": ("MLP", "Attn"), "model.qk_norm": True}),
    (dict(data=2, pipe=2), Strategy(zero=1, schedule="gpipe", microbatches=4), {}),
    (dict(data=2, pipe=2, tensor=2), Strategy(zero=1, sequence=True, microbatches=2), BLOCK),
    (dict(data=2, pipe=2, tensor=2), Strategy(schedule="1f1b", microbatches=4), {"model.parallel_block": True}),
)


def small(changes):
    return one_device.small(**{"optimizer.name": "adam", **changes})


@functools.cache
def compiled(index):
    axes, chosen, changes = CASES[index]
    grid = one_device.grid(**axes)
    run = strategy.build(small(changes), grid, chosen)
    return grid, run.train_step.lower(*run.abstract()).compile()


def predicted(index):
    axes, chosen, changes = CASES[index]
    return estimate.estimate(small(changes), axes, chosen, H100)


def taken(index):
    """Returns how often the devices of a pipeline take each branch."""
    axes, chosen, _ = CASES[index]
    if "pipe" not in axes:
        return None
    return slots.taken(schedules.make(chosen.schedule, axes["pipe"], chosen.microbatches, chosen.chunks))


each = pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(f"{a}{n}" for a, n in CASES[i][0].items()))


@each
def test_a_step_s_arguments_are_those_of_the_formula(index):
    assert measure.memory(compiled(index)[1]).arguments == predicted(index).arguments


METRICS = 64  # bytes: sums and counts of the loss, of four minibatches at most, which the formulas leave out


@each
def test_a_device_sends_along_each_axis_what_the_formula_says(index):
    grid, step = compiled(index)
    ledger, found = measure.ledger(step, grid, taken=taken(index)), predicted(index)
    for axis in CASES[index][0]:
        assert 0 <= ledger.sent(axis=axis) - found.sent[axis] <= METRICS
    assert ledger.sent() - sum(found.sent.values()) <= 2 * METRICS  # and nothing along two axes, or none


def test_the_formula_needs_no_devices_and_counts_the_parameters_of_a_model_that_none_could_hold():
    whole = config.nemotron_340b()
    chosen = Strategy(zero=1, sequence=True, microbatches=36)
    found = estimate.estimate(whole, {"data": 64, "pipe": 12, "tensor": 8}, chosen, H100)
    N, D, K, G, V = 96, 18_432, 192, 8, 256_000
    layer = D * (D + 2 * G * K) + D * D + 2 * D * 4 * D + 2 * D  # attention, MLP, two norms
    outside = 2 * V * D + D
    norms = (2 * N // 12 + 1) * D  # are not cut along "tensor"
    assert found.bytes["parameters"] == 4 * ((N * (layer - 2 * D) // 12 + outside - D) // 8 + norms)
    assert N * layer + outside == pytest.approx(340e9, rel=0.005)


def test_the_published_utilization_follows_from_the_published_time():
    whole = config.nemotron_340b()
    for data, batch, seconds, published in ((64, 2304, 8.0, 0.410), (16, 768, 10.3, 0.424)):
        whole.data.batch_size = batch
        chosen = Strategy(zero=1, sequence=True, microbatches=batch // data)
        found = estimate.estimate(whole, {"data": data, "pipe": 12, "tensor": 8}, chosen, H100)
        assert found.model_seconds / seconds == pytest.approx(published, abs=0.0025)  # 8.0 is rounded to a hundredth of itself


def half(sizes, strategy, changes=(), accelerator=H100):
    """Estimates a model that a device could train, on some grid."""
    whole = config.get("80gb")
    whole.training.num_minibatches = 1
    whole.update_from_flattened_dict(dict(changes))
    return estimate.estimate(whole, sizes, strategy, accelerator)


def test_more_microbatches_shorten_the_bubble_and_nothing_else():
    few, many = (half({"data": 1, "pipe": 4}, Strategy(microbatches=m)) for m in (4, 16))
    share = 3 / 4
    assert few.seconds["bubble"] == pytest.approx(share * few.seconds["products"])
    assert many.seconds["bubble"] == pytest.approx(share / 4 * few.seconds["products"])
    assert few.seconds["products"] == many.seconds["products"] and few.model_seconds == many.model_seconds


def test_an_axis_that_leaves_the_host_is_slower_by_the_ratio_of_the_links():
    grids = {"data": 4, "tensor": 4}, {"tensor": 4, "data": 4}  # neighbours, and every fourth of 16
    inside, across = (half(axes, Strategy(sequence=True)) for axes in grids)
    assert inside.sent == across.sent
    per_byte = [found.seconds["tensor"] / found.sent["tensor"] for found in (inside, across)]
    assert per_byte[1] / per_byte[0] == pytest.approx(H100.link_bandwidth / H100.network_bandwidth)


def test_each_stage_of_zero_holds_less_and_the_third_sends_half_as_much_again_in_numbers_of_half_the_size():
    held = [half({"data": 8}, Strategy(zero=stage)) for stage in (0, 1, 3)]
    assert held[0].memory > held[1].memory > held[2].memory
    assert held[1].sent["data"] == pytest.approx(held[0].sent["data"], rel=1e-3)
    assert held[2].sent["data"] == pytest.approx(held[0].sent["data"] * 1.5 / 2, rel=0.02)  # all but embedding and vectors


def test_a_step_takes_between_its_floor_and_the_sum_and_no_more_than_all_devices_at_their_peak():
    for chosen, axes in ((Strategy(zero=3), {"data": 8}), (Strategy(microbatches=8), {"data": 2, "pipe": 4})):
        found = half(axes, chosen)
        assert found.model_seconds < found.floor <= found.step and 0 < found.mfu < 1


def test_the_choice_fits_is_the_fastest_and_is_none_where_nothing_fits():
    whole = config.get("80gb")
    whole.data.batch_size = 16
    found = estimate.choose(whole, H100, 4)
    assert [each.step for each in found] == sorted(each.step for each in found) and all(each.fits for each in found)
    assert all(each.memory <= H100.memory_bytes for each in found)
    whole.model.num_layers = 480
    assert estimate.choose(whole, H100, 4) == []


@pytest.mark.skipif(virtual.why_unavailable("h100") is not None, reason=str(virtual.why_unavailable("h100")))
def test_memory_is_that_of_a_compiled_step_within_a_fifth():
    axes, chosen = {"data": 2, "pipe": 2, "tensor": 2}, Strategy(zero=1, sequence=True, microbatches=8)
    grid = mesh.make(axes, virtual.devices("h100", 8))
    whole = config.get("80gb")
    whole.training.num_minibatches, whole.model.num_layers, whole.data.batch_size = 1, 8, 32
    run = strategy.build(whole, grid, chosen)
    found = measure.memory(run.train_step.lower(*run.abstract()).compile())
    expected = estimate.estimate(whole, axes, chosen, H100)
    assert found.arguments == pytest.approx(expected.arguments, rel=1e-3)
    assert found.peak == pytest.approx(expected.memory, rel=0.2)  # what XLA keeps in branches is its own choice


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(ValueError, match="there is no formula here for context"):
        half({"data": 2, "context": 2}, Strategy())
    with pytest.raises(ValueError, match="schedule='zero_bubble' must be another for an estimate"):
        half({"data": 1, "pipe": 4}, Strategy(schedule="zero_bubble", microbatches=4))
    with pytest.raises(ValueError, match="by='compiler' must be 'hand' for an estimate"):
        half({"data": 2}, Strategy(by="compiler"))
    with pytest.raises(ValueError, match=r"num_heads of shape \(20,\)"):
        half({"data": 1, "tensor": 8}, Strategy())
    with pytest.raises(ValueError, match="accelerator='l4' must have a figure for its network: axis 'data' crosses it"):
        half({"data": 16}, Strategy(), accelerator=hardware.get("l4"))
