"""The two matrix multiplications (matmuls) of tensor parallelism, overlapped with their
communication.

`tensor_parallel.gather_column` waits for the whole sequence before it multiplies, and
`tensor_parallel.row_scatter` sends nothing before its matmul is done. Here the sequence
travels around a ring of devices, part by part (Wang et al., 2023,
https://doi.org/10.1145/3567955.3567959; Dehghani et al., 2023,
https://arxiv.org/abs/2302.05442, section 2.2):

    column    multiply the part that is here, while the next part arrives
    row       multiply the part of the farthest device first, and send its sum on while the next
              part is multiplied

The ring sends as many bytes as the collective, in n - 1 steps. A step is hidden if the matmul
beside it takes at least as long. With `bidirectional`, half of the parts go around the other
way, and the ring needs half as many steps. JAX derives the gradients, which are rings as well.

`jax.lax.optimization_barrier` ties each transfer to the matmul beside it. Without it XLA may
send first and multiply later, or merge the small matmuls into a large one: then nothing hides
the transfers.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from course_lib.many_devices import collectives, tensor_parallel
from course_lib.many_devices.tensor_parallel import AXIS, LENGTH
from course_lib.models.hooks import Hooks

OVERLAPS = ("none", "one-way", "two-way")
"""How matmuls and their communication overlap: not at all ("none"), or around a ring, in one
direction or in both.
"""

TWO_TRANSFERS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
"""Compiler options, for `.compile(...)` or `jax.jit(compiler_options=...)`. Two directions need
two transfers at the same time, and XLA:GPU allows one by default.
"""


def gather_column(
    x: Array,
    kernel: Array,
    dimension_numbers: Any,
    *,
    bidirectional: bool = False,
    **options: Any,
) -> Array:
    """Computes the same as `tensor_parallel.gather_column`: this device's columns of the
    product, for the whole sequence.

    Args:
      x: this device's part of the sequence, [B, L / n, ...].
      kernel: this device's columns.
      dimension_numbers: as for `jax.lax.dot_general`.
      bidirectional: whether half of the parts travel the other way around the ring.
      **options: as for `jax.lax.dot_general`.
    """
    multiply = functools.partial(
        _product, kernel=kernel, dimension_numbers=dimension_numbers, options=options
    )
    right, left = collectives.hops(AXIS, bidirectional)
    parts = {
        by: collectives.shift(x, AXIS, by) for by, steps in ((1, right), (-1, left)) if steps
    }
    parts, own = jax.lax.optimization_barrier((parts, multiply(x)))
    # products[1]: of parts that devices before this one sent; products[-1]: those after it
    products: dict[int, list[Array]] = {1: [], -1: []}
    for step in range(1, right + 1):
        arriving = {
            by: collectives.shift(parts[by], AXIS, by)
            for by, steps in ((1, right), (-1, left))
            if step < steps
        }
        arriving, computed = jax.lax.optimization_barrier(
            (arriving, {by: multiply(part) for by, part in parts.items()})
        )
        for by, product in computed.items():
            products[by].append(product)
        parts = arriving
    return collectives.join(products[1][::-1] + [own] + products[-1], -right, AXIS, LENGTH)


def row_scatter(
    x: Array,
    kernel: Array,
    dimension_numbers: Any,
    *,
    bidirectional: bool = False,
    **options: Any,
) -> Array:
    """Computes the same as `tensor_parallel.row_scatter`: the product summed over devices, for
    this device's part of the sequence.

    Args:
      x: this device's inputs, of the whole sequence: [B, L, ...].
      kernel: this device's rows.
      dimension_numbers: as for `jax.lax.dot_general`.
      bidirectional: whether half of the sums travel the other way around the ring.
      **options: as for `jax.lax.dot_general`.

    Raises:
      ValueError: if the number of devices does not divide L.
    """
    multiply = functools.partial(
        _product, kernel=kernel, dimension_numbers=dimension_numbers, options=options
    )
    right, left = collectives.hops(AXIS, bidirectional)
    parts = collectives.split(x, AXIS, LENGTH)
    # in each direction the parts for the other devices, the farthest first
    going = {1: parts[right:0:-1], -1: parts[right + 1 :]}
    totals = {by: multiply(some[0]) for by, some in going.items() if some}
    arrived = []
    for step in range(1, right + 1):
        following = {by: going[by][step] for by in totals if step < len(going[by])}
        if step == right:
            following[0] = parts[0]
        totals, following = jax.lax.optimization_barrier((totals, following))
        arriving = {by: collectives.shift(total, AXIS, by) for by, total in totals.items()}
        products = {by: multiply(part) for by, part in following.items()}
        arriving, products = jax.lax.optimization_barrier((arriving, products))
        totals = {by: arriving.pop(by) + products.pop(by) for by in totals if by in products}
        arrived += [*arriving.values(), *products.values()]
    return sum(arrived) if arrived else multiply(parts[0])


def hooks(mesh: Mesh, *, bidirectional: bool = False) -> Hooks:
    """Returns the hooks of sequence parallelism, with matmuls that overlap with communication.

    Args:
      mesh: with an axis "tensor".
      bidirectional: whether both directions of the ring are used.
    """
    column = functools.partial(gather_column, bidirectional=bidirectional)
    row = functools.partial(row_scatter, bidirectional=bidirectional)
    return dataclasses.replace(
        tensor_parallel.hooks(mesh, sequence=True), column=column, row=row
    )


def check(overlap: str, possible: bool) -> None:
    """Refuses an unknown way to overlap, or one without anything to overlap.

    Args:
      overlap: one of `OVERLAPS`.
      possible: whether the sequence is divided over "tensor", by hand.

    Raises:
      ValueError: naming the possible values.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap={overlap!r} must be one of {OVERLAPS}")
    if overlap != "none" and not possible:
        raise ValueError(
            f"overlap={overlap!r} must come with sequence=True and by='hand': the ring moves"
            " parts of the sequence"
        )


def _product(x: Array, kernel: Array, dimension_numbers: Any, options: Any) -> Array:
    return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
