"""Right and wrong answers to the exercises of notebook 09, for `test_check`."""

import fractions

import jax
import jax.numpy as jnp

from course_lib.lessons import check

FUNCTIONS = [check.one_f_one_b, check.gpipe]
PREDICTIONS = {
    check.bubble_share: 3,
    check.stash: 2,
    check.shared_slots: 3,
    check.fast_pipeline: 3,
}


def order(ahead=lambda device, S: S - device, microbatches=lambda M: M, spell=str):
    """1F1B, or what becomes of it with another number of forwards ahead."""

    def one_f_one_b(device, S, M):
        count = microbatches(M)
        first = min(ahead(device, S), count)
        words = [f"F{m}" for m in range(first)]
        for m in range(count):
            words.append(f"B{m}")
            words += [f"F{first + m}"] if first + m < count else []
        return [spell(word) for word in words]

    return one_f_one_b


def mean_of_six(error, axis):
    return jax.lax.psum(error, axis) / 6


def pipeline(
    slots=3,
    masked=True,
    total=jax.lax.psum,
    stop=False,
    whole=False,
    alike=False,
    late=0,
    finished=lambda time, M: time >= 3,
    compared=lambda time, M: (time - 3) % M,
    layer=lambda h, kernel: h + jnp.tanh(h @ kernel),
    to_next=((0, 1), (1, 2), (2, 3)),
    enters=lambda time, M: time % M,
):
    """GPipe on four devices: the right one, or with a part changed."""

    def loss(kernel, x, y):
        stage = jax.lax.axis_index("pipe")
        x, y = (x.reshape(1, -1, 8), y.reshape(1, -1, 8)) if whole else (x, y)
        M = len(x)

        def slot(carry, time):
            arrived, error = carry
            arrived = jax.lax.stop_gradient(arrived) if stop else arrived
            h = jnp.where(stage == 0, x[enters(time, M)], arrived)
            h = layer(h, kernel[0])
            adds = (stage == 3) & finished(time, M) if masked else True
            error += jnp.where(adds, jnp.sum((h - y[compared(time - late, M)]) ** 2), 0.0)
            return (jax.lax.ppermute(h, "pipe", to_next), error), None

        zero = 0.0 if alike else 0.0 * stage
        start = jnp.zeros(x.shape[1:]) + zero, zero
        (_, error), _ = jax.lax.scan(slot, start, jnp.arange(M + slots))
        return total(error, "pipe")

    return loss


def gathered(kernel, x, y):
    for layer in jax.lax.all_gather(kernel[0], "pipe"):
        x = x + jnp.tanh(x @ layer)
    return jax.lax.pmean(jnp.sum((x - y) ** 2), "pipe")


RIGHT = [
    (check.bubble_share, (0.226, 134, 45)),
    (check.bubble_share, (fractions.Fraction(7, 31), 134, 45)),
    (check.one_f_one_b, (order(),)),
    (check.gpipe, (pipeline(),)),
    (check.stash, (3200, 800)),
    (check.shared_slots, (1, 5, 4)),
    (check.fast_pipeline, ("zero_bubble", 32, 1)),
]
WRONG = [
    (check.bubble_share, (7 / 24, 134, 45), "Megatron"),
    (check.bubble_share, (22.6, 134, 45), "at most 1"),
    (check.bubble_share, (0.25, 134, 45), "how many of them are empty"),
    (check.bubble_share, (0.226, 133, 45), "5.00% of the time"),
    (check.bubble_share, (0.226, 200, 45), "1f1b: fewer"),
    (check.bubble_share, (0.226, 134, 134), "zero_bubble: fewer"),
    (check.one_f_one_b, (order(lambda device, S: 100),), "live microbatches at once"),
    (check.one_f_one_b, (order(lambda device, S: S),), "device 1 has 4 live"),
    (check.one_f_one_b, (order(lambda device, S: S - device - 1),), "forever"),
    (check.one_f_one_b, (order(lambda device, S: max(1, S - device - 1)),), "too few forwards"),
    (check.one_f_one_b, (order(microbatches=lambda M: M - 1),), "comes once"),
    (check.one_f_one_b, (order(spell=str.lower),), "Return a list"),
    (check.gpipe, (pipeline(slots=0),), "Only 3 of the 6"),
    (check.gpipe, (pipeline(masked=False),), "Is too much added?"),
    (check.gpipe, (pipeline(layer=lambda h, kernel: jnp.tanh(h @ kernel)),), "to its input"),
    (check.gpipe, (pipeline(to_next=((3, 2), (2, 1), (1, 0))),), "computes with zeros"),
    (check.gpipe, (pipeline(enters=lambda time, M: 0),), "the result of microbatch 0"),
    (check.gpipe, (pipeline(slots=1),), "Only 4 of the 6"),
    (
        check.gpipe,
        (pipeline(finished=lambda time, M: (time >= 3) & (time < M)),),
        "does it add",
    ),
    (check.gpipe, (pipeline(finished=lambda time, M: time > 3),), "Microbatch 0 is not in"),
    (check.gpipe, (pipeline(compared=lambda time, M: time),), "is compared with y[t]"),
    (check.gpipe, (pipeline(enters=lambda time, M: M - 1),), "which microbatch enters"),
    (check.gpipe, (pipeline(layer=lambda h, kernel: 0.9 * h),), "each stage work on"),
    (check.gpipe, (pipeline(total=lambda error, axis: error),), "last device has the loss"),
    (check.gpipe, (pipeline(total=jax.lax.pmean),), "A quarter"),
    (check.gpipe, (pipeline(total=mean_of_six),), "divided by 6"),
    (check.gpipe, (pipeline(alike=True),), "starts with a value that is equal"),
    (check.gpipe, (pipeline(late=1),), "the y of another one"),
    (check.gpipe, (pipeline(stop=True),), "the gradient is not"),
    (
        check.gpipe,
        (lambda *args: jax.lax.stop_gradient(pipeline()(*args)),),
        "the gradient is not",
    ),
    (check.gpipe, (pipeline(whole=True),), "arrays are passed on"),
    (check.gpipe, (gathered,), "arrays are gathered"),
    (check.gpipe, (lambda kernel, x, y: x,), "one number"),
    (check.stash, (2560, 640), "count 4 activations"),
    (check.stash, (3200 * 2**20, 800), "How many MiB"),
    (check.stash, (32 * 33 * 20, 800), "whole model's"),
    (check.stash, (25600, 800), "before the first backward"),
    (check.stash, (3200, 3200), "long before"),
    (check.stash, (3200, 100), "its first backward begins"),
    (check.shared_slots, (0, 5, 4), "four forwards"),
    (check.shared_slots, (4, 5, 4), "takes its slot before its backward"),
    (check.shared_slots, (1, 8, 4), "Not all 8"),
    (check.shared_slots, (1, 4, 4), "come before backward m"),
    (check.shared_slots, (1, 5, 8), "not the fewest"),
    (check.shared_slots, (1, 5, 3), "loses its input"),
    (check.fast_pipeline, ("gpipe", 32, 1), "64 sequences; 24 fit"),
    (check.fast_pipeline, ("1f1b", 32, 1), "47 the bubble"),
    (check.fast_pipeline, ("zero_bubble", 64, 1), "48 the fixed part"),
    (check.fast_pipeline, ("zero_bubble", 16, 1), "32 sequences"),
    (check.fast_pipeline, ("zero_bubble", 48, 1), "divide 64"),
    (check.fast_pipeline, ("1f1b", 32, 1.9), "a whole number"),
    (check.fast_pipeline, ("1f1b", 32, 2), "does not exist"),
    (check.fast_pipeline, ("1F1B", 32, 1), "is one of"),
]
