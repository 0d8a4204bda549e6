"""`python -m course_lib.train` trains a language model: see `course_lib.program.command`."""

import signal
import sys

# A process in the background ignores Ctrl-C, and must go on ignoring it.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C ends the process at once, even during an import, until `preemption` handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from course_lib.program.command import main

if __name__ == "__main__":
    sys.exit(main())
