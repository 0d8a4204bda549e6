"""Pipeline parallelism, notebook 09: `schedules` are tables, `slots` says what is kept where,
`split` cuts a layer's gradient into F, B and W, `stage` runs them, `pipeline` executes a table.
"""
