"""The small model whose updates are compared: its numbers, which are drawn anew for each
submission, the right gradient, and sentences on why another one is wrong.

Least squares tell how much each sequence of the batch counts in a gradient: minibatches that
were forgotten, or not divided by, show there.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax

from course_lib.lessons.game import model

PyTree = Any

RATE, DECAY = 0.1, 0.9
SMALL = model.Config(6, 48, 3, 211, 32, 16, optax.sgd(RATE, momentum=DECAY))
"""The batch is as large as the real one, so the same numbers of minibatches divide it."""

LOGITS = 3
"""The output matrix is so many times as large as `model.init` makes it: logits of a trained
model. Capped at 30 they give a gradient that is off by 0.13; with small ones it would be 0.01.
"""

SCALE = 0.01
"""How far the whole gradient's factor may be from 1. Rounding to 16 bits hardly changes it; a
sum divided by the 33 tokens of a sequence, in place of its 32 labels, is off by 0.03.
"""

_seed = 0


def draw(seed: int) -> None:
    """Draws the parameters and the batch of all that follows."""
    global _seed
    if seed != _seed:
        _seed = seed
        for cached in (_drawn, gradients_of_sequences):
            cached.cache_clear()


def start() -> tuple[PyTree, np.ndarray]:
    """Returns a state with momentum, as after some steps, and a batch: NumPy's arrays. The loss
    of its sequences grows, so those of its minibatches differ by more than 2%.
    """
    return _drawn()[:2]


def start_loss_and_gradient() -> tuple[float, PyTree]:
    """Returns the game's loss for the batch of `start`, and its gradient."""
    return _drawn()[2:]


def gradient() -> PyTree:
    return _drawn()[3]


@functools.cache
def _drawn() -> tuple[PyTree, np.ndarray, float, PyTree]:
    params, opt_state, batch = _compiled(_numbers)(jax.random.key(_seed))
    with jax.default_matmul_precision("highest"):
        (loss, losses), grads = _compiled(_losses_and_gradient)(params, batch)
    state, grads = jax.tree.map(np.asarray, ((params, opt_state), grads))
    return state, np.asarray(batch)[np.argsort(losses)], float(loss), grads


@functools.cache
def _compiled(function: Any) -> Any:
    return jax.jit(function)


def _numbers(key: jax.Array) -> tuple[PyTree, PyTree, jax.Array]:
    params = model.init(SMALL, key)
    params["output"] *= LOGITS
    momentum, empty = SMALL.optimizer.init(params)
    momentum = momentum._replace(trace=jax.tree.map(lambda p: 0.01 * p, params))
    shape = SMALL.batch_size, SMALL.length + 1
    batch = jax.random.randint(jax.random.fold_in(key, 1), shape, 0, SMALL.vocabulary)
    return params, (momentum, empty), batch


def _losses_and_gradient(params: PyTree, batch: jax.Array) -> Any:
    def loss(params: PyTree) -> tuple[jax.Array, jax.Array]:
        losses = jax.vmap(model.loss, (None, 0))(params, batch[:, None])
        return losses.mean(), losses

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def gradients_of_sequences() -> PyTree:
    """Returns the gradient of each sequence of the batch, along a first axis."""
    (params, _), batch = start()
    with jax.default_matmul_precision("highest"):
        each = [_compiled(_gradient)(params, sequence[None]) for sequence in batch]
    return jax.tree.map(lambda *grads: np.stack(grads), *each)


_gradient = jax.grad(model.loss)


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
            f"{missing.size} of the {len(counts)} sequences of the batch do not count (the"
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
            " one token more than labels. Or is a term added to the loss?",
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
