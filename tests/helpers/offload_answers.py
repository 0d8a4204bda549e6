"""Right and wrong answers to the exercises of notebook 18, for `test_check`."""

import jax
import jax.numpy as jnp

from course_lib.lessons import check
from course_lib.smaller_and_faster import offload

FUNCTIONS = [check.streamed_momentum, check.what_to_offload]
PREDICTIONS = {check.streamed_bytes: 2}
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def update(p, m, g, old=False, decay=0.9):
    new = decay * m + g
    return p - 0.1 * (m if old else new), new


def streamed(old=False, decay=0.9, sends=True):
    def your_update(p, m, g):
        def one_layer(_, layer):
            p, m, g = layer
            m = jax.device_put(m, DEVICE)
            p, m = update(p, m, g, old, decay)
            return None, (p, jax.device_put(m, HOST) if sends else m)

        return jax.lax.scan(one_layer, None, (p, m, g))[1]

    return your_update


def fetched_at_once(p, m, g):
    p, m = update(p, jax.device_put(m, DEVICE), g)
    return p, jax.device_put(m, HOST)


def sent_at_once(p, m, g):
    p, m = streamed(sends=False)(p, m, g)
    return p, jax.device_put(m, HOST)


def sent_and_forgotten(p, m, g):
    """Takes `device_put` for a move in place."""

    def one_layer(_, layer):
        p, m, g = layer
        p, m = update(p, jax.device_put(m, DEVICE), g)
        jax.device_put(m, HOST)
        return None, (p, m)

    return jax.lax.scan(one_layer, None, (p, m, g))[1]


def in_place(p, m, g):
    def one_layer(state, i):
        p, m = state
        layer = jax.device_put(m[i], DEVICE)
        new_p, layer = update(p[i], layer, g[i])
        put = jax.lax.dynamic_update_index_in_dim
        return (put(p, new_p, i, 0), put(m, jax.device_put(layer, HOST), i, 0)), None

    return jax.lax.scan(one_layer, (p, m), jnp.arange(len(g)))[0]


def cheaper(times=2, swap=False, everything=False):
    def choice(values, rate, link):
        return [
            name
            for name, (flops, size) in values.items()
            if everything or (times * size / link < flops / rate) != swap
        ]

    return choice


def most_flops(values, rate, link):
    return [max(values, key=lambda name: values[name][0])]


def dense(values, rate, link):
    return [name for name, (flops, size) in values.items() if flops / size > 1e4]


RIGHT = [
    (check.streamed_bytes, (16, 8)),
    (check.streamed_momentum, (streamed(),)),
    (check.what_to_offload, (cheaper(),)),
]
WRONG = [
    (check.streamed_bytes, (8, 4), "one direction"),
    (check.streamed_bytes, (24, 8), "the parameters"),
    (check.streamed_bytes, (16, 4), "one direction"),
    (check.streamed_bytes, (12, 8), "too few"),
    (check.streamed_momentum, (fetched_at_once,), "fetched at once"),
    (check.streamed_momentum, (sent_at_once,), "sent back at once"),
    (check.streamed_momentum, (streamed(sends=False),), "not sent back"),
    (check.streamed_momentum, (streamed(old=True),), "old momentum"),
    (check.streamed_momentum, (lambda *a: streamed()(*a)[::-1],), "parameters first"),
    (check.streamed_momentum, (streamed(decay=0.99),), "not those of"),
    (check.what_to_offload, (cheaper(times=1),), "comes back"),
    (check.what_to_offload, (cheaper(swap=True),), "turn the comparison"),
    (check.what_to_offload, (cheaper(everything=True),), "is possible"),
    (check.what_to_offload, (lambda values, rate, link: ["all"],), "names of"),
    (check.what_to_offload, (lambda values, rate, link: True,), "a set of names"),
    (check.what_to_offload, (lambda values, rate, link: "hidden",), "a set of names"),
    (check.what_to_offload, (True,), "your function itself"),
    (check.what_to_offload, (most_flops,), "both rates"),
    (check.what_to_offload, (dense,), "both rates"),
]
if offload.why_unavailable() is None:  # JAX 0.7.2 leaves all arrays on a CPU in one memory
    WRONG.append((check.streamed_momentum, (sent_and_forgotten,), "in the device's memory"))
