"""Checks of notebook 03's exercises."""

import jax
import jax.numpy as jnp
import optax

from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    same_shapes,
)


@exercise
def accumulation(your_accumulate):
    """Checks `your_accumulate(params, batch, M)` against the gradient of the whole batch.

    `batch` is `(x [8 3], y [8], weight [8])`; the four parts have unequal weights.
    """
    keys = jax.random.split(jax.random.key(1), 5)
    params = {
        "in": jax.random.normal(keys[0], (3, 5)),
        "out": jax.random.normal(keys[1], (5, 1)),
    }
    weight = jnp.array([0.0, 0.0, 1.0, 2.0, 2.0, 1.0, 0.0, 2.0])
    batch = (jax.random.normal(keys[2], (8, 3)), jax.random.normal(keys[3], (8,)), weight)

    def loss_sum(params, x, y, weight):
        return jnp.sum(weight * ((jnp.tanh(x @ params["in"]) @ params["out"])[:, 0] - y) ** 2)

    with jax.default_matmul_precision("highest"):
        whole = jax.grad(loss_sum)(params, *batch)
        parts = [
            jax.grad(loss_sum)(params, *(a[i : i + 2] for a in batch)) for i in range(0, 8, 2)
        ]
        yours = call(
            your_accumulate,
            params,
            batch,
            4,
            hint="Start from zeros shaped like `params`, and add one part's gradient at a"
            " time.",
        )
    right = jax.tree.map(lambda g: g / weight.sum(), whole)
    counts = [max(float(weight[i : i + 2].sum()), 1.0) for i in range(0, 8, 2)]
    means = jax.tree.map(lambda *g: sum(a / c for a, c in zip(g, counts, strict=True)), *parts)

    same_shapes(yours, params, "the gradient")
    require(
        not close(yours, whole),
        f"{weight.sum():.0f} times too large: divide the sum by the total weight.",
    )
    require(
        not close(yours, jax.tree.map(lambda g: g / 4, means)),
        "This is a mean of means. Parts have different weights here: add up sums, and divide"
        " once.",
    )
    require(
        not close(yours, means),
        "This is a sum of means. Each part was divided by its own weight: divide once, at"
        " the end.",
    )
    for part in parts:
        require(
            not close(yours, jax.tree.map(lambda g: g / weight.sum(), part)),
            "This is the gradient of one part only. Is the total carried from part to part?",
        )
    ratio = jnp.linalg.norm(yours["in"]) / jnp.linalg.norm(right["in"])
    require(
        close(yours, right),
        f"Not the gradient of the whole batch: its norm is {ratio:.2f} times the right one.",
    )
    return "the gradient of the whole batch, to rounding."


@exercise
def forgotten_division(adam, sgd):
    """Checks by what factor the first updates of Adam and of SGD grow if four gradients are
    added and not divided.
    """
    predicted(adam, sgd, hint="By what factor does the first update change?")
    gradient = jnp.array([0.3, -2.0, 5.0])

    def grows(optimizer):
        state = optimizer.init(gradient)
        right, wrong = (optimizer.update(g, state)[0] for g in (gradient, 4 * gradient))
        return float(jnp.mean(wrong / right))

    measured = {"Adam": grows(optax.adam(1e-3)), "SGD": grows(optax.sgd(1e-3))}
    require(
        abs(sgd / measured["SGD"] - 1) < 0.01,
        "SGD's update is the learning rate times the gradient, and the gradient is four"
        f" times as large; you said {sgd}.",
    )
    require(
        abs(adam / measured["Adam"] - 1) < 0.01,
        f"Adam divides the gradient by the root of its own mean square; you said {adam}."
        " What happens to a common factor?",
    )
    return (
        f"measured, Adam's update grows by {measured['Adam']:.2f} and SGD's by"
        f" {measured['SGD']:.2f}."
    )


@exercise
def smallest_number_of_minibatches(your_smallest):
    """Checks `your_smallest(budget, arguments, parameters, activations, batch_size)`: the
    fewest minibatches that fit.

    The first, second and fourth are bytes; it returns None if no number fits.
    """
    gib = 2**30

    def answer(budget, parameters=100e6, batch_size=64):
        return call(
            your_smallest,
            budget * gib,
            0.5 * gib,
            parameters,
            20 * gib,
            batch_size,
            hint="Write the peak as a function of M first: arguments + accumulator +"
            " activations / M.",
        )

    yours = answer(8)
    require(yours == int(yours), f"M is an integer, not {yours}.")
    require(
        yours != 3,
        "3 does not divide a batch of 64: the minibatches would be of unequal size.",
    )
    require(
        yours >= 4,
        f"8 GiB: with M = {yours} the peak is {0.5 + 0.37 + 20 / max(yours, 1):.1f} GiB,"
        " too much.",
    )
    require(
        yours == 4, f"8 GiB: M = {yours} is not the fewest. With M = 4 the peak is 5.9 GiB."
    )

    def fits(budget, right, parameters=100e6, batch_size=64):
        sizes = budget * gib, 0.5 * gib, parameters, 20 * gib, batch_size
        try:
            yours = your_smallest(*sizes)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            require(
                False,
                f"{budget} GiB: your function raised {type(error).__name__}: {first_line}",
            )
        require(
            yours is not None,
            f"{budget} GiB: you returned None, and a batch of {batch_size} fits with M ="
            f" {right}.",
        )
        return yours

    yours = fits(2.1, 32)
    require(
        yours != 16,
        "2.1 GiB: with M = 16 it needs 0.5 + 0.37 + 1.25 = 2.12 GiB. Is the accumulator"
        " counted, 4 bytes per parameter?",
    )
    require(yours == 32, f"2.1 GiB: you returned {yours}; 32 is the fewest.")
    yours = fits(1.2, 64)
    require(
        yours == 64,
        f"1.2 GiB: you returned {yours}. Only minibatches of one sequence each fit, M = 64.",
    )
    yours = fits(3.2, 24, parameters=5e8, batch_size=96)
    require(
        yours == 24,
        f"3.2 GiB, 500 million parameters, a batch of 96: you returned {yours}; 24 is the"
        " fewest. Divisors of 96"
        " are not all powers of two.",
    )
    try:
        impossible = your_smallest(1 * gib, 0.5 * gib, 100e6, 20 * gib, 64)
    except Exception as error:
        require(
            False,
            f"1 GiB: no M fits, and your function raised {type(error).__name__}. Return None.",
        )
    require(
        impossible is None,
        f"1 GiB: you returned {impossible}. No M fits: one sequence alone needs 1.18 GiB."
        " Return None.",
    )
    return "and below 1.18 GiB no number of minibatches helps."


@exercise
def multi_steps_share(your_share):
    """Checks `your_share(counts, m)`, the factor of minibatch m's gradient before
    `optax.MultiSteps` takes the mean.
    """
    x = jnp.arange(1.0, 13.0)
    weights = jnp.array([1.0] * 9 + [0.0] * 3)
    counts = [4, 4, 1]

    def loss(w, x, weights):
        return jnp.sum((w - x) ** 2 * weights) / weights.sum()

    w = jnp.array(2.0)
    shares = [
        call(your_share, counts, m, hint="`MultiSteps` adds M gradients and divides by M.")
        for m in range(3)
    ]
    gradients = [jax.grad(loss)(w, x[i : i + 4], weights[i : i + 4]) for i in range(0, 12, 4)]
    mean = sum(float(s) * float(g) for s, g in zip(shares, gradients, strict=True)) / 3
    right = float(jax.grad(loss)(w, x, weights))
    require(
        abs(mean / right - 1 / 3) > 1e-3,
        "A third of the right gradient: `MultiSteps` divides by M once more, so multiply by M.",
    )
    require(
        len(set(map(float, shares))) > 1,
        "All shares are equal. The last minibatch has one label, the others four.",
    )
    require(
        not close(
            jnp.array(shares, float), jnp.array([c / 3 * 1.0 for c in (2.25, 2.25, 9.0)])
        ),
        "Upside down: a minibatch with more labels should count more.",
    )
    require(
        abs(mean / right - 1) < 1e-4,
        f"With counts {counts} and your factors {[round(float(s), 3) for s in shares]} the"
        f" mean is {mean:.3f};"
        f" the gradient of the whole batch is {right:.3f}.",
    )
    return "the mean of the gradients is the gradient of the whole batch."
