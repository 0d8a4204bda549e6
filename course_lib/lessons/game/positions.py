"""Checks that a step learns from every label at the real length: pieces of a sequence that
divide the small length may cut off its tail.
"""

import functools
from typing import Any

import jax
import numpy as np

from course_lib.lessons.check.answers import WrongAnswer
from course_lib.lessons.game import model, updates

LONG = model.Config(
    1, 16, 1, 61, model.REAL.length, model.REAL.batch_size, updates.SMALL.optimizer
)


def check(make_step: Any) -> None:
    """Raises WrongAnswer unless each position's embedding gets the first step's gradient. That
    of the last position comes from the last label alone.
    """
    params, batch, right = start()
    state = jax.tree.map(jax.numpy.array, (params, LONG.optimizer.init(params)))
    try:
        (_, (momentum, _)), _ = make_step(LONG)(state, batch)
        mine = np.asarray(momentum.trace["positions"], np.float64)
    except Exception:  # the real step will raise it, too
        return
    # bfloat16 is off by up to 0.03 of a norm; a position without its label by 1
    wrong = np.linalg.norm(mine - right, axis=1) > 0.5 * np.linalg.norm(right, axis=1)
    if wrong.any():
        raise WrongAnswer(
            f"Of the {LONG.length:,} positions of a real sequence, {wrong.sum():,} get another"
            f" gradient than in the first step; the first is number {wrong.argmax()}, from 0."
            f" Do your pieces divide {LONG.length:,}?"
        )


@functools.cache
def start() -> tuple[Any, Any, np.ndarray]:
    """Returns parameters, a batch, and the gradient of the position embeddings."""
    params = model.init(LONG, jax.random.key(0))
    shape = LONG.batch_size, LONG.length + 1
    batch = jax.random.randint(jax.random.key(1), shape, 0, LONG.vocabulary)
    grads = jax.jit(jax.grad(model.loss))(params, batch)
    return params, batch, np.asarray(grads["positions"], np.float64)
