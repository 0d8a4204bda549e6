"""The cost of a step: memory, FLOPs, bytes moved, time.

These read the compiled program; the device need not be there:

    compiled = step.lower(state, batch).compile()
    memory(compiled)        its peak memory, and the parts of it
    tape(lowered)           the memory at each instruction, by kind
    heap(lowered)           the arrays alive at the peak, and the memory over the program
    traffic(compiled)       the bytes that it moves through device memory
    host_traffic(compiled)  the bytes that it moves between host and device
    ledger(compiled, mesh)  the bytes that the devices send each other
    roofline(...)           the least time that FLOPs and bytes allow

`flops(step, state, batch)` counts before anything is compiled. `step_time`, `compare`, `mfu`
and `peak_in_own_process` measure a step that runs.
"""

from course_lib.measure import hlo as hlo
from course_lib.measure.flops import Flops, flops
from course_lib.measure.heap import Heap, LiveArray, heap, write_session
from course_lib.measure.ledger import Collective, Ledger, ledger, schedule_around
from course_lib.measure.memory import Memory, gib, memory
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
from course_lib.measure.units import GIB, MIB

__all__ = [
    "GIB",
    "MIB",
    "Collective",
    "Flops",
    "Heap",
    "HostTraffic",
    "Ledger",
    "LiveArray",
    "Memory",
    "Move",
    "Roofline",
    "StepTime",
    "Tape",
    "Time",
    "Traffic",
    "attainable_seconds",
    "compare",
    "flops",
    "gib",
    "heap",
    "hlo",
    "host_traffic",
    "ledger",
    "memory",
    "mfu",
    "schedule_around",
    "peak_in_own_process",
    "roofline",
    "step_time",
    "tape",
    "time",
    "traffic",
    "write_session",
]
