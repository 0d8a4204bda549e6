"""Laws of optimizers whose state is divided over devices (ZeRO): the same updates, less memory.

The update itself is compared, for the same gradients: a trajectory through Adam would hide or
enlarge differences.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from slow_cases import slow

from course_lib import configs, measure, optimizers, training
from course_lib.many_devices import meshes, muon, sharding, strategies
from course_lib.many_devices.options import Strategy

DEVICES = 4
MUON = {"optimizer.name": "muon", "optimizer.weight_decay": 0.1, "model.num_layers": 8}
# SGD has no state; Adam's is AdamW's.
NAMES = [name for name in optimizers.OPTIMIZERS if name not in ("sgd", "adam")]


@pytest.fixture(autouse=True)
def promotion_as_flax_and_optax_need_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def config_of(name, **options):
    config = configs.get("cpu")
    config.model.update(
        num_layers=2, hidden_size=128, vocab_size=128, num_outputs=128, max_seq_len=8
    )
    # without biases there are half as many arrays to compile an update for
    config.model.update(scan_layers=True, use_bias=False)
    config.data.update(batch_size=8, seq_len=8)
    config.optimizer.update(name=name, block_size=32, schedule="constant", clip_norm=0.0)
    if not optimizers.OPTIMIZERS[name].decays:
        config.optimizer.weight_decay = 0.0
    config.optimizer.update(options)
    return config


def mesh():
    return meshes.make({"data": DEVICES}, meshes.devices(DEVICES))


@functools.cache
def parameters():
    """Returns the parameters that each optimizer begins with."""
    init = training.functions(config_of("adamw")).init
    return jax.jit(lambda key: init(key).params)(jax.random.key(0))


@functools.cache
def gradients(step):
    """Returns random gradients of a step."""
    leaves, tree = jax.tree.flatten(parameters())
    rng = np.random.default_rng(step)
    normal = [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves]
    return jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in normal])


def second_update(config, place):
    """Returns the update and the state after two steps with random gradients; `place` puts
    gradients, state and parameters somewhere.
    """
    optimizer = optimizers.from_config(config.optimizer)
    params = parameters()
    params, state = place(params, jax.jit(optimizer.init)(params))
    step = jax.jit(optimizer.update)
    for number in (1, 2):
        grads, _ = place(gradients(number), None)
        compiled = step.lower(grads, state, params).compile()
        update, state = compiled(grads, state, params)
    return update, state, compiled


def divided(config):
    specs, grads = strategies.layout(config, mesh(), Strategy(zero=1))
    places = sharding.place((grads, specs.opt_state), mesh())

    def place(tree, state):
        placed = jax.tree.map(jax.device_put, tree, places[0])
        return placed, state and jax.tree.map(jax.device_put, state, places[1])

    return place


@pytest.mark.parametrize(
    "name", [n if n in ("adamw_8bit", "adafactor") else slow(n) for n in NAMES]
)
def test_divided_over_devices_an_optimizer_makes_the_updates_of_one_device(name):
    config, tolerance = config_of(name), optimizers.OPTIMIZERS[name].tolerance
    alone, _, _ = second_update(config, lambda tree, state: (tree, state))
    update, state, compiled = second_update(config, divided(config))
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(update), strict=True
    ):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        error = np.linalg.norm(one - other)
        assert error <= tolerance * np.linalg.norm(one), jax.tree_util.keystr(path)
    sent = measure.ledger(compiled, mesh()).payload()
    # An update of each number by itself needs no other device; sums over devices are rounded.
    assert (sent == 0) == (tolerance == 0)
    # A device keeps its part of state with a parameter's shape; the rest is small.
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in _arrays(state))
    whole = sum(leaf.nbytes for leaf in _arrays(state))
    assert own - whole / DEVICES < 0.02 * sum(leaf.nbytes for leaf in jax.tree.leaves(alone))


def _arrays(state):
    return [
        leaf
        for leaf in jax.tree.leaves(state)
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def test_a_block_that_would_straddle_devices_is_refused_with_a_size_that_works():
    config = config_of("adamw_8bit", block_size=128)
    with pytest.raises(ValueError, match=r"block_size=128 must divide the 32.*block_size=32"):
        strategies.build(config, mesh(), Strategy(zero=1))
    strategies.layout(config, mesh(), Strategy(zero=0))  # nothing is divided


@pytest.mark.parametrize(
    ("axes", "zero", "scanned"),
    [
        ({"data": 4, "tensor": 2}, 3, True),
        slow({"data": 8}, 1, True),
        slow({"data": 8}, 3, False),
        slow({"data": 4, "tensor": 2}, 3, False),
    ],
)
def test_muon_makes_the_updates_of_one_device_on_whole_matrices_of_stacked_layers(
    axes, zero, scanned
):
    config = one_device.small(**MUON, **{"model.scan_layers": scanned})
    params = jax.jit(lambda key: training.functions(config).init(key).params)(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    normal = np.random.default_rng(0).standard_normal
    grads = tree.unflatten([normal(leaf.shape, np.float32) for leaf in leaves])
    grid, chosen = one_device.grid(**axes), Strategy(zero=zero)
    specs, cut = strategies.layout(config, grid, chosen)

    def update(around=None, place=lambda tree, specs: tree):
        optimizer = optimizers.from_config(config.optimizer, around=around)
        state = place(optimizer.init(params), specs.opt_state)
        args = place(grads, cut), state, place(params, specs.params)
        compiled = one_device.jit(optimizer.update).lower(*args).compile()
        return compiled(*args)[0], compiled

    whole = functools.partial(muon.on_stacks, params=params, specs=cut, mesh=grid)
    one, _ = update()
    other, compiled = update(
        whole, lambda tree, specs: jax.device_put(tree, sharding.place(specs, grid))
    )
    assert not one_device.different_leaves(other, jax.device_get(one))
    kinds = {row["kind"] for row in measure.ledger(compiled, grid).rows()}
    assert (kinds == {"all-to-all"}) == scanned, kinds
