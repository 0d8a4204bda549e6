"""Laws of expert parallelism: the bytes it sends, and the places of the experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from jax.sharding import PartitionSpec as P
from slow_cases import slow

from course_lib import measure
from course_lib.many_devices import expert_parallel, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.models import routing

EXPERTS = {"model.num_experts": 8, "model.experts_per_token": 2, "model.capacity_factor": 1.0}
AXES = dict(data=2, expert=4)


def small(**changes):
    return one_device.small(**EXPERTS | changes)


@pytest.mark.parametrize("by", ["hand", slow("compiler")])
def test_tokens_travel_there_and_back_in_each_pass(by):
    whole = small()
    found = measure.ledger(*one_device.compiled(whole, AXES, Strategy(by=by)))
    room = routing.capacity(whole.data.seq_len, 8, 2, 1.0)
    sequences = whole.data.batch_size // 8  # of a device
    tokens = 4 * 8 * sequences * room * whole.model.hidden_size  # float32, for all experts
    assert found.payload("all-to-all", "expert") == 4 * whole.model.num_layers * tokens


def test_each_expert_runs_on_the_device_that_has_it():
    """Experts that multiply by their number: a token comes back multiplied by that of the
    expert it was sent to.
    """

    def run(tokens):
        first = jax.lax.axis_index("expert") * tokens.shape[0]
        return tokens * (first + jnp.arange(tokens.shape[0]))[:, None, None, None]

    draw = np.random.default_rng(0)
    tokens = draw.normal(size=(8, 4, 3, 5)).astype(np.float32)  # two sequences a device
    exchange, cut = functools.partial(expert_parallel.exchange, run), P(None, "expert")
    found = one_device.jit(
        jax.shard_map(exchange, mesh=one_device.grid(expert=2), in_specs=cut, out_specs=cut)
    )(tokens)
    np.testing.assert_allclose(found, tokens * np.arange(8.0)[:, None, None, None], rtol=1e-6)


def test_sequences_that_the_devices_cannot_share_are_refused_and_not_left_out():
    run = strategies.build(small(), one_device.grid(data=1, expert=4))
    six = jax.tree.map(lambda x: x[:6], one_device.batch(small()))
    with pytest.raises(ValueError, match=r"batch.shape\[0\]=6 must be .* the 4 devices"):
        jax.eval_shape(run.loss_fn, run.abstract()[0].params, six, None)
