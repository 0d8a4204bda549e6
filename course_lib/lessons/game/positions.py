"""Checks a step at the real length, where pieces of a sequence or of the vocabulary that divide
the small sizes may cut off a tail, and where small gradients leave float16.
"""

import functools
from typing import Any

import jax
import numpy as np

from course_lib.lessons.check.answers import WrongAnswer
from course_lib.lessons.game import model, updates
from course_lib.lessons.game.setups import FIRST, Setup

VOCABULARY = 1153  # a prime above 1024: pieces of any smaller size leave a tail
LONG = model.Config(
    1, 16, 1, VOCABULARY, model.REAL.length, model.REAL.batch_size, updates.SMALL.optimizer
)

# The largest accepted error of a row's gradient, as a share of its norm. Measured: bfloat16
# 0.026 of a position's and 0.16 of a column's; a window of 768 positions 0.20 of a position's,
# float16 without a loss scale 0.61; a column that is left out 1 or more.
LIMITS = {"positions of a real sequence": 0.1, "columns of the output matrix": 0.5}
OF_THE_LOSS = 0.001  # bfloat16 5e-5; the loss of the last of four minibatches 0.0075


def check(make_step: Any, setup: Setup = FIRST) -> None:
    """Raises WrongAnswer unless each position's embedding and each column of the output matrix
    get the first step's gradient, and the loss is the mean over all labels.
    """
    params, batch, right_loss, right = start()
    state = updates.copy_of(LONG, (params, LONG.optimizer.init(params)), setup)
    try:
        (_, (momentum, _)), loss = make_step(LONG)(state, batch)
        loss, mine = float(loss), rows(momentum.trace)
    except Exception:  # the real step will raise it, too
        return
    for name, limit in LIMITS.items():
        off = np.linalg.norm(mine[name] - right[name], axis=1)
        wrong = ~(off <= limit * np.linalg.norm(right[name], axis=1))
        if wrong.any():
            raise WrongAnswer(
                f"Of the {len(wrong):,} {name}, {wrong.sum():,} get another gradient than in"
                f" the first step; the first is number {wrong.argmax()}, from 0. If you compute"
                f" in pieces: do they divide {len(wrong):,}, or keep the rest, and does a query"
                " see all earlier keys? If in float16: is there a loss scale?"
            )
    if not abs(loss - right_loss) <= OF_THE_LOSS * right_loss:
        raise WrongAnswer(
            f"With sequences of {LONG.length:,} tokens, the step returns the loss {loss:.4g}."
            f" The mean over all labels is {right_loss:.4g}. Do all minibatches count in it?"
        )


def rows(grads: Any) -> dict[str, np.ndarray]:
    """Returns the gradients of single positions and of single columns, as rows."""
    pair = grads["positions"], grads["output"].T
    return {name: np.asarray(one, np.float64) for name, one in zip(LIMITS, pair, strict=True)}


@functools.cache
def start() -> tuple[Any, Any, float, dict[str, np.ndarray]]:
    """Returns parameters, a batch, its loss, and the gradients of `rows`."""
    params = model.init(LONG, jax.random.key(0))
    shape = LONG.batch_size, LONG.length + 1
    batch = jax.random.randint(jax.random.key(1), shape, 0, LONG.vocabulary)
    few = batch[:4] % 4  # four tokens only: another loss than that of the last minibatch
    batch = batch.at[:4].set(few)
    loss, grads = jax.jit(jax.value_and_grad(model.loss))(params, batch)
    return params, batch, float(loss), rows(grads)
