"""Laws of the checks of exercises.

Solutions are checked in `tests/test_solutions.py`, where they stand in the notebooks.
"""

import math

import flash_answers
import jax
import jax.numpy as jnp
import numpy as np
import offload_answers
import optax
import optimizer_answers
import profiling_answers
import pytest
import smallest_answers
import transformer_answers
import vocabulary_answers

from course_lib.lessons import check
from course_lib.lessons.check import answers, profiling, rematerialization
from course_lib.lessons.check.exercises import Exercise


def unfinished(*arguments):
    """Returns nothing, as a stub does."""


def fails(*arguments):
    raise KeyError("nope")


FUNCTIONS = [
    check.scaled_step,
    check.stochastic_round,
    check.keep_one_value,
    check.square_root,
    check.accumulation,
    check.smallest_number_of_minibatches,
    check.multi_steps_share,
    check.best_state,
    check.all_of_the_state,
    check.count_parameters,
    check.looks_ahead,
    check.scan_over_layers,
    check.stack_less,
    check.named_part,
    check.mfu,
    *optimizer_answers.FUNCTIONS,
    *vocabulary_answers.FUNCTIONS,
    *flash_answers.FUNCTIONS,
    *offload_answers.FUNCTIONS,
    *smallest_answers.FUNCTIONS,
    *transformer_answers.FUNCTIONS,
    *profiling_answers.FUNCTIONS,
]
PREDICTIONS = {
    check.loss_scale_range: 2,
    check.depth: 2,
    check.forgotten_division: 2,
    check.aliased_bytes: 2,
    check.scores_outgrow_mlp: 1,
    check.stacked: 1,
    check.on_h100: 2,
    **optimizer_answers.PREDICTIONS,
    **vocabulary_answers.PREDICTIONS,
    **flash_answers.PREDICTIONS,
    **offload_answers.PREDICTIONS,
    **smallest_answers.PREDICTIONS,
}


PAIRS = [check.small_tanh]  # these take two functions


def name(value):
    return getattr(value, "id", None) or getattr(value, "__name__", str(value))


def answer(capsys, the_check, *arguments):
    capsys.readouterr()
    assert the_check(*arguments) is None
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1, printed
    return printed


@pytest.mark.parametrize("the_check", FUNCTIONS, ids=name)
def test_a_stub_gets_a_hint_and_an_error_is_repeated(the_check, capsys):
    assert answer(capsys, the_check, unfinished).startswith("✗ Nothing returned yet. ")
    assert "KeyError: 'nope'" in answer(capsys, the_check, fails)
    assert answer(capsys, the_check, 3).startswith("✗ ")


@pytest.mark.parametrize("the_check", PAIRS, ids=name)
def test_a_pair_of_stubs_gets_a_hint_and_an_error_is_repeated(the_check, capsys):
    hint = answer(capsys, the_check, unfinished, unfinished)
    assert hint.startswith("✗ Nothing returned yet. ")
    assert "KeyError: 'nope'" in answer(capsys, the_check, fails, fails)
    assert answer(capsys, the_check, 3, 3).startswith("✗ ")


@pytest.mark.parametrize("the_check", PREDICTIONS, ids=name)
def test_a_prediction_that_is_not_made_gets_a_hint(the_check, capsys):
    number = PREDICTIONS[the_check]
    assert answer(capsys, the_check, *[...] * number).startswith("✗ No prediction yet. ")
    assert "not 'four'" in answer(capsys, the_check, *["four"] * number)


def test_every_check_is_tried_here():
    others = {one for one in dir(check) if not isinstance(getattr(check, one), Exercise)}
    assert {name(one) for one in [*FUNCTIONS, *PREDICTIONS, *PAIRS]} == others


def test_a_check_that_cannot_read_an_answer_says_so_and_does_not_raise(capsys):
    broken = answers.exercise(lambda yours: yours.missing)
    assert "could not read" in answer(capsys, broken, 1)


# Plausible wrong answers, and a word that only the right explanation has.


def step(*, scaled=True, unscaled=True, skips=True, half=False, sign=1, has_rate=True):
    def train_step(loss, params, scale, learning_rate):
        learning_rate = learning_rate if has_rate else 1.0
        factor = scale if scaled else 1
        grads = jax.grad(lambda params: factor * loss(params))(params)
        if half:
            grads = jax.tree.map(lambda g: g.astype(jnp.float16), grads)
        grads = jax.tree.map(lambda g: g / g.dtype.type(scale) if unscaled else g, grads)
        finite = jnp.isfinite(grads["w"]).all() | (not skips)
        return jax.tree.map(
            lambda p, g: jnp.where(finite, p - sign * learning_rate * jnp.float32(g), p),
            params,
            grads,
        )

    return train_step


def rounded_with(bits, shared=False, least=0, dtype=jnp.bfloat16):
    def stochastic_round(key, x):
        noise = jax.random.bits(key, () if shared else x.shape, jnp.uint32) >> (32 - bits)
        noise = noise | jnp.uint32(least)
        sum_ = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
        cut = sum_ & jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(cut, jnp.float32).astype(dtype)

    return stochastic_round


def one_key(x):
    return rounded_with(16)(jax.random.key(0), x)


def tanh_forward(x, result=jnp.float32, dtype=jnp.bfloat16, rounds="derivative"):
    t = jnp.tanh(x)
    saved = {"derivative": 1 - t**2, "tanh": t, "x": x}[rounds]
    return t.astype(result), saved.astype(dtype)


def tanh_backward(saved, g):
    return saved.astype(jnp.float32) * g


def from_tanh(saved, g):
    return (1 - saved.astype(jnp.float32) ** 2) * g


def rounding(**options):
    return lambda x: tanh_forward(x, **options)


def early_rounding(x):
    t = jnp.tanh(x)
    return t, 1 - t.astype(jnp.bfloat16) ** 2


def gelu(x):
    from jax.ad_checkpoint import checkpoint_name

    t = jnp.tanh(np.sqrt(2 / np.pi).astype(np.float32) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + checkpoint_name(t, "t"))


NAMES = jax.checkpoint_policies.save_only_these_names


def grouped(k, *, layers=True, groups=True):
    def forward(layer, w, x):
        def one(x, w):
            return layer(w, x), None

        def group(x, w):
            return jax.lax.scan(jax.checkpoint(one) if layers else one, x, w)

        body = jax.checkpoint(group) if groups else group
        return jax.lax.scan(body, x, w.reshape(64 // k, k, 16, 16))[0]

    return forward


def loss_sum(params, x, y, weight):
    return jnp.sum(weight * ((jnp.tanh(x @ params["in"]) @ params["out"])[:, 0] - y) ** 2)


def accumulated(part, total):
    def accumulate(params, batch, M):
        grads = [
            jax.tree.map(lambda g, w=w: part(g, w.sum()), jax.grad(loss_sum)(params, x, y, w))
            for x, y, w in zip(*(a.reshape(M, -1, *a.shape[1:]) for a in batch), strict=True)
        ]
        return jax.tree.map(lambda *g: total(g, batch[2].sum()), *grads)

    return accumulate


def mixed_up(choose):
    """Applies the formula of one example to the outputs [n 1] of a part."""

    def part_sum(params, x, y, weight):
        return jnp.sum(weight * (choose(jnp.tanh(x @ params["in"]) @ params["out"]) - y) ** 2)

    def accumulate(params, batch, M):
        parts = zip(*(a.reshape(M, -1, *a.shape[1:]) for a in batch), strict=True)
        grads = [jax.grad(part_sum)(params, *part) for part in parts]
        return jax.tree.map(lambda *g: sum(g) / batch[2].sum(), *grads)

    return accumulate


def without_weights(params, batch, M, total=8):
    x, y, _ = batch
    grads = jax.grad(loss_sum)(params, x, y, jnp.ones(8))
    return jax.tree.map(lambda g: g / total, grads)


def in_float16(loss, params, scale, rate):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    grads = jax.grad(lambda half: scale * loss(half))(half)
    return jax.tree.map(lambda p, g: p - (rate * g / scale).astype(p.dtype), params, grads)


def at_once(params, batch, M):
    grads = jax.grad(loss_sum)(params, *batch)
    return jax.tree.map(lambda g: g / batch[2].sum(), grads)


def in_two_parts(params, batch, M):
    return accumulated(lambda g, w: g, lambda g, w: sum(g) / w)(params, batch, 2)


def by_scan(params, batch, M):
    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss_sum)(params, *part)), None

    parts = jax.tree.map(lambda a: a.reshape(M, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda g: g / batch[2].sum(), total)


def skips_padding(params, batch, M):
    total = jax.tree.map(jnp.zeros_like, params)
    for part in zip(*(a.reshape(M, -1, *a.shape[1:]) for a in batch), strict=True):
        if part[2].sum() > 0:
            total = jax.tree.map(jnp.add, total, jax.grad(loss_sum)(params, *part))
    return jax.tree.map(lambda g: g / batch[2].sum(), total)


def smallest(fits, candidates=None):
    def answer(budget, arguments, parameters, activations, batch_size):
        allowed = candidates or [M for M in range(1, batch_size + 1) if batch_size % M == 0]
        return next(
            (M for M in allowed if fits(M, arguments, parameters, activations) <= budget), None
        )

    return answer


def peak(M, arguments, parameters, activations):
    return arguments + 4 * parameters + activations / M


def gives_up_early(budget, arguments, parameters, activations, batch_size):
    """Returns in the first turn of its loop, whether M = 1 fits or not."""
    for M in range(1, batch_size + 1):
        if batch_size % M == 0 and peak(M, arguments, parameters, activations) <= budget:
            return M
        return None


def solves_for_m(budget, arguments, parameters, activations, batch_size):
    """Rounds up to the next integer, which need not divide the batch."""
    return math.ceil(activations / (budget - arguments - 4 * parameters))


def best(copy, after=False, latest=False):
    def keep_best(step, w, num_steps):
        lowest, kept, previous = jnp.inf, None, jnp.inf
        for _ in range(num_steps):
            before = copy(w)
            w, loss = step(w)
            if loss < (previous if latest else lowest):
                lowest, kept = loss, copy(w) if after else before
            previous = loss
        return lowest, kept

    return keep_best


def state_step(mean_dtype=jnp.bfloat16, rate=0.9, weight=lambda w: w):
    def cast(state, history):
        mean = state["mean"].astype(jnp.float32)
        new = {
            "mean": (rate * mean + 1 - rate).astype(mean_dtype),
            "weight": weight(state["weight"] - mean.sum()),
        }
        return new, jnp.concatenate([history, mean])

    return cast


def parameters(N, D, V, L):
    return N * (12 * D**2 + 2 * D) + V * D + L * D + D


def parameters_with_biases(N, D, V, L):
    """The formula of the case study."""
    return N * (12 * D**2 + 13 * D) + 2 * V * D + L * D + 2 * D + V


def gradient_test(reduce, positions=lambda L: range(L)):
    def looks_ahead(forward, x):
        grads = {
            t: jax.grad(lambda x, t=t: reduce(forward(x)[t]))(x) for t in positions(len(x))
        }
        return any(bool((jnp.abs(g[t + 1 :]) > 1e-5).any()) for t, g in grads.items())

    return looks_ahead


def next_position_only(forward, x):
    jacobian = jax.jacobian(forward)(x)
    return any(bool(jacobian[t, :, t + 1].any()) for t in range(len(x) - 1))


def one_by_one(layer, w, x):
    for matrix in w:
        x = layer(matrix, x)
    return x


def scanned(w, x, layer=lambda x, w: (jnp.tanh(x @ w), None)):
    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


def rematerialized_tanh(w, x):
    return scanned(w, x, lambda x, w: (jax.checkpoint(jnp.tanh)(x @ w), None))


def penalized(inside, outside=False, stop=False):
    def sgd(w, x):
        def loss(w):
            def penalty(w):
                return jnp.mean(jnp.exp(jnp.sin(w @ w)))

            value = jax.lax.stop_gradient(w) if stop else w
            if not inside:
                return jnp.mean(jnp.tanh(x @ w)) + penalty(value)
            with jax.named_scope("penalty"):
                value = penalty(value)
            return jnp.mean(jnp.tanh(x @ w)) + value

        if outside:
            with jax.named_scope("penalty"):
                return w - 0.1 * jax.grad(loss)(w)
        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    return sgd


def elementwise(loss, params, scale, rate):
    grads = jax.grad(lambda p: scale * loss(p))(params)["w"] / scale
    return {"w": jnp.where(jnp.isfinite(grads), params["w"] - rate * grads, params["w"])}


def each_array(loss, params, scale, rate):
    """Decides for each array by itself whether it moves."""
    grads = jax.tree.map(lambda g: g / scale, jax.grad(lambda p: scale * loss(p))(params))
    return jax.tree.map(
        lambda p, g: jnp.where(jnp.isfinite(g).all(), p - rate * g, p), params, grads
    )


def looped(k):
    def forward(layer, w, x):
        @jax.checkpoint
        def group(w, x):
            return jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, w)[0]

        for i in range(0, 64, k):
            x = group(w[i : i + k], x)
        return x

    return forward


def one_sign(forward, x):
    grads = jax.jacobian(forward)(x)
    return any(bool((grads[t, :, t + 1 :] > 0).any()) for t in range(len(x))) and bool(
        any((grads[t, :, t + 1 : t + 2] != 0).any() for t in range(len(x)))
    )


def five(layer, w, x):
    return jax.lax.fori_loop(0, 5, lambda i, x: layer(w[i], x), x)


def low_state(state, history):
    mean = state["mean"]
    new = {"mean": 0.9 * mean + 0.1, "weight": state["weight"] - mean.sum()}
    return new, jnp.concatenate([history, mean.astype(jnp.float32)])


def misnamed(w, x):
    def loss(w):
        with jax.named_scope("penalty"):
            return jnp.mean(jnp.tanh(x @ w)) + jnp.mean(jnp.exp(jnp.sin(w @ w)))

    return w - 0.1 * jax.grad(loss)(w)


def named_in_part(first, last):
    """Names some of the penalty's three operations: product, sine, exponential."""
    operations = [lambda w: w @ w, jnp.sin, jnp.exp]

    def sgd(w, x):
        def loss(w):
            value = w
            for i, operation in enumerate(operations):
                name = "penalty" if first <= i <= last else "other"
                with jax.named_scope(name):
                    value = operation(value)
            return jnp.mean(jnp.tanh(x @ w)) + jnp.mean(value)

        return w - 0.1 * jax.grad(loss)(w)

    return sgd


def half_history(state, history):
    new, grown = state_step()(state, history)
    return new, grown.astype(jnp.bfloat16)


RIGHT = [
    (check.all_of_the_state, (jax.jit(state_step(), donate_argnums=0),)),
    (check.loss_scale_range, (2**6, 2**14)),
    (check.loss_scale_range, (jnp.int32(6), np.int64(14))),
    (check.accumulation, (skips_padding,)),
    (check.scores_outgrow_mlp, (jnp.int32(256),)),
    (check.square_root, (looped(8),)),
    (check.named_part, (penalized(True),)),
    *optimizer_answers.RIGHT,
    *vocabulary_answers.RIGHT,
    *flash_answers.RIGHT,
    *offload_answers.RIGHT,
    *smallest_answers.RIGHT,
    *transformer_answers.RIGHT,
    *profiling_answers.RIGHT,
]


@pytest.mark.parametrize(
    ("the_check", "right"),
    RIGHT,
    ids=[f"{name(the_check)}-{number}" for number, (the_check, _) in enumerate(RIGHT)],
)
def test_a_right_answer_written_in_another_way_passes(the_check, right, capsys):
    assert answer(capsys, the_check, *right).startswith("✓ ")


# The arrays that a layer saves depend on JAX's version.
WITHOUT_STATE = 22 * 2**30 // rematerialization.saved_by_a_layer()
STACKED_MIB = profiling._stacked_mib(profiling._loss)  # JAX up to 0.10 saves one array more


WRONG = [
    (check.loss_scale_range, (14, 6), "above"),
    (check.loss_scale_range, (6, 15), "infinite"),
    (check.loss_scale_range, (6, 13), "2^14 would"),
    (check.loss_scale_range, (5, 14), "smallest subnormal"),
    (check.loss_scale_range, (7, 14), "2^6 would"),
    (check.loss_scale_range, (5.9, 14.9), "whole exponent"),
    (check.scaled_step, (elementwise,), "One entry"),
    (check.scaled_step, (each_array,), "decide once"),
    (check.scaled_step, (lambda loss, params, scale, rate: params,), "was skipped"),
    (check.square_root, (looped(4),), "hold 20"),
    (check.scores_outgrow_mlp, (0,), "at least one"),
    (check.scores_outgrow_mlp, (float("inf"),), "finitely"),
    (check.all_of_the_state, (low_state,), "lost bits"),
    (check.keep_one_value, (lambda x: (x, x),), "structure"),
    (check.looks_ahead, (one_sign,), "two positions ahead"),
    (check.scan_over_layers, (five,), "wrong for 3"),
    (check.scan_over_layers, (lambda layer, w, x: (x, None),), "alone"),
    (check.stack_less, (lambda w, x: x,), "one number"),
    (check.named_part, (misnamed,), "whole loss"),
    (check.named_part, (lambda w, x: w + penalized(True)(w, x)[0],), "numbers are not"),
    (check.mfu, (lambda *sizes: 9 / 19.46,), "0.150"),
    (check.mfu, (np.ones((3, 3)),), "function itself"),
    (
        check.smallest_number_of_minibatches,
        (smallest(peak, [1, 2, 4, 8, 16, 32]),),
        "you returned None",
    ),
    (
        check.smallest_number_of_minibatches,
        (smallest(lambda M, a, p, b: a + 16 * p + b / M),),
        "returned None",
    ),
    (check.smallest_number_of_minibatches, (lambda *sizes: 1,), "too much"),
    (check.scaled_step, (step(unscaled=False),), "too long"),
    (check.scaled_step, (step(scaled=False, unscaled=False),), "became zero"),
    (check.scaled_step, (step(skips=False),), "skip"),
    (check.scaled_step, (step(half=True),), "in float16"),
    (check.scaled_step, (step(sign=-1),), "uphill"),
    (check.scaled_step, (step(has_rate=False),), "by the learning rate"),
    (check.scaled_step, (in_float16,), "Are the parameters that you differentiate float32?"),
    (check.scaled_step, (lambda loss, params, scale, rate: params["w"],), "structure"),
    (check.stochastic_round, (lambda key, x: x.astype(jnp.bfloat16),), "of its own"),
    (check.stochastic_round, (rounded_with(16, shared=True),), "of its own"),
    (check.stochastic_round, (lambda key, x: one_key(x),), "Two keys"),
    (check.stochastic_round, (rounded_with(16, least=0x8000),), "mean"),
    (check.stochastic_round, (rounded_with(17),), "next number"),
    (check.stochastic_round, (rounded_with(16, dtype=jnp.float32),), "not bfloat16"),
    (check.small_tanh, (jnp.tanh, tanh_backward), "two things"),
    (check.small_tanh, (tanh_forward, unfinished), "Nothing returned yet. backward"),
    (check.small_tanh, (rounding(result=jnp.bfloat16), tanh_backward), "is bfloat16; float32"),
    (check.small_tanh, (lambda x: tanh_forward(2 * x), tanh_backward), "Round what is saved"),
    (check.small_tanh, (rounding(dtype=jnp.float32), tanh_backward), "4 bytes per number"),
    (check.small_tanh, (rounding(rounds="tanh"), from_tanh), "large beside it"),
    (
        check.small_tanh,
        (tanh_forward, lambda saved, g: (saved * g.astype("bfloat16")).astype("float32")),
        "even near x = 0",
    ),
    (
        check.small_tanh,
        (rounding(rounds="x"), lambda x, g: from_tanh(jnp.tanh(x.astype("float32")), g)),
        "large beside it",
    ),
    (check.small_tanh, (early_rounding, tanh_backward), "round last"),
    (check.small_tanh, (tanh_forward, lambda saved, g: 1.0 * saved.astype("float32")), "by g"),
    (check.small_tanh, (tanh_forward, lambda saved, g: from_tanh(saved, g)), "times the right"),
    (check.keep_one_value, (gelu,), "inside `jax.checkpoint`"),
    (check.keep_one_value, (jax.checkpoint(gelu),), "the policy"),
    (check.keep_one_value, (jax.checkpoint(gelu, policy=NAMES("t")),), "second value"),
    (check.keep_one_value, (jax.checkpoint(jnp.tanh),), "not those of GELU"),
    (check.square_root, (grouped(4),), "hold 20"),
    (check.square_root, (grouped(64),), "one group"),
    (check.square_root, (grouped(1),), "group of its own"),
    (check.square_root, (grouped(8, layers=False),), "Rematerialize the layers"),
    (check.square_root, (grouped(8, groups=False),), "What does a group save?"),
    (check.square_root, (grouped(8, layers=False, groups=False),), "Nothing is recomputed"),
    (check.square_root, (lambda layer, w, x: layer(w[0], x),), "one after another"),
    (check.depth, (117, 105), "a layer saves are missing"),
    (check.depth, (WITHOUT_STATE, 105), "state is missing"),
    (check.depth, (18, 50), "measured"),
    (check.accumulation, (accumulated(lambda g, w: g, lambda g, w: sum(g)),), "too large"),
    (
        check.accumulation,
        (accumulated(lambda g, w: g / jnp.maximum(w, 1), lambda g, w: sum(g) / len(g)),),
        "mean of means",
    ),
    (
        check.accumulation,
        (accumulated(lambda g, w: g / jnp.maximum(w, 1), lambda g, w: sum(g)),),
        "sum of means",
    ),
    (check.accumulation, (accumulated(lambda g, w: g, lambda g, w: g[-1] / w),), "one part"),
    (check.accumulation, (accumulated(lambda g, w: g, lambda g, w: sum(g) / 3),), "norm"),
    (check.accumulation, (accumulated(lambda g, w: g, lambda g, w: sum(g) / 4),), "of parts"),
    (check.accumulation, (without_weights,), "counts once"),
    (check.accumulation, (lambda *args: without_weights(*args, total=9),), "counts once"),
    (check.accumulation, (accumulated(lambda g, w: g / 2, lambda g, w: sum(g) / w),), "Half"),
    (check.accumulation, (accumulated(lambda g, w: g / 2, lambda g, w: sum(g)),), "Half"),
    (check.accumulation, (mixed_up(lambda outputs: outputs[0]),), "the y of another"),
    (check.accumulation, (mixed_up(lambda outputs: outputs),), "the y of another"),
    (check.accumulation, (lambda params, batch, M: {"in": params["in"]},), "structure"),
    (check.forgotten_division, (4, 4), "Adam"),
    (check.forgotten_division, (1, 1), "SGD"),
    (check.forgotten_division, (0.25, 4), "common factor"),
    (check.smallest_number_of_minibatches, (smallest(peak, range(1, 65)),), "divisor"),
    (
        check.smallest_number_of_minibatches,
        (solves_for_m,),
        "3 is no divisor of 64, so the minibatches would be of unequal size",
    ),
    (
        check.smallest_number_of_minibatches,
        (gives_up_early,),
        "with M = 4 the peak is 0.5 + 0.37 + 5.00 = 5.87 GiB. Do you return None before all",
    ),
    (
        check.smallest_number_of_minibatches,
        (lambda budget, a, p, b, n: b / (budget - a - 4 * p),),
        "Try divisors only",
    ),
    (
        check.smallest_number_of_minibatches,
        (smallest(lambda M, a, p, b: a + b / M),),
        "accumulator",
    ),
    (
        check.smallest_number_of_minibatches,
        (smallest(peak, [2**i for i in range(12)]),),
        "powers of two",
    ),
    (
        check.smallest_number_of_minibatches,
        (lambda *sizes: smallest(peak)(*sizes) or 128,),
        "Return None",
    ),
    (check.multi_steps_share, (lambda counts, m: counts[m] / sum(counts),), "A third of"),
    (check.multi_steps_share, (lambda counts, m: 1,), "equal"),
    (check.multi_steps_share, (lambda counts, m: 3 * counts[m] / sum(counts),), "wrong for 2"),
    (
        check.multi_steps_share,
        (lambda counts, m: sum(counts) / len(counts) / counts[m],),
        "Upside down",
    ),
    (check.multi_steps_share, (lambda counts, m: counts[m],), "right proportion"),
    (check.multi_steps_share, (lambda counts, m: counts[m] / max(counts),), "right proportion"),
    (check.multi_steps_share, (lambda counts, m: counts[m] + 1,), "whole batch"),
    (check.aliased_bytes, (12, 8), "Gradients"),
    (check.aliased_bytes, (8, 8), "Without momentum"),
    (check.aliased_bytes, (4, 4), "Count the bytes"),
    (check.best_state, (best(lambda w: w),), "deleted"),
    (check.best_state, (best(jnp.copy, after=True),), "after the best step"),
    (check.best_state, (lambda step, w, n: best(jnp.copy)(step, w, n - 1),), "num_steps steps"),
    (check.best_state, (lambda step, w, n: best(jnp.copy)(step, w, 9),), "num_steps steps"),
    (check.best_state, (best(jnp.copy, latest=True),), "compare each loss with the best"),
    (check.best_state, (lambda step, w, n: (step(w)[1], jnp.ones(1)),), "lowest"),
    (check.best_state, (lambda step, w, n: best(jnp.copy)(step, w, n)[::-1],), "two things"),
    (check.accumulation, (accumulated(lambda g, w: g, lambda g, w: -sum(g) / w),), "opposite"),
    (check.accumulation, (accumulated(lambda g, w: g / w, lambda g, w: sum(g)),), "weight 0"),
    (check.accumulation, (at_once,), "all 8 examples"),
    (check.accumulation, (accumulated(lambda g, w: g, lambda g, w: sum(g) / 8),), "number of"),
    (check.accumulation, (in_two_parts,), "4 of the 8"),
    (check.accumulation, (by_scan,), "Python loop"),
    (check.all_of_the_state, (state_step(jnp.float32),), "buffer"),
    (check.all_of_the_state, (state_step(rate=0.8),), "numbers changed"),
    (check.all_of_the_state, (lambda state, history: state,), "Return two things"),
    (check.all_of_the_state, (half_history,), "the history is bfloat16"),
    (
        check.all_of_the_state,
        (state_step(weight=lambda w: w.astype(jnp.bfloat16)),),
        "float32 is expected",
    ),
    (check.count_parameters, (parameters_with_biases,), "case study"),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) + V * D,), "once"),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) + 9 * N * D,), "dense"),
    (
        check.count_parameters,
        (lambda N, D, V, L: parameters(N, D, V, L) + (2 * N + 1) * D,),
        "RMS norm",
    ),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) - N * D,), "two norms"),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) - D,), "last layer"),
    (check.count_parameters, (lambda N, D, *_: parameters(N, D, *_) - 2 * N * D**2,), "four m"),
    (check.count_parameters, (lambda N, D, *_: parameters(N, D, *_) - 3 * N * D**2,), "four m"),
    (
        check.count_parameters,  # matrices and embeddings, and no norm
        (lambda N, D, V, L: 12 * N * D**2 + V * D + L * D,),
        "too few: the norms of the layers have scales; one more norm follows",
    ),
    (
        check.count_parameters,  # no norm, and an output that is not tied
        (lambda N, D, V, L: 12 * N * D**2 + 2 * V * D + L * D,),
        "too many: the norms of the layers have scales; one more norm follows the last layer;"
        " the output is",
    ),
    (
        check.count_parameters,  # norms with biases, except for the last
        (lambda N, D, V, L: parameters(N, D, V, L) + 2 * N * D,),
        "scales and no biases",
    ),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) - V * D,), "V tokens"),
    (
        check.count_parameters,
        (lambda N, D, V, L: parameters(N, D, V, L) - N * D**2,),
        "four matrices",
    ),
    (
        check.count_parameters,
        (lambda N, D, V, L: parameters(N, D, V, L) - 4 * N * D**2,),
        "one of the MLP's two",
    ),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) - L * D,), "positions"),
    (check.count_parameters, (lambda N, D, V, L: parameters(N, D, V, L) + 1,), "too many"),
    (check.scores_outgrow_mlp, (512,), "float32"),
    (check.scores_outgrow_mlp, (2048,), "heads"),
    (check.scores_outgrow_mlp, (300,), "MiB"),
    (check.looks_ahead, (gradient_test(jnp.sum),), "cancels"),
    (
        check.looks_ahead,
        (gradient_test(lambda y: jnp.sum(y**2), lambda L: range(3)),),
        "every position",
    ),
    (check.looks_ahead, (lambda forward, x: True,), "may read position t"),
    (check.looks_ahead, (lambda forward, x: jnp.ones((6, 6)),), "not an array of shape (6, 6)"),
    (check.looks_ahead, (next_position_only,), "Which positions do you compare"),
    (check.looks_ahead, (lambda forward, x: False,), "mixes all"),
    (check.scan_over_layers, (one_by_one,), "reads every layer"),
    (check.scan_over_layers, (lambda layer, w, x: layer(w[0], x),), "Only one layer"),
    (check.scan_over_layers, (lambda layer, w, x: one_by_one(layer, w[::-1], x),), "first to"),
    (check.scan_over_layers, (lambda layer, w, x: jax.vmap(layer, (0, None))(w, x),), "shape"),
    (check.stacked, (8,), "count both"),
    (check.stacked, (100,), "counted"),
    (check.stacked, (STACKED_MIB / 8,), "one layer"),
    (check.stacked, (STACKED_MIB - 4,), "missing"),
    (check.stacked, (STACKED_MIB + 4,), "too many"),
    (check.stacked, (STACKED_MIB * 2**20,), "bytes"),
    (check.stack_less, (scanned,), "before the compiler"),
    (check.stack_less, (rematerialized_tanh,), "what a policy keeps"),
    (check.stack_less, (jax.checkpoint(scanned),), "one layer at a time"),
    (check.stack_less, (lambda w, x: 2 * scanned(w, x),), "the scan's is"),
    (check.stack_less, (lambda w, x: scanned(jax.lax.stop_gradient(w), x),), "gradient"),
    (check.named_part, (named_in_part(1, 2),), "dot_general"),
    (check.named_part, (named_in_part(2, 2),), "sin"),
    (check.named_part, (named_in_part(0, 1),), "exp"),
    (check.named_part, (penalized(False),), "No operation"),
    (check.named_part, (lambda w, x: penalized(True)(w, x)[::-1],), "begins with"),
    (check.named_part, (penalized(False, outside=True),), "outside"),
    (check.named_part, (penalized(True, stop=True),), "backward"),
    (check.mfu, (lambda flops, seconds, peak: flops / seconds / peak,), "only the forward"),
    (check.mfu, (lambda flops, seconds, peak: 2 * flops / seconds / peak,), "twice"),
    (check.mfu, (lambda flops, seconds, peak: 300 * flops / seconds / peak,), "percentage"),
    (check.mfu, (lambda flops, seconds, peak: 4 * flops / seconds / peak,), "recomputation"),
    (check.mfu, (lambda flops, seconds, peak: seconds / 3,), "too little"),
    (check.mfu, (lambda flops, seconds, peak: 3 * flops / peak,), "seconds are missing"),
    (check.mfu, (lambda flops, seconds, peak: 3 * flops * seconds / peak,), "multiplies"),
    (check.mfu, (lambda flops, seconds, peak: 3 * flops / seconds,), "by the peak rate"),
    (check.mfu, (lambda flops, seconds, peak: seconds * peak / 3 / flops,), "inverse"),
    (check.on_h100, (1e3 * 0.73 * 111 / 989, "memory"), "milliseconds"),
    (check.on_h100, (0.73 * 989 / 111, "memory"), "higher peak rate"),
    (check.on_h100, (0.73 * 768 / 3350, "memory"), "bandwidths"),
    (check.on_h100, (0.73 * 27.8 / 67, "memory"), "of float32"),
    (check.on_h100, (0.2, "memory"), "too long"),
    (check.on_h100, (0.08, "compute"), "not 'compute'"),
    (check.on_h100, (0.082, "products"), "which factor"),
    *optimizer_answers.WRONG,
    *vocabulary_answers.WRONG,
    *flash_answers.WRONG,
    *offload_answers.WRONG,
    *smallest_answers.WRONG,
    *transformer_answers.WRONG,
    *profiling_answers.WRONG,
]


@pytest.mark.parametrize(
    ("the_check", "wrong", "explanation"),
    WRONG,
    ids=[f"{name(the_check)}-{word}" for the_check, _, word in WRONG],
)
def test_a_wrong_answer_is_told_what_is_wrong(the_check, wrong, explanation, capsys):
    printed = answer(capsys, the_check, *wrong)
    assert printed.startswith("✗ ") and explanation in printed, printed
    assert "could not read" not in printed


def test_each_check_knows_three_mistakes():
    for the_check in [*FUNCTIONS, *PREDICTIONS]:
        words = {word for one, _, word in WRONG if one is the_check}
        assert len(words) >= 3, name(the_check)


def test_adam_hides_a_factor_which_sgd_shows():
    """The exercise rests on it."""
    gradient = jnp.array([0.5, -2.0])
    for optimizer, factor in ((optax.adam(1e-3), 1), (optax.sgd(1e-3), 4)):
        state = optimizer.init(gradient)
        right, wrong = (optimizer.update(g, state)[0] for g in (gradient, 4 * gradient))
        np.testing.assert_allclose(wrong, factor * right, rtol=1e-4)
