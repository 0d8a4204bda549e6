"""Checks of notebook 06's exercises."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import case_study, profiling_study
from course_lib.lessons.check.answers import close, equations
from course_lib.lessons.check.exercises import (
    Function,
    Numbered,
    Numbers,
    Outcome,
    in_case,
    is_wrong,
    share,
)
from course_lib.lessons.check.many_devices import normal
from course_lib.measure import hardware
from course_lib.one_device import profiling, rematerialization

N, B, D = 8, 256, 512
UNROLLED = "bfloat16, unrolled"  # a case of the case study
SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, D, D), (B, D))]
ONE_ARRAY, GRADIENTS = 4 * N * B * D / 2**20, 4 * N * D * D / 2**20


def scan_loss(w, x, *, tanh=jnp.tanh, around=lambda layer: layer, times=1):
    def layer(x, w):
        return tanh(x @ w), None

    return times * jnp.sum(jax.lax.scan(around(layer), x, w)[0] ** 2)


def stacked_mib(loss):
    """Returns the MiB of the arrays that a loss saves for each layer and of w's gradients."""
    saved = profiling_study.of_each_layer(rematerialization.residuals(loss, *SHAPES), N)
    return sum(array.bytes for array in saved) / 2**20 + GRADIENTS


class Stacked(Numbered):
    """How many MiB are stacked."""

    mib = property(lambda it: it.yours["mib"])
    one, gradients, layers = ONE_ARRAY, GRADIENTS, N
    less = property(lambda it: "less" if it.mib > it.right["mib"] else "more")


stacked = Numbers(
    "stacked",
    lambda: {"mib": stacked_mib(scan_loss)},  # JAX up to 0.10 saves one array more
    outcome=Stacked,
    rows={
        "mib": {
            "not both": [lambda right: right - GRADIENTS, lambda right: GRADIENTS],
            "one is missing": lambda right: right - ONE_ARRAY,
            "one too many": lambda right: right + ONE_ARRAY,
            "one layer": share(1 / N),
            "bytes": share(2**20),
            "another": (100, lambda it: abs(it.mib - it.right["mib"]) >= 0.5),
        }
    },
)


class Loss(Outcome):
    """A loss, its gradient and what it stacks, in MiB."""

    shape = property(lambda it: np.shape(it.result))
    has_gradient = property(
        lambda it: close(jax.grad(it.function)(*it.args), jax.grad(scan_loss)(*it.args))
    )
    before = functools.cached_property(lambda it: stacked_mib(scan_loss))
    after = functools.cached_property(lambda it: stacked_mib(it.function))
    least = ONE_ARRAY + GRADIENTS
    has_checkpoint = property(
        lambda it: any(
            word in eqn.primitive.name
            for eqn in equations(it.program)
            for word in ("checkpoint", "remat")
        )
    )


def rematerialized(w, x, **options):
    return scan_loss(w, x, around=jax.checkpoint, **options)


def half(w, x):
    """Keeps the argument of the tanh in bfloat16, and all that the loss keeps."""

    def tanh(x):
        low = jax.ad_checkpoint.checkpoint_name(x.astype(jnp.bfloat16), "low")
        return jnp.tanh(x) + 0 * low * low

    policy = jax.checkpoint_policies.save_only_these_names("low")
    around = functools.partial(jax.checkpoint, policy=policy)
    return scan_loss(w, x, tanh=tanh, around=around)


stack_less = Function(
    "stack_less",
    rematerialized,
    cases=lambda: [
        tuple(a / s for a, s in zip(normal(0, (3, 16, 16), (8, 16)), (4, 1), strict=True))
    ],
    name=None,
    outcome=Loss,
    rows={
        "no number": (lambda w, x: x, lambda it: it.shape != ()),
        "another": (dict(times=2), is_wrong),
        "gradient": (
            lambda w, x: rematerialized(jax.lax.stop_gradient(w), x),
            lambda it: not it.has_gradient,
        ),
        "outside": (
            lambda w, x: scan_loss(w, x, tanh=jax.checkpoint(jnp.tanh)),
            lambda it: it.after >= it.before and it.has_checkpoint,
        ),
        "as much": (scan_loss, lambda it: it.after >= it.before),
        "nothing": (jax.checkpoint(scan_loss), lambda it: it.after < it.least),
        "more": (half, lambda it: it.after != it.least),
    },
)


PENALTY = functools.partial(jax.named_scope, "penalty")


def penalty_step(
    w,
    x,
    *,
    named=range(3),
    around=contextlib.nullcontext,
    outside=contextlib.nullcontext,
    stop=lambda w: w,
    rate=0.1,
    result=lambda new, value: (new, value),
):
    """A step of SGD; `named` are the operations of the penalty that carry its name."""

    def penalty(value):
        for i, operation in enumerate((lambda w: w @ w, jnp.sin, jnp.exp)):
            with jax.named_scope("penalty" if i in named else "other"):
                value = operation(value)
        return jnp.mean(value)

    def loss(w):
        with around():
            return jnp.mean(jnp.tanh(x @ w)) + penalty(stop(w))

    with outside():
        value, gradient = jax.value_and_grad(loss)(w)
        return result(w - rate * gradient, value)


class Named(Outcome):
    """Which operations carry the name."""

    @functools.cached_property
    def scopes(self):
        compiled = jax.jit(self.function).lower(*self.args).compile()
        scopes = profiling.op_scopes(compiled).values()
        # without the names of functions
        return {re.sub(r"jit\(\w*\)", "", scope) for scope in scopes}

    count = property(lambda it: len(it.scopes))
    named = property(lambda it: [scope for scope in it.scopes if "penalty" in scope])
    num_named = property(lambda it: len(it.named))

    def has(self, pattern):
        return any(re.search(pattern, scope) for scope in self.named)

    missing = property(
        lambda it: [
            name
            for name in ("dot_general", "sin", "exp")
            if name not in {scope.rsplit("/", 1)[-1] for scope in it.named}
        ]
    )
    new = property(
        lambda it: it.result[0] if isinstance(it.result, tuple | list) else it.result
    )
    shape = property(lambda it: np.shape(it.new))


def matrices():
    return [(jnp.full((32, 32), 0.01), jnp.ones((32, 32)))]


named_part = Function(
    "named_part",
    penalty_step,
    cases=matrices,
    name=None,
    outcome=Named,
    rows={
        "no name": (dict(named=()), lambda it: not it.named),
        "outside": (
            dict(named=(), outside=PENALTY),
            lambda it: not it.has(r"jvp\([^;]*penalty"),
        ),
        "not backward": (
            dict(stop=jax.lax.stop_gradient),
            lambda it: not it.has(r"transpose\(jvp\([^;]*penalty"),
        ),
        "whole loss": (dict(around=PENALTY), lambda it: it.has("/tanh$")),
        "a part": (
            [dict(named=(1, 2)), dict(named=(2,)), dict(named=(0, 1))],
            lambda it: it.missing,
        ),
        "shape": (
            dict(result=lambda new, value: (value, new)),
            lambda it: it.shape != it.args[0].shape,
        ),
        "numbers": (dict(rate=0.2), lambda it: not close(it.new, it.right[0])),
    },
)


def utilization(forward_flops, seconds, peak, *, flops=3, of=lambda f, s, p: f / (s * p)):
    return of(flops * forward_flops, seconds, peak)


class Share(Outcome):
    """A share of the peak rate."""

    def is_close(self, other):
        return close(self.result, other, 1e-3)

    more = property(lambda it: "much" if it.result > it.right else "little")


mfu = Function(
    "mfu",
    utilization,
    cases=lambda: [(3e12, 0.7, 27.8e12), (1e12, 2.0, 10e12)],
    name=None,
    outcome=Share,
    rows={
        "forward alone": dict(flops=1),
        "backward once": dict(flops=2),
        "recomputation": dict(flops=4),
        "percent": dict(flops=300),
        "no seconds": dict(of=lambda f, s, p: f / p),
        "multiplied": dict(of=lambda f, s, p: f * s / p),
        "a rate": dict(of=lambda f, s, p: f / s),
        "inverse": dict(of=lambda f, s, p: s * p / f),
        "another": (dict(of=lambda f, s, p: s / 3), in_case(0)),
        "other sizes": (lambda *sizes: 9 / 19.46, is_wrong),
    },
)

A5000, H100, PUBLISHED = hardware.get("a5000"), hardware.get("h100"), 0.73


def on_another_gpu():
    [row] = [row for row in case_study.recorded_rows("h100") if row["case"] == UNROLLED]
    faster = H100.peak("bfloat16") / A5000.peak("bfloat16")
    floors = {"products": row["compute_seconds"], "memory": row["memory_seconds"]}
    return {
        "seconds": PUBLISHED / faster,
        "floor": max(floors, key=floors.get),
        "floors": floors,
    }


class OnH100(Numbered):
    """The seconds of a step, and its longer floor."""

    seconds = property(lambda it: it.yours["seconds"])
    floor = property(lambda it: it.yours["floor"])
    long = property(lambda it: "long" if it.seconds > it.right["seconds"] else "short")
    floor_seconds = property(lambda it: it.right["floors"][it.floor])


on_h100 = Numbers(
    "on_h100",
    on_another_gpu,
    words=("floor",),
    tolerance=0.05,
    near=0.02,
    outcome=OnH100,
    rows={
        "seconds": {
            "milliseconds": share(1e3),
            "longer": lambda right: PUBLISHED**2 / right,
            "bandwidth": PUBLISHED * A5000.memory_bandwidth / H100.memory_bandwidth,
            "float32": PUBLISHED * A5000.peak("float32") / H100.peak("float32"),
            "another": ...,
        },
        "floor": {
            "no floor": ("compute", lambda it: it.floor not in it.right["floors"]),
            "other floor": ("products", lambda it: it.floor != it.right["floor"]),
        },
    },
)
