"""Checks of notebook 17's exercises."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import call, close, exercise, predicted, require
from course_lib.smaller_and_faster import optimizer_memory


@exercise
def lost_updates(near_one, near_three):
    """Checks the largest updates that bfloat16 parameters of 1 and 3 lose, if the sum is
    rounded to the nearest number.
    """
    predicted(
        near_one,
        near_three,
        hint="The section on parameters in bfloat16 says how far apart its numbers are from 1"
        " to 2. How far is it from 2 to 4, and which sums round back to the old number?",
    )
    for value, yours, name in ((1.0, near_one, "1"), (3.0, near_three, "3")):
        updates = np.arange(1, 2**12, dtype=np.float32) * np.float32(2.0**-16)
        sums = jnp.asarray(value + updates).astype(jnp.bfloat16).astype(jnp.float32)
        right = float(updates[np.asarray(sums) == value].max())
        require(
            abs(yours / (2 * right) - 1) > 0.01,
            f"{yours:g} is the distance from {name} to the next number. Rounding to the nearest"
            " one loses half of that.",
        )
        require(
            abs(yours / right - 1) < 0.01,
            f"Near {name} the largest update that is lost is not {yours:g}. Numbers lie"
            " 2^-7 apart from 1 to 2, and twice as far from 2 to 4.",
        )
    return "2^-8 near 1 and 2^-7 near 3; with a rate of 1e-3, most of Adam's updates."


@exercise
def state_of_a_matrix(adamw, eight_bits, adafactor):
    """Checks the bytes of optimizer state for one matrix of 4096 x 11008 float32 parameters:
    AdamW, 8-bit AdamW with blocks of 256, and Adafactor.
    """
    predicted(
        adamw,
        eight_bits,
        adafactor,
        hint="For each optimizer, list the arrays that it keeps for this matrix, with their"
        " shapes and dtypes: the notebook describes all three.",
    )
    size = 4096 * 11008
    right = {"AdamW": 8 * size, "8-bit AdamW": 2 * size + 8 * size // 256}
    right["Adafactor"] = 4 * (4096 + 11008)
    yours = {"AdamW": adamw, "8-bit AdamW": eight_bits, "Adafactor": adafactor}
    require(
        adamw != 8,
        "These are bytes per parameter: count those of the whole matrix.",
    )
    require(
        abs(eight_bits - 2 * size) > 1 and abs(eight_bits - (2 * size + 4 * size / 256)) > 1,
        "Each block of 256 numbers has a float32 scale, in each of the two moments.",
    )
    require(
        adafactor != 4096 + 11008,
        "This counts the numbers of Adafactor's row and column means; each takes 4 bytes.",
    )
    for name, value in right.items():
        require(
            abs(yours[name] - value) <= 1e-3 * value,
            f"{name}: {yours[name]:,.0f} bytes are too"
            f" {'many' if yours[name] > value else 'few'} for {size:,} parameters.",
        )
    return ", ".join(f"{name} {value:,}" for name, value in right.items()) + " bytes."


@exercise
def lion_8bit(your_update):
    """Checks `your_update(grad, packed, b1, b2) -> (update, packed)`: Lion's update from a
    momentum that is kept in 8 bits, by `optimizer_memory.quantize`.
    """
    keys = jax.random.split(jax.random.key(0), 2)
    grad, momentum = (jax.random.normal(key, (8, 512)) for key in keys)
    packed = optimizer_memory.quantize(momentum)
    old = optimizer_memory.dequantize(packed)
    hint = "Unpack the momentum with `optimizer_memory.dequantize`, compute, and pack it again."
    yours = call(your_update, grad, packed, 0.9, 0.95, hint=hint)
    require(
        isinstance(yours, tuple) and len(yours) == 2,
        "Return two things: the update and the packed momentum.",
    )
    update, new = yours
    require(
        not isinstance(update, optimizer_memory.Quantized),
        "Return the update first, then the packed momentum.",
    )
    require(jnp.shape(update) == grad.shape, f"The update has shape {jnp.shape(update)}.")
    require(
        not close(update, jnp.sign(0.95 * old + 0.05 * grad), 1e-3),
        "This is the sign of the new momentum. Lion weighs the gradient more in the update:"
        " with b1 there, with b2 in the momentum.",
    )
    require(
        not close(update, 0.9 * old + 0.1 * grad, 1e-3),
        "The update still needs its sign: all of Lion's numbers move by the same amount.",
    )
    require(
        close(update, jnp.sign(0.9 * old + 0.1 * grad), 1e-3),
        "The update is not sign(b1 * momentum + (1 - b1) * gradient).",
    )
    leaves = jax.tree.leaves(new)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    require(
        stored < 1.1 * grad.size,
        f"Right, but the new momentum takes {stored / grad.size:.0f} bytes per parameter."
        " Quantize it.",
    )
    require(
        isinstance(new, optimizer_memory.Quantized),
        "The packed momentum is what `optimizer_memory.quantize` returns.",
    )
    right = 0.95 * old + 0.05 * grad
    require(
        not close(optimizer_memory.dequantize(new), old, 0.03),
        "The momentum is still the old one: it becomes b2 * momentum + (1 - b2) * gradient.",
    )
    require(
        not close(optimizer_memory.dequantize(new, signed=False), jnp.maximum(right, 0), 0.03),
        "`signed=False` loses the negative numbers of the momentum.",
    )
    require(
        close(optimizer_memory.dequantize(new), right, 0.03),
        "The new momentum is not b2 * momentum + (1 - b2) * gradient.",
    )
    return f"{stored / grad.size:.2f} bytes of state per parameter, where AdamW has 8."
