"""Checks of notebook 14's exercises, on four devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.exercises import Function, Numbered, Numbers, Outcome, is_wrong
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices, normal
from course_lib.models import routing


def placed(experts, E, C, *, first=0, counts_first=False, drops=True, later=False):
    """Gives each token a place at its expert, from a number on, or -1; `later` tokens first."""
    order, places = [int(expert) for expert in experts], []
    for t, expert in enumerate(order):
        count = (order[t + 1 :] if later else order[:t]).count(expert)
        is_dropped = drops and count + first * counts_first >= C
        places.append(-1 if is_dropped else count + first)
    return places


def last_ones(experts, E, C):
    """Gives the places to the last tokens of an expert, in order."""
    stays = [place >= 0 for place in placed(experts, E, C, later=True)]
    order = [int(expert) if stay else -1 for expert, stay in zip(experts, stays, strict=True)]
    return [
        place if stay else -1 for place, stay in zip(placed(order, E, C), stays, strict=True)
    ]


class Places(Outcome):
    """The places of some tokens."""

    experts = property(lambda it: it.args[0].tolist())
    C = property(lambda it: it.args[2])
    places = property(lambda it: [int(place) for place in np.ravel(it.result)])
    wanted = property(lambda it: len(it.experts))
    count = property(lambda it: len(it.places))

    @property
    def twice(self):
        """An expert and its place that several tokens have."""
        pairs = zip(self.experts, self.places, strict=True)
        taken = [pair for pair in pairs if pair[1] >= 0]
        return next((pair for pair in taken if taken.count(pair) > 1), None)


places = Function(
    "places",
    placed,
    cases=lambda: [
        (jnp.array(experts), E, C)
        for experts, E, C in (
            ([0, 0, 1, 0, 2, 1, 0, 1], 4, 2),
            ([3, 3, 3], 4, 1),
            ([0, 1, 2, 1], 3, 4),
        )
    ],
    name=None,
    outcome=Places,
    rows={
        "count": (lambda experts, E, C: [0], lambda it: it.case == 0 and it.count != it.wanted),
        "drops none": dict(drops=False),
        "from 1": [dict(first=1), dict(first=1, counts_first=True)],
        "later": [dict(later=True), last_ones],
        "range": (
            dict(first=4),
            lambda it: it.case == 0 and not all(-1 <= place < 2 for place in it.places),
        ),
        "twice": (
            lambda experts, E, C: [place % C for place in placed(experts, E, C, drops=False)],
            lambda it: it.case == 0 and it.twice,
        ),
        "another": (
            [
                lambda experts, E, C: placed(experts, E, 1),
                lambda experts, E, C: placed(experts, E, 2),
            ],
            lambda it: it.places != it.right,
        ),
    },
)


@functools.cache
def percent_dropped(factor):
    """Returns how many of the tokens find no room, in percent. Each chooses one expert."""
    logits = jax.random.normal(jax.random.key(0), (64, 512, 8))
    room = routing.capacity(512, num_experts=8, per_token=1, factor=factor)
    return 100 * (1 - float(routing.route(logits, 1, room).dispatch.sum()) / (64 * 512))


class Dropped(Numbered):
    """How far predictions are off, in percent of the tokens."""

    def error(self, name):
        return abs(self.yours[name] - self.right[name])


dropped = Numbers(
    "dropped",
    lambda: {"at_one": percent_dropped(1.0), "at_two": percent_dropped(2.0)},
    outcome=Dropped,
    rows={
        "at_one": {
            "none": (0, lambda it: it.yours["at_one"] <= 0),
            "percent": (0.043, lambda it: it.yours["at_one"] < 1 <= it.right["at_one"]),
            "many": (50, lambda it: it.yours["at_one"] >= 20),
            "deviation": (
                [100 * 7.5 / 64 / 2, 100 * 7.5 / 64],
                lambda it: 5.1 <= it.yours["at_one"] < 13,
            ),
            # A normal distribution predicts 4.7. Answers in whole percent are accepted.
            "another": ([2.3, 15], lambda it: it.error("at_one") >= 0.75),
        },
        "at_two": {"factor 2": ([2, 0.4], lambda it: it.error("at_two") >= 0.1)},
    },
)


class Room(Numbered):
    """The percentages of tokens dropped with a factor, and with one place per expert fewer."""

    factor = property(lambda it: it.yours["factor"])
    less = property(lambda it: it.factor - 1 / 64)
    lost = property(lambda it: percent_dropped(it.factor))
    fewer = property(lambda it: percent_dropped(it.less))
    saved = property(lambda it: 100 - 100 * it.factor / 2)


least_room = Numbers(
    "least_room",
    lambda: {"factor": 1.12},
    outcome=Room,
    rows={
        "factor": {
            "below 1": (0.9, lambda it: not it.factor >= 1),
            "dropped": (1.03, lambda it: it.lost > 1),
            "smaller": (1.14, lambda it: it.fewer <= 1),
        }
    },
)


def experts(tokens, up, down, activation=jax.nn.gelu):
    hidden = activation(jnp.einsum("ecd,edf->ecf", tokens, up))
    return jnp.einsum("ecf,efd->ecd", hidden, down)


def exact_gelu(x):
    """GELU by a formula for erf (Abramowitz and Stegun, 7.1.26), which JAX 0.10 cannot compute
    inside `jax.shard_map`.
    """
    t = 1 / (1 + 0.3275911 * jnp.abs(x) / 2**0.5)
    factors = jnp.array([1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0])
    erf = jnp.sign(x) * (1 - jnp.polyval(factors, t) * jnp.exp(-(x**2) / 2))
    return x * (1 + erf) / 2


def exchange(x, split, join):
    return jax.lax.all_to_all(x, "expert", split, join, tiled=True)


def layer(room, up, down, *, back=exchange, activation=jax.nn.gelu, backward=lambda x: x):
    """Sends tokens to the devices of their experts, and the outputs back."""
    return back(experts(backward(exchange(room, 0, 1)), up, down, activation), 1, 0)


def own_experts(room, up, down):
    return experts(room, jnp.tile(up, (4, 1, 1)), jnp.tile(down, (4, 1, 1)))


def gathered_experts(room, up, down):
    return experts(room, *(jax.lax.all_gather(w, "expert", tiled=True) for w in (up, down)))


def mixed_axes(out, *_):
    """Splits the places, not the experts, on the way back."""
    return exchange(out.reshape(8, 2, -1), 0, 0)


def twice(room, up, down):
    return exchange(exchange(layer(room, up, down), 0, 1), 1, 0)


class Exchanged(OnDevices):
    """The bytes of all-to-alls."""

    part = property(lambda it: it.right.nbytes // 4)
    most = property(lambda it: 2 * it.part)


def tokens_and_experts():
    """Numbers for which GELU differs from its exact form."""
    room, up, down = normal(9, (32, 2, 3), (8, 3, 5), (8, 5, 3))
    return [(np.float32(1.25) * room, up, down)]


cut = P("expert")
expert_layer = DeviceFunction(
    "expert_layer",
    layer,
    one_device=lambda room, up, down: jax.vmap(experts, (0, None, None))(
        room.reshape(4, 8, 2, 3), up, down
    ).reshape(room.shape),
    cases=tokens_and_experts,
    axes={"expert": 4},
    in_specs=(cut,) * 3,
    out_specs=cut,
    of=(0, 1, 2),
    name="the output",
    first=("not back",),
    outcome=Exchanged,
    rows={
        "not back": (dict(back=lambda x, *_: x), lambda it: np.shape(it.result) == (8, 8, 3)),
        "own experts": own_experts,
        "activation": [
            dict(activation=jnp.asarray),
            dict(activation=jax.nn.relu),
            dict(activation=jax.nn.silu),
            dict(activation=exact_gelu),
        ],
        "another": (dict(back=mixed_axes), is_wrong),
        "gathered": (gathered_experts, lambda it: it.gathered),
        "sends more": (twice, lambda it: it.sent > it.most),
        "gradient": (dict(backward=jax.lax.stop_gradient), lambda it: not it.gradient_is_right),
    },
)
