"""Laws that Optax holds its own optimizers to (optax/contrib/_common_test.py,
_sharding_test.py), for all of the library's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import slow

from course_lib import optimizers
from course_lib.smaller_and_faster import optimizer_memory

EACH = pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
OWN = pytest.mark.parametrize("name", ["adamw_bf16", "adamw_8bit", "muon", "adafactor"])
PACKED = pytest.mark.parametrize("name", ["adamw_bf16", "adamw_8bit"])


@pytest.fixture(autouse=True)
def promotion_as_optax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def made(name, rate=1e-2):
    where = dict(matrices=lambda name: True) if name == "muon" else {}
    return optimizers.get(name, rate, **where)


def normal(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def types(tree):
    return [str(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)]


@EACH
def test_an_optimizer_finds_the_minimum_of_a_quadratic_over_a_tuple_of_arrays(name):
    goal = normal(0, 64, 64), normal(1, 3)  # 4,096 numbers, packed in 8 bits, and three
    optimizer = made(name, optax.linear_schedule(0.05, 0.0, 1000))
    start = normal(2, 64, 64), normal(3, 3)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            grads = jax.tree.map(lambda p, g: 2 * (p - g), params, goal)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), length=1000)[0][0]

    for found, wanted in zip(train(start), goal, strict=True):
        assert jnp.abs(found - wanted).max() < 0.01


FORMS: dict = {functools.partial(made, name): () for name in optimizers.OPTIMIZERS} | {
    optimizer_memory.adamw_bf16: (),
    optimizer_memory.adamw_8bit: ("block_size", "stacks"),
    optimizers.muon: ("matrices", "stacks"),
    optimizers.adafactor: ("stacks",),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_learning_rate_by_name_and_every_number_of_optaxs_form_can_be_injected(form):
    params, grads = {"w": normal(0, 64, 64)}, {"w": normal(1, 64, 64)}
    options = dict(matrices=lambda name: True) if form is optimizers.muon else {}
    plain = form(0.03, **options)
    injected = optax.inject_hyperparams(form, static_args=FORMS[form])(0.03, **options)
    found, expected = (
        jax.jit(one.update)(grads, jax.jit(one.init)(params), params)[0]["w"]
        for one in (injected, plain)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_block_size_that_is_no_constant_is_refused_with_the_argument_that_makes_it_one():
    injected = optax.inject_hyperparams(optimizer_memory.adamw_8bit)(0.03)
    with pytest.raises(ValueError, match="block_size=(.|\n)*static_args='block_size'"):
        jax.jit(injected.init)({"w": normal(0, 64, 64)})


@OWN
@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_updates_have_the_dtype_of_parameters_and_a_state_keeps_its_types(name, dtype):
    optimizer, params = made(name), {"w": 1 + abs(normal(0, 64, 64, dtype=dtype))}
    state = jax.jit(optimizer.init)(params)
    updates, new = jax.jit(optimizer.update)(params, state, params)
    assert updates["w"].dtype == dtype and types(new) == types(state)
    waiting = optax.MultiSteps(optimizer, every_k_schedule=4)
    updates, _ = jax.jit(waiting.update)(params, jax.jit(waiting.init)(params), params)
    assert updates["w"].dtype == dtype and not updates["w"].any()


SPECS = P("x"), P(None, "x"), P(None, None, "x")
OURS = "adamw_bf16", "adamw_8bit", "adafactor"
EXPLICIT = [(name, SPECS[2]) for name in OURS]
EXPLICIT += [slow(name, spec) for name in OURS for spec in SPECS[:2]]
EXPLICIT += [("muon", P("x"))]  # the matrices themselves divided, `optax.contrib.muon` fails


@pytest.mark.parametrize(("name", "spec"), EXPLICIT)
def test_on_a_mesh_with_explicit_axes_a_state_keeps_its_types(name, spec):
    if (name, spec) == ("adafactor", P("x")) and jax.__version_info__ < (0, 10):
        pytest.skip("JAX 0.7's vmap forgets how a state is divided over layers")
    where = {} if name == "adamw_bf16" else {"stacks": lambda name: True}
    where |= {"matrices": lambda name: True} if name == "muon" else {}
    optimizer, param = optimizers.get(name, 0.1, **where), normal(0, 8, 64, 256)
    alone, _ = optimizer.update({"w": param}, optimizer.init({"w": param}), {"w": param})
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(param, NamedSharding(mesh, spec))}
        states = [optimizer.init(params), jax.jit(optimizer.init)(params)]
        updates, new = jax.jit(optimizer.update)(params, states[0], params)
        assert types(states[0]) == types(states[1]) == types(new)
    np.testing.assert_allclose(updates["w"], alone["w"], rtol=1e-2, atol=1e-6)


@PACKED
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_moments_lie_where_their_parameters_do(name, spec, memory):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, spec, memory_kind=memory)
    state = made(name).init({"w": jax.device_put(normal(0, 64, 256), place)})
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(moments) == {"adamw_bf16": 2, "adamw_8bit": 4}[name]
    for leaf in moments:
        # a block of 256 numbers is a row, whose scale cannot be divided
        whole = P(None) if leaf.shape == (64, 1) and spec == P(None, "x") else spec
        expected = NamedSharding(mesh, whole, memory_kind=memory)
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), leaf.shape
        assert leaf.sharding.memory_kind == memory


@OWN
def test_none_in_the_place_of_a_parameter_stays_none(name):
    optimizer, params = made(name), {"a": normal(0, 64, 64), "c": None}
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["c"] is None and updates["a"].shape == (64, 64)
    alone = {"a": params["a"]}
    assert types(state) == types(optimizer.init(alone))


@PACKED
def test_complex_parameters_get_adams_updates(name):
    param = normal(0, 64, 64) + 1j * normal(1, 64, 64)
    found, expected = (
        one.update(param, one.init(param), param)[0] for one in (made(name), optax.adam(1e-2))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@OWN
def test_optaxs_wrappers_take_an_optimizer(name):
    params = {
        "a": normal(0, 64, 64),
        "s": jnp.ones(()),
        "e": jnp.zeros((0, 3)),
        "b": jnp.ones(3),
    }
    one, chosen = made(name), {"a": True, "s": True, "e": True, "b": False}
    labels = {"a": "x", "s": "x", "e": "x", "b": "y"}
    rest = optax.masked(optax.set_to_zero(), jax.tree.map(lambda x: not x, chosen))
    for wrapped in (
        optax.chain(optax.masked(one, chosen), rest),
        optax.partition({"x": one, "y": optax.set_to_zero(), "none": one}, labels),
    ):
        state = wrapped.init(params)
        state = optax.tree.map_params(wrapped, lambda leaf: leaf, state)
        updates, _ = optax.with_extra_args_support(wrapped).update(
            params, state, params, value=1
        )
        alone, _ = one.update(
            {"a": params["a"]}, one.init({"a": params["a"]}), {"a": params["a"]}
        )
        np.testing.assert_allclose(updates["a"], alone["a"], rtol=1e-2, atol=1e-6)
        assert updates["e"].shape == (0, 3) and not updates["b"].any()


@pytest.mark.parametrize("form", [optimizer_memory.adamw_bf16, optimizer_memory.adamw_8bit])
def test_decay_is_that_of_adamw_where_its_mask_allows_it(form):
    params = {"a": normal(0, 64, 64), "b": normal(1, 3)}
    grads, mask = jax.tree.map(jnp.zeros_like, params), {"a": True, "b": False}
    found, expected = (
        one.update(grads, one.init(params), params)[0]
        for make in (form, optax.adamw)
        for one in [make(0.1, weight_decay=0.5, mask=mask)]
    )
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6)


def test_bfloat16_parameters_may_be_none_and_their_optimizer_gets_extra_arguments():
    def update(grads, state, params=None, *, value):
        return jax.tree.map(lambda g: g * value, grads), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = optimizer_memory.round_stochastically(inner)
    params = {"a": jnp.ones(8, jnp.bfloat16), "b": None}
    updates, _ = optimizer.update(params, optimizer.init(params), params, value=2.0)
    assert updates["b"] is None
    np.testing.assert_array_equal(updates["a"], 2.0)
