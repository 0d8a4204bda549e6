"""Sets notebooks up, shows source code, and prints tables."""

import ctypes
import dataclasses
import inspect
import numbers
import os
import platform
import textwrap
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from IPython.display import Markdown, display

OLDEST_JAX = "0.7.2"
LINE = 96  # characters that fit into a cell of JupyterLab


def setup() -> None:
    """Checks the environment, sets the style of pictures, and prints versions and devices.

    On a GPU, JAX then allocates memory as needed, instead of most of it at the start.

    Raises:
      RuntimeError: if JAX is older than the course needs.
    """
    # XLA would also log its exceptions. It reads this when JAX is loaded.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # JAX would reserve three quarters of a GPU's memory, which cells that measure in a process
    # of their own need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.__version_info__ < tuple(map(int, OLDEST_JAX.split("."))):
        raise RuntimeError(
            f"jax {jax.__version__} is too old: the course needs {OLDEST_JAX} or newer. "
            f"Run `pip install 'jax>={OLDEST_JAX}'`, then restart the kernel."
        )
    # Imported before the first device is asked for: virtual keeps JAX's start quiet.
    from course_lib.measure import virtual
    from course_lib.show import figures

    figures.use_style()
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("jax", "flax", "optax")
    )
    why_not = virtual.why_unavailable()
    print(
        f"{versions} on {jax.devices()[0].device_kind}; virtual GPUs:"
        f" {f'no. {why_not}' if why_not else 'yes'}"
    )


def keep_memory() -> None:
    """Keeps the memory that JAX frees on a CPU, so that the next step uses it again.

    By default glibc returns large arrays to Linux, and asks for new pages in each step: a third
    of the processor time of a small model's step. This is what the variables
    `MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_ARENA_MAX=1` do for a process that they
    start. Without glibc it does nothing.
    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in (
        (-4, 0),  # M_MMAP_MAX: no array gets pages of its own
        (-1, -1),  # M_TRIM_THRESHOLD: nothing is returned
        (-8, 1),  # M_ARENA_MAX: all threads share what is free
    ):
        mallopt(parameter, value)


def source(*objects: Any) -> None:
    """Shows the source of functions, classes or modules.

    Raises:
      ValueError: if an object has no Python source, before any is shown.
    """
    display(Markdown("\n\n".join(map(_fenced_source, objects))))


def _fenced_source(obj: Any) -> str:
    """Returns the source as a block of Markdown, under its file's name."""
    unwrapped = inspect.unwrap(obj)  # the function inside jax.jit and the like
    try:
        code, file = inspect.getsource(unwrapped), Path(inspect.getfile(unwrapped))
    except (TypeError, OSError):
        raise ValueError(
            f"objects: {obj!r} must be a function, class or module: it has no Python source;"
            " its type may have"
        ) from None
    root = Path(__file__).parents[2]
    name = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
    return f"`{name}`\n```python\n{textwrap.dedent(code).rstrip()}\n```"


def table(
    rows: Sequence[Any],
    columns: Sequence[str] | None = None,
    title: str | None = None,
    formats: Mapping[str, str] | None = None,
) -> None:
    """Prints rows as an aligned table of plain text.

    Whole numbers get thousands separators, other numbers four significant digits, `None` a
    dash; numbers are aligned to the right. The names of a table wider than a cell are broken at
    spaces, into no more lines than they need.

    Args:
      rows: dicts or dataclasses.
      columns: the names to print, in this order; all of the first row if None.
      title: a line above the table.
      formats: a format of its own for a column, as in `{"loss": ".2f"}`.

    Raises:
      ValueError: if there are no rows, or one lacks a column, or (with `columns=None`) has one
        that the first lacks.
    """
    if len(rows) == 0:
        raise ValueError("rows=[] must hold at least one row: there is nothing to print")
    dicts = [_as_dict(row) for row in rows]
    names = list(dicts[0] if columns is None else columns)
    for number, row in enumerate(dicts):
        missing = [name for name in names if name not in row]
        surplus = [name for name in row if name not in names] if columns is None else []
        if missing or surplus:
            raise ValueError(
                f"rows[{number}] must have the columns {names}: it lacks {missing}, adds"
                f" {surplus}; name the columns to print with columns=[...]"
            )
    formats = formats or {}
    unknown = [name for name in formats if name not in names]
    if unknown:
        raise ValueError(
            f"formats={unknown!r} must name columns that are printed: they are {names}"
        )

    cells = [[_cell(row[name], formats.get(name)) for name in names] for row in dicts]
    values = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for lines in range(1, 6):
        wide = [_width(name, lines) for name in names]
        widths = [max(pair) for pair in zip(wide, values, strict=True)]
        if sum(widths) + 2 * (len(names) - 1) <= LINE:
            break
    headings = [
        [name] if len(name) <= width else textwrap.wrap(name, width)
        for name, width in zip(names, widths, strict=True)
    ]
    right = [any(_is_number(row[name]) for row in dicts) for name in names]

    def line(texts: Sequence[str]) -> str:
        aligned = [
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(texts, widths, right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    if title:
        print(title)
    height = max(map(len, headings))
    above = zip(
        *([""] * (height - len(heading)) + heading for heading in headings), strict=True
    )
    rule = ["-" * width for width in widths]
    print("\n".join(map(line, [*above, rule, *cells])))


def _width(name: str, lines: int) -> int:
    """Returns the smallest width at which a name, broken at spaces, takes at most `lines`."""
    longest = max(map(len, name.split()), default=0)
    narrower = range(longest, len(name)) if lines > 1 else ()
    fitting = (width for width in narrower if len(textwrap.wrap(name, width)) <= lines)
    return next(fitting, len(name))


def _as_dict(row: Any) -> dict[str, Any]:
    """Returns a row's columns by name, scalars of NumPy and JAX as numbers of Python."""
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        columns = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    elif isinstance(row, Mapping):
        columns = dict(row)
    else:
        raise ValueError(
            f"rows: {row!r} must be a dict or a dataclass: its columns have no names"
        )
    return {
        name: v.item() if hasattr(v, "item") and np.ndim(v) == 0 else v
        for name, v in columns.items()
    }


def _is_number(value: Any) -> bool:
    """Says whether a value is a number; `True` is not."""
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def _cell(value: Any, spec: str | None) -> str:
    """Returns a value as text."""
    if value is None:
        return "-"
    if spec is None and _is_number(value):
        spec = "," if isinstance(value, int) else ".4g"
    return format(value, spec) if spec else str(value)
