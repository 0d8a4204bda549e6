"""Laws of gradient accumulation."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from course_lib.measure import virtual
from course_lib.one_device import gradient_accumulation

needs_virtual = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason=str(virtual.why_unavailable())
)

WIDTH, LAYERS, EXAMPLES = 16, 3, 24


@struct.dataclass
class Batch:
    inputs: jax.Array
    labels: jax.Array
    weights: jax.Array


def example_batch(weights=None, size=EXAMPLES, width=WIDTH):
    inputs, labels = jax.random.normal(jax.random.key(1), (2, size, width))
    return Batch(
        inputs, labels, jnp.ones(size) if weights is None else jnp.asarray(weights, jnp.float32)
    )


def example_params(width=WIDTH, layers=LAYERS):
    return [
        jax.random.normal(key, (width, width)) / width**0.5
        for key in jax.random.split(jax.random.key(0), layers)
    ]


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


def assert_close(grads, expected, tolerance=5e-6):
    """Leaf by leaf, relative to the leaf's norm. 5e-6: float32 rounding (6e-8) over some
    hundred additions.
    """
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    for grad, want in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(grad - want) <= tolerance * np.linalg.norm(want) + 1e-9


def distance(grads, expected):
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
    return max(np.linalg.norm(grad - want) / np.linalg.norm(want) for grad, want in pairs)


@pytest.mark.parametrize("method", gradient_accumulation.METHODS)
def test_four_minibatches_give_the_gradient_of_one_batch(method):
    grads, metrics = accumulate(example_batch(), 4, method=method)
    expected, expected_metrics = accumulate(example_batch(), 1)
    assert_close(grads, expected)
    np.testing.assert_allclose(metrics["loss"], expected_metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize("method", gradient_accumulation.METHODS)
def test_minibatches_of_unequal_weight_count_by_their_weight(method):
    # the last of four minibatches weighs a tenth
    weights = np.where(np.arange(EXAMPLES) < 18, 1.0, 0.1)
    batch = example_batch(weights)
    expected, _ = accumulate(batch, 1)
    assert_close(accumulate(batch, 4, method=method)[0], expected)

    parts = [
        jax.tree.map(lambda x, start=start: x[start : start + 6], batch)
        for start in range(0, EXAMPLES, 6)
    ]
    mean_of_means = jax.tree.map(
        lambda *grads: sum(grads) / 4, *[accumulate(part, 1)[0] for part in parts]
    )
    # what a plain mean would give is not this gradient
    assert distance(mean_of_means, expected) > 0.05


@pytest.mark.parametrize("method", gradient_accumulation.METHODS)
def test_a_minibatch_of_padding_only_adds_nothing(method):
    # of four minibatches the last two are empty: their loss is 0 / 0
    batch = example_batch(np.arange(EXAMPLES) < 12)
    first_half = jax.tree.map(lambda x: x[:12], batch)
    assert_close(accumulate(batch, 4, method=method)[0], accumulate(first_half, 1)[0])


@pytest.mark.parametrize("method", gradient_accumulation.METHODS)
def test_a_batch_of_padding_only_has_gradient_zero(method):
    grads, metrics = accumulate(example_batch(np.zeros(EXAMPLES)), 4, method=method)
    assert all(not grad.any() for grad in grads) and metrics["loss"][1] == 0


@pytest.mark.parametrize("method", gradient_accumulation.METHODS)
def test_each_minibatch_draws_its_own_dropout(method):
    grad_fn = gradient_accumulation.gradient(make_loss_fn(dropout_rate=0.5))
    same_examples = jax.tree.map(
        lambda x: jnp.tile(x[:6], (4,) + (1,) * (x.ndim - 1)), example_batch()
    )
    grads, _ = accumulate(same_examples, 4, grad_fn, method=method)

    six = jax.tree.map(lambda x: x[:6], same_examples)
    with jax.default_matmul_precision("highest"):
        keys = jax.random.split(jax.random.key(2), 4)
        by_hand = [grad_fn(example_params(), six, key)[0] for key in keys]
    assert_close(grads, jax.tree.map(lambda *grads: sum(grads) / 4, *by_hand))
    assert distance(by_hand[0], by_hand[1]) > 0.1


def test_a_bfloat16_accumulator_loses_what_float32_keeps():
    batch = example_batch(size=768)
    expected, _ = accumulate(batch, 1)
    in_float32, _ = accumulate(batch, 256)
    in_bfloat16, _ = accumulate(batch, 256, accumulator_dtype="bfloat16")
    assert distance(in_float32, expected) < 5e-6
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
    params = example_params(width, layers)
    params, loss_fn = (
        (jnp.stack(params), scanned_loss_fn) if scanned else (params, make_loss_fn())
    )
    grad_fn = gradient_accumulation.gradient(loss_fn)

    def temporaries(step, size):
        shapes = virtual.abstract(
            (params, example_batch(size=size, width=width), jax.random.key(0)), device
        )
        return virtual.compile(step.lower(*shapes)).memory_analysis().temp_size_in_bytes

    all_of_them = temporaries(compiled_step(grad_fn, num_minibatches=8, method=method), size)
    return (all_of_them - temporaries(jax.jit(grad_fn), size // 8)) / (
        layers * width * width * 4
    )


# One tree of gradients, and half of one that XLA:GPU copies where a branch hands the
# accumulator on. Two trees would be 2.
ONE_TREE = 1.75
MEMORY_LAW = pytest.mark.parametrize(
    ("method", "scanned"),
    [("scan", False), ("loop", True), pytest.param("loop", False, marks=pytest.mark.slow)],
)


@needs_virtual
@MEMORY_LAW
def test_on_a_gpu_one_tree_of_gradients_at_most_lives_beside_the_accumulator(method, scanned):
    assert (
        temporaries_beside_one_minibatch(virtual.devices("a5000")[0], method, scanned)
        < ONE_TREE
    )


@MEMORY_LAW
def test_on_a_cpu_one_tree_of_gradients_at_most_lives_beside_the_accumulator(method, scanned):
    assert temporaries_beside_one_minibatch(jax.devices("cpu")[0], method, scanned) < ONE_TREE


def test_two_trees_of_gradients_would_be_noticed(monkeypatch):
    def in_pairs(add, total, params, minibatches, rngs):
        for index in range(0, len(rngs), 2):

            def pair(total, index=index):
                total = add(
                    total, params, gradient_accumulation._take(minibatches, index), rngs[index]
                )
                return add(
                    total,
                    params,
                    gradient_accumulation._take(minibatches, index + 1),
                    rngs[index + 1],
                )

            total = jax.lax.cond(
                total[1]["loss"][1] != jnp.inf, pair, lambda total: total, total
            )
        return total

    monkeypatch.setattr(gradient_accumulation, "loop_minibatches", in_pairs)
    compiled_step.cache_clear()
    assert (
        temporaries_beside_one_minibatch(jax.devices("cpu")[0], "loop", scanned=True) > ONE_TREE
    )
    compiled_step.cache_clear()


@pytest.mark.parametrize(
    ("num_minibatches", "nearest"), [(5, "4 and 6"), (48, "24"), (7, "6 and 8")]
)
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_divisors(
    num_minibatches, nearest
):
    message = (
        f"num_minibatches={num_minibatches} must divide the batch of 24 examples.* nearest are"
        f" {nearest}(\n|$)"
    )
    with pytest.raises(ValueError, match=message):
        accumulate(example_batch(), num_minibatches)


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_leaves_of_different_batch_sizes_are_refused(num_minibatches):
    with pytest.raises(ValueError, match=r"one first axis.*\.weights': \(12,\)"):
        accumulate(example_batch(np.ones(12)), num_minibatches)
    with pytest.raises(ValueError, match=r"one first axis.*\.weights': \(\)"):
        accumulate(example_batch(1.0), num_minibatches)
    with pytest.raises(ValueError, match=r"one first axis.*\[0\]': \(\)"):
        gradient_accumulation.check_divides([1.0, 2.0], num_minibatches)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_minibatches": 0}, "num_minibatches=0 must be at least 1"),
        ({"num_minibatches": 4, "method": "vmap"}, "method='vmap' must be one of"),
        (
            {"num_minibatches": 4, "accumulator_dtype": "float16"},
            "accumulator_dtype='float16' must be one of",
        ),
        (
            {"num_minibatches": 4, "accumulator_dtype": "float33"},
            "accumulator_dtype='float33' must be one of",
        ),
    ],
)
def test_options_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        # raised while tracing: before anything is compiled
        accumulate(example_batch(), **options)


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_a_loss_function_is_not_taken_for_a_gradient_function(num_minibatches):
    def only_gradients(*args):
        return GRAD_FN(*args)[0]

    for wrong in (make_loss_fn(), only_gradients):
        with pytest.raises(
            ValueError,
            match=r"grad_fn must return \(gradients like params, .*gradient\(loss_fn\) makes",
        ):
            inspect.unwrap(gradient_accumulation.accumulate)(
                wrong,
                example_params(),
                example_batch(),
                jax.random.key(2),
                num_minibatches=num_minibatches,
            )


@pytest.mark.parametrize("method", gradient_accumulation.METHODS)
@pytest.mark.parametrize("bad", [float("nan"), -2.0])
def test_a_weight_that_makes_no_sense_is_not_hidden_by_cutting_the_batch(method, bad):
    weights = jnp.ones(EXAMPLES).at[7].set(bad)
    whole, _ = accumulate(example_batch(weights), 1)
    parts, _ = accumulate(example_batch(weights), 4, method=method)
    for leaf, expected in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        # NaN where the whole batch gives NaN
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


def test_only_a_count_of_zero_is_replaced():
    counts = jnp.array([0.0, 0.25, 1.0, 7.0])
    divided_by = [float(gradient_accumulation.nonzero(count)) for count in counts]
    assert divided_by == [1.0, 0.25, 1.0, 7.0]
