"""Writes the model of a run for other programs, as the Hugging Face Hub has it:

python -m course_lib.export RUN FOLDER
"""

import argparse
import sys
from collections.abc import Sequence

from course_lib import extras


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.export", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="the folder of a run")
    add(
        "folder",
        metavar="FOLDER",
        help="a new folder, for config.json, model.safetensors and the tokenizer",
    )
    asked = parser.parse_args(argv)

    from course_lib.program import command, hub, trained

    def text() -> str:
        run = trained.load(asked.run)
        name = hub.export(run, asked.folder)
        return f"{asked.folder}: a {name}, of {asked.run} after step {run.step}"

    return command.answered(text)


if __name__ == "__main__":
    sys.exit(extras.exit_code(main))
