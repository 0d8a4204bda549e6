"""Routing: sends each token to a few of many MLPs, the experts (mixture of experts).

A router gives each token a probability for each of E experts, and the token goes to the k most
probable (Shazeer et al., 2017, https://arxiv.org/abs/1701.06538; Lepikhin et al., 2020,
https://arxiv.org/abs/2006.16668; Fedus et al., 2021, https://arxiv.org/abs/2101.03961).
Parameters grow with E, FLOPs with k.

With a *capacity* (`route`), each expert has slots for C tokens per sequence. Tokens take slots
in the order of the sequence, so no token depends on a later one. A full expert skips a token
(*token dropping*). If all experts of a token are full, only the residual carries it on. Whether
a token is dropped depends on its own sequence alone, not on how sequences are divided among
devices. Dispatch multiplies by arrays of [B L E C] numbers, mostly zeros, as in the papers:
simple, but costly for long sequences, because E C grows with L.

*Dropless* (`dropless`; Gale et al., 2022, https://arxiv.org/abs/2211.15841), tokens are sorted
by expert, and a grouped product (`jax.lax.ragged_dot`) multiplies the rows of each expert by
its matrix, however many they are.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
    if num_experts < 1 or not 0 < factor < math.inf:
        raise ValueError(
            f"num_experts={num_experts}, factor={factor} must be at least 1, and finite and"
            " above 0: an expert needs slots"
        )
    _check_per_token(per_token, num_experts)
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
    if capacity < 1:
        raise ValueError(f"capacity={capacity} must be at least 1 slot per expert")
    chosen, probabilities, balance = choose(logits, per_token)
    batch, length, experts = logits.shape
    choices = jax.nn.one_hot(chosen, experts)  # [B L k E]
    in_line = choices.reshape(batch, length * per_token, experts)
    slots = ((jnp.cumsum(in_line, axis=1) - 1) * in_line).sum(axis=-1).reshape(chosen.shape)
    # [B L k C], all zeros where there is no free slot.
    taken = jax.nn.one_hot(slots.astype(jnp.int32), capacity)
    dispatch = jnp.einsum("blke,blkc->blec", choices, taken)
    return Routing(dispatch, dispatch * probabilities[..., None], balance)


class Choice(NamedTuple):
    """The experts of each token, whether or not they have a free slot.

    Attributes:
      chosen: the k most probable experts, the most probable first.
      probabilities: of all experts.
      balance: as in `Routing`.
    """

    chosen: Int[Array, "B L k"]
    probabilities: Float[Array, "B L E"]
    balance: Float[Array, " B"]


def choose(logits: Float[Array, "B L E"], per_token: int) -> Choice:
    """Returns each token's k most probable experts."""
    if logits.ndim != 3 or not logits.size:
        raise ValueError(f"logits must be [B L E] with at least one token, not {logits.shape}")
    experts = logits.shape[-1]
    _check_per_token(per_token, experts)
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, chosen = jax.lax.top_k(probabilities, per_token)
    often = jax.nn.one_hot(chosen, experts).mean(axis=(1, 2))
    balance = experts * (often * probabilities.mean(axis=1)).sum(axis=-1)
    return Choice(chosen, probabilities, balance)


def _check_per_token(per_token: int, experts: int) -> None:
    if not 1 <= per_token <= experts:
        raise ValueError(f"per_token={per_token} must be between 1 and the {experts} experts")


def dropless(
    run: Callable[[Array, Array], Array],
    x: Float[Array, "B L D"],
    logits: Float[Array, "B L E"],
    per_token: int,
) -> tuple[Float[Array, "B L D"], Float[Array, " B"]]:
    """Returns the sum of the results of each token's experts, times their probabilities, and
    the load-balancing loss. No token is dropped.

    Args:
      run: applies the experts to rows [R D], those of the first expert first. It also gets the
        number of rows of each expert [E].
      x: the tokens.
      logits, per_token: as in `route`.
    """
    if x.shape[:2] != logits.shape[:2]:  # JAX would clip the rows of `x` without a word
        raise ValueError(f"x.shape={x.shape} must begin as logits.shape={logits.shape}: B, L")
    chosen, probabilities, balance = choose(logits, per_token)
    order = jnp.argsort(chosen.reshape(-1))  # stable: an expert's tokens stay in their order
    sizes = jnp.bincount(chosen.reshape(-1), length=logits.shape[-1])
    tokens, flat = order // per_token, x.reshape(-1, x.shape[-1])
    weights = jnp.take_along_axis(probabilities, chosen, axis=-1).reshape(-1)[order]
    rows = run(flat[tokens], sizes) * weights[:, None].astype(x.dtype)
    return jnp.zeros_like(flat).at[tokens].add(rows).reshape(x.shape), balance


def grouped(
    rows: Float[Array, "R D"], kernels: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "R F"]:
    """Multiplies each row by the kernel of its expert; rows lie as in `dropless`, and what is
    beyond the last expert's becomes 0.

    On GPUs, the XLA of jaxlib 0.12 multiplies all rows by all kernels unless options and a new
    cuDNN are there, with a temporary array [R, E D]: notebook 14 shows it, and JAX's kernel
    without it.
    """
    return jax.lax.ragged_dot(rows, kernels, sizes)
