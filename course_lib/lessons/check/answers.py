"""How a check answers: it runs the learner's code and prints one line.

    @exercise
    def double(your_double):
        yours = call(your_double, 3, hint="Multiply by two.")
        require(yours != 9, "This is the square.")
        require(yours == 6, f"double(3) gave {yours}.")
        return "six."

prints "✓ Right: six." or "✗ " and the sentence of the first requirement that is not met.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class WrongAnswer(Exception):
    """Says in words what is wrong with an answer. `exercise` prints it."""


def exercise(check: Callable[..., str]) -> Callable[..., None]:
    """Makes a check that prints its answer and never raises.

    Args:
      check: takes the learner's answer, raises `WrongAnswer` if it is wrong, and returns the
      sentence that
        follows "Right:" if it is not.
    """

    @functools.wraps(check)
    def answer(*args: Any, **kwargs: Any) -> None:
        args = tuple(
            a.item() if isinstance(a, jax.Array | np.ndarray) and a.ndim == 0 else a
            for a in args
        )
        try:
            print(f"✓ Right: {check(*args, **kwargs)}")
        except WrongAnswer as wrong:
            print(f"✗ {' '.join(str(wrong).split())}")
        except (
            Exception
        ) as error:  # a notebook with an unfinished exercise still runs to its end
            first_line = (str(error).splitlines() or [""])[0]
            print(
                f"✗ The check could not read your answer: {type(error).__name__}: {first_line}"
            )

    return answer


def require(condition: Any, message: str) -> None:
    """Raises `WrongAnswer` with this message if the condition does not hold."""
    if not condition:
        raise WrongAnswer(message)


def call(function: Any, *args: Any, hint: str, **kwargs: Any) -> Any:
    """Calls the learner's function.

    Args:
      function: the learner's.
      *args: passed to it.
      hint: how to begin, for a function that returns nothing yet.
      **kwargs: passed to it.

    Returns:
      What it returns.

    Raises:
      WrongAnswer: if it is no function, raises an error, or returns None.
    """
    require(callable(function), f"Pass your function itself, not {function!r}.")
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise WrongAnswer(
            f"Your function raised {type(error).__name__}: {first_line}"
        ) from error
    require(result is not None, f"Nothing returned yet. {hint}")
    return result


def predicted(*numbers: Any, hint: str) -> None:
    """Raises `WrongAnswer` unless each prediction is a number; `...` stands for one not made
    yet.
    """
    require(
        not any(number is ... or number is None for number in numbers),
        f"No prediction yet. {hint}",
    )
    for number in numbers:
        require(
            isinstance(number, int | float | np.number) and not isinstance(number, bool),
            f"A prediction is a number, not {number!r}.",
        )


def same_shapes(yours: Any, expected: Any, what: str) -> None:
    """Raises `WrongAnswer` unless two trees have the same structure, shapes and dtypes.

    Args:
      yours: the learner's pytree.
      expected: a pytree of arrays or of their shapes.
      what: names the tree in the message: "the gradient".
    """
    # strings: JAX declares no comparison of structures
    structures = str(jax.tree.structure(yours)), str(jax.tree.structure(expected))
    require(
        structures[0] == structures[1],
        f"{what} should have the structure {structures[1]}, not {structures[0]}.",
    )
    for (path, leaf), right in zip(
        jax.tree_util.tree_leaves_with_path(yours), jax.tree.leaves(expected), strict=True
    ):
        name = f"{what}{jax.tree_util.keystr(path)}"
        require(
            jnp.shape(leaf) == right.shape,
            f"{name} has shape {jnp.shape(leaf)}; {right.shape} is expected.",
        )
        dtype = jnp.result_type(leaf)
        require(dtype == right.dtype, f"{name} is {dtype}; {right.dtype} is expected.")


def close(yours: Any, expected: Any, tolerance: int | float = 1e-4) -> bool:
    """Whether each leaf differs from the expected one by at most this share of its norm.

    Raises:
      WrongAnswer: if structures or shapes differ.
    """

    def leaf(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b) + 1e-12

    structures = str(jax.tree.structure(yours)), str(jax.tree.structure(expected))
    require(
        structures[0] == structures[1],
        f"Your result has the structure {structures[0]}; {structures[1]} is expected.",
    )
    for a, b in zip(jax.tree.leaves(yours), jax.tree.leaves(expected), strict=True):
        require(
            jnp.shape(a) == jnp.shape(b),
            f"An array has shape {jnp.shape(a)}; {jnp.shape(b)} is expected.",
        )
    return all(jax.tree.leaves(jax.tree.map(leaf, yours, expected)))
