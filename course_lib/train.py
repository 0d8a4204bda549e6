"""`python -m course_lib.train` trains a language model: see `course_lib.program.command`."""

import signal
import sys

# A process in the background ignores Ctrl-C, and must go on ignoring it.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C ends the process at once, even during an import, until `preemption` handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from course_lib import extras


def main() -> int:
    """Runs the program and returns its exit code."""
    from course_lib.program import command

    return command.main()


if __name__ == "__main__":
    sys.exit(extras.exit_code(main))
