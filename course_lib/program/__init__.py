"""Part IV: the training program, `python -m course_lib.train`. `command` reads the arguments,
`loop` trains.
"""
