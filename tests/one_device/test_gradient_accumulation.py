"""Laws of gradient accumulation."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from course_lib.measure import virtual
from course_lib.one_device import gradient_accumulation
from course_lib.text.data import Batch

needs_virtual = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason=str(virtual.why_unavailable())
)

METHODS = pytest.mark.parametrize("method", gradient_accumulation.METHODS)
WIDTH, LAYERS, EXAMPLES = 16, 3, 24


def example_batch(weights=None, size=EXAMPLES, width=WIDTH):
    inputs, labels = np.random.default_rng(1).normal(size=(2, size, width)).astype(np.float32)
    return Batch(
        inputs, labels, np.ones(size, np.float32) if weights is None else np.float32(weights)
    )


def example_params(width=WIDTH, layers=LAYERS):
    random = np.random.default_rng(0).normal(size=(layers, width, width)) / width**0.5
    return [jnp.asarray(layer, jnp.float32) for layer in random]


def make_loss_fn(dropout_rate=0.0):
    """A weighted mean of squared errors, which is 0 / 0 without any weight: `accumulate` must
    not mind.
    """

    def loss_fn(params, batch, rng):
        x = batch.inputs
        for w in params:
            x = jnp.tanh(x @ w)
        if dropout_rate:
            x = jnp.where(jax.random.bernoulli(rng, 1 - dropout_rate, x.shape), x, 0)
        loss = (jnp.square(x - batch.labels).mean(axis=-1) * batch.weights).sum()
        count = batch.weights.sum()
        return loss / count, {"loss": (loss, count)}

    return loss_fn


GRAD_FN = gradient_accumulation.gradient(make_loss_fn())


@functools.cache  # tests that ask for the same step share its compilation
def compiled_step(grad_fn, **options):
    return jax.jit(lambda *args: gradient_accumulation.accumulate(grad_fn, *args, **options))


def accumulate(batch, num_minibatches, grad_fn=GRAD_FN, **options):
    with jax.default_matmul_precision("highest"):
        step = compiled_step(grad_fn, num_minibatches=num_minibatches, **options)
        return step(example_params(), batch, jax.random.key(2))


CLOSE = 5e-6  # float32 rounding (6e-8) over some hundred additions


def distance(grads, expected):
    """Returns the largest distance of a leaf, relative to the leaf's norm."""
    pairs = zip(grads, expected, strict=True)
    norm = np.linalg.norm
    return max(norm(grad - want) / (norm(want) + 1e-9) for grad, want in pairs)


@METHODS
def test_four_minibatches_give_the_gradient_of_one_batch(method):
    """A minibatch of padding only adds nothing, though its loss is 0 / 0, and its rows NaN."""
    for weights in (None, np.arange(EXAMPLES) < 12, np.zeros(EXAMPLES)):
        batch = example_batch(weights)
        padded = batch.replace(inputs=np.where(batch.weights[:, None], batch.inputs, np.nan))
        grads, metrics = accumulate(padded, 4, method=method)
        expected, expected_metrics = accumulate(batch, 1)
        if weights is not None and not weights.any():
            expected = [np.zeros_like(grad) for grad in grads]
        assert distance(grads, expected) <= CLOSE
        np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)


@METHODS
def test_minibatches_of_unequal_weight_count_by_their_weight(method):
    # the last of four minibatches weighs a tenth
    batch = example_batch(np.where(np.arange(EXAMPLES) < 18, 1.0, 0.1))
    expected, _ = accumulate(batch, 1)
    assert distance(accumulate(batch, 4, method=method)[0], expected) <= CLOSE
    parts = (
        jax.tree.map(lambda x, start=start: x[start : start + 6], batch)
        for start in (0, 6, 12, 18)
    )
    means = [accumulate(part, 1)[0] for part in parts]
    # what a plain mean would give is not this gradient
    assert distance(jax.tree.map(lambda *grads: sum(grads) / 4, *means), expected) > 0.05


@METHODS
def test_each_minibatch_draws_its_own_dropout(method):
    grad_fn = gradient_accumulation.gradient(make_loss_fn(dropout_rate=0.5))
    six = jax.tree.map(lambda x: x[:6], example_batch())
    four_times = jax.tree.map(lambda x: np.concatenate([x] * 4), six)
    grads, _ = accumulate(four_times, 4, grad_fn, method=method)
    with jax.default_matmul_precision("highest"):
        keys, one = jax.random.split(jax.random.key(2), 4), jax.jit(grad_fn)
        by_hand = [one(example_params(), six, key)[0] for key in keys]
    assert distance(grads, jax.tree.map(lambda *grads: sum(grads) / 4, *by_hand)) <= CLOSE
    assert distance(by_hand[0], by_hand[1]) > 0.1


def test_a_bfloat16_accumulator_loses_what_float32_keeps():
    batch = example_batch(size=768)
    expected, _ = accumulate(batch, 1)
    in_float32, _ = accumulate(batch, 256)
    in_bfloat16, _ = accumulate(batch, 256, accumulator_dtype="bfloat16")
    assert distance(in_float32, expected) < CLOSE
    # 8 bits: a late minibatch is rounded away against the sum
    assert distance(in_bfloat16, expected) > 1e-2
    assert all(grad.dtype == jnp.float32 for grad in in_bfloat16)


def test_gradients_leave_in_the_dtype_in_which_one_batch_has_them():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), example_params())
    batch = jax.tree.map(lambda x: x.astype(jnp.bfloat16), example_batch())
    steps = [
        compiled_step(GRAD_FN, num_minibatches=num_minibatches) for num_minibatches in (1, 4)
    ]
    one, four = [jax.eval_shape(step, params, batch, jax.random.key(0))[0] for step in steps]
    assert one == four and one[0].dtype == jnp.bfloat16


def test_one_minibatch_is_the_gradient_function_itself():
    args = (example_params(), example_batch(), jax.random.key(0))
    accumulated = jax.make_jaxpr(
        lambda *args: gradient_accumulation.accumulate(GRAD_FN, *args, num_minibatches=1)
    )(*args)
    itself = jax.make_jaxpr(
        lambda params, batch, rng: GRAD_FN(params, batch, jax.random.split(rng, 1)[0])
    )(*args)
    assert str(accumulated) == str(itself)


def scanned_loss_fn(params, batch, rng):
    """The same model with its layers in a scan, whose backward pass makes the gradients of all
    layers as one array.
    """
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch.inputs, params)
    loss = (jnp.square(x - batch.labels).mean(axis=-1) * batch.weights).sum()
    return loss / batch.weights.sum(), {"loss": (loss, batch.weights.sum())}


def temporaries_beside_one_minibatch(device, method, scanned):
    """Returns what 8 minibatches take more than one of them does, in trees of gradients.

    The accumulator is an output and takes the place of that one's gradients: what is left are
    the gradients at work.
    """
    width, layers, size = 256, 2, 16
    params, loss_fn = example_params(width, layers), make_loss_fn()
    if scanned:
        params, loss_fn = jnp.stack(params), scanned_loss_fn
    grad_fn = gradient_accumulation.gradient(loss_fn)

    def temporaries(step, size):
        args = params, example_batch(size=size, width=width), jax.random.key(0)
        compiled = virtual.compile(step.lower(*virtual.abstract(args, device)))
        return compiled.memory_analysis().temp_size_in_bytes

    step = compiled_step(grad_fn, num_minibatches=8, method=method)
    more = temporaries(step, size) - temporaries(jax.jit(grad_fn), size // 8)
    return more / (layers * width * width * 4)


# One tree of gradients, and half of one that XLA:GPU copies where a branch hands the
# accumulator on. Two trees would be 2.
ONE_TREE = 1.75


@pytest.mark.parametrize(
    ("where", "method", "scanned"),
    [
        pytest.param("a5000", "loop", True, marks=needs_virtual),
        ("cpu", "scan", False),
        ("cpu", "loop", True),
        pytest.param("a5000", "scan", False, marks=[needs_virtual, pytest.mark.slow]),
        slow("cpu", "loop", False),
    ],
)
def test_one_tree_of_gradients_at_most_lives_beside_the_accumulator(where, method, scanned):
    [device, *_] = jax.devices("cpu") if where == "cpu" else virtual.devices(where)
    assert temporaries_beside_one_minibatch(device, method, scanned) < ONE_TREE


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_a_loss_function_is_not_taken_for_a_gradient_function(num_minibatches):
    given = example_params(), example_batch(), jax.random.key(2)
    for wrong in (make_loss_fn(), lambda *args: GRAD_FN(*args)[0]):
        with pytest.raises(ValueError, match="grad_fn must return"):
            inspect.unwrap(gradient_accumulation.accumulate)(
                wrong, *given, num_minibatches=num_minibatches
            )


BAD = [
    (dict(num_minibatches=5), None, "num_minibatches=5 must divide .* 24 .* are 4 and 6"),
    (dict(num_minibatches=0), None, "num_minibatches=0"),
    (dict(num_minibatches=4, method="vmap"), None, "method='vmap'"),
    (dict(num_minibatches=4, accumulator_dtype="float16"), None, "accumulator_dtype='float16'"),
    (dict(num_minibatches=4), np.ones(12), r"one first axis.*\.weights': \(12,\)"),
    (dict(num_minibatches=4), 1.0, r"one first axis.*\.weights': \(\)"),
]


@pytest.mark.parametrize(("options", "weights", "message"), BAD)
def test_what_cannot_be_cut_is_refused(options, weights, message):
    with pytest.raises(ValueError, match=message):
        accumulate(example_batch(weights), **options)


@METHODS
@pytest.mark.parametrize("bad", [float("nan"), -2.0])
def test_a_weight_that_makes_no_sense_is_not_hidden_by_cutting_the_batch(method, bad):
    batch = example_batch(np.where(np.arange(EXAMPLES) == 7, bad, 1.0))
    whole, parts = accumulate(batch, 1)[0], accumulate(batch, 4, method=method)[0]
    for leaf, expected in zip(parts, whole, strict=True):  # NaN where the whole gives NaN
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
