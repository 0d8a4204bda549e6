"""Tokens go to the experts that their router finds most probable, in their order, as long as
there is room.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest

from course_lib import configs, training
from course_lib.models import layers, parameters, routing, transformer
from course_lib.models.hooks import Hooks
from course_lib.models.products import with_products

LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7, 4)), jnp.float32)
route = jax.jit(routing.route, static_argnums=(1, 2))


def test_routing_is_that_of_a_plain_loop():
    probabilities = np.asarray(jax.nn.softmax(LOGITS))
    dispatch, combine = np.zeros((2, 3, 7, 4, 3))
    asked = np.zeros((3, 4))  # how often each expert is chosen, with or without room
    for b in range(3):
        rooms = np.zeros(4, int)
        for token in range(7):
            for expert in np.argsort(-probabilities[b, token])[:2]:
                if rooms[expert] < 3:
                    dispatch[b, token, expert, rooms[expert]] = 1
                    combine[b, token, expert, rooms[expert]] = probabilities[b, token, expert]
                rooms[expert] += 1
                asked[b, expert] += 1
    found = route(LOGITS, 2, 3)
    np.testing.assert_array_equal(found.dispatch, dispatch)
    np.testing.assert_allclose(found.combine, combine, rtol=1e-6)
    balance = 4 * (asked / 14 * probabilities.mean(axis=1)).sum(axis=1)
    np.testing.assert_allclose(found.balance, balance, rtol=1e-6)
    assert dispatch.sum() < 3 * 7 * 2  # some tokens found no room


OTHER_LENGTHS = inspect.unwrap(routing.dropless)  # as outside of tests, which check types
BAD = [
    (lambda: routing.route(LOGITS, 5, 3), "per_token=5 must be between 1 and the 4 experts"),
    (lambda: routing.route(LOGITS, 2, 0), "capacity=0"),
    (lambda: routing.capacity(8, 0, 1, 1.0), "an expert needs slots"),
    (lambda: routing.capacity(8, 4, 1, float("nan")), "an expert needs slots"),
    (lambda: routing.capacity(8, 4, 1, float("inf")), "an expert needs slots"),
    (lambda: routing.capacity(8, 4, 5, 1.0), "per_token=5 must be between 1 and the 4 experts"),
    (
        lambda: OTHER_LENGTHS(lambda rows, _: rows, jnp.ones((2, 6, 5)), LOGITS, 2),
        "x.shape=.* must begin as",
    ),
    (lambda: routing.route(jnp.zeros((2, 0, 4)), 1, 1), "with at least one token"),
    (lambda: configs.check(small(capacity_factor=1e-12)), "capacity_factor=1e-12"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_a_way_that_no_token_can_go_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("per_token", [1, 2])
def test_balance_is_one_without_a_preference_and_experts_by_choices_where_all_are_sure(
    per_token,
):
    even = route(jnp.zeros((2, 5, 4)), per_token, 5).balance
    np.testing.assert_allclose(even, 1, rtol=1e-6)
    sure = np.zeros((2, 5, 4), np.float32)
    sure[..., [3, 1][:per_token]] = 100
    found = route(sure, per_token, 5).balance
    np.testing.assert_allclose(found, 4 / per_token, rtol=1e-6)


def test_a_step_down_the_balance_makes_choices_more_even():
    logits = np.asarray(LOGITS) + np.float32([1, 0, 0, 0])

    @jax.jit
    @jax.value_and_grad
    def balance(logits):
        return routing.route(logits, 1, 7).balance.sum()

    before, slope = balance(logits)
    assert balance(logits - 5 * np.asarray(slope))[0] < before


@pytest.mark.parametrize(
    ("length", "num_experts", "per_token", "factor", "expected"),
    [
        (16, 8, 1, 1.0, 2),
        (16, 8, 2, 1.25, 5),
        (10, 1, 1, 1.1, 10),
        (100, 10, 1, 1.1, 11),
        (16, 8, 1, 0.1, 1),
    ],
)
def test_capacity_is_the_even_share_times_a_factor_rounded_up(
    length, num_experts, per_token, factor, expected
):
    assert routing.capacity(length, num_experts, per_token, factor) == expected


def small(**changes):
    given = {"num_experts": 4, "experts_per_token": 2} | changes
    return one_device.small(**{f"model.{name}": value for name, value in given.items()})


def mlp(model):
    """Returns the MLP of a model's layers, its parameters, and activations to apply it to; both
    as NumPy arrays.
    """
    x = np.random.default_rng(1).normal(size=(3, 7, model.hidden_size))
    params = jax.jit(lambda: parameters.init(jax.random.key(0), model)["block"]["mlp"])()
    hooks = with_products(Hooks(), flat_products=False)
    run = jax.jit(lambda params, x: layers.mlp(model, hooks, params, x, None)[0])
    return run, jax.tree.map(lambda leaf: np.array(leaf)[0], params), np.float32(x)


def test_the_router_computes_in_float32_also_where_factors_of_float32_are_rounded_by_default():
    """As on GPUs and TPUs: to 11 bits, or to 8, unless the highest precision is asked for."""
    model = small(dtype="bfloat16").model
    run, params, x = mlp(model)
    gradients = jax.make_jaxpr(jax.grad(lambda *given: run.__wrapped__(*given).sum(), (0, 1)))(
        params, x.astype(jnp.bfloat16)
    )
    of_router = []
    for eqn in gradients.eqns:
        factors = [var.aval for var in eqn.invars]
        # Other products are of bfloat16, or find places from zeros and ones, which have no
        # width.
        if (
            eqn.primitive.name == "dot_general"
            and factors[0].dtype == factors[1].dtype == jnp.float32
        ):
            of_router += [eqn.params["precision"]] * any(
                model.hidden_size in factor.shape for factor in factors
            )
    # the logits, and gradients of tokens and router
    assert of_router == 3 * [(jax.lax.Precision.HIGHEST,) * 2]


RENAMED = {"expert_in": "input_layer", "expert_out": "output_layer"}
RENAMED |= {"expert_gate": "gate_layer"}


@pytest.mark.parametrize("gate", [False, True])
def test_one_expert_with_room_for_all_is_an_mlp(gate):
    model = small(num_experts=1, experts_per_token=1, mlp_gate=gate).model
    (expected, params, x), (found, *_) = (
        mlp(small(num_experts=0, mlp_gate=gate).model),
        mlp(model),
    )
    stacked = {
        new: jax.tree.map(lambda leaf: leaf[None], params[old])
        for new, old in RENAMED.items()
        if old in params
    }
    same = {
        "pre_norm": params["pre_norm"],
        "router": np.zeros((model.hidden_size, 1), np.float32),
        **stacked,
    }
    np.testing.assert_allclose(found(same, x), expected(params, x), rtol=1e-5, atol=1e-6)


def test_a_token_without_room_is_left_to_the_residual():
    # room for one token of a sequence at each expert
    model = small(experts_per_token=1, capacity_factor=0.1).model
    run, params, x = mlp(model)
    params["router"] = np.float32([[1e-3, 0, 0, 0]] * model.hidden_size)
    norms = np.linalg.norm(run(params, abs(x)), axis=-1)
    assert (norms == 0).sum() >= 3 * (7 - 2) and ((norms > 0).sum(axis=1) >= 1).all()


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("preferred", [(), (2,), (0, 3)], ids=["mixed", "one", "two"])
def test_dropless_experts_are_those_with_room_for_every_token(preferred, gate):
    """Values and gradients, also if all tokens choose the same experts, and others get none."""
    per_token = max(1, len(preferred))
    whole = dict(experts_per_token=per_token, mlp_gate=gate)
    all_find_room = small(capacity_factor=4 / per_token, **whole).model
    _, params, x = mlp(all_find_room)
    draw = np.random.default_rng(2)
    params = jax.tree.map(
        lambda leaf: leaf + np.float32(draw.normal(size=leaf.shape) / 8), params
    )
    if preferred:
        x = abs(x)
        params["router"] = np.zeros_like(params["router"])
        params["router"][:, list(preferred)] = 3
        params["pre_norm"] = {"scale": np.full_like(x[0, 0], 0.05), "bias": x[0, 0]}
    hooks = with_products(Hooks(), flat_products=False)

    def loss(model, params, x):
        y, balance = layers.mlp(model, hooks, params, x, None)
        return (y * draw_like).sum() + 3 * balance.sum(), (y, balance)

    draw_like = jnp.asarray(draw.normal(size=x.shape), jnp.float32)
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, model), (0, 1), has_aux=True))(params, x)
        for model in (small(dropless=True, **whole).model, all_find_room)
    )
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    if preferred:  # the experts that nobody chose have no gradient
        nobody = [e for e in range(4) if e not in preferred]
        assert not np.any(np.asarray(found[0][0]["expert_in"]["kernel"])[nobody])


def test_a_dropless_layer_keeps_the_tokens_that_a_full_expert_drops():
    run, params, x = mlp(small(dropless=True, experts_per_token=1, capacity_factor=0.1).model)
    params["router"] = np.float32([[1e-3, 0, 0, 0]] * len(params["router"]))
    assert (np.linalg.norm(run(params, abs(x)), axis=-1) > 0).all()


def test_scanned_layers_leave_the_balance_that_layers_one_by_one_leave():
    scanned, unrolled = small(), small(scan_layers=False)
    params, tokens = (
        jax.device_get(training.build(scanned).init(jax.random.key(0)).params),
        one_device.batch(scanned).inputs,
    )
    each = {
        f"block_{layer}": jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["block"])
        for layer in range(2)
    }
    one, other = (
        jax.jit(transformer.function(whole.model, balance=True))(params | each, tokens)
        for whole in (scanned, unrolled)
    )
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
