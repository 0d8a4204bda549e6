"""The check of notebook 09's exercise about GPipe, on four devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.exercises import change, normal
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices
from course_lib.many_devices import meshes

STAGES, MICROBATCHES = 4, 6


def over_pipe(x):
    return jax.lax.psum(x, "pipe")


def pass_on(h):
    return jax.lax.ppermute(h, "pipe", [(0, 1), (1, 2), (2, 3)])


def pipeline(kernel, x, y):
    """GPipe on one of four devices."""
    M, S, stage = len(x), STAGES, jax.lax.axis_index("pipe")

    def slot(carry, time):
        arrived, error = carry
        h = jnp.where(stage == 0, x[time % M], arrived)
        h = h + jnp.tanh(h @ kernel[0])
        is_last = (stage == S - 1) & (time >= S - 1)
        error += jnp.where(is_last, jnp.sum((h - y[(time - S + 1) % M]) ** 2), 0.0)
        return (pass_on(h), error), None

    start = meshes.vary((jnp.zeros(x.shape[1:]), jnp.zeros(())), "pipe")
    (_, error), _ = jax.lax.scan(slot, start, jnp.arange(M + S - 1))
    return over_pipe(error)


def on_one_device(kernels, x, y, residual=1):
    for kernel in kernels:
        x = residual * x + jnp.tanh(x @ kernel)
    return jnp.sum((x - y) ** 2)


def gathered(change=lambda *arrays: arrays, **options):
    """One device's loss of other kernels, inputs or labels, on each device."""

    def loss(kernel, x, y):
        kernels = jax.lax.all_gather(kernel[0], "pipe")
        return jax.lax.pmean(on_one_device(*change(kernels, x, y), **options), "pipe")

    return loss


def whole_batch(kernel, x, y):
    """Passes all six microbatches on at once."""
    return pipeline(kernel, x.reshape(1, -1, 8), y.reshape(1, -1, 8))


def everywhere(h):
    """Sends each activation to all devices, which keep one."""
    stages = jnp.arange(STAGES)[:, None, None]
    sent = jnp.where(stages == jax.lax.axis_index("pipe") + 1, h, 0)
    return meshes.vary(over_pipe(sent)[jax.lax.axis_index("pipe")], "pipe")


class Losses(OnDevices):
    """The loss of each device, and what the gradient sends."""

    M = MICROBATCHES
    loss = property(lambda it: float(it.result[0]))
    wanted = property(lambda it: float(it.right[0]))

    def is_loss(self, loss):
        return abs(self.loss - loss) <= 1e-4 * abs(loss)

    is_rounded = property(lambda it: abs(it.loss - it.wanted) < 2e-3 * it.wanted)
    are_right = property(lambda it: np.abs(it.result - it.right) < 1e-4 * it.right)

    @property
    def divided_by(self):
        _, x, _ = self.args
        counts = self.M, x[0].size, x.size, *x[0].shape
        return next((count for count in counts if self.is_loss(self.wanted / count)), None)

    @property
    def count(self):
        """How many of the first microbatches are in the loss, None if it is not their loss."""
        kernels, x, y = self.args
        losses = {n: on_one_device(kernels, x[:n], y[:n]) for n in range(1, self.M)}
        return next((n for n, loss in losses.items() if self.is_loss(loss)), None)

    activation = property(lambda it: it.args[1][0].nbytes)
    slots = property(lambda it: 2 * (it.M + STAGES - 1))  # forward and backward
    passed = property(lambda it: it.both.payload("collective-permute", "pipe") // it.activation)
    enough = property(lambda it: it.slots * it.activation)


def six_microbatches():
    kernels, x, y = normal(3, (4, 8, 8), (6, 2, 8), (6, 2, 8))
    return [(0.3 * kernels, x, y)]


gpipe = DeviceFunction(
    "gpipe",
    pipeline,
    one_device=on_one_device,
    cases=six_microbatches,
    axes={"pipe": STAGES},
    in_specs=(P("pipe"), P(), P()),
    stacked=True,
    outcome=Losses,
    rows={
        "no number": (lambda kernel, x, y: x, lambda it: it.result_shape != ()),
        "last alone": (
            change("over_pipe(", "("),
            lambda it: it.are_right[-1] and not it.are_right.all(),
        ),
        "quarter": change("(error)", "(error / 4)"),
        "divided": (change("(error)", "(error / 6)"), lambda it: it.divided_by),
        "other y": [
            gathered(lambda w, x, y, s=s: (w, x, jnp.roll(y, s, axis=0))) for s in range(1, 6)
        ],
        "no residual": gathered(residual=0),
        "zeros": gathered(lambda w, x, y: (w[-1:], 0 * x, y)),
        "one x": gathered(lambda w, x, y: (w, jnp.broadcast_to(x[:1], x.shape), y)),
        "y of slot": gathered(lambda w, x, y: (w, x, y[np.array([3, 4, 5, 5, 5, 5])])),
        "without first": gathered(lambda w, x, y: (w, x[1:], y[1:])),
        "first ones": (
            [gathered(lambda w, x, y, n=n: (w, x[:n], y[:n])) for n in range(1, 6)],
            lambda it: it.count,
        ),
        "rounded": (
            change("h @ kernel[0]", "jnp.bfloat16(h) @ jnp.bfloat16(kernel[0])"),
            lambda it: not it.are_right.all() and it.is_rounded,
        ),
        "too much": (
            change("(error)", "(2 * error)"),
            lambda it: it.loss >= it.wanted * (1 + 1e-4),
        ),
        "another": (change("(error)", "(0.9 * error)"), lambda it: not it.are_right.all()),
        "gathers": gathered(),
        "gradient": change("% M], arrived", "% M], jax.lax.stop_gradient(arrived)"),
        "passed on": (whole_batch, lambda it: it.passed > it.slots),
        "sends more": (
            change("pass_on(", "everywhere("),
            lambda it: not it.passed or it.both.payload() > it.enough + 64,  # the loss
        ),
    },
)
