"""Measures training steps on the accelerator of this machine, beside what the compiler said of them.

    python -m benchmarks.gpu                                            on a machine with a GPU; `make gpu` calls this
    python -m benchmarks.gpu --device cpu --preset cpu --out FOLDER     the same on the CPU, to try this program out

One preset of `course_lib.config`, changed by one technique at a time. For each: the time of a step, its MFU, and the
device memory at its peak, measured and as compiled. Each case runs in a process of its own. The results go to
`docs/results/<device>.json`, anew after each case, so that a run that is cut short leaves what it has.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import sys
import tempfile
import time as clock
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from course_lib import attention, case_study, config, hardware, measure, training
from course_lib import virtual as virtual  # keeps JAX's start quiet where its CUDA plugin is there for compiling only

CHANGES: dict[str, dict[str, Any]] = {
    "the preset": {},
    "float32": {"model.dtype": "float32", "training.loss_scale": "none"},
    "no remat": {"model.remat": ()},
    "remat MLP": {"model.remat": ("MLP",)},
    "remat Attn": {"model.remat": ("Attn",)},
    "remat Block": {"model.remat": ("Block",)},
    "unrolled layers": {"model.scan_layers": False},
    "one minibatch": {"training.num_minibatches": 1},
    "no donation": {"training.donate": False},
    "attention xla": {"model.attention": "xla"},
    "attention cudnn": {"model.attention": "cudnn"},
    "attention pallas": {"model.attention": "pallas"},
}
"""Case -> what it changes in the preset. Where the preset has it already, the case measures the preset again."""


def settings(preset: str, case: str) -> ConfigDict:
    """Returns the configuration of one case."""
    changed = config.get(preset)
    changed.update_from_flattened_dict(CHANGES[case])
    config.check(changed)
    return changed


def measure_case(preset: str, case: str, steps: int, out: str) -> Any:
    """Measures one case and writes its row; of a case that cannot run here, the reason.

    Args:
      preset: a name of `config.PRESETS`.
      case: a name of `CHANGES`.
      steps: how many steps are timed.
      out: the file for the row, as JSON.
    """
    [device, *_] = jax.local_devices()
    accelerator = hardware.recognize(device)
    chosen = settings(preset, case)
    row: dict[str, Any] = {"case": case}
    row["not_run"] = attention.why_unavailable(chosen.model.attention, accelerator)
    if row["not_run"] is None:
        run = training.build(chosen)
        abstract = run.abstract()
        step: Any = run.train_step
        start = clock.perf_counter()
        compiled = step.lower(*abstract).compile()
        row["compile_seconds"] = clock.perf_counter() - start
        row["compiled_peak_bytes"] = measure.memory(compiled).peak
        limit = (device.memory_stats() or {}).get("bytes_limit", row["compiled_peak_bytes"])
        if row["compiled_peak_bytes"] > limit:
            row["not_run"] = f"its peak is beyond the {limit} bytes that JAX may take here"
        else:
            state, batch = run.init(jax.random.key(0)), jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract[1])
            time = measure.step_time(step, state, batch, steps=steps)
            row["step_seconds"] = {"median": time.median, "low": time.low, "high": time.high}
            row["tokens_per_second"] = batch.labels.size / time.median
            row["mfu"] = measure.mfu(case_study.step_flops(chosen), time.median, accelerator)
    Path(out).write_text(json.dumps(row))


def row_of(preset: str, case: str, steps: int) -> dict[str, Any]:
    """Runs one case in a process of its own and returns its row, with the peak that the device counted there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        arguments: dict[str, Any] = {"preset": preset, "case": case, "steps": steps, "out": str(file)}
        try:
            peak = measure.peak_in_own_process("benchmarks.gpu:measure_case", **arguments)
        except RuntimeError as error:
            return {"case": case, "not_run": str(error).strip().splitlines()[-1]}
        if peak is None:  # a CPU does not count; then nothing was run
            measure_case(**arguments)
        row = json.loads(file.read_text())
    return row if row["not_run"] else row | {"measured_peak_bytes": peak}


def describe(row: dict[str, Any]) -> str:
    """Returns a row as a line on the screen."""
    if row["not_run"]:
        return f"{row['case']:24} not run: {row['not_run']}"
    time, peak = row["step_seconds"], row["measured_peak_bytes"]
    return (
        f"{row['case']:24} {time['median'] * 1e3:9.1f} ms ({time['low'] * 1e3:.1f} to {time['high'] * 1e3:.1f}), "
        f"MFU {'unknown' if row['mfu'] is None else format(row['mfu'], '.1%')}, "
        f"peak {measure.gib(row['compiled_peak_bytes'])} compiled, {'not' if peak is None else measure.gib(peak)} measured"
    )


def main() -> None:
    """Measures all cases and writes the results; exits with code 2 where there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="gpu", choices=("gpu", "tpu", "cpu"), help="what the steps must run on")
    parser.add_argument("--preset", choices=config.PRESETS, help='by default "155m", on a T4 "t4"')
    parser.add_argument(
        "--cases", nargs="+", default=list(CHANGES), choices=CHANGES, metavar="CASE", help=f"of {list(CHANGES)}"
    )
    parser.add_argument("--steps", type=int, default=10, help="how many steps are timed, after two to warm up")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for <device>.json")
    options = parser.parse_args()

    [device, *_] = jax.local_devices()
    if device.platform != options.device:
        print(
            f"JAX {jax.__version__} finds no {options.device} here, only {jax.local_devices()}: nothing measured",
            file=sys.stderr,
        )
        sys.exit(2)
    accelerator = hardware.recognize(device)
    preset = options.preset or ("t4" if accelerator is not None and accelerator.name == "t4" else "155m")
    results = {
        "device": device.device_kind,
        "accelerator": None if accelerator is None else accelerator.name,
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")},
        "preset": preset,
        "steps": options.steps,
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{re.sub('[^a-z0-9]+', '-', device.device_kind.lower())}.json"
    for case in options.cases:
        row = row_of(preset, case, options.steps)
        print(describe(row), flush=True)
        results["rows"].append(row)
        file.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    main()
