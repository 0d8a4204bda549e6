"""Laws of expert parallelism: the bytes it sends, and the places of the experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict

from course_lib import measure, training
from course_lib.many_devices import expert_parallel, options, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.models import routing

WITH_EXPERTS = {
    "model.num_experts": 8,
    "model.experts_per_token": 2,
    "model.capacity_factor": 1.0,
}
AXES = dict(data=2, expert=4)


@functools.cache
def ledger(by):
    whole, grid = one_device.small(**WITH_EXPERTS), one_device.grid(**AXES)
    state, batch = strategies.build(whole, grid, Strategy(by=by)).abstract()
    grad_fn = one_device.jit(strategies.gradient(whole, grid, Strategy(by=by)))
    return measure.ledger(grad_fn.lower(state.params, batch, jax.random.key(0)).compile(), grid)


@pytest.mark.parametrize("by", options.BY)
def test_tokens_travel_there_and_back_in_each_pass(by):
    whole = one_device.small(**WITH_EXPERTS)
    room = routing.capacity(whole.data.seq_len, 8, 2, 1.0)
    sequences = whole.data.batch_size // 8  # of a device
    tokens = 4 * 8 * sequences * room * whole.model.hidden_size  # float32, for all experts
    assert ledger(by).payload("all-to-all", "expert") == 4 * whole.model.num_layers * tokens


def test_the_gradient_of_an_expert_is_summed_over_data_only():
    params, _, _ = one_device.reference(FrozenConfigDict(one_device.small(**WITH_EXPERTS)))
    mlp = params["block"]["mlp"]
    of_experts = sum(
        leaf.nbytes for leaf in jax.tree.leaves((mlp["expert_in"], mlp["expert_out"]))
    )
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - of_experts
    # loss, accuracy and balance as (sum, count); XLA may send their equal counts once
    metrics = (16, 24)
    assert ledger("hand").payload("all-reduce", "expert") - rest in metrics
    assert ledger("hand").payload("all-reduce", "data") - rest - of_experts // 4 in metrics


def test_a_device_holds_its_share_of_the_experts_and_all_of_the_rest():
    whole = one_device.small(**WITH_EXPERTS)
    state, _ = strategies.build(whole, one_device.grid(**AXES)).abstract()
    held = {
        jax.tree_util.keystr(path): leaf.size / np.prod(leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    assert {share for name, share in held.items() if "expert_" in name} == {4}
    assert {share for name, share in held.items() if "expert_" not in name} == {1}


def test_each_expert_runs_on_the_device_that_has_it():
    """Experts that multiply by their number: a token comes back multiplied by that of the
    expert it was sent to.
    """

    def run(tokens):
        first = jax.lax.axis_index("expert") * tokens.shape[0]
        return tokens * (first + jnp.arange(tokens.shape[0]))[:, None, None, None]

    tokens = jax.random.normal(jax.random.key(0), (8, 4, 3, 5))  # two sequences a device
    exchange = functools.partial(expert_parallel.exchange, run)
    cut = P(None, "expert")
    found = one_device.jit(
        jax.shard_map(exchange, mesh=one_device.grid(expert=2), in_specs=cut, out_specs=cut)
    )(tokens)
    np.testing.assert_allclose(found, tokens * np.arange(8.0)[:, None, None, None], rtol=1e-6)


def test_devices_take_their_own_sequences():
    own = jax.shard_map(
        expert_parallel.own_sequences,
        mesh=one_device.grid(expert=4),
        in_specs=P(),
        out_specs=P("expert"),
    )
    np.testing.assert_array_equal(
        one_device.jit(own)(jnp.arange(24).reshape(8, 3)), np.arange(24).reshape(8, 3)
    )


def test_evaluation_counts_the_balance_too():
    whole = one_device.small(**WITH_EXPERTS)
    params, _, metrics = one_device.reference(FrozenConfigDict(whole))
    found = training.evaluate(
        strategies.build(whole, one_device.grid(**AXES)).loss_fn,
        params,
        [one_device.batch(whole)],
    )
    assert found == pytest.approx(training.mean_metrics(metrics), rel=1e-5)
    assert found["balance"] > 1


@pytest.mark.parametrize(
    ("axes", "changes", "message"),
    [
        (
            dict(data=1, expert=2),
            {"model.num_experts": 0},
            r"num_experts=0 means .* the 2 devices of a mesh axis 'expert'",
        ),
        (
            dict(data=1, expert=3),
            {"data.batch_size": 9},
            "num_experts=8 must .* take 6 or 9",
        ),
        (
            dict(data=2, expert=4),
            {"data.batch_size": 4},
            r"batch_size gives 2 sequences .* must give a multiple of 4",
        ),
        (
            dict(data=2, expert=4),
            {"training.num_minibatches": 2},
            r"batch_size gives 2 .* must give a multiple of 4",
        ),
        (
            dict(data=1, expert=2, tensor=2),
            {},
            r"must have no other axes than 'data' and 'expert' .* not divided along 'tensor'",
        ),
        (dict(data=1, pipe=2), {}, r"experts are not divided along 'pipe'"),
        (dict(data=1, context=2), {}, r"experts are not divided along 'context'"),
    ],
)
def test_what_cannot_work_is_refused(axes, changes, message):
    with pytest.raises(ValueError, match=message):
        strategies.build(
            one_device.small(**{**WITH_EXPERTS, **changes}), one_device.grid(**axes)
        )


def test_sequences_that_the_devices_cannot_share_are_refused_and_not_left_out():
    run = strategies.build(
        one_device.small(**WITH_EXPERTS), one_device.grid(data=1, expert=4), Strategy()
    )
    six = jax.tree.map(lambda x: x[:6], one_device.batch(one_device.small()))
    with pytest.raises(
        ValueError, match="batch of shape .* must have a dimension 0 that the 4 devices"
    ):
        jax.eval_shape(run.loss_fn, run.abstract()[0].params, six, None)
