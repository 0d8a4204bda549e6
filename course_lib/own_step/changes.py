"""Changes of a step that may need less memory or time, for `costs` to try."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from course_lib.measure.flops import inner_jaxprs
from course_lib.measure.units import gib
from course_lib.own_step import reading
from course_lib.own_step.reading import Step


def changes(
    step: Step,
    figures: dict[str, Any],
    make_step: Callable[..., Any],
    devices: Sequence[jax.Device],
    name: str | None = None,
) -> Iterator[tuple[str, "Callable[[], Step] | str"]]:
    """Yields what to try next, with a function that returns the changed step, or the reason why
    it cannot be tried from outside. `name` is that of the batch among the arguments.
    """
    switches = inspect.signature(make_step).parameters

    def switch(name: str, usual: str, other: str, value: Any, change: str) -> tuple[str, Any]:
        if name not in switches:
            return change, f"give make_step a parameter {name}={usual}"
        made = functools.partial(reading.make, make_step, devices, **{name: value})
        notebook = change[change.index("(") :]
        return f"make_step({name}={other}) {notebook}", lambda: reading.step_of(made())

    missed, flops = figures["donation"], figures["flops"] or {}
    if missed["missed_bytes"] > figures["peak_bytes"] / 100:
        more = tuple(missed["missed_argnums"])
        yield (
            f"donate {', '.join(missed['missed'])}, if the caller needs them no more:"
            f" donate_argnums={more} (notebook 4)",
            lambda: reading.traced(dataclasses.replace(step, donated=more, jitted=None)),
        )
    if 2 * sum(n for dtype, n in flops.items() if "float32" in dtype) > sum(flops.values()):
        bfloat16 = "jnp.float32", "jnp.bfloat16", jnp.bfloat16
        yield switch("dtype", *bfloat16, "compute in bfloat16 (notebook 1)")
    if "remat" in switches or not figures["recomputed_flops"]:
        recompute = "recompute in the backward pass (notebook 2)"
        yield switch("remat", "False", "True", True, recompute)
    numbers, axis, size = batch(step, name)
    if size % 2 == 0 < size:
        names = ", ".join(step.names[n] for n in numbers)
        leaves = jax.tree.leaves([step.arguments[n] for n in numbers])
        other = sum(reading.size(x, getattr(x, "sharding", None)) for x in leaves) // 2
        yield (
            f"half the batch ({names}: {size // 2} of {size}{' along axis 1' * axis}): the"
            f" time is that of half the work. {'Twice as many' if axis else 'Two'} minibatches"
            f" also hold the other half, {gib(other)}{', and a sum of gradients' * (not axis)}"
            " (notebook 3)",
            lambda: _halved(step, axis, numbers),
        )
    else:
        yield (
            "half the batch (notebook 3)",
            "no argument is seen to hold an even number of examples; --batch NAME says it",
        )


def batch(step: Step, name: str | None = None) -> tuple[list[int], int, int]:
    """Returns which arguments are the batch, which axis its examples are on, and how many they
    are, or 0 if that is not clear. Half of them makes the step's arrays far smaller than half
    of other arguments, or of minibatches on an axis in front. Results replace no batch, unless
    it is the argument `name`.
    """
    state, shared = step.replaced(), collections.defaultdict(list)
    for number, argument in enumerate(step.arguments):
        shapes = {leaf.shape[:2] for leaf in jax.tree.leaves(argument) if leaf.shape}
        if number in state and step.names[number] != name:
            continue
        for axis, sizes in enumerate(itertools.zip_longest(*shapes, fillvalue=0)):
            if len({*sizes}) > 1 or sizes[0] < 2:
                break
            shared[axis, sizes[0]].append(number)
    saved = {key: 0 for key in shared if not name or step.names.index(name) in shared[key]}
    before = _sizes(step.jaxpr.jaxpr)
    for axis, size in saved:
        with contextlib.suppress(ValueError):  # the step does not work with this half
            half = _halved(step, axis, shared[axis, size])
            after = _sizes(half.jaxpr.jaxpr)
            if len(after) == len(before):  # else of an unrolled loop
                # half the sequence saves three quarters of scores, where the batch saves half
                saved[axis, size] = (3 - axis) * (sum(before) - sum(after))
    best = max(saved, key=lambda key: saved[key], default=(0, 0))
    others = (saved[key] for key in saved if not {*shared[key]} & {*shared[best]})
    clear = bool(saved) and (name or saved[best] > 2 * max(others, default=0))
    return (shared[best], *best) if clear else ([], 0, 0)


def _sizes(jaxpr: Any) -> list[int]:
    """Returns the bytes of each array that a program computes, in its order."""
    sizes = []
    for eqn in jaxpr.eqns:
        sizes += [reading.size(v.aval) for v in eqn.outvars if hasattr(v.aval, "dtype")]
        for inner in inner_jaxprs(eqn.params):
            sizes += _sizes(inner)
    return sizes


def _halved(step: Step, axis: int, numbers: Sequence[int]) -> Step:
    """Returns a step whose arguments of these numbers have half the size along an axis."""

    def halved(leaf: Any) -> Any:
        if not leaf.shape:
            return leaf
        shape = *leaf.shape[:axis], leaf.shape[axis] // 2, *leaf.shape[axis + 1 :]
        place = getattr(leaf, "sharding", None)
        own = place if hasattr(place, "mesh") else None
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=own)

    arguments = list(step.arguments)
    for number in numbers:
        arguments[number] = jax.tree.map(halved, arguments[number])
    with warnings.catch_warnings(action="ignore"):  # those of the step itself have been shown
        return reading.traced(dataclasses.replace(step, arguments=tuple(arguments)))
