"""The planner's numbers are those of `tests/data/planner.json.gz`, to 1e-9 and to the byte.

The file holds what the formulas said before they became one list of events: 400 random plans of
all options, the published steps, 113 configurations of this course, and several searches. The
state of the two with Adafactor has since been written anew: each scanned layer has its own. So
have bytes and seconds of the two with Muon, whose matrices travel, and are multiplied. Where
ZeRO 3 divides a tied table, the file has the seconds of two gathers in place of one. Four steps
of ZeRO 2 with minibatches hold what their update gathers, no longer all gradients at once.
"""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import jaxtyping
import one_device
import pytest

from course_lib import configs, planner
from course_lib.lessons import backtest
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.many_devices.pipeline_parallel import schedules
from course_lib.measure import hardware
from course_lib.planner import Plan, Shape

PLACE = Path(__file__).parents[1] / "data" / "planner.json.gz"
FROZEN = json.loads(gzip.decompress(PLACE.read_bytes()))
H100 = hardware.get("h100")


@pytest.fixture(scope="module", autouse=True)
def types_are_not_checked():
    """Hundreds of plans take a million small calls; other files check their types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def plan_of(fields):
    made = fields.get("schedule")
    return Plan(**fields | ({"schedule": schedules.make(*made)} if made else {}))


def step_of(shape, plan):
    return planner.step(Shape(**shape), plan_of(plan))


def cluster_of(fields):
    return Cluster(**fields | {"accelerator": hardware.get(fields["accelerator"])})


def config_of(base, changes):
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in changes.items()}
    if base == "small":
        return one_device.small(**{"optimizer.name": "adam", **changes})
    if base == "nemotron_340b":
        return configs.nemotron_340b()
    config = configs.get(base)
    config.model.update(num_heads=16, head_dim=160)  # which eight devices divide
    config.training.num_minibatches = 1
    config.update_from_flattened_dict(changes)
    return config


def same_times(found, frozen):
    """Whether all parts and hidden parts are equal, to a billionth of the step."""
    total = sum(frozen["parts"].values())
    for now, then in ((found.parts, frozen["parts"]), (found.hidden, frozen["hidden"])):
        for name in {*now, *then}:
            if abs(now.get(name, 0.0) - then.get(name, 0.0)) > 1e-9 * total:
                return False
    return math.isclose(found.model_seconds, frozen["model"], rel_tol=1e-9)


def gathers_once(shape, plan):
    """Whether ZeRO 3 divides a table that is embedding and output layer."""
    return shape.tied and plan.size("fsdp") > 1 and plan.size("pipe") == 1


def faster(found, frozen):
    """Whether only what travels along "data" is less, and nothing else is other."""
    parts = {**found.parts, "data": frozen["parts"].get("data", 0.0)}
    hidden = {**found.hidden, "data": frozen["hidden"].get("data", 0.0)}
    same = same_times(dataclasses.replace(found, parts=parts, hidden=hidden), frozen)
    return same and found.parts["data"] < frozen["parts"]["data"]


def changed(rows):
    """The numbers of those rows whose numbers are others now."""
    return [number for number, same in enumerate(rows) if not same]


def test_random_plans_of_all_options_take_the_seconds_of_the_file():
    def same(shape, plan, cluster, frozen):
        step = step_of(shape, plan)
        law = faster if gathers_once(step.shape, step.plan) else same_times
        return law(planner.seconds(step, cluster_of(cluster)), frozen)

    assert not changed(same(*each) for each in FROZEN["plans"])


def test_published_steps_take_the_seconds_of_the_file():
    predicted = backtest.predict(backtest.load())
    assert [[each.row.source, each.row.where] for each in predicted] == [
        row[:2] for row in FROZEN["rows"]
    ]
    assert not changed(
        (faster if gathers_once(each.row.shape, each.row.plan) else same_times)(
            each.step, frozen
        )
        for each, (_, _, frozen) in zip(predicted, FROZEN["rows"], strict=True)
    )


def test_the_random_plans_use_every_option():
    plans = [plan for _, plan, *_ in FROZEN["plans"]]
    since = ("muon", "attention_block")  # tests of configurations have them
    few = [f.name for f in dataclasses.fields(Plan) if sum(f.name in p for p in plans) < 20]
    few = [name for name in few if name not in since]
    assert len(plans) == 400 and few == []


def test_a_name_in_place_of_an_accelerator_is_refused():
    with pytest.raises(ValueError, match="accelerator='h100' must be a row of the table"):
        Cluster("h100", 64)


def test_frameworks_hold_the_bytes_of_the_file():
    assert not changed(
        abs(sum(planner.held(step_of(shape, plan)).values()) - size) < 0.5
        for shape, plan, size in FROZEN["memory"]
    )


def test_configurations_hold_and_send_the_bytes_of_the_file():
    def same(base, changes, axes, strategy, frozen):
        cluster = Cluster(H100, math.prod(axes.values()))
        found = planner.estimate(config_of(base, changes), axes, Strategy(**strategy), cluster)
        sent = {axis: found.sent.get(axis, 0) for axis in frozen["sent"]}
        return (
            (found.bytes, sent, found.parts)
            == (frozen["held"], frozen["sent"], frozen["parts"])
            and same_times(found.time, frozen["time"])
            and math.isclose(found.unhidden.total, frozen["unhidden"], rel_tol=1e-9)
        )

    assert not changed(same(*each) for each in FROZEN["configurations"])


@pytest.mark.parametrize("number", range(len(FROZEN["searches"])))
def test_frameworks_have_the_layouts_of_the_file_in_its_order(number):
    shape, count, batch, options, frozen = FROZEN["searches"][number]
    found = planner.ranked(
        planner.Frameworks(Shape(**shape), batch, **{"gradient_bytes": 2} | options),
        Cluster(H100, count),
    )
    then = [(plan_of(plan), list(plan["axes"]), *rest) for plan, *rest in frozen]
    if tied := Shape(**shape).tied:  # their times are others now, and so is the order
        found.sort(key=lambda layout: str(layout.plan))
        then.sort(key=lambda row: str(row[0]))
    for layout, (plan, axes, seconds, memory, name, recomputes) in zip(
        found, then, strict=True
    ):
        assert layout.plan == plan
        assert list(layout.plan.axes) == axes
        if tied and gathers_once(Shape(**shape), plan):
            assert layout.seconds < seconds
        else:
            assert layout.seconds == pytest.approx(seconds, rel=1e-9)
        assert abs(layout.memory - memory) < 0.5
        assert (layout.name, layout.recomputes) == (name, recomputes)


CHOICES = {  # layers, width, sequence length, batch and GPUs
    1: (32, 4096, 4096, 64, 8),
    2: (32, 4096, 4096, 512, 64),
    3: (32, 4096, 256, 64, 64),
    4: (96, 8192, 4096, 1024, 512),
}


def choice(number):
    layers, width, length, batch, gpus = CHOICES[number]
    config = configs.nemotron_340b()
    config.model.update(num_layers=layers, hidden_size=width, num_heads=width // 128)
    config.model.update(head_dim=128, num_kv_heads=8, max_seq_len=length)
    config.model.update(vocab_size=128_000, num_outputs=128_000)
    config.data.update(seq_len=length, batch_size=batch)
    return config, Cluster(H100, gpus)


@pytest.mark.parametrize("number", range(len(FROZEN["choices"])))
def test_this_course_has_the_layouts_of_the_file_in_its_order(number):
    level, reorder, frozen = FROZEN["choices"][number]
    config, cluster = choice(level)
    found = planner.ranked(planner.Course(config, reorder), cluster)
    for each, (axes, strategy, parts, held, step, unhidden) in zip(found, frozen, strict=True):
        assert list(each.axes.items()) == list(axes.items())
        assert each.strategy == Strategy(**strategy)
        assert (each.parts, each.bytes) == (parts, held)
        assert each.step == pytest.approx(step, rel=1e-9)
        assert each.unhidden.total == pytest.approx(unhidden, rel=1e-9)
