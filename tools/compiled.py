"""Compiles the step of every preset and every row of the case study, and compares its memory
and traffic with stored numbers.

usage: python tools/compiled.py [--store]

`tests/data/compiled.json` has the numbers of an older version of the course, per JAX version. A
change that should leave the compiled step alone leaves these numbers alone, to the byte.
`--store` writes the numbers of the installed JAX instead of comparing with them.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import jax

from course_lib import configs, measure
from course_lib.lessons import case_study
from course_lib.measure import virtual
from course_lib.models import attention
from course_lib.program import loop, settings

STORE = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "compiled.json"
PRESETS = {"155m": "a5000", "cpu": "a5000", "t4": "t4", "80gb": "h100"}
MESHES: dict[str, dict[str, Any]] = {
    "155m, data": {},
    "155m, ZeRO-3": {"strategy.zero": 3, "model.remat": ("Block",)},
    "155m, tensor": {"mesh.tensor": 2, "strategy.sequence": True},
    "155m, ZeRO-1 by the compiler": {"strategy.zero": 1, "strategy.by": "compiler"},
    "155m, pipeline": {
        "mesh.pipe": 2,
        "strategy.schedule": "1f1b",
        "strategy.microbatches": 4,
        "training.num_minibatches": 1,
    },
}


def numbers(lowered: Any) -> dict[str, int]:
    """Compiles a lowered step, and returns its memory and traffic in bytes."""
    compiled = virtual.compile(lowered)
    memory = measure.memory(compiled)
    return {
        "peak": memory.peak,
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "traffic": measure.traffic(compiled).bytes,
    }


def on_one(whole: Any, accelerator: str) -> dict[str, int]:
    """Returns the numbers of a configuration's step on one virtual device."""
    run, _ = loop.build(settings.complete(whole), virtual.devices(accelerator))
    step: Any = run.train_step
    return numbers(step.lower(*run.abstract()))


def on_eight(changes: dict[str, Any]) -> dict[str, int]:
    """Returns the numbers of preset 155m, changed, on eight virtual H100s."""
    whole = settings.complete(configs.get("155m"))
    whole.model.dropout_rate = 0.0
    whole.update_from_flattened_dict(changes)
    run, _ = loop.build(whole, virtual.devices("h100", 8))
    step: Any = run.train_step
    return numbers(step.lower(*run.abstract()))


def everything() -> dict[str, dict[str, int]]:
    """Compiles all steps, and returns their numbers by name."""
    found = {}

    def add(name, compute, *args):
        found[name] = compute(*args)
        print(f"{found[name]['peak'] / 2**30:7.3f} GiB  {name}", flush=True)

    for preset, accelerator in PRESETS.items():
        add(f"preset {preset} on {accelerator}", on_one, configs.get(preset), accelerator)
    for case in case_study.CASES:
        whole = case.config()
        if attention.why_unavailable(whole.model.attention, None) is None:
            add(f"case {case.name} on a5000", on_one, whole, "a5000")
    for name, changes in MESHES.items():
        add(f"{name} on 8 h100", on_eight, changes)
    return found


def main() -> None:
    """Stores the numbers, or compares them with the stored ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true")
    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    if not (store := parser.parse_args().store) and jax.__version__ not in stored:
        sys.exit(f"nothing is stored for JAX {jax.__version__}, only for {', '.join(stored)}")
    found = everything()
    if store:
        STORE.parent.mkdir(exist_ok=True)
        STORE.write_text(json.dumps(stored | {jax.__version__: found}, indent=1) + "\n")
        return
    before = stored[jax.__version__]
    unlike = [
        f"{name}: {before.get(name)} stored, {found.get(name)} now"
        for name in before | found
        if before.get(name) != found.get(name)
    ]
    sys.exit("\n".join(unlike) if unlike else print(f"all {len(found)} as stored"))


if __name__ == "__main__":
    main()
