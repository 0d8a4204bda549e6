"""How one device's share of the model differs from the whole model.

A parallel strategy passes `Hooks` to the model; by default they change nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from course_lib.models import attention


def _lookup(table: Float[Array, "V D"], tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    return jnp.take(table, tokens, axis=0)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that replace parts of the model on one of many devices. The defaults are the
    model's own parts.

    Attributes:
      shards: the number of parts into which the heads, the MLP's hidden width and the
        vocabulary are cut. Each device has one part.
      column: the matrix multiplication of a layer whose outputs are cut over devices
        (column-parallel), with the arguments of `jax.lax.dot_general`; None for the model's
        own.
      row: the same for a layer whose inputs are cut (row-parallel). The bias is added once, to
        the sum over devices.
      output: takes the activations, the kernel and the bias (or None) of the output layer, and
        returns the model's output in place of logits; None for logits.
      lookup: reads rows of the token table.
      positions: takes the number of tokens per sequence that reach the model on this device,
        and returns their positions.
      attend_positions: takes the number of queries or keys that reach this device's attention,
        and returns their positions.
      attend: replaces `attention.attend`, with the same arguments.
      named: gives a value one of the names in `layers.NAMES`, which remat policies use. It may
        also place the value on devices.
      params: changes the parameters of the model before anything reads them.
      layer: wraps a layer, `f(params, x, key)`, to change the parameters that it sees.
      own_key: changes the random key of dropout, for a device with its own part of the
        sequence: it drops other values than its neighbours.
      experts: takes `run`, a function that applies this device's experts, and tokens [E B C D]
        for all experts; returns the results of all experts. In a dropless model it takes rows
        [R D] sorted by expert, and the number of each expert's rows [E], as `run` does.
    """

    shards: int = 1
    column: Callable[..., Array] | None = None
    row: Callable[..., Array] | None = None
    output: Callable[..., Any] | None = None
    lookup: Callable[..., Array] = _lookup
    positions: Callable[[int], Array] = jnp.arange
    attend_positions: Callable[[int], Array] = jnp.arange
    attend: Callable[..., Array] = attention.attend
    named: Callable[[Array, str], Array] = checkpoint_name
    params: Callable[[Any], Any] = lambda params: params
    layer: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda layer: layer
    own_key: Callable[[Any], Any] = lambda key: key
    experts: Callable[..., Array] = lambda run, *tokens: run(*tokens)

    def __or__(self, others: "Hooks") -> "Hooks":
        """Returns these hooks, and in place of them what the others change. Two changes of one
        part are refused: the first would be lost.
        """
        changed = {}
        for field in dataclasses.fields(Hooks):
            ours, value = getattr(self, field.name), getattr(others, field.name)
            if value is not field.default:
                if ours is not field.default and ours is not value:
                    raise ValueError(f"hooks.{field.name} must be changed once, not twice")
                changed[field.name] = value
        return dataclasses.replace(self, **changed)
