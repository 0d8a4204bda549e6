"""Continues a text with the model of a run:

python -m course_lib.sample RUN "Once upon a time"
"""

import argparse
import sys
from collections.abc import Sequence

from course_lib import extras


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.sample", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    add("prompt", nargs="?", default="", help="the text to continue (default: none)")
    add("--tokens", type=int, default=200, help="at most so many new tokens (default: 200)")
    add("--temperature", type=float, default=1.0, help="below 1: likelier tokens (default: 1)")
    add("--seed", type=int, default=0, help="another one draws another text (default: 0)")
    asked = parser.parse_args(argv)

    from course_lib.program import command, trained

    def text() -> str:
        options = dict(length=asked.tokens, temperature=asked.temperature, seed=asked.seed)
        return trained.sample(trained.load(asked.run), asked.prompt, **options)

    return command.answered(text)


if __name__ == "__main__":
    sys.exit(extras.exit_code(main))
