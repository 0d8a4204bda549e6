"""The library that the course teaches from: one module for each technique, plain functions, and
nothing hidden.

Import the module that you need, as in `from course_lib.one_device import
gradient_accumulation`. Importing this package does one thing: where JAX is older than 0.8.2, it
sets a flag of XLA without which CPUs multiply by numbers that are not there any more
(`course_lib.xla_flags.keep_products_right`). `docs/design.md` lists the folders, and which may
import which.
"""

from course_lib import xla_flags

__version__ = "0.1.0"

xla_flags.keep_products_right()
