"""Checks of notebook 14's exercises, on four devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from course_lib import measure, optimizers
from course_lib.lessons import bug_zoo, compare
from course_lib.lessons.check.exercises import (
    Function,
    Numbered,
    Numbers,
    Outcome,
    change,
    normal,
)
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices, mesh_of
from course_lib.many_devices import strategies
from course_lib.models import routing


def placed(experts, E, C):
    """Gives each token a place at its expert, or -1."""
    experts, places = [int(expert) for expert in experts], []
    for t, expert in enumerate(experts):
        count = experts[:t].count(expert)
        places.append(count if count < C else -1)
    return places


def called(function, experts, E, C):
    """Calls a function; a dict of counts needs integers that can be hashed."""
    try:
        result = function(experts, E, C)
    except TypeError:
        result = function(np.asarray(experts), E, C)
    return list(result) if hasattr(result, "__next__") else result


class Places(Outcome):
    numbers = property(lambda it: np.ravel(np.array(it.result, object)).tolist())
    places = property(lambda it: [int(place) for place in it.numbers])

    @property
    def twice(self):
        """An expert and its place that several tokens have."""
        pairs = zip(self.experts.tolist(), self.places, strict=True)
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
    calls=called,
    outcome=Places,
    rows={
        "no number": (
            [change("else -1", "else None"), change("else -1", 'else float("nan")')],
            lambda it: any(place is None or place != place for place in it.numbers),
        ),
        "count": (
            lambda experts, E, C: [0],
            lambda it: it.case == 0 and len(it.places) != len(it.experts),
        ),
        "drops none": change("if count < C else -1", ""),
        "from 1": [
            change("(count if count <", "(count + 1 if count <"),
            change("[:t]", "[: t + 1]"),
        ],
        "later": change("experts[:t]", "experts[t + 1 :]"),
        "range": (
            change("(count if", "(count + 4 if"),
            lambda it: it.case == 0 and not all(-1 <= place < 2 for place in it.places),
        ),
        "twice": (
            change("count if count < C else -1", "count % C"),
            lambda it: it.case == 0 and it.twice,
        ),
        "another": [change("< C", "< 1"), change("< C", "< 2")],
    },
)


@functools.cache
def percent_dropped(factor):
    """Returns how many of the tokens find no room, in percent. Each chooses one expert."""
    logits = jax.random.normal(jax.random.key(0), (64, 512, 8))
    room = routing.capacity(512, num_experts=8, per_token=1, factor=factor)
    return 100 * (1 - float(routing.route(logits, 1, room).dispatch.sum()) / (64 * 512))


class Percents(Numbered):
    at_one = property(lambda it: it.yours["percent_at_1"])
    at_two = property(lambda it: it.yours["percent_at_2"])


dropped = Numbers(
    "dropped",
    lambda: {"percent_at_1": percent_dropped(1.0), "percent_at_2": percent_dropped(2.0)},
    outcome=Percents,
    rows={
        "percent_at_1": {
            "negative": (
                [-1, dict(percent_at_2=-1)],
                lambda it: min(it.at_one, it.at_two) < 0,
            ),
            "none": (0, lambda it: it.at_one == 0),
            "percent": (0.043, lambda it: it.at_one < 1),
            "many": (50, lambda it: it.at_one >= 20),
            "deviation": (
                [100 * 7.5 / 64 / 2, 100 * 7.5 / 64],
                lambda it: 5.1 <= it.at_one < 13,
            ),
            # A normal distribution predicts 4.7. Answers in whole percent are accepted.
            "another": (
                [2.3, 15],
                lambda it: abs(it.at_one - it.right["percent_at_1"]) >= 0.75,
            ),
        },
        "percent_at_2": {
            "factor 2": ([2, 0.4], lambda it: it.at_two - it.right["percent_at_2"] >= 0.1)
        },
    },
)


def offsets_of(counts, me):
    """Returns where rows begin, how many they are, where they land, how many come."""
    begins, lands = counts.cumsum(1) - counts, counts.cumsum(0) - counts
    return begins[me], counts[me], lands[me], counts[:, me]


class Offsets(Outcome):
    parts = property(lambda it: [np.asarray(part).tolist() for part in it.result])
    rights = property(lambda it: [np.asarray(part).tolist() for part in it.right])
    sizes_differ = property(lambda it: it.parts[1::2] != it.rights[1::2])
    is_four = property(lambda it: isinstance(it.result, tuple | list) and len(it.result) == 4)


offsets = Function(
    "offsets",
    offsets_of,
    cases=lambda: [
        (jnp.array([[2, 0, 3], [1, 4, 1], [0, 5, 2]]), 1),
        (jnp.array([[0, 6, 0, 1], [2, 0, 1, 3], [4, 1, 0, 2], [3, 2, 5, 0]]), 3),
    ],
    name="your result",
    first=("no four",),
    outcome=Offsets,
    rows={
        "no four": (change(", counts[:, me]", ""), lambda it: not it.is_four),
        "sizes": (
            [
                change("begins[me], counts[me]", "begins[me], counts[:, me]"),
                change("counts[:, me]", "counts[me]"),
            ],
            lambda it: it.sizes_differ,
        ),
        "inclusive": [
            change("cumsum(1) - counts", "cumsum(1)"),
            change("cumsum(0) - counts", "cumsum(0)"),
            change("cumsum(1) - counts", "cumsum(1)", "cumsum(0) - counts", "cumsum(0)"),
        ],
        "at home": change("lands[me]", "begins[me]"),
        "arrivals": change("lands[me]", "lands[:, me]"),
        "begin": (
            change("begins[me]", "0 * begins[me]"),
            lambda it: it.parts[0] != it.rights[0],
        ),
        "another": change("lands[me]", "0 * lands[me]"),
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


class OnExperts(OnDevices):
    leaving = property(lambda it: int(it.ledger.sent()))


def exchange(x, split, join):
    return jax.lax.all_to_all(x, "expert", split, join, tiled=True)


def layer(room, up, down):
    """Sends tokens to the devices of their experts, and the outputs back."""
    return exchange(experts(exchange(room, 0, 1), up, down), 1, 0)


def own_experts(room, up, down):
    return experts(room, jnp.tile(up, (4, 1, 1)), jnp.tile(down, (4, 1, 1)))


def gathered_experts(room, up, down):
    return experts(room, *(jax.lax.all_gather(w, "expert", tiled=True) for w in (up, down)))


def tokens_and_experts():
    """Numbers for which GELU differs from its exact form."""
    room, up, down = normal(9, (32, 2, 3), (8, 3, 5), (8, 5, 3))
    return [(1.25 * room, up, down)]


cut, ZERO_3 = P("expert"), strategies.Strategy(zero=3)
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
    outcome=OnExperts,
    rows={
        "not back": (
            change(", 1, 0)", ")", "return exchange", "return "),
            lambda it: np.shape(it.result) == (8, 8, 3),
        ),
        "own experts": own_experts,
        "activation": [
            change("1), up, down)", f"1), up, down, {name})")
            for name in ("jnp.asarray", "jax.nn.relu", "jax.nn.silu", "exact_gelu")
        ],
        "rounded": (
            change("exchange(room, 0, 1)", "exchange(room.astype(jnp.bfloat16), 0, 1)"),
            lambda it: it.is_near,
        ),
        # splits the places, not the experts, on the way back
        "another": change("down), 1, 0)", "down).reshape(8, 2, -1), 0, 0)"),
        "gathers": gathered_experts,
        "sends more": lambda *args: exchange(exchange(layer(*args), 0, 1), 1, 0),
        "gradient": change(
            "exchange(room, 0, 1)", "jax.lax.stop_gradient(exchange(room, 0, 1))"
        ),
    },
)


@functools.cache
def one_device():
    return compare.OneDevice(compare.small(batch_size=4, seq_len=8))


@functools.cache
def shown(suspect):
    """Returns what the instruments show of a suspect."""
    print(f"Measuring the {suspect} step, for up to a minute ...", flush=True)
    alone, key = one_device(), jax.random.key(0)
    config = alone.config.copy_and_resolve_references()
    step = mesh_of({"data": 2, "tensor": 2}), ZERO_3
    with bug_zoo.suspect(suspect), jax.default_matmul_precision("highest"):
        grad_fn = jax.jit(strategies.gradient(config, *step))
        gradient = grad_fn.lower(alone.params, alone.batch, key).compile(compare.QUICK)
        config.model.dropout_rate, config.optimizer.clip_norm = 0.5, 0.1
        loss = jax.jit(strategies.build(config, *step).loss_fn, compiler_options=compare.QUICK)
        exchanged = jax.tree.map(lambda x: np.roll(x, 2, axis=0), alone.batch)  # of 4 sequences
        losses = [loss(alone.params, x, key)[0] for x in (alone.batch, exchanged)]
        optimizer = optimizers.from_config(config.optimizer)

        @jax.jit
        def length_of_update(grads, params):
            update, _ = optimizer.update(grads, optimizer.init(params), params)
            return optax.tree.norm(update)

        length = length_of_update(alone.grads, alone.params)
    grads = jax.device_get(gradient(alone.params, alone.batch, key)[0])
    return {
        "off": jax.tree.leaves(jax.tree.map(compare.furthest, grads, alone.grads)),
        "gathered": measure.ledger(gradient, step[0]).payload("all-gather"),
        "losses": losses,
        "update": length,
    }


class Accused(Numbered):
    """The first suspect with a wrong answer."""

    name = property(lambda it: next(n for n in it.yours if it.yours[n] != it.right[n]))
    said = property(lambda it: it.yours[it.name])
    shown = property(lambda it: shown(it.name))


def accused(name):
    """Returns a suspect's rows: wrong answers, by the instrument that contradicts them."""
    right, by = bug_zoo.SUSPECTS[name], dict.fromkeys(bug_zoo.FAULTS, "gradient")
    by |= {"gathered_twice": "bytes", "shared_key": "masks", "norm_of_a_slice": "update"}
    by |= {"hydra": "no fault", "none": by.get(right), right: None}
    return {
        row: (
            [answer for answer in by if by[answer] == row],
            lambda it, row=row: by.get(it.yours[name], "no fault") == row,
        )
        for row in ("no fault", "gradient", "bytes", "masks", "update")
    }


which_fault = Numbers(
    "which_fault",
    lambda: bug_zoo.SUSPECTS,
    words=tuple(bug_zoo.SUSPECTS),
    outcome=Accused,
    rows={name: accused(name) for name in bug_zoo.SUSPECTS},
)
