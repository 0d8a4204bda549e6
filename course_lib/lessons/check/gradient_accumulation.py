"""Checks of notebook 03's exercises."""

import re

import jax
import jax.numpy as jnp
import optax

from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    run,
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
    # 9 in all, unlike the number of examples
    weight = jnp.array([0.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0])
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
        unweighted = jax.grad(loss_sum)(params, *batch[:2], jnp.ones(8))
    right = jax.tree.map(lambda g: g / weight.sum(), whole)
    counts = [max(float(weight[i : i + 2].sum()), 1.0) for i in range(0, 8, 2)]
    means = jax.tree.map(lambda *g: sum(a / c for a, c in zip(g, counts, strict=True)), *parts)

    same_shapes(yours, params, "the gradient")
    require(
        not close(yours, whole),
        f"{weight.sum():.0f} times too large: divide the sum by the total weight.",
    )
    require(
        not close(yours, jax.tree.map(lambda g: g / len(weight), whole)),
        "The sum was divided by the number of examples: divide by their total weight.",
    )
    require(
        not close(yours, jax.tree.map(lambda g: g / 4, whole)),
        "The sum was divided by the number of parts: divide by the total weight.",
    )
    require(
        not close(yours, jax.tree.map(lambda g: g / len(weight), unweighted)),
        "Every example counts once here: multiply each one's loss by its weight.",
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
    for shape in ((1,), (2, 1)):  # `[0]` of a part is its first row; without it stays a column

        def mixed_up(params, x, y, weight, shape=shape):
            outputs = (jnp.tanh(x @ params["in"]) @ params["out"])[: shape[0]]
            return jnp.sum(weight * (outputs.reshape(shape) - y) ** 2)

        wrong = [
            jax.grad(mixed_up)(params, *(a[i : i + 2] for a in batch)) for i in range(0, 8, 2)
        ]
        require(
            not close(yours, jax.tree.map(lambda *g: sum(g) / weight.sum(), *wrong)),
            "The output of one example was compared with the y of another. The formula is that"
            " of one example: which shapes do outputs and y have for a part?",
        )
    require(
        not close(yours, jax.tree.map(lambda g: g / weight.sum(), unweighted)),
        "Every example counts once here: multiply each one's loss by its weight.",
    )
    for divisor in (1, weight.sum()):
        require(
            not close(yours, jax.tree.map(lambda g, n=divisor: g / (2 * n), whole)),
            "Half of the right sum: was each part's loss a mean? Add up sums.",
        )
    ratio = jnp.linalg.norm(yours["in"]) / jnp.linalg.norm(right["in"])
    require(
        jnp.isfinite(ratio),
        "The gradient is not finite. One part has weight 0: was it divided by its own weight?",
    )
    require(
        not close(yours, jax.tree.map(jnp.negative, right)),
        "This is the gradient with the opposite sign.",
    )
    require(
        close(yours, right),
        f"Not the gradient of the whole batch: its norm is {ratio:.2f} times the right one.",
    )
    program = _traced(your_accumulate, params, batch)
    sizes = {int(size) for size in re.findall(r"f32\[(\d+),5\] = tanh", program)}
    require(
        8 not in sizes,
        "The gradient is right, but all 8 examples go through the model at once, so no memory"
        " is saved. How many examples does a part have?",
    )
    require(
        sizes <= {2},
        f"The gradient is right, but each part has {min(sizes, default=0)} of the 8 examples:"
        " with M = 4, each has 2.",
    )
    require(
        "scan[" not in program,
        "The gradient is right, but a scan made it, as at the top of the notebook. The task is"
        " a Python loop.",
    )
    return "the gradient of the whole batch up to rounding, computed one part at a time."


def _traced(your_accumulate, params, batch):
    """Traces a learner's gradient with 4 minibatches and returns the program as text. The text
    is empty if JAX cannot trace the function, for example because of an `if` on a weight.
    """
    try:
        return str(jax.make_jaxpr(lambda *args: your_accumulate(*args, 4))(params, batch))
    except Exception:
        return ""


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
        f"SGD's update is the learning rate times the gradient; you said {sgd}. By what factor"
        " is the gradient too large?",
    )
    require(
        abs(adam / measured["Adam"] - 1) < 0.01,
        f"Adam divides the gradient by the root of its own mean square; you said {adam}."
        " What happens to a common factor of the two?",
    )
    return (
        f"measured, Adam's update grows by {measured['Adam']:.2f} and SGD's by"
        f" {measured['SGD']:.2f}."
    )


@exercise
def smallest_number_of_minibatches(your_smallest):
    """Checks `your_smallest(budget, arguments, parameters, activations, batch_size)`: the
    fewest minibatches that fit.

    `budget`, `arguments` and `activations` are bytes. It returns None if no number fits.
    """
    hint = "Which parts of the peak depend on M? Compute it on paper for M = 1 and M = 2 first."
    call(your_smallest, *_bytes(24, 100e6, 64), hint=hint)  # the whole batch fits
    for budget, parameters, batch_size, right in (
        (24, 100e6, 64, 1),
        (8, 100e6, 64, 4),
        (2.1, 100e6, 64, 32),
        (1.2, 100e6, 64, 64),
        (3.2, 5e8, 96, 24),
    ):
        yours = run(your_smallest, *_bytes(budget, parameters, batch_size))
        wrong = _what_is_wrong(yours, budget, parameters, batch_size, right)
        case = (
            f"budget {budget} GiB, arguments 0.5 GiB, {parameters / 1e6:.0f} million"
            f" parameters, activations 20 GiB, a batch of {batch_size}"
        )
        require(wrong is None, f"With {case}: {wrong}")
    impossible = run(your_smallest, *_bytes(1, 100e6, 64))
    require(
        impossible is None,
        f"1 GiB: you returned {impossible}. No M fits: one sequence alone needs 1.18 GiB."
        " Return None.",
    )
    return "and below 1.18 GiB no number of minibatches helps."


def _bytes(budget, parameters, batch_size):
    """Returns the arguments of a case of `smallest_number_of_minibatches`; the budget is in
    GiB, and arguments and activations are those of every case.
    """
    return budget * 2**30, 0.5 * 2**30, parameters, 20 * 2**30, batch_size


def _what_is_wrong(yours, budget, parameters, batch_size, right):
    """Returns a sentence about a wrong number of minibatches, None for the right one."""
    accumulator = 4 * parameters / 2**30

    def peak(M):
        parts = f"0.5 + {accumulator:.2f} + {20 / M:.2f}"
        return f"the peak is {parts} = {0.5 + accumulator + 20 / M:.2f} GiB"

    if yours is None:
        return (
            f"you returned None, but with M = {right} {peak(right)}. Do you return None before"
            " all divisors are tried, or count more than these three parts?"
        )
    if yours != int(yours) or yours < 1 or batch_size % yours:
        return (
            f"{yours} is no divisor of {batch_size}, so the minibatches would be of unequal"
            " size. Try divisors only."
        )
    if yours < right:
        forgotten = 0.5 + 20 / yours <= budget
        return f"with M = {yours} {peak(yours)}, too much." + (
            " Are arguments and accumulator (4 bytes per parameter) counted in full? Only"
            " activations are divided by M."
            if forgotten
            else ""
        )
    if yours > right:
        return (
            f"M = {yours} is not the smallest that fits: with M = {right} {peak(right)}. M may"
            f" be any divisor of {batch_size}: 1, {batch_size} itself, and divisors that are no"
            " powers of two."
        )
    return None


@exercise
def multi_steps_share(your_share):
    """Checks `your_share(counts, m)`, the factor that multiplies minibatch m's gradient before
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
        "A third of the right gradient. What does `MultiSteps` do with the sum of the M"
        " gradients?",
    )
    require(
        len(set(map(float, shares))) > 1,
        "All shares are equal. The last minibatch has one label, the others four.",
    )
    require(
        not close(jnp.array(shares, float), jnp.array([3 / 4, 3 / 4, 3])),
        "Upside down: a minibatch with more labels should count more.",
    )
    proportions = jnp.array(shares, float) / float(sum(shares))
    require(
        abs(mean / right - 1) < 1e-4 or not close(proportions, jnp.array(counts) / sum(counts)),
        f"The factors are in the right proportion, and the mean is {mean / right:.3g} times the"
        " right one. What must the factors add up to?",
    )
    require(
        abs(mean / right - 1) < 1e-4,
        f"With counts {counts} and your factors {[round(float(s), 3) for s in shares]} the"
        f" mean is {mean:.3f}; the gradient of the whole batch is {right:.3f}.",
    )
    two = [float(call(your_share, [6, 2], m, hint="")) for m in range(2)]
    require(
        close(jnp.array(two), jnp.array([1.5, 0.5])),
        f"Right for {len(counts)} minibatches and wrong for 2: take M from the length"
        " of `counts`.",
    )
    return "the mean of the gradients is the gradient of the whole batch."
