"""Right and wrong answers to the exercises of notebook 19, for `test_check`."""

import jax
import jax.numpy as jnp

from course_lib.lessons import check

FUNCTIONS = [check.add_in_place, check.update_in_backward]
PREDICTIONS = {check.bytes_of_state: 3}


def layer(w, x):
    return x + jnp.tanh(x @ w)


def step(x, w):
    return layer(w, x), None


def loss(w, x):
    return 0.5 * jnp.sum(jax.lax.scan(step, x, w)[0] ** 2)


def backward(state, w, x, change, reverse=True, through=lambda old, new: old):
    """Runs `change(state, i, dw)` in the backward pass, layer by layer."""
    dx, inputs = jax.lax.scan(lambda x, w: (layer(w, x), x), x, w)

    def one(carry, turn):
        dx, state = carry
        i, w, x = turn
        state = change(state, i, jax.vjp(layer, w, x)[1](dx)[0])
        dx = jax.vjp(layer, through(w, state[i]), x)[1](dx)[1]
        return (dx, state), None

    turns = jnp.arange(len(w)), w, inputs
    return jax.lax.scan(one, (dx, state), turns, reverse=reverse)[0][1]


def add(total, w, x):
    return backward(total, w, x, lambda total, i, dw: total.at[i].add(dw))


def instead(total, w, x):
    return backward(total, w, x, lambda total, i, dw: total.at[i].set(dw))


def swapped(total, w, x):
    return backward(total, w, x, lambda total, i, dw: total.at[len(w) - 1 - i].add(dw))


def forwards(total, w, x):
    change = lambda total, i, dw: total.at[i].add(dw)  # noqa: E731
    return backward(total, w, x, change, reverse=False)


def with_autodiff(total, w, x):
    return total + jax.grad(loss)(w, x)


def of_the_sum(total, w, x):
    return total + jax.grad(lambda w: jax.lax.scan(step, x, w)[0].sum())(w)


def update(w, x):
    """Reads each layer from the carry, so that one stack of weights exists."""
    dx, inputs = jax.lax.scan(lambda x, w: (layer(w, x), x), x, w)

    def one(carry, turn):
        (dx, w), (i, x) = carry, turn
        dw, dx = jax.vjp(layer, w[i], x)[1](dx)
        return (dx, w.at[i].add(-0.1 * dw)), None

    return jax.lax.scan(one, (dx, w), (jnp.arange(len(w)), inputs), reverse=True)[0][1]


def scanned_and_carried(w, x):
    return backward(w, w, x, lambda w, i, dw: w.at[i].add(-0.1 * dw))


def uphill(w, x):
    return backward(w, w, x, lambda w, i, dw: w.at[i].add(0.1 * dw))


def too_early(w, x):
    change = lambda w, i, dw: w.at[i].add(-0.1 * dw)  # noqa: E731
    return backward(w, w, x, change, through=lambda old, new: new)


def after_autodiff(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


RIGHT = [
    (check.bytes_of_state, (20, 16, 8)),
    (check.add_in_place, (add,)),
    (check.update_in_backward, (update,)),
]
WRONG = [
    (check.bytes_of_state, (16, 16, 8), "one tree too few"),
    (check.bytes_of_state, (20, 8, 8), "too few"),
    (check.bytes_of_state, (20, 16, 16), "too many"),
    (check.add_in_place, (with_autodiff,), "trees of gradients"),
    (check.add_in_place, (instead,), "gradient alone"),
    (check.add_in_place, (swapped,), "wrong order"),
    (check.add_in_place, (of_the_sum,), "gradient of sum(y)"),
    (check.add_in_place, (forwards,), "from the first to the last"),
    (check.update_in_backward, (after_autodiff,), "trees of temporaries"),
    (check.update_in_backward, (scanned_and_carried,), "scanned over and carried"),
    (check.update_in_backward, (uphill,), "up the slope"),
    (check.update_in_backward, (too_early,), "updated weights"),
]
