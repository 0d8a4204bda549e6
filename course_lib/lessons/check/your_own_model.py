"""Checks of notebook 20's exercises."""

import jax.numpy as jnp

from course_lib.lessons.check.exercises import Function, Numbers, change, in_case, normal

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


own_loss = Function(
    "own_loss",
    loss_of_labels,
    cases=lambda: [(*normal(0, (5,)), jnp.arange(5.0)), (*normal(1, (5,)), jnp.zeros(5))],
    name="(loss, metrics)",
    rows={
        "sum": change("total / jnp.where(count == 0, 1, count)", "total"),
        "unweighted": change("(values * weights).sum(), weights.sum()", "values.sum(), 5.0"),
        "number of labels": change("weights.sum()", "5.0"),
        "mean in metrics": change("(total, count)}", "(total / count, jnp.ones(()))}"),
        "no weight": (change("jnp.where(count == 0, 1, count)", "count"), in_case(1)),
        "another": change("values * weights", "2 * values * weights"),
    },
)

NAMES = {
    "blocks/0/up/kernel": (64, 256),
    "blocks/3/qkv/kernel": (64, 192),
    "blocks/0/before_mlp/scale": (64,),
    "tokens/embedding": (2048, 64),
    "norm/scale": (64,),
}


def is_matrix(name, shape):
    return name.startswith("blocks") and len(shape) == 2


muon_chooses = Function(
    "muon_chooses",
    is_matrix,
    cases=lambda: list(NAMES.items()),
    rows={
        "all in layers": (change(" and len(shape) == 2", ""), in_case(2)),
        "all matrices": (change('name.startswith("blocks") and ', ""), in_case(3)),
        "another": change("== 2", "!= 2"),
    },
)
