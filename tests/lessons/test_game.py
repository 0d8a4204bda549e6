"""Laws of the game: right steps pass, wrong ones are told what is wrong, and scores come from
the compiled steps.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import draw_game
import jax
import jax.numpy as jnp
import optax
import PIL.Image
import pytest
from slow_cases import slow

from course_lib import lessons, measure
from course_lib.lessons import game
from course_lib.lessons.game import hints, score, scoreboard, setups, submission, updates
from course_lib.measure import hardware, virtual
from course_lib.smaller_and_faster import offload

ROOT = pathlib.Path(__file__).parents[2]
MOVES = draw_game.MOVES


@pytest.fixture(autouse=True)
def board(tmp_path, monkeypatch):
    """Gives each test an empty scoreboard of its own."""
    monkeypatch.setenv("COURSE_SCOREBOARD", str(tmp_path / "game.json"))
    return tmp_path / "game.json"


@pytest.fixture
def no_virtual_gpu(monkeypatch):
    monkeypatch.setattr(virtual, "why_unavailable", lambda name="a5000": "there is no compiler")


def submit(capsys, *arguments, **options):
    capsys.readouterr()
    assert lessons.submit(*arguments, **options) is None
    return capsys.readouterr().out


def make_step(loss=game.loss, gradient=jax.grad, update=None, apply=optax.apply_updates):
    """Returns a submission that differs from the first one in one part."""

    def make_step(config):
        def step(state, batch):
            params, opt_state = state
            grads = gradient(loss)(params, batch)
            updates, opt_state = (update or config.optimizer.update)(grads, opt_state, params)
            return (apply(params, updates), opt_state), jnp.zeros(())

        return jax.jit(step)

    return make_step


def half(loss, dtype=jnp.bfloat16):
    return lambda params, batch: loss(jax.tree.map(lambda p: p.astype(dtype), params), batch)


# Right answers. The reference moves are solutions in the notebooks: tests/test_solutions.py
# submits them.


ON_T4 = draw_game.moves("t4")
LONG_MOVES = "rematerialized blocks", "4 minibatches", "donated state"


@pytest.mark.parametrize("name", [slow(each) if each in LONG_MOVES else each for each in ON_T4])
def test_each_reference_move_passes_in_float16_with_a_loss_scale_for_a_t4(
    name, capsys, no_virtual_gpu
):
    make_step, _ = ON_T4[name]
    printed = submit(capsys, make_step, "t4")
    dtype = "float32" if name == "first step" else "float16"
    assert printed.startswith("✓ The updates equal") and f"{dtype} may differ" in printed


def test_the_first_step_passes_and_so_does_one_that_is_not_jitted(capsys, no_virtual_gpu):
    def plain(config):
        return game.first_step(config).__wrapped__

    assert submit(capsys, game.first_step).startswith("✓ ")
    assert submit(capsys, plain).startswith("✓ ")


def test_float16_passes_with_and_without_a_scale(capsys, no_virtual_gpu):
    def scaled(loss):
        grads = jax.grad(lambda params, batch: 1024 * loss(params, batch))
        return lambda *args: jax.tree.map(lambda g: g / 1024, grads(*args))

    loss = half(game.loss, jnp.float16)
    assert submit(capsys, make_step(loss)).startswith("✓ ")
    assert submit(capsys, make_step(loss, scaled)).startswith("✓ ")


def test_the_measured_differences_leave_a_factor_of_two_to_the_tolerance():
    (params, _), batch = updates.start()
    with jax.default_matmul_precision("highest"):
        right = jax.jit(jax.grad(half(game.loss)))(params, batch)
        wrong = jax.jit(jax.grad(game.loss))(params, batch[:15])
    off = [updates.difference(g, updates.gradient()) for g in (right, wrong)]
    assert 2 * off[0] < updates.TOLERANCE["bfloat16"] < off[1] / 2


# Wrong answers, and words that only the right explanation has.


def sum_of_minibatches(loss, count=4, of=range(4), divisor=1):
    def gradient(params, batch):
        parts = batch.reshape(count, -1, batch.shape[1])
        grads = [jax.grad(loss)(params, parts[i]) for i in of]
        return jax.tree.map(lambda *g: sum(g) / divisor, *grads)

    return gradient


def detached(loss):
    def without_layer_3(params, batch):
        layers = jax.tree.map(
            lambda w: w.at[3].set(jax.lax.stop_gradient(w[3])), params["layers"]
        )
        return loss({**params, "layers": layers}, batch)

    return jax.grad(without_layer_3)


def layered(block, labels=slice(None)):
    def loss(params, batch):
        x = game.embed(params, batch[:, :-1])
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
        return game.cross_entropy(params, x[:, labels], batch[:, 1:][:, labels])

    return loss


def with_silu(layer, x):
    x = x + game.attention(layer, game.norm(layer["norm_1"], x))
    h = game.norm(layer["norm_2"], x)
    return x + jax.nn.silu(h @ layer["up"]) @ layer["down"]


def keeps_old_state(grads, opt_state, params):
    return game.SMALL.optimizer.update(grads, opt_state, params)[0], opt_state


def starts_anew(grads, opt_state, params):
    return game.SMALL.optimizer.update(grads, game.SMALL.optimizer.init(params), params)


def adds_twice(params, updates):
    return optax.apply_updates(optax.apply_updates(params, updates), updates)


def returned(result):
    return lambda config: lambda state, batch: result(state)


def to_bfloat16(state):
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), state)


WRONG = {
    "a stub": (lambda config: None, "Nothing returned yet. Begin with a copy"),
    "no function": (3, "Pass your function itself"),
    "an error": (make_step(lambda params, batch: params["nope"]), "raised KeyError: 'nope'"),
    "a step that is no function": (lambda config: 3, "should return the function `step`"),
    "an empty step": (lambda config: lambda state, batch: None, "Nothing returned yet."),
    "the state alone": (returned(lambda state: state[0]), "two things"),
    "parameters alone": (returned(lambda state: (state[0], 0.0)), "built like the old one"),
    "bfloat16 state": (returned(lambda s: (to_bfloat16(s), 0.0)), "is bfloat16; float32"),
    "no model": (returned(lambda state: (state, 0.0)), "multiplies no matrices"),
    "no division": (make_step(gradient=sum_of_minibatches), "4 times too large"),
    "the loss scale of a T4 left in": (
        make_step(lambda *a: 2**15 * game.loss(*a)),
        "3.28e+04 times too large. Divide",
    ),
    "a scale left in": (
        make_step(lambda *a: 1024 * game.loss(*a)),
        "1.02e+03 times too large. Divide",
    ),
    "divided twice": (
        make_step(gradient=lambda loss: sum_of_minibatches(loss, divisor=16)),
        "0.25 times the right ones. Is something divided twice?",
    ),
    "half of the batch": (
        make_step(lambda params, batch: game.loss(params, batch[:8])),
        "8 do not count (the first of them is number 8",
    ),
    "the last minibatch only": (
        make_step(gradient=lambda loss: sum_of_minibatches(loss, of=[3])),
        "12 do not count (the first of them is number 0",
    ),
    "unequal": (
        make_step(lambda p, b: (game.loss(p, b[:4]) + game.loss(p, b[4:])) / 2),
        "count alike; yours count 0.67 to 2 times",
    ),
    "uphill": (make_step(lambda *a: -game.loss(*a)), "they go uphill"),
    "a detached layer": (make_step(gradient=detached), "layers/down of layer 3 gets no grad"),
    "labels left out": (make_step(layered(game.block, slice(-1))), "another loss"),
    "another function": (make_step(layered(with_silu)), "another loss. It differs most in lay"),
    "old optimizer state": (make_step(update=keeps_old_state), "The optimizer's state is lost"),
    "new optimizer state": (make_step(update=starts_anew), "The optimizer's state is lost"),
    "applied twice": (make_step(apply=adds_twice), "the parameters do not follow"),
    "not finite": (make_step(lambda *a: game.loss(*a) / 0), "not finite"),
}


# each has a sentence that another case has, too
AGAIN = "a scale left in", "the last minibatch only", "new optimizer state"


@pytest.mark.parametrize("case", [slow(each) if each in AGAIN else each for each in WRONG])
def test_a_wrong_step_is_told_what_is_wrong(case, capsys):
    wrong, words = WRONG[case]
    printed = submit(capsys, wrong)
    assert printed.startswith("✗ ") and printed.count("\n") == 1, printed
    assert words in printed


# Other optimizers, and moments on the host.

needs_host_memory = pytest.mark.skipif(
    offload.why_unavailable() is not None, reason=f"no host memory: {offload.why_unavailable()}"
)


def changed(update_of):
    """Returns a submission whose update is another one wherever the optimizer is not SGD, with
    which the gradient is checked.
    """

    def submission(config):
        update = config.optimizer.update
        return make_step(update=update if config == game.SMALL else update_of(update))(config)

    return submission


def twice_as_far(update):
    def further(grads, opt_state, params):
        updates, opt_state = update(grads, opt_state, params)
        return jax.tree.map(lambda u: 2 * u, updates), opt_state

    return further


def counted_twice(update):
    """Updates the state twice per step, as a loop over layers may do by mistake."""

    def twice(grads, opt_state, params):
        updates, new = update(grads, opt_state, params)
        return updates, update(grads, new, params)[1]

    return twice


@pytest.mark.parametrize(
    "name",
    [slow(each) if each not in ("adamw", "lion") else each for each in setups.OPTIMIZERS],
)
def test_a_step_that_uses_the_optimizer_of_its_config_passes_with_each(
    name, capsys, no_virtual_gpu
):
    printed = submit(capsys, make_step(), optimizer=name)
    words = "equal the first" if name == "adamw" else f"are those of {name}. The gradient eq"
    assert printed.startswith(f"✓ The updates {words}"), printed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (twice_as_far, "✗ The gradient is right, but lion makes other updates"),
        (counted_twice, "✗ The parameters are right, but the new state of lion is not"),
    ],
)
def test_wrong_updates_and_states_of_another_optimizer_are_found(
    wrong, words, capsys, no_virtual_gpu
):
    assert words in submit(capsys, changed(wrong), optimizer="lion")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "sgd"}, "optimizer='sgd' must be one of adamw, "),
        ({"moments": "disk"}, "moments='disk' must be one of device, host."),
        ({"optimizer": "adafactor", "moments": "host"}, "'adamw' or 'lion', not 'adafactor'"),
    ],
)
def test_an_unknown_optimizer_or_memory_is_named_with_the_ones_that_are(options, words, capsys):
    assert words in submit(capsys, game.first_step, **options)


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

        return make_step(update=update)(config)

    return submission


@needs_host_memory
def test_moments_on_the_host_may_be_fetched_at_once_but_must_go_back(capsys, no_virtual_gpu):
    printed = submit(capsys, kept_on("host"), moments="host")
    assert printed.startswith("✓ The updates equal the first step's"), printed
    donated = lambda config: jax.jit(kept_on("device")(config), donate_argnums=0)  # noqa: E731
    for stays in (kept_on("device"), donated):  # JAX would end the process if it ran the second
        printed = submit(capsys, stays, moments="host")
        assert "✗ The new state is in other memories" in printed, printed
        assert "Moments go back to the host" in printed


def test_without_host_memory_a_line_says_that_nothing_is_checked(capsys, monkeypatch):
    monkeypatch.setattr(offload, "why_unavailable", lambda: "arrays stay where they are")
    printed = submit(capsys, game.first_step, moments="host")
    assert (
        printed == "Moments on the host cannot be checked here: arrays stay where they are.\n"
    )


@pytest.mark.parametrize("precision", [jnp.bfloat16, jnp.float32])
def test_a_mistake_is_found_in_bfloat16_too(precision, capsys):
    wrong = make_step(half(lambda p, b: game.loss(p, b[:12]), precision))
    assert "4 do not count (the first of them is number 12" in submit(capsys, wrong)


def test_a_gpu_that_does_not_exist_is_named_with_the_ones_that_do(capsys):
    assert "✗ gpu='a6000' must be one of t4, " in submit(capsys, game.first_step, "a6000")
    assert "v5e" not in submit(capsys, game.first_step, "v5e").replace("gpu='v5e'", "")


# Without a virtual GPU.


def test_without_a_virtual_gpu_the_updates_are_checked_and_the_reason_is_given(
    capsys, no_virtual_gpu, board
):
    printed = submit(capsys, game.first_step)
    assert (
        printed.startswith("✓ The updates equal")
        and "no score, because here there is no" in printed
    )
    assert not board.exists()
    assert submit(capsys, make_step(gradient=sum_of_minibatches)).startswith("✗ ")


def test_importing_lessons_imports_neither_jax_nor_the_game():
    code = "import sys; from course_lib import lessons; print('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True).stdout == b"False\n"
    )


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
    (scored(peak=1.6, seconds=0.55), program(LOGITS), "All targets are reached"),
]


def test_the_hints_lead_from_the_first_step_through_the_notebooks_in_order():
    earlier = []
    for one, its_program, words in HINTS:
        assert words in hints.hint(one, its_program, earlier)
        earlier.append(one)
    fetched_at_once = scored(peak=2.7, seconds=0.43, moments="host")
    on_host = hints.hint(fetched_at_once, program(LOGITS), earlier[:-2])
    assert "Which part of the moments" in on_host and "of the peak" not in on_host
    small_not_fast = earlier[:6]
    stacks = scored(peak=32.6), program(STACKED), small_not_fast
    assert "(Notebook 6.)" in hints.hint(*stacks)


def test_a_step_fits_below_nine_tenths_of_the_memory_and_reaches_targets_only_if_it_fits():
    limit = score.limit("t4") / GIB
    assert scored(peak=limit, gpu="t4").fits and not scored(peak=limit + 0.01, gpu="t4").fits
    assert scored(peak=3.4).small and not scored(peak=3.6).small
    assert scored(peak=10, seconds=0.1).fast and not scored(peak=30, seconds=0.1).fast


def test_the_fast_target_is_that_of_the_first_steps_flops_in_16_bits():
    assert score.half_dtype("t4") == "float16" and score.half_dtype("a5000") == "bfloat16"
    products = score.reference_flops() / (0.77 * 111e12)
    assert score.fast_seconds("a5000") == pytest.approx(products + 150e9 / (0.85 * 768e9))
    N, D, V, T = 12, 768, 50_257, 16 * 1024
    forward = 2 * T * (N * (12 * D**2 + 2 * 1024 * D) + D * V)
    assert score.reference_flops() == 3 * forward


def test_the_levels_of_part_three_open_one_by_one_after_a_small_and_a_fast_step():
    small, fast = scored(peak=3.4), scored(peak=16.4, seconds=0.37)
    assert score.open_levels([small]) == score.open_levels([fast]) == []
    assert score.open_levels([small, fast]) == list(score.LEVELS[:1])
    both = scored(peak=3.1, seconds=0.34)  # as small as 15 and 16 ask for
    assert score.open_levels([small, fast, both]) == list(score.LEVELS[:3])
    on_t4 = [dataclasses.replace(one, gpu="t4", seconds=0.1) for one in (small, fast)]
    assert score.open_levels(on_t4) == []


def test_the_level_of_the_host_asks_for_adamw_whatever_else_is_as_small():
    lighter, on_host = score.LEVELS[2:4]
    small = scored(peak=1.9, seconds=0.35, optimizer="adafactor")
    assert lighter.is_reached(small) and not on_host.is_reached(small)
    assert on_host.is_reached(scored(peak=1.9, seconds=0.43, moments="host"))


def test_a_score_that_was_stored_before_optimizers_counts_as_adamw_on_the_device(board):
    old = dataclasses.asdict(scored())
    del old["optimizer"], old["moments"]
    board.write_text(json.dumps([old]))
    assert scoreboard.read() == [scored()]


def test_the_scoreboard_outlives_the_process(board):
    scoreboard.add(scored("first"))
    code = """
from course_lib.lessons.game import scoreboard
scoreboard.add(scoreboard.read()[0].__class__("second", "a5000", 1, 0.1, 0.0, 0))
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
    assert [one.name for one in scoreboard.read()] == ["first", "second"]


def test_the_same_submission_twice_in_a_row_is_one():
    assert len(scoreboard.add(scored()) and scoreboard.add(scored())) == 1
    assert len(scoreboard.add(scored("other"))) == 2
    assert len(scoreboard.add(scored())) == 3


@pytest.mark.parametrize("damage", [b"", b"{", b'[{"name": "x"}]', b'{"a": 1}', b"\xff\xfe"])
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


def test_a_submission_stands_in_the_table_below_the_targets_with_the_earlier_ones(
    capsys, monkeypatch
):
    monkeypatch.setattr(virtual, "why_unavailable", lambda name: None)
    monkeypatch.setattr(updates, "check", lambda make_step, setup: "are equal.")
    rows = iter(HINTS)

    def compile_step(make_step, gpu, name, setup):
        one, its_program, _ = next(rows)
        return dataclasses.replace(one, name=name, gpu=gpu), its_program

    monkeypatch.setattr(score, "compile_step", compile_step)
    first = submit(capsys, game.first_step)
    assert re.search(r"^ *1  first_step +46.0 +no +600 ", first, re.M), first
    assert "fits in 21.19 GiB" in first and "Hint: Most products take float32" in first
    second = submit(capsys, game.first_step, name="half")
    assert re.search(r"^ *1  first_step .*\n *2  half +32.6 +no", second, re.M), second
    other = submit(capsys, game.first_step, "t4")
    assert "half" not in other and "NVIDIA T4" in other


def test_the_table_names_optimizers_and_the_next_target_once_there_are_any(capsys):
    small, fast = scored(peak=3.4), scored(peak=16.4, seconds=0.37)
    submission.table([small, fast], "a5000")
    printed = capsys.readouterr().out
    assert "target 15: loss in one pass" in printed and "target 16" not in printed
    assert "optimizer" not in printed
    submission.table([small, scored(optimizer="lion"), scored(moments="host")], "a5000")
    printed = capsys.readouterr().out
    assert "lion" in printed and "adamw, on the host" in printed
    assert "target 15" not in printed


def test_the_picture_has_a_corner_for_the_next_target():
    small, fast = scored(peak=3.4), scored(peak=16.4, seconds=0.37)
    texts = [
        text.get_text() for text in submission.picture([small, fast], "a5000").axes[0].texts
    ]
    assert any(text.startswith("next target: ") for text in texts)
    texts = [text.get_text() for text in submission.picture([small], "a5000").axes[0].texts]
    assert not any(text.startswith("next target: ") for text in texts)


def test_the_picture_has_a_number_and_a_name_for_each_submission():
    figure = submission.picture([scored("first"), scored("second", peak=3.0)], "a5000")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"1", "2", "1. first", "2. second", "target: small: 3.5 GiB"} <= set(texts)


# With the compiler.

needs_compiler = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason="needs virtual GPUs"
)


@needs_compiler
def test_bfloat16_on_a_t4_gets_a_sentence_that_names_float16(capsys):
    printed = submit(capsys, make_step(half(game.loss)), "t4")
    assert "✗ An NVIDIA T4 has no unit for products of bfloat16" in printed
    assert "16-bit dtype is float16" in printed and printed.count("\n") == 2


@needs_compiler
def test_a_step_that_fails_at_the_real_size_or_leaves_work_out_is_told_so(capsys):
    def small_only(params, batch):
        return game.loss(params, batch.reshape(16, 33))

    def cheats(config):
        layers = 1 if config.layers == 12 else config.layers

        def loss(params, batch):
            few = jax.tree.map(lambda w: w[:layers], params["layers"])
            return game.loss({**params, "layers": few}, batch)

        return make_step(loss)(config)

    assert "The small step works, the real one raised TypeError" in submit(
        capsys, make_step(small_only)
    )
    assert "fewer FLOPs" in submit(capsys, cheats)


# The ladder of the reference moves.


PART_ONE = 7  # the first step, and the moves of notebooks 1 to 6


def test_the_moves_lead_down_the_ladder_and_the_last_is_the_fastest_that_fits():
    ladder = draw_game.scores()[:PART_ONE]
    *down, last = ladder
    assert all(above.peak > below.peak for above, below in itertools.pairwise(down))
    assert [one.fits for one in ladder] == [False, False, True, True, True, True, True]
    assert down[-1].small and not any(one.small for one in down[:-1])
    assert last.fast and not any(one.fast for one in down)
    assert last.extra_flops == 0


def test_in_float16_the_same_moves_lead_to_both_targets_on_a_t4():
    ladder = draw_game.scores("t4")
    first, *others = ladder
    *down, last = ladder
    assert {one.gpu for one in ladder} == {"t4"} and len(ladder) == PART_ONE
    assert all(above.peak > below.peak for above, below in itertools.pairwise(down))
    assert [one.fits for one in ladder] == [False, False, True, True, True, True, True]
    assert down[-1].small and last.fast and last.extra_flops == 0
    assert all(one.seconds < first.seconds / 2 for one in others)


def test_each_move_of_part_three_reaches_the_level_of_its_notebook_and_none_before_it_does():
    ladder = draw_game.scores()
    assert len(ladder) == 1 + len(MOVES) == PART_ONE + len(score.LEVELS)
    for i, level in enumerate(score.LEVELS, PART_ONE):
        assert MOVES[i - 1].stem.endswith(str(level.notebook))
        assert level.is_reached(ladder[i]), ladder[i]
        assert not any(level.is_reached(one) for one in ladder[:i]), level
    peaks = [one.peak for one in ladder[PART_ONE:]]
    assert peaks == sorted(peaks, reverse=True)
    both = ladder[PART_ONE + 1]
    assert both.small and both.fast


def test_bytes_to_the_host_are_timed_by_the_link():
    on_host = draw_game.scores()[-1]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(score.arguments()[0][0]))
    assert on_host.host_bytes == pytest.approx(16 * parameters, rel=1e-3)
    flops, link = measure.Flops({"bfloat16": 1}, {}), hardware.host_link("pcie4")
    moved = measure.Traffic(0, (measure.Move("copy", "offload", on_host.host_bytes, 1, ""),))
    seconds = measure.attainable_seconds(flops, moved, hardware.get("a5000"), link)
    assert seconds == pytest.approx(16 * parameters / 32e9, rel=1e-3)


def test_the_picture_of_the_ladder_is_that_of_the_recorded_rows():
    ladder = draw_game.scores()
    with PIL.Image.open(draw_game.PICTURE) as picture:
        assert picture.text["Description"] == draw_game.digest(ladder), "run it"


def test_the_notebooks_solutions_are_the_moves():
    for path in MOVES:
        [notebook] = (ROOT / "notebooks").glob(f"{path.stem[-2:]}_*.ipynb")
        cells = json.loads(notebook.read_text())["cells"]
        solutions = [
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        ]
        assert any(path.read_text().strip() in text for text in solutions), notebook.name


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


@pytest.mark.slow
@needs_compiler
def test_a_submission_is_compiled_and_scored(capsys):
    printed = submit(capsys, game.first_step)
    assert "Compiling for an NVIDIA RTX A5000 that is not there: about" in printed
    assert re.search(r"^ *1  first_step +4\d\.\d+ +no", printed, re.M), printed
    assert printed.splitlines()[-1].startswith("Hint: Most products take float32")
