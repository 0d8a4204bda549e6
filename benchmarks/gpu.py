"""Predicts what programs need on a GPU, without one, and measures them where there is one.

    python -m benchmarks.gpu --predict h100    compiles every case for a virtual H100
    python -m benchmarks.gpu                   on a machine with a GPU: compiles and runs every
                                               case; `make gpu` calls this

Both write into `docs/results/gpu/`, anew after each case, so that a run that is cut
short leaves what it has. A prediction is the peak of memory and two times: the floor of the
roofline, and `measure.attainable_seconds`. A measurement is the time of the program, and the
peak of device memory in a process of its own, whose arguments (up to 8 GiB) were made on the
host. Processes compile side by side, which can change the kernels that XLA picks by trying
them (`--at-once 1` does not), and run one after another. At the end, without `--only`, one
step is profiled, scanned and unrolled (`profile`).

    python -m benchmarks.gpu --device cpu --preset cpu --only techniques --out FOLDER
                                               the same on the CPU, to try this program out
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks import gpu_cases
from benchmarks.gpu_cases import Program
from course_lib import configs, files, measure, xla_flags
from course_lib.measure import hardware, virtual
from course_lib.one_device import profiling

OUT = Path("docs/results/gpu")
TORCH = {"PyTorch, eager": False, "PyTorch, compiled": True}  # whether torch.compile is used
SPEED = "one step for speed"
MOST_ON_HOST = 8 * measure.GIB
LINK = "pcie5"  # between the GPU and its host, for predictions


def chosen(preset: str, only: Iterable[str]) -> dict[tuple[str, str], Callable[[], Program]]:
    """Returns cases by (group, case): all, or those whose name or group is in `only`."""
    cases = {
        (group, case): make
        for group, cases in gpu_cases.groups(preset).items()
        for case, make in cases.items()
    }
    if unknown := set(only) - {name for names in cases for name in names} - set(TORCH):
        raise ValueError(
            f"only={sorted(unknown)} must be cases, such as 'no remat', or groups:"
            f" {list(gpu_cases.groups(preset))}"
        )
    return {names: make for names, make in cases.items() if not only or set(names) & set(only)}


def planned(
    program: Program, compiled: jax.stages.Compiled, peak: int, gpu: hardware.Accelerator | None
) -> dict[str, Any]:
    """Returns what a compiled program tells: its peak of memory in bytes, FLOPs, traffic in
    bytes, and where the GPU is known the two times in seconds.
    """
    traffic = measure.traffic(compiled)
    row: dict[str, Any] = {
        "not_run": None,
        "peak_bytes": peak,
        "temporary_bytes": measure.memory(compiled).temporaries,
        "flops": sum(program.flops.values()),
        "traffic_bytes": traffic.bytes,
        "host_bytes": traffic.by_kind().get("offload", 0),
    }
    if gpu is not None:
        flops = measure.Flops(program.flops, {})
        row["floor_seconds"] = measure.roofline(flops, traffic, gpu).floor_seconds
        row["attainable_seconds"] = measure.attainable_seconds(
            flops, traffic, gpu, hardware.host_link(LINK)
        )
    return row


def predict(make: Callable[[], Program], name: str) -> dict[str, Any]:
    """Compiles a case for a virtual GPU; returns what that tells, or why it cannot be had."""
    try:
        program = make()
        heap = measure.heap(program.lower(virtual.devices(name)[0]))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return {"not_run": reason(error)}
    return planned(program, heap.compiled, heap.peak, hardware.get(name))


def reason(error: Exception) -> str:
    """Returns the name and the first line of an error."""
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first}"


def serve(make: Callable[[], Program], steps: int) -> None:
    """Compiles a case, waits for a line on its input, runs it, and prints its row."""
    [device, *_] = jax.local_devices()
    accelerator = hardware.recognize(device)
    program = make()
    try:
        compiled = program.lower(device).compile()
        memory = measure.memory(compiled)
        row = planned(program, compiled, memory.peak - memory.host, accelerator)
        limit = (device.memory_stats() or {}).get("bytes_limit", row["peak_bytes"])
        if row["peak_bytes"] > limit:
            row = {"not_run": f"needs {row['peak_bytes']} bytes, JAX may take {limit} here"}
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        row = {"not_run": reason(error)}
    # Arguments are made on the host, since the device would count what making them takes. The
    # largest ones are made on the device, when it is this process's turn.
    leaves = jax.tree.leaves(program.shapes)
    numbers = [x for x in leaves if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
    on_host = sum(x.size * x.dtype.itemsize for x in numbers) < MOST_ON_HOST
    if row["not_run"] is None and on_host:
        with jax.default_device(jax.devices("cpu")[0]):
            arguments = jax.block_until_ready(program.arguments())
    print("compiled", flush=True)
    sys.stdin.readline()
    if row["not_run"] is None:
        arguments = jax.device_put(
            arguments if on_host else program.arguments(), compiled.input_shardings[0]
        )
        if program.is_step:
            state, batch = arguments
            first = [state]  # popped below: the first state must not stay beside the next one
            del state, arguments
            taken: measure.Time = measure.step_time(compiled, first.pop(), batch, steps=steps)
            row["mfu"] = measure.mfu(program.model_flops, taken.median, accelerator)
        else:
            taken = measure.time(compiled, *arguments, repeats=steps)
        row["seconds"] = {"median": taken.median, "low": taken.low, "high": taken.high}
        counted = device.memory_stats()  # a CPU counts nothing
        row["measured_peak_bytes"] = counted and counted["peak_bytes_in_use"]
        row["tokens"] = program.tokens
    print(json.dumps(row), flush=True)


def serve_torch(compiled: bool, steps: int) -> None:
    """Compiles, times and prints the same model in PyTorch, as `serve` does."""
    from benchmarks import torch_gpu

    trainer = torch_gpu.trainer(compiled)
    print("compiled", flush=True)
    sys.stdin.readline()
    print(json.dumps(torch_gpu.row(trainer, steps)), flush=True)


def profile(preset: str, file: Path) -> None:
    """Records one step without rematerialization, scanned and unrolled. Writes its operations:
    [name, scope, start, seconds] of each. Notebook 06 reads the file.
    """
    steps, [device, *_] = {}, jax.local_devices()
    for case, scanned in {"scan": True, "unrolled": False}.items():
        program = gpu_cases.step({"model.remat": (), "model.scan_layers": scanned}, preset)
        compiled = program.lower(device).compile()
        arguments = jax.device_put(program.arguments(), compiled.input_shardings[0])
        with tempfile.TemporaryDirectory() as folder:
            profiling.trace(folder, compiled, *arguments, steps=1)
            events, scopes = profiling.read(folder).during(0), profiling.op_scopes(compiled)
        steps[case] = [
            [e.op, scopes.get((e.program, e.op), ""), round(e.start, 7), round(e.self_time, 7)]
            for e in events
        ]
    about = {"device": device.device_kind, "versions": versions(), "steps": steps}
    with files.atomic_write(file) as out:
        out.write(json.dumps(about).encode())


def versions() -> dict[str, str]:
    return {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")
    }


def measure_all(
    cases: Iterable[tuple[str, str]], options: argparse.Namespace
) -> Iterable[dict[str, Any]]:
    """Gives the rows of cases, each measured in a process of its own."""
    waiting = list(cases)
    with tempfile.TemporaryDirectory() as folder:
        while waiting:
            batch, waiting = waiting[: options.at_once], waiting[options.at_once :]
            started = [_start(*case, options, options.logs or Path(folder)) for case in batch]
            for process, _ in started:
                process.stdout.readline()  # it has compiled, or it has ended
            for (group, case), (process, log) in zip(batch, started, strict=True):
                output, _ = process.communicate("run\n")
                rows = [line for line in output.splitlines() if line.startswith("{")]
                errors = log.read_text().strip().splitlines() or ["it ended without a word"]
                row = json.loads(rows[-1]) if rows else {"not_run": errors[-1]}
                yield {"group": group, "case": case} | row


def _start(
    group: str, case: str, options: argparse.Namespace, folder: Path
) -> tuple[subprocess.Popen[str], Path]:
    """Starts the process of a case; returns it with the file of its errors."""
    log = folder / re.sub("[^a-z0-9]+", "-", f"{group} {case}".lower())
    arguments = ["--serve", group, case, "--steps", str(options.steps)]
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if case in TORCH:
        variables["JAX_PLATFORMS"] = "cpu"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", *arguments, "--preset", options.preset],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return process, log


def describe(row: Mapping[str, Any]) -> str:
    """Returns a row as a line on the screen."""
    line = f"{row['group']:22} {row['case']:36}"
    if row["not_run"]:
        return f"{line} not run: {row['not_run']}"
    parts = [f"compiled {measure.gib(row['peak_bytes'])}"] if "peak_bytes" in row else []
    if row.get("measured_peak_bytes"):
        parts.append(f"measured {measure.gib(row['measured_peak_bytes'])}")
    if "attainable_seconds" in row:
        parts.append(f"attainable {row['attainable_seconds'] * 1e3:.2f} ms")
    if "seconds" in row:
        parts.append(f"took {row['seconds']['median'] * 1e3:.2f} ms")
    if row.get("mfu"):
        parts.append(f"MFU {row['mfu']:.1%}")
    return f"{line} {', '.join(parts)}"


def write(file: Path, about: Mapping[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Prints rows and writes them into a file, one after the other, with what they are about.
    Rows of an older file that are not measured again stay.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    by_case = {}
    if file.exists():
        older = json.loads(file.read_text())
        by_case = {(row["group"], row["case"]): row for row in older["rows"]}
    for row in rows:
        print(describe(row), flush=True)
        where = {"date": datetime.date.today().isoformat(), "versions": versions()}
        by_case[row["group"], row["case"]] = row | where
        contents = dict(about) | {"rows": list(by_case.values())}
        with files.atomic_write(file) as out:
            out.write((json.dumps(contents, indent=1) + "\n").encode())
    print(f"{len(by_case)} rows in {file}" if file.exists() else "nothing measured")


def main() -> None:
    """Does what the command line asks; exits with code 2 where there is no such device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpus = [name for name in hardware.names() if hardware.get(name).platform == "gpu"]
    parser.add_argument("--predict", choices=gpus, help="a GPU that need not be there")
    parser.add_argument("--device", default="gpu", choices=("gpu", "tpu", "cpu"))
    parser.add_argument(
        "--preset", default="155m", choices=configs.PRESETS, help='of the group "techniques"'
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups or cases")
    parser.add_argument("--steps", type=int, default=10, help="timed, after two to warm up")
    parser.add_argument("--at-once", type=int, default=4, help="processes that compile at once")
    parser.add_argument("--out", type=Path, default=OUT, help="folder")
    parser.add_argument("--logs", type=Path, help="folder for what the processes say")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1 or options.at_once < 1:
        parser.error("--steps and --at-once must be at least 1")
    if options.profile:
        xla_flags.name_kernels()
        profile(options.preset, options.profile)
        return
    if options.serve:
        group, case = options.serve
        if case in TORCH:
            serve_torch(TORCH[case], options.steps)
        else:
            serve(gpu_cases.groups(options.preset)[group][case], options.steps)
        return
    try:
        cases = chosen(options.preset, options.only)
    except ValueError as error:
        parser.error(str(error))
    preset = "" if options.preset == "155m" else f"-{options.preset}"
    if options.predict:
        rows: Iterable[dict[str, Any]] = (
            {"group": group, "case": case} | predict(make, options.predict)
            for (group, case), make in cases.items()
        )
        about = {"gpu": options.predict, "kind": "predicted"}
        write(options.out / f"{options.predict}{preset}-predicted.json", about, rows)
        return
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
    known = hardware.recognize(device)
    about = {"gpu": known and known.name, "device": device.device_kind, "kind": "measured"}
    name = known.name if known else re.sub("[^a-z0-9]+", "-", device.device_kind.lower())
    asked = list(cases)
    if device.platform == "gpu":
        named = {*options.only, SPEED} if not options.only else {*options.only}
        asked += [(SPEED, case) for case in TORCH if {SPEED, case} & named]
    write(options.out / f"{name}{preset}-measured.json", about, measure_all(asked, options))
    if not options.only:
        # in its own process: naming kernels makes the steps slower
        to = ["--profile", str(options.out / f"{name}{preset}-profile.json")]
        command = [sys.executable, "-m", "benchmarks.gpu", *to, "--preset", options.preset]
        subprocess.run(command, check=False)


if __name__ == "__main__":
    main()
