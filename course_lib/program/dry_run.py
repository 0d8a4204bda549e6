"""A training step on devices that need not be there: compiled only, and what it would need.

    found = dry_run(settings.whole(configs.get("80gb")), "h100", 8)
    print(found.text())

The step is the one that `course_lib.program.loop` would run on as many of these devices, built
by the same function. Memory and communication are read from the compiled program, products are
counted, and the time is estimated by `many_devices.estimate`. If the configuration leaves mesh
and strategy as they are, advice follows: what is estimated to be fastest.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from course_lib import measure
from course_lib.configs import check_attention
from course_lib.many_devices import estimate as estimates
from course_lib.many_devices.cluster_model import Cluster
from course_lib.many_devices.options import Strategy
from course_lib.measure import hardware, virtual
from course_lib.program import loop, observe, settings

GPU_SHARE = 0.9  # of a GPU's memory; the rest is for CUDA and NCCL. JAX's default is 0.75


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What a step would need.

    Attributes:
      target: title of the accelerator.
      axes: the mesh, sizes by name.
      strategy: how its axes are used.
      memory: of one device, in bytes by kind: "arguments", "temporaries", and "peak", which is
        what counts.
      capacity: what of one device's memory the program takes, in bytes.
      flops: that the model needs in a step, on all devices together.
      sent: bytes that one device sends in a step, by kind and axes.
      estimate: of `many_devices.estimate`; or, in words, why there is none.
      refused: why the program would not run the configuration on these devices, and this is
        `suggested` instead; else "".
      suggested: fields to change and their values, which are estimated to give a faster step,
        or one that fits.
      advice: the same in words, "" where mesh or strategy were given.
    """

    target: str
    axes: dict[str, int]
    strategy: Strategy
    memory: dict[str, int]
    capacity: int
    flops: int
    sent: dict[str, int]
    estimate: estimates.Estimate | str
    refused: str
    suggested: dict[str, Any]
    advice: str

    @property
    def fits(self) -> bool:
        """Whether a step needs no more memory than the program has."""
        return self.memory["peak"] <= self.capacity

    def text(self) -> str:
        """Returns all of it as lines for a terminal."""
        grid = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        memory = ", ".join(
            f"{name} {measure.gib(size)}"
            for name, size in self.memory.items()
            if name != "peak"
        )
        small = {what for what, size in self.sent.items() if size < 0.05 * measure.MIB}
        lines = (
            [f"REFUSED              {self.refused}", f"instead              {self.advice}"]
            if self.refused
            else []
        )
        lines += [
            f"{math.prod(self.axes.values())} x {self.target}: {grid}",
            f"memory of a device   {measure.gib(self.memory['peak'])} of"
            f" {measure.gib(self.capacity)} ({memory}): "
            + ("fits" if self.fits else "DOES NOT FIT"),
            f"FLOPs of a step      {self.flops:.3g} on all devices",
            f"sent by a device     {sum(self.sent.values()) / measure.MIB:,.1f} MiB",
        ]
        lines += [
            f"{size / measure.MIB:21,.1f} MiB: {what}"
            for what, size in self.sent.items()
            if what not in small
        ]
        lines += [f"{'':21}and {len(small)} sums of a few numbers"] * bool(small)
        lines.append(f"time of a step       {_time(self.estimate)}")
        if self.advice and not self.refused:
            lines.append(f"advice               {self.advice}")
        return "\n".join(lines)


def _time(found: estimates.Estimate | str) -> str:
    if isinstance(found, str):
        return f"no estimate: {found}"
    exposed = found.time.exposed / found.step
    return (
        f"about {found.step:.3g} s, MFU {found.mfu:.0%}; {exposed:.0%} of it is exposed"
        " communication"
    )


def dry_run(config: ConfigDict, target: str, count: int) -> DryRun:
    """Compiles the train step for devices that need not be there.

    If the program would refuse the configuration on so many devices, what is suggested instead
    is compiled, if anything is.

    Args:
      config: as `settings.whole` returns it.
      target: a name of `hardware.names()`.
      count: of devices.

    Raises:
      ValueError: if the configuration cannot work there, or the target's compiler refuses its
        step.
      course_lib.measure.virtual.Unavailable: if this machine cannot compile for the target.
    """
    settings.check(config)
    accelerator = hardware.get(target)
    if accelerator.platform == "gpu":
        accelerator = dataclasses.replace(
            accelerator, memory_bytes=int(GPU_SHARE * accelerator.memory_bytes)
        )
    check_attention(config.model, accelerator)
    devices = virtual.devices(target, count)
    suggested, advice = _suggest(config, accelerator, count) if _untouched(config) else ({}, "")
    refused = ""
    try:
        run, place = loop.build(config, devices)
    except ValueError as error:
        if not suggested:
            raise
        refused, config = str(error), _changed(config, suggested)
        run, place = loop.build(config, devices)
    step: Any = run.train_step
    try:
        compiled = virtual.compile(step.lower(*run.abstract()))
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"target={target!r}: its compiler refuses the step: {str(error).splitlines()[0]}"
        ) from error
    memory = measure.memory(compiled)
    return DryRun(
        accelerator.title,
        settings.axes(config, count),
        settings.strategy(config),
        dict(arguments=memory.arguments, temporaries=memory.temporaries, peak=memory.peak),
        accelerator.memory_bytes,
        sum(observe.step_flops(config).model.values()),
        _sent(compiled, place.mesh),
        _estimate(config, accelerator, count),
        refused,
        suggested,
        advice,
    )


def _untouched(config: ConfigDict) -> bool:
    fresh = settings.defaults()
    return (config.mesh.to_dict(), config.strategy.to_dict()) == (
        fresh.mesh.to_dict(),
        fresh.strategy.to_dict(),
    )


def _changed(config: ConfigDict, fields: Mapping[str, Any]) -> ConfigDict:
    changed = settings.whole(config)
    changed.update_from_flattened_dict(dict(fields))
    return changed


def _estimate(
    config: ConfigDict, accelerator: hardware.Accelerator, count: int
) -> estimates.Estimate | str:
    axes, chosen = settings.axes(config, count), settings.strategy(config)
    try:
        whole, cluster = settings.part_of_model(config), Cluster(accelerator, count)
        return estimates.estimate(whole, axes, chosen, cluster)
    except ValueError as error:  # the program runs all the same
        return str(error)


def _suggest(
    config: ConfigDict, accelerator: hardware.Accelerator, count: int
) -> tuple[dict[str, Any], str]:
    """Returns the fields that are to be changed for the fastest step that is estimated to fit,
    and a line about it.
    """
    try:
        found = estimates.choose(settings.part_of_model(config), Cluster(accelerator, count))
    except ValueError:  # there is no formula, which is said as the time of the step
        return {}, ""
    if not found:
        return (
            {},
            (
                "no mesh of data, pipe and tensor is estimated to fit: more devices, a smaller"
                " batch, or remat of more"
            ),
        )
    best, now = found[0], _estimate(config, accelerator, count)
    if not isinstance(now, str) and now.fits and now.step <= best.step:
        return {}, "no other mesh of data, pipe and tensor is estimated to be faster"
    wanted = {f"mesh.{axis}": size for axis, size in best.axes.items() if axis != "data"}
    wanted |= {f"strategy.{name}": value for name, value in vars(best.strategy).items()}
    wanted["training.num_minibatches"] = 1 if "pipe" in best.axes else best.parts
    given = {
        field: config[field.partition(".")[0]][field.partition(".")[2]] for field in wanted
    }
    fields = {field: value for field, value in wanted.items() if value != given[field]}
    flags = " ".join(
        f"--set {name}={v if isinstance(v, str) else json.dumps(v)}"
        for name, v in fields.items()
    )
    return (
        fields,
        (
            f"estimated to be the fastest that fits, with about {measure.gib(best.memory)}, in"
            f" {best.step:.3g} s per step:\n{'':21}{flags}"
        ),
    )


def _sent(compiled: Any, mesh: Any) -> dict[str, int]:
    """Returns bytes by kind and axes, those that are most first."""
    sent: dict[str, int] = {}
    for row in measure.ledger(compiled, mesh).rows():
        what = f"{row['kind']} along {row['axes']}"
        sent[what] = sent.get(what, 0) + row["sent_bytes"]
    return sent
