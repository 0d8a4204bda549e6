"""Expert parallelism: each device has some of the experts of every layer, and tokens travel to
the experts that the router chose.

The devices along the axis "expert" divide the batch too: those with the same index along "data"
share the sequences of that index equally, as if "data" were longer. Each of the n devices has
all parameters except experts, and E / n of the E experts of each layer. An expert has C slots
for a sequence (the capacity). An all-to-all stands between the router and the experts (Lepikhin
et al., 2020, https://arxiv.org/abs/2006.16668): each device begins with the slots of its own
sequences at all experts, [E B C D], and ends with the slots of all devices' sequences at its
own experts. A second all-to-all brings the results back:

    dispatch   [E, B, C, D] -> [E / n, n B, C, D]
    combine    [E / n, n B, C, D] -> [E, B, C, D]

Without a capacity (`model.dropless`) the rows of unequal groups travel (`exchange_rows`).

The transposes of both are all-to-alls as well, so a layer has two in each pass. The gradient of
an expert needs no sum along "expert", since the expert receives the tokens of all devices of
that axis; it is summed along "data". All other gradients are summed along both axes.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from course_lib import arguments
from course_lib.many_devices import meshes, sharding
from course_lib.many_devices.axis import Asked, Axis
from course_lib.many_devices.meshes import vary, varying
from course_lib.models.hooks import Hooks

AXIS = "expert"
Experts = Callable[[Array], Array]


def own_sequences(x: Shaped[Array, "B ..."]) -> Shaped[Array, "B_n ..."]:
    """Takes this device's sequences from those of all devices along the axis."""
    n = jax.lax.axis_size(AXIS)
    meshes.check_divides(x.shape, 0, AXIS, n, "batch")
    size = x.shape[0] // n
    return jax.lax.dynamic_slice_in_dim(vary(x, AXIS), jax.lax.axis_index(AXIS) * size, size)


def exchange(run: Experts, tokens: Float[Array, "E B C D"]) -> Float[Array, "E B C D"]:
    """Sends tokens to the devices of their experts, runs the experts, and sends the results
    back.

    Args:
      run: this device's experts, [E/n, n B, C, D] to the same shape.
      tokens: of this device's sequences, for all experts.
    """
    there = jax.lax.all_to_all(tokens, AXIS, split_axis=0, concat_axis=1, tiled=True)
    return jax.lax.all_to_all(run(there), AXIS, split_axis=1, concat_axis=0, tiled=True)


def exchange_rows(
    run: Callable[[Array, Array], Array], rows: Float[Array, "R D"], sizes: Int[Array, " E"]
) -> Float[Array, "R D"]:
    """Sends rows to the devices of their experts, runs the experts, and sends the results back.

    Shapes are fixed, so a device has room for the rows of all devices, n R. It receives as many
    as chose its experts.

    Args:
      run: this device's experts, as in `routing.dropless`.
      rows: of this device's tokens, sorted by expert.
      sizes: rows of each expert.
    """
    n, me = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    counts = jax.lax.all_gather(sizes, AXIS).reshape(n, n, -1)  # from, to, expert there
    travelling, mine = counts.sum(axis=-1), counts[:, me]
    there = travel(rows, travelling, n * len(rows))
    # They lie by sender, then by expert. Rows that are not used stay behind the last expert's.
    experts = jnp.tile(jnp.arange(mine.shape[1]), n)
    of_rows = jnp.repeat(experts, mine.reshape(-1), total_repeat_length=len(there))
    order = jnp.argsort(of_rows)
    results = jnp.zeros_like(there).at[order].set(run(there[order], mine.sum(axis=0)))
    return travel(results, travelling.T, len(rows))


def travel(
    rows: Float[Array, "R D"], counts: Int[Array, "n n"], space: int
) -> Float[Array, "S D"]:
    """Sends each device its part of the rows (a ragged all-to-all).

    The backend XLA:CPU has none. There an all-to-all of equal parts stands in for it, each as
    large as the largest possible.

    Args:
      rows: those for device 0 first.
      counts: `counts[i, j]` rows travel from device i to device j.
      space: S, rows of the result, at least as many as arrive. Those of device 0 are first, and
        zeros follow the last.
    """
    me = jax.lax.axis_index(AXIS)
    arrive, of_senders = counts[:, me], counts.cumsum(axis=1) - counts

    def padded(rows: Array) -> Array:
        block = jnp.arange(min(len(rows), space))  # no device sends another one more
        parts = rows.at[of_senders[me][:, None] + block[None]].get(mode="fill", fill_value=0)
        parts = jax.lax.all_to_all(parts, AXIS, split_axis=0, concat_axis=0, tiled=True)
        ends, place = arrive.cumsum(), jnp.arange(space)
        sender = (place[:, None] >= ends[None]).sum(axis=1)  # n behind the last row
        row = place - (ends - arrive)[sender]
        return parts.at[sender, row].get(mode="fill", fill_value=0)

    def ragged(rows: Array) -> Array:
        # JAX takes the axes over which the result varies from the room, not from the rows.
        room = vary(jnp.zeros((space, rows.shape[1]), rows.dtype), sorted(varying(rows)))
        places = (counts.cumsum(axis=0) - counts)[me]
        return jax.lax.ragged_all_to_all(
            rows, room, of_senders[me], counts[me], places, arrive, axis_name=AXIS
        )

    return jax.lax.platform_dependent(rows, cpu=padded, default=ragged)


def errors(asked: Asked) -> Iterator[str]:
    """Yields what a model and a mesh must not ask of the axis."""
    experts, size = asked.model.num_experts, asked.n[AXIS]
    if not experts:
        yield (
            f"num_experts=0 means a model without experts, so the {size} devices of a mesh"
            f" axis {AXIS!r} have none to divide: num_experts must be a multiple of {size}, or"
            " the axis left out"
        )
    yield from arguments.shared("num_experts", experts, size, f"devices along {AXIS!r}")
    minibatches = asked.n["data"] * asked.config.training.num_minibatches
    sequences = asked.config.data.batch_size // minibatches
    if sequences % size:
        yield (
            f"batch_size gives {sequences} sequences per minibatch to each index of 'data', and"
            f" must give a multiple of {size}: the {size} devices along {AXIS!r} share them"
        )


EXPERT = Axis(
    AXIS,
    errors,
    params=sharding.EXPERTS,
    activations={**sharding.EXPERTS, "batch": ("data", AXIS)},
    hooks=lambda share: Hooks(experts=exchange_rows if share.model.dropless else exchange),
    own=own_sequences,
)
