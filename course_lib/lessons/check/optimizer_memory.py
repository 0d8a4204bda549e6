"""Checks of notebook 17's exercises."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import close
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, normal, share
from course_lib.smaller_and_faster import optimizer_memory


def largest_lost(value):
    """Returns the largest update that is lost near a value."""
    updates = np.arange(1, 2**12, dtype=np.float32) * np.float32(2.0**-16)
    return float(updates[np.asarray(jnp.asarray(value + updates, jnp.bfloat16)) == value].max())


lost_updates = Numbers(
    "lost_updates",
    lambda: {"near_one": largest_lost(1.0), "near_three": largest_lost(3.0)},
    tolerance=0.01,
    near=0.01,
    rows={
        "near_one": {"distance from 1": share(2), "near 1": ...},
        "near_three": {"distance from 3": share(2), "near 3": ...},
    },
)

SIZE = 4096 * 11008

state_of_a_matrix = Numbers(
    "state_of_a_matrix",
    lambda: {
        "adamw": 8 * SIZE,
        "eight_bits": 2 * SIZE + 8 * SIZE // 256,
        "adafactor": 4 * (4096 + 11008),
        "size": SIZE,
    },
    tolerance=1e-3,
    near=1e-3,
    rows={
        "adamw": {
            "per parameter": 8,
            "numbers of AdamW": share(1 / 4),
            "one moment": share(1 / 2),
            "unit": [share(1 / unit) for unit in (1e6, 2**20, 1e9, 2**30)],
            "AdamW": ...,
        },
        "eight_bits": {
            "one moment of 8 bits": share(1 / 2),
            "scales": [2 * SIZE + part * SIZE // 256 for part in (0, 2, 4)],
            "8-bit": ...,
        },
        "adafactor": {
            "numbers": share(1 / 4),
            "one dimension": [4 * 4096, 4 * 11008],
            "Adafactor": ...,
        },
    },
)


def lion(grad, packed, b1, b2):
    momentum = optimizer_memory.dequantize(packed)
    update = jnp.sign(b1 * momentum + (1 - b1) * grad)
    momentum = b2 * momentum + (1 - b2) * grad
    return update, optimizer_memory.quantize(momentum)


class Lion(Outcome):
    """The update, and the momentum that is kept."""

    update = property(lambda it: it.result[0])
    new = property(lambda it: it.result[1])
    result_shape = property(lambda it: np.shape(it.update))
    old = property(lambda it: optimizer_memory.dequantize(it.args[1]))
    packed_again = property(
        lambda it: optimizer_memory.dequantize(optimizer_memory.quantize(it.old))
    )
    stored = property(
        lambda it: (
            sum(jnp.asarray(one).nbytes for one in jax.tree.leaves(it.new)) / it.grad.size
        )
    )

    def moves_by(self, b1, sign=jnp.sign):
        return close(self.update, sign(b1 * self.old + (1 - b1) * self.grad), 1e-3)

    def keeps(self, momentum, tolerance=0.03, **options):
        return close(optimizer_memory.dequantize(self.new, **options), momentum, tolerance)

    right_momentum = property(lambda it: it.b2 * it.old + (1 - it.b2) * it.grad)


def gradient_and_momentum():
    grad, momentum = normal(0, (8, 512), (8, 512))
    packed = optimizer_memory.quantize(momentum)
    return [(grad, packed, 0.9, 0.95), (grad, packed, 0.7, 0.99)]


lion_8bit = Function(
    "lion_8bit",
    lion,
    cases=gradient_and_momentum,
    outcome=Lion,
    rows={
        "momentum alone": (
            change("return update, ", "return "),
            lambda it: getattr(it.update, "dtype", None) == np.uint8,
        ),
        "no pair": change(
            "return update, optimizer_memory.quantize(momentum)", "return update"
        ),
        "exchanged": (
            lambda *args: lion(*args)[::-1],
            lambda it: isinstance(it.update, optimizer_memory.Quantized),
        ),
        "shape": (change("jnp.sign", "jnp.sum"), lambda it: it.result_shape != it.grad.shape),
        "sign of the new": (
            change("b1 * momentum + (1 - b1)", "b2 * momentum + (1 - b2)"),
            lambda it: it.moves_by(it.b2),
        ),
        "no sign": (change("jnp.sign", ""), lambda it: it.moves_by(it.b1, jnp.asarray)),
        "constants": (
            [
                change("b1 * momentum + (1 - b1)", "0.9 * momentum + 0.1"),
                change("b2 * momentum + (1 - b2)", "0.95 * momentum + 0.05"),
            ],
            lambda it: (
                it.case == 1
                and (it.moves_by(0.9) or it.keeps(0.95 * it.old + 0.05 * it.grad, 0.02))
            ),
        ),
        "another": (change("jnp.sign", "-jnp.sign"), lambda it: not it.moves_by(it.b1)),
        "bytes": (change("optimizer_memory.quantize", ""), lambda it: it.stored >= 1.5),
        "not quantized": (
            change("optimizer_memory.quantize(momentum)", "momentum.astype(jnp.int8)"),
            lambda it: not isinstance(it.new, optimizer_memory.Quantized),
        ),
        "old": (
            change("    momentum = b2 * momentum + (1 - b2) * grad\n", ""),
            lambda it: it.keeps(it.old, 1e-5) or it.keeps(it.packed_again, 1e-5),
        ),
        "unsigned": (
            change("quantize(momentum)", "quantize(momentum, signed=False)"),
            lambda it: it.keeps(jnp.maximum(it.right_momentum, 0), signed=False),
        ),
        "another momentum": (
            [
                change("b2 * momentum + (1 - b2) * grad", "grad"),
                change("b2 * momentum + (1 - b2) * grad", "0.99 * momentum + 0.01 * grad"),
            ],
            lambda it: not it.keeps(it.right_momentum),
        ),
    },
)
