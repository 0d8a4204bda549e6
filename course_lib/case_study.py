"""Published measurements of one Transformer on one GPU, and what the compiler says of the same configurations.

The tutorial series that this course builds on trains a Transformer of 155.9 million parameters on an RTX A5000 of 24 GB,
with the techniques of this course added one by one, and reads memory and time a step out of a profiler
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html, 2024, JAX
0.4.25). Here each configuration is compiled for that GPU, or for one that the series did not have.

    python -m course_lib.case_study      # compiles all for three GPUs, prints and records the tables: many minutes
"""

import functools
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from ml_collections import ConfigDict

from course_lib import attention, config, hardware, measure, recorded, training, virtual

ACCELERATORS = ("a5000", "h100", "h200")
PUBLISHED_ON = "a5000"
LARGEST = 5  # so many of the arrays alive at the peak stand in a row


@dataclass(frozen=True)
class Case:
    """A configuration and what was published of it.

    Attributes:
      name: unique.
      changes: what differs from the preset `155m`, by field.
      published_gib: memory on an A5000. The publication writes GB; its profiler counts GiB.
      published_seconds: time of a step on an A5000.
      note: what to know about it.
    """

    name: str
    changes: Mapping[str, Any] = field(hash=False)
    published_gib: float | None = None
    published_seconds: float | None = None
    note: str = ""

    def config(self) -> ConfigDict:
        """Returns the whole configuration, checked."""
        whole = config.get("155m")
        whole.update_from_flattened_dict(dict(self.changes))
        config.check(whole)
        return whole


_NO_REMAT = {"model.remat": ()}
_UNROLLED = {"model.remat": (), "model.scan_layers": False}
_BLOCK = {"model.remat": ("Block",)}
_FLASH = {"model.attention": "pallas"}

CASES = (
    Case("float32", {**_NO_REMAT, "model.dtype": "float32"}, 20.6, 2.1),
    Case("bfloat16", _NO_REMAT, 14.6, 1.1),
    Case("bfloat16, unrolled", _UNROLLED, 8.8, 0.73),
    Case("remat MLP+Attn", {}, 3.9, 0.91),
    Case("remat Block", _BLOCK, 3.8, 0.96),
    Case("remat MLP+Attn, 1 minibatch", {"training.num_minibatches": 1}, 6.2, 0.86),
    Case(
        "remat MLP+Attn, 1 minibatch of 256",
        {"training.num_minibatches": 1, "data.batch_size": 256},
        15.0,
        note="the publication does not say how many minibatches: one is inferred",
    ),
    Case("flash", {**_NO_REMAT, **_FLASH}, note="the next step: not in the publication"),
    Case("flash, unrolled", {**_UNROLLED, **_FLASH}, note="the next step: not in the publication"),
    Case("flash, remat Block", {**_BLOCK, **_FLASH}, note="the next step: not in the publication"),
)
"""The published configurations, in the order of the publication, and three more."""


def compile_case(case: Case, device: jax.Device) -> dict[str, Any]:
    """Compiles the train step of a case and reads what it costs. Nothing is run.

    FLOPs are those of attention that is written out, also for the cases with flash attention, whose kernel leaves out
    what causality makes superfluous: compare like with like.

    Args:
      case: one of `CASES`, or your own.
      device: a virtual or a real one, of a kind that `hardware` knows.

    Returns:
      A row of numbers, strings and lists: memory in bytes, floors of the step time (`measure.roofline`) in seconds, and
      under "largest" the largest arrays at the peak.

    Raises:
      ValueError: if the device is unknown, or the case cannot be compiled for it.
    """
    accelerator = hardware.recognize(device)
    if accelerator is None:
        raise ValueError(f"device={device!r} must be one that course_lib.hardware knows: its roofline is unknown")
    whole = case.config()
    config.check(whole, accelerator)
    run = training.build(whole)
    step: Any = run.train_step
    lowered = step.lower(*virtual.abstract(run.abstract(), device))
    heap = measure.heap(lowered)
    memory, traffic = measure.memory(heap.compiled), measure.traffic(heap.compiled)
    flops = step_flops(whole)
    floor = measure.roofline(flops, traffic, accelerator)
    return {
        "case": case.name,
        "accelerator": accelerator.name,
        "published_gib": case.published_gib if accelerator.name == PUBLISHED_ON else None,
        "published_seconds": case.published_seconds if accelerator.name == PUBLISHED_ON else None,
        "peak_bytes": memory.peak,
        "argument_bytes": memory.arguments,
        "temporary_bytes": memory.temporaries,
        "model_flops": sum(flops.model.values()),
        "recomputed_flops": sum(flops.recomputed.values()),
        "traffic_bytes": traffic.bytes,
        "compute_seconds": floor.compute_seconds,
        "memory_seconds": floor.memory_seconds,
        "floor_seconds": floor.floor_seconds,
        "largest": [
            {"bytes": array.bytes, "dtype": array.dtype, "shape": list(array.shape), "scope": array.scope}
            for array in heap.arrays[:LARGEST]
        ],
    }


def step_flops(config: ConfigDict) -> measure.Flops:
    """Counts the FLOPs of the matrix products in one step, attention written out.

    Also where attention is a kernel, whose insides cannot be counted, and which leaves out what causality makes
    superfluous: so that like is compared with like.

    Args:
      config: a whole configuration.
    """
    written_out = config.copy_and_resolve_references()
    written_out.model.attention = "reference"
    run = training.build(written_out)
    return measure.flops(run.train_step, *run.abstract())


def recorded_rows(accelerator: str = "a5000") -> list[dict[str, Any]]:
    """Returns the rows of all cases as `python -m course_lib.case_study` recorded them, without compiling anything.

    Raises:
      ValueError: if the accelerator is not one of `ACCELERATORS`.
    """
    if accelerator not in ACCELERATORS:
        raise ValueError(f"accelerator={accelerator!r} must be one of {ACCELERATORS}: no other was recorded")
    return json.loads((recorded.FOLDER / f"case_study_{accelerator}.json").read_text(encoding="utf-8"))["rows"]


def format_row(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of text: memory compiled and published, the floor of the step time and the published one."""
    published = f"{row['published_gib']:5.1f}" if row["published_gib"] else "    -"
    seconds = f"{row['published_seconds']:5.2f}" if row["published_seconds"] else "    -"
    peak, floor = row["peak_bytes"] / measure.GIB, row["floor_seconds"]
    return f"{row['accelerator']:6} {row['case']:36} {peak:6.2f} GiB ({published})   {floor:5.3f} s ({seconds})"


def main() -> None:
    """Compiles every case for every accelerator, prints a line each, and records a table for each accelerator."""
    for case in CASES:
        reason = attention.why_unavailable(case.config().model.attention, hardware.get(ACCELERATORS[0]))
        if reason:
            raise SystemExit(f"the table would lack the case {case.name!r}, so nothing is recorded: {reason}")
    os.environ["COURSE_RECORD"] = "1"
    print("GPU    case                                 peak (published A5000)  floor of a step (published A5000)")
    for name in ACCELERATORS:
        table = recorded.live_or_recorded(f"case_study_{name}", functools.partial(_compile_all, name), name)
        print(table.note, flush=True)


def _compile_all(accelerator: str) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        start = time.perf_counter()
        rows.append(compile_case(case, virtual.devices(accelerator)[0]))
        print(f"{format_row(rows[-1])}   compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return rows


if __name__ == "__main__":
    main()
