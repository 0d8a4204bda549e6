"""Laws of the losses, the train step, and a run built from a configuration."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from course_lib import configs, training
from course_lib.models.mlp import MLPClassifier
from course_lib.one_device import buffer_donation, mixed_precision
from course_lib.text.data import Batch

CLASSES, WIDTH, EXAMPLES = 7, 16, 24


def apply_fn(params, inputs, rng=None):
    """A model is a function of its parameters, from wherever it comes; without a key it has no
    dropout.
    """
    x = jnp.tanh(inputs @ params["hidden"])
    if rng is not None:
        x = jnp.where(jax.random.bernoulli(rng, 0.9, x.shape), x, 0)
    return x @ params["output"]


LOSS_FN = training.classification_loss(apply_fn)
WITHOUT_DROPOUT = training.classification_loss(lambda params, x, rng: apply_fn(params, x))
SGD, ADAM = optax.sgd(0.1), optax.adam(1e-2)


def example_batch(weights=None, scale=1.0):
    draw = np.random.default_rng(1)
    inputs = jnp.asarray(scale * draw.normal(size=(EXAMPLES, WIDTH)), jnp.float32)
    labels = jnp.asarray(draw.integers(0, CLASSES, EXAMPLES, np.int32))
    weights = np.ones(EXAMPLES) if weights is None else weights
    return Batch(inputs, labels, jnp.asarray(weights, jnp.float32))


def example_state(optimizer, loss_scale=None):
    draw = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)) / WIDTH**0.5
    hidden, output = jnp.asarray(draw, jnp.float32)
    params = {"hidden": hidden, "output": output[:, :CLASSES]}
    return training.init_state(params, optimizer, jax.random.key(3), loss_scale)


# tests that ask for the same step share its compilation; not donated, so that states can be
# compared
@functools.cache
def train_step(loss_fn, optimizer, **options):
    return training.make_train_step(loss_fn, optimizer, donate=False, **options)


def assert_trees_close(tree, expected, tolerance):
    for leaf, want in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(leaf - want) <= tolerance * np.linalg.norm(want) + 1e-9


def same(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


# Losses and metrics.


def test_the_loss_is_the_weighted_mean_of_the_cross_entropy_by_hand():
    batch = example_batch(weights=np.arange(EXAMPLES) % 3)
    params = example_state(SGD).params
    loss, metrics = LOSS_FN(params, batch, None)
    logits = np.float64(apply_fn(params, batch.inputs))
    chosen = logits[np.arange(EXAMPLES), batch.labels] - np.log(np.exp(logits).sum(axis=-1))
    expected = (-chosen * batch.weights).sum() / batch.weights.sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"][0] / metrics["loss"][1], loss, rtol=1e-6)
    right = (logits.argmax(axis=-1) == batch.labels) * batch.weights
    np.testing.assert_allclose(metrics["accuracy"], (right.sum(), batch.weights.sum()))


def test_a_flax_model_becomes_a_function_with_dropout_where_it_has_a_key():
    model = MLPClassifier(hidden_size=8, num_classes=CLASSES, dropout_rate=0.5)
    inputs, key = example_batch().inputs, jax.random.key(1)
    params = model.init(jax.random.key(0), inputs, train=False)["params"]
    function = training.as_function(model)
    without = model.apply({"params": params}, inputs, train=False)
    np.testing.assert_array_equal(function(params, inputs), without)
    with_dropout = model.apply({"params": params}, inputs, train=True, rngs={"dropout": key})
    np.testing.assert_array_equal(function(params, inputs, key), with_dropout)
    assert not same(without, with_dropout)


def test_metrics_add_and_a_mean_is_taken_once():
    first = {"loss": (jnp.float32(6.0), jnp.float32(2.0))}
    second = {"loss": (jnp.float32(1.0), jnp.float32(5.0))}
    assert training.mean_metrics(training.add_metrics(first, second)) == {"loss": 1.0}
    assert math.isnan(training.mean_metrics({"loss": (jnp.float32(0), jnp.float32(0))})["loss"])


def test_evaluation_is_a_mean_over_labels_and_has_no_dropout():
    params, batch = example_state(SGD).params, example_batch(weights=np.arange(EXAMPLES) < 20)
    parts = [jax.tree.map(lambda x, p=p: x[p], batch) for p in (slice(0, 18), slice(18, 24))]
    found = training.evaluate(LOSS_FN, params, parts)
    np.testing.assert_allclose(
        found["loss"], WITHOUT_DROPOUT(params, batch, None)[0], rtol=1e-5
    )


def test_of_many_batches_none_is_lost_in_the_sum():
    losses = [np.float32(2**24)] + [np.float32(1)] * 100  # in float32, 2**24 + 1 is 2**24
    found = training.evaluate(
        lambda params, batch, rng: (batch, {"loss": (batch, jnp.ones_like(batch))}), {}, losses
    )
    assert found["loss"] == (2**24 + 100) / 101


# The train step.


@pytest.mark.parametrize(
    ("num_minibatches", "method", "scale"),
    [(1, "scan", None), (4, "scan", 2.0**10), (4, "loop", None)],
)
def test_a_step_of_sgd_subtracts_the_gradient_times_the_rate(num_minibatches, method, scale):
    """In one or in four minibatches, whatever the loss is scaled by."""
    scale = scale and mixed_precision.StaticLossScale(scale)
    state, batch = example_state(SGD, scale), example_batch(weights=np.arange(EXAMPLES) % 3)
    step = train_step(WITHOUT_DROPOUT, SGD, num_minibatches=num_minibatches, method=method)
    with jax.default_matmul_precision("highest"):
        new, metrics = step(state, batch)
        grad_fn = jax.grad(WITHOUT_DROPOUT, has_aux=True)
        grads, expected = jax.jit(grad_fn)(state.params, batch, None)
    moved = jax.tree.map(lambda old, new: (old - new) / 0.1, state.params, new.params)
    assert_trees_close(moved, grads, 1e-5)  # the parameters' own rounding, divided by the rate
    assert_trees_close({name: metrics[name] for name in expected}, expected, 1e-6)
    keys = (jax.random.key_data(each.rng) for each in (new, state))
    assert new.step == 1 and not same(*keys)


def test_a_state_keeps_its_types_so_that_a_step_is_compiled_once_and_is_donated_whole():
    step = training.make_train_step(LOSS_FN, ADAM)
    state, batch = example_state(ADAM, mixed_precision.DynamicLossScale()), example_batch()
    found = buffer_donation.report(step.lower(state, batch).compile())
    state_bytes = sum(row.bytes for row in found.arguments if row.path.startswith("args[0]"))
    assert found.donated_bytes == found.aliased_bytes == state_bytes
    for _ in range(3):
        state, _ = step(state, batch)
    assert step._cache_size() == 1


@pytest.mark.parametrize("optimizer", [optax.contrib.prodigy(), optax.contrib.mechanize(SGD)])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_state_that_shares_arrays_with_the_parameters_can_be_donated(optimizer, compiled):
    params = jax.tree.map(jnp.copy, example_state(SGD).params)
    init = functools.partial(training.init_state, optimizer=optimizer, rng=jax.random.key(0))
    state = (jax.jit(init) if compiled else init)(params)
    for _ in range(2):
        state, metrics = training.make_train_step(LOSS_FN, optimizer)(state, example_batch())
    assert np.isfinite(metrics["loss"][0])


def test_without_a_loss_scale_a_step_costs_what_one_written_out_costs():
    def written_out(state, batch):
        rng, step_rng = jax.random.split(state.rng)
        key = jax.random.split(step_rng, 1)[0]
        grads, metrics = jax.grad(LOSS_FN, has_aux=True)(state.params, batch, key)
        updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        changes = dict(step=state.step + 1, params=params, opt_state=opt_state, rng=rng)
        return state.replace(**changes), metrics

    args = example_state(ADAM), example_batch()
    one, other = (
        f.lower(*args).compile() for f in (jax.jit(written_out), train_step(LOSS_FN, ADAM))
    )
    memory, same_memory = (each.memory_analysis().temp_size_in_bytes for each in (one, other))
    assert memory == same_memory
    assert one.cost_analysis()["flops"] == other.cost_analysis()["flops"]


def test_a_step_that_overflows_changes_neither_parameters_nor_optimizer_and_backs_off():
    """A scale too large for float16 comes down until training goes on."""
    step = train_step(
        WITHOUT_DROPOUT, ADAM, policy=mixed_precision.policy("float16"), num_minibatches=4
    )
    first = state = example_state(ADAM, mixed_precision.DynamicLossScale(value=2.0**24))
    skipped = []
    for number in range(14):
        last, (state, metrics) = state, step(state, example_batch())
        skipped.append(int(metrics["skipped"][0]))
        unchanged = same((last.params, last.opt_state), (state.params, state.opt_state))
        assert unchanged == bool(skipped[-1]) and state.step == number + 1
    assert skipped[0] == 1 and skipped[-1] == 0 and sorted(skipped, reverse=True) == skipped
    assert state.loss_scale.value == 2.0 ** (24 - sum(skipped))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert mixed_precision.all_finite(state.params) and not same(first.params, state.params)
    # inputs beyond 65504 are infinite in float16; what is not finite must not stay in the sum
    _, bad = step(state, example_batch(scale=1e5))
    both = training.mean_metrics(training.add_metrics(bad, metrics))
    assert both["loss"] == training.mean_metrics(metrics)["loss"] and both["skipped"] == 0.5


def test_gradients_are_clipped_after_they_are_unscaled():
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), SGD)
    step, moves = train_step(WITHOUT_DROPOUT, clipped), []
    for scale in (None, mixed_precision.StaticLossScale(2.0**10)):
        state = example_state(clipped, scale)
        new, _ = step(state, example_batch())
        moves.append(jax.tree.map(jnp.subtract, new.params, state.params))
    # 1e-2: a move of 1e-4 of a parameter near 1 is rounded by 6e-8. Clipped first, it would be
    # 1024 times smaller.
    assert_trees_close(*moves, 1e-2)


def traced(**options):
    return train_step(LOSS_FN, SGD, **options).trace(example_state(SGD), example_batch())


def given(**options):
    training.make_train_step(LOSS_FN, SGD, gradient_fn=lambda loss_fn: loss_fn, **options)


BAD = [
    (
        lambda: WITHOUT_DROPOUT(
            example_state(SGD).params, example_batch().replace(labels=np.zeros((24, 1))), None
        ),
        r"labels \(24, 1\)",
    ),
    (lambda: training.evaluate(LOSS_FN, {}, []), "at least one batch"),
    (lambda: traced(policy=mixed_precision.policy("float16")), "must scale the loss"),
    (lambda: training.build(example_config(num_minibatches=3)), "must divide"),
    # options that a given gradient function would ignore
    (lambda: given(num_minibatches=7), "num_minibatches=7, .* must not come with"),
    (lambda: given(accumulator_dtype="bfloat16"), "accumulator_dtype='bfloat16' must not"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_mistakes_are_refused_before_anything_is_compiled(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# A run from a configuration.


def example_config(**training_options):
    config = configs.get("cpu")
    config.model.update(num_layers=1, hidden_size=16, head_dim=8, num_heads=2, max_seq_len=8)
    config.model.update(vocab_size=11, num_outputs=11, dropout_rate=0.1)
    config.data.update(batch_size=4, seq_len=8)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=2, total_steps=60)
    config.training.update(training_options, steps=60)
    return config


def test_a_run_built_from_a_configuration_learns_a_sequence_by_heart():
    config = example_config(loss_scale="dynamic", num_minibatches=2)
    run = training.build(config)
    config.data.batch_size = 8  # the run does not change with it
    tokens = np.tile(np.arange(9, dtype=np.int32), (4, 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((4, 8), np.float32))
    state, losses = run.init(jax.random.key(0)), []
    assert run.abstract() == jax.eval_shape(lambda: (state, batch))
    for _ in range(60):
        state, metrics = run.train_step(state, batch)
        losses.append(training.mean_metrics(metrics)["loss"])
    # at first no better than guessing among 11, log(11) = 2.4
    assert losses[0] > 2 and losses[-1] < 0.5


@pytest.mark.skipif(
    jax.default_backend() == "gpu",
    reason="for the other program a GPU's compiler may take kernels that round otherwise",
)
def test_steps_that_donate_their_state_compute_what_steps_that_keep_it_compute():
    """Many steps, of a size at which JAX 0.7.2 takes other kernels for its products: see
    xla_flags.keep_products_right.
    """
    config = configs.get("cpu")
    config.model.update(num_layers=1, vocab_size=64, num_outputs=64)
    config.optimizer.update(schedule="constant", learning_rate=1e-3)
    tokens = np.random.default_rng(0).integers(0, 64, (4, 4, 129), dtype=np.int32)
    states = []
    for config.training.donate in (True, False):
        run = training.build(config)
        state = run.init(jax.random.key(0))
        for batch in tokens:
            state, _ = run.train_step(
                state, Batch(batch[:, :-1], batch[:, 1:], np.ones((4, 128), np.float32))
            )
        states.append(state.params)
    assert same(*states)


def test_a_run_accumulates_and_donates_as_its_configuration_says():
    def step(**options):
        run = training.build(example_config(num_minibatches=2, **options))
        return run.train_step.lower(*run.abstract())

    for donates in (False, True):
        found = buffer_donation.report(step(donate=donates).compile())
        assert (found.aliased_bytes > 0) == donates
    scanned, looped = (step(accumulation=method).as_text() for method in ("scan", "loop"))
    assert looped.count("dot_general") == 2 * scanned.count("dot_general")
    assert "bf16" not in looped and "bf16" in step(accumulator_dtype="bfloat16").as_text()


def test_the_optimizers_own_products_are_not_the_models():
    flops = []
    for name in ("adamw", "muon", "adafactor"):
        whole = configs.get("cpu")
        whole.optimizer.name = name
        flops.append(training.step_flops(whole))
    assert flops == 3 * flops[:1]
