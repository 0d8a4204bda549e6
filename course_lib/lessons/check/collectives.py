"""Checks of notebook 07's exercises, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import predicted
from course_lib.lessons.check.exercises import Numbers, change, normal
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices
from course_lib.many_devices import meshes

CUBE = {"data": 2, "tensor": 4}  # hosts, and GPUs of a host


def over_tensor(x):
    return jax.lax.psum(x, "tensor")


def over_data(x):
    return jax.lax.psum(x, "data")


class Stacked(OnDevices):
    sent = property(lambda it: it.ledger.sent())
    across = property(lambda it: it.ledger.sent(axis="data"))
    all_reduced = property(lambda it: it.ledger.payload("all-reduce", "data"))


def norm(x):
    return x / jnp.sqrt(over_tensor((x**2).sum(1, keepdims=True)) / 64)


def norm_of_gathered(x):
    whole = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
    whole = change("over_tensor(", "(").of(norm)(whole)
    return jax.lax.dynamic_slice_in_dim(whole, 16 * jax.lax.axis_index("tensor"), 16, 1)


class CutNorm(DeviceFunction):
    """Takes a prediction of the bytes that are sent, too, which may be left out."""

    def judge(self, yours, sent=None):
        if sent is not None:
            predicted(sent, hint=self.sentences["predict"])
        done = super().judge(yours)
        if sent is not None:
            norm_bytes.judge(sent)
        return done

    def examples(self):
        yield from super().examples()
        yield from ((row, (norm, *sent)) for row, sent in norm_bytes.examples())


cut_norm = CutNorm(
    "cut_norm",
    norm,
    cases=lambda: [(normal(0, (16, 64))[0] * np.arange(1, 65, dtype=np.float32),)],
    axes=CUBE,
    in_specs=(P(None, "tensor"),),
    stacked=True,
    outcome=Stacked,
    rows={
        "shape": lambda x: norm(x)[:, :8],
        "own columns": change("over_tensor(", "(", "/ 64", "/ 16"),
        "nothing sent": (
            change("over_tensor(", "over_data("),
            lambda it: not it.ledger.sent(axis="tensor"),
        ),
        "no root": change("jnp.sqrt(", "("),
        "one number": change("(x**2).sum(1, keepdims=True)", "(x**2).sum() / 16"),
        "columns": change("(x**2).sum(1, keepdims=True)", "(x**2).mean(0)", "/ 64", "/ 4"),
        "times": (change("/ 64", "/ 256"), lambda it: it.is_multiple),
        "another": change("(x**2)", "jnp.abs(x)"),
        "sends more": norm_of_gathered,
    },
)

norm_bytes = Numbers(
    "cut_norm",
    lambda: {"sent": cut_norm.outcome_of(norm, 0).sent},
    rows={
        "sent": {
            "sums": 64,
            "x itself": ([3072, 1024], lambda it: it.sent >= 1024),
            "bytes": [48, 112, ...],
        }
    },
)


def scatter(x):
    return jax.lax.psum_scatter(x, "tensor", tiled=True)


def gather(x):
    return jax.lax.all_gather(x, "tensor", tiled=True)


def all_reduce(x):
    return gather(over_data(scatter(x)))


two_levels = DeviceFunction(
    "two_levels",
    all_reduce,
    cases=lambda: [(np.random.default_rng(0).integers(-50, 50, (8, 16)).astype(np.float32),)],
    calls=lambda yours, x: yours(x[0]),
    axes=CUBE,
    in_specs=(P(("data", "tensor")),),
    stacked=True,
    outcome=Stacked,
    rows={
        "shape": change("gather(", "("),
        "inside": over_tensor,
        "across": over_data,
        "times": (change("over_data(", "0.5 * over_data("), lambda it: it.is_multiple),
        "another": change("over_data(", "over_data(1 + "),
        "both axes": (
            lambda x: jax.lax.psum(x, ("data", "tensor")),
            lambda it: it.ledger.payload(axis=("data", "tensor")),
        ),
        "sends more": (lambda x: over_data(over_tensor(x)), lambda it: it.across > 16),
    },
)


def squared_error(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def gradient_of_sum(loss, w, x, y):
    return jax.grad(loss)(w, x, y) / 8


def of_gathered_batch(loss, w, x, y):
    x, y = (jax.lax.all_gather(a, "data", tiled=True) for a in (x, y))
    return jax.grad(loss)(meshes.vary(w, "data"), x, y)


mean_gradient = DeviceFunction(
    "mean_gradient",
    gradient_of_sum,
    cases=lambda: [normal(0, (1000,), (64, 1000), (64,))],
    calls=lambda yours, w, x, y: yours(squared_error, w, x, y),
    axes={"data": 8},
    in_specs=(P(), P("data"), P("data")),
    stacked=True,
    outcome=Stacked,
    rows={
        "no array": (
            change("jax.grad", "jax.value_and_grad", " / 8", ""),
            lambda it: not hasattr(it.result, "shape"),
        ),
        "shape": change("(w, x, y) / 8", "(w, x, y)[:9]"),
        "different": (
            change("(w, x, y) / 8", '(meshes.vary(w, "data"), x, y)'),
            lambda it: np.ptp(it.result, axis=0).max() > 1e-3,
        ),
        "sum": change(" / 8", ""),
        "twice": change("/ 8", "* 8"),
        "sign": change("/ 8", "/ -8"),
        "another": change("/ 8", "/ 64"),
        "sends more": (of_gathered_batch, lambda it: it.all_reduced != 4000),
    },
)
