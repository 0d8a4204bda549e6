"""How one device's share of the model differs from the whole model.

A parallel strategy passes `Hooks` to the model; by default they change nothing.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from course_lib.models import attention


def _lookup(table: Float[Array, "V D"], tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    return jnp.take(table, tokens, axis=0)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Replaces parts of the model on one of many devices. By default it replaces nothing.

    Attributes:
      shards: the number of parts into which the heads, the MLP's hidden width and the
        vocabulary are cut: one device has one.
      column: the product of a layer whose outputs are cut, as `jax.lax.dot_general`; None for
        the model's own.
      row: the product of a layer whose inputs are cut, or None; the bias is added once, to the
        sum over devices.
      lookup: reads rows of the token table.
      positions: the positions that this device has of a sequence of L tokens.
      attend_positions: the positions of the queries and keys that reach this device's
        attention, by their number.
      attend: as `attention.attend`.
      named: marks a value of `layers.NAMES`, for rematerialization; may also say where it is
        placed.
      layer: wraps the class of a layer, to change the parameters that it sees.
      experts: runs this device's experts, a function, on tokens [E B C D] for all of them.
    """

    shards: int = 1
    column: Callable[..., Array] | None = None
    row: Callable[..., Array] | None = None
    lookup: Callable[..., Array] = _lookup
    positions: Callable[[int], Array] = jnp.arange
    attend_positions: Callable[[int], Array] = jnp.arange
    attend: Callable[..., Array] = attention.attend
    named: Callable[[Array, str], Array] = checkpoint_name
    layer: Callable[[type[nn.Module]], type[nn.Module]] = lambda module: module
    experts: Callable[[Callable[[Array], Array], Array], Array] = lambda run, tokens: run(
        tokens
    )
