"""Checks of notebook 07's exercises, on eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import predicted
from course_lib.lessons.check.exercises import Numbered, Numbers, is_wrong
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices, normal
from course_lib.many_devices import meshes

CUBE = {"data": 2, "tensor": 4}  # hosts, and GPUs of a host


def alone(x):
    return x


def over_tensor(x):
    return jax.lax.psum(x, "tensor")


def over_data(x):
    return jax.lax.psum(x, "data")


class Stacked(OnDevices):
    """The results of all devices."""

    shape = property(lambda it: it.result.shape[1:])
    type = property(lambda it: type(it.result).__name__)
    is_array = property(lambda it: hasattr(it.result, "shape"))
    is_shaped = property(lambda it: it.result.shape == it.right.shape)
    factor = property(lambda it: float(np.linalg.norm(it.result) / np.linalg.norm(it.right)))
    is_multiple = property(lambda it: not it.is_right and it.is_close(it.factor * it.right))
    sent = property(lambda it: it.ledger.sent())
    across = property(lambda it: it.ledger.sent(axis="data"))
    all_reduced = property(lambda it: it.ledger.payload("all-reduce", "data"))


def row_sums(x):
    return (x**2).sum(1, keepdims=True)


def norm(x, *, total=over_tensor, squares=row_sums, columns=64, root=jnp.sqrt):
    return x / root(total(squares(x)) / columns)


def norm_of_gathered(x):
    whole = norm(jax.lax.all_gather(x, "tensor", axis=1, tiled=True), total=alone)
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
    name=None,
    outcome=Stacked,
    rows={
        "shape": (lambda x: norm(x)[:, :8], lambda it: not it.is_shaped),
        "own columns": dict(total=alone, columns=16),
        "nothing sent": (dict(total=over_data), lambda it: not it.ledger.sent(axis="tensor")),
        "no root": dict(root=alone),
        "one number": dict(squares=lambda x: (x**2).sum() / 16),
        "columns": dict(squares=lambda x: (x**2).mean(0), columns=4),
        "times": (dict(columns=256), lambda it: it.is_multiple),
        "another": (dict(squares=lambda x: jnp.abs(x).sum(1, keepdims=True)), is_wrong),
        "sends more": (norm_of_gathered, lambda it: it.sent > 96),
    },
)


class SentBytes(Numbered):
    sent = property(lambda it: it.right["sent"])


norm_bytes = Numbers(
    "cut_norm",
    lambda: {"sent": cut_norm.outcome_of(norm, 0).sent},
    outcome=SentBytes,
    rows={
        "sent": {
            "sums": 64,
            "x itself": ([3072, 1024], lambda it: it.yours["sent"] >= 1024),
            "bytes": [48, 112, ...],
        }
    },
)


def scatter(x):
    return jax.lax.psum_scatter(x, "tensor", tiled=True)


def gather(x):
    return jax.lax.all_gather(x, "tensor", tiled=True)


def all_reduce(x, *, inside=scatter, across=over_data, whole=gather):
    return whole(across(inside(x)))


two_levels = DeviceFunction(
    "two_levels",
    all_reduce,
    cases=lambda: [(np.random.default_rng(0).integers(-50, 50, (8, 16)).astype(np.float32),)],
    calls=lambda yours, x: yours(x[0]),
    axes=CUBE,
    in_specs=(P(("data", "tensor")),),
    stacked=True,
    name=None,
    outcome=Stacked,
    rows={
        "shape": (dict(whole=alone), lambda it: not it.is_shaped),
        "inside": over_tensor,
        "across": over_data,
        "times": (dict(across=lambda x: jax.lax.pmean(x, "data")), lambda it: it.is_multiple),
        "another": (dict(across=lambda x: over_data(x + 1)), is_wrong),
        "both axes": (
            lambda x: jax.lax.psum(x, ("data", "tensor")),
            lambda it: it.ledger.payload(axis=("data", "tensor")),
        ),
        "sends more": (dict(inside=over_tensor, whole=alone), lambda it: it.across > 16),
    },
)


def squared_error(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def gradient_of_sum(loss, w, x, y, *, scale=1 / 8):
    return scale * jax.grad(loss)(w, x, y)


def of_gathered_batch(loss, w, x, y):
    x, y = (jax.lax.all_gather(a, "data", tiled=True) for a in (x, y))
    return jax.grad(loss)(meshes.vary(w, "data"), x, y)


mean_gradient = DeviceFunction(
    "mean_gradient",
    gradient_of_sum,
    cases=lambda: [tuple(normal(0, (1000,), (64, 1000), (64,)))],
    calls=lambda yours, w, x, y: yours(squared_error, w, x, y),
    axes={"data": 8},
    in_specs=(P(), P("data"), P("data")),
    stacked=True,
    name=None,
    outcome=Stacked,
    rows={
        "no array": (
            lambda loss, *args: jax.value_and_grad(loss)(*args),
            lambda it: not it.is_array,
        ),
        "shape": (lambda *args: gradient_of_sum(*args)[:9], lambda it: not it.is_shaped),
        "different": (
            lambda loss, w, x, y: jax.grad(loss)(meshes.vary(w, "data"), x, y),
            lambda it: np.ptp(it.result, axis=0).max() > 1e-3,
        ),
        "sum": dict(scale=1),
        "twice": dict(scale=8),
        "sign": dict(scale=-1 / 8),
        "another": (dict(scale=1 / 64), is_wrong),
        "sends more": (of_gathered_batch, lambda it: it.all_reduced != 4000),
    },
)
