"""Compiles a training step for devices that need not be there, and reports its memory, bytes
and time.

    print(dry_run(settings.complete(configs.get("80gb")), "h100", 8).text())

The step is the one that `course_lib.program.loop` would run on these devices, built by the same
function. Memory and communication are read from the compiled program, FLOPs are counted, and
the time is estimated by `planner`. If the configuration leaves mesh and strategy
at their defaults, advice follows: the three layouts (mesh and strategy) with the fastest
estimates.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, cast

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from course_lib import measure, planner, training
from course_lib.configs import check_attention
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.measure import hardware, virtual
from course_lib.models import attention
from course_lib.program import loop, room, settings


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Memory, bytes and time that a step would need. If the program would refuse the
    configuration, all numbers are those of the one that is advised.
    """

    target: str  # title of the accelerator
    axes: dict[str, int]  # the size of each mesh axis, by name
    strategy: Strategy  # how these axes are used
    memory: dict[str, int]  # bytes per device: "arguments", "temporaries", "peak"
    capacity: int  # bytes of a device's memory that the program may use; the peak has to fit
    flops: int  # the model's FLOPs per step, on all devices together
    sent: dict[str, int]  # bytes that a device sends per step, by kind and axes
    estimate: "planner.Estimate | str"  # or the reason why there is none
    refused: str  # why the program would refuse this configuration, or ""
    advice: str  # layouts to try, the fastest first, or why there are none
    smaller: str = ""  # if it does not fit: what it needs with other options
    note: str = ""  # what runs in place of a kernel that the target cannot run
    recomputed: str = ""  # what XLA computes again to save memory

    @property
    def fits(self) -> bool:
        return self.memory["peak"] <= self.capacity

    def text(self) -> str:
        count = math.prod(self.axes.values())
        sizes = {name: measure.gib(size) for name, size in self.memory.items()}
        peak, capacity = sizes.pop("peak"), measure.gib(self.capacity)
        parts = ", ".join(f"{name} {size}" for name, size in sizes.items())
        large = {what: n for what, n in self.sent.items() if n >= 0.05 * measure.MIB}
        small = len(self.sent) - len(large)
        lines = [
            f"{count} x {self.target}: {_mesh(self.axes)}",
            f"memory per device    {peak} of {capacity} ({parts}): "
            + ("fits" if self.fits else "DOES NOT FIT"),
            *[f"{'':21}{self.recomputed}"] * bool(self.recomputed),
            *[f"{'':21}{self.smaller}"] * bool(self.smaller),
            f"FLOPs per step       {self.flops:.3g} on all devices",
            f"sent per device      {sum(self.sent.values()) / measure.MIB:,.1f} MiB",
            *(f"{n / measure.MIB:21,.1f} MiB: {what}" for what, n in large.items()),
            *[f"{'':21}and {small} sums of a few numbers"] * bool(small),
            f"time per step        {_time(self.estimate)}",
        ]
        lines += [f"note                 {self.note}"] * bool(self.note)
        if self.refused:
            refused = f"REFUSED              {self.refused}"
            return "\n".join([refused, f"instead              {self.advice}", *lines])
        return "\n".join([*lines, *[f"advice               {self.advice}"] * bool(self.advice)])


def _time(guess: "planner.Estimate | str") -> str:
    if isinstance(guess, str):
        return f"no estimate: {guess}"
    exposed, mfu = f"{guess.time.exposed / guess.step:.0%}", f"{guess.mfu:.0%}"
    text = f"about {guess.step:.3g} s, of which {exposed} is exposed communication; MFU {mfu}"
    if guess.unhidden.total > guess.step:
        text += (
            f",\n{'':21}or {guess.unhidden.total:.3g} s if transfers of gradients and"
            " parameters do not overlap with matmuls"
        )
    return text


def dry_run(config: ConfigDict, target: str, count: int) -> DryRun:
    """Compiles the train step of a configuration for `count` devices of a target (a name of
    `hardware.names()`) that need not be there. If the program would refuse it there, compiles
    the suggested one, if there is a suggestion.
    """
    settings.check(config)
    accelerator = hardware.get(target)
    accelerator = dataclasses.replace(accelerator, memory_bytes=accelerator.usable_bytes)
    check_attention(config.model, accelerator)
    note = attention.stand_in(config.model.attention, accelerator) or ""
    devices, cluster = virtual.devices(target, count), Cluster(accelerator, count)
    open_to_advice = all(
        config[part].to_dict() == settings.defaults()[part].to_dict()
        for part in ("mesh", "strategy")
    )
    suggested, advice = _suggest(config, cluster) if open_to_advice else ({}, "")
    refused = ""
    try:
        run, place = loop.build(config, devices)
    except ValueError as error:
        if not suggested:
            raise
        refused, config = str(error), settings.complete(config)
        config.update_from_flattened_dict(suggested)
        run, place = loop.build(config, devices)
    step: Any = run.train_step
    try:
        compiled = virtual.compile(step.lower(*run.abstract()))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"target={target!r}: its compiler refuses the step: {str(error).splitlines()[0]}"
        ) from error
    memory, mesh = measure.memory(compiled), cast("Mesh", place.mesh)
    cramped = memory.peak > accelerator.memory_bytes and not suggested
    sent: dict[str, int] = {}
    for row in measure.ledger(compiled, mesh).rows():
        what = f"{row['kind']} along {row['axes']}"
        sent[what] = sent.get(what, 0) + row["sent_bytes"]
    return DryRun(
        accelerator.title,
        settings.axes(config, count),
        settings.strategy(config),
        dict(arguments=memory.arguments, temporaries=memory.temporaries, peak=memory.peak),
        accelerator.memory_bytes,
        sum(training.step_flops(config).model.values()),
        sent,
        _estimate(config, cluster),
        refused,
        advice,
        room.smaller(config, devices, loop.build, memory.peak) if cramped else "",
        note,
        measure.compiler(compiled).recomputation,
    )


def _estimate(config: ConfigDict, cluster: Cluster) -> "planner.Estimate | str":
    axes, strategy = settings.axes(config, cluster.count), settings.strategy(config)
    try:
        return planner.estimate(config, axes, strategy, cluster)
    except ValueError as error:  # the program can run it, only the formula cannot
        return str(error)


def _suggest(config: ConfigDict, cluster: Cluster) -> tuple[dict[str, Any], str]:
    """Returns the fields to change for the fastest layout that fits, and lines about the three
    fastest; of each mesh and stage of ZeRO, the best amount of rematerialization.
    """
    best: dict[Any, tuple[planner.Estimate, tuple[str, ...]]] = {}
    try:
        for remat in dict.fromkeys((tuple(config.model.remat), (), ("Block",))):
            changed = config.copy_and_resolve_references()
            changed.model.remat = remat
            # The program's meshes have one order of axes: "data" outermost, "tensor" innermost.
            for each in planner.ranked(planner.Course(changed, reorder=False), cluster):
                layout = (*each.axes.items(), each.strategy.zero)
                if layout not in best or each.step < best[layout][0].step:
                    best[layout] = each, remat
    except ValueError:  # there is no formula, as the line about the time says
        return {}, ""
    if not best:
        return {}, (
            "no mesh of data, pipe and tensor is estimated to fit: take more devices, a smaller"
            " batch, or rematerialize more modules (model.remat)"
        )
    fastest = sorted(best.values(), key=lambda found: found[0].step)[:3]
    changes, lines = [_changes(config, *found) for found in fastest], []
    for (each, _), fields in zip(fastest, changes, strict=True):
        flags = " ".join(
            f"--set {name}={v if isinstance(v, str) else json.dumps(v)}"
            for name, v in fields.items()
        )
        lines += [
            f"{each.step:.3g} s per step, MFU {each.mfu:.0%}, {measure.gib(each.memory)}:"
            f" {_mesh(each.axes)}",
            f"  {flags or 'as it is'}",
        ]
    # docs/backtest.md, and tests/planner/test_course.py
    tie = f"closer than {planner.LAYOUT_ERROR:.0%} is a tie, memory is within a fifth"
    return changes[0], f"\n{'':21}".join([f"layouts to try, by formulas: {tie}", *lines])


def _changes(
    config: ConfigDict, layout: "planner.Estimate", remat: tuple[str, ...]
) -> dict[str, Any]:
    """Returns the fields in which the program of a layout differs."""
    minibatches = 1 if "pipe" in layout.axes else layout.parts
    wanted = {("mesh", axis): size for axis, size in layout.axes.items() if axis != "data"}
    wanted |= {("strategy", name): value for name, value in vars(layout.strategy).items()}
    wanted |= {("training", "num_minibatches"): minibatches, ("model", "remat"): remat}
    return {
        f"{part}.{name}": value
        for (part, name), value in wanted.items()
        if value != config[part][name]
    }


def _mesh(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())
