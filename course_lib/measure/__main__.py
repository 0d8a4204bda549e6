"""`python -m course_lib.measure` measures a step of one's own: see `course_lib.own_step`."""

import sys

from course_lib import extras
from course_lib.own_step.command import main

if __name__ == "__main__":
    sys.exit(extras.exit_code(main))
