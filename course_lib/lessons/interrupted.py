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


def main(argv: list[str]) -> int:
    """Runs the program, and sends the signal when it writes the metrics of the step; returns
    its exit code, if the signal lets it return. `argv`: the step, the name of the signal, then
    the program's command line.
    """
    chosen, name_of_signal, *program = argv
    number = signal.Signals[name_of_signal]

    class Journal(journal.Journal):
        def write(self, step: int, name: str = "metrics", **values: Any) -> None:
            super().write(step, name, **values)
            if name == "metrics" and step == int(chosen):
                os.kill(os.getpid(), number)

    with mock.patch.object(journal, "Journal", Journal):
        return command.main(program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
