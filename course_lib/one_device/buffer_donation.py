"""Buffer donation: reports which of its arguments a compiled step overwrites.

A step that returns a new state beside the old one needs memory for both. `jax.jit(step,
donate_argnums=0)` donates the buffers of the first argument: an output of the same shape and
dtype reuses a donated buffer (it is *aliased* to it), and the old array can no longer be read
(https://docs.jax.dev/en/latest/buffer_donation.html). From JAX 0.10 on, XLA may also reuse a
donated buffer of as many elements and bytes for an output of another shape or dtype.

A donated buffer that no output can reuse is not an error. JAX warns once, when the step is
lowered ("Some donated buffers were not usable"), but not about buffers that it leaves to XLA.
`report` reads all of this from the compiled step.
"""

import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from course_lib.measure import program


@dataclass(frozen=True)
class DonatedArgument:
    """One array among the arguments of a compiled function."""

    path: str  # as `args[0].params['w']`, or under `kwargs` if it was passed by name
    shape: tuple[int, ...]  # of the whole array, also where devices hold parts of it
    dtype: str
    bytes: int  # on one device
    donated: bool  # by the caller
    aliased_to: str | None  # the output that reuses its buffer, as `out[0].params['w']`
    why_not: str | None  # the reason why it is not aliased


@dataclass(frozen=True)
class Donation:
    """The donated and aliased arguments of a compiled function.

    Arguments and outputs occupy `argument_bytes + output_bytes - aliased_bytes` on one device.
    """

    arguments: list[DonatedArgument]  # every array, in order
    argument_bytes: int  # of those that the program takes; JAX drops unused ones
    output_bytes: int
    donated_bytes: int
    aliased_bytes: int  # of the arguments whose buffers outputs reuse


def report(step: Any) -> Donation:
    """Reads which arguments of a function were donated, and which outputs reuse them.

    `step` is `jax.jit(f, donate_argnums=...).lower(...)`, compiled or not, for any devices,
    real or virtual: nothing runs.
    """
    compiled = program.read(step).compiled
    arguments = jax.tree_util.tree_flatten_with_path(compiled.args_info)[0]
    outputs = jax.tree_util.tree_flatten_with_path(compiled.out_info)[0]
    output_of = _aliases(compiled.as_text())
    parameter_of = _parameters(compiled)
    # each device holds its part of an array, which it cannot overwrite with a larger one
    given = _parts(arguments, compiled.in_tree, compiled.input_shardings)
    made = _parts(outputs, compiled.out_tree, compiled.output_shardings)
    kinds = [(part, str(leaf.dtype)) for part, (_, leaf) in zip(made, outputs, strict=True)]
    whole = {(tuple(leaf.shape), str(leaf.dtype)) for _, leaf in outputs}
    # JAX pairs a donated array with an output of its shape and dtype. XLA may go on from there:
    # what it did stands in the program, and why it did not can only be reasoned.
    free = [kind for index, kind in enumerate(kinds) if index not in output_of.values()]

    rows = []
    for index, (path, leaf) in enumerate(arguments):
        parameter, kind = parameter_of.get(index), (given[index], str(leaf.dtype))
        output = output_of.get(parameter)
        aliased_to = None if output is None else "out" + keystr(outputs[output][0])
        if output is not None:
            why_not = None
        elif not leaf.donated:
            why_not = "not donated"
        elif parameter is None:
            why_not = "the program does not use it, and does not take it"
        elif (tuple(leaf.shape), kind[1]) not in whole:
            size = np.prod(leaf.shape), leaf.dtype.itemsize
            alike = size in [(np.prod(shape), np.dtype(of).itemsize) for shape, of in whole]
            has = "this shape and dtype" if alike else "as many elements and bytes"
            why_not = f"no output has {has}"
        elif kind not in kinds:
            why_not = (
                "every output of this shape and dtype is divided otherwise over the devices"
            )
        elif kind not in free:
            why_not = "every output of this shape and dtype reuses another argument"
        else:
            why_not = "the compiler gave the matching output a buffer of its own"
        rows.append(
            DonatedArgument(
                path=("kwargs", "args")[path[0].idx == 0] + keystr(path[1:]),
                shape=tuple(leaf.shape),
                dtype=str(leaf.dtype),
                bytes=_bytes(given[index], leaf),
                donated=leaf.donated,
                aliased_to=aliased_to,
                why_not=why_not,
            )
        )
    return Donation(
        arguments=rows,
        argument_bytes=sum(rows[index].bytes for index in parameter_of),
        output_bytes=sum(
            _bytes(part, leaf) for part, (_, leaf) in zip(made, outputs, strict=True)
        ),
        donated_bytes=sum(row.bytes for row in rows if row.donated),
        aliased_bytes=sum(row.bytes for row in rows if row.aliased_to is not None),
    )


def _aliases(text: str) -> dict[int | None, int]:
    """Returns output number by parameter number: `{0}: (3, {}, may-alias)`, or `{}: ...`."""
    header = text.partition("\n")[0]
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)", header)
    return {int(parameter): int(output or 0) for output, parameter in pairs}


def _parameters(compiled: jax.stages.Compiled) -> dict[int, int]:
    """Returns the program's parameter number by argument number: jax.jit drops unused ones."""
    used = sorted(compiled._executable._kept_var_idx)  # type: ignore[attr-defined]
    return {argument: parameter for parameter, argument in enumerate(used)}


def _parts(leaves: list, tree: Any, shardings: Any) -> list[tuple[int, ...]]:
    """Returns the shapes that one device holds. Unused arguments have no sharding."""
    return [
        sharding.shard_shape(tuple(leaf.shape)) if sharding else tuple(leaf.shape)
        for (_, leaf), sharding in zip(leaves, tree.flatten_up_to(shardings), strict=True)
    ]


def _bytes(shape: tuple[int, ...], leaf: Any) -> int:
    return int(np.prod(shape)) * leaf.dtype.itemsize
