"""Muon on divided parameters: all-to-alls divide the stack of layers, so that each device makes
whole matrices orthogonal.
"""

import functools
import math
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from course_lib import optimizers
from course_lib.many_devices import meshes, sharding

PyTree = Any


def to_stacks(params: PyTree, specs: PyTree, mesh: meshes.AnyMesh) -> list[PyTree]:
    """Returns specs, then those that make Muon's matrices whole, axis by axis of the mesh: one
    cuts the stack of layers in place of another dimension. Where it does not divide the stack,
    or layers are unrolled, its cut stays: the compiler gathers in each of Muon's products.
    """

    def along(axis: str, dims: Any, leaf: Any, spec: P) -> P:
        stack = (*sharding.axes_of(spec[:1]), axis)
        divides = leaf.shape[0] % math.prod(mesh.shape[name] for name in stack) == 0
        if not dims or 0 in dims.reduction_axis or axis not in tuple(spec[1:]) or not divides:
            return spec
        return P(stack, *(None if name == axis else name for name in spec[1:]))

    # A leaf of the dims is None for what is no matrix, which `jax.tree.map` would leave out.
    trees, leaf = (optimizers.matrix_axes(params), params), lambda x: type(x) is not dict
    steps = [specs]
    for axis in (axis for axis in meshes.AXES if axis in mesh.shape):
        one = functools.partial(along, axis)
        steps.append(jax.tree.map(one, *trees, steps[-1], is_leaf=leaf))
    return steps


def on_stacks(
    optimizer: optax.GradientTransformation, params: PyTree, specs: PyTree, mesh: Mesh
) -> optax.GradientTransformation:
    """Lets Muon update whole matrices. Gradients, cut as `specs` say, go to their devices in
    all-to-alls, with weight decay parameters too, and updates come back; momentum stays there.
    """
    # The first place keeps the compiler from moving what gradients and updates are made of.
    places = [sharding.place(each, mesh) for each in to_stacks(params, specs, mesh)]
    move = functools.partial(functools.reduce, jax.lax.with_sharding_constraint)

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> Any:
        moved = move(places[1:], params)  # a parameter that is not cut is there already
        updates, state = optimizer.update(move(places, grads), state, moved)
        return move(places[::-1], updates), state

    return optax.GradientTransformation(optimizer.init, update)
