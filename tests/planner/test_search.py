"""Laws of the search through a framework's layouts, and of the memory that they take.

`test_frozen` has whole searches: which layouts are tried, and their order.
"""

import dataclasses
import math

import jaxtyping
import pytest

from course_lib import planner
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hardware
from course_lib.planner import Plan, Shape

SHAPE = Shape(24, 2048, 16, 128, 8192, 32_000, 4096)  # 24 layers, 16 heads
H100S = Cluster(hardware.get("h100"), 16)
BATCH = 32


@pytest.fixture(scope="module", autouse=True)
def types_are_not_checked():
    """A search makes a million small calls; other files check the types of these functions."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def search(shape=SHAPE, **options):
    return planner.ranked(planner.Frameworks(shape, BATCH, **options), H100S)


@pytest.fixture(scope="module")
def found():
    return search()


def memory_bytes(shape, plan):
    return sum(planner.held(planner.step(shape, plan)).values())


@pytest.mark.parametrize(
    ("axes", "zero", "microbatch", "per_parameter"),
    [
        ({"data": 16}, 0, 2, 4 + 12),
        ({"data": 16}, 0, 1, 6 + 12),  # two microbatches are summed in float32
        ({"data": 16}, 1, 2, 4 + 12 / 16),
        ({"data": 16}, 2, 2, 2 + 14 / 16),
        ({"data": 2, "tensor": 8}, 0, 1, 18 / 8),
        ({"data": 2, "tensor": 8}, 1, 1, 6 / 8 + 12 / 16),
    ],
)
def test_state_is_divided_along_tensor_and_by_zero(axes, zero, microbatch, per_parameter):
    short = dataclasses.replace(SHAPE, seq_len=1)  # next to no activations
    plan = Plan(axes, BATCH, microbatch, zero=zero)
    plan = dataclasses.replace(plan, float32_gradients=plan.microbatches > 1)
    expected = short.parameters * per_parameter
    assert memory_bytes(short, plan) == pytest.approx(expected, rel=0.02)


def activations(shape=SHAPE, axes=None, batch=BATCH, **fields):
    """Returns bytes for each token of a microbatch, without state and logits."""
    plan = Plan(axes or {"data": 16}, batch, **fields)
    shorter = dataclasses.replace(shape, seq_len=shape.seq_len // 2)
    small = memory_bytes(shorter, plan)
    more = memory_bytes(shape, plan) - small
    return more / (plan.microbatch * shorter.seq_len / plan.size("context"))


def test_activations_are_those_of_korthikanti_without_dropout():
    """34 s b h bytes of a layer, of which two masks are one byte each; 2 a s s b of the
    softmax; the logits take 6 bytes.
    """
    layer, logits = 32 * SHAPE.width, 6 * SHAPE.vocab
    assert activations() == pytest.approx(24 * layer + logits)
    # Scores of a token grow with the length: half of the sequence has half of them.
    softmax = 2 * SHAPE.heads * 1.5 * SHAPE.seq_len
    found = activations(fused_attention=False)
    assert found == pytest.approx(24 * (layer + softmax) + logits)
    selective = activations(fused_attention=False, recompute="selective")
    assert selective == pytest.approx(24 * layer + softmax + logits)
    block = activations(fused_attention=False, recompute="block")
    assert block == pytest.approx(24 * 2 * SHAPE.width + layer + softmax + logits)
    kept = 2 * SHAPE.width
    assert activations(recompute="block") == pytest.approx(24 * kept + layer + logits)
    half = activations(recompute="block", recompute_share=0.5)
    assert half == pytest.approx(12 * (kept + layer) + layer + logits)


def test_the_layouts_fit_and_the_fastest_comes_first(found):
    """No layout is listed twice, and all use all GPUs."""
    assert all(layout.memory <= 0.9 * H100S.accelerator.memory_bytes for layout in found)
    seconds = [layout.seconds for layout in found]
    assert seconds == sorted(seconds)
    assert len({str(layout.plan) for layout in found}) == len(found)
    for layout in found[:: len(found) // 7]:
        again = planner.seconds(planner.step(SHAPE, layout.plan), H100S).total
        assert layout.seconds == again == planner.layout(SHAPE, layout.plan, H100S).seconds
        assert layout.memory == memory_bytes(SHAPE, layout.plan)
        assert math.prod(layout.plan.axes.values()) == 16 and 1 not in layout.plan.axes.values()


@pytest.mark.parametrize(("layers", "kind"), [(96, "data"), (48, "pipe")])
def test_as_few_layers_recompute_as_memory_allows(layers, kind):
    deeper = dataclasses.replace(SHAPE, layers=layers, seq_len=16_384)
    found = search(deeper, kinds=(kind,))
    assert len({layout.plan.recompute_share for layout in found}) > 2
    room = 0.9 * H100S.accelerator.memory_bytes
    for layout in found:
        if layout.plan.recompute == "none":
            continue
        share = layout.plan.recompute_share
        fewer = max(share - layout.plan.size("pipe") / layers, 0.0)
        less = dataclasses.replace(layout.plan, recompute_share=fewer)
        kept = dataclasses.replace(layout.plan, recompute="none", recompute_share=1.0)
        assert memory_bytes(deeper, kept) > room and memory_bytes(deeper, less) > room
        assert room >= layout.memory
        assert layout.recomputes == "block" + f", {share:.0%} of layers" * (share < 1)
    only = search(deeper, kinds=(kind,), recompute=("block",))
    assert {layout.plan.recompute for layout in only} == {"block"}


def test_the_best_of_each_kind_is_its_first(found):
    best = planner.best(found)
    assert list(best) == list(planner.KINDS)
    for kind, layout in best.items():
        assert layout.kind == kind
        assert layout.seconds == min(each.seconds for each in found if each.kind == kind)
    assert best["data"].plan.axes.keys() <= {"data", "fsdp"}
    assert planner.best(found[:1]) == {found[0].kind: found[0]}


def test_those_to_measure_are_the_fastest_of_each_kind_within_the_formulas_error(found):
    tied = planner.tied(found)
    assert tied[0] == found[0]
    of_kinds = planner.best(found)
    for layout in of_kinds.values():
        close = layout.seconds <= (1 + planner.LAYOUT_ERROR) * found[0].seconds
        assert (layout in tied) == close
    assert len({layout.kind for layout in tied}) == len(tied) > 1


def test_a_mesh_is_priced_as_the_search_prices_it(found):
    space = planner.Frameworks(SHAPE, BATCH)
    for layout in found[:: len(found) // 9]:
        plan = layout.plan
        assert layout in list(space.on(plan.axes, H100S, plan.zero, plan.chunks))


def test_gradients_are_summed_in_float32_unless_a_search_asks_for_less(found):
    assert {layout.plan.gradient_bytes for layout in found} == {4}
    assert all(layout.plan.float32_gradients for layout in found)
    narrow = search(gradient_bytes=2, kinds=("data",))
    assert narrow[0].seconds < planner.best(found)["data"].seconds


def test_what_software_lacks_holds_for_every_layout():
    found = search(software={"data_overlap": False, "eager": True}, kinds=("data", "pipe"))
    assert all(each.plan.eager and not each.plan.data_overlap for each in found)


BAD = [
    (dict(batch=0), "batch=0"),
    (dict(kinds=("fsdp",)), r"kinds=\('fsdp',\)"),
    (dict(recompute=("block", "none")), "must be in the order of"),
    (dict(recompute=("full",)), r"recompute=\('full',\)"),
    (dict(shape=dataclasses.replace(SHAPE, experts=8)), "experts=8 must be 0"),
    (dict(gradient_bytes=3), "gradient_bytes=3"),
    (dict(cluster=Cluster(hardware.get("v5p"), 16)), "cluster must have GPUs, not"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_wrong_values_are_refused(changes, message):
    space = dict(shape=SHAPE, batch=BATCH) | changes
    cluster = space.pop("cluster", H100S)
    with pytest.raises(ValueError, match=message):
        planner.ranked(planner.Frameworks(**space), cluster)
