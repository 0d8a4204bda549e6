"""The extras of the package, as in `pip install "course-lib[training]"`."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Names the extra of a package that cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "course_lib").partition(".")[0] == "course_lib":
            raise  # a module of our own that is not there, or the error of another extra
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "course-lib[{extra}]"'
        ) from error
