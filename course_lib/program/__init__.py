"""Part IV: the training program, `python -m course_lib.train`. `command` reads the arguments,
`loop` trains.
"""

from course_lib import extras

with extras.needed("training"):
    import tokenizers  # noqa: F401
