"""Values that would train something else without an error are refused, or give NaN."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import optax.contrib
import pytest

from course_lib import configs, optimizers, training
from course_lib.many_devices import meshes
from course_lib.models import losses
from course_lib.one_device import gradient_accumulation, mixed_precision, rematerialization
from course_lib.smaller_and_faster import (
    flash_attention,
    flash_kernels,
    large_vocabulary,
    offload,
    optimizer_memory,
    smallest_step,
)
from course_lib.text.data import Batch

SGD, KEY = optax.sgd(0.1), jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def as_in_a_learners_session():
    """jaxtyping would refuse some of them first, and Optax promotes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    with jax.numpy_dtype_promotion("standard"):
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


def optimizer(**changes):
    config = configs.get("155m").optimizer
    config.update(changes)
    return optimizers.from_config(config)


def state(scale=None, of=SGD):
    return training.init_state({}, of, KEY, scale)


def twice():
    return meshes.make({"data": 2}, 2 * jax.devices("cpu")[:1])


def metrics_without_counts():
    def grad_fn(params, batch, rng):
        return params, {"loss": (1.0, 1.0), "accuracy": 1.0}

    batch = jnp.ones((2, 3))
    return gradient_accumulation.accumulate(grad_fn, jnp.ones(3), batch, KEY, num_minibatches=2)


X, W, LABELS = jnp.ones((2, 4, 8)), jnp.ones((8, 6)), jnp.zeros((2, 4), int)
PARAMS = {"block": jnp.ones((3, 4, 4)), "head": jnp.ones(4)}
Q, NUMBERS = jnp.ones((1, 72, 2, 16)), jnp.ones((1, 2, 72))
TILES = dict(tiling=flash_attention.Tiling(16, 1.0), interpret=True)


def loss(x=X, W=W, labels=LABELS, bias=None):
    return large_vocabulary.linear_cross_entropy(x, W, labels, bias, chunks=2)


def add(**total):
    adds = smallest_step.gradient_in_place(
        lambda rest, batch: batch,
        lambda weights, x, key: x @ weights,
        lambda rest, x, batch: (x.mean(), {"loss": (x.sum(), 4.0)}),
    )
    return adds(PARAMS | total, PARAMS, jnp.ones((2, 4)), None)


def stochastic():
    """An update whose parameters are not given."""
    params, optimizer = {"w": jnp.ones(4, jnp.bfloat16)}, optax.sgd(0.1)
    optimizer = optimizer_memory.round_stochastically(optimizer)
    return optimizer.update(params, optimizer.init(params))


FACTORS, ONES = large_vocabulary.Factors(X, W), jnp.ones((2, 16), jnp.bfloat16)


def counting(numbers):
    """Checks a loss of numbers made from the sum, the summed weights and all errors."""

    def loss_fn(params, batch, rng):
        errors, weights = batch.inputs @ params, batch.weights
        loss, *pair = numbers((errors * weights).sum(), weights.sum(), errors)
        return loss, {"loss": tuple(pair)}

    batch = Batch(jnp.arange(12.0).reshape(4, 3), jnp.zeros(4), jnp.array([1.0, 2.0, 3.0, 4.0]))
    return training.check_loss(loss_fn, jnp.ones(3), batch)


Policy, Static = mixed_precision.Policy, mixed_precision.StaticLossScale
BAD = [
    (lambda: Policy("bf16", "float32"), "compute_dtype='bf16' must be a floating dtype"),
    (lambda: Policy("bfloat16", "int8"), "output_dtype='int8' must be a floating dtype"),
    (lambda: Static("1024"), "value='1024' must be positive"),
    (lambda: state(Static(jnp.float32(-4))), "value=.*-4.* must be positive"),
    (lambda: state("dynamic"), "loss_scale='dynamic' must be a loss scale"),
    (
        lambda: optimizer(learning_rate=float("nan")),
        "optimizer.learning_rate=nan must be a fin",
    ),
    (lambda: optimizer(b1=2.0), r"optimizer.b1=2.0 must be in \[0, 1\)"),
    (lambda: optimizers.from_config(configs.get("cpu")), "optimizer.data=(.|\\n)* is no field"),
    (lambda: optimizer_memory.scale_by_adam_8bit(b1=2.0), r"b1=2.0 must be in \[0, 1\)"),
    (lambda: optimizer_memory.scale_by_adam_bf16(b2=-0.1), r"b2=-0.1 must be in \[0, 1\)"),
    (lambda: rematerialization.policy("names", "ffn"), "remat_names='ffn' must name a value"),
    (twice, "must be different ones"),
    (
        lambda: losses.cross_entropy(jnp.ones((4, 3, 5)), jnp.zeros(3, int)),
        r"labels \(3,\) must",
    ),
    (metrics_without_counts, r"metrics with 'loss', all \(sum, count\)"),
    (lambda: smallest_step.gradient_in_place(None, len, len), "embed=None must be a function"),
    (lambda: training.make_train_step(None, SGD), "loss_fn=None must be a function"),
    (
        lambda: optimizer(name="muon").init({"dense": {"kernel": jnp.ones((4, 4))}}),
        "params must have a kernel in a layer",
    ),
    (
        lambda: counting(lambda sum, n, errors: (sum, sum, n)),
        "must return the mean over labels",
    ),
    (lambda: counting(lambda sum, n, errors: (sum / n, sum / n, 1.0)), "must return the mean"),
    (lambda: counting(lambda sum, n, errors: (errors.mean(), sum, n)), "must return the mean"),
    (
        lambda: counting(
            lambda sum, n, errors: (errors.mean(), errors.sum(), 1.0 * len(errors))
        ),
        "batch with weights of 0 in the first half, sum",
    ),
    (lambda: counting(lambda sum, n, errors: (errors, sum, n)), "a scalar, and a dict"),
    (lambda: counting(lambda sum, n, errors: (sum / n, sum)), "a scalar, and a dict"),
    (lambda: loss(labels=LABELS.T), r"labels of shape \(4, 2\) must be of shape \(2, 4\)"),
    (lambda: loss(W=W.T), r"head of shape \(6, 8\) must be \[D, V\]"),
    (lambda: loss(bias=jnp.ones(5)), r"bias of shape \(5,\) must be of shape \(6,\)"),
    (
        lambda: large_vocabulary.statistics(FACTORS, LABELS.T, chunks=2),
        r"labels of .* \(4, 2\)",
    ),
    (lambda: add(head=jnp.ones(1)), r"of the parameter's shape \(4,\)"),
    (lambda: flash_kernels.forward(Q, Q, Q, **TILES), "tile=16 must divide the 72"),
    (
        lambda: flash_kernels.backward(Q, Q, Q, None, NUMBERS, NUMBERS, Q, **TILES),
        "tile=16 must divide the",
    ),
    (lambda: optimizer_memory.quantize(ONES), "x of dtype bfloat16 must be float32"),
    (lambda: optimizer_memory.stochastic_round(jax.random.key(0), ONES), "must be float32"),
    (stochastic, "params=None"),
] + [
    (call, "optimizer='adam' must have init and update")
    for call in (
        lambda: offload.streamed("adam"),
        lambda: state(of="adam"),
        lambda: training.make_train_step(len, "adam"),
        lambda: optimizer_memory.round_stochastically("adam"),
        lambda: optimizer_memory.bytes_per_parameter("adam", {}),
    )
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_a_wrong_value_is_refused_by_its_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5)), jnp.float32)
LOSS = jax.jit(
    jax.value_and_grad(training.classification_loss(lambda p, x, rng: p * x), has_aux=True)
)


def loss_of(labels, weights):
    batch = Batch(LOGITS, jnp.asarray(labels), jnp.asarray(weights, jnp.float32))
    (loss, _), grad = LOSS(jnp.ones(()), batch, None)
    return np.array([loss, grad])


@pytest.mark.parametrize("label", [-100, -1, 5, 2**31 - 1])
def test_a_label_that_is_no_class_is_nan_and_of_weight_0_as_if_it_was_not_there(label):
    assert np.isnan(loss_of([0, 1, label, 3], [1, 1, 1, 1])).any()
    found, expected = (loss_of([0, 1, x, 3], [1, 1, 0, 1]) for x in (label, 2))
    np.testing.assert_array_equal(found, expected)


def test_a_negative_weight_is_nan_also_where_all_weights_sum_to_0():
    for weights in ([1, -1, 1, -1], [1, -1, 1, 1], [0, 0, 0, -1]):
        assert np.isnan(loss_of([0, 1, 2, 3], weights)).all()
    assert not loss_of([0, 1, 2, 3], [0, 0, 0, 0]).any()


def test_right_ones_are_not():
    assert loss(bias=jnp.ones(6))[0].shape == (2, 4)
    add(block=PARAMS["block"].astype(jnp.bfloat16))
    counting(lambda sum, n, errors: (sum / n, sum, n))
