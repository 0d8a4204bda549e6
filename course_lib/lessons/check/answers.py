"""How a check answers: it runs the learner's code and prints one line.

    @exercise
    def double(your_double):
        yours = call(your_double, 3, hint="Multiply by two.")
        require(yours != 9, "This is the square.")
        require(yours == 6, f"double(3) gave {yours}.")
        return "six."

prints "✓ Right: six." or "✗ " and the sentence of the first requirement that is not met.
"""

import contextlib
import functools
import string
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Names(dict):
    """The attributes of an object, as names in an expression."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def __missing__(self, name: str) -> Any:
        try:
            return getattr(self.outcome, name)
        except AttributeError as error:
            raise KeyError(name) from error  # so that Python looks among its own functions


class Sentence(string.Formatter):
    """A text whose fields are expressions."""

    def get_field(self, field: str, args: Any, kwargs: Any) -> Any:
        return eval(field, {}, kwargs), field


class WrongAnswer(Exception):
    """Says in words what is wrong with an answer. `exercise` prints it."""


def exercise(check: Callable[..., str]) -> Callable[..., None]:
    """Makes a check that prints one line and never raises, so that a notebook with unfinished
    exercises still runs to its end. `check` returns the sentence after "Right:", or raises
    `WrongAnswer`.
    """

    @functools.wraps(check)
    def answer(*args: Any, **kwargs: Any) -> None:
        try:
            numbers = [_with_numbers(value) for value in args]
            named = {name: _with_numbers(value) for name, value in kwargs.items()}
            print(f"✓ Right: {check(*numbers, **named)}")
        except WrongAnswer as wrong:
            print(f"✗ {' '.join(str(wrong).split())}")
        except Exception as error:
            print(
                f"✗ The check could not read your answer: {in_one_line(error)}{_reason(error)}"
            )

    return answer


def _with_numbers(value: Any) -> Any:
    """Returns the value with numbers in place of arrays of no dimension."""
    # a dict stays as it is: JAX would sort its keys
    return jax.tree.map(_as_number, value, is_leaf=lambda leaf: isinstance(leaf, dict))


def _as_number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and np.shape(value) == () else value


def in_one_line(error: Exception) -> str:
    """Returns an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def require(condition: Any, message: str) -> None:
    if not condition:
        raise WrongAnswer(message)


def call(function: Any, *args: Any, hint: str) -> Any:
    """Calls the learner's function. One that returns nothing yet gets the hint."""
    result = run(function, *args)
    require(result is not None, f"Nothing returned yet. {hint}")
    return result


def own(args: Any) -> Any:
    """Returns a copy, since a learner's step may donate its arguments, which deletes them."""

    def copied(leaf: Any) -> Any:
        is_array = isinstance(leaf, jax.Array)
        # without a device: an array tied to one would compile each operation again
        return jax.device_put(leaf, may_alias=False) if is_array else leaf

    return jax.tree.map(copied, args)


def run(function: Any, *args: Any) -> Any:
    """Calls the learner's function, which may return None."""
    require(callable(function), f"Pass your function itself, not {function!r}.")
    try:
        return function(*args)
    except Exception as error:
        reason = _reason(error)
        raise WrongAnswer(f"Your function raised {in_one_line(error)}{reason}") from error


def _reason(error: Exception) -> str:
    """Says what JAX's first line does not: why an array is gone, or which types differ in a
    loop or a `cond`.
    """
    text = str(error)
    if "has been deleted" in text:
        return (
            " A step deletes the arrays that are donated to it: copy what you need before you"
            " call it, or take what it returns."
        )
    if "manual ax" not in text or "do not match" not in text:
        return ""
    if "branches must have equal output types" in text:  # of a `cond` or a `switch`
        return (
            " One branch returns a value that is equal on all devices along an axis; another"
            " returns one that differs."
        )
    return (
        " The loop's carry starts with a value that is equal on all devices, and a turn returns"
        " one that differs from device to device."
    )


def equations(jaxpr: Any) -> Iterator[Any]:
    """Lists the operations of a program (a jaxpr), and of the programs that they call."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in programs_in(eqn):
            yield from equations(inner)


def programs_in(eqn: Any) -> list[Any]:
    """Returns what a `jit`, a scan, `jax.checkpoint` or a kernel calls."""
    values = jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
    )
    programs = [getattr(value, "jaxpr", value) for value in values]
    return [program for program in programs if hasattr(program, "eqns")]


def predicted(*numbers: Any, hint: str) -> None:
    """Raises `WrongAnswer` unless each prediction is a number. A stub's `...` gets the hint."""
    missing = any(number is ... or number is None for number in numbers)
    require(not missing, f"No prediction yet. {hint}")
    for number in numbers:
        require(
            isinstance(number, Real | np.number)
            and not (isinstance(number, bool) or number != number),
            f"A prediction is a number, not {number!r}.",
        )


def same_structure(yours: Any, expected: Any, name: str) -> None:
    """Raises `WrongAnswer` unless two pytrees, named "the gradient" or so in the message, have
    the same structure and shapes.
    """
    # as texts, since JAX's types declare no comparison of structures
    structure, right = (str(jax.tree.structure(tree)) for tree in (yours, expected))
    require(structure == right, f"{name} should have the structure {right}, not {structure}.")
    for (path, leaf), like in _pairs(yours, expected):
        require(
            jnp.shape(leaf) == jnp.shape(like),
            f"{name}{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)};"
            f" {jnp.shape(like)} is expected.",
        )


def same_shapes(yours: Any, expected: Any, name: str) -> None:
    same_structure(yours, expected, name)
    same_dtypes(yours, expected, name)


def same_dtypes(yours: Any, expected: Any, name: str) -> None:
    for (path, leaf), like in _pairs(yours, expected):
        dtype, right = jnp.result_type(leaf), jnp.result_type(like)
        require(
            dtype == right or not hasattr(leaf, "dtype"),
            f"{name}{jax.tree_util.keystr(path)} is {dtype}; {right} is expected.",
        )


def in_form_of(expected: Any, yours: Any) -> Any:
    """Returns an answer in the form of the right one: a list is as good as a tuple or an array,
    and a number has no dtype. What has another structure stays as it is.
    """
    if isinstance(expected, dict):
        if isinstance(yours, Mapping) and set(yours) == set(expected):
            return {name: in_form_of(right, yours[name]) for name, right in expected.items()}
    elif isinstance(expected, list | tuple):
        is_sequence = isinstance(yours, list | tuple) or len(getattr(yours, "shape", ()))
        if is_sequence and len(yours) == len(expected):
            parts = list(map(in_form_of, expected, yours))
            return type(expected)(*parts) if _is_named(expected) else type(expected)(parts)
    elif isinstance(expected, bool | int | float | str):
        return _as_number(yours)
    elif hasattr(expected, "dtype") and np.ndim(expected) and _is_list(yours):
        with contextlib.suppress(TypeError, ValueError):
            has_dtype = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(yours))
            return jnp.asarray(yours, None if has_dtype else expected.dtype)
    return yours


def _is_named(value: Any) -> bool:
    return hasattr(value, "_fields")


def _is_list(value: Any) -> bool:
    is_tuple = isinstance(value, tuple) and all(np.shape(one) == () for one in value)
    return isinstance(value, list) or is_tuple


def _pairs(yours: Any, expected: Any) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(yours)
    return zip(leaves, jax.tree.leaves(expected), strict=True)


def close(yours: Any, expected: Any, tolerance: int | float = 1e-4) -> bool:
    """Returns whether each leaf is within this share of the expected leaf's norm, and infinite
    in the same places. Raises `WrongAnswer` if structures or shapes differ.
    """
    same_structure(yours, expected, "your result")
    for (_, leaf), like in _pairs(yours, expected):
        a, b = np.asarray(leaf, np.float64), np.asarray(like, np.float64)
        finite = np.isfinite(b)
        error = np.linalg.norm(a[finite] - b[finite])
        same = np.array_equal(a[~finite], b[~finite])
        if not (same and error <= tolerance * np.linalg.norm(b[finite]) + 1e-12):
            return False
    return True
