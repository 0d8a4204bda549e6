"""Laws of optimizers built from a configuration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_lib import configs, optimizers


def example_config(**options):
    config = configs.get("155m").optimizer
    config.update(options)
    return config


def moves(config, grads):
    """Returns the moves of one parameter, step by step."""
    optimizer = optimizers.from_config(config)
    param, moves = jnp.ones(()), []
    state = optimizer.init(param)
    # Optax raises a float to the power of an int32 step count
    with jax.numpy_dtype_promotion("standard"):
        for grad in grads:
            update, state = optimizer.update(jnp.float32(grad), state, param)
            moves.append(float(update))
    return moves


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.1] * 7),
        ("warmup_exponential", [0, 0.025, 0.05, 0.075, 0.1, 0.05, 0.025]),
        ("warmup_cosine", [0, 0.025, 0.05, 0.075, 0.1, 0.05, 0.0]),
    ],
)
def test_the_rate_follows_the_schedule(schedule, rates):
    config = example_config(
        name="sgd",
        schedule=schedule,
        learning_rate=0.1,
        warmup_steps=4,
        decay_rate=0.5,
        total_steps=6,
    )
    np.testing.assert_allclose(moves(config, [1.0] * 7), -np.array(rates), atol=1e-8)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_divides_the_mean_gradient_by_the_root_of_its_mean_square(name):
    config = example_config(name=name, schedule="constant", learning_rate=0.1, b1=0.8, b2=0.9)
    mean = square = 0.0
    expected = []
    for step, grad in enumerate([1.0, -2.0, 3.0], start=1):
        mean, square = 0.8 * mean + 0.2 * grad, 0.9 * square + 0.1 * grad**2
        expected.append(-0.1 * (mean / (1 - 0.8**step)) / (square / (1 - 0.9**step)) ** 0.5)
    np.testing.assert_allclose(moves(config, [1.0, -2.0, 3.0]), expected, rtol=1e-5)


def test_weight_decay_pulls_a_parameter_towards_zero_without_any_gradient():
    options = dict(schedule="constant", learning_rate=0.1, weight_decay=0.5)
    assert moves(example_config(name="adam", **options), [0.0]) == [0.0]
    np.testing.assert_allclose(
        moves(example_config(name="adamw", **options), [0.0]), [-0.05], rtol=1e-6
    )


def test_a_norm_is_clipped_before_the_update():
    options = dict(name="sgd", schedule="constant", learning_rate=0.1)
    np.testing.assert_allclose(
        moves(example_config(clip_norm=2.0, **options), [8.0, 1.0]), [-0.2, -0.1], rtol=1e-6
    )
    np.testing.assert_allclose(
        moves(example_config(clip_norm=0.0, **options), [8.0]), [-0.8], rtol=1e-6
    )


def test_names_that_do_not_exist_are_refused_with_the_list():
    with pytest.raises(
        ValueError, match=r"optimizer.name='adma' must be one of \['sgd', 'adam', 'adamw', .*\]"
    ):
        optimizers.from_config(example_config(name="adma"))
    with pytest.raises(ValueError, match="optimizer.schedule='cosine' must be one of"):
        optimizers.from_config(example_config(schedule="cosine"))
    with pytest.raises(ValueError, match="optimizer.param_dtype='int8' must be one of"):
        optimizers.from_config(example_config(param_dtype="int8"))


@pytest.mark.parametrize("name", optimizers.DECAYING)
def test_each_decaying_optimizer_pulls_parameters_towards_zero(name):
    options = dict(schedule="constant", learning_rate=0.1, weight_decay=0.5)
    np.testing.assert_allclose(
        moves(example_config(name=name, **options), [0.0]), [-0.05], rtol=1e-6
    )


@pytest.mark.parametrize("name", sorted(set(optimizers.OPTIMIZERS) - set(optimizers.DECAYING)))
def test_weight_decay_with_an_optimizer_that_ignores_it_is_refused(name):
    config = configs.get("155m")
    config.optimizer.update(name=name, weight_decay=0.1)
    with pytest.raises(ValueError, match="optimizer.weight_decay=0.1 must be 0"):
        configs.check(config)


def test_parameters_are_cast_as_configured():
    params = {"w": jnp.ones(3)}
    for dtype in optimizers.PARAM_DTYPES:
        cast = optimizers.cast_params(example_config(param_dtype=dtype), params)
        assert cast["w"].dtype == jnp.dtype(dtype)


def test_parameters_and_moments_are_rounded_with_different_random_numbers():
    config = example_config(name="adamw_bf16", param_dtype="bfloat16")
    optimizer = optimizers.from_config(config)
    state = optimizer.init({"w": jnp.ones(3, jnp.bfloat16)})
    keys = [
        leaf
        for leaf in jax.tree.leaves(state)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    assert len(keys) == 2 and not np.array_equal(*map(jax.random.key_data, keys))


def test_bfloat16_parameters_with_float16_activations_are_refused():
    config = configs.get("t4")
    config.optimizer.param_dtype = "bfloat16"
    with pytest.raises(ValueError, match="optimizer.param_dtype='bfloat16' must come with"):
        configs.check(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "adamw_8bit"}, "optimizer.offload=True must come with 'adam'"),
        ({"param_dtype": "bfloat16"}, "must come with optimizer.param_dtype='float32'"),
    ],
)
def test_a_state_that_cannot_be_streamed_is_not_offloaded(change, message):
    config = configs.get("155m")
    config.optimizer.update(offload=True, **change)
    with pytest.raises(ValueError, match=message):
        configs.check(config)
