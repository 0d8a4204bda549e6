"""Every strategy computes the gradient of one device."""

import functools

import jax
import numpy as np
import one_device
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import axis, meshes, strategies
from course_lib.many_devices.strategies import Strategy

BLOCK = {"model.remat": ("Block",)}
TOKENS = {"model.loss_along": "tokens", "model.loss_chunks": 2}
VOCABULARY = {"model.loss_along": "vocabulary", "model.loss_chunks": 4}
EXPERTS = {"model.num_experts": 8, "model.experts_per_token": 2, "model.capacity_factor": 1.0}
LOOP = {"training.accumulation": "loop"}
# These change how a gradient is computed, and not the gradient.
HOW = ("remat", "loss_along", "loss_chunks", "accumulation", "num_minibatches")


def minibatches(number):
    return {"training.num_minibatches": number}


# Ten programs meet every code path: one device cannot tell them from itself. The others add
# sizes and pairs.
CASES = [
    (dict(data=4), Strategy(zero=2), minibatches(2)),
    (dict(data=4), Strategy(zero=3), BLOCK),
    (dict(data=2, context=4), Strategy(zero=3), minibatches(2)),
    (dict(data=2, context=2, tensor=2), Strategy(zero=3), TOKENS),
    (dict(data=1, tensor=4), Strategy(sequence=True, overlap="one-way"), {}),
    (dict(data=2, tensor=4), Strategy(zero=3, sequence=True, overlap="two-way"), {}),
    slow(dict(data=2, tensor=2), Strategy(zero=3, sequence=True, gather_again=False), {}),
    (dict(data=1, pipe=2, tensor=2), Strategy(microbatches=2), VOCABULARY),
    (dict(data=2, expert=2), Strategy(zero=3), EXPERTS | minibatches(2)),
    (dict(data=2, tensor=2), Strategy(by="compiler", sequence=True), TOKENS),
    (
        dict(data=2, tensor=2),
        Strategy(zero=3, sequence=True, overlap="one-way"),
        one_device.LLAMA,
    ),
    slow(dict(data=1, pipe=2, tensor=2), Strategy(microbatches=2), one_device.UNTIED),
    slow(dict(data=2, tensor=2), Strategy(zero=2), one_device.LLAMA | VOCABULARY),
    slow(dict(data=2, tensor=2), Strategy(by="compiler", zero=3), one_device.LLAMA),
    slow(dict(data=2, context=2), Strategy(zero=1), one_device.LLAMA | BLOCK),
    slow(dict(data=2, expert=2), Strategy(zero=3), one_device.LLAMA | EXPERTS),
    slow(dict(data=8), Strategy(), {}),
    slow(dict(data=4), Strategy(zero=1), minibatches(2)),
    slow(dict(data=2), Strategy(zero=3), minibatches(2) | LOOP | {"model.scan_layers": False}),
    slow(dict(data=4), Strategy(zero=3), minibatches(2) | TOKENS),
    slow(dict(data=1, tensor=2), Strategy(), {}),
    slow(dict(data=1, tensor=8), Strategy(sequence=True), {}),
    slow(dict(data=2, tensor=4), Strategy(zero=1, sequence=True), minibatches(2) | VOCABULARY),
    slow(dict(data=1, context=8), Strategy(), {}),
    slow(dict(data=2, context=2, tensor=2), Strategy(zero=1), minibatches(2)),
    slow(dict(data=1, expert=8), Strategy(), EXPERTS),
    slow(dict(data=2, expert=2), Strategy(zero=3), EXPERTS | BLOCK | VOCABULARY),
    slow(dict(data=4), Strategy(by="compiler", zero=3), VOCABULARY),
    slow(dict(data=2, context=2, tensor=2), Strategy(by="compiler", zero=1), {}),
    slow(dict(data=2, expert=2), Strategy(by="compiler", zero=3), EXPERTS),
]


def name(value):
    if isinstance(value, dict):
        llama = ["llama"] * ("model.norm" in value)
        own = {field: new for field, new in value.items() if field not in one_device.LLAMA}
        return "-".join([*llama, *(f"{f.rpartition('.')[2]}{new}" for f, new in own.items())])
    return f"{value.by}-zero{value.zero}" + f"-{value.overlap}" * value.sequence


@pytest.mark.parametrize(("axes", "chosen", "changes"), CASES, ids=name)
def test_a_strategy_gives_the_gradient_of_one_device(axes, chosen, changes):
    """With experts, each has room for its even share of a sequence: some tokens are dropped."""
    alike = {field: new for field, new in changes.items() if field.split(".")[1] not in HOW}
    one_device.check_gradient(
        one_device.small(**changes), axes, chosen, one_device.small(**alike)
    )


# all sizes that three, five and six devices divide
ODD = {
    "model.hidden_size": 30,
    "model.num_heads": 30,
    "model.head_dim": 2,
    "model.num_layers": 2,
}
ODD |= {"model.vocab_size": 30, "model.num_outputs": 30, "model.max_seq_len": 30}
ODD |= {"data.seq_len": 30, "data.batch_size": 30}
BY_ALL = "hand", "compiler", *(["types"] * hasattr(jax, "reshard"))
ODD_DEGREES = [
    (dict(data=3), dict(zero=1)),
    (dict(data=5), dict(zero=3)),
    (dict(data=6), dict(zero=2)),
    (dict(data=1, tensor=3), dict()),
    (dict(data=1, tensor=5), dict(sequence=True)),
    (dict(data=1, tensor=6), dict()),
    (dict(data=3, tensor=2), dict(zero=3, sequence=True)),
]
# Those of the quick tests: other degrees meet no other code path.
QUICK = [("types", *ODD_DEGREES[1]), ("hand", *ODD_DEGREES[4])]
ODD_CASES = [
    case if case in QUICK else slow(*case)
    for case in ((by, *each) for by in BY_ALL for each in ODD_DEGREES)
]


@pytest.mark.parametrize(("by", "axes", "fields"), ODD_CASES, ids=str)
def test_by_hand_by_types_and_by_compiler_have_one_gradient_at_odd_degrees(by, axes, fields):
    one_device.check_gradient(one_device.small(**ODD), axes, Strategy(by=by, **fields))


ON_JAXS_MESH = [CASES[1], CASES[9], *(slow(*CASES[i]) for i in (0, 2, 3, 5, 7, 8))]


@pytest.mark.parametrize(("axes", "chosen", "changes"), ON_JAXS_MESH, ids=name)
def test_a_step_on_explicit_axes_has_the_bits_of_one_on_auto_axes(axes, chosen, changes):
    """Also where the mesh is the current one, and the batch lies on it."""
    whole, same, results = one_device.small(**changes), one_device.grid(**axes), []
    kinds = (AxisType.Explicit,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=same.devices.flat)
    for one in (same, mesh):
        with jax.set_mesh(one):
            run = strategies.build(whole, one, chosen)
            state = one_device.call(run.init, jax.random.key(0))
            batch = jax.device_put(one_device.batch(whole), NamedSharding(one, P("data")))
            step = run.train_step.lower(state, batch).compile()
            memory = measure.memory(step)
            state, metrics = step(state, batch)
            results.append(jax.device_get((state.params, state.opt_state, metrics)))
    assert {jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(state)} == {
        mesh.abstract_mesh
    }
    assert memory.aliased, "the new state does not overwrite the old one"
    for leaf, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(leaf, other)


def test_axes_of_two_types_are_refused():
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), kinds, devices=jax.devices("cpu")[:4])
    for refused in (strategies.build, strategies.gradient):
        with pytest.raises(ValueError, match="mesh must have axes of one type"):
            refused(one_device.small(), mesh)


@pytest.mark.parametrize(
    ("axes", "changes"), [(dict(data=2, context=2), {}), (dict(data=2, expert=4), EXPERTS)]
)
def test_evaluation_takes_each_whole_sequence_once_and_counts_the_balance(axes, changes):
    whole = one_device.small(**changes)
    params, _, metrics = one_device.reference(FrozenConfigDict(whole))
    loss_fn = strategies.build(whole, one_device.grid(**axes)).loss_fn
    found = training.evaluate(loss_fn, params, [one_device.batch(whole)])
    assert found == pytest.approx(training.mean_metrics(metrics), rel=1e-5)
    assert ("balance" in found) == bool(changes)


def test_parameters_start_from_the_same_numbers_on_every_mesh():
    whole = one_device.small()
    expected, _, _ = one_device.reference(FrozenConfigDict(whole))
    run = strategies.build(whole, one_device.grid(data=2, tensor=4), Strategy(zero=3))
    found = run.init(jax.random.key(0)).params
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def test_no_device_ever_holds_all_parameters_while_they_are_made():
    whole = one_device.small(**{"model.hidden_size": 64, "model.head_dim": 8})
    run = strategies.build(whole, one_device.grid(data=8), Strategy(zero=3))
    memory = measure.memory(run.init.lower(jax.random.key(0)).compile())
    all_of_it = measure.memory(training.build(whole).init.lower(jax.random.key(0)).compile())
    assert memory.outputs < all_of_it.outputs / 6
    assert memory.outputs + memory.temporaries < all_of_it.outputs / 2


# By the compiler a minibatch is a call of the gradient, in the train step's own loop; by hand
# the loop is the gradient's, which the cases above compare.
@pytest.mark.parametrize(("by", "num_minibatches"), [("hand", 1), slow("compiler", 2)])
def test_a_step_updates_parameters_as_one_device_does_also_where_the_gradient_is_clipped(
    by, num_minibatches
):
    whole = one_device.small(**{"optimizer.clip_norm": 0.1, "training.donate": False})
    whole.training.num_minibatches = num_minibatches
    chosen = Strategy(by=by, zero=2)
    mesh, states = one_device.grid(data=2, tensor=2), []
    for run in (training.build(whole), strategies.build(whole, mesh, chosen)):
        with jax.default_matmul_precision("highest"):
            before = one_device.call(run.init, jax.random.key(0))
            after, _ = one_device.call(run.train_step, before, one_device.batch(whole))
        states.append(jax.device_get((before.params, after.params)))
    moved, also = (jax.tree.map(lambda old, new: new - old, *pair) for pair in states)
    # An update is a difference of numbers near 1: float32 leaves it 6e-8 of these, not of
    # itself.
    for move, other in zip(jax.tree.leaves(moved), jax.tree.leaves(also), strict=True):
        np.testing.assert_allclose(other, move, atol=3e-7)
    assert max(abs(move).max() for move in jax.tree.leaves(moved)) > 1e-4


def test_the_compiler_drops_what_one_device_drops():
    whole = one_device.small(**{"model.dropout_rate": 0.5})
    run = strategies.build(whole, one_device.grid(data=2, tensor=2), Strategy(by="compiler"))
    params, batch = run.init(jax.random.key(0)).params, one_device.batch(whole)
    loss_fn, key = one_device.jit(run.loss_fn), jax.random.key(3)
    alone = one_device.jit(training.build(whole).loss_fn)(params, batch, key)[0]
    np.testing.assert_allclose(loss_fn(params, batch, key)[0], alone, rtol=1e-5)
    assert abs(alone - loss_fn(params, batch, jax.random.key(4))[0]) > 1e-3


def test_the_gradient_of_the_whole_loss_is_that_gradient_too():
    whole, chosen = one_device.small(), Strategy(zero=3, sequence=True)
    run = strategies.build(whole, one_device.grid(data=2, tensor=2), chosen)
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    loss = lambda params: run.loss_fn(params, one_device.batch(whole), None)[0]  # noqa: E731
    with jax.default_matmul_precision("highest"):
        grads = one_device.jit(jax.grad(loss))(params)
    assert not one_device.different_leaves(grads, expected)


def test_a_gradient_function_stays_that_of_the_configuration_it_was_made_from():
    whole = one_device.small()
    grad_fn = strategies.gradient(whole, one_device.grid(data=2))
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    whole.model.num_layers = 1
    grads, _ = jax.eval_shape(grad_fn, params, one_device.batch(whole), jax.random.key(2))
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, expected)


FLASH = {"model.attention": "flash", "model.num_heads": 2, "model.head_dim": 16}
FLASH |= {"model.hidden_size": 32, "model.max_seq_len": 128, "data.seq_len": 128}
ALONE, TWO = dict(data=2), dict(data=1, tensor=2)
BAD = [
    (dict(tensor=2), {}, {}, "must have an axis 'data'"),
    (TWO, dict(by="compiler"), FLASH, "attention='flash'"),
    (TWO, {}, {"model.flat_products": True}, "flat_products=True"),
    (ALONE, dict(sequence=True), {}, "sequence=True"),
    (TWO, dict(overlap="two-way"), {}, "overlap='two-way'"),
    (ALONE, dict(zero=3), {"model.remat": ("MLP", "Attn")}, "remat=.* gather_again=True"),
    (ALONE, dict(zero=2, gather_again=False), {}, "gather_again=False"),
    (ALONE, dict(by="compiler", zero=3, gather_again=False), {}, "gather_again=False"),
    (ALONE, dict(by="magic"), {}, "by='magic'"),
    (dict(data=3), {}, {}, "batch_size=8 must be a multiple of 3.* take 6 or 9"),
    (dict(data=4), {}, minibatches(4), "batch_size=8 must be a multiple of 16"),
    (dict(data=3), dict(zero=3), {"data.batch_size": 9}, r"shape\[1\]=16 must be .* the 3"),
    (dict(data=1, tensor=3), {}, {}, "num_heads=8 must .* take 6 or 9"),
    (dict(data=1, tensor=4), {}, {"model.mlp_size": 30}, "mlp_size=30 must .* take 28 or 32"),
    (dict(data=1, tensor=4), {}, {"model.num_kv_heads": 2}, "num_kv_heads=2 must .* 4"),
    (dict(data=1, tensor=8), dict(sequence=True), {"data.seq_len": 12}, "seq_len=12"),
    # chunks that a device cannot cut from its own logits
    (dict(data=1, tensor=4), {}, {"model.loss_chunks": 16}, "loss_chunks=16 .* take 8"),
    (dict(data=1, context=4), {}, TOKENS | {"model.loss_chunks": 8}, "loss_chunks=8 .* take 4"),
    (TWO, dict(by="compiler"), VOCABULARY, "loss_along='vocabulary' must not"),
    (dict(data=1, context=2), dict(by="compiler"), TOKENS, "loss_along='tokens' must not"),
    (TWO, {}, {"optimizer.name": "adamw", "optimizer.offload": True}, "optimizer.offload=True"),
]
TWELVE, RING = {"data.seq_len": 12}, dict(data=1, context=2)
CUDNN = {"model.attention": "cudnn", "model.dtype": "bfloat16"}
BAD += [
    (dict(data=1, context=4), {}, TWELVE, "seq_len=12 must be .* the 8 .* take 8 or 16"),
    (dict(data=1, context=8), dict(by="compiler"), TWELVE, "seq_len=12"),
    (RING | dict(pipe=2), {}, {}, "must not have both 'context' and 'pipe'"),
    (RING | dict(tensor=2), dict(sequence=True), {}, "sequence=True must not .* 'context'"),
    (RING, {}, {"model.attention": "xla"}, "attention='xla'"),
    (RING, {}, {"model.softmax_dtype": "bfloat16"}, "softmax_dtype='bfloat16'"),
    (RING, dict(by="compiler"), CUDNN, "attention='cudnn'"),
]
TWO_BY_FOUR = dict(data=2, expert=4)
BAD += [
    (axes, {}, EXPERTS | changes, message)
    for axes, changes, message in (
        (dict(data=1, expert=2), {"model.num_experts": 0}, "num_experts=0"),
        (dict(data=1, expert=3), {"data.batch_size": 9}, "num_experts=8 must .* take 6 or 9"),
        (TWO_BY_FOUR, {"data.batch_size": 4}, "batch_size gives 2 sequences .* multiple of 4"),
        (TWO_BY_FOUR, minibatches(2), "batch_size gives 2 .* multiple of 4"),
        (dict(data=1, expert=2, tensor=2), {}, "not divided along 'tensor'"),
        (dict(data=1, pipe=2), {}, "not divided along 'pipe'"),
        (dict(data=1, context=2), {}, "not divided along 'context'"),
    )
]
EIGHT, FOUR = {"model.num_layers": 8}, dict(data=1, pipe=4)
OFFLOAD = {"model.remat": ("MLP",), "model.remat_policy": "offload"}
OFFLOAD |= {"model.remat_names": ("mlp_hidden",)}
CHUNKS = {"schedule": "depth_first", "chunks": 2}
BAD += [
    (FOUR, chosen, EIGHT | changes, message)
    for changes, chosen, message in (
        ({"model.num_layers": 6}, {}, "num_layers=6 must be .* 4 stages, .* take 4 or 8"),
        ({"model.num_layers": 2}, {}, "num_layers=2 .* would have no layer; take 4"),
        ({}, {"schedule": "breadth_first", "chunks": 3}, "num_layers=8 must be .* 12 stages"),
        ({"model.scan_layers": False}, {}, "scan_layers=False"),
        ({"model.tied_embeddings": True}, {}, "tied_embeddings=True"),
        (OFFLOAD, {}, "remat_policy='offload'"),
        ({"training.accumulator_dtype": "bfloat16"}, {}, "accumulator_dtype='bfloat16'"),
        (minibatches(2), {}, "num_minibatches=2"),
        ({}, {"microbatches": 5}, "batch_size=8 must be a multiple of 5"),
        ({}, CHUNKS | {"microbatches": 2}, "microbatches=2 must be a multiple of the 4 stages"),
        ({}, {"zero": 2}, "zero=2"),
        ({}, {"by": "compiler"}, "by='compiler'"),
    )
]
RINGS = {"sequence": True, "overlap": "one-way"}
BAD += [
    (dict(data=1, pipe=2, tensor=2), RINGS, EIGHT, "overlap='one-way'"),
    (ALONE, {"microbatches": 4}, {}, "microbatches=4 must come with a mesh axis 'pipe'"),
]


@pytest.mark.parametrize(
    ("axes", "chosen", "changes", "message"), BAD, ids=lambda v: str(v)[:30]
)
def test_what_cannot_work_is_refused(axes, chosen, changes, message):
    for refused in (strategies.build, strategies.layout, strategies.gradient):
        with pytest.raises(ValueError, match=message):
            refused(one_device.small(**changes), one_device.grid(**axes), Strategy(**chosen))


def two_steps(run, whole):
    """Returns a run's compiled step, and parameters and moments after two of them."""
    state, batch = run.init(jax.random.key(0)), one_device.batch(whole)
    step = run.train_step.lower(state, batch).compile()
    for _ in range(2):
        state, _ = step(state, batch)
    return step, (state.params, state.opt_state)


@functools.cache
def two_steps_of_one_device(frozen):
    return two_steps(training.build(frozen), frozen)


ANY = [Strategy(zero=3, sequence=True), Strategy(by="compiler")]


@pytest.mark.parametrize("chosen", [Strategy(), *map(slow, ANY)], ids=str)
def test_on_a_mesh_of_one_device_any_strategy_takes_the_steps_of_one_device_bit_for_bit(chosen):
    """It has the same program, which takes the same memory and sends nothing."""
    changes = {"model.dropout_rate": 0.5, "optimizer.name": "adam"}
    whole = one_device.small(**changes, **minibatches(2))
    device = jax.devices("cpu")[3]
    run = strategies.build(whole, meshes.make({"data": 1}, [device]), chosen)
    step, state = two_steps(run, whole)
    same_step, expected = two_steps_of_one_device(FrozenConfigDict(whole))
    assert measure.memory(step) == measure.memory(same_step)
    assert not measure.ledger(step, run.mesh).entries
    assert {leaf.devices() == {device} for leaf in jax.tree.leaves(state)} == {True}
    for leaf, other in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.slow
def test_a_step_by_hand_draws_its_dropout_as_it_always_has():
    """A stored run goes on with the masks that it would have had: its key, as one of one
    minibatch, then the device's.
    """
    whole, grid = one_device.small(**{"model.dropout_rate": 0.5}), one_device.grid(data=2)
    run, batch = strategies.build(whole, grid), one_device.batch(whole)
    state = run.init(jax.random.key(0))
    key = jax.random.split(jax.random.split(state.rng)[1], 1)[0]
    grad_fn = one_device.jit(strategies.gradient(whole, grid))
    expected = grad_fn(state.params, batch, key)[1]
    _, metrics = run.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"][0], expected["loss"][0], rtol=1e-5)


def test_an_axis_that_no_strategy_uses_is_refused():
    whole = jax.sharding.AbstractMesh((2,) * 5, meshes.AXES)
    assert tuple(each.name for each in axis.used(whole)) == meshes.AXES
    grid = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]).reshape(1, 2), ("data", "rows"))
    with pytest.raises(ValueError, match="{'rows'} would do nothing"):
        strategies.build(one_device.small(), grid)
