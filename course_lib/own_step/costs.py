"""Measures a step, and changes of it, on devices that need not be there.

Figures are in bytes, seconds and FLOP. One that an instrument cannot know is None, and
`unknown` says why.
"""

import collections
import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from course_lib import measure
from course_lib.measure import hardware, virtual
from course_lib.one_device import buffer_donation
from course_lib.own_step import reading
from course_lib.own_step.reading import Step

LARGEST, MOST_TRIED = 6, 3  # rows of arrays at the peak, changes that are tried

Figures = dict[str, Any]


def measured(
    make_step: Callable[..., Any], target: str, count: int = 1
) -> tuple[Figures, measure.Heap, Iterator[Figures]]:
    """Measures the step of a `make_step` on `count` devices of a target.

    Returns all figures, as `--json` prints them; the step's heap; and an iterator that tries
    changes, adds their rows to the figures and yields these rows.
    """
    devices = virtual.devices(target, count)
    step = reading.read(reading.make(make_step, devices))
    accelerator = hardware.get(target)
    costs, heap, mesh = compiled(step, target, devices, plan=True)
    compiler = measure.compiler(heap)
    sent: collections.Counter[str] = collections.Counter()
    try:
        for row in measure.ledger(heap, mesh).rows() if mesh else ():
            sent[f"{row['kind']} along {row['axes']}"] += row["sent_bytes"]
    except ValueError as error:  # of a loop that runs until a condition on data holds
        costs["unknown"]["sent_bytes"] = str(error)
    unsent = "sent_bytes" in costs["unknown"]
    figures = {
        "step": step.function.__name__,
        "target": target,
        "title": accelerator.title,
        "devices": count,
        "usable_bytes": accelerator.usable_bytes,
        "fits": costs["peak_bytes"] <= accelerator.usable_bytes,
        **costs,
        "at_the_peak": at_the_peak(heap),
        "donation": donation(step, heap),
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
        for change, make in changes(step, figures, make_step, devices):
            if isinstance(make, str):
                figures["not_tried"].append(f"{change}: {make}")
            elif len(figures["tried"]) < MOST_TRIED:
                figures["tried"].append({"change": change, **_tried(make, target, devices)})
                yield figures["tried"][-1]

    return figures, heap, tries()


def compiled(
    step: Step, target: str, devices: Sequence[jax.Device], plan: bool = False
) -> tuple[Figures, Any, jax.sharding.Mesh | None]:
    """Compiles a step. Returns its figures, the program for other instruments (with `plan`, its
    `heap`), and the mesh of its devices.
    """
    arguments, mesh = reading.placed(step, devices)
    jitted = step.jitted or jax.jit(step.function, donate_argnums=step.donated)
    with reading.own(f"compiling {step.function.__name__}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        here = not jax.sharding.get_abstract_mesh().empty  # the step's code has set a mesh
        with virtual.triton_without_gpu(), jax.set_mesh(mesh) if here else nullcontext():
            lowered: Any = jitted.lower(*arguments)
    try:
        program = measure.heap(lowered) if plan else virtual.compile(lowered)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--target {target}: its compiler refuses the step: {reason}"
        ) from None
    unknown: dict[str, str] = {}

    def known(name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ValueError as error:
            unknown[name] = str(error)
            return None

    flops = known("flops", lambda: measure.flops(jitted, *step.arguments))
    traffic = known("traffic_bytes", lambda: measure.traffic(program))
    by_kind = traffic and traffic.by_kind()
    seconds = None
    if unknown:
        unknown["attainable_seconds"] = f"{' and '.join(unknown)} are unknown"
    elif len(devices) > 1:
        unknown["attainable_seconds"] = "no step on several devices was measured"
    elif "offload" in by_kind:
        unknown["attainable_seconds"] = "arrays cross the link to the host"
    else:
        gpu = hardware.get(target)
        seconds = known(
            "attainable_seconds", lambda: measure.attainable_seconds(flops, traffic, gpu)
        )
    memory = measure.memory(program)
    costs = {
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
        "unknown": unknown,
    }
    return costs, program, mesh


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
    """Returns how much memory of arguments results take, and of which arguments they could."""
    missed = {n: size for n, size in step.reusable().items() if n not in step.donated}
    return {
        "donated": [step.names[n] for n in step.donated],
        "aliased_bytes": buffer_donation.report(program).aliased_bytes,
        "missed": [step.names[n] for n in missed],
        "missed_argnums": list(missed),
        "missed_bytes": sum(missed.values()),
    }


def changes(
    step: Step, figures: Figures, make_step: Callable[..., Any], devices: Sequence[jax.Device]
) -> Iterator[tuple[str, "Callable[[], Step] | str"]]:
    """Yields what to try next, with a function that returns the changed step, or the reason why
    it cannot be tried from outside.
    """
    switches = inspect.signature(make_step).parameters

    def switched(**switches: Any) -> Step:
        return reading.read(reading.make(make_step, devices, **switches))

    missed, flops = figures["donation"], figures["flops"] or {}
    if missed["missed_bytes"] > figures["peak_bytes"] / 100:
        more = tuple(missed["missed_argnums"])
        yield (
            f"donate {', '.join(missed['missed'])}, if the caller needs them no more:"
            f" donate_argnums={more} (notebook 4)",
            lambda: dataclasses.replace(
                step, donated=tuple(sorted(step.donated + more)), jitted=None
            ),
        )
    if 2 * flops.get("float32", 0) > sum(flops.values()):
        if "dtype" in switches:
            yield (
                "make_step(dtype=jnp.bfloat16) (notebook 1)",
                lambda: switched(dtype=jnp.bfloat16),
            )
        else:
            yield (
                "all float32 arguments in bfloat16, with weights and moments, which should stay"
                " float32 (notebook 1)",
                lambda: _changed(step, _half, range(len(step.names))),
            )
    if "remat" in switches:
        yield "make_step(remat=True) (notebook 2)", lambda: switched(remat=True)
    elif not figures["recomputed_flops"]:
        yield (
            "recompute in the backward pass (notebook 2)",
            "give make_step a parameter remat=False",
        )
    numbers, size = batch(step)
    if size % 2 == 0 < size:
        names = ", ".join(step.names[n] for n in numbers)
        yield (
            f"half the batch ({names}: {size // 2} of {size}). Two minibatches have about this"
            " peak, and a sum of gradients (notebook 3)",
            lambda: _changed(
                step, lambda leaf: ((size // 2, *leaf.shape[1:]), leaf.dtype), numbers
            ),
        )
    else:
        yield (
            "half the batch (notebook 3)",
            "no argument is seen to be the batch: arrays with one even first dimension",
        )


def batch(step: Step) -> tuple[list[int], int]:
    """Returns which arguments are the batch, and their first dimension, or 0: the last argument
    that results do not replace and whose arrays have one first dimension, and others that share
    it. A step that replaces no argument has none.
    """
    numbers: list[int] = []
    size, state = 0, step.reusable()
    for number in reversed(range(len(step.names)) if state else ()):
        leaves = [leaf for leaf in jax.tree.leaves(step.arguments[number]) if leaf.shape]
        if number in state or {reading.kind(leaf) for leaf in leaves} == {((2,), "uint32")}:
            continue  # a key of jax.random.PRNGKey is no batch
        sizes = {leaf.shape[0] for leaf in leaves}
        if len(sizes) == 1 and size in (0, *sizes):
            numbers, [size] = [number, *numbers], sizes
    return numbers, size


def _half(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, jnp.bfloat16 if leaf.dtype == jnp.float32 else leaf.dtype


def _changed(step: Step, change: Callable[[Any], Any], numbers: Sequence[int]) -> Step:
    """Returns a step whose arguments of these numbers have other shapes and dtypes."""

    def changed(leaf: Any) -> Any:
        if not leaf.shape:
            return leaf
        place = getattr(leaf, "sharding", None)
        divided = place if getattr(place, "mesh", None) is not None else None
        return jax.ShapeDtypeStruct(*change(leaf), sharding=divided)

    arguments = list(step.arguments)
    for number in numbers:
        arguments[number] = jax.tree.map(changed, arguments[number])
    return reading.traced(dataclasses.replace(step, arguments=tuple(arguments)))


def _tried(make: Callable[[], Step], target: str, devices: Sequence[jax.Device]) -> Figures:
    """Returns the figures of a changed step, or the error of one that does not work."""
    names = "peak_bytes", "attainable_seconds", "flops"
    try:
        costs, _, _ = compiled(make(), target, devices)
    except (ValueError, RuntimeError) as error:
        return {**dict.fromkeys(names), "error": str(error)}
    return {**{name: costs[name] for name in names}, "error": None}
