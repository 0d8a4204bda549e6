"""Measures a step, and changes of it, on devices that need not be there.

Figures are in bytes, seconds and FLOP. One that an instrument cannot know is None, and
`unknown` says why.
"""

import collections
import concurrent.futures
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from course_lib import measure
from course_lib.measure import hardware, virtual
from course_lib.one_device import buffer_donation
from course_lib.own_step import changes, reading
from course_lib.own_step.reading import Step

LARGEST, MOST_TRIED = 6, 3  # rows of arrays at the peak, changes that are tried

Figures = dict[str, Any]


def measured(
    make_step: Callable[..., Any], target: str, count: int = 1, batch: str | None = None
) -> tuple[Figures, measure.Heap, Iterator[Figures]]:
    """Measures the step of a `make_step` on `count` devices of a target, with `batch` among its
    arguments, or one that is found.

    Returns all figures, as `--json` prints them; the step's heap; and an iterator that tries
    changes, adds their rows to the figures and yields these rows.
    """
    devices = virtual.devices(target, count)
    step = reading.step_of(reading.make(make_step, devices))
    if batch not in (None, *step.names):
        raise ValueError(f"--batch {batch} must be an argument: {', '.join(step.names)}")
    accelerator = hardware.get(target)
    lowered, trace, mesh = lower(step, devices)
    heap = _compiled(lambda: measure.heap(lowered), target)
    mesh = mesh or _mesh_of(heap.compiled)
    costs = costs_of(heap, trace, target, len(devices))
    compiler = measure.compiler(heap)
    sent: collections.Counter[str] = collections.Counter()
    try:
        for row in measure.ledger(heap, mesh).rows() if count > 1 else ():
            along = f" along {row['axes']}" if row["axes"] else ""
            sent[row["kind"] + along] += row["sent_bytes"]
    except ValueError as error:  # of a loop that runs until a condition on data holds
        costs["unknown"]["sent_bytes"] = str(error)
    unsent = "sent_bytes" in costs["unknown"]
    figures = {
        "step": step.function.__name__,
        "target": target,
        "title": accelerator.title,
        "devices": count,
        "usable_bytes": accelerator.usable_bytes,
        "default_bytes": accelerator.default_bytes,
        "fits": costs["peak_bytes"] <= accelerator.usable_bytes,
        **costs,
        "at_the_peak": at_the_peak(heap),
        "donation": donation(step, heap.compiled),
        "sent_bytes": None if unsent else sent.total(),
        "sent_by_kind": None if unsent else dict(sent),
        "compiler": {
            **vars(compiler),
            "clones": len(compiler.clones),
            "text": str(compiler).splitlines(),
        },
        "tried": [],
        "not_tried": [],
    }

    def tries() -> Iterator[Figures]:
        started: list[tuple[str, Any, Any]] = []
        # XLA uses little more than one core
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for change, make in changes.changes(step, figures, make_step, devices, batch):
                if not isinstance(make, str) and len(started) == MOST_TRIED:
                    change = re.sub(r"\(.*\(", "(", change)  # without its details
                    make = f"{MOST_TRIED} changes are tried"
                if isinstance(make, str):
                    figures["not_tried"].append(f"{change}: {make}")
                else:
                    started.append((change, *_started(make, devices, pool)))
            for change, compiling, trace in started:
                row = _tried(compiling, trace, target, count)
                figures["tried"].append({"change": change, **row})
                yield figures["tried"][-1]

    return figures, heap, tries()


def lower(step: Step, devices: Sequence[jax.Device]) -> tuple[Any, jax.stages.Traced, Any]:
    """Lowers a step. Returns it, its trace, and the mesh of its arguments."""
    arguments, mesh = reading.placed(step, devices)
    doing = f"compiling {step.function.__name__}"
    with reading.blaming_the_step(doing), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        here = not jax.sharding.get_abstract_mesh().empty  # the step's code has set a mesh
        with jax.set_mesh(mesh) if here and mesh else nullcontext():
            trace = step.trace(arguments)
            with virtual.triton_without_gpu():
                lowered: Any = trace.lower()
    places = lowered._lowering.compile_args
    if places["num_devices"] != len(devices):
        raise ValueError(
            f"--devices {len(devices)}: {reading.NO_MESH.format(count=len(devices))}"
        )
    if places["backend"].platform == "cpu":
        raise ValueError(f"{doing}: {reading.ELSEWHERE}")
    return lowered, trace, mesh


def _compiled(compile: Callable[[], Any], target: str) -> Any:
    """Compiles a program, or says why the compiler refuses it."""
    try:
        return compile()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--target {target}: its compiler refuses the step: {reason}"
        ) from None


def _mesh_of(program: jax.stages.Compiled) -> Any:
    """Returns the mesh that a step's own jit names, if any."""
    shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
    named = (s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding))
    return next(named, None)


def costs_of(program: Any, trace: jax.stages.Traced, target: str, count: int) -> Figures:
    """Returns the figures of a compiled step."""
    unknown: dict[str, str] = {}

    def unless_unknown(name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ValueError as error:
            unknown[name] = str(error)
            return None

    flops = unless_unknown("flops", lambda: measure.flops(trace))
    traffic = unless_unknown("traffic_bytes", lambda: measure.traffic(program))
    by_kind = traffic and traffic.by_kind()
    seconds, without_workspace = None, not_planned(measure.program.read(program).module)
    if unknown:
        unknown["attainable_seconds"] = f"{' and '.join(unknown)} are unknown"
    elif count > 1:
        unknown["attainable_seconds"] = "no step on several devices was measured"
    elif solvers := [name for name in without_workspace if not name.startswith("__cudnn")]:
        unknown["attainable_seconds"] = f"the FLOPs of {', '.join(solvers)} are unknown"
    elif "offload" in by_kind:
        unknown["attainable_seconds"] = "arrays cross the link to the host"
    else:
        gpu = hardware.get(target)
        seconds = unless_unknown(
            "attainable_seconds", lambda: measure.attainable_seconds(flops, traffic, gpu)
        )
    memory = measure.memory(program)
    return {
        "peak_bytes": memory.peak - memory.host,
        "argument_bytes": memory.arguments,
        "output_bytes": memory.outputs,
        "aliased_bytes": memory.aliased,
        "temporary_bytes": memory.temporaries,
        "flops": flops and dict(flops.total),
        "recomputed_flops": flops and sum(flops.recomputed.values()),
        "traffic_bytes": traffic and traffic.bytes,
        "traffic_by_kind": by_kind,
        "attainable_seconds": seconds,
        "not_planned": without_workspace,
        "unknown": unknown,
    }


def at_the_peak(heap: measure.Heap) -> list[Figures]:
    """Returns the largest of the arrays that are alive at the peak: those of one argument
    together, and those of one shape from one line of the source.
    """
    groups: dict[Any, list[measure.LiveArray]] = collections.defaultdict(list)
    for a in heap.arrays:
        argument = re.match(r"\w*", a.scope)[0] if a.kind == "argument" else ""
        groups[(argument,) if argument else (a.line or a.scope[:60], a.dtype, a.shape)].append(
            a
        )
    rows = [
        {
            "bytes": sum(array.bytes for array in arrays),
            "arrays": len(arrays),
            "dtype": (arrays[0].dtype or None) if where[1:] else None,
            "shape": list(arrays[0].shape) if where[1:] else None,
            "kind": arrays[0].kind,
            "from": where[0] or None,
        }
        for where, arrays in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])[:LARGEST]


def donation(step: Step, program: Any) -> Figures:
    """Returns how much memory of arguments results take on one device, of which arguments they
    could, and why they take none of what is donated.
    """
    report = buffer_donation.report(program)
    places = program.in_tree.flatten_up_to(program.input_shardings)
    arrays = [
        (number, reading.kind(row, place), row.bytes)
        for number, row, place in zip(step.owners, report.arguments, places, strict=True)
    ]
    outputs = jax.tree.leaves(program.out_info)
    places = program.out_tree.flatten_up_to(program.output_shardings)
    results = [reading.kind(leaf, place) for leaf, place in zip(outputs, places, strict=True)]
    found = reading.replaceable(arrays, results, step.donated)
    missed = {n: size for n, size in found.items() if n not in step.donated}
    in_vain: collections.Counter[tuple[str, str]] = collections.Counter()
    for number, row in zip(step.owners, report.arguments, strict=True):
        if row.donated and row.why_not:
            in_vain[step.names[number], row.why_not] += row.bytes
    return {
        "donated": [step.names[n] for n in step.donated],
        "aliased_bytes": report.aliased_bytes,
        "in_vain": [
            {"argument": name, "why": why, "bytes": size}
            for (name, why), size in in_vain.items()
        ],
        "missed": [step.names[n] for n in missed],
        "missed_argnums": list(missed),
        "missed_bytes": sum(missed.values()),
    }


def not_planned(module: measure.hlo.Module) -> list[str]:
    """Returns the library functions in a program of whose workspace XLA's plan knows nothing:
    all but kernels, which need none, and those to which the plan gives some.
    """
    calls = (i for i in module.instructions.values() if i.opcode == "custom-call")
    return sorted(
        {
            i.target
            for i in calls
            if i.target.startswith(("__cublas", "__cudnn", "cu"))
            and not any(s.type in ("s8", "u8") and s.elements for s in i.shapes[1:])
        }
    )


def _started(
    make: Callable[[], Step], devices: Sequence[jax.Device], pool: concurrent.futures.Executor
) -> tuple[Any, Any]:
    """Starts to compile a changed step. Returns what to wait for, and the trace."""
    try:
        lowered, trace, _ = lower(make(), devices)
        return pool.submit(virtual.compile, lowered), trace
    except (ValueError, RuntimeError) as error:
        return error, None


def _tried(compiling: Any, trace: Any, target: str, count: int) -> Figures:
    """Returns the figures of a changed step, or the error of one that does not work."""
    names = "peak_bytes", "attainable_seconds", "flops"
    try:
        if trace is None:
            raise compiling
        costs = costs_of(_compiled(compiling.result, target), trace, target, count)
    except (ValueError, RuntimeError) as error:
        return {**dict.fromkeys(names), "error": str(error)}
    return {**{name: costs[name] for name in names}, "error": None}
