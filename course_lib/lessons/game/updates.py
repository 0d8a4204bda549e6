"""Checks that a step changes the state as the first step does, on a small model.

The optimizer is SGD with momentum: Adam would hide a wrong scale. The new momentum shows the
step's gradient, which is compared with that of `model.loss` in float32 at the highest
precision. If it differs, least squares tell how much each sequence of the batch counts in it:
minibatches that were forgotten, or not divided by, show there.

A step with another optimizer, or with moments on the host, then runs once more, with that
optimizer. Its updates must be those that the optimizer computes from the step's own gradient.
"""

import collections
import contextlib
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from course_lib import measure
from course_lib.lessons.check.answers import WrongAnswer, call, require, same_shapes
from course_lib.lessons.game import model
from course_lib.lessons.game.setups import FIRST, Setup

PyTree = Any

RATE, DECAY = 0.1, 0.9
SMALL = model.Config(6, 48, 3, 211, 32, 16, optax.sgd(RATE, momentum=DECAY))
"""The model whose updates are compared. The batch is as large as the real one, so the same
numbers of minibatches divide it."""

TOLERANCE = {"float32": 1e-4, "float16": 0.04, "bfloat16": 0.04}
"""The largest accepted difference, by the dtype of the products: see `difference`.

Measured on a CPU. Right: float32 with the loss in parts 3e-7; bfloat16 0.012 to 0.018, with the
softmax too 0.019; float16 0.002. A bfloat16 sum of 16 minibatches, the most there are: 0.005,
so a step in bfloat16 may have one (0.013 with it), and a step in float32 may not. Wrong: GELU
by the error function 0.0004 (noticed in float32 only); scores 10% too large 0.069; no gradient
for the positions 0.16; the last label of each sequence left out 0.20; one of 16 sequences left
out 0.21; SiLU for GELU 0.24; one of six layers detached 0.39; a sum of four minibatches 3.
"""

SCALE = 0.01
"""How far the whole gradient's factor may be from 1. Rounding to 16 bits hardly changes it; a
sum divided by the 33 tokens of a sequence, in place of its 32 labels, is off by 0.03.
"""


def check(make_step: Any, setup: Setup = FIRST) -> str:
    """Returns how close the updates of a learner's step are to the first step's. Raises
    WrongAnswer, saying what differs.
    """
    step, (new, (momentum, _)), loss = one_step(make_step, SMALL, None, setup)
    (old, (old_momentum, _)), _ = start()
    yours = jax.tree.map(lambda m, o: m - DECAY * o, momentum.trace, old_momentum.trace)
    dtype, off = dtype_of_products(step, setup), difference(yours, gradient())
    if not (off <= TOLERANCE[dtype] and abs(scale(yours) - 1) <= SCALE):
        raise WrongAnswer(explain(yours))
    for name, (along, size) in along_the_right(yours).items():  # bfloat16: off by up to 0.02
        factor = along / size
        require(
            abs(factor - 1) <= 0.1,
            f"The gradient of {name} is {factor:.2f} times the right one; most are right.",
        )
    moved = jax.tree.map(lambda n, o: n - o, new, old)
    require(
        difference(moved, jax.tree.map(lambda m: -RATE * m, momentum.trace)) < 1e-3,
        "The gradient is right, but the parameters do not follow it: add the updates of"
        " config.optimizer to the parameters, once, in float32.",
    )
    require(
        abs(loss - (right := start_loss_and_gradient()[0])) <= 0.02 * right,
        f"The update is right, but the step returns the loss {loss:.4g}. The mean over all"
        f" labels is {right:.4g}.",
    )
    if setup != FIRST:
        check_optimizer(make_step, setup, yours)
    return f"differ by {off:.1e}, and {dtype} may differ by {TOLERANCE[dtype]:g}."


def one_step(
    make_step: Any, config: model.Config, state: PyTree, setup: Setup
) -> tuple[Any, PyTree, float]:
    """Makes a learner's step and runs it once: returns the step, the new state as NumPy arrays,
    and the loss.

    `state` None is that of `start`: a stub gets its answer before that is computed.
    """
    hint = "Begin with a copy of `game.first_step`, and change one thing."
    require(
        _takes_config(make_step),
        "Submit `make_step` itself: it takes the configuration alone, and returns the step.",
    )
    step = call(make_step, config, hint=hint)
    require(callable(step), f"make_step should return the function `step`, not {step!r}.")
    state = start()[0] if state is None else state
    copies = copy_of(config, state, setup)
    places = memories(copies)
    with jax.default_matmul_precision("highest"):
        batch = jnp.array(start()[1])
        hint = "A step returns the new state and the loss."
        if setup.moments == "host":
            _same_memories(call(memories_after, step, copies, batch, hint=hint), places)
        result = call(step, copies, batch, hint=hint)
    require(
        isinstance(result, tuple) and len(result) == 2,
        "A step returns two things: the new state and the loss.",
    )
    require(
        str(jax.tree.structure(result[0])) == str(jax.tree.structure(state)),
        "The new state should be built like the old one: the parameters, and the state of"
        " config.optimizer.",
    )
    same_shapes(result[0], state, "The new state")
    if setup.moments == "host":
        _same_memories(memories(result[0]), places)
    loss = np.asarray(result[1])
    require(loss.shape == (), f"The loss is one number, not an array of shape {loss.shape}.")
    return step, jax.tree.map(_numbers, result[0]), float(loss)


def _takes_config(make_step: Any) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        signature = inspect.signature(make_step)
        try:
            signature.bind(SMALL)
        except TypeError:
            return False
    return True


def copy_of(config: model.Config, state: PyTree, setup: Setup) -> PyTree:
    """Copies a state, because the step may donate it, and moves its moments to their memory."""
    params, opt_state = jax.tree.map(jnp.array, state)
    return params, setup.place(config.optimizer, opt_state)


def memories(tree: PyTree) -> dict[str, int]:
    """Returns the number of a tree's arrays in each memory."""
    return dict(collections.Counter(a.sharding.memory_kind for a in jax.tree.leaves(tree)))


def memories_after(step: Any, state: PyTree, batch: Any) -> dict[str, int]:
    """Returns the same of a step's new state, by types alone: JAX ends a process in which a
    donated array on the host becomes a result on the device.
    """
    names = {jax.memory.Space.Host: "pinned_host", jax.memory.Space.Device: "device"}
    results = jax.make_jaxpr(step)(state, batch).out_avals[: len(jax.tree.leaves(state))]
    return dict(collections.Counter(names[result.memory_space] for result in results))


def _same_memories(new: dict[str, int], old: dict[str, int]) -> None:
    require(
        new == old,
        f"The new state is in other memories than the old one: {new} in place of {old}. Moments"
        " go back to the host, everything else stays on the device.",
    )


def _numbers(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def check_optimizer(make_step: Any, setup: Setup, yours: PyTree) -> None:
    """Raises WrongAnswer unless a step's updates are those of its gradient, `yours`."""
    config, update, opt_state = second_step(setup)
    params = jax.tree.map(jnp.array, start()[0][0])
    _, (new, new_state), _ = one_step(make_step, config, (params, opt_state), setup)
    updates, expected = update(yours, opt_state, params)
    moved = jax.tree.map(lambda n, o: n - np.asarray(o), new, params)
    name = setup.optimizer
    require(
        difference(moved, updates) < 0.1,
        f"The gradient is right, but {name} makes other updates of it than your step. Do the"
        " old state and the parameters go into config.optimizer.update, and all updates into"
        " the parameters, once?",
    )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(new_state),
        jax.tree.leaves(jax.tree.map(_numbers, expected)),
        strict=True,
    )
    wrong = [jax.tree_util.keystr(path) for (path, a), b in pairs if not _close(a, b)]
    require(
        not wrong,
        f"The parameters are right, but the new state of {name} is not: {len(wrong)} of its"
        f" arrays differ, the first is {(wrong or [''])[0]}. Each step changes the state once.",
    )


@functools.cache
def second_step(setup: Setup) -> tuple[model.Config, Any, PyTree]:
    """Returns a setup's configuration, its compiled update, and the state after one update."""
    config = setup.config(SMALL)
    update = jax.jit(config.optimizer.update)
    params = start()[0][0]
    return config, update, update(gradient(), config.optimizer.init(params), params)[1]


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of an optimizer's state are equal to rounding. Counts and keys must be
    equal. Fewer than 5% of 8-bit codes may differ by more than one.
    """
    if a.dtype == np.uint8:
        return bool(np.mean(np.abs(a.astype(int) - b.astype(int)) > 1) < 0.05)
    if a.dtype.kind in "iu":
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(b))


def dtype_of_products(step: Any, setup: Setup = FIRST) -> str:
    """Returns the dtype with the fewest bits that the step multiplies."""
    state, batch = start()
    flops = str(measure.flops(step, copy_of(SMALL, state, setup), batch).total)
    dtypes = [dtype for dtype in ("bfloat16", "float16", "float32") if dtype in flops]
    require(dtypes, "This step multiplies no matrices. It should train the model: `game.loss`.")
    return dtypes[0]


@functools.cache
def start() -> tuple[PyTree, np.ndarray]:
    """Returns a state with momentum, as after some steps, and a batch: NumPy's arrays."""

    @jax.jit
    def both():
        params = model.init(SMALL, jax.random.key(0))
        momentum, empty = SMALL.optimizer.init(params)
        momentum = momentum._replace(trace=jax.tree.map(lambda p: 0.01 * p, params))
        shape = (SMALL.batch_size, SMALL.length + 1)
        batch = jax.random.randint(jax.random.key(1), shape, 0, SMALL.vocabulary)
        return (params, (momentum, empty)), batch

    return jax.tree.map(np.asarray, both())


@functools.cache
def start_loss_and_gradient() -> tuple[float, PyTree]:
    """Returns the game's loss for the batch of `start`, and its gradient."""
    (params, _), batch = start()
    with jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(jax.value_and_grad(model.loss))(params, batch)
    return float(loss), jax.tree.map(np.asarray, grads)


def gradient() -> PyTree:
    return start_loss_and_gradient()[1]


@functools.cache
def gradients_of_sequences() -> PyTree:
    """Returns the gradient of each sequence of the batch, along a first axis."""
    (params, _), batch = start()
    with jax.default_matmul_precision("highest"):
        one = jax.jit(jax.grad(model.loss))
        each = [one(params, sequence[None]) for sequence in batch]
    return jax.tree.map(lambda *grads: np.stack(grads), *each)


def difference(yours: PyTree, expected: PyTree) -> float:
    """Returns the root mean square, over all arrays of all layers, of the difference of one
    array as a share of its norm: small arrays count as much as large ones.
    """
    shares = [
        np.linalg.norm(a - b) / np.linalg.norm(b)
        for (_, a), (_, b) in zip(arrays(yours), arrays(expected), strict=True)
    ]
    return float(np.sqrt(np.mean(np.square(shares))))


def scale(yours: PyTree) -> float:
    """Returns the factor of the right gradient that is nearest to a gradient."""
    along, size = np.sum(list(along_the_right(yours).values()), axis=0)
    return float(along / size)


def along_the_right(yours: PyTree) -> dict[str, tuple[float, float]]:
    """Returns the products of each array's right gradient with yours and with itself."""
    pairs = zip(arrays(yours), arrays(gradient()), strict=True)
    return {
        name: (np.vdot(mine, right), np.vdot(right, right))
        for (name, mine), (_, right) in pairs
    }


def arrays(tree: PyTree) -> list[tuple[str, np.ndarray]]:
    """Lists a tree's arrays with their names, those of the layers one by one."""
    named = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, array = "/".join(str(entry.key) for entry in path), np.asarray(leaf, np.float64)
        if name.startswith("layers/"):
            named += [(f"{name} of layer {i}", one) for i, one in enumerate(array)]
        else:
            named.append((name, array))
    return named


def explain(yours: PyTree) -> str:
    """Returns a sentence on why a gradient is wrong."""
    if not all(np.isfinite(array).all() for _, array in arrays(yours)):
        return "The new state is not finite. Was a loss scale, or a count of 0, divided by?"
    pairs = list(zip(arrays(yours), arrays(gradient()), strict=True))
    norm = np.linalg.norm
    without = [name for (name, mine), (_, right) in pairs if norm(mine) < 1e-3 * norm(right)]
    if without:
        others = f" (nor do {len(without) - 1} other arrays)" if without[1:] else ""
        return (
            f"{without[0]} gets no gradient{others}. Is it detached (stop_gradient), or left"
            " out of the gradient?"
        )
    return _explain_batch(*shares_of_sequences(yours)) or _explain_model(
        {name: float(norm(mine - right) / norm(right)) for (name, mine), (_, right) in pairs}
    )


def _explain_batch(counts: np.ndarray, momentum: float, rest: float) -> str | None:
    """Returns a sentence on a wrong sum of right gradients; None if it is something else."""
    most, factor = float(abs(counts).max()), float(counts.mean())
    missing = np.flatnonzero(abs(counts) < 0.2 * most)
    first, size = missing[0] if missing.size else 0, f"The updates are {factor:.3g} times"
    table: list[tuple[bool, str | None]] = [  # the first that holds
        (rest > 0.1, None),
        # relative: a scale left in the gradient enlarges what the fit puts down to the momentum
        (
            abs(momentum) > 0.05 * max(1.0, most),
            "The optimizer's state is lost: config.optimizer.update takes the old one and"
            " returns the new one, which belongs into the new state.",
        ),
        (
            missing.size > 0,
            f"Of the {len(counts)} sequences of the batch, {missing.size} do not count (the"
            f" first of them is number {first}, from 0). Does every minibatch add its gradient"
            " to the sum?",
        ),
        (
            float(abs(counts - factor).max()) > 0.2 * abs(factor),
            "All sequences of the batch should count alike; yours count"
            f" {counts.min():.2g} to {counts.max():.2g} times as much as they should.",
        ),
        (factor < 0, f"{size} the right ones: they go uphill."),
        (
            factor > 1.1,
            f"{size} too large. Divide a sum over minibatches by their number, and a scaled"
            " gradient by its scale.",
        ),
        (factor < 0.9, f"{size} the right ones. Is something divided twice?"),
        (
            rest < SCALE + 0.03 and abs(factor - 1) > SCALE,
            f"{size} the right ones. Is a sum divided by the number of labels? A sequence has"
            " one token more than labels.",
        ),
    ]
    return next((sentence for holds, sentence in table if holds), None)


def _explain_model(shares: dict[str, float]) -> str:
    worst = max(shares, key=shares.__getitem__)
    differs = f"It differs most in {worst}, by {shares[worst]:.2g} of its norm."
    if shares[worst] < 0.03:  # bfloat16 and float16 may differ by more
        return (
            f"The gradient is nearly right, and in float32 that is not enough. {differs} Is"
            " something rounded to 16 bits, as the sum over minibatches? Or is a function of"
            " your loss only nearly that of `game.loss`?"
        )
    return (
        f"The gradient is that of another loss. {differs} Does your loss compute the same as"
        " `game.loss`, for every label?"
    )


def shares_of_sequences(yours: PyTree) -> tuple[np.ndarray, float, float]:
    """Returns, by least squares, how much each sequence counts in a gradient (1 is right) and
    the old momentum (0), and the share of its norm that neither explains.
    """
    (_, (momentum, _)), _ = start()
    each, old, target = (
        np.concatenate([np.reshape(leaf, (n, -1)) for leaf in jax.tree.leaves(tree)], axis=1)
        for tree, n in (
            (gradients_of_sequences(), SMALL.batch_size),
            (momentum.trace, 1),
            (yours, 1),
        )
    )
    basis = np.concatenate([each / SMALL.batch_size, old]).T
    shares, *_ = np.linalg.lstsq(basis, target[0], rcond=None)
    size = max(float(np.linalg.norm(target)), 1e-30)
    rest = np.linalg.norm(basis @ shares - target[0]) / size
    return shares[:-1], float(shares[-1]), float(rest)
