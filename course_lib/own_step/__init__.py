"""Measures a train step of one's own on devices that need not be there (docs/your_model.md).

`reading` makes a function of arrays alone of what `make_step()` returns, `costs` compiles and
measures it, `changes` are what it tries, and `command` is `python -m course_lib.measure`.
"""
