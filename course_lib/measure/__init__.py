"""The cost of a step: memory, FLOPs, bytes moved, time.

These read the compiled program; the device need not be there. `python -m course_lib.measure`
calls them for a step of your own (docs/your_model.md).

    lowered = step.lower(state, batch)
    memory(lowered)        its peak memory, and the parts of it
    tape(lowered)          the memory at each instruction, by kind
    heap(lowered)          the arrays alive at the peak
    traffic(lowered)       the bytes that it moves through device memory
    host_traffic(lowered)  the bytes that it moves between host and device
    ledger(lowered, mesh)  the bytes that the devices send each other
    compiler(lowered)      what the compiler changed: work done again, products, overlap
    roofline(...)          the least time that FLOPs and bytes allow

It is compiled once for all of them; on a CPU without YNNPACK, a library that hides memory. All
but tape and heap also take a compiled step. One that hides much memory is refused.

`flops(step, state, batch)` counts before anything is compiled. `step_time`, `compare`, `mfu`
and `peak_in_own_process` measure a step that runs.
"""

# ruff: noqa: F401

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from course_lib.measure import environment

environment.prepare()

if TYPE_CHECKING:
    from course_lib.measure import hlo as hlo
    from course_lib.measure.compiler import Compiler, compiler
    from course_lib.measure.flops import Flops, flops
    from course_lib.measure.heap import Heap, LiveArray, heap
    from course_lib.measure.ledger import Collective, Ledger, ledger, schedule_around
    from course_lib.measure.memory import Memory, memory, planned
    from course_lib.measure.roofline import Roofline, attainable_seconds, mfu, roofline
    from course_lib.measure.tape import Tape, tape
    from course_lib.measure.timing import (
        StepTime,
        Time,
        compare,
        peak_in_own_process,
        step_time,
        time,
    )
    from course_lib.measure.traffic import HostTraffic, Move, Traffic, host_traffic, traffic
    from course_lib.measure.units import GIB, MIB, gib

_MODULES = {
    "compiler": "Compiler compiler",
    "flops": "Flops flops",
    "heap": "Heap LiveArray heap",
    "ledger": "Collective Ledger ledger schedule_around",
    "memory": "Memory memory planned",
    "roofline": "Roofline attainable_seconds mfu roofline",
    "tape": "Tape tape",
    "timing": "StepTime Time compare peak_in_own_process step_time time",
    "traffic": "HostTraffic Move Traffic host_traffic traffic",
    "units": "GIB MIB gib",
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = ["hlo", *_WHERE]


def __getattr__(name: str) -> Any:
    """Loads what is asked for."""
    if name == "hlo":
        return importlib.import_module("course_lib.measure.hlo")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


class _Functions(types.ModuleType):
    """A package whose `heap` stays the function when somebody imports the module `heap`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Functions
