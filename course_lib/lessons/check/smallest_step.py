"""Checks of notebook 19's exercises."""

import functools

import jax
import jax.numpy as jnp

from course_lib import measure
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, is_wrong
from course_lib.lessons.check.many_devices import normal

RIGHT = {"autodiff": 20, "in_place": 16, "on_host": 8}

bytes_of_state = Numbers(
    "bytes_of_state",
    lambda: RIGHT,
    rows={name: {f"{name} lacks one": right - 4, name: ...} for name, right in RIGHT.items()},
)


def layer(w, x):
    return x + jnp.tanh(x @ w)


def outputs(w, x):
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def loss(w, x):
    return 0.5 * jnp.sum(outputs(w, x) ** 2)


def layer_by_layer(
    state,
    w,
    x,
    *,
    change=lambda state, i, dw: state.at[i].add(dw),
    reverse=True,
    start=lambda y: y,
    read=lambda w, state, i: w,
    through=None,
):
    """Changes the state, a sum of gradients or the weights, in the backward pass."""
    y, inputs = jax.lax.scan(lambda x, w: (layer(w, x), x), x, w)

    def one_layer(carry, turn):
        dx, state = carry
        i, w, x = turn
        w = read(w, state, i)
        dw, dx_before = jax.vjp(layer, w, x)[1](dx)
        state = change(state, i, dw)
        if through:
            dx_before = jax.vjp(layer, through(state, i), x)[1](dx)[1]
        return (dx_before, state), None

    turns = jnp.arange(len(w)), w, inputs
    return jax.lax.scan(one_layer, (start(y), state), turns, reverse=reverse)[0][1]


class InPlace(Outcome):
    """A sum of gradients, or new weights, and the memory that it takes."""

    @functools.cached_property
    def trees(self):
        """The temporaries, divided by the first argument, which the program overwrites."""
        compiled = jax.jit(self.function, donate_argnums=0).lower(*self.args).compile()
        return measure.memory(compiled).temporaries / self.args[0].nbytes


def arrays():
    """Returns a sum of gradients and layers, both [8 64 64], and activations [4 64]."""
    total, w, x = normal(0, (8, 64, 64), (8, 64, 64), (4, 64))
    return [(jnp.asarray(total), jnp.asarray(w / 8), jnp.asarray(x))]


add_in_place = Function(
    "add_in_place",
    layer_by_layer,
    cases=arrays,
    name="`total`",
    outcome=InPlace,
    rows={
        "alone": dict(change=lambda state, i, dw: state.at[i].set(dw)),
        "wrong order": dict(change=lambda state, i, dw: state.at[7 - i].add(dw)),
        "first to last": dict(reverse=False),
        "of the sum": dict(start=jnp.ones_like),
        "another": (dict(change=lambda state, i, dw: state.at[i].add(2 * dw)), is_wrong),
        "trees": (lambda total, w, x: total + jax.grad(loss)(w, x), lambda it: it.trees >= 0.9),
    },
)


def update(w, x, *, rate=0.1, read=lambda w, state, i: state[i], through=None):
    """Reads each layer from the carry, so that one stack of weights exists."""

    def change(state, i, dw):
        return state.at[i].add(-rate * dw)

    return layer_by_layer(w, w, x, change=change, read=read, through=through)


update_in_backward = Function(
    "update_in_backward",
    update,
    cases=lambda: [(args[1] / 2, args[2]) for args in arrays()],
    name="w",
    outcome=InPlace,
    rows={
        "uphill": dict(rate=-0.1),
        "updated weights": dict(through=lambda state, i: state[i]),
        "another": (dict(rate=0.2), is_wrong),
        "trees": (
            [lambda w, x: w - 0.1 * jax.grad(loss)(w, x), dict(read=lambda w, state, i: w)],
            lambda it: it.trees >= 0.9,
        ),
    },
)
