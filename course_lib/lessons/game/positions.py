"""Checks a step at the real length, and with more tokens in the vocabulary than most pieces of
it have: pieces that divide the small sizes may cut off a tail here.
"""

import functools
import secrets
from typing import Any

import jax
import numpy as np

from course_lib.lessons.check.answers import equations, programs_in, require
from course_lib.lessons.game import model, small, updates
from course_lib.lessons.game.setups import FIRST, Setup

LONG = model.Config(
    1, 24, 3, 1_153, model.REAL.length, model.REAL.batch_size, small.SMALL.optimizer
)
"""No matrix has the shape of another array of a step, and the vocabulary is a prime number."""

FACTORS = {"tokens": 0.03, "positions": 0.03, "output": 0.001}
"""Factors on `model.init`'s arrays. With small embeddings most of a gradient comes through
attention, from other positions. With a small output matrix gradients vanish in float16 without
a loss scale, as in the real step, whose vocabulary is larger.
"""

TOLERANCES = {
    "columns of the output matrix": 0.9,
    "positions of a real sequence": 0.25,
    "tokens of the vocabulary": 0.25,
}
"""The largest accepted difference of one row's gradient, as a share of its norm.

Measured on a CPU, the largest of all. Right: float32 0.0003; positions and tokens 0.07 in 16
bits; columns 0.61 (0.03 if summed in float32). Wrong: a window of 768 positions 0.6; a row
without its label, and most rows in float16 without a loss scale, 1 and more.
"""

MOST_TERMS = 64
"""The longest sum in 16 bits that passes. Rounded each time, n random numbers add up in
bfloat16 with an error of 0.0012 sqrt(n) of their sum (measured): 0.005 for 16, 0.010 for 64,
less than all of a right step in bfloat16; 0.026 for the 512 pieces of 32 tokens of a real
batch.
"""


def check(make_step: Any, setup: Setup = FIRST) -> None:
    """Raises WrongAnswer unless each position, each token of the vocabulary and each column of
    the output matrix gets the first step's gradient, without long sums in 16 bits.
    """
    try:
        yours, traced = gradient(make_step, setup)
    except Exception:  # the real step will raise it, too
        return
    check_rows(yours, updates.dtype_of_products(traced))
    check_sums(traced.jaxpr.jaxpr, start()[0])


def gradient(make_step: Any, setup: Setup = FIRST) -> tuple[dict[str, np.ndarray], Any]:
    """Returns a step's gradient by the rows of `TOLERANCES`, and its program."""
    params, batch, _ = start()
    state = updates.copy_of(LONG, (params, LONG.optimizer.init(params)), setup)
    step = make_step(LONG)
    traced = updates.trace(step, state, batch)
    with jax.default_matmul_precision("highest"):
        (_, (momentum, _)), _ = step(state, batch)
    return _rows(momentum.trace), traced


def check_rows(yours: dict[str, np.ndarray], dtype: str) -> None:
    """Raises WrongAnswer unless each row of a gradient is right. `dtype` is of the products."""
    question = (
        f"Do your pieces divide {LONG.length:,} positions and {LONG.vocabulary:,} tokens of the"
        " vocabulary, or does a tile see other keys?"
    )
    if dtype == "float16":
        question = "In float16, small gradients vanish without a loss scale (notebook 1)."
    for name, right in start()[2].items():
        off, size = (np.linalg.norm(a, axis=1) for a in (yours[name] - right, right))
        wrong = ~(off <= TOLERANCES[name] * size)
        require(
            not wrong.any(),
            f"{wrong.sum():,} of the {len(right):,} {name} get another gradient than in the"
            f" first step; the first is number {wrong.argmax()}, from 0. {question}",
        )


def check_sums(program: Any, params: Any) -> None:
    """Raises WrongAnswer if a loop of a program (a jaxpr) adds up more than `MOST_TERMS` arrays
    of a matrix's shape in 16 bits. Such a sum, by hand or by `jax.grad`, is a scan's carry.
    """
    stacks = [leaf.shape for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2]
    shapes = {params["tokens"].shape, params["output"].shape, *stacks, *(s[1:] for s in stacks)}
    for scan in equations(program):
        if scan.primitive.name != "scan" or scan.params["length"] <= MOST_TERMS:
            continue
        [body] = programs_in(scan)
        added = {
            eqn.outvars[0].aval.shape for eqn in equations(body) if "add" in str(eqn.primitive)
        }
        for carry, result in zip(scan.outvars, body.outvars, strict=True):
            is_carry = carry.aval.shape == result.aval.shape and result not in body.invars
            require(
                not (is_carry and carry.aval.shape in shapes & added)
                or carry.aval.dtype.itemsize > 2,
                f"The gradient of a matrix is a sum of {scan.params['length']:,} terms in"
                f" {carry.aval.dtype}, rounded each time. Add up more than {MOST_TERMS} terms"
                " in float32.",
            )


@functools.cache
def start() -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Returns parameters, a batch, and the right gradient by rows. Drawn once per process."""
    numbers, tokens = jax.random.split(jax.random.key(secrets.randbits(31)))
    params = model.init(LONG, numbers)
    params |= {name: factor * params[name] for name, factor in FACTORS.items()}
    shape = LONG.batch_size, LONG.length + 1
    batch = jax.random.randint(tokens, shape, 0, LONG.vocabulary)
    return params, batch, _rows(jax.jit(jax.grad(model.loss))(params, batch))


def _rows(tree: Any) -> dict[str, np.ndarray]:
    arrays = tree["output"].T, tree["positions"], tree["tokens"]
    return {n: np.asarray(a, np.float64) for n, a in zip(TOLERANCES, arrays, strict=True)}
