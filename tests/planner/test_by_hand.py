"""The layouts of notebook 12's tables, recomputed by hand from the formulas."""

import dataclasses
import math

import by_hand
import pytest

from course_lib import configs, planner
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.measure import hardware

MODELS = {
    "2.5B": dict(N=32, D=2560, H=20, K=128, G=0, F=10240, V=2048, L=1024, batch=512),
    "6.7B": dict(N=32, D=4096, H=32, K=128, G=8, F=16384, V=128_000, L=4096, batch=512),
    "70B": dict(N=96, D=8192, H=64, K=128, G=8, F=32768, V=128_000, L=4096, batch=1024),
    "340B": dict(N=96, D=18432, H=96, K=192, G=8, F=73728, V=256_000, L=4096, batch=2304),
}
# model, axes, stage of ZeRO, parts, scores on the chip
LAYOUTS = (
    ("6.7B", dict(data=64), 3, 4, False),
    ("6.7B", dict(data=8, tensor=8), 1, 16, False),
    ("6.7B", dict(data=16, pipe=4), 1, 32, False),
    ("6.7B", dict(data=8, pipe=2, tensor=4), 1, 32, False),
    ("6.7B", dict(data=64), 3, 4, True),
    ("6.7B", dict(data=8, tensor=8), 1, 16, True),
    ("6.7B", dict(data=64), 3, 1, False),
    ("6.7B", dict(data=32, tensor=2), 3, 1, False),
    ("6.7B", dict(data=32, tensor=2), 1, 2, False),
    ("6.7B", dict(data=32, tensor=2), 0, 8, False),
    ("6.7B", dict(data=16, tensor=4), 3, 1, False),
    ("6.7B", dict(data=16, tensor=4), 1, 2, False),
    ("2.5B", dict(data=64), 3, 1, False),
    ("2.5B", dict(data=32, tensor=2), 3, 1, False),
    ("2.5B", dict(pipe=2, data=32), 1, 16, False),
    ("70B", dict(data=512), 3, 1, False),
    ("70B", dict(data=256, tensor=2), 3, 1, False),
    ("70B", dict(pipe=4, data=32, tensor=4), 1, 32, False),
    ("340B", dict(data=768, tensor=8), 3, 1, False),
    ("340B", dict(data=48, pipe=16, tensor=8), 1, 48, False),
)


def config_of(model, minibatches):
    config = configs.nemotron_340b()
    config.model.update(num_layers=model["N"], hidden_size=model["D"], num_heads=model["H"])
    config.model.update(head_dim=model["K"], num_kv_heads=model["G"], max_seq_len=model["L"])
    config.model.update(vocab_size=model["V"], num_outputs=model["V"])
    config.data.update(seq_len=model["L"], batch_size=model["batch"])
    config.training.num_minibatches = minibatches
    return config


@pytest.mark.parametrize(("name", "axes", "zero", "parts", "fused"), LAYOUTS)
def test_a_layout_takes_the_seconds_that_the_formulas_give_by_hand(
    name, axes, zero, parts, fused
):
    piped = "pipe" in axes
    config = config_of(MODELS[name], 1 if piped else parts)
    strategy = Strategy(
        zero=zero, sequence="tensor" in axes, microbatches=parts if piped else 1
    )
    plan = planner.plan_of(config, axes, strategy)
    plan = dataclasses.replace(plan, fused_attention=fused)
    cluster = Cluster(hardware.get("h100"), math.prod(axes.values()))
    step = planner.seconds(planner.step(planner.shape_of(config), plan), cluster)
    expected = by_hand.seconds(MODELS[name], axes, zero, parts, fused)
    assert step.total == pytest.approx(expected, rel=1e-9)
