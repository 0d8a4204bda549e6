"""Every strategy computes the gradient of one device."""

import functools

import jax
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import axis, meshes, options, strategies
from course_lib.many_devices.strategies import Strategy

STAGES = (0, 1, 2, 3)


def cases():
    """Returns (axes, strategy, number of minibatches): each stage, the smallest and the largest
    degree, and the main pairs, not their product.

    A mesh of one device has its own test below. The compiler's gradient has one minibatch: the
    train step calls it once per minibatch, as the test of a step shows.
    """
    for by in options.BY:
        few = 2 if by == "hand" else 1
        # the compiler's own code is the same for every degree
        degrees = (2, 8) if by == "hand" else (2,)
        yield from ((dict(data=n), Strategy(by=by), 1) for n in degrees)
        # each stage, by hand also where it adds minibatches
        yield from (
            (dict(data=4), Strategy(by=by, zero=stage), few)
            for stage in (STAGES if by == "hand" else STAGES[1:])
        )
        # whole residuals, and parts of the sequence
        yield dict(data=1, tensor=2), Strategy(by=by), 1
        yield from (
            (dict(data=1, tensor=n), Strategy(by=by, sequence=True), 1) for n in degrees
        )
        # the optimizer's slices beside those of tensors; the parameters' are below
        yield dict(data=2, tensor=4), Strategy(by=by, zero=1, sequence=True), 1
        yield dict(data=4, tensor=2), Strategy(by=by, zero=3), few
        yield from ((dict(data=1, context=n), Strategy(by=by), 1) for n in degrees)
        yield dict(data=2, context=2, tensor=2), Strategy(by=by, zero=1), few
        yield dict(data=2, context=4), Strategy(by=by, zero=3), few
    yield dict(data=1, tensor=4), Strategy(sequence=True, overlap="one-way"), 1
    yield dict(data=2, tensor=4), Strategy(zero=3, sequence=True, overlap="two-way"), 1


# With the quick cases below (experts, rematerialization, a loss in chunks, a pipeline, the
# compiler) these meet every code path once; `make test-all` runs the other sizes and pairs.
QUICK = (
    (dict(data=4), Strategy(zero=2), 2),
    (dict(data=2, context=4), Strategy(zero=3), 2),
    (dict(data=1, tensor=4), Strategy(sequence=True, overlap="one-way"), 1),
    (dict(data=2, tensor=4), Strategy(zero=3, sequence=True, overlap="two-way"), 1),
)


def slow_or_not(case):
    return case if case in QUICK else slow(*case)


EXPERTS = {"model.num_experts": 8, "model.experts_per_token": 2, "model.capacity_factor": 1.0}


def cases_with_experts():
    """As `cases`. Each expert has room for its even share of a sequence, so some tokens are
    dropped.
    """
    for by in options.BY:
        for n in (2, 8) if by == "hand" else (2,):
            yield slow(dict(data=1, expert=n), Strategy(by=by), 1)
    yield dict(data=2, expert=2), Strategy(zero=3), 2
    yield slow(dict(data=2, expert=2), Strategy(by="compiler", zero=3), 1)
    yield slow(dict(data=4), Strategy(), 1)
    yield slow(dict(data=2, expert=4), Strategy(zero=1), 1)
    yield slow(dict(data=2, expert=2), Strategy(zero=2), 2)


def name(value):
    if isinstance(value, dict):
        return "x".join(f"{axis}{size}" for axis, size in value.items())
    if isinstance(value, Strategy):
        return f"{value.by}-zero{value.zero}" + f"-{value.overlap}" * value.sequence
    return str(value)


def same_as_one_device(axes, chosen, num_minibatches, **changes):
    """Compares gradient and metrics of a strategy with those of one device, from its
    parameters.
    """
    whole = one_device.small(**changes)
    reference = one_device.reference(FrozenConfigDict(whole))
    same_as(reference, whole, axes, chosen, num_minibatches)


def same_as(reference, whole, axes, chosen, num_minibatches):
    params, expected, expected_metrics = reference
    whole.training.num_minibatches = num_minibatches
    with jax.default_matmul_precision("highest"):
        grad_fn = one_device.jit(strategies.gradient(whole, one_device.grid(**axes), chosen))
        grads, metrics = grad_fn(params, one_device.batch(whole), jax.random.key(2))
    assert not one_device.different_leaves(grads, expected)
    assert training.mean_metrics(metrics) == pytest.approx(
        training.mean_metrics(expected_metrics), rel=1e-5
    )


@pytest.mark.parametrize(
    ("axes", "chosen", "num_minibatches"), [*map(slow_or_not, cases())], ids=name
)
def test_a_strategy_gives_the_gradient_of_one_device(axes, chosen, num_minibatches):
    same_as_one_device(axes, chosen, num_minibatches)


@pytest.mark.parametrize(
    ("axes", "chosen", "num_minibatches"), list(cases_with_experts()), ids=name
)
def test_with_experts_too(axes, chosen, num_minibatches):
    same_as_one_device(axes, chosen, num_minibatches, **EXPERTS)


@pytest.mark.slow
def test_along_the_context_a_model_may_have_rotary_positions_and_grouped_queries():
    later = {
        "model.positions": "rotary",
        "model.num_kv_heads": 2,
        "model.num_heads": 4,
        "model.head_dim": 4,
    }
    same_as_one_device(dict(data=1, context=4), Strategy(), 1, **later)


@pytest.mark.parametrize(
    ("axes", "chosen", "num_minibatches", "changes"),
    [
        (dict(data=4), Strategy(zero=3), 1, {"model.remat": ("Block",)}),
        slow(
            dict(data=2),
            Strategy(zero=3, gather_again=False),
            2,
            {"model.remat": ("MLP", "Attn")},
        ),
        (dict(data=2, tensor=2), Strategy(zero=3, gather_again=False, sequence=True), 1, {}),
        slow(dict(data=2), Strategy(zero=1), 2, {"training.accumulation": "loop"}),
        slow(
            dict(data=2),
            Strategy(zero=3),
            2,
            {"training.accumulation": "loop", "model.scan_layers": False},
        ),
    ],
    ids=str,
)
def test_what_is_computed_or_gathered_again_and_how_minibatches_are_added_changes_no_gradient(
    axes, chosen, num_minibatches, changes
):
    same_as_one_device(axes, chosen, num_minibatches, **changes)


LOSS = {"vocabulary": 4, "tokens": 2}
"""Chunks along each dimension; four devices along "tensor" have eight columns each."""


@pytest.mark.parametrize(
    ("axes", "chosen", "num_minibatches", "along"),
    [
        slow(dict(data=1), Strategy(), 2, "vocabulary"),
        slow(dict(data=1), Strategy(), 1, "tokens"),
        slow(dict(data=4), Strategy(), 2, "tokens"),
        slow(dict(data=4), Strategy(zero=2), 2, "vocabulary"),
        slow(dict(data=4), Strategy(zero=3), 2, "tokens"),
        slow(dict(data=4), Strategy(by="compiler", zero=3), 1, "vocabulary"),
        (dict(data=2, tensor=2), Strategy(by="compiler", sequence=True), 1, "tokens"),
        slow(dict(data=2, tensor=4), Strategy(zero=1, sequence=True), 2, "vocabulary"),
        slow(
            dict(data=1, tensor=4), Strategy(sequence=True, overlap="one-way"), 1, "vocabulary"
        ),
        (dict(data=2, context=2, tensor=2), Strategy(zero=3), 1, "tokens"),
        (dict(data=1, pipe=2, tensor=2), Strategy(microbatches=2), 1, "vocabulary"),
        slow(dict(data=1, pipe=2), Strategy(microbatches=2), 1, "tokens"),
    ],
    ids=name,
)
def test_a_loss_in_chunks_gives_the_gradient_of_all_logits(
    axes, chosen, num_minibatches, along
):
    whole = one_device.small()
    reference = one_device.reference(FrozenConfigDict(whole))
    whole.model.update(loss_chunks=LOSS[along], loss_along=along)
    same_as(reference, whole, axes, chosen, num_minibatches)


@pytest.mark.slow
def test_a_loss_in_chunks_gives_the_gradient_of_all_logits_with_experts_and_remat():
    changes = EXPERTS | {"model.remat": ("Block",), "model.use_bias": False}
    whole = one_device.small(**changes)
    reference = one_device.reference(FrozenConfigDict(whole))
    whole.model.update(loss_chunks=8)
    same_as(reference, whole, dict(data=2, expert=2), Strategy(zero=3), 1)


@pytest.mark.parametrize(
    ("axes", "by", "changes", "message"),
    [
        (dict(tensor=4), "hand", dict(loss_chunks=16), "loss_chunks=16 .* 8 columns .* take 8"),
        (
            dict(context=4),
            "hand",
            dict(loss_chunks=8, loss_along="tokens"),
            "loss_chunks=8 .* 4 tokens .* take 4",
        ),
        (dict(tensor=4), "compiler", dict(loss_chunks=2), "loss_along='vocabulary' must not"),
        (
            dict(context=4),
            "compiler",
            dict(loss_chunks=2, loss_along="tokens"),
            "loss_along='tokens' must not .*'vocabulary'",
        ),
    ],
)
def test_chunks_that_a_device_cannot_cut_from_its_own_logits_are_refused(
    axes, by, changes, message
):
    whole = one_device.small()
    whole.model.update(changes)
    with pytest.raises(ValueError, match=message):
        strategies.build(whole, one_device.grid(data=1, **axes), Strategy(by=by))


def test_parameters_start_from_the_same_numbers_on_every_mesh():
    whole = one_device.small()
    expected, _, _ = one_device.reference(FrozenConfigDict(whole))
    state = strategies.build(whole, one_device.grid(data=2, tensor=4), Strategy(zero=3)).init(
        jax.random.key(0)
    )
    for leaf, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)


def test_no_device_ever_holds_all_parameters_while_they_are_made():
    whole = one_device.small(**{"model.hidden_size": 64, "model.head_dim": 8})
    run = strategies.build(whole, one_device.grid(data=8), Strategy(zero=3))
    memory = measure.memory(run.init.lower(jax.random.key(0)).compile())
    all_of_it = measure.memory(training.build(whole).init.lower(jax.random.key(0)).compile())
    assert memory.outputs < all_of_it.outputs / 6
    assert memory.outputs + memory.temporaries < all_of_it.outputs / 2


@functools.cache
def clipped_on_one_device(frozen):
    """Returns one device's parameters before and after a step."""
    single = training.build(frozen)
    with jax.default_matmul_precision("highest"):
        before = one_device.call(single.init, jax.random.key(0))
        after, _ = one_device.call(single.train_step, before, one_device.batch(frozen))
    return jax.device_get((before.params, after.params))


# By the compiler a minibatch is a call of the gradient, in the train step's own loop; by hand
# the loop is the gradient's, which the cases above compare.
@pytest.mark.parametrize(("by", "num_minibatches"), [("hand", 1), slow("compiler", 2)])
def test_a_step_updates_parameters_as_one_device_does_also_where_the_gradient_is_clipped(
    by, num_minibatches
):
    whole = one_device.small(**{"optimizer.clip_norm": 0.1, "training.donate": False})
    before, after = clipped_on_one_device(FrozenConfigDict(whole))
    whole.training.num_minibatches = num_minibatches
    run = strategies.build(whole, one_device.grid(data=2, tensor=2), Strategy(by=by, zero=2))
    batch = one_device.batch(whole)
    with jax.default_matmul_precision("highest"):
        found, _ = one_device.call(
            run.train_step, one_device.call(run.init, jax.random.key(0)), batch
        )
    found = jax.device_get(found.params)
    moved = jax.tree.map(lambda new, old: new - old, after, before)
    also = jax.tree.map(lambda new, old: new - old, found, before)
    # An update is a difference of numbers near 1: float32 leaves it 6e-8 of these, not of
    # itself.
    for move, other in zip(jax.tree.leaves(moved), jax.tree.leaves(also), strict=True):
        np.testing.assert_allclose(other, move, atol=3e-7)
    assert max(abs(move).max() for move in jax.tree.leaves(moved)) > 1e-4


def test_the_compiler_drops_what_one_device_drops():
    whole = one_device.small(**{"model.dropout_rate": 0.5})
    run = strategies.build(whole, one_device.grid(data=2, tensor=2), Strategy(by="compiler"))
    params, batch, rng = (
        run.init(jax.random.key(0)).params,
        one_device.batch(whole),
        jax.random.key(3),
    )
    loss_fn = one_device.jit(run.loss_fn)
    alone = one_device.jit(training.build(whole).loss_fn)(params, batch, rng)[0]
    np.testing.assert_allclose(loss_fn(params, batch, rng)[0], alone, rtol=1e-5)
    assert abs(alone - loss_fn(params, batch, jax.random.key(4))[0]) > 1e-3


def test_the_gradient_of_the_whole_loss_is_that_gradient_too():
    whole = one_device.small()
    chosen = Strategy(zero=3, sequence=True)
    run = strategies.build(whole, one_device.grid(data=2, tensor=2), chosen)
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    with jax.default_matmul_precision("highest"):
        grads = one_device.jit(
            jax.grad(lambda params: run.loss_fn(params, one_device.batch(whole), None)[0])
        )(params)
    assert not one_device.different_leaves(grads, expected)


def test_a_gradient_function_stays_that_of_the_configuration_it_was_made_from():
    whole = one_device.small()
    grad_fn = strategies.gradient(whole, one_device.grid(data=2))
    params, expected, _ = one_device.reference(FrozenConfigDict(whole))
    whole.model.num_layers = 1
    grads, _ = jax.eval_shape(grad_fn, params, one_device.batch(whole), jax.random.key(2))
    assert jax.tree.map(np.shape, grads) == jax.tree.map(np.shape, expected)


@pytest.mark.parametrize(
    ("axes", "chosen", "changes", "message"),
    [
        (
            dict(data=1, tensor=2),
            Strategy(by="compiler"),
            {
                "model.attention": "flash",
                "model.hidden_size": 32,
                "model.num_heads": 2,
                "model.head_dim": 16,
                "model.max_seq_len": 128,
                "data.seq_len": 128,
            },
            r"attention='flash' must be 'reference' or 'xla' on several devices",
        ),
        (dict(tensor=2), Strategy(), {}, r"must have an axis 'data'; give it size 1"),
        (
            dict(data=1, tensor=2),
            Strategy(),
            {"model.flat_products": True},
            "flat_products=True must be False with a mesh axis 'tensor' by hand",
        ),
        (
            dict(data=2),
            Strategy(sequence=True),
            {},
            r"sequence=True must come with a mesh axis 'tensor'",
        ),
        (
            dict(data=1, tensor=2),
            Strategy(overlap="two-way"),
            {},
            r"overlap='two-way' must come with sequence=True",
        ),
        (
            dict(data=2),
            Strategy(zero=3),
            {"model.remat": ("MLP", "Attn")},
            r"remat=.* must be .* with gather_again=True",
        ),
        (
            dict(data=2),
            Strategy(zero=2, gather_again=False),
            {},
            r"gather_again=False must come with zero=3 and by='hand'",
        ),
        (
            dict(data=2),
            Strategy(by="compiler", zero=3, gather_again=False),
            {},
            r"gather_again=False must come with zero=3",
        ),
        (
            dict(data=2),
            Strategy(),
            {"training.num_minibatches": 0},
            r"num_minibatches=0 must be positive",
        ),
        (
            dict(data=3),
            Strategy(),
            {},
            r"batch_size=8 must be a multiple of 3: 3 devices .* take 6 or 9",
        ),
        (
            dict(data=4),
            Strategy(),
            {"training.num_minibatches": 4},
            r"of 16: 4 devices .* x 4 minibatches x 1 micro",
        ),
        (
            dict(data=3),
            Strategy(zero=3),
            {"data.batch_size": 9},
            r"must have a dimension 1 that the 3 devices",
        ),
        (dict(data=1, tensor=3), Strategy(), {}, "num_heads=8 must .* take 6 or 9"),
        (
            dict(data=1, tensor=8),
            Strategy(sequence=True),
            {"data.seq_len": 12},
            "seq_len=12 must .* take 8 or 16",
        ),
    ],
)
def test_what_cannot_work_is_refused(axes, chosen, changes, message):
    with pytest.raises(ValueError, match=message):
        strategies.build(one_device.small(**changes), one_device.grid(**axes), chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        Strategy(),
        slow(Strategy(zero=3, sequence=True)),
        slow(Strategy(by="compiler")),
        slow(Strategy(microbatches=4, chunks=2)),
    ],
    ids=str,
)
def test_on_a_mesh_of_one_device_any_strategy_takes_the_steps_of_one_device_bit_for_bit(chosen):
    """It has the same program, which takes the same memory and sends nothing."""
    whole = one_device.small(
        **{"model.dropout_rate": 0.5, "training.num_minibatches": 2, "optimizer.name": "adam"}
    )
    device = jax.devices("cpu")[3]
    run = strategies.build(whole, meshes.make({"data": 1}, [device]), chosen)
    step, state = two_steps(run, whole)
    same_step, expected = two_steps_of_one_device(FrozenConfigDict(whole))
    assert measure.memory(step) == measure.memory(same_step)
    assert not measure.ledger(step, run.mesh).entries
    assert {leaf.devices() == {device} for leaf in jax.tree.leaves(state)} == {True}
    for leaf, other in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_array_equal(leaf, other)


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


@pytest.mark.slow
def test_a_step_by_hand_draws_its_dropout_as_it_always_has():
    """A stored run goes on with the masks that it would have had: its key, as one of one
    minibatch, then the device's.
    """
    whole, grid = one_device.small(**{"model.dropout_rate": 0.5}), one_device.grid(data=2)
    run, batch = strategies.build(whole, grid), one_device.batch(whole)
    state = run.init(jax.random.key(0))
    step_rng = jax.random.split(state.rng)[1]
    expected = one_device.jit(strategies.gradient(whole, grid))(
        state.params, batch, jax.random.split(step_rng, 1)[0]
    )[1]
    _, metrics = run.train_step(state, batch)
    np.testing.assert_allclose(metrics["loss"][0], expected["loss"][0], rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("by", "magic", r"must be one of \('hand', 'compiler'\)"),
        ("zero", 4, r"must be one of \(0, 1, 2, 3\)"),
        ("zero", True, "must be of type int"),
        ("sequence", "no", "must be of type bool"),
        ("microbatches", 1.5, "must be of type int"),
        ("schedule", "nonsense", "must be one of"),
        ("overlap", "ring", "must be one of"),
        ("chunks", 0, "must be at least 1"),
        ("microbatches", -3, "must be at least 1"),
    ],
)
def test_a_strategy_that_does_not_exist_is_refused(field, value, message):
    strategy = Strategy()
    object.__setattr__(strategy, field, value)  # the tests' checks of types are in __init__
    with pytest.raises(ValueError, match=f"{field}={value!r} {message}"):
        strategy.__post_init__()


def test_an_axis_that_no_strategy_uses_is_refused():
    grid = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]).reshape(1, 2), ("data", "rows"))
    with pytest.raises(
        ValueError, match=r"must have axes of .* only: {'rows'} would do nothing"
    ):
        strategies.build(one_device.small(), grid)


def test_each_axis_of_a_mesh_has_its_strategy():
    grid = jax.sharding.AbstractMesh((2,) * 5, meshes.AXES)
    assert tuple(each.name for each in axis.used(grid)) == meshes.AXES
