"""Changes of a step that may need less memory or time, for `costs` to try."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from course_lib.measure.flops import inner_jaxprs
from course_lib.own_step import reading
from course_lib.own_step.reading import Step

_SLICES = ("slice", "dynamic_slice", "split")
# Operations whose result has the axes of their operand.
_SAME_AXES = ("convert_element_type", "sharding_constraint", "optimization_barrier", "copy")


def changes(
    step: Step,
    figures: dict[str, Any],
    make_step: Callable[..., Any],
    devices: Sequence[jax.Device],
) -> Iterator[tuple[str, "Callable[[], Step] | str"]]:
    """Yields what to try next, with a function that returns the changed step, or the reason why
    it cannot be tried from outside.
    """
    switches = inspect.signature(make_step).parameters

    def switched(**switches: Any) -> Step:
        return reading.step_of(reading.make(make_step, devices, **switches))

    missed, flops = figures["donation"], figures["flops"] or {}
    if missed["missed_bytes"] > figures["peak_bytes"] / 100:
        more = tuple(missed["missed_argnums"])
        yield (
            f"donate {', '.join(missed['missed'])}, if the caller needs them no more:"
            f" donate_argnums={more} (notebook 4)",
            lambda: reading.traced(dataclasses.replace(step, donated=more, jitted=None)),
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
    numbers, axis, size = batch(step)
    if size % 2 == 0 < size:
        names = ", ".join(step.names[n] for n in numbers)
        yield (
            f"half the batch ({names}: {size // 2} of {size}{' along axis 1' * axis})."
            f" {'Twice as many' if axis else 'Two'} minibatches have about this peak, and a sum"
            " of gradients (notebook 3)",
            lambda: _changed(step, lambda leaf: _halved(leaf, axis), numbers),
        )
    else:
        yield (
            "half the batch (notebook 3)",
            "no argument is seen to be the batch: arrays with one even first dimension",
        )


def batch(step: Step) -> tuple[list[int], int, int]:
    """Returns which arguments are the batch, which axis its examples are on, and how many they
    are, or 0: the last argument that results do not replace and whose arrays have one size
    there, and others that share it. A step that replaces no argument has none. Minibatches are
    on an axis in front, which the step takes apart.
    """
    numbers: list[int] = []
    axis, size, state = 0, 0, step.replaced()
    for number in reversed(range(len(step.names)) if state else ()):
        leaves = [leaf for leaf in jax.tree.leaves(step.arguments[number]) if leaf.shape]
        if number in state or {reading.kind(leaf) for leaf in leaves} == {((2,), "uint32")}:
            continue  # a key of jax.random.PRNGKey is no batch
        inputs = {n for n, owner in enumerate(step.owners) if owner == number}
        apart = _is_taken_apart(step.jaxpr.jaxpr, inputs)
        sizes = {leaf.shape[apart] if len(leaf.shape) > apart else 0 for leaf in leaves}
        if len(sizes) == 1 and (not size or (apart, size) == (axis, *sizes)):
            numbers, axis, [size] = [number, *numbers], apart, sizes
    return numbers, axis, size


def _is_taken_apart(jaxpr: Any, inputs: set[int]) -> bool:
    """Whether a program loops over the first axis of some of its inputs, or indexes it. The
    inputs are the positions of its arguments.
    """
    arrays = {id(jaxpr.invars[n]) for n in inputs}
    for eqn in jaxpr.eqns:
        where = [n for n, v in enumerate(eqn.invars) if id(v) in arrays]
        if not where:
            continue
        name, params = eqn.primitive.name, eqn.params
        if name in _SAME_AXES:
            arrays.update(map(id, eqn.outvars))
        single = eqn.outvars[0].aval.shape[:1] == (1,) != eqn.invars[0].aval.shape[:1]
        if name in _SLICES and single or name == "unstack" and params["axis"] == 0:
            return True
        skipped = params["cond_nconsts"] if name == "while" else int(name == "cond")
        for inner in inner_jaxprs(params):
            if len(inner.invars) != len(eqn.invars) - skipped:
                continue
            passed = {n - skipped for n in where if n >= skipped}
            # a scan hands its body one element of the first axis
            ranks = (
                inner.invars[n].aval.ndim - eqn.invars[n + skipped].aval.ndim for n in passed
            )
            if any(ranks) or _is_taken_apart(inner, passed):
                return True
    return False


def _halved(leaf: Any, axis: int) -> tuple[tuple[int, ...], Any]:
    shape = list(leaf.shape)
    shape[axis] //= 2
    return tuple(shape), leaf.dtype


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
