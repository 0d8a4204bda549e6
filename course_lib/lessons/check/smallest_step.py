"""Checks of notebook 19's exercises."""

import functools
import warnings

import jax
import jax.numpy as jnp

from course_lib import measure
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, normal
from course_lib.measure import virtual

RIGHT = {"scanned": 20, "in_a_list": 16, "in_backward": 12, "on_host": 8}

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


def add_gradients(total, w, x):
    """Adds to a sum of gradients in the backward pass."""
    y, inputs = jax.lax.scan(lambda x, w: (layer(w, x), x), x, w)

    def one_layer(carry, turn):
        dx, total = carry
        i, w, x = turn
        dw, dx = jax.vjp(layer, w, x)[1](dx)
        return (dx, total.at[i].add(dw)), None

    turns = jnp.arange(len(w)), w, inputs
    return jax.lax.scan(one_layer, (y, total), turns, reverse=True)[0][1]


class InPlace(Outcome):
    """A sum of gradients, or new weights, and the memory that it takes."""

    @functools.cached_property
    def trees(self):
        """Temporaries and new arrays, divided by the first argument, which the program may
        overwrite: for an A5000, or for this CPU where nothing compiles for one.
        """
        args = self.args
        if not virtual.why_unavailable():
            args = virtual.abstract(args, virtual.devices("a5000")[0])
        # a list overwrites nothing that is donated, and JAX warns of that
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            lowered = jax.jit(self.function, donate_argnums=0).lower(*args)
        memory = measure.memory(virtual.compile(lowered))
        new = memory.temporaries + memory.outputs - memory.aliased
        return new / self.args[0].nbytes

    @property
    def has_trees(self):
        """Whether a tree of gradients exists. A CPU shows it only of programs with loops."""
        loops = {"scan", "while"} & set(self.primitives)
        return self.trees >= 0.9 and (loops or not virtual.why_unavailable())

    @property
    def has_stack(self):
        """Whether a scan stacks an array of each layer that is as large as its weights."""
        shapes = (
            (out.aval.shape, of_turn.aval.shape)
            for eqn in self.equations
            if eqn.primitive.name == "scan"
            for out, of_turn in zip(eqn.outvars, eqn.params["jaxpr"].jaxpr.outvars, strict=True)
        )
        # the carry has the same shape in each turn and at the end
        stacked = [shape for shape, of_turn in shapes if shape != of_turn]
        return self.has_trees and self.args[0].shape in stacked


def arrays():
    """Returns a sum of gradients and layers, both [8 64 64], and activations [4 64]."""
    total, w, x = normal(0, (8, 64, 64), (8, 64, 64), (4, 64))
    return [(total, w / 8, x)]


def two_arrays(*args):
    return args[0], args[-1]


add_in_place = Function(
    "add_in_place",
    add_gradients,
    cases=arrays,
    name="`total`",
    first=("several",),
    outcome=InPlace,
    rows={
        "several": two_arrays,
        "alone": change(".add(", ".set("),
        "wrong order": change(".at[i]", ".at[7 - i]"),
        "first to last": change("reverse=True", "reverse=False"),
        "of the sum": change("(y, total)", "(jnp.ones_like(y), total)"),
        "another": change(".add(", ".add(2 * "),
        "trees": (lambda total, w, x: total + jax.grad(loss)(w, x), lambda it: it.has_trees),
    },
)


def update(w, x):
    """Reads each layer from the carry, so that one stack of weights exists."""
    y, inputs = jax.lax.scan(lambda x, w: (layer(w, x), x), x, w)

    def one_layer(carry, turn):
        dx, new = carry
        i, x = turn
        dw, dx = jax.vjp(layer, new[i], x)[1](dx)
        return (dx, new.at[i].add(-0.1 * dw)), None

    turns = jnp.arange(len(w)), inputs
    return jax.lax.scan(one_layer, (y, w), turns, reverse=True)[0][1]


update_in_backward = Function(
    "update_in_backward",
    update,
    cases=lambda: [(args[1] / 2, args[2]) for args in arrays()],
    name="w",
    first=("several",),
    outcome=InPlace,
    rows={
        "several": two_arrays,
        "uphill": change("-0.1", "0.1"),
        "updated weights": change(
            "dw, dx = jax.vjp(layer, new[i], x)[1](dx)",
            "dw, _ = jax.vjp(layer, new[i], x)[1](dx)\n"
            "        dx = jax.vjp(layer, new[i] - 0.1 * dw, x)[1](dx)[1]",
        ),
        "another": change("-0.1", "-0.2"),
        "stacked": (
            [
                lambda w, x: w - 0.1 * jax.grad(loss)(w, x),
                change(
                    "return (dx, new.at[i].add(-0.1 * dw)), None",
                    "return (dx, new), new[i] - 0.1 * dw",
                    "reverse=True)[0][1]",
                    "reverse=True)[1]",
                ),
            ],
            lambda it: it.has_stack,
        ),
        "trees": (change("new[i], x)", "w[i], x)"), lambda it: it.has_trees),
    },
)
