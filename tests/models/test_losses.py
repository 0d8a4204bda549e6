"""A loss is a weighted mean over labels, also with what experts add to it. See
tests/test_training.py for the other losses.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from course_lib import configs, training
from course_lib.models import losses, parameters, transformer
from course_lib.models.mlp import MLPClassifier
from course_lib.text.data import Batch

DRAW = np.random.default_rng(0)
LOGITS = jnp.asarray(DRAW.normal(size=(4, 3, 5)), jnp.float32)
LABELS = jnp.arange(12).reshape(4, 3) % 5
WEIGHTS = jnp.array([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
BALANCE = jnp.array([1.0, 2.0, 3.0, 4.0])


@jax.jit
def loss_fn(params, batch, rng):
    """Takes logits and balance of the sequences that a batch names."""
    return losses.balanced_loss(
        lambda params, rows, rng: (LOGITS[rows[:, 0]], BALANCE[rows[:, 0]]), 0.5
    )(params, batch, rng)


def part(*rows):
    rows = jnp.array(rows)
    return Batch(jnp.broadcast_to(rows[:, None], (len(rows), 3)), LABELS[rows], WEIGHTS[rows])


def test_each_label_has_its_cross_entropy_and_the_balance_of_its_sequence():
    loss, metrics = loss_fn(None, part(0, 1, 2, 3), None)
    each = losses.cross_entropy(LOGITS, LABELS)[0] + 0.5 * BALANCE[:, None]
    np.testing.assert_allclose(loss, (each * WEIGHTS).sum() / WEIGHTS.sum(), rtol=1e-6)
    assert training.mean_metrics(metrics)["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert training.mean_metrics(metrics)["balance"] == pytest.approx(
        (2 * 1 + 2 * 2 + 3 * 4) / 7, rel=1e-6
    )


@pytest.mark.parametrize("loss_chunks", [1, 3])
def test_the_z_loss_adds_the_square_of_the_logsumexp_with_all_logits_and_in_chunks(loss_chunks):
    config = configs.get("cpu")
    model = config.model
    model.update(num_layers=1, vocab_size=2048, loss_chunks=loss_chunks)
    params = jax.jit(lambda key: parameters.init(key, model))(jax.random.key(0))
    tokens = jnp.arange(16).reshape(2, 8)
    batch = Batch(tokens, tokens, jnp.ones((2, 8)))
    logits = np.asarray(jax.jit(transformer.function(model))(params, tokens), np.float64)
    found = []
    for model.z_loss in (0.0, 0.5):
        loss_fn = training.functions(config).loss_fn
        found.append(float(jax.jit(loss_fn)(params, batch, None)[0]))
    added = 0.5 * np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    assert found[1] - found[0] == pytest.approx(added, rel=1e-4)


def test_without_any_weight_the_loss_and_its_gradient_are_zero():
    def apply_fn(params, rows, rng):
        return LOGITS[rows[:, 0]] * params, BALANCE[rows[:, 0]] * params

    loss_fn = losses.balanced_loss(apply_fn, 0.5)
    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    (loss, _), grad = value_and_grad(jnp.float32(1), part(2), None)
    assert loss == grad == 0


# A model in Flax's newer interface, NNX.


class NnxClassifier(nnx.Module):
    """`MLPClassifier` once more; `layers` draw their dropout one after the other."""

    def __init__(self, width, hidden, classes, rate=0.5):
        rngs = nnx.Rngs(0)
        self.input_layer = nnx.Linear(width, hidden, rngs=rngs)
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.dropout, self.another = (nnx.Dropout(rate, rngs=rngs) for _ in range(2))
        self.output_layer = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, inputs):
        return self.output_layer(self.dropout(nn.silu(self.norm(self.input_layer(inputs)))))


def test_an_nnx_model_has_the_gradients_of_the_same_model_in_linen():
    linen, of_nnx = MLPClassifier(hidden_size=32, num_classes=7), NnxClassifier(16, 32, 7)
    params = nnx.state(of_nnx, nnx.Param)
    init = jax.jit(lambda key: linen.init(key, jnp.zeros((1, 16)), train=False)["params"])
    plain = init(jax.random.key(0))
    assert jax.tree.structure(nnx.to_pure_dict(params)) == jax.tree.structure(plain)
    nnx.replace_by_pure_dict(params, plain)
    labels, weights = DRAW.integers(0, 7, 24), DRAW.integers(0, 3, 24).astype(np.float32)
    batch = Batch(jnp.asarray(DRAW.normal(size=(24, 16)), jnp.float32), labels, weights)
    batch = jax.tree.map(jnp.asarray, batch)
    models = (losses.as_function(linen), plain), (losses.as_function(of_nnx), params)
    with jax.default_matmul_precision("highest"):
        expected, found = (
            jax.jit(jax.grad(lambda p, f=f: losses.classification_loss(f)(p, batch, None)[0]))(
                p
            )
            for f, p in models
        )
    pairs = zip(*map(jax.tree.leaves, (nnx.to_pure_dict(found), expected)), strict=True)
    for one, other in pairs:
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)


def test_dropout_of_an_nnx_model_follows_the_key_alone_and_each_layer_draws_its_own():
    class Drops(nnx.Module):
        def __init__(self):
            self.one, self.two = (nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, inputs):
            return self.scale * jnp.stack([self.one(inputs), self.two(inputs)])

    model, inputs, keys = Drops(), jnp.ones(64), jax.random.split(jax.random.key(0))
    apply_fn, params = losses.as_function(model), nnx.state(model, nnx.Param)
    np.testing.assert_array_equal(apply_fn(params, inputs), 1)
    first, again, other = (apply_fn(params, inputs, key) for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first, again)
    assert set(np.unique(first)) == {0, 2}
    assert np.any(first != other) and np.any(first[0] != first[1])


def test_an_nnx_model_that_draws_in_evaluation_draws_the_same_each_time():
    class Draws(nnx.Module):
        def __init__(self):
            self.rngs, self.scale = nnx.Rngs(0), nnx.Param(jnp.ones(()))

        def __call__(self, inputs):
            return self.scale * (inputs + jax.random.normal(self.rngs(), inputs.shape))

    model, inputs = Draws(), jnp.ones(8)
    apply_fn, params = losses.as_function(model), nnx.state(model, nnx.Param)
    first = apply_fn(params, inputs)
    np.testing.assert_array_equal(first, apply_fn(params, inputs))
    np.testing.assert_allclose(first, jax.jit(apply_fn)(params, inputs), rtol=1e-6)


def test_an_nnx_model_with_other_state_is_refused_by_its_name():
    class Normalized(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    with pytest.raises(ValueError, match=r"model=Normalized must .* not norm\.mean.*LayerNorm"):
        losses.as_function(Normalized())
    with pytest.raises(ValueError, match="model=int must be a Linen or an NNX module"):
        losses.as_function(3)
