"""Pipeline parallelism, notebook 09: `schedules` are tables, `slots` says what is kept where,
`pipeline` executes them.
"""
