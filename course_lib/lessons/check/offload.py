"""Checks of notebook 18's exercises."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from course_lib.lessons.check.answers import (
    call,
    close,
    equations,
    exercise,
    predicted,
    require,
)
from course_lib.measure import virtual
from course_lib.smaller_and_faster import offload


@exercise
def streamed_bytes(adam, momentum):
    """Checks the bytes per parameter and step that cross the link, in both directions together,
    if float32 moments are streamed.
    """
    predicted(adam, momentum, hint="Which arrays are fetched, and which are sent back?")
    params = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    for name, guess, optimizer, arrays in (
        ("Adam", adam, optax.adam(1e-3), "two moments"),
        ("Momentum", momentum, optax.sgd(0.1, momentum=0.9), "one moment"),
    ):
        right = 2 * offload.bytes_each_way(optimizer, params) / 1000
        require(
            guess != right / 2,
            f"{name}: {guess} counts one direction. The moments also travel back.",
        )
        require(
            guess != right + 8,
            f"{name}: {guess} counts the parameters, too. They stay on the device.",
        )
        require(
            guess == right,
            f"{name}: {guess} is too {'many' if guess > right else 'few'}: {arrays} of 4 bytes"
            " per parameter, there and back.",
        )
    return "each moment crosses the link twice per step."


@exercise
def streamed_momentum(your_update):
    """Checks `your_update(p, m, g) -> (p, m)` on arrays [N D], m on the host: m = 0.9 m + g and
    p = p - 0.1 m, one layer at a time.
    """
    p, m, g = jax.random.normal(jax.random.key(0), (3, 4, 6))
    new_m = 0.9 * m + g
    hint = "Begin with the scan of `streamed_adam`."
    result = call(your_update, p, jax.device_put(m, jax.memory.Space.Host), g, hint=hint)
    require(
        isinstance(result, tuple | list) and len(result) == 2,
        "Return two things: the parameters, and the momentum.",
    )
    require(
        not close(tuple(result), (new_m, p - 0.1 * new_m)),
        "The momentum comes first: return the parameters first, then the momentum.",
    )
    require(
        not close(tuple(result), (p - 0.1 * m, new_m)),
        "The parameters moved by the old momentum: update the momentum first.",
    )
    require(
        close(tuple(result), (p - 0.1 * new_m, new_m)),
        "The numbers are not those of m = 0.9 m + g, p = p - 0.1 m.",
    )
    program = jax.make_jaxpr(your_update)(p, jax.device_put(m, jax.memory.Space.Host), g)
    moves = list(_moves(program.jaxpr))
    fetched = [size for place, size in moves if place == "device"]
    sent = [size for place, size in moves if place == "host"]
    require(fetched, "Nothing is fetched: `jax.device_put(..., jax.memory.Space.Device)`.")
    require(
        max(fetched) < m.size,
        "All layers are fetched at once. Take one layer of the momentum, and fetch that.",
    )
    require(sent, "The momentum is not sent back: it ends in the device's memory.")
    require(
        max(sent) < m.size,
        "All layers are sent back at once: until then they are in the device's memory.",
    )
    require(
        offload.why_unavailable() or result[1].sharding.memory_kind == virtual.HOST_MEMORY,
        "The momentum that you return is in the device's memory: return what"
        " `jax.device_put(..., jax.memory.Space.Host)` gives.",
    )
    return "one layer at a time crosses the link, there and back."


def _moves(jaxpr):
    """Lists the moves in a program: to which memory, and how many elements."""
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "device_put":
            for place, var in zip(eqn.params["devices"], eqn.invars, strict=True):
                memory = "host" if "host" in str(place).lower() else "device"
                yield memory, var.aval.size


@exercise
def what_to_offload(your_choice):
    """Checks `your_choice(values, rate, link) -> names`: the values that take less time to move
    than to compute again.

    `values` maps a name to the FLOPs that make it and its bytes, `rate` is in FLOP/s, `link` in
    bytes/s in one direction.
    """
    rate, link = 100e12, 25e9
    values = {  # FLOPs, bytes
        "inputs of blocks": (3e13, 1e9),  # 300 ms against 80 ms
        "keys and values": (6e12, 1e9),  # 60 ms against 80 ms: there alone, 40 ms
        "hidden": (4e12, 4e9),  # 40 ms against 320 ms
        "normalized": (1e9, 1e9),
    }
    right = {name for name, (flops, n) in values.items() if 2 * n / link < flops / rate}
    one_way = {name for name, (flops, n) in values.items() if n / link < flops / rate}
    hint = "Compare two times, value by value."
    chosen = _names(call(your_choice, values, rate, link, hint=hint))
    require(chosen <= set(values), f"Return names of `values`, not {sorted(map(str, chosen))}.")
    require(
        chosen != one_way,
        "'keys and values' is too slow to move: it goes to the host, and comes back.",
    )
    require(
        chosen != set(values) - right,
        "These are the values that are cheaper to compute again: turn the comparison around.",
    )
    seconds = sum(
        2 * n / link if name in chosen else flops / rate for name, (flops, n) in values.items()
    )
    best = sum(min(2 * n / link, flops / rate) for flops, n in values.values())
    require(
        chosen == right,
        f"Your choice takes {seconds * 1e3:.0f} ms; {best * 1e3:.0f} ms is possible.",
    )
    # On another machine, other values are the right ones.
    slower, faster = 10e12, 450e9
    others = {"queries": (1e11, 4e9), "mask": (4e10, 5e8), "scores": (5e11, 6e10)}
    chosen_there = _names(call(your_choice, others, slower, faster, hint=hint))
    right_there = {n for n, (flops, b) in others.items() if 2 * b / faster < flops / slower}
    require(
        chosen_there == right_there,
        f"Right here. With {slower:.3g} FLOP/s, {faster:.3g} bytes/s and {others}, choose"
        f" {sorted(right_there)}, not {sorted(chosen_there)}: both rates count.",
    )
    recomputed = sum(flops for flops, _ in values.values()) / rate
    return f"{best * 1e3:.0f} ms, where computing all again takes {recomputed * 1e3:.0f} ms."


def _names(chosen):
    """Returns the set of names that a learner's function chose."""
    require(
        isinstance(chosen, Iterable) and not isinstance(chosen, str),
        f"Return a set of names, such as {{'hidden'}}, not {chosen!r}.",
    )
    return set(chosen)
