"""Checks of notebook 21's exercises."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from course_lib import configs
from course_lib.lessons.check.answers import call, exercise, predicted, require, run
from course_lib.one_device import gradient_noise
from course_lib.program import checkpoints, settings

LLAMA_3 = 54 * 24 * 3600 / 419
"""Seconds between failures (https://arxiv.org/abs/2407.21783, section 3.3.4)."""


@exercise
def room_for_checkpoints(one, most):
    """Checks the GB of one checkpoint, and the GB that all checkpoints of a run take at most,
    for 7 billion float32 parameters with float32 AdamW.
    """
    predicted(one, most, hint="Which numbers does the next step read, per parameter?")
    for guess, mistake in (
        (28, "28 GB are the parameters alone. AdamW would begin again with moments of 0."),
        (56, "56 GB are two numbers per parameter. AdamW has two moments per parameter."),
        (112, "112 GB include the gradient. The next step does not read it: it computes one."),
        (42, "42 GB are three numbers of 2 bytes per parameter. A float32 number has 4."),
        (84e9, "This is in bytes. A GB is 10^9 bytes."),
        (84e9 / 2**30, "This is in GiB, 2^30 bytes. A GB is 10^9 bytes."),
    ):
        require(not math.isclose(one, guess, rel_tol=2e-3), mistake)
    require(
        math.isclose(one, 84, rel_tol=2e-3),
        f"One checkpoint is not {one:g} GB. List the numbers that the next step reads: each has"
        " 4 bytes per parameter.",
    )
    count = most / one
    for guess, mistake in (
        (1, "This is room for one checkpoint. The program keeps several."),
        (3, "These are the last three. The best one may be older than they are."),
        (4, "Four are there already while the program writes the next one."),
    ):
        require(not math.isclose(count, guess, rel_tol=2e-3), mistake)
    require(
        math.isclose(count, 5, rel_tol=2e-3),
        f"{most:g} GB are {count:.3g} checkpoints. Which ones are there just before the program"
        " deletes an old one?",
    )
    return "12 bytes per parameter, and five checkpoints while one is being written."


@exercise
def lost_time(your_lost):
    """Checks `your_lost(interval, write, between)`: the share of time that checkpoints and
    failures cost.

    A checkpoint takes `write` seconds, the program writes one every `interval` seconds, and
    failures come every `between` seconds and lose half an interval each.
    """
    hint = "Take one day: how many seconds go into writing, and how many do failures cost?"
    yours = call(your_lost, 100.0, 10.0, 1000.0, hint=hint)
    require(
        not _near(yours, 0.1) and not _near(yours, 10.0),
        "Failures cost time, too: each loses half an interval.",
    )
    require(not _near(yours, 0.05), "Writing costs time, too: `write` seconds per interval.")
    require(
        not _near(yours, 0.2), "A failure loses half an interval on average, not all of it."
    )
    require(
        not _near(yours, 60.0),
        "These are seconds per interval. Divide each cost by the time in which it comes once.",
    )
    require(not _near(yours, 15.0), "This is in percent. Return the share.")
    for interval, write, between in ((100.0, 10.0, 1000.0), (600.0, 30.0, 9000.0)):
        yours, right = (
            run(your_lost, interval, write, between),
            write / interval + interval / (2 * between),
        )
        require(
            _near(yours, right),
            f"Every {interval:.0f} s, {write:.0f} s to write, a failure every {between:.0f} s:"
            f" {right:.2%} is lost, not {yours:.2%}.",
        )
    best = min(range(10, 20_000, 10), key=lambda interval: your_lost(interval, 10.0, LLAMA_3))
    return (
        f"save every {best / 60:.1f} minutes, and {your_lost(best, 10.0, LLAMA_3):.1%} is lost;"
        f" every hour, {your_lost(3600.0, 10.0, LLAMA_3):.1%}."
    )


def _near(yours, right):
    return math.isclose(float(yours), right, rel_tol=1e-6)


@exercise
def noise_scale(signal, trace, scale):
    """Checks |G|^2, tr Sigma and their ratio for points of 500 coordinates with standard
    deviation 2, and parameters that are 0.5 off in each.
    """
    predicted(signal, trace, scale, hint="Both are sums over 500 coordinates.")

    def gradient(params, batch, rng):
        return params - batch.mean(axis=0), {}

    points = 2.0 * jax.random.normal(jax.random.key(0), (64, 4, 500))
    noise = gradient_noise.measure(gradient, jnp.full(500, 0.5), list(points))
    require(
        not math.isclose(signal, 250),
        "250 is the sum of the offsets. |G|^2 is the sum of their squares.",
    )
    require(
        not math.isclose(trace, 1000),
        "1000 is the sum of the standard deviations. The trace is the sum of the variances.",
    )
    require(
        not math.isclose(trace, 500),
        "500 would be the trace for one batch of 4. Sigma belongs to one example.",
    )
    require(
        abs(signal / noise.signal - 1) < 0.1,
        f"Measured, |G|^2 is {'larger' if noise.signal > signal else 'smaller'} than"
        f" {signal:g}. Without noise, each coordinate of the gradient is its parameter's"
        " offset.",
    )
    require(
        abs(trace / noise.noise - 1) < 0.1,
        f"Measured, tr Sigma is {'larger' if noise.noise > trace else 'smaller'} than"
        f" {trace:g}. Which variance does one coordinate of one example's gradient have?",
    )
    require(
        math.isclose(scale, trace / signal, rel_tol=0.05),
        f"The noise scale is the ratio tr Sigma / |G|^2 of your two numbers, not {scale:g}.",
    )
    return (
        f"measured, |G|^2 = {noise.signal:.0f}, tr Sigma = {noise.noise:.0f}, scale"
        f" {noise.scale:.1f}; the squared norm of one batch would give"
        f" {noise.noise / noise.square_norm(4):.1f}."
    )


FIELDS = {
    "training.steps": "more steps change none of those already taken.",
    "mesh.tensor": "a mesh changes the order of sums, not what is computed.",
    "run.log_every": "logging changes no number.",
    "data.batch_size": "each step would see other examples.",
    "optimizer.learning_rate": "no configuration would describe the curve.",
    "optimizer.total_steps": "the schedule would have another rate at each step.",
}


@exercise
def may_change(your_rule):
    """Checks `your_rule(field)`: whether a run can continue after a change of this field."""
    call(
        your_rule,
        "training.steps",
        hint="Ask whether a step computes something else, beyond rounding.",
    )
    saved = settings.complete(configs.get("cpu"))
    for field, why in FIELDS.items():
        changed = settings.complete(saved)
        settings.set_field(changed, field, "0.5" if field == "optimizer.learning_rate" else "2")
        allowed = not checkpoints.differences(settings.fixed(saved), settings.fixed(changed))
        answer = run(your_rule, field)
        require(
            isinstance(answer, bool | np.bool_),
            f"For {field} you return {answer!r}: True or False is expected.",
        )
        require(
            answer == allowed,
            f"{field} {'may' if allowed else 'must not'} change: {why}",
        )
    return "three may change, three must not."
