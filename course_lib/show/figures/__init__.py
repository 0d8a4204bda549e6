"""Every picture of the course: one function a picture, plain data in, a matplotlib `Figure`
out.
"""

from course_lib.show.figures.bars import (
    largest_arrays,
    memory_bars,
    memory_breakdown,
    residuals,
    roofline,
)
from course_lib.show.figures.blocks import block
from course_lib.show.figures.clusters import hosts
from course_lib.show.figures.curves import (
    lines,
    loss_curve,
    progress,
    roofline_plot,
    trace,
    tradeoff,
)
from course_lib.show.figures.devices import seconds_by_devices, who_holds_what
from course_lib.show.figures.explorer import explorer
from course_lib.show.figures.lanes import (
    Lane,
    lanes,
    lanes_of_layers,
    lanes_of_schedule,
    lanes_of_step,
)
from course_lib.show.figures.moving import moving
from course_lib.show.figures.numbers import formats, gradient_histogram
from course_lib.show.figures.overlap import overlap
from course_lib.show.figures.positions import attention_pairs, token_routing
from course_lib.show.figures.rungs import rungs
from course_lib.show.figures.schedules import schedule
from course_lib.show.figures.style import PHASES as PHASES
from course_lib.show.figures.style import use_style
from course_lib.show.figures.tapes import tape
from course_lib.show.figures.timelines import heap_timeline, step_timeline

__all__ = [
    "Lane",
    "attention_pairs",
    "block",
    "explorer",
    "formats",
    "gradient_histogram",
    "heap_timeline",
    "hosts",
    "lanes",
    "lanes_of_layers",
    "lanes_of_schedule",
    "lanes_of_step",
    "largest_arrays",
    "lines",
    "loss_curve",
    "memory_bars",
    "memory_breakdown",
    "moving",
    "overlap",
    "progress",
    "residuals",
    "roofline",
    "roofline_plot",
    "rungs",
    "schedule",
    "seconds_by_devices",
    "step_timeline",
    "tape",
    "token_routing",
    "trace",
    "tradeoff",
    "use_style",
    "who_holds_what",
]
