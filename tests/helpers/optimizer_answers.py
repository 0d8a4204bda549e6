"""Right and wrong answers to the exercises of notebook 17, for `test_check`."""

import jax.numpy as jnp

from course_lib.lessons import check
from course_lib.smaller_and_faster import optimizer_memory

FUNCTIONS = [check.lion_8bit]
PREDICTIONS = {check.lost_updates: 2, check.state_of_a_matrix: 3}
SIZE = 4096 * 11008


def lion(*, swapped=False, sign=jnp.sign, pack=optimizer_memory.quantize, keep=None):
    """Lion with an 8-bit momentum, or with a mistake."""

    def update(grad, packed, b1, b2):
        momentum = optimizer_memory.dequantize(packed)
        share = b2 if swapped else b1
        new = b2 * momentum + (1 - b2) * grad
        if keep is not None:
            new = keep(momentum, grad)
        return sign(share * momentum + (1 - share) * grad), pack(new)

    return update


def without_signs(x):
    return optimizer_memory.quantize(x, signed=False)


RIGHT = [
    (check.lion_8bit, (lion(),)),
    (check.lost_updates, (2.0**-8, 2.0**-7)),
    (check.state_of_a_matrix, (8 * SIZE, 2 * SIZE + 2 * 4 * SIZE // 256, 4 * (4096 + 11008))),
]
WRONG = [
    (check.lion_8bit, (lion(swapped=True),), "in the momentum"),
    (check.lion_8bit, (lion(sign=lambda x: x),), "needs its sign"),
    (check.lion_8bit, (lion(pack=lambda x: x),), "4 bytes per parameter"),
    (check.lion_8bit, (lion(keep=lambda momentum, grad: grad),), "new momentum is not"),
    (check.lion_8bit, (lion(keep=lambda momentum, grad: momentum),), "still the old one"),
    (check.lion_8bit, (lion(pack=without_signs),), "loses the negative"),
    (check.lion_8bit, (lambda *a: lion()(*a)[::-1],), "update first"),
    (check.lion_8bit, (lambda grad, packed, b1, b2: jnp.sign(grad),), "two things"),
    (check.lost_updates, (2.0**-7, 2.0**-6), "loses half"),
    (check.lost_updates, (2.0**-8, 2.0**-8), "twice as far"),
    (check.lost_updates, (2.0**-9, 2.0**-8), "largest update"),
    (check.state_of_a_matrix, (8 * SIZE, 2 * SIZE, 4 * 15104), "has a float32 scale"),
    (check.state_of_a_matrix, (8 * SIZE, 2 * SIZE + SIZE // 32, 15104), "takes 4 bytes"),
    (check.state_of_a_matrix, (4 * SIZE, 2 * SIZE + SIZE // 32, 4 * 15104), "AdamW: "),
    (check.state_of_a_matrix, (8 * SIZE, SIZE + SIZE // 64, 60416), "8-bit AdamW: "),
    (check.state_of_a_matrix, (8 * SIZE, 2 * SIZE + SIZE // 64, 60416), "in each of the two"),
    (check.state_of_a_matrix, (8, 2.03, 0.001), "bytes per parameter"),
]
