"""Laws of the losses, the train step, and a run built from a configuration."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
WITHOUT_DROPOUT = training.classification_loss(
    lambda params, inputs, rng: apply_fn(params, inputs)
)
SGD, ADAM = optax.sgd(0.1), optax.adam(1e-2)


def example_batch(weights=None, scale=1.0):
    inputs = scale * jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))
    labels = jax.random.randint(jax.random.key(2), (EXAMPLES,), 0, CLASSES)
    return Batch(
        inputs,
        labels,
        jnp.ones(EXAMPLES) if weights is None else jnp.asarray(weights, jnp.float32),
    )


def example_state(optimizer, loss_scale=None):
    hidden, output = jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / WIDTH**0.5
    return training.init_state(
        {"hidden": hidden, "output": output[:, :CLASSES]},
        optimizer,
        jax.random.key(3),
        loss_scale,
    )


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


def test_metrics_are_float32_sums_and_counts_whatever_the_model_computes_in():
    params = mixed_precision.policy("bfloat16").cast_to_compute(example_state(SGD).params)
    batch = example_batch()
    loss, metrics = LOSS_FN(
        params, Batch(batch.inputs.astype(jnp.bfloat16), batch.labels, batch.weights), None
    )
    assert {leaf.dtype for leaf in jax.tree.leaves((loss, metrics))} == {jnp.dtype("float32")}


def test_a_flax_model_becomes_a_function_with_dropout_where_it_has_a_key():
    model, inputs = (
        MLPClassifier(hidden_size=8, num_classes=CLASSES, dropout_rate=0.5),
        example_batch().inputs,
    )
    params = model.init(jax.random.key(0), inputs, train=False)["params"]
    function = training.as_function(model)
    without = model.apply({"params": params}, inputs, train=False)
    np.testing.assert_array_equal(function(params, inputs), without)
    key = jax.random.key(1)
    with_dropout = model.apply({"params": params}, inputs, train=True, rngs={"dropout": key})
    np.testing.assert_array_equal(function(params, inputs, key), with_dropout)
    assert not same(without, with_dropout)


def test_a_language_model_classifies_at_every_position():
    # the logits of the next token, by token
    table = jax.random.normal(jax.random.key(0), (5, 5))
    tokens = jnp.array([[0, 1, 2], [3, 4, 0]])
    batch = Batch(tokens, (tokens + 1) % 5, jnp.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    loss, metrics = training.next_token_loss(lambda params, inputs, rng: params[inputs])(
        table, batch, None
    )
    log_probs = jax.nn.log_softmax(table)
    np.testing.assert_allclose(
        loss, -(log_probs[0, 1] + log_probs[1, 2] + log_probs[3, 4]) / 3, rtol=1e-6
    )
    assert metrics["loss"][1] == 3


def test_labels_without_any_weight_have_loss_and_gradient_zero():
    params = example_state(SGD).params
    batch = example_batch(weights=np.zeros(EXAMPLES))
    (loss, _), grads = jax.value_and_grad(LOSS_FN, has_aux=True)(params, batch, None)
    assert loss == 0 and not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_labels_of_another_shape_than_the_logits_are_refused():
    batch = example_batch()
    with pytest.raises(
        ValueError,
        match=r"labels \(24, 1\) and weights \(24,\) must have the first axes of logits",
    ):
        WITHOUT_DROPOUT(
            example_state(SGD).params,
            Batch(batch.inputs, batch.labels[:, None], batch.weights),
            None,
        )


def test_metrics_add_and_a_mean_is_taken_once():
    first = {"loss": (jnp.float32(6.0), jnp.float32(2.0))}
    second = {"loss": (jnp.float32(1.0), jnp.float32(5.0))}
    assert training.mean_metrics(training.add_metrics(first, second)) == {"loss": 1.0}
    assert math.isnan(training.mean_metrics({"loss": (jnp.float32(0), jnp.float32(0))})["loss"])


def test_evaluation_is_a_mean_over_labels_and_has_no_dropout():
    params, batch = example_state(SGD).params, example_batch(weights=np.arange(EXAMPLES) < 20)
    parts = [
        jax.tree.map(lambda x, part=part: x[part], batch)
        for part in (slice(0, 18), slice(18, 24))
    ]
    found = training.evaluate(LOSS_FN, params, parts)
    np.testing.assert_allclose(
        found["loss"], WITHOUT_DROPOUT(params, batch, jax.random.key(0))[0], rtol=1e-5
    )
    with pytest.raises(ValueError, match="at least one batch"):
        training.evaluate(LOSS_FN, params, [])


def test_of_many_batches_none_is_lost_in_the_sum():
    losses = [np.float32(2**24)] + [np.float32(1)] * 100  # in float32, 2**24 + 1 is 2**24
    found = training.evaluate(
        lambda params, batch, rng: (batch, {"loss": (batch, jnp.ones_like(batch))}), {}, losses
    )
    assert found["loss"] == (2**24 + 100) / 101


# The train step.


def test_a_step_of_sgd_subtracts_the_gradient_times_the_rate():
    state, batch = example_state(SGD), example_batch()
    with jax.default_matmul_precision("highest"):
        new, _ = train_step(WITHOUT_DROPOUT, SGD)(state, batch)
        grads = jax.grad(lambda params: WITHOUT_DROPOUT(params, batch, None)[0])(state.params)
    moved = jax.tree.map(lambda old, new: (old - new) / 0.1, state.params, new.params)
    assert_trees_close(moved, grads, 1e-5)  # the parameters' own rounding, divided by the rate
    assert new.step == 1 and not same(
        jax.random.key_data(new.rng), jax.random.key_data(state.rng)
    )


@pytest.mark.parametrize("method", ["scan", "loop"])
def test_a_step_in_four_minibatches_is_the_same_step(method):
    state, batch = example_state(SGD), example_batch(weights=np.arange(EXAMPLES) % 3)
    with jax.default_matmul_precision("highest"):
        one, one_metrics = train_step(WITHOUT_DROPOUT, SGD)(state, batch)
        four, four_metrics = train_step(WITHOUT_DROPOUT, SGD, num_minibatches=4, method=method)(
            state, batch
        )
    change = [jax.tree.map(jnp.subtract, new.params, state.params) for new in (four, one)]
    assert_trees_close(*change, 1e-5)
    assert_trees_close(four_metrics, one_metrics, 1e-6)


def test_dropout_is_new_in_every_step():
    # the parameters stay, so only the random key can change the loss
    zero_rate = optax.sgd(0.0)
    step, state, batch = (
        train_step(LOSS_FN, zero_rate),
        example_state(zero_rate),
        example_batch(),
    )
    state, first = step(state, batch)
    state, second = step(state, batch)
    assert first["loss"][0] != second["loss"][0]


def test_a_state_keeps_its_types_so_that_a_step_is_compiled_once():
    step = training.make_train_step(LOSS_FN, ADAM)
    state, batch = example_state(ADAM, mixed_precision.DynamicLossScale()), example_batch()
    for _ in range(3):
        state, _ = step(state, batch)
    assert step._cache_size() == 1


def test_a_state_is_donated_whole():
    state = example_state(ADAM, mixed_precision.DynamicLossScale())
    report = buffer_donation.report(
        training.make_train_step(LOSS_FN, ADAM).lower(state, example_batch()).compile()
    )
    state_bytes = sum(row.bytes for row in report.arguments if row.path.startswith("args[0]"))
    assert report.donated_bytes == report.aliased_bytes == state_bytes
    assert (
        buffer_donation.report(
            train_step(LOSS_FN, ADAM).lower(state, example_batch()).compile()
        ).donated_bytes
        == 0
    )


def test_without_a_loss_scale_a_step_costs_what_one_written_out_costs():
    def written_out(state, batch):
        rng, step_rng = jax.random.split(state.rng)
        value_and_grad = jax.value_and_grad(LOSS_FN, has_aux=True)
        (_, metrics), grads = value_and_grad(
            state.params, batch, jax.random.split(step_rng, 1)[0]
        )
        updates, opt_state = ADAM.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return (
            state.replace(step=state.step + 1, params=params, opt_state=opt_state, rng=rng),
            metrics,
        )

    args = (example_state(ADAM), example_batch())
    one, other = (
        f.lower(*args).compile() for f in (jax.jit(written_out), train_step(LOSS_FN, ADAM))
    )
    assert (
        one.memory_analysis().temp_size_in_bytes == other.memory_analysis().temp_size_in_bytes
    )
    assert one.cost_analysis()["flops"] == other.cost_analysis()["flops"]


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_a_loss_scale_that_is_a_power_of_two_changes_nothing_in_float32(num_minibatches):
    batch = example_batch()
    with jax.default_matmul_precision("highest"):
        step = train_step(WITHOUT_DROPOUT, SGD, num_minibatches=num_minibatches)
        plain, _ = step(example_state(SGD), batch)
        scaled, _ = step(example_state(SGD, mixed_precision.StaticLossScale(2.0**10)), batch)
    assert_trees_close(scaled.params, plain.params, 1e-6)


def test_gradients_are_clipped_after_they_are_unscaled():
    clipped = optax.chain(optax.clip_by_global_norm(1e-3), SGD)
    step = train_step(WITHOUT_DROPOUT, clipped)
    moves = []
    for scale in (None, mixed_precision.StaticLossScale(2.0**10)):
        state = example_state(clipped, scale)
        new, _ = step(state, example_batch())
        moves.append(jax.tree.map(jnp.subtract, new.params, state.params))
    # 1e-2: a move of 1e-4 of a parameter near 1 is rounded by 6e-8. Clipped first, it would be
    # 1024 times smaller.
    assert_trees_close(*moves, 1e-2)


def test_a_step_that_overflows_changes_neither_parameters_nor_optimizer_and_backs_off():
    step = train_step(WITHOUT_DROPOUT, ADAM, policy=mixed_precision.policy("float16"))
    state, _ = step(
        example_state(ADAM, mixed_precision.DynamicLossScale(value=2.0**10)), example_batch()
    )
    # inputs beyond 65504 are infinite in float16
    bad, metrics = step(state, example_batch(scale=1e5))
    assert same((bad.params, bad.opt_state), (state.params, state.opt_state))
    assert bad.loss_scale.value == state.loss_scale.value / 2 and bad.step == state.step + 1
    assert training.mean_metrics({"skipped": metrics["skipped"]}) == {"skipped": 1.0}

    good, good_metrics = step(bad, example_batch())
    assert not same(good.params, bad.params) and good_metrics["skipped"] == (0, 1)
    assert mixed_precision.all_finite(good.params)
    # what is not finite must not stay in the sum
    both = training.mean_metrics(training.add_metrics(metrics, good_metrics))
    assert (
        both["loss"] == training.mean_metrics(good_metrics)["loss"] and both["skipped"] == 0.5
    )


def test_a_scale_too_large_for_float16_comes_down_until_training_goes_on():
    step = train_step(
        WITHOUT_DROPOUT, ADAM, policy=mixed_precision.policy("float16"), num_minibatches=4
    )
    state, skipped = example_state(ADAM, mixed_precision.DynamicLossScale(value=2.0**24)), []
    for _ in range(14):
        state, metrics = step(state, example_batch())
        skipped.append(int(metrics["skipped"][0]))
    assert skipped[0] == 1 and skipped[-1] == 0
    assert state.loss_scale.value == 2.0 ** (24 - sum(skipped))


@pytest.mark.parametrize("name", mixed_precision.POLICIES)
def test_every_policy_trains_and_keeps_a_float32_state(name):
    scale = mixed_precision.StaticLossScale(2.0**10) if name == "float16" else None
    step = train_step(WITHOUT_DROPOUT, ADAM, policy=mixed_precision.policy(name))
    state, losses = example_state(ADAM, scale), []
    for _ in range(20):
        state, metrics = step(state, example_batch())
        losses.append(metrics["loss"][0] / metrics["loss"][1])
    assert losses[-1] < losses[0] / 2
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("batch", [np.ones((2, 3)), jnp.ones((2, 3))])
def test_one_batch_is_not_evaluated_row_by_row(batch):
    for one in (batch, Batch(batch, batch, batch)):
        with pytest.raises(
            ValueError,
            match=r"batches=\w+ must be several batches, or a list of one: \[batch\]",
        ):
            inspect.unwrap(training.evaluate)(lambda *args: (0.0, {}), {}, one)


def test_mistakes_are_refused_before_anything_is_compiled():
    with pytest.raises(ValueError, match="method='vmap'"):
        training.make_train_step(LOSS_FN, SGD, method="vmap")
    with pytest.raises(
        ValueError, match="num_minibatches=5 must divide the batch of 24 examples"
    ):
        train_step(LOSS_FN, SGD, num_minibatches=5).trace(example_state(SGD), example_batch())
    with pytest.raises(
        ValueError, match=r"loss_scale=NoLossScale\(\) must scale the loss for a policy"
    ):
        train_step(LOSS_FN, SGD, policy=mixed_precision.policy("float16")).trace(
            example_state(SGD), example_batch()
        )


def test_a_batch_without_any_weight_changes_no_parameter():
    state = example_state(SGD)
    for num_minibatches in (1, 4):
        new, metrics = train_step(LOSS_FN, SGD, num_minibatches=num_minibatches)(
            state, example_batch(np.zeros(EXAMPLES))
        )
        assert same(new.params, state.params) and metrics["loss"] == (0, 0)


# A run from a configuration.


def example_config(**training_options):
    config = configs.get("cpu")
    config.model.update(
        num_layers=1, hidden_size=16, head_dim=8, num_heads=2, vocab_size=11, num_outputs=11
    )
    config.model.update(max_seq_len=8, dropout_rate=0.1)
    config.data.update(batch_size=4, seq_len=8)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=2, total_steps=60)
    config.training.update(training_options, steps=60)
    return config


@pytest.fixture(scope="module")
def run():
    return training.build(example_config(loss_scale="dynamic", num_minibatches=2))


def test_a_run_built_from_a_configuration_learns_a_sequence_by_heart(run):
    tokens = jnp.tile(jnp.arange(9)[None], (4, 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((4, 8)))
    abstract_state, abstract_batch = run.abstract()
    state, losses = run.init(jax.random.key(0)), []
    assert abstract_state == jax.eval_shape(lambda: state) and abstract_batch == jax.eval_shape(
        lambda: batch
    )
    for _ in range(60):
        state, metrics = run.train_step(state, batch)
        losses.append(training.mean_metrics(metrics)["loss"])
    # at first no better than guessing among 11, log(11) = 2.4
    assert losses[0] > 2 and losses[-1] < 0.5


def test_a_run_does_not_change_with_the_configuration_that_it_was_built_from():
    config = example_config()
    run = training.build(config)
    config.data.batch_size = 8
    assert run.config.data.batch_size == run.abstract()[1].inputs.shape[0] == 4


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
    whole = configs.get("cpu")
    whole.model.update(num_layers=1, hidden_size=32, head_dim=16, num_heads=2, max_seq_len=8)
    whole.data.update(batch_size=4, seq_len=8)
    whole.training.update(num_minibatches=2)

    def step(**options):
        whole.training.update(options)
        run = training.build(whole)
        return run.train_step.lower(*run.abstract())

    assert buffer_donation.report(step(donate=False).compile()).aliased_bytes == 0
    assert buffer_donation.report(step(donate=True).compile()).aliased_bytes > 0
    scanned, looped = (step(accumulation=method).as_text() for method in ("scan", "loop"))
    assert looped.count("dot_general") == 2 * scanned.count("dot_general")
    assert "bf16" not in looped and "bf16" in step(accumulator_dtype="bfloat16").as_text()


def test_a_configuration_whose_batch_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="num_minibatches=3 must divide data.batch_size=4"):
        training.build(example_config(num_minibatches=3))


def test_options_that_a_given_gradient_function_would_ignore_are_refused():
    with pytest.raises(
        ValueError, match=r"num_minibatches=7, .* must not come with gradient_fn"
    ):
        training.make_train_step(
            lambda params, batch, rng: (0.0, {}),
            optax.sgd(0.1),
            num_minibatches=7,
            gradient_fn=lambda loss_fn: loss_fn,
        )
    with pytest.raises(ValueError, match=r"accumulator_dtype='bfloat16' must not come with"):
        training.make_train_step(
            lambda params, batch, rng: (0.0, {}),
            optax.sgd(0.1),
            accumulator_dtype="bfloat16",
            gradient_fn=lambda loss_fn: loss_fn,
        )


def test_the_optimizers_own_products_are_not_the_models():
    flops = {}
    for name in ("adamw", "muon", "adafactor"):
        whole = configs.get("cpu")
        whole.optimizer.name = name
        flops[name] = training.step_flops(whole)
    assert flops["adamw"] == flops["muon"] == flops["adafactor"]
