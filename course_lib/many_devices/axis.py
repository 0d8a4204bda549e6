"""A strategy as a value: what the mesh axis of its name divides, and how.

The list is `options.AXES`. Shardings, hooks, losses and errors are loops over it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ml_collections import ConfigDict

from course_lib.many_devices import sharding
from course_lib.models.hooks import Hooks

if TYPE_CHECKING:
    from course_lib.many_devices.options import Strategy


class Asked(NamedTuple):
    """What a run asks of its axes."""

    model: ConfigDict
    n: Mapping[str, int]  # devices along each axis of the mesh
    strategy: "Strategy"
    batch_size: int  # on all devices together
    seq_len: int
    num_minibatches: int
    accumulator_dtype: str

    @property
    def by_hand(self) -> bool:
        return self.strategy.by == "hand"


@dataclasses.dataclass(frozen=True)
class Axis:
    """A strategy, named like its mesh axis."""

    name: str
    # yields an error for each rule that is broken; called for a mesh without the axis, too
    errors: Callable[[Asked], Iterator[str]]
    # which mesh axes cut the dimensions that `sharding` names, of parameters and of activations
    params: sharding.Rules = dataclasses.field(default_factory=dict)
    activations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # by hand: adds one device's part of the model to the hooks of other axes
    hooks: Callable[[Hooks], Hooks] = lambda hooks: hooks
    # by hand: takes a device's part of an array [B L ...] of tokens, where devices along the
    # axis have other labels; the loss is summed over them
    own: Callable[..., Any] | None = None
