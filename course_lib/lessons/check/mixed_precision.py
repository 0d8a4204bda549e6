"""Checks of notebook 01's exercises."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    same_shapes,
)
from course_lib.one_device import mixed_precision


@exercise
def loss_scale_range(lowest, highest):
    """Checks the powers of two between which float16 holds gradient entries from 1e-9 to 2, if
    subnormals are enough.
    """
    predicted(lowest, highest, hint="Which power lifts 1e-9 to the smallest subnormal number?")
    half = mixed_precision.describe("float16")
    if highest > 100:  # the powers themselves, not their exponents
        lowest, highest = (float(np.log2(n)) if n > 0 else -np.inf for n in (lowest, highest))
    require(
        all(np.isfinite(n) and n == int(n) for n in (lowest, highest)) and abs(highest) < 1000,
        "A power of two has a whole exponent: give the two exponents.",
    )
    lowest, highest = int(lowest), int(highest)
    require(
        lowest <= highest,
        f"2^{lowest} is above 2^{highest}; the lower power comes first. With full precision"
        " (normal numbers) there is indeed no scale: here the smallest subnormal is enough.",
    )
    require(
        2.0 * 2.0**highest <= half.largest,
        f"2 x 2^{highest} = {2 * 2.0**highest:,.0f} is infinite in float16, which ends at"
        f" {half.largest:,.0f}.",
    )
    require(
        2.0 * 2.0 ** (highest + 1) > half.largest,
        f"2^{highest} fits, and 2^{highest + 1} would, too.",
    )
    require(
        1e-9 * 2.0**lowest >= half.smallest_subnormal,
        f"1e-9 x 2^{lowest} = {1e-9 * 2.0**lowest:.1e} is below the smallest subnormal,"
        f" {half.smallest_subnormal:.1e}.",
    )
    require(
        1e-9 * 2.0 ** (lowest - 1) < half.smallest_subnormal,
        f"2^{lowest} is enough, and 2^{lowest - 1} would be, too.",
    )
    return f"from 2^{lowest} to 2^{highest}, a window of a factor of {2 ** (highest - lowest)}."


@exercise
def scaled_step(your_step):
    """Checks `your_step(loss, params, scale, learning_rate) -> params`: SGD in float16 with a
    loss scale.

    `loss(params)` computes in float16; an update that is not finite is skipped.
    """
    params = {"w": jnp.array([0.5, -0.25], jnp.float32)}

    def loss(params):  # the loss is 2^-25 w^2, and its gradient is zero in float16
        half = params["w"].astype(jnp.float16)
        product = (half * jnp.float16(2**-12)) * (half * jnp.float16(2**-13))
        return jnp.sum(product).astype(jnp.float32)

    hint = "Differentiate `scale * loss(params)`, then divide the gradient by the scale."
    rate = 2.0**20
    yours = call(your_step, loss, params, 2.0**14, rate, hint=hint)
    same_shapes(yours, params, "the new parameters")
    require(
        np.isfinite(np.asarray(yours["w"])).all(),
        "Not finite, though the scaled gradient is: something after it is computed in float16."
        " Are the parameters that you differentiate float32?",
    )
    right = {"w": params["w"] - rate * 2 * params["w"] * 2.0**-25}
    unscaled = {"w": params["w"] - rate * 2 * params["w"] * 2.0**-25 * 2.0**14}
    require(
        not close(yours, unscaled, 1e-3),
        "The step is 16,384 times too long: divide the gradient by the scale before the"
        " update.",
    )
    moved, without_rate = yours["w"] - params["w"], -2 * params["w"] * 2.0**-25
    require(
        not close(moved, without_rate, 1e-3),
        "The step is a millionth of the right one: multiply the gradient by the learning rate.",
    )
    require(
        not close(yours, params, 1e-6),
        "Nothing moved. Either the gradient became zero in float16: multiply the loss by the"
        " scale before differentiating. Or the division by the scale took place in float16. Or"
        " a finite update was skipped.",
    )
    uphill = {"w": 2 * params["w"] - right["w"]}
    require(not close(yours, uphill, 1e-3), "The step goes uphill: subtract it.")
    require(close(yours, right, 1e-3), f"Expected {right['w']}, and you returned {yours['w']}.")

    yours = call(your_step, loss, params, 2.0**40, rate, hint=hint)
    require(
        np.isfinite(np.asarray(yours["w"])).all(),
        "With a scale of 2^40 the gradient is infinite, and so are your parameters now: skip"
        " this update.",
    )
    require(
        close(yours, params, 1e-6),
        "With a scale of 2^40 the parameters should stay as they were.",
    )

    def one_entry(params):  # the gradient is [1, nan]
        first, second = params["w"].astype(jnp.float16)
        return (first + jnp.sqrt(second - second)).astype(jnp.float32)

    yours = call(your_step, one_entry, params, 2.0, 0.1, hint=hint)
    require(
        close(yours, params, 1e-6),
        "One entry of the gradient is not a number, the other is finite: skip the whole"
        " update.",
    )
    two = {"a": jnp.ones(1, jnp.float32), "b": jnp.ones(1, jnp.float32)}

    def one_array(params):  # the gradient of a is 1, that of b is nan
        a, b = params["a"].astype(jnp.float16), params["b"].astype(jnp.float16)
        return (a + jnp.sqrt(b - b)).sum().astype(jnp.float32)

    yours = call(your_step, one_array, two, 2.0, 0.1, hint=hint)
    require(
        close(yours, two, 1e-6),
        "The gradient of one array is not finite, and the other array moved: decide once, for"
        " all arrays.",
    )
    return "scaled, unscaled, and skipped where it overflows."


@exercise
def stochastic_round(your_round):
    """Checks `your_round(key, x) -> bfloat16`: float32 rounded up or down at random, right in
    the mean.
    """
    x = jnp.concatenate([jnp.full(4096, 1 + 2.0**-9), jnp.full(4096, -3.003)]).astype(
        jnp.float32
    )
    hint = "Add 16 random bits below the ones that stay, then cut the last 16 off."
    yours = call(your_round, jax.random.key(0), x, hint=hint)
    require(
        jnp.shape(yours) == x.shape,
        f"The result has shape {jnp.shape(yours)}, x has {x.shape}.",
    )
    require(yours.dtype == jnp.bfloat16, f"The result is {yours.dtype}, not bfloat16.")
    rounded = np.asarray(yours.astype(jnp.float32))
    for i, name in ((0, "1.00195"), (4096, "-3.003")):
        part = rounded[i : i + 4096]
        value = float(x[i])
        gap = 2.0**-7 if i == 0 else 2.0**-6
        require(
            np.abs(part - value).max() < gap,
            f"{name} became {part[np.abs(part - value).argmax()]}, further away than the"
            " next number.",
        )
        require(
            len(np.unique(part)) == 2,
            f"All 4,096 copies of {name} became {part[0]}. Each number needs 16 random bits of"
            " its own.",
        )
        mean = part.mean()
        require(
            abs(mean - value) < 0.05 * gap,
            f"The mean of 4,096 copies of {name} is {mean:.5f}. The nearer"
            " the value lies to the upper neighbour, the likelier that one must be. (A"
            " cast rounds to the nearest: which bits does it still find?)",
        )
    with_another_key = call(your_round, jax.random.key(1), x, hint=hint)
    require(
        (np.asarray(with_another_key) != np.asarray(yours)).any(),
        "Two keys gave the same random bits: a weight that is rounded up once is rounded up in"
        " every step.",
    )
    exact = call(your_round, jax.random.key(1), jnp.array([1.0, -0.5]), hint=hint)
    require(
        close(exact.astype(jnp.float32), jnp.array([1.0, -0.5]), 0),
        f"1 and -0.5 are bfloat16 numbers and should stay; you returned {exact}.",
    )
    return "up or down at random, and right in the mean."


@exercise
def small_tanh(your_forward, your_backward):
    """Checks the two halves of a tanh that saves 2 bytes per number.

    `your_forward(x) -> (result, saved)` and `your_backward(saved, g) -> gradient`, where x, the
    result, g (the gradient of the result) and the gradient are float32 [4096].
    """
    x = jnp.linspace(-4, 4, 4096)
    g = jnp.where(jnp.arange(x.size) % 2, -3.0, 2.0)
    hint = "forward returns the result and what the backward pass needs."
    pair = call(your_forward, x, hint=hint)
    require(
        isinstance(pair, tuple) and len(pair) == 2,
        "forward should return two things: the result, and what is saved.",
    )
    result, saved = pair
    same_shapes(result, x, "the result")
    require(
        close(result, jnp.tanh(x), 1e-6),
        "The result is not the tanh of float32. Round what is saved, not the result.",
    )
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(saved)) / x.size
    require(num_bytes <= 2, f"{num_bytes:g} bytes per number are saved; 2 are enough.")
    hint = "backward returns the derivative of the tanh, times g."
    yours = call(your_backward, saved, g, hint=hint)
    same_shapes(yours, x, "the gradient")
    derivative = 1 - jnp.tanh(x) ** 2
    require(
        not close(yours, derivative, 0.01),
        "This is the derivative of the tanh. The chain rule multiplies it by g.",
    )
    ratio = np.asarray(yours / (derivative * g))
    off = np.abs(ratio - 1)
    typical, worst = np.argsort(off)[[off.size // 2, -1]]
    require(
        off[typical] < 0.1,
        f"The gradient at x = {x[typical]:.2f} is {ratio[typical]:.3g} times the right one.",
    )
    near_zero = off[np.abs(np.asarray(x)) < 0.5].max()
    require(
        near_zero < 0.005,
        f"The gradient is off by {near_zero:.2%} even near x = 0, where nothing cancels. Only"
        " the saved number has 16 bits: compute with it in float32.",
    )
    require(
        off[worst] < 0.005,
        f"The gradient at x = {x[worst]:.2f} is {ratio[worst]:.3g} times the right one. There"
        " 1 - tanh^2 is near 0, and a small rounding of x or of tanh is large beside it. Which"
        " number could you round last, to a floating-point type?",
    )
    return (
        f"{num_bytes:g} bytes per number, and the gradient is off by {off[worst]:.2%} at most."
    )
