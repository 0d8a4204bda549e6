"""Laws of optimizers built from a configuration."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from course_lib import configs, optimizers


def example_config(**options):
    config = configs.get("155m").optimizer
    config.update(options)
    return config


def moves(config, grads):
    """Returns the moves of one parameter, step by step."""
    optimizer = optimizers.from_config(config)
    param, moves = jnp.ones(()), []
    # Optax raises a float to the power of an int32 step count
    with jax.numpy_dtype_promotion("standard"):
        state, update = optimizer.init(param), jax.jit(optimizer.update)
        for grad in grads:
            move, state = update(jnp.float32(grad), state, param)
            moves.append(float(move))
    return moves


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.1] * 7),
        ("warmup_exponential", [0, 0.025, 0.05, 0.075, 0.1, 0.05, 0.025]),
        ("warmup_cosine", [0, 0.025, 0.05, 0.075, 0.1, 0.05, 0.0]),
        ("warmup_linear", [0, 0.025, 0.05, 0.075, 0.1, 0.05, 0.0]),
        ("warmup_stable_decay", [0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.05, 0.0, 0.0]),
    ],
)
def test_the_rate_follows_the_schedule(schedule, rates):
    stable = schedule == "warmup_stable_decay"
    options = dict(name="sgd", learning_rate=0.1, warmup_steps=4, decay_rate=0.5, cooldown=0.3)
    config = example_config(schedule=schedule, total_steps=7 if stable else 6, **options)
    np.testing.assert_allclose(moves(config, [1.0] * len(rates)), -np.array(rates), atol=1e-8)
    if stable:
        config.warmup_steps = 0
        np.testing.assert_allclose(moves(config, [1.0] * 3), -np.full(3, 0.1), atol=1e-8)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_adam_divides_the_mean_gradient_by_the_root_of_its_mean_square(name):
    config = example_config(name=name, schedule="constant", learning_rate=0.1, b1=0.8, b2=0.9)
    mean = square = 0.0
    expected = []
    for step, grad in enumerate([1.0, -2.0, 3.0], start=1):
        mean, square = 0.8 * mean + 0.2 * grad, 0.9 * square + 0.1 * grad**2
        expected.append(-0.1 * (mean / (1 - 0.8**step)) / (square / (1 - 0.9**step)) ** 0.5)
    np.testing.assert_allclose(moves(config, [1.0, -2.0, 3.0]), expected, rtol=1e-5)


def test_a_norm_is_clipped_before_the_update():
    options = dict(name="sgd", schedule="constant", learning_rate=0.1)
    for norm, expected in ((2.0, [-0.2, -0.1]), (0.0, [-0.8, -0.1])):
        found = moves(example_config(clip_norm=norm, **options), [8.0, 1.0])
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_an_optimizer_decays_parameters_or_refuses_to(name):
    config = configs.get("155m")
    config.optimizer.update(name=name, schedule="constant", learning_rate=0.1, weight_decay=0.5)
    if optimizers.OPTIMIZERS[name].decays:
        configs.check(config)
        np.testing.assert_allclose(moves(config.optimizer, [0.0]), [-0.05], rtol=1e-6)
    else:
        with pytest.raises(ValueError, match="optimizer.weight_decay=0.5 must be 0"):
            configs.check(config)


@pytest.mark.parametrize("name", [n for n, row in optimizers.OPTIMIZERS.items() if row.decays])
def test_norms_and_biases_need_not_decay(name):
    layer = {"kernel": jnp.ones((4, 32)), "scale": jnp.ones(32)}
    params = {"embed": {"embedding": jnp.ones((8, 4))}, "block_0": {"mlp": layer}}
    params["block_0"]["qkv"] = {"kernel": jnp.ones((4, 2, 6)), "bias": jnp.ones((2, 6))}
    params["block"] = {"norm": {"scale": jnp.ones((3, 4))}}
    moved = {}
    for decayed in ("all", "matrices"):
        options = dict(name=name, schedule="constant", learning_rate=0.1, weight_decay=0.5)
        optimizer = optimizers.from_config(example_config(decayed=decayed, **options))
        still = jax.tree.map(jnp.zeros_like, params)
        with jax.numpy_dtype_promotion("standard"):
            found, _ = jax.jit(optimizer.update)(still, optimizer.init(params), params)
        found = flatten_dict(jax.tree.map(lambda leaf: float(leaf.min()), found), sep="/")
        moved[decayed] = {x for x, move in found.items() if move == pytest.approx(-0.05)}
        assert set(found) - moved[decayed] == {x for x, move in found.items() if move == 0}
        assert decayed == "matrices" or set(found) == moved["all"]
    matrices = {"block_0/mlp/kernel", "block_0/qkv/kernel"}
    matrices |= set() if name == "muon" else {"embed/embedding"}  # of which Adam trains that
    assert moved["matrices"] == matrices


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_an_optimizer_that_streams_keeps_moments_in_the_shapes_of_parameters(name):
    config = configs.get("155m")
    config.optimizer.update(name=name, offload=True)
    if not optimizers.OPTIMIZERS[name].streams:
        with pytest.raises(ValueError, match=f"optimizer.name='{name}' must be 'adam' or"):
            configs.check(config)
        return
    configs.check(config)
    config.optimizer.offload = False
    matrix = jax.ShapeDtypeStruct((3, 64, 32), jnp.float32)
    state = jax.eval_shape(optimizers.from_config(config.optimizer).init, matrix)
    assert {leaf.shape for leaf in jax.tree.leaves(state)} == {(), (3, 64, 32)}


def test_parameters_and_moments_are_rounded_with_different_random_numbers():
    config = example_config(name="adamw_bf16", param_dtype="bfloat16")
    params = optimizers.cast_params(config, {"w": jnp.ones(3)})
    assert params["w"].dtype == jnp.bfloat16
    leaves = jax.tree.leaves(optimizers.from_config(config).init(params))
    keys = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    assert len(keys) == 2 and not np.array_equal(*map(jax.random.key_data, keys))


def layer(draw):
    """Returns numbers for a layer. As one array, 33 scales have two large dimensions, which
    Adafactor factors, and the biases the 4096 numbers from which on moments have 8 bits.
    """
    shapes = {"kernel": (32, 160), "bias": (160,), "scale": (48,)}
    return {"mlp": {name: normal(draw, *shape) for name, shape in shapes.items()}}


def normal(draw, *shape):
    # Adafactor's rate follows the size of a parameter, and biases begin at 0: here, none does.
    return jnp.asarray(draw.normal(draw.uniform(-1, 1), draw.uniform(0.1, 3), shape), "float32")


class Outside(NamedTuple):
    """Parameters of a model that is not the course's, with layers of any name."""

    deep: Any


READ = [name for name, row in optimizers.OPTIMIZERS.items() if "stacks" in row.reads]
SCANNED = [(name, dict) for name in optimizers.OPTIMIZERS] + [(name, Outside) for name in READ]


@pytest.mark.parametrize(("name", "kind"), SCANNED)
def test_scanned_layers_get_the_updates_of_single_ones(name, kind):
    layers, draw = 33, np.random.default_rng(0)
    tolerance = max(1e-5, optimizers.OPTIMIZERS[name].tolerance)
    if name == "adamw_bf16":  # moments of a layer are rounded with other random numbers
        tolerance = 2.0**-7
    decays = dict(weight_decay=0.1) if optimizers.OPTIMIZERS[name].decays else {}
    config = example_config(name=name, schedule="constant", clip_norm=0.0, **decays)
    single = optimizers.from_config(config)
    scanned, inside = single, "block"
    if kind is Outside:
        names = dict(
            matrices=lambda name: name.endswith("kernel"),
            stacks=lambda name: name.startswith("deep/"),
        )
        scanned, inside = optimizers.from_config(config, **names), "deep"
    params, *grads = ([layer(draw) for _ in range(layers)] for _ in range(3))
    start, *stacks = (kind(**{inside: stacked(each)}) for each in (params, *grads))
    with jax.numpy_dtype_promotion("standard"):
        alone = [single.init({"block_0": one}) for one in params]
        together, update = scanned.init(start), jax.jit(scanned.update)
        one_update = jax.jit(single.update)
        for each, stack in zip(grads, stacks, strict=True):
            found, together = update(stack, together, start)
            for i, (grad, param) in enumerate(zip(each, params, strict=True)):
                given = {"block_0": grad}, alone[i], {"block_0": param}
                expected, alone[i] = one_update(*given)
                for array, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
                    assert np.linalg.norm(array[i] - want) <= tolerance * np.linalg.norm(want)


def stacked(layers):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def test_muon_takes_the_kernels_of_layers_as_matrices_and_leaves_the_rest_to_adam():
    wanted = {
        ("embed", "embedding"): ((64, 32), None),
        ("block", "mlp", "input_layer", "kernel"): ((2, 32, 128), ((1,), (2,))),
        ("block", "mlp", "input_layer", "bias"): ((2, 128), None),
        ("block", "attn", "qkv", "kernel"): ((2, 32, 4, 24), ((1,), (2, 3))),
        ("block", "attn", "output_layer", "kernel"): ((2, 4, 8, 32), ((1, 2), (3,))),
        ("block_0", "mlp", "expert_in", "kernel"): ((4, 8, 16), ((1,), (2,))),
        ("output_layer", "kernel"): ((32, 64), None),
    }
    tree = unflatten_dict({path: jnp.ones(shape) for path, (shape, _) in wanted.items()})
    dims = flatten_dict(optimizers.matrix_axes(tree))
    assert {path: dims[path] for path in wanted} == {p: want for p, (_, want) in wanted.items()}
