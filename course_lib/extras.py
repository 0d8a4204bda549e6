"""The extras of the package, as in `pip install "course-lib[training]"`."""

import contextlib
import sys
from collections.abc import Callable, Iterator


class Missing(ModuleNotFoundError):
    """A package of an extra that is not installed."""


@contextlib.contextmanager
def needed(extra: str) -> Iterator[None]:
    """Names the extra of a package that cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "course_lib").partition(".")[0] == "course_lib":
            raise  # a module of our own that is not there, or the error of another extra
        raise Missing(
            f'{error.name} is not installed: pip install "course-lib[{extra}]"'
        ) from error


def exit_code(main: Callable[[], int]) -> int:
    """Runs a command. Without a package that it needs, says so in a sentence, and returns 2."""
    try:
        return main()
    except Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
