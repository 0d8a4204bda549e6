"""One model of a training step: a list of events, what each device computes, and what it holds.

    step = planner.step(config, axes, strategy)    # of this course's program
    step = planner.step(shape, plan)               # or of any other, by its sizes
    planner.sent(step)                             # {"data": bytes, ...} per step per device
    planner.held(step)                             # {"parameters": bytes, ...} of one device
    planner.seconds(step, cluster)                 # Breakdown: parts, hidden, total, mfu
    planner.ranked(planner.Course(config), cluster)             # those that fit, fastest first
    planner.ranked(planner.Frameworks(shape, batch), cluster)

No device is needed. `events` lists what travels: (kind, axes, bytes, times, beside). Bytes are
the sum of that list, seconds their price on a cluster (`price`), and memory is what is kept of
parameters and activations (`memory`). `estimate` has bytes and seconds side by side.
"""
# ruff: noqa: F401  (the interface)

from collections.abc import Mapping

from ml_collections import ConfigDict

from course_lib.many_devices.cluster_model import Cluster, check_type
from course_lib.many_devices.options import Strategy
from course_lib.planner import course, events, memory, price
from course_lib.planner.course import Estimate, estimate, plan_of, shape_of
from course_lib.planner.events import sent
from course_lib.planner.plan import Plan, Shape, Step, check
from course_lib.planner.price import Breakdown
from course_lib.planner.search import KINDS, Course, Frameworks, Layout, best, layout, ranked


def step(
    model: ConfigDict | Shape,
    how: Mapping[str, int] | Plan,
    strategy: Strategy | None = None,
) -> Step:
    """Returns a training step, for `sent`, `held` and `seconds`.

    Args:
      model: a configuration of this course, or the sizes of any Transformer.
      how: with a configuration the sizes of the mesh's axes, outer to inner; with sizes a plan.
      strategy: with a configuration: how the axes are used.

    Raises:
      TypeError: if an argument is of another type, such as two that changed places.
      ValueError: if the strategy is refused, or no formula counts an option; or if the devices
        of a plan cannot share the model.
    """
    if isinstance(model, ConfigDict):
        check_type("axes", how, Mapping, 'a mapping of sizes by name: {"data": 64}')
        return course.step_of(model, how, strategy or Strategy())  # type: ignore[arg-type]
    check_type("shape", model, Shape, "a Shape: the sizes of the model")
    check_type("plan", how, Plan, "a Plan: how the model is trained")
    check(model, how)  # type: ignore[arg-type]
    return Step(model, how)  # type: ignore[arg-type]


def held(step: Step) -> Mapping[str, int | float]:
    """Returns the bytes that one device holds, by use. A configuration of this course has exact
    numbers for "parameters", "optimizer" and "batch", and estimates of the rest, within a fifth
    of compiled steps; a plan has a rough formula (`memory.of_framework`).
    """
    return course.held(step) if step.program else memory.of_framework(step)


def seconds(step: Step, cluster: Cluster) -> Breakdown:
    """Returns the time of a step on a cluster.

    Raises:
      TypeError: if an argument is of another type.
      ValueError: if the axes do not fit the cluster, there is no figure for a link, or the
        accelerator has no unit for `plan.dtype`.
    """
    check_type("step", step, Step, "a Step: planner.step(shape, plan)")
    check_type("cluster", cluster, Cluster, "a Cluster: Cluster(hardware.get('h100'), 64)")
    return price.seconds(step.shape, step.plan, cluster)
