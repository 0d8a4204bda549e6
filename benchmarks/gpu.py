"""Measures training steps on the accelerator of this machine, beside what the compiler said of
them.

    python -m benchmarks.gpu        on a machine with a GPU; `make gpu` calls this
    python -m benchmarks.gpu --device cpu --preset cpu --out FOLDER
                                    the same on the CPU, to try this program out

One preset of `course_lib.configs`, changed by one technique at a time. For each: the time of a
step, its MFU, and the device memory at its peak, measured and as compiled. Each case runs in a
process of its own. The results go to `docs/results/<device>.json`, anew after each case, so
that a run that is cut short leaves what it has.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax

from course_lib import configs, measure
from course_lib.lessons import case_study
from course_lib.measure import hardware

# keeps JAX's start quiet where its CUDA plugin is there for compiling only
from course_lib.measure import virtual as virtual

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
    "attention flash": {"model.attention": "flash"},
}
"""Case -> what it changes in the preset. Where the preset has it already, the case measures the
preset again.
"""


def row_of(preset: str, case: str, steps: int) -> dict[str, Any]:
    """Returns the row of one case of `CHANGES`, measured in a process of its own; if it cannot
    run here, the reason.
    """
    return {"case": case} | case_study.measure_here(preset, CHANGES[case], steps)


def describe(row: dict[str, Any]) -> str:
    """Returns a row as a line on the screen."""
    if row["not_run"]:
        return f"{row['case']:24} not run: {row['not_run']}"
    time, peak = row["step_seconds"], row["measured_peak_bytes"]
    return (
        f"{row['case']:24} {time['median'] * 1e3:9.1f} ms ({time['low'] * 1e3:.1f} to"
        f" {time['high'] * 1e3:.1f}), MFU"
        f" {'unknown' if row['mfu'] is None else format(row['mfu'], '.1%')}, peak"
        f" {measure.gib(row['compiled_peak_bytes'])} compiled,"
        f" {'not' if peak is None else measure.gib(peak)} measured"
    )


def main() -> None:
    """Measures all cases and writes the results; exits with code 2 where there is no such
    device.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="gpu",
        choices=("gpu", "tpu", "cpu"),
        help="what the steps must run on",
    )
    parser.add_argument(
        "--preset", choices=configs.PRESETS, help='by default "155m", on a T4 "t4"'
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=list(CHANGES),
        choices=CHANGES,
        metavar="CASE",
        help=f"of {list(CHANGES)}",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="how many steps are timed, after two to warm up"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="folder for <device>.json"
    )
    options = parser.parse_args()

    # the memory is for the processes that measure
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    [device, *_] = jax.local_devices()
    if device.platform != options.device:
        print(
            f"JAX {jax.__version__} finds no {options.device} here, only {jax.local_devices()}:"
            " nothing measured",
            file=sys.stderr,
        )
        sys.exit(2)
    accelerator = hardware.recognize(device)
    preset = options.preset or (
        "t4" if accelerator is not None and accelerator.name == "t4" else "155m"
    )
    results = {
        "device": device.device_kind,
        "accelerator": None if accelerator is None else accelerator.name,
        "date": datetime.date.today().isoformat(),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("jax", "jaxlib", "flax", "optax")
        },
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
