"""Laws of the game: right steps pass, wrong ones are told what is wrong, and scores come from
the compiled steps.
"""

import dataclasses
import functools
import itertools
import json
import operator
import pathlib
import re
import secrets
import subprocess
import sys

import draw_game
import jax
import jax.numpy as jnp
import numpy as np
import optax
import PIL.Image
import pytest
from slow_cases import slow

from course_lib import lessons, measure
from course_lib.lessons import game
from course_lib.lessons.check.answers import WrongAnswer
from course_lib.lessons.game import (
    hints,
    positions,
    score,
    scoreboard,
    setups,
    small,
    submission,
    updates,
)
from course_lib.measure import virtual
from course_lib.smaller_and_faster import flash_attention, offload


@pytest.fixture(autouse=True)
def board(tmp_path, monkeypatch):
    """Gives each test an empty scoreboard of its own."""
    monkeypatch.setenv("COURSE_SCOREBOARD", str(tmp_path / "game.json"))
    return tmp_path / "game.json"


@pytest.fixture(autouse=True)
def the_same_numbers(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 0)


@pytest.fixture
def no_virtual_gpu(monkeypatch):
    monkeypatch.setattr(virtual, "why_unavailable", lambda name="a5000": "there is no compiler")


def submit(capsys, *arguments, **options):
    capsys.readouterr()
    assert lessons.submit(*arguments, **options) is None
    return capsys.readouterr().out


def make_step(
    loss=game.loss, gradient=jax.value_and_grad, update=None, apply=optax.apply_updates
):
    """Returns a submission that differs from the first one in one part."""

    def make_step(config):
        def step(state, batch):
            params, opt_state = state
            value, grads = gradient(loss)(params, batch)
            updates, opt_state = (update or config.optimizer.update)(grads, opt_state, params)
            return (apply(params, updates), opt_state), value

        return jax.jit(step)

    return make_step


def knowing(
    times=1.0, update_of=lambda update: update, before=lambda batch: None, value=None, **parts
):
    """Returns a submission that knows the gradient, so it compiles at once."""

    def gradient(loss):
        def known(params, batch):
            before(batch)
            x = batch.astype(jnp.float32)
            no_effect = 0 * (x @ x.T).sum()  # a step has to multiply matrices
            right, grads = small.start_loss_and_gradient()
            grads = jax.tree.map(lambda g: times * g + no_effect, grads)
            return jnp.float32(right) if value is None else value(right), grads

        return known

    def submission(config):
        small.gradient()  # computed once, and not while a step is traced
        return make_step(gradient=gradient, update=update_of(config.optimizer.update), **parts)(
            config
        )

    return submission


def half(loss, dtype=jnp.bfloat16):
    return lambda params, batch: loss(jax.tree.map(lambda p: p.astype(dtype), params), batch)


# Right answers. tests/test_solutions.py submits the reference moves.

ON_T4 = draw_game.moves("t4")
FIRST = list(ON_T4)[1]  # the others add to it what tests/test_solutions.py submits


@pytest.mark.parametrize("name", [each if each == FIRST else slow(each) for each in ON_T4])
def test_each_reference_move_passes_in_float16_with_a_loss_scale_for_a_t4(
    name, capsys, no_virtual_gpu
):
    printed = submit(capsys, ON_T4[name][0], "t4")
    dtype = "float32" if name == "first step" else "float16"
    assert printed.startswith("✓ The updates equal") and f"{dtype} may differ" in printed


MOVES = {**{f"{name}, on a T4": move for name, move in ON_T4.items()}, **draw_game.moves()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVES)
def test_each_reference_move_passes_at_the_real_length(name):
    make_step, setup = MOVES[name]
    if setup.moments == "host" and (reason := offload.why_unavailable()):
        pytest.skip(f"nothing can be on the host: {reason}")
    assert positions.gradient(make_step, setup)  # `check` leaves an error to the real step
    positions.check(make_step, setup)


@pytest.mark.slow
def test_the_measured_differences_leave_a_factor_of_two_to_the_tolerance():
    (params, _), batch = small.start()
    with jax.default_matmul_precision("highest"):
        right = jax.jit(jax.grad(half(game.loss)))(params, batch)
        wrong = jax.jit(jax.grad(game.loss))(params, batch[:15])
    summed = jax.tree.map(lambda g: jnp.zeros(g.shape, jnp.bfloat16), params)
    for each in range(16):  # a minibatch of one sequence
        own = jax.tree.map(operator.itemgetter(each), small.gradients_of_sequences())
        summed = jax.tree.map(lambda total, g: total + jnp.bfloat16(g), summed, own)
    mean = jax.tree.map(lambda g: np.float32(g) / 16, summed)
    in_16_bits, other, in_a_sum = (
        small.difference(g, small.gradient()) for g in (right, wrong, mean)
    )
    assert 2 * in_16_bits < updates.TOLERANCE["bfloat16"] < other / 2
    assert 10 * updates.TOLERANCE["float32"] < in_a_sum < in_16_bits / 2
    assert abs(small.scale(right) - 1) < small.SCALE / 2
    assert abs(small.scale(mean) - 1) < small.SCALE / 2


def test_numbers_are_drawn_anew_for_each_submission(capsys, monkeypatch, no_virtual_gpu):
    seeds, seen = iter([1, 2, 0]), []
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(seeds))
    for _ in range(3):
        assert submit(capsys, knowing()).startswith("✓ ")
        (params, _), batch = small.start()
        seen.append((params["output"].sum(), batch[0].sum()))
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
def test_no_part_of_the_batch_has_the_loss_of_the_whole(seed):
    small.draw(seed)
    (params, _), batch = small.start()
    right, _ = small.start_loss_and_gradient()
    for part in (batch[:8], batch[8:]):  # those of a fourth differ more
        assert abs(jax.jit(game.loss)(params, part) - right) > 5 * updates.LOSS * right
    small.draw(0)


# Wrong answers, and words that only the right explanation has.


def keeps_old_state(grads, opt_state, params):
    return game.SMALL.optimizer.update(grads, opt_state, params)[0], opt_state


def adds_twice(params, updates):
    return optax.apply_updates(optax.apply_updates(params, updates), updates)


def returned(result):
    return lambda config: lambda state, batch: result(state)


def in_bfloat16(state):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), state), 0.0


def enlarges_one(loss):
    def gradient(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return value, {**grads, "norm": 1.2 * grads["norm"]}

    return gradient


WRONG = {
    "one array": (
        make_step(half(game.loss), enlarges_one),
        "The gradient of norm is 1.20 times the right one",
    ),
    "a stub": (lambda config: None, "Nothing returned yet. Begin with a copy"),
    "no function": (3, "Pass your function itself"),
    "an error": (make_step(lambda params, batch: params["nope"]), "raised KeyError: 'nope'"),
    "the step itself": (lambda state, batch: (state, 0.0), "Submit `make_step` itself"),
    "divided by the tokens": (
        knowing(times=32 / 33),
        "Is a sum divided by the number of labels",
    ),
    "a step that is no function": (lambda config: 3, "should return the function `step`"),
    "an empty step": (lambda config: lambda state, batch: None, "Nothing returned yet."),
    "the state alone": (returned(lambda state: state[0]), "two things"),
    "parameters alone": (returned(lambda state: (state[0], 0.0)), "built like the old one"),
    "bfloat16 state": (returned(in_bfloat16), "is bfloat16; float32"),
    "no model": (returned(lambda state: (state, 0.0)), "multiplies no matrices"),
    "half of the batch": (
        make_step(lambda params, batch: game.loss(params, batch[:8])),
        "8 of the 16 sequences of the batch do not count (the first of them is number 8",
    ),
    "old optimizer state": (
        knowing(update_of=lambda _: keeps_old_state),
        "The optimizer's state is lost",
    ),
    "applied twice": (knowing(apply=adds_twice), "the parameters do not follow"),
    "another loss": (
        knowing(value=lambda right: jnp.zeros(())),
        "returns the loss 0. The mean",
    ),
    "nearly the loss": (
        knowing(value=lambda right: jnp.float32(1.003 * right)),
        "step returns the loss",
    ),
    "exact GELU": (
        knowing(before=lambda batch: jax.lax.erf(jnp.float32(batch))),
        "computes an error function",
    ),
    "no mean": (
        knowing(value=lambda right: jnp.zeros(16)),
        "one number, not an array of shape",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_step_is_told_what_is_wrong(case, capsys):
    wrong, words = WRONG[case]
    printed = submit(capsys, wrong)
    assert printed.startswith("✗ ") and printed.count("\n") == 1, printed
    assert words in printed


# Wrong sums of the right gradient g, those of the 16 sequences (each), and the old momentum m.
# A step that makes such a sum takes seconds to compile: WRONG has one.
WRONG_GRADIENTS = {
    "4 times too large": lambda g, each, m: 4 * g,
    "1.02e+03 times too large. Divide": lambda g, each, m: 1024 * g,
    "3.28e+04 times too large. Divide": lambda g, each, m: 2**15 * g,
    "0.25 times the right ones. Is something divid": lambda g, each, m: g / 4,
    "0.97 times the right ones. Is a sum divided by": lambda g, each, m: 32 / 33 * g,
    "8 of the 16 sequences of the batch do not count": lambda g, each, m: each[:8].mean(0),
    "12 of the 16 sequences of the batch do not count": lambda g, each, m: each[12:].sum(0),
    "4 of the 16 sequences of the batch do not count": lambda g, each, m: each[:12].mean(0),
    "count alike; yours count 0.67 to 2 times": lambda g, each, m: (
        (each[:4].mean(0) + each[4:].mean(0)) / 2
    ),
    "they go uphill": lambda g, each, m: -g,
    "layers/down of layer 0 gets no gradient (nor": lambda g, each, m: 0 * g,
    "The optimizer's state is lost": lambda g, each, m: 0.1 * m,
    "optimizer's state is lost": lambda g, each, m: g - 0.9 * m,
    "another loss. It differs most in": lambda g, each, m: g + 0.3 * abs(g),
    "not finite": lambda g, each, m: g * float("nan"),
}


@pytest.mark.parametrize("noise", [slow(0), 0.02])  # as in float32, and in bfloat16
@pytest.mark.parametrize("words", WRONG_GRADIENTS)
def test_a_wrong_gradient_is_explained(words, noise):
    random = np.random.default_rng(0)

    def rounded(g):
        return g + noise * random.normal(size=g.shape) * np.sqrt(np.mean(g**2))

    (_, (momentum, _)), _ = small.start()
    three = small.gradient(), small.gradients_of_sequences(), momentum.trace
    wrong = jax.tree.map(lambda *arrays: rounded(WRONG_GRADIENTS[words](*arrays)), *three)
    assert words in small.explain(wrong)


def test_a_float32_gradient_that_was_rounded_to_bfloat16_is_nearly_right():
    yours = jax.tree.map(lambda g: np.float32(jnp.bfloat16(g)), small.gradient())
    assert "nearly right, and in float32 that is not enough" in small.explain(yours)


def test_a_layer_without_a_gradient_is_named():
    yours = jax.tree.map(np.array, small.gradient())
    yours["layers"]["down"][3] = 0
    assert "layers/down of layer 3 gets no grad" in small.explain(yours)


# At the real length: wrong rows of the right gradient, and steps.

WRONG_ROWS = {
    "129 of the 1,153 columns of the output matrix get another": ("columns", 1024, 0),
    "1 of the 1,153 tokens of the vocabulary get another": ("tokens", 1152, 0),
    "4 of the 1,024 positions of a real sequence get another": ("positions", 1020, 0.7),
}


@pytest.mark.parametrize("words", WRONG_ROWS)
def test_rows_that_get_another_gradient_are_counted(words):
    rows, first, factor = WRONG_ROWS[words]
    right = positions.start()[2]
    yours = {name: array.copy() for name, array in right.items()}
    positions.check_rows(yours, "bfloat16")
    [wrong] = (array for name, array in yours.items() if name.startswith(rows))
    wrong[first:] *= factor
    with pytest.raises(WrongAnswer, match=f"{words}.*or does a tile see other keys"):
        positions.check_rows(yours, "bfloat16")
    with pytest.raises(WrongAnswer, match="vanish without a loss scale"):
        positions.check_rows(yours, "float16")


def summed_by_hand(terms, dtype):
    zeros = jnp.zeros(positions.start()[0]["output"].shape, dtype)
    return jax.lax.scan(lambda total, _: (total + 1, None), zeros, None, length=terms)[0]


def summed_by_grad(terms, dtype):
    def loss(output):
        part = jax.checkpoint(lambda x: (x @ output).sum())
        return jax.lax.map(part, jnp.ones((terms, 2, len(output)), dtype)).sum()

    return jax.grad(loss)(jnp.zeros(positions.start()[0]["output"].shape, dtype))


@pytest.mark.parametrize("summed", [summed_by_hand, summed_by_grad])
def test_a_sum_of_many_terms_in_16_bits_is_found_in_the_program(summed):
    def check(terms, dtype):
        program = jax.make_jaxpr(lambda: summed(terms, dtype))()
        positions.check_sums(program.jaxpr, positions.start()[0])

    check(positions.MOST_TERMS, jnp.bfloat16)
    check(512, jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float16):
        with pytest.raises(WrongAnswer, match=f"sum of 512 terms in {jnp.dtype(dtype)}"):
            check(512, dtype)


def windowed(params, batch):
    def block(x, layer):
        q, k, v = jnp.einsum("bld,dchk->cblhk", game.norm(layer["norm_1"], x), layer["qkv"])
        y = flash_attention.attend(q, k, v, window=768, tile=64)
        x = x + jnp.einsum("blhk,hkd->bld", y, layer["out"])
        return x + game.mlp(layer, game.norm(layer["norm_2"], x)), None

    x, _ = jax.lax.scan(block, game.embed(params, batch[:, :-1]), params["layers"])
    return game.cross_entropy(params, x, batch[:, 1:])


def leaves_out_columns(params, batch):
    """Pieces of 512 columns, as many as fit: all of 211, and 1,024 of 1,153."""
    columns = params["output"].shape[1]
    size = columns // min(512, columns) * min(512, columns)
    x = game.embed(params, batch[:, :-1])
    x = through(x, params["layers"])
    params = {**params, "output": params["output"][:, :size]}
    return game.cross_entropy(params, x, jnp.minimum(batch[:, 1:], size - 1))


WRONG_AT_THE_REAL_LENGTH = {
    "130 of the 1,153 columns of the output matrix get another": half(leaves_out_columns),
    "or does a tile see other keys": half(windowed),
    "vanish without a loss scale": half(game.loss, jnp.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", WRONG_AT_THE_REAL_LENGTH)
def test_a_step_that_is_wrong_only_at_the_real_length_is_refused(words):
    with pytest.raises(WrongAnswer, match=words):
        positions.check(make_step(WRONG_AT_THE_REAL_LENGTH[words]))


# Other optimizers, and moments on the host.

needs_host_memory = pytest.mark.skipif(
    offload.why_unavailable() is not None, reason=f"no host memory: {offload.why_unavailable()}"
)


def repeated(update, moves=1, counts=1):
    """Moves the parameters further, or updates the state more often, than once per step."""

    def other(grads, opt_state, params):
        updates, new = update(grads, opt_state, params)
        for _ in range(counts - 1):
            _, new = update(grads, new, params)
        return jax.tree.map(lambda u: moves * u, updates), new

    return other


OPTIMIZERS = [slow(each) if each != "lion" else each for each in setups.OPTIMIZERS]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_each_optimizer_pass_and_are_told_from_others(name, capsys, no_virtual_gpu):
    printed = submit(capsys, knowing(), optimizer=name)
    words = "equal the first" if name == "adamw" else f"are those of {name}. The gradient eq"
    assert printed.startswith(f"✓ The updates {words}"), printed
    setup = setups.Setup(name)
    for wrong, words in (
        (dict(moves=2), f"The gradient is right, but {name} makes other updates"),
        (dict(counts=2), f"The parameters are right, but the new state of {name} is not"),
    ):
        step = knowing(update_of=functools.partial(repeated, **wrong))
        with pytest.raises(WrongAnswer, match=words):
            updates.check_optimizer(step, setup, small.gradient())


def test_the_light_model_sums_the_gradient_of_a_row_in_float32():
    params = {"tokens": jnp.ones((2, 4)), "positions": jnp.ones((1, 4))}
    batch = jnp.zeros((1024, 2), jnp.int32)  # a bfloat16 sum would stop at 256
    grads = jax.grad(lambda params: game.light_embed(params, batch).sum())(params)
    assert grads["tokens"][0, 0] == grads["positions"][0, 0] == 1024


def test_adafactor_updates_each_layer_of_the_games_stack_as_if_it_were_alone():
    optimizer, draw = setups.make("adafactor"), np.random.default_rng(0)
    params, grads = (draw.normal(1, 1, (33, 32, 48)).astype("float32") for _ in range(2))

    def updated(grads, params):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    whole = updated({"layers": {"bias": grads}}, {"layers": {"bias": params}})
    for i in (0, 32):
        alone = updated({"bias": grads[i]}, {"bias": params[i]})["bias"]
        np.testing.assert_allclose(whole["layers"]["bias"][i], alone, rtol=1e-5, atol=1e-7)


REFUSED = {
    "optimizer='sgd' must be one of adamw, ": dict(optimizer="sgd"),
    "moments='disk' must be one of device, host.": dict(moments="disk"),
    "'adamw' or 'lion', not 'adafactor'": dict(optimizer="adafactor", moments="host"),
    "✗ gpu='v5e' must be one of t4, ": dict(gpu="v5e"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_unknown_argument_is_named_with_the_known_ones(words, capsys):
    assert words in submit(capsys, game.first_step, **REFUSED[words])


def kept_on(space):
    """Returns a submission that fetches all moments at once and leaves the new ones in a
    memory.
    """

    def submission(config):
        def update(grads, opt_state, params):
            moved = optax.tree_map_params(config.optimizer, offload.to_device, opt_state)
            updates, moved = config.optimizer.update(grads, moved, params)
            back = offload.to_host if space == "host" else offload.to_device
            return updates, optax.tree_map_params(config.optimizer, back, moved)

        return knowing(update_of=lambda _: update)(config)

    return submission


@needs_host_memory
def test_moments_on_the_host_may_be_fetched_at_once_but_must_go_back():
    setup = setups.Setup(moments="host")
    updates.check_optimizer(kept_on("host"), setup, small.gradient())
    donated = lambda config: jax.jit(kept_on("device")(config), donate_argnums=0)  # noqa: E731
    for stays in (kept_on("device"), donated):  # JAX would end the process if it ran the second
        with pytest.raises(WrongAnswer, match="other memories .* Moments go back to the host"):
            updates.check_optimizer(stays, setup, small.gradient())


def test_without_host_memory_a_line_says_that_nothing_is_checked(capsys, monkeypatch):
    monkeypatch.setattr(offload, "why_unavailable", lambda: "arrays stay where they are")
    assert "arrays stay where they are." in submit(capsys, game.first_step, moments="host")


def test_without_a_virtual_gpu_the_updates_are_checked_and_the_reason_is_given(
    capsys, no_virtual_gpu, board
):
    printed = submit(capsys, lambda config: game.first_step(config).__wrapped__)  # not jitted
    assert printed.startswith("✓ The updates equal")
    assert "no score, because here there is no" in printed and not board.exists()
    assert submit(capsys, knowing(4)).startswith("✗ ")


def test_importing_lessons_imports_neither_jax_nor_the_game():
    code = "import sys; from course_lib import lessons; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"


# Scores, hints and the scoreboard, from numbers.

GIB = measure.GIB


def scored(name="mine", peak=30.0, seconds=0.6, gpu="a5000", extra=0.0, **setup):
    return score.Score(name, gpu, int(peak * GIB), seconds, extra, 0, **setup)


def program(shape, dtype="bfloat16", scope="", recomputed=0, aliased=2 * GIB, bytes=8):
    largest = measure.LiveArray(bytes, shape, dtype, scope, "temporary")
    moves = (measure.Move("fusion", "reduce", bytes, 1, ""),)
    flops = measure.Flops({dtype: 10}, {dtype: recomputed} if recomputed else {})
    return score.Program(flops, measure.Traffic(bytes, moves), aliased, largest)


STACKED, LOGITS = (12, 16, 12, 1024, 1024), (16, 1024, 50257)
HINTS = [
    (scored(peak=46.0), program(STACKED, "float32"), "(Notebook 1.)"),
    (scored(peak=32.6), program(STACKED), "(Notebook 2.)"),
    (scored(peak=8.5), program(LOGITS, recomputed=2), "(Notebook 3.)"),
    (scored(peak=4.8), program((4, *LOGITS[1:]), recomputed=2, aliased=0), "(Notebook 4.)"),
    (scored(peak=3.9), program((4, *LOGITS[1:]), recomputed=2), "(Notebook 5.)"),
    (scored(peak=3.4), program((4, 12, 1024, 1024), recomputed=2), "(Notebook 6.)"),
    (scored(peak=16.4, seconds=0.37), program(LOGITS), "(Notebook 15.)"),
    (scored(peak=3.4, seconds=0.5), program((4, 12, 1024, 1024)), "(Notebook 16.)"),
    (scored(peak=3.1, seconds=0.34), program(LOGITS), "(Notebook 17.)"),
    (scored(peak=2.5, seconds=0.34, optimizer="lion"), program(LOGITS), "(Notebook 18.)"),
    (scored(peak=1.9, seconds=0.43), program(LOGITS), "(Notebook 19.)"),
    (scored(peak=1.6, seconds=0.55), program(LOGITS), "The last target is reached"),
]


def test_the_hints_lead_from_the_first_step_through_the_notebooks_in_order():
    earlier = []
    for one, its_program, words in HINTS:
        assert words in hints.hint(one, its_program, earlier)
        earlier.append(one)
    host = hints.hint(
        scored(peak=2.7, seconds=0.43, moments="host"), program(LOGITS), earlier[:-2]
    )
    assert "Which part of the moments" in host and "of the peak" not in host
    assert "(Notebook 6.)" in hints.hint(scored(peak=32.6), program(STACKED), earlier[:6])


def test_targets_are_reached_only_by_a_step_that_fits_below_nine_tenths_of_the_memory():
    limit = score.limit("t4") / GIB
    assert scored(peak=limit, gpu="t4").fits and not scored(peak=limit + 0.01, gpu="t4").fits
    assert scored(peak=3.4).small and not scored(peak=3.6).small
    assert scored(peak=10, seconds=0.1).fast and not scored(peak=30, seconds=0.1).fast


def test_the_fast_target_is_that_of_the_first_steps_flops_in_16_bits():
    assert score.half_dtype("t4") == "float16" and score.half_dtype("a5000") == "bfloat16"
    products = score.reference_flops() / (0.77 * 111e12)
    assert score.fast_seconds("a5000") == pytest.approx(products + 160e9 / (0.85 * 768e9))
    N, D, V, T = 12, 768, 50_257, 16 * 1024
    forward = 2 * T * (N * (12 * D**2 + 2 * 1024 * D) + D * V)
    assert score.reference_flops() == 3 * forward


def test_the_levels_of_part_three_open_one_by_one_after_a_small_and_a_fast_step():
    small, fast = scored(peak=3.4), scored(peak=16.4, seconds=0.37)
    assert score.open_levels([small]) == score.open_levels([fast]) == []
    assert score.open_levels([small, fast]) == list(score.LEVELS[:1])
    both = scored(peak=3.1, seconds=0.34)  # as small as 15 and 16 ask for
    assert score.open_levels([small, fast, both]) == list(score.LEVELS[:3])
    assert not score.open_levels([scored("move 7", gpu="t4", peak=3.4, seconds=0.1)])
    lighter, on_host = score.LEVELS[2:4]  # the second asks for AdamW, whatever is as small
    small = scored(peak=1.9, seconds=0.35, optimizer="adafactor")
    assert lighter.is_reached(small) and not on_host.is_reached(small)
    assert on_host.is_reached(scored(peak=1.9, seconds=0.43, moments="host"))


def test_the_scoreboard_outlives_the_process_and_keeps_the_same_submission_in_a_row_once(board):
    old = dataclasses.asdict(scored("old"))
    del old["optimizer"], old["moments"]  # stored before there were any
    board.write_text(json.dumps([old]))
    assert len(scoreboard.add(scored()) and scoreboard.add(scored())) == 2
    assert scoreboard.read() == [scored("old"), scored()]
    assert len(scoreboard.add(scored("other")) and scoreboard.add(scored())) == 4


@pytest.mark.parametrize("damage", [b"", b'[{"name": "x"}]', b'{"a": 1}', b"\xff\xfe"])
def test_a_damaged_scoreboard_is_put_aside_with_a_line_and_begins_anew(board, damage, capsys):
    board.write_bytes(damage)
    assert scoreboard.add(scored()) == [scored()]
    assert "cannot be read" in capsys.readouterr().out
    assert board.with_name("game.json.damaged").read_bytes() == damage
    assert scoreboard.read() == [scored()] and capsys.readouterr().out == ""


def test_a_scoreboard_that_cannot_be_written_says_so(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_SCOREBOARD", str(tmp_path / "file" / "game.json"))
    assert scoreboard.add(scored()) == [scored()]
    assert "could not be written" in capsys.readouterr().out


def test_the_scoreboard_is_in_the_cache_folder_but_in_a_temporary_one_under_pytest(monkeypatch):
    monkeypatch.delenv("COURSE_SCOREBOARD")
    monkeypatch.setenv("COURSE_CACHE", "cache")
    assert not str(scoreboard.path()).startswith("cache")
    monkeypatch.delenv("PYTEST_VERSION")
    assert scoreboard.path() == pathlib.Path("cache/game.json")


def test_a_submission_stands_in_the_table_with_the_earlier_ones_for_its_gpu(
    capsys, monkeypatch
):
    monkeypatch.setattr(virtual, "why_unavailable", lambda name: None)
    monkeypatch.setattr(updates, "check", lambda make_step, setup: "are equal.")
    monkeypatch.setattr(positions, "check", lambda make_step, setup: None)
    rows = iter(HINTS)

    def compile_step(make_step, gpu, name, setup):
        one, its_program, _ = next(rows)
        said = "XLA recomputes 2 instructions" if name == "half" else ""
        its_program = dataclasses.replace(its_program, recomputed=said)
        return dataclasses.replace(one, name=name, gpu=gpu), its_program

    monkeypatch.setattr(score, "compile_step", compile_step)
    first = submit(capsys, game.first_step)
    assert re.search(r"^ *1  first_step +46.0 +no +600 ", first, re.M), first
    assert "fits in 21.19 GiB" in first and "Hint: Most products take float32" in first
    second = submit(capsys, game.first_step, name="half")
    assert re.search(r"^ *1  first_step .*\n *2  half +32.6 +no", second, re.M), second
    assert (
        "\nIn addition, XLA recomputes 2 instructions.\nHint" in second
        and "recomputes" not in first
    )
    other = submit(capsys, game.first_step, "t4")
    assert "half" not in other and "NVIDIA T4" in other


def test_table_and_picture_name_optimizers_and_the_next_target_once_there_are_any(capsys):
    def shown(*submissions):
        submission.table(submissions, "a5000")
        figure = submission.picture(submissions, "a5000")
        texts = {text.get_text() for text in figure.axes[0].texts}
        return capsys.readouterr().out, texts

    small, fast = scored("first", peak=3.4), scored("second", peak=16.4, seconds=0.37)
    printed, texts = shown(small, scored(optimizer="lion"), scored(moments="host"))
    assert "lion" in printed and "adamw, on the host" in printed and "target 15" not in printed
    assert {"1", "1. first", "target: small: 3.5 GiB"} <= texts
    assert not any(text.startswith("next target: ") for text in texts)
    printed, texts = shown(small, fast)
    assert "target 15: loss in one pass" in printed and "target 16" not in printed
    assert "optimizer" not in printed and "2. second" in texts
    assert any(text.startswith("next target: ") for text in texts)


# With the compiler.

needs_compiler = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason="needs virtual GPUs"
)


@needs_compiler
def test_a_step_that_only_works_at_the_small_size_or_on_another_gpu_is_told_so(capsys):
    small = knowing(before=lambda batch: batch.reshape(16, 33))
    printed = submit(capsys, small)
    assert "The small step works, the real one raised TypeError" in printed
    assert printed.count("\n") == 2

    def prints(params, batch):
        jax.debug.print("step")
        return game.loss(params, batch)

    with pytest.raises(WrongAnswer, match="remove jax.debug.print"):
        score.compile_step(make_step(prints), "a5000", "prints")
    words = "An NVIDIA T4 has no unit for products of bfloat16.* 16-bit dtype is float16"
    with pytest.raises(WrongAnswer, match=words):
        score.compile_step(make_step(half(game.loss)), "t4", "half")


def of_six_layers(params, batch):
    first = jax.tree.map(lambda w: w[:-6], params["layers"])
    last = jax.tree.map(lambda w: w[-6:], params["layers"])
    x = through(game.embed(params, batch[:, :-1]), jax.lax.stop_gradient(first))
    x = through(x, last)
    return game.cross_entropy(params, x, batch[:, 1:])


def through(x, layers):
    return jax.lax.scan(lambda x, layer: (game.block(layer, x), None), x, layers)[0]


def of_the_first_positions(params, batch):
    positions = params["positions"][:859]
    return game.loss({**params, "positions": positions}, batch[:, :860])


def only_traces(config):
    right = make_step(half(game.loss))(config)
    if config.layers != 12:
        return right
    return lambda state, batch: (jax.tree.map(jnp.copy, state), 0 * right(state, batch)[1])


def forgets_a_dtype(config):
    dtype = jnp.bfloat16 if config.layers == 12 else jnp.float32

    def apply(params, updates):
        return jax.tree.map(lambda p: p.astype(dtype), optax.apply_updates(params, updates))

    return make_step(apply=apply)(config)


def cuts_a_tail(params, batch):
    """Pieces of 60 labels, as many as fit: all of 32, and 1,020 of 1,024."""
    labels = batch.shape[1] - 1
    size = labels // min(60, labels) * min(60, labels)
    params = {**params, "positions": params["positions"][:size]}
    return half(game.loss)(params, batch[:, : size + 1])


def keeps_its_moments(config):
    if config.layers != 12:
        return make_step(half(game.loss))(config)
    right = make_step(half(game.loss))(config)
    return lambda state, batch: ((right(state, batch)[0][0], state[1]), right(state, batch)[1])


CHEATS = {
    "moments": (keeps_its_moments, "returns an array of the old state"),
    "six layers": (make_step(of_six_layers), "10% fewer FLOPs"),
    "traced only": (only_traces, "XLA drops what no result needs: the rest has 67% fewer"),
    "dtype": (forgets_a_dtype, "a state of other shapes or dtypes"),
}


@needs_compiler
@pytest.mark.parametrize("name", CHEATS)
def test_a_real_step_that_does_less_than_the_small_one_is_refused(name):
    cheats, words = CHEATS[name]
    with pytest.raises(WrongAnswer, match=words):
        score.compile_step(cheats, "a5000", name)


@needs_compiler
@pytest.mark.parametrize("cheats", [of_the_first_positions, slow(cuts_a_tail)])
def test_a_step_that_learns_from_fewer_labels_of_long_sequences_is_refused(cheats, capsys):
    assert "get another gradient than in the first step" in submit(capsys, make_step(cheats))


# The ladder of the reference moves.


NOTEBOOKS = list(draw_game.solutions())
PART_ONE = 7  # the first step, and the moves of notebooks 1 to 6


@pytest.mark.parametrize("gpu", ["a5000", "t4"])
def test_the_moves_lead_down_the_ladder_and_the_last_is_the_fastest_that_fits(gpu):
    ladder = draw_game.scores(gpu)[:PART_ONE]
    *down, last = ladder
    assert {one.gpu for one in ladder} == {gpu}
    assert all(above.peak > below.peak for above, below in itertools.pairwise(down))
    assert [one.fits for one in ladder] == [False, False, True, True, True, True, True]
    assert down[-1].small and not any(one.small for one in down[:-1])
    assert last.fast and last.extra_flops == 0 and not any(one.fast for one in down)


def test_each_move_of_part_three_reaches_the_level_of_its_notebook_and_none_before_it_does():
    ladder = draw_game.scores()
    assert len(ladder) == 1 + len(NOTEBOOKS) == PART_ONE + len(score.LEVELS)
    for i, level in enumerate(score.LEVELS, PART_ONE):
        assert NOTEBOOKS[i - 1] == level.notebook
        assert level.is_reached(ladder[i]), ladder[i]
        assert not any(level.is_reached(one) for one in ladder[:i]), level
    peaks = [one.peak for one in ladder[PART_ONE:]]
    assert peaks == sorted(peaks, reverse=True)
    both = ladder[PART_ONE + 1]
    assert both.small and both.fast


@pytest.mark.parametrize("level", score.LEVELS, ids=lambda level: f"notebook {level.notebook}")
def test_a_move_of_part_three_is_judged_by_the_target_of_its_page_from_an_empty_board(level):
    [page] = (draw_game.ROOT / "notebooks").glob(f"{level.notebook}_*.ipynb")
    cells = ["".join(cell["source"]) for cell in json.loads(page.read_text())["cells"]]
    [task] = (text for text in cells if f"**The game, {level.move}:" in text)
    peak, ms = f"{level.peak / GIB:.1f} GiB", f"{1e3 * level.seconds('a5000'):.0f} ms"
    answer = cells[cells.index(task) + 1]
    assert peak in task and ms in task and f'name="{level.move}"' in answer
    right = draw_game.scores()[PART_ONE + score.LEVELS.index(level)]
    words = f"Target {level.notebook} is" if level != score.LEVELS[-1] else "The last target is"
    assert level in score.open_levels([right])
    assert hints.hint(right, program(LOGITS), []).startswith(f"{words} reached. ")
    missed = dataclasses.replace(right, name=level.move, seconds=right.seconds + 0.2)
    said = hints.hint(missed, program(LOGITS, recomputed=2), [])
    assert level in score.open_levels([missed])
    assert f"Target {level.notebook} asks" in said and f"(Notebook {level.notebook}.)" in said


def test_bytes_to_the_host_are_those_of_the_moments_there_and_back():
    parameters = sum(leaf.size for leaf in jax.tree.leaves(score.arguments()[0][0]))
    assert draw_game.scores()[-1].host_bytes == pytest.approx(16 * parameters, rel=1e-3)


def test_the_picture_of_the_ladder_is_that_of_the_recorded_rows():
    ladder = draw_game.scores()
    with PIL.Image.open(draw_game.PICTURE) as picture:
        assert picture.text["Description"] == draw_game.digest(ladder), "run it"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("gpu", "name"), [(gpu, name) for gpu in ("a5000", "t4") for name in draw_game.moves(gpu)]
)
def test_a_move_compiles_to_its_recorded_score(gpu, name):
    recorded = {one.name: one for one in draw_game.scores(gpu)}[name]
    found = draw_game.compiled(name, gpu)
    assert found["peak"] == pytest.approx(recorded.peak, rel=0.02)
    assert found["seconds"] == pytest.approx(recorded.seconds, rel=0.02)
    assert found["extra_flops"] == pytest.approx(recorded.extra_flops)
