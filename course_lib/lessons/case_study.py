"""Published measurements of one Transformer on one GPU, beside what the compiler says of the
same configurations.

The tutorial series that this course builds on trains a Transformer of 155.9 million parameters
on an RTX A5000 of 24 GB, adds the techniques of this course one by one, and reads memory and
time per step from a profiler
(https://uvadlc-notebooks.readthedocs.io/en/latest/tutorial_notebooks/scaling/JAX/single_gpu_transformer.html,
2024, JAX 0.4.25). This module compiles each configuration for that GPU, or for others; and
`measure_here` runs one where there is a GPU.

    make case-study    # many minutes

This compiles all configurations for three GPUs and records the tables. A configuration that
this JAX cannot compile keeps its recorded row.
"""

import json
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from course_lib import configs, measure, training
from course_lib.lessons.study import Study
from course_lib.measure import hardware, recorded, virtual
from course_lib.models import attention

ACCELERATORS = ("a5000", "h100", "h200")
PUBLISHED_ON = "a5000"
LARGEST = 5  # arrays alive at the peak, per row


@dataclass(frozen=True)
class Case:
    """A configuration, as a change of another one, and its published measurements."""

    name: str
    change: Mapping[str, Any] = field(hash=False)  # fields of the case that it stands on
    on: str = ""  # that case; "" for the preset `155m`
    # Memory on an A5000. The publication writes GB; its profiler counts GiB.
    published_gib: float | None = None
    published_seconds: float | None = None  # per step on an A5000

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the preset `155m`."""
        return (BY_NAME[self.on].changes if self.on else {}) | dict(self.change)

    def config(self) -> ConfigDict:
        """Returns the configuration, checked."""
        config = configs.get("155m")
        config.update_from_flattened_dict(self.changes)
        configs.check(config)
        return config


_BOTH, _BLOCK = {"model.remat": ("MLP", "Attn")}, {"model.remat": ("Block",)}
_BFLOAT16, _FLASH = {"model.dtype": "bfloat16"}, {"model.attention": "flash"}
_ONE = {"training.num_minibatches": 1}

# The published configurations, in the order of the publication, and three more. The publication
# does not say how many minibatches the batch of 256 has: one is inferred.
CASES = (
    Case("float32", {"model.dtype": "float32", "model.remat": ()}, "", 20.6, 2.1),
    Case("bfloat16", _BFLOAT16, "float32", 14.6, 1.1),
    Case("bfloat16, unrolled", {"model.scan_layers": False}, "bfloat16", 8.8, 0.73),
    Case("remat MLP+Attn", _BOTH, "bfloat16", 3.9, 0.91),
    Case("remat Block", _BLOCK, "bfloat16", 3.8, 0.96),
    Case("remat MLP+Attn, 1 minibatch", _ONE, "remat MLP+Attn", 6.2, 0.86),
    Case(
        "remat MLP+Attn, 1 minibatch of 256",
        {"data.batch_size": 256},
        "remat MLP+Attn, 1 minibatch",
        15.0,
    ),
    Case("flash", _FLASH, "bfloat16"),
    Case("flash, unrolled", _FLASH, "bfloat16, unrolled"),
    Case("flash, remat Block", _FLASH, "remat Block"),
)

# The same step without the techniques of notebooks 1 to 4, then with one after the other.
LESSONS = (
    Case("no technique", {**CASES[0].change, **_ONE, "training.donate": False}),
    Case("1: bfloat16", _BFLOAT16, "no technique"),
    Case("2: rematerialization", _BOTH, "1: bfloat16"),
    Case("3: four minibatches", {"training.num_minibatches": 4}, "2: rematerialization"),
    Case("4: donation", {"training.donate": True}, "3: four minibatches"),
)
BY_NAME = {case.name: case for case in CASES + LESSONS}


def compile_case(case: Case, device: jax.Device) -> dict[str, Any]:
    """Compiles the train step of a case for a device, virtual or real, that `hardware` knows,
    and returns a row of its costs: memory in bytes, floors of the step time in seconds,
    "largest" arrays at the peak. FLOPs are counted with attention written out, also for flash
    attention: so rows compare.
    """
    accelerator = hardware.recognize(device)
    config = case.config()
    configs.check(config, accelerator)
    run = training.build(config)
    step: Any = run.train_step
    lowered = step.lower(*virtual.abstract(run.abstract(), device))
    heap = measure.heap(lowered)
    memory, traffic = measure.memory(heap.compiled), measure.traffic(heap.compiled)
    flops = training.step_flops(config)
    if recomputed := measure.compiler(heap).recomputation:
        print(f"{case.name} on an {accelerator.title}: {recomputed}")
    floor = measure.roofline(flops, traffic, accelerator)
    published = accelerator.name == PUBLISHED_ON
    return {
        "case": case.name,
        "accelerator": accelerator.name,
        "published_gib": case.published_gib if published else None,
        "published_seconds": case.published_seconds if published else None,
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
            {"bytes": a.bytes, "dtype": a.dtype, "shape": list(a.shape), "scope": a.scope}
            for a in heap.arrays[:LARGEST]
        ],
    }


def study(accelerator: str, cases: Sequence[Case] = CASES, name: str = "case_study") -> Study:
    """Returns the study of cases on one of `ACCELERATORS`."""
    table = f"{name}_{accelerator}"

    def row(name: str) -> dict[str, Any]:
        """Compiles a case, or returns its older row where this JAX cannot."""
        case, gpu = BY_NAME[name], hardware.get(accelerator)
        chosen = case.config().model.attention
        if attention.why_unavailable(chosen, gpu) or attention.stand_in(chosen, gpu):
            return recorded.older_row(table, name)
        return compile_case(case, virtual.devices(accelerator)[0])

    return Study(table, tuple(case.name for case in cases), row, accelerator)


LESSON_BY_LESSON = study(PUBLISHED_ON, LESSONS, "lesson_by_lesson")


def recorded_rows(accelerator: str = PUBLISHED_ON) -> list[dict[str, Any]]:
    """Returns the recorded rows of all cases; nothing is compiled."""
    return table(accelerator).rows


def table(accelerator: str = PUBLISHED_ON, live: Sequence[str] = ()) -> recorded.Table:
    """Returns the rows of all cases on one of `ACCELERATORS`: those in `live` compiled anew
    where possible, the others recorded.
    """
    return study(accelerator).table(live)


def explained_by_gelus(rows: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Returns, of the rows that keep the MLP's activations in a scan: the case, by how many GiB
    it lies below the publication, and the GiB of one array per GELU. JAX before 0.11 saved one
    array more per GELU for the backward pass.
    """
    config = BY_NAME["float32"].config()
    minibatch = config.data.batch_size // config.training.num_minibatches
    numbers = config.model.num_layers * minibatch * config.data.seq_len
    numbers *= 4 * config.model.hidden_size
    found = []
    for name, size in (("float32", 4), ("bfloat16", 2)):
        missing = rows[name]["published_gib"] - rows[name]["peak_bytes"] / measure.GIB
        found.append((name, missing, size * numbers / measure.GIB))
    return found


def check_story(rows: Mapping[str, Any]) -> None:
    """Refuses rows of the A5000 that are not as notebook 5 describes them."""
    off = {
        name: row["peak_bytes"] / measure.GIB / row["published_gib"] - 1
        for name, row in rows.items()
        if row["published_gib"]
    }
    assert max(map(abs, off.values())) <= 0.12, "not what was published"
    assert min(off, key=off.__getitem__) == "remat MLP+Attn, 1 minibatch", (
        "another row is furthest off"
    )
    for name, missing, explained in explained_by_gelus(rows):
        assert 0.6 < explained / missing < 0.8, f"{name}: GELUs explain another share"
    gelu = jax.tree.leaves(jax.vjp(jax.nn.gelu, jnp.ones(9))[1])
    saved = len([array for array in gelu if array.size == 9])
    assert saved == (5 if jax.__version_info__ < (0, 11) else 4), f"a GELU saves {saved} arrays"
    for name, are_products in (("bfloat16", False), ("bfloat16, unrolled", True)):
        scopes = [
            a["scope"] for a in rows[name]["largest"] if "transpose(jvp" not in a["scope"]
        ]
        assert {scope.endswith("dot_general") for scope in scopes} == {are_products}, (
            f"{name}: other arrays wait for the backward pass"
        )
    for case in CASES:
        if "flash" in case.name:
            less = rows[case.name]["peak_bytes"] < rows[case.on]["peak_bytes"]
            assert less, f"{case.name}: flash attention took more"


def measure_here(preset: str, changes: Mapping[str, Any], steps: int = 10) -> dict[str, Any]:
    """Runs the train step of a preset, with changes as in `Case.changes`, in a process of its
    own, which gets the memory that this one has left (`measure.peak_in_own_process`), and
    returns a row: "compiled_peak_bytes" and "measured_peak_bytes" (None on a CPU),
    "step_seconds" (median, low, high), "compile_seconds", "tokens_per_second", "mfu", and
    "not_run": None, or why there is nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "row.json"
        arguments: dict[str, Any] = {
            "preset": preset,
            "changes": dict(changes),
            "steps": steps,
            "out": str(file),
        }
        try:
            peak = measure.peak_in_own_process(
                "course_lib.lessons.case_study:run_steps", **arguments
            )
        except RuntimeError as error:
            return {"not_run": str(error).strip().splitlines()[-1]}
        if peak is None:  # a CPU does not count; then nothing was run
            run_steps(**arguments)
        row = json.loads(file.read_text())
    return row if row["not_run"] else row | {"measured_peak_bytes": peak}


def run_steps(preset: str, changes: Mapping[str, Any], steps: int, out: str) -> None:
    """Takes steps on a batch of ones and writes the row of `measure_here` to a JSON file."""
    config = configs.get(preset)
    config.update_from_flattened_dict(dict(changes))
    [device, *_] = jax.local_devices()
    accelerator = hardware.recognize(device)
    row: dict[str, Any] = {
        "not_run": attention.why_unavailable(config.model.attention, accelerator)
    }
    if row["not_run"] is None:
        run = training.build(config)
        step: Any = run.train_step
        state, batch = run.abstract()
        start = time.perf_counter()
        compiled = virtual.compile(step.lower(state, batch))  # the plan of a CPU's is whole
        row["compile_seconds"] = time.perf_counter() - start
        row["compiled_peak_bytes"] = measure.memory(compiled).peak
        limit = (device.memory_stats() or {}).get("bytes_limit", row["compiled_peak_bytes"])
        if row["compiled_peak_bytes"] > limit:
            row["not_run"] = f"its peak is beyond the {limit} bytes that JAX may take here"
        else:
            ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), batch)
            taken = measure.step_time(compiled, run.init(jax.random.key(0)), ones, steps=steps)
            row["step_seconds"] = {"median": taken.median, "low": taken.low, "high": taken.high}
            row["tokens_per_second"] = ones.labels.size / taken.median
            row["mfu"] = measure.mfu(training.step_flops(config), taken.median, accelerator)
    pathlib.Path(out).write_text(json.dumps(row))
