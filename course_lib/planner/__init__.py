"""One model of a training step: a list of events, what each device computes, and what it holds.

    step = planner.step(config, axes, strategy)    # of this course's program
    step = planner.step(shape, plan)               # or of any other, by its sizes
    planner.sent(step)                             # {"data": bytes, ...} per step per device
    planner.held(step)                             # {"parameters": bytes, ...} of one device
    planner.seconds(step, cluster)                 # Breakdown: parts, hidden, total, mfu
    planner.ranked(planner.Course(config), cluster)             # those that fit, fastest first
    planner.ranked(planner.Frameworks(shape, batch), cluster)

No device is needed. `events` lists what travels: (kind, axes, bytes, times, beside). Bytes are
the sum of that list. Seconds are the price of that list on a cluster (`price`), without norms,
biases and the few numbers per label that a loss sends. Memory is what is kept of parameters and
activations (`memory`). `estimate` has bytes and seconds side by side.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import ConfigDict

if TYPE_CHECKING:
    from course_lib.many_devices.cluster_model import Cluster
    from course_lib.many_devices.options import Strategy
    from course_lib.planner.plan import Plan, Shape, Step
    from course_lib.planner.price import Breakdown

_MODULES = {
    "course": "Estimate estimate plan_of shape_of",
    "events": "sent",
    "memory": "",
    "plan": "Plan Shape Step check",
    "price": "Breakdown",
    "search": "KINDS LAYOUT_ERROR Course Frameworks Layout best layout ranked tied",
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Loads what is asked for."""
    if name not in _MODULES and name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE.get(name, name)}")
    return getattr(module, name) if name in _WHERE else module


def __dir__() -> list[str]:
    return sorted({*_MODULES, *_WHERE, "held", "seconds", "step"})


def step(
    model: "ConfigDict | Shape",
    how: "Mapping[str, int] | Plan",
    strategy: "Strategy | None" = None,
) -> "Step":
    """Returns a training step, for `sent`, `held` and `seconds`: of a configuration of this
    course, the sizes of the mesh's axes, outer to inner, and a strategy; or of a `Shape` and a
    `Plan`.
    """
    if isinstance(model, ConfigDict):
        from course_lib.many_devices.options import Strategy
        from course_lib.planner import course

        return course.step_of(model, how, strategy or Strategy())  # type: ignore[arg-type]
    from course_lib.planner import plan

    if strategy is not None:
        raise TypeError("strategy belongs to a configuration; a plan has fields of its own")
    plan.check(model, how)  # type: ignore[arg-type]
    return plan.Step(model, how)  # type: ignore[arg-type]


def held(step: "Step") -> Mapping[str, int | float]:
    """Returns the bytes that one device holds, by use. A configuration of this course has exact
    numbers for "parameters", "optimizer" and "batch", and estimates of the rest, within a fifth
    of compiled steps; a plan has a rough formula (`memory.of_framework`).
    """
    from course_lib.planner import course, memory

    return course.held(step) if step.program else memory.of_framework(step)


def seconds(step: "Step", cluster: "Cluster") -> "Breakdown":
    """Returns the time of a step on a cluster."""
    from course_lib.planner import price

    return price.seconds(step.shape, step.plan, cluster)
