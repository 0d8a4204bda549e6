"""Laws of rematerialization, and of the list of what is saved."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from course_lib.lessons import saved_arrays
from course_lib.one_device import rematerialization

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def _layers(x, w):
    hidden = checkpoint_name(x @ w, "hidden")
    return jnp.sum(jnp.sin(jnp.sin(hidden)) @ w)


def _saved(policy_name, names=()):
    """Returns the saved arrays without the arguments, which are in memory anyway."""
    found = rematerialization.residuals(
        rematerialization.wrap(_layers, policy_name, names), X, W
    )
    return [residual for residual in found if not residual.why.startswith("argument")]


def test_without_remat_the_function_saves_its_arguments_and_what_each_derivative_needs():
    found = rematerialization.residuals(_layers, X, W)
    arguments = [residual for residual in found if residual.why.startswith("argument")]
    assert sorted(residual.bytes for residual in arguments) == [8 * 16 * 4, 16 * 16 * 4]
    cosines = [residual for residual in found if residual.why.startswith("cos")]
    assert [(r.bytes, r.shape, r.dtype) for r in cosines] == 2 * [
        (8 * 16 * 4, (8, 16), "float32")
    ]


def test_each_policy_saves_what_its_name_says():
    assert _saved("nothing") == []
    assert [residual.why for residual in _saved("names", ("hidden",))] == ["named 'hidden'"]
    assert [residual.why for residual in _saved("offload", ("hidden",))] == [
        "named 'hidden', moved to the host"
    ]
    assert [residual.why for residual in _saved("dots")] == ["dot_general"]
    assert {residual.why for residual in _saved("everything")} >= {"cos"}


def test_barriers_stand_around_the_repetition_but_in_a_loop():
    for in_loop in (False, True):
        wrapped = rematerialization.wrap(_layers, "nothing", in_loop=in_loop)
        [eqn] = jax.make_jaxpr(wrapped)(X, W).eqns
        assert eqn.params["prevent_cse"] is not in_loop


def test_products_with_batch_dimensions_are_kept_by_dots_and_not_by_dots_no_batch():
    def scores(x):
        return jnp.sum(jnp.sin(jnp.einsum("bqk,bsk->bqs", x, x)))

    def shapes(name):
        kept = jax.checkpoint(scores, policy=rematerialization.policy(name))
        return [residual.shape for residual in rematerialization.residuals(kept, x)]

    x = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
    assert shapes("dots") == [(2, 4, 8), (2, 4, 4)] and shapes("dots_no_batch") == [(2, 4, 8)]


def test_residuals_of_a_scan_are_listed_once_with_the_axis_of_its_iterations():
    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=5)[0].sum()

    assert {(r.shape, r.why) for r in rematerialization.residuals(loop, X, W)} == {
        ((16, 16), "argument [1]"),
        ((5, 8, 16), "input of a loop's body"),
        ((5, 8, 16), "cos"),
    }


def test_every_policy_gives_the_same_gradient():
    draw, grads = np.random.default_rng(0), []
    x, w = (draw.normal(size=shape.shape).astype(np.float32) for shape in (X, W))
    for name in rematerialization.POLICIES:
        names = ("hidden",) if name in ("names", "offload") else ()
        policy = rematerialization.policy(name, names)
        grads.append(jax.grad(jax.checkpoint(_layers, policy=policy), argnums=1))
    plain, *again = jax.jit(
        lambda *args: [grad(*args) for grad in (jax.grad(_layers, 1), *grads)]
    )(x, w)
    for found in again:  # another order of sums
        np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5 * abs(plain).max())


def test_each_byte_that_a_block_saves_belongs_to_an_operation():
    cases = {"all": {}, "input": {"remat": ("Block",)}, "attention's": {"remat": ("MLP",)}}
    saved, again = zip(*saved_arrays.by_operation(1, cases).values(), strict=True)
    for options, by_operation in zip(cases.values(), saved, strict=True):
        arrays = saved_arrays.of_block(1, **options)
        assert sum(by_operation.values()) == sum(array.bytes for array in arrays)
    assert [sum(of_case.values()) > 0 for of_case in again] == [False, True, True]
    assert saved[1] == dict.fromkeys(saved_arrays.PLACES, 0) | {
        ("MLP", "input"): 2 * 512 * 1024
    }
    assert all(again[2][place] == 0 for place in saved_arrays.PLACES if place[0] != "MLP")
