"""The training program, interrupted at a chosen step:

    python -m course_lib.lessons.interrupted 100 SIGKILL --preset cpu --run runs/first

The process sends itself the signal. From another process, the signal might come after the end
of a short run.
"""

import os
import signal
import sys
from typing import Any
from unittest import mock

from course_lib.program import command, journal


def main(words: list[str]) -> int:
    """Runs the program, and sends its own process a signal once its metrics tell of a step.

    Args:
      words: the step, the name of the signal, then the words of the program's command line.

    Returns:
      The exit code of the program, if the signal lets it return.

    Raises:
      KeyError: if there is no signal of this name.
    """
    last, called, *program = words
    number = signal.Signals[called]

    class Journal(journal.Journal):
        def write(self, step: int, name: str = "metrics", **values: Any) -> None:
            super().write(step, name, **values)
            if name == "metrics" and step == int(last):
                os.kill(os.getpid(), number)

    with mock.patch.object(journal, "Journal", Journal):
        return command.main(program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
