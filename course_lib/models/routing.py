"""Routing: sends each token to a few of many MLPs, the experts (mixture of experts).

A router gives each token a probability for each of E experts, and the token goes to the k most
probable (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538; Lepikhin et al., 2020,
https://arxiv.org/abs/2006.16668; Fedus et al., 2021, https://arxiv.org/abs/2101.03961).
Parameters grow with E, FLOPs with k.

Shapes are fixed, so each expert has slots for C tokens per sequence. Tokens take slots in the
order of the sequence, so no token depends on a later one. A full expert skips a token (*token
dropping*). If all experts of a token are full, only the residual carries it on. Whether a token
is dropped depends on its own sequence alone, not on how sequences are divided among devices.
Dispatch multiplies by arrays of [B L E C] numbers, mostly zeros, as in the papers: simple, but
costly for long sequences, because E C grows with L.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Routing(NamedTuple):
    """The slots of experts that the tokens of each sequence take.

    Attributes:
      dispatch: 1 where a token has that slot of that expert, else 0.
      combine: the same, times the router's probability.
      balance: the load-balancing loss: 1 if all experts are chosen equally often, E / k if all
        tokens choose the same k with certainty. Its gradient makes popular experts less
        probable.
    """

    dispatch: Float[Array, "B L E C"]
    combine: Float[Array, "B L E C"]
    balance: Float[Array, " B"]


def capacity(length: int, num_experts: int, per_token: int, factor: float) -> int:
    """Returns C, the slots of an expert for L tokens, k experts per token: `factor` times its
    even share, rounded up, at most L. Tokens beyond C are dropped.
    """
    if num_experts < 1 or not factor > 0:
        raise ValueError(
            f"num_experts={num_experts}, factor={factor} must be at least 1 and above 0: an"
            " expert needs slots"
        )
    # Less 1e-9, because 10 * 1.1 is a little more than 11 in floating point.
    return min(length, math.ceil(per_token * length * factor / num_experts - 1e-9))


def route(logits: Float[Array, "B L E"], per_token: int, capacity: int) -> Routing:
    """Sends each token to its most probable experts that have a free slot.

    Args:
      logits: the router's, in float32: in bfloat16 the choice would depend on rounding (Fedus
        et al., section 2.4).
      per_token: k, the experts of a token.
      capacity: C, the slots of an expert per sequence.
    """
    if logits.ndim != 3 or not logits.size:
        raise ValueError(f"logits must be [B L E] with at least one token, not {logits.shape}")
    batch, length, experts = logits.shape
    if not 1 <= per_token <= experts:
        raise ValueError(f"per_token={per_token} must be between 1 and the {experts} experts")
    if capacity < 1:
        raise ValueError(f"capacity={capacity} must be at least 1 slot per expert")
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, chosen = jax.lax.top_k(probabilities, per_token)
    choices = jax.nn.one_hot(chosen, experts)  # [B L k E]
    in_line = choices.reshape(batch, length * per_token, experts)
    places = ((jnp.cumsum(in_line, axis=1) - 1) * in_line).sum(axis=-1).reshape(chosen.shape)
    # [B L k C], all zeros where there is no room.
    rooms = jax.nn.one_hot(places.astype(jnp.int32), capacity)
    dispatch = jnp.einsum("blke,blkc->blec", choices, rooms)
    balance = experts * (in_line.mean(axis=1) * probabilities.mean(axis=1)).sum(axis=-1)
    return Routing(dispatch, dispatch * probabilities[..., None], balance)
