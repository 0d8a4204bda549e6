"""Laws of expert parallelism: the bytes it sends, and the places of the experts."""

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
from course_lib.many_devices import expert_parallel, meshes, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import virtual
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


COUNTS = {
    "mixed": [[2, 0, 3], [1, 1, 1], [0, 4, 2]],
    "all to one": [[0, 6, 0], [0, 6, 0], [0, 6, 0]],
    "nothing to the last": [[3, 1, 0], [0, 0, 0], [6, 0, 0]],
}


def ragged_all_to_all(rows, room, begin, sizes, lands, arrive, *, axis_name):
    """Does what the operation of this name does, which XLA has not for CPUs."""
    me = jax.lax.axis_index(axis_name)
    senders = [jax.lax.all_gather(x, axis_name) for x in (rows, begin, sizes, lands)]
    for i in range(len(sizes)):  # senders
        rows, begins, counts, places = (x[i] for x in senders)
        place = jnp.arange(len(room)) - places[me]
        here = (0 <= place) & (place < counts[me]) & (counts[me] == arrive[i])
        room = jnp.where(here[:, None], rows[(begins[me] + place) % len(rows)], room)
    return room


@pytest.mark.parametrize("branch", ["cpu", "default"])
@pytest.mark.parametrize("name", COUNTS)
def test_rows_travel_as_a_ragged_all_to_all_is_defined(name, branch, monkeypatch):
    """Sender i's rows for j begin at what i has for those before j, and arrive behind the rows
    of the senders before i. Both branches: that of CPUs, and that of GPUs by an emulation of
    their operation.
    """
    choose = {
        "cpu": lambda x, cpu, default: cpu(x),
        "default": lambda x, cpu, default: default(x),
    }
    monkeypatch.setattr(jax.lax, "platform_dependent", choose[branch])
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    counts = np.array(COUNTS[name])
    rows = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    expected = np.zeros((3, 18, 2), np.float32)
    for i in range(3):
        for j in range(3):
            begin, arrive = counts[i, :j].sum(), counts[:i, j].sum()
            sent = rows[i, begin : begin + counts[i, j]]
            expected[j, arrive : arrive + counts[i, j]] = sent
    cut, mesh = P("expert"), one_device.grid(expert=3)

    def send(rows):
        return expert_parallel.travel(rows, jnp.asarray(counts), 18)

    sending = one_device.jit(jax.shard_map(send, mesh=mesh, in_specs=cut, out_specs=cut))
    found = sending(rows.reshape(18, 2))
    np.testing.assert_array_equal(found.reshape(3, 18, 2), expected)


DROPLESS = {"model.dropless": True}


@pytest.mark.parametrize("axes", [AXES, dict(data=1, expert=8), slow(dict(data=4, expert=2))])
def test_dropless_experts_on_devices_have_the_gradient_of_one_device_with_room_for_all(axes):
    room_for_all = small(**{"model.capacity_factor": 4.0})
    one_device.check_gradient(small(**DROPLESS), axes, Strategy(), alike=room_for_all)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [3, 5, 6])
def test_odd_numbers_of_devices_have_the_same_gradient(experts):
    sizes = {"model.num_experts": experts, "data.batch_size": experts}
    room_for_all = small(**sizes | {"model.capacity_factor": experts / 2})
    axes = dict(data=1, expert=experts)
    one_device.check_gradient(small(**sizes | DROPLESS), axes, Strategy(), alike=room_for_all)


@pytest.mark.parametrize("popular", [0, 7])
def test_a_popular_expert_drops_no_row_on_devices_either(popular):
    whole, mesh = small(**DROPLESS, **{"model.experts_per_token": 1}), one_device.grid(**AXES)
    loss = strategies.build(whole, mesh).loss_fn
    params, *_ = one_device.reference(FrozenConfigDict(whole))
    mlp = params["block"]["mlp"]
    router = np.zeros_like(mlp["router"])
    router[:, :, popular] = mlp["router"][:, :, popular]
    norm = {"scale": 0 * mlp["pre_norm"]["scale"], "bias": router[:, :, popular]}
    params = {**params, "block": {**params["block"], "mlp": {**mlp, "router": router}}}
    params["block"]["mlp"]["pre_norm"] = norm  # every token meets the same router logits
    found = one_device.jit(loss)(params, one_device.batch(whole), None)[0]
    alone = training.build(whole).loss_fn
    np.testing.assert_allclose(
        found, one_device.jit(alone)(params, one_device.batch(whole), None)[0], rtol=1e-5
    )


@one_device.needs_h100
def test_on_gpus_unequal_groups_of_rows_travel_in_arrays_for_the_worst_case():
    """Out of an array with a device's R rows into one with room for those of all n devices, and
    back; the ledger counts the sender's array.
    """
    whole, n = small(**DROPLESS), 4
    mesh = meshes.make(dict(data=1, expert=n), virtual.devices("h100", n))
    state, batch = strategies.build(whole, mesh).abstract()
    gradient = jax.jit(strategies.gradient(whole, mesh, Strategy()))
    compiled = virtual.compile(gradient.lower(state.params, batch, jax.random.key(0)))
    rows = 2 * whole.data.batch_size // n * whole.data.seq_len  # two experts for each token
    of_pass = (1 + n) * 4 * rows * whole.model.hidden_size  # float32
    found = measure.ledger(compiled, mesh).payload("ragged-all-to-all", "expert")
    assert found == 2 * whole.model.num_layers * of_pass


def test_a_compiler_does_not_divide_dropless_experts():
    with pytest.raises(ValueError, match="by='compiler' must be 'hand' for dropless=True"):
        strategies.build(small(**DROPLESS), one_device.grid(**AXES), Strategy(by="compiler"))


def test_sequences_that_the_devices_cannot_share_are_refused_and_not_left_out():
    run = strategies.build(small(), one_device.grid(data=1, expert=4))
    six = jax.tree.map(lambda x: x[:6], one_device.batch(small()))
    with pytest.raises(ValueError, match=r"batch.shape\[0\]=6 must be .* the 4 devices"):
        jax.eval_shape(run.loss_fn, run.abstract()[0].params, six, None)
