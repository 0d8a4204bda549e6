"""Checks of notebook 14's exercises."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    run,
    same_shapes,
)
from course_lib.lessons.check.many_devices import (
    compiled,
    gradient,
    normal,
    row_of_devices,
    spread,
)
from course_lib.models import routing


@exercise
def places(your_places):
    """Checks `your_places(experts, E, C)`: the place of each token at its expert, or -1.

    `experts` [S] names the expert of each token. An expert has C places. Tokens take them in
    order; a token that finds no place is dropped.
    """
    experts, right = [0, 0, 1, 0, 2, 1, 0, 1], [0, 1, 0, -1, 0, 1, -1, -1]
    hint = "First write down by hand the places for experts 0, 0, 1, 0 with C = 2."
    yours = _list(call(your_places, jnp.array(experts), 4, 2, hint=hint))
    require(
        len(yours) == len(experts),
        f"{len(experts)} tokens need {len(experts)} places, not {len(yours)}.",
    )
    require(
        yours != [0, 1, 0, 2, 0, 1, 3, 2],
        "Your function drops no token: a place must be below C = 2.",
    )
    require(
        yours != [1, 2, 1, -1, 1, 2, -1, -1] and yours != [1, -1, 1, -1, 1, -1, -1, -1],
        "Places begin at 0: count the tokens before this one, without itself.",
    )
    require(
        yours not in ([-1, -1, -1, 0, 0, 0, 1, 1], [-1, -1, -1, 1, 0, 1, 0, 0]),
        "The last tokens get the places, so whether a token is dropped depends on later ones.",
    )
    require(
        all(-1 <= place < 2 for place in yours),
        f"Places are 0 and 1, or -1 for a dropped token; you return {yours}.",
    )
    taken = [pair for pair in zip(experts, yours, strict=True) if pair[1] >= 0]
    twice = [pair for pair in taken if taken.count(pair) > 1]
    require(
        not twice,
        "Several tokens have place {1} of expert {0}: a place holds one token.".format(
            *(twice or [(0, 0)])[0]
        ),
    )
    require(
        yours == right,
        f"For the experts {experts} and C = 2, {right} is expected, not {yours}.",
    )
    for experts, count, room, right in (
        ([3, 3, 3], 4, 1, [0, -1, -1]),
        ([0, 1, 2, 1], 3, 4, [0, 0, 0, 1]),
    ):
        yours = _list(run(your_places, jnp.array(experts), count, room))
        require(
            yours == right,
            f"For the experts {experts} and C = {room}, {right} is expected, not {yours}.",
        )
    return "and nothing depends on later tokens."


@exercise
def least_room(factor):
    """Checks the smallest capacity factor with which at most 1% of the tokens are dropped. The
    tokens choose experts at random, as in the exercise `dropped`.
    """
    predicted(
        factor,
        hint="An expert gets 64 tokens on average, with a standard deviation of 7.5. It has"
        " 64 * factor places.",
    )
    logits = jax.random.normal(jax.random.key(0), (64, 512, 8))
    require(factor >= 1, f"At {factor:g}, all experts together have fewer places than tokens.")
    lost = _percent_dropped(logits, factor)
    require(
        lost <= 1,
        f"At {factor:g}, {lost:.2f}% of the tokens are dropped. Measure with a larger factor.",
    )
    less = factor - 1 / 64  # one place fewer
    fewer = _percent_dropped(logits, less)
    require(
        fewer > 1,
        f"It can be smaller: at {less:.2f}, {fewer:.2f}% are dropped. Fewer places save"
        " memory, FLOPs and bytes of the all-to-alls.",
    )
    return (
        f"{lost:.1f}% are dropped, with {100 - 100 * factor / 2:.0f}% less room than at factor"
        " 2."
    )


def _percent_dropped(logits, factor):
    """Returns how many of the tokens find no room, in percent. Each chooses one expert."""
    room = routing.capacity(512, num_experts=8, per_token=1, factor=factor)
    return 100 * (1 - float(routing.route(logits, 1, room).dispatch.sum()) / (64 * 512))


def _list(places):
    return [int(place) for place in jnp.asarray(places).reshape(-1)]


@exercise
def dropped(at_one, at_two):
    """Checks which percentage of tokens finds no room at capacity factors 1 and 2. Each of 512
    tokens per sequence chooses one of eight experts at random.
    """
    predicted(
        at_one,
        at_two,
        hint="How many of 512 tokens does an expert get on average, and with which standard"
        " deviation?",
    )
    logits = jax.random.normal(jax.random.key(0), (64, 512, 8))
    lost = [_percent_dropped(logits, factor) for factor in (1.0, 2.0)]
    require(
        at_one > 0,
        "Some are dropped at factor 1: chance fills some experts before others.",
    )
    require(
        at_one >= 1 or lost[0] < 1,
        f"Percentages, please: {at_one:g}% of 64 tokens is less than one token.",
    )
    require(
        at_one < 20,
        f"{at_one:g}% is too many at factor 1: the number of tokens at an expert has a standard"
        " deviation of 7.5, about an eighth of 64.",
    )
    require(
        not 5.1 <= at_one < 13,
        f"{at_one:g}% is too many at factor 1: half of the experts get more than 64 tokens."
        " They exceed 64 by 0.8 standard deviations on average, not by a whole one.",
    )
    # A normal distribution predicts 4.7. Answers in whole percent are accepted.
    require(
        abs(at_one - lost[0]) < 0.75,
        f"{at_one:g}% is too {'many' if at_one > lost[0] else 'few'} at factor 1. An expert"
        " drops what exceeds its 64 places: 0.4 standard deviations on average over all"
        " experts. Which share of 64 is this?",
    )
    require(
        abs(at_two - lost[1]) < 0.1,
        f"{at_two:g}% is too many at factor 2: an expert has 128 places. How many standard"
        " deviations of 7.5 is this above 64?",
    )
    return f"measured, {lost[0]:.1f}% at factor 1 and {lost[1]:.1f}% at factor 2."


@exercise
def expert_layer(your_layer):
    """Checks `your_layer(room, up, down)`: eight experts on four devices along "expert".

    `room` [E C D] has the device's own tokens, in C places of each of the E experts. `up`
    [E/4 D F] and `down` [E/4 F D] are the device's own experts; an expert computes
    gelu(x up) down. In the result [E C D], each token's output is in the token's place. Result,
    gradient and bytes are compared.
    """
    n, E, C, D, F = 4, 8, 2, 3, 5
    mesh, cut = row_of_devices("expert", n), P("expert")
    room, up, down, weights = normal(7, (n * E, C, D), (E, D, F), (E, F, D), (n * E, C, D))

    def experts(room, up, down, activation=jax.nn.gelu):
        hidden = activation(jnp.einsum("ecd,edf->ecf", room, up))
        return jnp.einsum("ecf,efd->ecd", hidden, down)

    def of_all(room, up, down, activation=jax.nn.gelu):
        run_all = functools.partial(experts, activation=activation)
        each = jax.vmap(run_all, (0, None, None))(room.reshape(n, E, C, D), up, down)
        return each.reshape(room.shape)

    def alone(room, up, down):
        return experts(room, jnp.tile(up, (n, 1, 1)), jnp.tile(down, (n, 1, 1)))

    divided = spread(
        your_layer,
        mesh,
        (cut,) * 3,
        cut,
        hint="`jax.lax.all_to_all(x, 'expert', split_axis, concat_axis, tiled=True)` brings"
        " each device the tokens of its own experts. On the way back the two axes change"
        " places.",
    )
    yours, ledger = compiled(divided, mesh, room, up, down)
    with jax.default_matmul_precision("highest"):
        right = of_all(room, up, down)
        right_gradient = gradient(of_all, weights)(room, up, down)
        exact = functools.partial(jax.nn.gelu, approximate=False)
        others = [
            of_all(room, up, down, other)
            for other in (jnp.asarray, jax.nn.relu, jax.nn.silu, exact)
        ]
        own = jax.shard_map(alone, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)(
            room, up, down
        )
    require(
        jnp.shape(yours) != (E, n * C, D),
        "These are the outputs of the device's own experts, for the tokens of all devices. Send"
        " each output back to the device of its token.",
    )
    same_shapes(yours, right, "the output")
    require(
        not close(yours, own),
        "Each device uses its own two experts only, even for tokens that chose others.",
    )
    require(
        not any(close(yours, other) for other in others),
        "The tokens met their experts, but an expert has `jax.nn.gelu`, as it is by default,"
        " between its two products.",
    )
    require(
        close(yours, right),
        "Not the outputs of the experts that the tokens chose. After each of the two exchanges,"
        " along which axis do the tokens of different devices lie?",
    )
    gathered = ledger.payload("all-gather")
    require(
        gathered == 0,
        f"The right output, but {gathered} bytes are gathered. Each token has a place at one"
        " expert: send it only there.",
    )
    most = 2 * right.nbytes // n
    require(
        ledger.payload() <= most,
        f"The right output, but {ledger.payload()} bytes are exchanged; the tokens take {most},"
        " there and back.",
    )
    grads, _ = compiled(gradient(divided, weights), mesh, room, up, down)
    require(close(grads, right_gradient), "The output is right, its gradient is not.")
    return f"two all-to-alls of {right.nbytes // n} bytes, of which 3/4 leave the device."
