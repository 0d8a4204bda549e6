"""Pipeline parallelism, notebook 09: `schedules` are tables, `slots` says what is kept where,
`split` cuts a layer's gradient into F, B and W, `stage` runs them, `pipeline` executes a table.
"""

# The function of `schedules` that makes each: an option names one without loading them.
SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "breadth_first": "breadth_first",
    "depth_first": "depth_first",
    "zero_bubble": "zero_bubble",
    "zb_v": "zb_v",
    "dualpipe_v": "dualpipe_v",
}

V_SHAPED = ("zb_v", "dualpipe_v")
"""The schedules whose second chunks lie on the devices in the opposite order."""
