"""Checks of notebook 22's exercises."""

import math

import jax
import jax.numpy as jnp

from course_lib.lessons.check.exercises import Numbers
from course_lib.one_device import gradient_noise


def measured_noise():
    def gradient(params, batch, rng):
        return params - batch.mean(axis=0), {}

    points = 2.0 * jax.random.normal(jax.random.key(0), (64, 4, 500))
    noise = gradient_noise.measure(gradient, jnp.full(500, 0.5), list(points))
    numbers = {"signal": noise.signal, "trace": noise.noise, "scale": noise.scale}
    return numbers | {"one batch": noise.noise / noise.square_norm(4)}


noise_scale = Numbers(
    "noise_scale",
    measured_noise,
    tolerance=0.1,
    rows={
        "signal": {"offsets": 250, "|G|^2": ...},
        "trace": {"deviations": 1000, "one batch": 500, "tr Sigma": ...},
        "scale": {
            "ratio": (
                1 / 16,
                lambda it: not math.isclose(it.scale, it.trace / it.signal, rel_tol=0.05),
            )
        },
    },
)


def remembered():
    """A gradient of 1, but for one of 1,000, through Adam's averages with b2 = 0.95."""
    first, second, steps = 1.0, 1.0, 0
    first, second = 0.9 * first + 0.1 * 1000, 0.95 * second + 0.05 * 1000**2
    length = first / math.sqrt(second)
    while second > 2.0:
        second, steps = 0.95 * second + 0.05, steps + 1
    return {"length": length, "steps": steps}


adam_remembers = Numbers(
    "adam_remembers",
    remembered,
    tolerance=0.03,
    near=0.03,
    rows={
        "length": {
            "0.999": 100 / math.sqrt(1000),
            "not bounded": [100.0, 1000.0],
            "no root": 100 / 5e4,
            "length": ...,
        },
        "steps": {"0.999": [6900, 6907], "first moment": [44, 66], "steps": ...},
    },
)

training_budget = Numbers(
    "training_budget",
    lambda: {"tokens": 50e9, "days": 6 * 2.5e9 * 50e9 / (64 * 989e12 * 0.37) / 86_400},
    tolerance=0.03,
    near=0.03,
    rows={
        "tokens": {"billions": 50, "per parameter": 20, "parameters": 2.5e9, "tokens": ...},
        "days": {
            "one FLOP": lambda right: right / 6,
            "forward": lambda right: right / 3,
            "peak": lambda right: right * 0.37,
            "one GPU": lambda right: right * 64,
            "hours": lambda right: right * 24,
            "seconds": lambda right: right * 86_400,
            "days": ...,
        },
    },
)
