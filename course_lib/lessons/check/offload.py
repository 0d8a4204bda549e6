"""Checks of notebook 18's exercises."""

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import optax

from course_lib.lessons.check.answers import close, programs_in
from course_lib.lessons.check.exercises import (
    Function,
    Numbers,
    Outcome,
    change,
    in_case,
    normal,
)
from course_lib.measure import virtual
from course_lib.smaller_and_faster import offload

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def bytes_per_parameter():
    params = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    optimizers = {"adam": optax.adam(1e-3), "momentum": optax.sgd(0.1, momentum=0.9)}
    return {
        f"with_{n}": 2 * offload.bytes_each_way(o, params) / 1000 for n, o in optimizers.items()
    }


streamed_bytes = Numbers(
    "streamed_bytes",
    bytes_per_parameter,
    rows={
        "with_adam": {"one direction": 8, "parameters": 24, "Adam": ...},
        "with_momentum": {"momentum there": 4, "momentum and parameters": 16, "Momentum": ...},
    },
)


def update(p, m, g):
    m = 0.9 * m + g
    return p - 0.1 * m, m


def streamed(p, m, g):
    """Momentum on the host, one layer at a time."""

    def one_layer(_, layer):
        p, m, g = layer
        p, m = update(p, jax.device_put(m, DEVICE), g)
        return None, (p, jax.device_put(m, HOST))

    p, m = jax.lax.scan(one_layer, None, (p, m, g))[1]
    return p, m


def two_at_once(p, m, g):
    pairs = [x.reshape(2, 2, -1) for x in (p, m, g)]
    return [x.reshape(p.shape) for x in streamed(*pairs)]


def fetched(x):
    return jax.device_put(x, DEVICE)


def sent(x):
    return jax.device_put(x, HOST)


def late(p, m, g):
    return p - 0.1 * m, 0.9 * m + g


def three_arrays():
    p, m, g = normal(0, *[(4, 6)] * 3)
    return [(p, jax.device_put(m, HOST), g)]


def memory_of(place):
    return "host" if "host" in str(place).lower() else "device"


class Momentum(Outcome):
    """Parameters and momentum, and what moved between the memories."""

    expected = property(lambda it: update(*map(jax.device_get, it.args)))
    p_is_right = property(lambda it: close(it.result[0], it.expected[0]))
    m_is_right = property(lambda it: close(it.result[1], it.expected[1]))
    is_right = property(lambda it: it.p_is_right and it.m_is_right)

    @functools.cached_property
    def moves(self):
        """Lists the moves to the host and to the device: the numbers of each array that comes
        from the other memory, and the turns that move one.
        """
        moves: dict[str, list[tuple[int, int]]] = {"host": [], "device": []}

        def add(program, turns):
            for eqn in program.eqns:
                if eqn.primitive.name == "device_put":
                    for place, var in zip(eqn.params["devices"], eqn.invars, strict=True):
                        memory, old = memory_of(place), getattr(var.aval, "memory_space", None)
                        if old is None or memory != memory_of(old):
                            moves[memory].append((var.aval.size, turns))
                for inner in programs_in(eqn):
                    add(inner, turns * eqn.params.get("length", 1))

        add(self.program, 1)
        return moves

    def moves_several(self, memory):
        return max((size for size, _ in self.moves[memory]), default=0) > self.args[1][0].size

    @property
    def moved(self):
        """The numbers that all turns move, to each memory."""
        return {
            memory: sum(size * turns for size, turns in moves)
            for memory, moves in self.moves.items()
        }

    def is_on_host(self, place):
        """Whether a result ends on the host. JAX 0.7.2 does not say it for a CPU."""
        traced = getattr(self.program.outvars[place].aval, "memory_space", None)
        kind = getattr(getattr(self.result[place], "sharding", None), "memory_kind", None)
        return HOST == traced or kind == virtual.HOST_MEMORY


class OnHost(Function):
    """JAX 0.7.2 leaves all arrays on a CPU in one memory."""

    unreachable = frozenset(
        {"forgotten", "parameters moved", "wasted"} if offload.why_unavailable() else ()
    )


streamed_momentum = OnHost(
    "streamed_momentum",
    streamed,
    cases=three_arrays,
    outcome=Momentum,
    rows={
        "no pair": change("return p, m", "return p"),
        "exchanged": change("return p, m", "return m, p"),
        "old momentum": change("= update(", "= late("),
        "m alone": (
            change("return None, (p,", "return None, (2 * p,"),
            lambda it: it.m_is_right and not it.p_is_right,
        ),
        "p alone": (
            change("p, m = update(p, jax", "p, _ = update(p, jax"),
            lambda it: it.p_is_right and not it.m_is_right,
        ),
        "another": change(", g)\n", ", 2 * g)\n"),
        "parameters moved": (
            change("return p, m", "return jax.device_put(p, HOST), m"),
            lambda it: it.is_on_host(0),
        ),
        "forgotten": (
            change("jax.device_put(m, HOST)", "(jax.device_put(m, HOST), m)[1]"),
            lambda it: it.moves["host"] and not (offload.why_unavailable() or it.is_on_host(1)),
        ),
        "fetched at once": (
            [
                change(
                    "jax.device_put(m, DEVICE)",
                    "m",
                    "(p, m, g))",
                    "(p, jax.device_put(m, DEVICE), g))",
                ),
                two_at_once,
            ],
            lambda it: it.moves_several("device"),
        ),
        "not sent": (change("jax.device_put(m, HOST)", "m"), lambda it: not it.moves["host"]),
        "sent at once": (
            change(
                "jax.device_put(m, HOST)",
                "m",
                "return p, m",
                "return p, jax.device_put(m, HOST)",
            ),
            lambda it: it.moves_several("host"),
        ),
        "wasted": (
            [
                change("jax.device_put(m, DEVICE), g", "fetched(m), fetched(sent(g))"),
                change("jax.device_put(m, HOST)", "sent(fetched(sent(m)))"),
            ],
            lambda it: (
                not offload.why_unavailable() and max(it.moved.values()) > it.args[1].size
            ),
        ),
    },
)

VALUES = {  # FLOPs, bytes
    "inputs of blocks": (3e13, 1e9),  # 300 ms against 80 ms
    "keys and values": (7.6e12, 1e9),  # 76 ms against 80 ms: there alone, 40 ms
    "hidden": (4e12, 4e9),  # 40 ms against 320 ms
    "normalized": (1e9, 1e9),
}
OTHERS = {"queries": (1e11, 4e9), "mask": (4e10, 5e8), "scores": (5e11, 6e10)}
# Three are to be moved: mask, keys (20 ms against 4), and values (420 against 400), which gain
# most. A factor above 2.1 leaves out the values.
OTHERS |= {"keys": (2e11, 1e9), "values": (4.2e12, 9e10)}


def cheaper(values, rate, link):
    return [n for n, (flops, size) in values.items() if 2 * size / link < flops / rate]


class Names(Outcome):
    """The chosen names, and how long the choice takes."""

    @functools.cached_property
    def listed(self):
        """The names in order, from any collection, or None. A generator is empty afterwards."""
        if isinstance(self.result, str | Mapping) or not isinstance(self.result, Iterable):
            return None
        names = list(self.result)
        return sorted(set(names)) if all(isinstance(name, str) for name in names) else None

    chosen = property(lambda it: set(it.listed))

    def ms(self, names):
        return 1e3 * sum(
            2 * size / self.link if name in names else flops / self.rate
            for name, (flops, size) in self.values.items()
        )


what_to_offload = Function(
    "what_to_offload",
    cheaper,
    cases=lambda: [(VALUES, 100e12, 25e9), (OTHERS, 10e12, 450e9)],
    outcome=Names,
    rows={
        "no set": (lambda *args: "hidden", lambda it: it.listed is None),
        "other names": (
            lambda *args: ["all"],
            lambda it: it.case == 0 and not it.chosen <= set(it.values),
        ),
        "one way": (
            change("2 * ", ""),
            in_case(0, lambda it: it.chosen == {"inputs of blocks", "keys and values"}),
        ),
        "turned around": (
            change("<", ">"),
            lambda it: it.case == 0 and it.chosen == set(it.values) - set(it.right),
        ),
        "another": (change("2 * ", "0 * "), in_case(0, lambda it: it.chosen != set(it.right))),
        "one alone": (
            lambda v, rate, link: [min(v, key=lambda n: 2 * v[n][1] / link - v[n][0] / rate)],
            lambda it: it.case == 1 and it.chosen == {"values"},
        ),
        "too few": (
            change("2 * ", "4 * "),
            lambda it: it.case == 1 and set() < it.chosen < set(it.right),
        ),
        "another machine": (
            lambda values, rate, link: [n for n, (f, b) in values.items() if f / b > 1e4],
            lambda it: it.chosen != set(it.right),
        ),
    },
)
