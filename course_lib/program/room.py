"""Whether a step fits into memory, and what would make it smaller."""

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from course_lib import measure, training
from course_lib.measure import virtual
from course_lib.program import settings

SMALLER = (  # sentences for `Refused` and for an error of XLA
    "A higher training.num_minibatches or more modules in model.remat need smaller temporaries,"
    " strategy.zero=3 on more devices smaller arguments; --dry-run tells how much"
)
CGROUP_LIMITS = (  # bytes, of version 2 and 1
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def step_memory(run: training.Run) -> "measure.Memory":
    """Compiles the step, as its first call would. On a CPU it may take more than is planned."""
    step: Any = run.train_step
    return measure.planned(step.lower(*run.abstract()).compile())


def does_not_fit(needs: "measure.Memory", devices: Collection[jax.Device]) -> str:
    """Returns why the memory is too small for a step, or ""."""
    device: Any = next(iter(devices))
    there = (device.memory_stats() or {}).get("bytes_limit", math.inf)
    if device.platform == "cpu":  # simulated devices share the host's memory
        there = host_memory() // len(devices)
    if needs.peak - needs.host <= there:
        return ""
    return (
        f"the step does not fit into the {measure.gib(there)} of {device.device_kind}. Per"
        f" device it needs: {needs}"
    )


def smaller(
    config: ConfigDict,
    devices: Sequence[jax.Device] | None,
    build: Callable[..., tuple[training.Run, Any]],
    peak: int,
) -> str:
    """Compiles what `build` makes with each of three options, and says which need less than a
    peak.
    """
    count = len(jax.devices() if devices is None else devices)
    parts = config.data.batch_size // settings.axes(config, count)["data"]
    options: dict[str, Any] = {"training.num_minibatches": parts, "model.remat": ["Block"]}
    options |= {"strategy.zero": 3} if count > 1 else {"model.loss_chunks": 8}
    less = []
    for name, value in options.items() if jax.process_count() == 1 else ():
        changed = settings.complete(config)
        settings.set_field(changed, name, json.dumps(value))
        with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):  # it does not work
            settings.check(changed)
            step: Any = (run := build(changed, devices)[0]).train_step
            new = measure.planned(virtual.compile(step.lower(*run.abstract()))).peak
            if new < peak:
                less.append(f"{measure.gib(new)} with --set {name}={json.dumps(value)}")
    return f"Compiled, it needs {', '.join(less)}" if less else SMALLER


def host_memory() -> int:
    """Returns the bytes that this process may use: the machine's, or a container's limit."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no container, or "max"
            sizes.append(int(pathlib.Path(limit).read_text()))
    return min(sizes)
