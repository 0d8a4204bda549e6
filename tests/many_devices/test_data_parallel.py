"""Laws of data parallelism: the bytes it sends, and those its devices hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import data_parallel, expert_parallel, sharding, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.models import losses
from course_lib.one_device import gradient_accumulation
from course_lib.text.data import Batch

# bytes of loss and accuracy as (sum, count) in float32; XLA may send their equal counts once
METRICS = (12, 16)


def sizes(whole):
    """Returns bytes of parameters: those that ZeRO cuts, those that it leaves whole, and of the
    first the kernels of layers.
    """
    params, _, _ = one_device.reference(FrozenConfigDict(whole))
    found = {"cut": 0, "whole": 0, "kernels": 0}
    specs = sharding.specs(params, sharding.ZERO, one_device.grid(data=2))
    for (path, leaf), spec in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)),
        strict=True,
    ):
        found["whole" if sharding.dim_of(spec, "data") is None else "cut"] += leaf.nbytes
        if path[0].key == "block" and path[-1].key == "kernel":
            found["kernels"] += leaf.nbytes
    return found


@functools.cache
def ledger_of_gradient(devices, chosen, minibatches=1):
    whole = one_device.small(**{"training.num_minibatches": minibatches})
    return measure.ledger(*one_device.compiled(whole, dict(data=devices), chosen)), sizes(whole)


def test_data_parallelism_reduces_the_bytes_of_the_gradient():
    found, size = ledger_of_gradient(4, Strategy())
    assert found.payload("all-reduce", "data") - size["cut"] - size["whole"] in METRICS
    assert found.payload() == found.payload("all-reduce", "data")


@pytest.mark.parametrize(
    ("axis", "stage"),
    [("data", 0), slow("data", 1), slow("data", 2), ("data", 3), ("expert", 0)],
)
def test_a_device_whose_labels_weigh_nothing_has_no_say(axis, stage):
    """The losses of the library are 0 on it. One that was 0 / 0 there would be NaN in the sum
    over devices.
    """
    of_one = of_two = losses.next_token_loss(
        lambda params, inputs, rng: inputs[..., None] * params[None, None]
    )
    inputs = np.arange(8, dtype=np.float32).reshape(2, 4)
    weights = np.array([[1, 2, 0, 1], [0] * 4], np.float32)
    batch = Batch(inputs, inputs.astype(np.int32) % 3, weights)
    params, rng = np.array([1, -1, 0.5], np.float32), jax.random.key(0)
    grid = one_device.grid(**{"data": 1, axis: 2})
    if axis == "expert":
        of_two = data_parallel.divided(of_one, axis, expert_parallel.own_sequences)
    grad_fn = one_device.jit(data_parallel.gradient(of_two, grid, P(), P(), stage=stage))
    expected, metrics = one_device.jit(gradient_accumulation.gradient(of_one))(
        params, batch, rng
    )
    np.testing.assert_allclose(grad_fn(params, batch, rng)[0], expected, rtol=1e-6)
    loss, _ = one_device.jit(data_parallel.loss(of_two, grid, P()))(params, batch, None)
    np.testing.assert_allclose(loss, training.mean_metrics(metrics)["loss"], rtol=1e-6)


def test_a_share_of_a_third_does_not_lengthen_gradients_in_bfloat16():
    """A third rounded to bfloat16 is 0.2% too large, and so was the whole gradient."""
    rows = np.random.default_rng(0).normal(size=(3, 4096)).astype(jnp.bfloat16)

    def loss_fn(params, rows, rng):
        count = jnp.float32(len(rows))
        loss = (rows.astype(jnp.float32) @ params).sum() / count
        return loss, {"loss": (loss * count, count)}

    grad_fn = data_parallel.gradient(loss_fn, one_device.grid(data=3), P(), P())
    found, _ = one_device.jit(grad_fn)(jnp.zeros(4096, jnp.bfloat16), rows, jax.random.key(0))
    assert found.dtype == jnp.bfloat16
    found, expected = np.asarray(found, np.float64), np.asarray(rows, np.float64).mean(0)
    assert found @ expected / (expected @ expected) == pytest.approx(1, abs=5e-4)


def test_minibatches_communicate_once_a_step():
    """So does stage 1: tests/planner compares its bytes with the formula."""
    once, also = (ledger_of_gradient(4, Strategy(), number)[0] for number in (1, 2))
    assert abs(also.payload() - once.payload()) <= 4  # a count


def test_zero_two_scatters_the_gradient_of_each_minibatch():
    found, size = ledger_of_gradient(2, Strategy(zero=2), 4)
    assert found.payload("reduce-scatter", "data") == 4 * size["cut"]


@functools.cache
def adam_on_four(stage):
    """Returns a run on four devices, and its compiled step."""
    whole = one_device.small(**{"optimizer.name": "adam"})
    run = strategies.build(whole, one_device.grid(data=4), Strategy(zero=stage))
    return run, run.train_step.lower(*run.abstract()).compile(one_device.quickly())


@pytest.mark.parametrize("stage", [slow(1), 2])
def test_zero_scatters_the_gradient_and_gathers_the_new_parameters(stage):
    run, step = adam_on_four(stage)
    found, size = measure.ledger(step, run.mesh), sizes(one_device.small())
    assert found.payload("reduce-scatter", "data") == size["cut"]
    assert found.payload("all-gather", "data") == size["cut"]
    assert found.payload("all-reduce", "data") - size["whole"] in METRICS


@pytest.mark.parametrize("again", [True, slow(False)])
def test_zero_three_gathers_kernels_for_each_pass_and_scatters_their_gradients_once(again):
    found, size = ledger_of_gradient(4, Strategy(zero=3, gather_again=again))
    # The backward pass needs the kernels again. Not the biases, nor the scales of norms, whose
    # products are kept.
    assert found.payload("all-gather", "data") == size["cut"] + again * size["kernels"]
    assert found.payload("reduce-scatter", "data") == size["cut"]
    assert found.payload("all-reduce", "data") - size["whole"] in METRICS


@pytest.mark.parametrize("scanned", [True, False])
def test_a_block_that_is_rematerialized_gathers_its_parameters_again_once(scanned):
    """Read before XLA sees it: on a CPU it merges equal gathers, on a GPU it does not."""
    whole = one_device.small(**{"model.remat": ("Block",), "model.scan_layers": scanned})
    grid, gathers = one_device.grid(data=2), []
    params = strategies.build(whole, grid, Strategy(zero=3)).abstract()[0].params
    for again in (True, False):
        grad_fn = strategies.gradient(whole, grid, Strategy(zero=3, gather_again=again))
        traced = jax.make_jaxpr(grad_fn)(params, one_device.batch(whole), jax.random.key(0))
        gathers.append(str(traced).count(" all_gather["))
    assert gathers[0] == gathers[1] > 0


@pytest.mark.parametrize(
    ("stage", "params", "moments"), [slow(0, 1, 1), slow(1, 1, 4), (2, 1, 4), slow(3, 4, 4)]
)
def test_a_device_holds_what_the_stage_leaves_it(stage, params, moments):
    run, step = adam_on_four(stage)
    state, batch = run.abstract()
    cut, whole, _ = sizes(one_device.small()).values()
    alone = jax.tree.leaves((state.step, state.opt_state))
    alone = 8 + sum(leaf.dtype.itemsize for leaf in alone if leaf.shape == ())  # 8: the key
    expected = cut // params + whole + 2 * (cut // moments + whole) + alone
    batch_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch))
    assert measure.memory(step).arguments == expected + batch_bytes // 4
