"""A strategy as a value: what the mesh axis of its name divides, and how.

The module of a strategy ends with its `Axis`; `meshes.MODULES` lists the modules. Shardings,
hooks, losses and errors are loops over the axes that a mesh uses (`used`). Two rules depend on
the `Strategy`, too, and stand in `strategies`: ZeRO's (`layout_of`) and that of sequence
parallelism (`activation_rules`). What an axis sends is a generator of its name in
`planner.events`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from course_lib.many_devices import meshes, sharding
from course_lib.models.hooks import Hooks
from course_lib.models.losses import Score

if TYPE_CHECKING:
    from course_lib.many_devices.options import Strategy

PyTree = Any


class Asked(NamedTuple):
    """A run, as its axes see it."""

    config: ConfigDict  # whose batch is that of all devices together
    n: Mapping[str, int]  # devices along each axis of the mesh
    strategy: "Strategy"

    @property
    def model(self) -> ConfigDict:
        return self.config.model

    @property
    def by_hand(self) -> bool:
        return self.strategy.by == "hand"


class Share(NamedTuple):
    """One device's part of a run."""

    config: ConfigDict
    mesh: Any  # `meshes.AnyMesh`; by hand it has devices
    strategy: "Strategy"
    params: PyTree  # specs of the parameters
    grads: PyTree  # specs of their gradients

    @property
    def model(self) -> ConfigDict:
        return self.config.model


@dataclasses.dataclass(frozen=True)
class Axis:
    """A strategy, named like its mesh axis."""

    name: str
    # yields an error for each rule that is broken on a mesh with the axis
    errors: Callable[[Asked], Iterator[str]]
    # which mesh axes cut the dimensions that `sharding` names, of parameters and of activations
    params: sharding.Rules = dataclasses.field(default_factory=dict)
    activations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # by hand: how one device's part of the model differs from the whole model
    hooks: Callable[[Share], Hooks] = lambda share: Hooks()
    # by hand: the cross entropy of one device's part of the logits; None for that of all
    score: Callable[[Share], Score | None] = lambda share: None
    # by hand: takes a device's part of an array [B L ...] of tokens, where devices along the
    # axis have other labels; the loss is summed over them
    own: Callable[..., Any] | None = None


def used(mesh: meshes.AnyMesh) -> list[Axis]:
    """Returns the strategies that a mesh uses, and loads their modules."""
    folder = __name__.rpartition(".")[0]
    modules = {
        name: importlib.import_module(f"{folder}.{meshes.MODULES[name]}")
        for name in meshes.AXES
        if name in mesh.shape
    }
    return [getattr(module, name.upper()) for name, module in modules.items()]
