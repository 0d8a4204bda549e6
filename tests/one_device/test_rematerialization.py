"""Laws of rematerialization, and of the list of what is saved."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from course_lib.measure import hardware
from course_lib.one_device import rematerialization
from course_lib.smaller_and_faster import flash_attention

X = jax.ShapeDtypeStruct((8, 16), jnp.float32)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def _layers(x, w):
    hidden = checkpoint_name(x @ w, "hidden")
    return jnp.sum(jnp.sin(jnp.sin(hidden)) @ w)


def _saved(policy_name, names=()):
    """Returns the saved arrays without the arguments, which are in memory anyway."""
    found = rematerialization.residuals(
        jax.checkpoint(_layers, policy=rematerialization.policy(policy_name, names)), X, W
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


def test_products_with_batch_dimensions_are_kept_by_dots_and_not_by_dots_no_batch():
    def scores(x):
        return jnp.sum(jnp.sin(jnp.einsum("bqk,bsk->bqs", x, x)))

    x = jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
    shapes = {
        name: [
            residual.shape
            for residual in rematerialization.residuals(
                jax.checkpoint(scores, policy=rematerialization.policy(name)), x
            )
        ]
        for name in ("dots", "dots_no_batch")
    }
    assert shapes == {"dots": [(2, 4, 8), (2, 4, 4)], "dots_no_batch": [(2, 4, 8)]}


def test_residuals_of_a_scan_are_listed_once_with_the_axis_of_its_iterations():
    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=5)[0].sum()

    assert {(r.shape, r.why) for r in rematerialization.residuals(loop, X, W)} == {
        ((16, 16), "argument [1]"),
        ((5, 8, 16), "input of a loop's body"),
        ((5, 8, 16), "cos"),
    }


NO_KERNEL = flash_attention.why_no_kernel(hardware.get("a5000"))


@pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
def test_what_a_kernel_leaves_is_listed_with_the_kernel_as_its_origin():
    x = jax.ShapeDtypeStruct((1, 128, 2, 32), jnp.bfloat16)
    attend = functools.partial(flash_attention.attend, by="kernel")
    kept = rematerialization.residuals(
        lambda query, key, value: attend(query, key, value).astype(jnp.float32).sum(), x, x, x
    )
    whole = [r.why.split(" in ")[0] for r in kept if r.shape == x.shape]
    assert sorted(whole) == ["argument [0]", "argument [1]", "argument [2]", "pallas_call"]


def test_every_policy_gives_the_same_gradient():
    x, w = (
        jax.random.normal(jax.random.key(0), X.shape),
        jax.random.normal(jax.random.key(1), W.shape),
    )
    plain = jax.grad(_layers, argnums=1)(x, w)
    for name in rematerialization.POLICIES:
        names = ("hidden",) if name in ("names", "offload") else ()
        again = jax.jit(
            jax.grad(
                jax.checkpoint(_layers, policy=rematerialization.policy(name, names)), argnums=1
            )
        )(x, w)
        # another order of sums
        np.testing.assert_allclose(again, plain, rtol=1e-5, atol=1e-5 * jnp.abs(plain).max())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (("mlp",),),
            (
                r"remat=\('mlp',\) must hold names from \('MLP', 'Attn', 'Block'\): there is no"
                r" 'mlp'"
            ),
        ),
        (("MLP",), r"remat='MLP' must be a tuple"),
        ((("MLP",), "dot"), "remat_policy='dot' must be one of"),
        ((("MLP",), "names"), r"remat_names=\(\) must name a value for remat_policy='names'"),
        (((), "dots"), r"remat_policy='dots' must be 'nothing' for remat=\(\)"),
        (((), "offload", ("qkv",)), r"remat_policy='offload' must be 'nothing' for remat=\(\)"),
        ((("MLP",), "names", "qkv"), r"remat_names='qkv' must be a tuple"),
        (
            (("MLP",), "dots", ("qkv",)),
            r"remat_names=\('qkv',\) must be empty for remat_policy='dots'",
        ),
    ],
)
def test_a_choice_that_does_not_exist_or_would_change_nothing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        # without the tests' checks of types
        inspect.unwrap(rematerialization.check)(*arguments)
