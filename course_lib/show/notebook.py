"""Sets notebooks up, shows source code, and prints tables."""

import dataclasses
import inspect
import numbers
import os
import textwrap
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from course_lib import extras
from course_lib.measure.environment import keep_memory as keep_memory

with extras.needed("pictures"):
    from IPython.display import Markdown, display

OLDEST_JAX = "0.7.2"
LINE = 96  # characters that fit into a cell of JupyterLab


def setup() -> None:
    """Checks the environment, sets the style of pictures, and prints versions and devices."""
    # XLA would also log its exceptions. It reads this when JAX is loaded.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # JAX would reserve three quarters of a GPU's memory, and some cells measure in a process
    # of their own.
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
    packages = ("jax", "flax", "optax")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    why_not = virtual.why_unavailable()
    gpus = f"no. {why_not}" if why_not else "yes"
    print(f"{versions} on {jax.devices()[0].device_kind}; virtual GPUs: {gpus}")


def source(*objects: Any) -> None:
    """Shows the source of functions, classes or modules."""
    display(Markdown("\n\n".join(map(_fenced_source, objects))))


def _fenced_source(obj: Any) -> str:
    """Returns the source as a block of Markdown, under its file's name."""
    unwrapped = inspect.unwrap(obj)  # the function inside jax.jit and the like
    try:
        code, file = inspect.getsource(unwrapped), Path(inspect.getfile(unwrapped))
    except (TypeError, OSError):
        raise ValueError(
            f"{obj!r} has no source in Python: pass a function, class or module"
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
    """
    if len(rows) == 0:
        raise ValueError("rows is empty: there is nothing to print")
    dicts, formats = [_as_dict(row) for row in rows], formats or {}
    names = list(dicts[0] if columns is None else columns)
    for number, row in enumerate(dicts):
        if not (row.keys() >= set(names) if columns else row.keys() == set(names)):
            raise ValueError(
                f"rows[{number}] must have the columns {names}, not {list(row)}; name the"
                " columns to print with columns=[...]"
            )
    if unknown := set(formats) - set(names):
        raise ValueError(f"formats={unknown} must name columns that are printed: {names}")

    cells = [[_cell(row[name], formats.get(name)) for name in names] for row in dicts]
    values = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for lines in range(1, 6):
        widths = [max(_width(name, lines), n) for name, n in zip(names, values, strict=True)]
        if sum(widths) + 2 * (len(names) - 1) <= LINE:
            break
    wrapped = [textwrap.wrap(name, width) for name, width in zip(names, widths, strict=True)]
    height = max(map(len, wrapped))
    headings = zip(*([""] * (height - len(one)) + one for one in wrapped), strict=True)
    right = [any(_is_number(row[name]) for row in dicts) for name in names]

    def line(texts: Sequence[str]) -> str:
        columns = zip(texts, widths, right, strict=True)
        return "  ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in columns).rstrip()

    rule = ["-" * width for width in widths]
    print(*[title] if title else [], *map(line, [*headings, rule, *cells]), sep="\n")


def _width(name: str, lines: int) -> int:
    """Returns the smallest width at which a name, broken at spaces, takes at most `lines`."""
    widths = range(max(map(len, name.split()), default=1), len(name))
    return next((w for w in widths if len(textwrap.wrap(name, w)) <= lines), len(name))


def _as_dict(row: Any) -> dict[str, Any]:
    """Returns a row's columns by name, scalars of NumPy and JAX as numbers of Python."""
    if dataclasses.is_dataclass(row) and not isinstance(row, type):
        row = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    if not isinstance(row, Mapping):
        raise ValueError(f"rows: {row!r} must be a dict or a dataclass with a name per column")
    return {
        name: v.item() if hasattr(v, "item") and np.ndim(v) == 0 else v
        for name, v in row.items()
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) and not isinstance(value, bool)


def _cell(value: Any, spec: str | None) -> str:
    if value is None:
        return "-"
    if spec is None and _is_number(value):
        spec = "," if isinstance(value, int) else ".4g"
    return format(value, spec) if spec else str(value)
