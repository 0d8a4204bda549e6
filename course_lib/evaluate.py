"""Says how well a run predicts a text: python -m course_lib.evaluate RUN [DATA]"""

import argparse
import sys
from collections.abc import Sequence

from course_lib import extras


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.evaluate", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    add(
        "data",
        metavar="DATA",
        nargs="?",
        help="a file or a folder of text, whose validation split is used, a tenth of it"
        " (default: the run's text)",
    )
    asked = parser.parse_args(argv)

    from course_lib.program import command, trained

    def text() -> str:
        run = trained.load(asked.run)
        found = trained.evaluate(run, asked.data)
        return (
            f"{asked.run}, after step {run.step}: {found['nats']:.3f} nats per token,"
            f" perplexity {found['perplexity']:.2f}, {found['bits']:.3f} bits per byte, on"
            f" {found['tokens']:,} tokens of the validation split"
        )

    return command.answered(text)


if __name__ == "__main__":
    sys.exit(extras.exit_code(main))
