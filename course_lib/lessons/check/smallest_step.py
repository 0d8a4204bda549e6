"""Checks of notebook 19's exercises."""

import jax
import jax.numpy as jnp

from course_lib import measure
from course_lib.lessons.check.answers import call, close, exercise, predicted, require


@exercise
def bytes_of_state(autodiff, in_place, on_host):
    """Checks how many bytes per parameter a float32 Adam step with many minibatches keeps on
    the device: by autodiff, with gradients in place, and with the moments on the host as well.
    """
    predicted(
        autodiff,
        in_place,
        on_host,
        hint="Which trees exist at the end of a minibatch's backward pass?",
    )
    for name, guess, right in (
        ("By autodiff", autodiff, 20),
        ("In place", in_place, 16),
        ("Moments on the host", on_host, 8),
    ):
        require(
            guess != right - 4,
            f"{name}: {guess} bytes are one tree too few. Which tree did you leave out?",
        )
        require(
            guess == right,
            f"{name}: {guess} is too {'many' if guess > right else 'few'}. A tree takes 4 bytes"
            " per parameter: list those that exist at once.",
        )
    return "with gradients in place, 16 bytes per parameter; without the moments, 8."


def _example():
    """Returns layers and a sum of their gradients, both [8 64 64], and activations [4 64]."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(keys[0], (8, 64, 64)) / 8
    return w, jax.random.normal(keys[1], w.shape), jax.random.normal(keys[2], (4, 64))


def _outputs(w, x):
    """Returns y of layers y = x + tanh(x @ w[i]), w [N D D]."""
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0]


def _loss(w, x):
    return 0.5 * jnp.sum(_outputs(w, x) ** 2)


def _sum(w, x):
    return jnp.sum(_outputs(w, x))


def _first_layer_first(w, x):
    """Returns what a backward pass gives that begins with the first layer."""
    dx, inputs = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), x), x, w)

    def pull_back(dx, layer):
        dw, dx = jax.vjp(lambda w, x: x + jnp.tanh(x @ w), *layer)[1](dx)
        return dx, dw

    return jax.lax.scan(pull_back, dx, (w, inputs))[1]


def _trees(function, *args):
    """Returns the size of a program's temporaries, divided by the size of its first argument.
    The program overwrites this argument.
    """
    compiled = jax.jit(function, donate_argnums=0).lower(*args).compile()
    return measure.memory(compiled).temporaries / args[0].nbytes


@exercise
def add_in_place(your_add):
    """Checks `your_add(total, w, x) -> total`: adds the gradient of 0.5 sum(y^2) to `total`,
    for layers y = x + tanh(x @ w[i]), with w and total [N D D].
    """
    w, total, x = _example()
    gradient = jax.grad(_loss)(w, x)
    result = call(
        your_add, total, w, x, hint="What does the forward pass have to keep of each layer?"
    )
    require(
        jnp.shape(result) == w.shape, f"Return `total`, {w.shape}, not {jnp.shape(result)}."
    )
    require(
        not close(result, gradient),
        "This is the gradient alone: add it to `total`, the gradients of earlier minibatches.",
    )
    require(
        not close(result, total + gradient[::-1]),
        "The layers are in the wrong order: the backward pass begins with the last one.",
    )
    require(
        not close(result, total + _first_layer_first(w, x)),
        "`dx` passes the layers from the first to the last. Which one does the backward pass"
        " begin with?",
    )
    require(
        not close(result, total + jax.grad(_sum)(w, x)),
        "This is the gradient of sum(y). dx begins as the gradient of 0.5 sum(y^2) by y.",
    )
    require(close(result, total + gradient), "The result is not total + gradient.")
    trees = _trees(your_add, total, w, x)
    require(
        trees < 0.9,
        f"Right numbers, but the temporaries take {trees:.1f} trees of gradients. Where does"
        " the scan put the gradients of each layer?",
    )
    return f"temporaries take {trees:.1f} trees of gradients."


@exercise
def update_in_backward(your_update):
    """Checks `your_update(w, x) -> w`: w - 0.1 gradient of the same loss. Each layer is updated
    inside the backward pass.
    """
    w, _, x = _example()
    w = w / 2
    gradient = jax.grad(_loss)(w, x)
    result = call(
        your_update,
        w,
        x,
        hint="What did the carry of exercise 2 hold that this exercise does not need?",
    )
    require(jnp.shape(result) == w.shape, f"Return w, {w.shape}, not {jnp.shape(result)}.")
    require(
        not close(result, w + 0.1 * gradient),
        "The parameters went up the slope: subtract the gradient.",
    )
    require(
        not close(result, _through_updated_weights(w, x)),
        "dx went through updated weights: `pull_back` must use the weights that the forward"
        " pass used.",
    )
    require(close(result, w - 0.1 * gradient), "The result is not w - 0.1 gradient.")
    trees = _trees(your_update, w, x)
    require(
        trees < 0.9,
        f"Right numbers, but {trees:.1f} trees of temporaries exist. Do all gradients exist at"
        " once? Or are the weights stored twice, because they are scanned over and carried?",
    )
    return f"temporaries take {trees:.1f} trees: there is no tree of gradients."


def _through_updated_weights(w, x):
    """Returns the wrong new weights: dx goes through each layer after its update."""
    inputs = [x]
    for layer in w:
        inputs.append(inputs[-1] + jnp.tanh(inputs[-1] @ layer))
    dx, new = inputs[-1], []
    for layer, x in zip(w[::-1], inputs[-2::-1], strict=True):
        _, back = jax.vjp(lambda w, x: x + jnp.tanh(x @ w), layer, x)
        new.append(layer - 0.1 * back(dx)[0])
        _, back = jax.vjp(lambda w, x: x + jnp.tanh(x @ w), new[-1], x)
        dx = back(dx)[1]
    return jnp.stack(new[::-1])
