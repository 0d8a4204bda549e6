"""Errors for arguments: each names the argument, its value, and a value that works."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax


def refuse(errors: Iterable[str]) -> None:
    """Raises the first error of a generator of rules; the rules after it are not evaluated."""
    if (error := next(iter(errors), None)) is not None:
        raise ValueError(error)


def one_of(name: str, value: Any, known: Collection[Any]) -> None:
    """Refuses a value that is not in a table."""
    if value not in known:
        raise ValueError(f"{name}={value!r} must be one of {list(known)}")


def functions(**named: Any) -> None:
    """Refuses arguments that are no functions."""
    for name, value in named.items():
        if not callable(value):
            raise ValueError(f"{name}={value!r} must be a function")


def optimizer(value: Any) -> None:
    """Refuses what is no optimizer, such as its name."""
    if not all(callable(getattr(value, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"optimizer={value!r} must have init and update, as optax.sgd(1.0) has"
        )


def name_in_tree(path: Any) -> str:
    """Returns an array's name by its path, as "up/kernel"; without Flax NNX's "/value"."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")


def nearest(size: int, count: int) -> str:
    """Returns the multiples of a count around a size, as in "6 or 8"."""
    below = size - size % count
    return f"{below} or " * (below > 0) + f"{below + count}"


def shared(name: str, size: int, count: int, devices: str) -> Iterator[str]:
    """Yields an error if `count` devices, as "devices along 'data'", cannot share a size."""
    if size % count:
        yield (
            f"{name}={size} must be a multiple of the {count} {devices}; take"
            f" {nearest(size, count)}"
        )
