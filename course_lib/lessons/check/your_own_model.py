"""Checks of notebook 20's exercises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import close
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, in_case

bytes_of_step = Numbers(
    "bytes_of_step",
    lambda: {"kept": 16, "donated": 8},
    rows={
        "kept": {"adam": 24, "in 16 bits": 12, "one state": 8, "kept": ...},
        "donated": {"both states": 16, "donated": ...},
    },
)


def loss_of_labels(values, weights):
    total, count = (values * weights).sum(), weights.sum()
    return total / jnp.where(count == 0, 1, count), {"loss": (total, count)}


class Loss(Outcome):
    """A compiled loss, and its gradient by the losses of the labels."""

    loss = property(lambda it: it.result[0])
    count = property(lambda it: it.result[1]["loss"][1])

    @functools.cached_property
    def gradient(self):
        return jax.jit(jax.grad(lambda values: self.function(values, self.weights)[0]))(
            self.values
        )


DIVISOR = "total / jnp.where(count == 0, 1, count)"
SAFE_COUNT = "count = jnp.where(count == 0, 1, weights.sum()); return total / count"

own_loss = Function(
    "own_loss",
    loss_of_labels,
    cases=lambda: [
        (jnp.array([1.5, 0.25, 3.0, 0.75, 2.0]), weights)
        for weights in (jnp.arange(5.0), jnp.array([0.1, 0.2, 0, 0.1, 0.1]), jnp.zeros(5))
    ],
    name="(loss, metrics)",
    calls=lambda function, *args: jax.jit(function)(*args),
    outcome=Loss,
    first=("form",),
    rows={
        "form": (
            change(', {"loss": (total, count)}', ""),
            lambda it: str(jax.tree.structure(it.result)) != str(jax.tree.structure(it.right)),
        ),
        "sum": change(DIVISOR, "total"),
        "unweighted": change("(values * weights).sum(), weights.sum()", "values.sum(), 5.0"),
        "number of labels": [change("weights.sum()", "5.0"), change(DIVISOR, "total / 5")],
        "mean in metrics": change("(total, count)}", "(total / count, jnp.ones(()))}"),
        "at least one": change(DIVISOR, "total / jnp.maximum(count, 1)"),
        "loss without weight": (
            change(DIVISOR, "total / count"),
            in_case(2, lambda it: it.loss != 0),  # or NaN
        ),
        "count without weight": (
            change(f"return {DIVISOR}", SAFE_COUNT),
            in_case(2, lambda it: it.count != 0),
        ),
        "gradient without weight": (
            [
                change(DIVISOR, "jnp.where(count == 0, 0, total / count)"),
                change(DIVISOR, "jnp.nan_to_num(total / count)"),
            ],
            lambda it: not np.isfinite(it.gradient).all(),
        ),
        "another": change("values * weights", "2 * values * weights"),
        "another gradient": (
            change(DIVISOR, f"jax.lax.stop_gradient({DIVISOR})"),
            lambda it: not close(it.gradient, it.best.gradient),
        ),
    },
)

NAMES = (
    "blocks/0/up/kernel",
    "blocks/11/qkv/kernel",
    "tokens/embedding",
    "places/embedding",
    "head/kernel",
    "blocks/2/out/kernel",
    "blocks/3/down/kernel",
)


def is_matrix(name):
    return name.startswith("blocks")


def as_bool(function, *args):
    answer = function(*args)
    is_stub = answer is None and args == NAMES[:1]  # later, None is a no, as for Muon
    return None if is_stub else bool(answer)


muon_chooses = Function(
    "muon_chooses",
    is_matrix,
    cases=lambda: [(name,) for name in NAMES],
    calls=as_bool,
    rows={
        "one layer": (
            [change('"blocks"', '"blocks/0"'), lambda name: "/up/" in name or "/qkv/" in name],
            lambda it: it.case in (1, 5, 6) and not it.result,
        ),
        "embedding": (lambda name: "/" in name, lambda it: it.case in (2, 3) and it.result),
        "head": (change('startswith("blocks")', 'endswith("kernel")'), in_case(4)),
        "another": lambda name: "embedding" in name,
    },
)
