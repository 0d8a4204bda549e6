"""Checks of notebook 20's exercises."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons.check.answers import close
from course_lib.lessons.check.exercises import (
    Function,
    Numbers,
    Outcome,
    change,
    in_case,
    normal,
)

bytes_of_step = Numbers(
    "bytes_of_step",
    lambda: {"kept_bytes": 16, "donated_bytes": 8},
    rows={
        "kept_bytes": {"adam": 24, "in 16 bits": 12, "one state": 8, "kept": ...},
        "donated_bytes": {"both states": 16, "donated": ...},
    },
)


def loss_of_labels(values, weights):
    total, count = (values * weights).sum(), weights.sum()
    return total / jnp.where(count == 0, 1, count), {"loss": (total, count)}


def without_other_metrics(function, *args):
    """Calls a compiled loss. More metrics than "loss" are welcome, and not looked at."""
    result = jax.jit(function)(*args)
    if isinstance(result, tuple | list) and isinstance(result[-1], dict):
        metrics = {name: pair for name, pair in result[-1].items() if name == "loss"}
        return (*result[:-1], metrics)
    return result


class Loss(Outcome):
    """A compiled loss, and its gradient by the losses of the labels."""

    loss = property(lambda it: it.result[0])
    count = property(lambda it: it.result[1]["loss"][1])
    factor = property(lambda it: it.loss / it.right[0])

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
        for weights in (jnp.arange(5.0), jnp.arange(5.0) / 1000, jnp.zeros(5))
    ],
    name="(loss, metrics)",
    calls=without_other_metrics,
    outcome=Loss,
    first=("form", "swapped", "unweighted", "number of labels"),
    rows={
        "form": (
            change(', {"loss": (total, count)}', ""),
            lambda it: str(jax.tree.structure(it.result)) != str(jax.tree.structure(it.right)),
        ),
        "swapped": change("(total, count)}", "(count, total)}"),
        "sum": change(DIVISOR, "total"),
        "unweighted": change("(values * weights).sum(), weights.sum()", "values.sum(), 5.0"),
        "number of labels": [
            change("weights.sum()", "5.0"),
            change("weights.sum()", "(weights > 0).sum()"),
            change(DIVISOR, "total / 5"),
        ],
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
        "epsilon": (
            [change(DIVISOR, f"total / (count + {number})") for number in (1e-3, 1e-5, 1.0)],
            lambda it: (
                it.case < 2
                and not close(it.gradient, it.best.gradient)
                and (0.6, 0)[it.case] < it.factor < 1
                and close(it.gradient, it.factor * it.best.gradient, 1e-5)
            ),
        ),
        "another": change("values * weights", "2 * values * weights"),
        "another gradient": (
            change(DIVISOR, f"jax.lax.stop_gradient({DIVISOR})"),
            lambda it: not close(it.gradient, it.best.gradient),
        ),
    },
)


def squared_error(params, batch, rng):
    """The loss of two layers, in the dtype of the parameters."""
    x, y, weights = (batch[name] for name in ("inputs", "labels", "weights"))
    hidden = jnp.tanh(x.astype(params["in"].dtype) @ params["in"])
    each = ((hidden @ params["out"]).astype(jnp.float32)[:, 0] - y) ** 2
    return loss_of_labels(each, weights)


def linear(params, batch, rng):
    """A loss whose gradient is rounded once, to the dtype of the parameters."""
    each = batch["inputs"] @ params["in"].astype(jnp.float32)
    return loss_of_labels(each, batch["weights"])


def accumulating(loss_fn, params, parts):
    def of_copies(params, part):
        copies = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return loss_fn(copies, part, None)

    def add(total, part):
        grads, metrics = jax.grad(of_copies, has_aux=True)(params, part)
        loss, weight = metrics["loss"]
        grads = jax.tree.map(lambda g: weight * g, grads)
        return jax.tree.map(jnp.add, total, (loss, weight, grads)), None

    zeros = jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, weight, grads), _ = jax.lax.scan(add, zeros, parts)
    weight = jnp.where(weight == 0, 1, weight)
    return loss / weight, jax.tree.map(lambda g: g / weight, grads)


def parts_of_batch():
    """Four minibatches that weigh 4, 2, 0 and 2: powers of two, as their sum is, so that
    gradients of the sum and of the mean round to bfloat16 alike. Then four that weigh nothing,
    and four of which one weighs 257, which bfloat16 rounds to 256.
    """
    kernels, x, y = normal(1, (3, 5), (5, 1)), *normal(2, (4, 4, 3), (4, 4))
    params = dict(zip(("in", "out"), kernels, strict=True))
    weights = jnp.array([[1.0, 1, 1, 1], [2, 0, 0, 0], [0, 0, 0, 0], [1, 0.5, 0.25, 0.25]])
    batch = {"inputs": x, "labels": y}
    cases = [(squared_error, params, batch | {"weights": w}) for w in (weights, 0 * weights)]
    kernel, x = normal(3, (256,), (4, 4, 256))
    batch = {"inputs": x, "labels": y, "weights": weights.at[0].set(257 / 4)}
    return [*cases, (linear, {"in": kernel}, batch)]


def without_excess_precision(function, loss_fn, *args):
    """Compiles so that bfloat16 rounds in the same way in a scan and in a Python loop."""
    options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    return jax.jit(functools.partial(function, loss_fn), compiler_options=options)(*args)


class Accumulated(Outcome):
    """A loss and a gradient, and what goes through the model in one piece."""

    loss = property(lambda it: it.result[0])
    grads = property(lambda it: it.result[1])

    @functools.cached_property
    def is_right(self):
        if self.case < 2 or not close(self.result, self.right, 0.03):
            return self.is_close(self.right)
        # gradients of the sum and of the mean round in other ways, but to the same length
        norm, right = (np.linalg.norm(one["in"]) for one in (self.grads, self.right[1]))
        return close(self.loss, self.right[0]) and abs(norm / right - 1) < 0.002

    @functools.cached_property
    def hidden(self):
        """The dtype and shape of each array of the hidden layer."""
        function = functools.partial(self.function, self.loss_fn)
        text = str(jax.make_jaxpr(function)(*self.args[1:]))
        return re.findall(r"(\w+)\[([\d,]+),5\] = tanh", text)

    dtype = property(
        lambda it: {"bf16": "bfloat16", "f16": "float16"}.get(it.hidden[0][0], "float32")
    )
    size = property(
        lambda it: max((math.prod(map(int, n.split(","))) for _, n in it.hidden), default=0)
    )
    is_finite = property(
        lambda it: all(np.isfinite(x).all() for x in jax.tree.leaves(it.result))
    )


TOTAL, DIVIDED = "weight * g, grads)", "g / weight, grads)"
RETURN = f"return loss / weight, jax.tree.map(lambda g: {DIVIDED}"
LOSSES = (
    "(loss, weight, grads)), None",
    "(loss / jnp.where(weight, weight, 1), 1, grads)), None",
)


def mean_of_means(divisor):
    returned = f"return loss / {divisor}, jax.tree.map(lambda g: g / {divisor}, grads)"
    return change(TOTAL, "g, grads)", *LOSSES, RETURN, returned)


own_accumulation = Function(
    "own_accumulation",
    accumulating,
    cases=parts_of_batch,
    name="(loss, gradient)",
    calls=without_excess_precision,
    outcome=Accumulated,
    first=("no pair", "swapped"),
    rows={
        "no pair": change("return loss / weight,", "return"),
        "swapped": (
            change(RETURN, f"return jax.tree.map(lambda g: {DIVIDED}, loss / weight"),
            lambda it: isinstance(it.result[0], dict),
        ),
        "another dtype": (
            [change("bfloat16", "float32"), change("bfloat16", "float16")],
            lambda it: not it.case and it.hidden and it.dtype != "bfloat16",
        ),
        "means": [
            change(TOTAL, "g, grads)"),
            change(TOTAL, "g, grads)", DIVIDED, "g / 4, grads)"),
            *map(mean_of_means, (1, 3, 4)),
        ],
        "not divided": [change(DIVIDED, "g, grads)"), change(RETURN, "return loss, grads")],
        "by parts": [
            change(DIVIDED, "g / 4, grads)"),
            change(DIVIDED, "g / 16, grads)"),
            change(RETURN, "return loss / 4, jax.tree.map(lambda g: g / 4, grads)"),
            change(RETURN, "return loss / 16, jax.tree.map(lambda g: g / 16, grads)"),
        ],
        "one part": change("zeros, parts)", "zeros, jax.tree.map(lambda x: x[:1], parts))"),
        "no weight": (
            change("weight = jnp.where(weight == 0, 1, weight)", "pass"),
            in_case(1, lambda it: not it.is_finite),
        ),
        "not finite": (
            change(TOTAL, "g / weight * weight * weight, grads)"),
            lambda it: not it.is_finite,
        ),
        "at once": (
            lambda loss_fn, params, parts: accumulating(
                loss_fn, params, jax.tree.map(lambda x: x.reshape(1, 16, *x.shape[2:]), parts)
            ),
            lambda it: it.size > 4,
        ),
        "rounded": (
            [
                change(TOTAL, "jnp.float32(jnp.bfloat16(weight) * jnp.bfloat16(g)), grads)"),
                change(
                    "zeros_like, params)",
                    "zeros_like, jax.tree.map(jnp.bfloat16, params))",
                    TOTAL,
                    "(weight * g).astype(jnp.bfloat16), grads)",
                ),
            ],
            lambda it: it.is_near,
        ),
        "loss": (
            [
                change("return loss / weight", "return loss / 4"),
                change("return loss / weight", "return loss"),
            ],
            lambda it: not it.is_right and close(it.grads, it.right[1]),
        ),
        "another": change(DIVIDED, "3 * g / weight, grads)"),
    },
)
