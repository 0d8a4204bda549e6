"""The two products of tensor parallelism, with communication that runs while they compute.

`tensor_parallel.gather_column` waits for the whole sequence before it multiplies, and
`tensor_parallel.row_scatter` multiplies all of it before it sends any. Here the sequence
travels around a ring of devices, part by part (Wang et al., 2023,
https://doi.org/10.1145/3567955.3567959; Dehghani et al., 2023,
https://arxiv.org/abs/2302.05442, section 2.2):

    column    multiply the part that is here, while the next one arrives
    row       multiply the part of the device that is farthest away first, and send its sum on
              while the next is multiplied

As many bytes are sent as by the collective, in n - 1 steps of which each hides behind a
product, if that takes as long. With `bidirectional`, half of the parts go around the other way,
and the ring needs half of the steps. Their gradients are rings as well, which JAX derives.

`jax.lax.optimization_barrier` ties a transfer to the product that it runs beside. Without it
XLA may send first and multiply later, or merge the small products into one large one: either
leaves transfers that nothing runs beside.
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
"""How the products can communicate: before or after they compute, or meanwhile, around a ring
in one or both directions.
"""

TWO_TRANSFERS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
"""For `.compile(...)` or `jax.jit(compiler_options=...)`: XLA:GPU keeps one transfer in flight,
two ways need two.
"""


def gather_column(
    x: Array,
    kernel: Array,
    dimension_numbers: Any,
    *,
    bidirectional: bool = False,
    **options: Any,
) -> Array:
    """As `tensor_parallel.gather_column`: this device's columns of the product, for the whole
    sequence.

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
    # 1: with the parts of the devices before this one; -1: of those after it
    products: dict[int, list[Array]] = {1: [], -1: []}
    for step in range(1, right + 1):
        arriving = {
            by: collectives.shift(parts[by], AXIS, by)
            for by, steps in ((1, right), (-1, left))
            if step < steps
        }
        arriving, found = jax.lax.optimization_barrier(
            (arriving, {by: multiply(part) for by, part in parts.items()})
        )
        for by, product in found.items():
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
    """As `tensor_parallel.row_scatter`: this device's part of the sequence, of the product
    summed over devices.

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
    # for the devices on the way, the farthest first
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
    """Returns the hooks of sequence parallelism whose products communicate while they compute.

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
    """Refuses a way to overlap that does not exist, or that there is nothing for.

    Args:
      overlap: one of `OVERLAPS`.
      possible: whether the sequence is divided over "tensor", by hand.

    Raises:
      ValueError: naming what it may be.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap={overlap!r} must be one of {OVERLAPS}")
    if overlap != "none" and not possible:
        raise ValueError(
            f"overlap={overlap!r} must come with sequence=True and by='hand': parts of"
            " sequences move"
        )


def _product(x: Array, kernel: Array, dimension_numbers: Any, options: Any) -> Array:
    return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
