"""The library that the course teaches from: one module for each technique, plain functions, and nothing hidden.

Importing this package does nothing; import the module that you need, as in `from course_lib import accumulation`.
`docs/design.md` lists the modules, and which may import which.
"""

__version__ = "0.1.0"
