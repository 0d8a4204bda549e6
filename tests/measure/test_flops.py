"""Laws of counted FLOPs: they are those of the hand formulas."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from shapes import array

from course_lib.measure import flops

B, D, F, N = 8, 16, 64, 3
FORWARD = 2 * B * D * F + 2 * B * F * D  # of one MLP: (B, D) @ (D, F), then (B, F) @ (F, D)


def mlp(x, weights):
    up, down = weights
    return jax.nn.gelu(x @ up) @ down


def gradient(fn, **kwargs):
    return jax.grad(lambda x, weights: jnp.sum(fn(x, weights, **kwargs) ** 2), argnums=(0, 1))


X, WEIGHTS = array(B, D), (array(D, F), array(F, D))
STACKED = (array(N, D, F), array(N, F, D))


def layers(x, weights, remat):
    layer = jax.checkpoint(mlp, prevent_cse=False) if remat else mlp
    return jax.lax.scan(lambda x, w: (x + layer(x, w), None), x, weights)[0]


def test_a_matrix_product_takes_two_operations_for_each_pair_that_it_multiplies():
    assert flops(jnp.matmul, array(5, 7), array(7, 11)).total == {"float32": 2 * 5 * 7 * 11}
    scores = functools.partial(jnp.einsum, "BLHK,BMHK->BHLM")
    batched = 2 * (2 * 3) * 5 * 6 * 4
    assert flops(scores, array(2, 5, 3, 4), array(2, 6, 3, 4)).total == {"float32": batched}


def test_a_complex_multiplication_and_addition_takes_eight_operations():
    left, right = array(5, 7, dtype=jnp.complex64), array(7, 11, dtype=jnp.complex64)
    assert flops(jnp.matmul, left, right).total == {"complex64": 8 * 5 * 7 * 11}


def test_a_grouped_product_counts_each_row_once_and_its_gradient_twice():
    rows, kernels, sizes = array(10, 7), array(3, 7, 11), array(3, dtype=jnp.int32)

    def total(rows, kernels, sizes):
        return jax.lax.ragged_dot(rows, kernels, sizes).sum()

    product = 2 * 10 * 7 * 11
    assert flops(jax.lax.ragged_dot, rows, kernels, sizes).total == {"float32": product}
    both = jax.value_and_grad(total, argnums=(0, 1))
    assert flops(both, rows, kernels, sizes).total == {"float32": 3 * product}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_counts_as_the_product_that_it_is_at_each_output(groups):
    convolve = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        feature_group_count=groups,
    )
    image, kernel = array(2, 4, 10, 10), array(6, 4 // groups, 3, 3)
    product = 2 * (2 * 6 * 8 * 8) * (4 // groups * 3 * 3)
    assert flops(convolve, image, kernel).total == {"float32": product}


def test_the_gradient_of_a_strided_convolution_costs_twice_the_forward_pass_on_top_of_it():
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (2, 2), "SAME").sum()

    image, kernel = array(1, 8, 32, 32), array(16, 8, 3, 3)
    forward = flops(convolve, image, kernel).total["float32"]
    for argnums, times in ((0, 2), ((0, 1), 3)):
        backward = flops(jax.grad(convolve, argnums), image, kernel)
        assert backward.total == {"float32": times * forward}


def test_a_gradient_costs_twice_the_forward_pass_on_top_of_it():
    assert flops(mlp, X, WEIGHTS).total == {"float32": FORWARD}
    assert flops(gradient(mlp), X, WEIGHTS).total == {"float32": 3 * FORWARD}


def test_remat_repeats_what_the_backward_pass_needs_and_model_flops_leave_it_out():
    counted = flops(gradient(jax.checkpoint(mlp)), X, WEIGHTS)
    # the hidden layer; nobody needs the output again
    assert counted.recomputed == {"float32": FORWARD // 2}
    assert counted.total == {"float32": 3 * FORWARD + FORWARD // 2}
    assert counted.model == flops(gradient(mlp), X, WEIGHTS).total


def test_a_policy_that_saves_products_recomputes_none():
    saving = jax.checkpoint(mlp, policy=jax.checkpoint_policies.dots_saveable)
    assert flops(gradient(saving), X, WEIGHTS).recomputed == {}


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_counts_as_often_as_it_runs(remat):
    one = flops(gradient(jax.checkpoint(mlp) if remat else mlp), X, WEIGHTS)
    counted = flops(gradient(layers, remat=remat), X, STACKED)
    assert counted.total == {"float32": N * one.total["float32"]}
    assert counted.recomputed == {dtype: N * count for dtype, count in one.recomputed.items()}


def test_of_a_conditional_the_most_expensive_branch_counts():
    def either(flag, x, w):
        return jax.lax.cond(flag, lambda: x, lambda: x @ w @ w)

    two = {"float32": 2 * 2 * B * D * D}
    assert flops(either, array(dtype=bool), X, array(D, D)).total == two


def test_of_a_linear_solve_only_what_runs_counts():
    """JAX lists four programs for each: `custom_linear_solve` runs one of them."""
    A, b = array(D, D), array(D, B)
    assert flops(jnp.linalg.solve, A, b).total == flops(jnp.linalg.inv, A).total == {}

    def step(w, x):
        return w - jnp.linalg.solve(x.T @ x + jnp.eye(F), x.T @ (x @ w))

    products = 2 * B * F * F + 2 * (2 * B * F * D)
    assert flops(step, array(F, D), array(B, F)).total == {"float32": products}

    def by_hand(A, b):
        solve = functools.partial(jax.lax.custom_linear_solve, lambda x: A @ x, b)
        return solve(lambda matvec, b: A.T @ b, transpose_solve=lambda vecmat, b: A @ b)

    assert flops(by_hand, A, b).total == {"float32": 2 * D * D * B}  # not of `matvec`
    backward = jax.grad(lambda A, b: by_hand(A, b).sum(), argnums=1)
    assert flops(backward, A, b).total == {"float32": 2 * 2 * D * D * B}


def test_of_a_root_only_the_search_counts():
    def root(w, x):
        def search(f, x):
            return x @ w

        return jax.lax.custom_root(lambda y: y @ w @ w - x, x, search, lambda g, y: y)

    assert flops(root, array(D, D), X).total == {"float32": 2 * B * D * D}


def test_custom_derivatives_are_looked_into():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g)
    )
    assert flops(product, X, array(D, D)).total == {"float32": 2 * B * D * D}
    assert flops(gradient(product), X, array(D, D)).total == {"float32": 3 * 2 * B * D * D}
    assert flops(jax.nn.relu, X).total == {}


def test_each_product_counts_for_the_dtype_of_its_operands():
    def two(x, w):
        return x @ w, x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)

    one = 2 * B * D * D
    assert flops(two, X, array(D, D)).total == {"float32": one, "bfloat16": one}
    mixed = functools.partial(jax.lax.dot, preferred_element_type=jnp.float32)
    assert flops(mixed, array(B, D, dtype=jnp.bfloat16), array(D, D)).total == {"float32": one}


@pytest.mark.parametrize(
    ("precision", "counted", "passes"),
    [
        ("default", "float32", 1),
        ("high", "float32 (high)", 1),
        ("highest", "float32 (highest)", 1),
        (("default", "highest"), "float32 (highest)", 1),
        ("F32_F32_F32", "float32 (highest)", 1),
        ("TF32_TF32_F32", "tensorfloat32", 1),
        ("BF16_BF16_F32_X6", "bfloat16", 6),
    ],
)
def test_a_float32_product_counts_for_the_precision_that_it_asks_for(
    precision, counted, passes
):
    expected = {counted: passes * 2 * B * D * D}
    asked = functools.partial(jnp.matmul, precision=precision)
    assert flops(asked, X, array(D, D)).total == expected
    if isinstance(precision, str):
        with jax.default_matmul_precision(precision):
            assert flops(lambda x, w: x @ w, X, array(D, D)).total == expected
    if "high" in str(precision):  # 16 bits have no precision to choose
        half = array(D, D, dtype=jnp.bfloat16)
        assert flops(asked, half, half).total == {"bfloat16": 2 * D * D * D}


def test_loops_with_fixed_bounds_count_and_others_are_refused_if_they_hold_products():
    def fixed(x, w):
        return jax.lax.fori_loop(0, 5, lambda _, x: x @ w, x)

    def until(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ w, x)

    assert flops(fixed, X, array(D, D)).total == {"float32": 5 * 2 * B * D * D}
    with pytest.raises(ValueError, match="known number of iterations"):
        flops(until, X, array(D, D))
    cheap = functools.partial(jax.lax.while_loop, lambda x: jnp.sum(x) < 1, lambda x: x + 1)
    assert flops(cheap, X).total == {}


def test_a_kernel_counts_as_the_estimate_it_was_given_and_is_refused_without():
    def double(x, **options):
        def kernel(x_ref, out_ref):
            out_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, out_shape=x, interpret=True, **options)(x)

    estimate = pl.CostEstimate(flops=1234, transcendentals=0, bytes_accessed=0)
    assert flops(functools.partial(double, cost_estimate=estimate), X).total["float32"] == 1234
    with pytest.raises(ValueError, match="must have a cost_estimate"):
        flops(double, X)


def test_what_cannot_be_seen_is_refused_instead_of_counted_as_nothing():
    call = jax.ffi.ffi_call("some_library", X)
    with pytest.raises(ValueError, match="must not occur where FLOPs are counted"):
        flops(call, X)
