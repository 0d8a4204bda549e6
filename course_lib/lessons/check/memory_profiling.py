"""Checks of notebook 23's exercises."""

import functools

import jax
import jax.numpy as jnp

from course_lib.lessons.check.answers import close, equations, programs_in
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, normal, share

N, B, D = 8, 256, 512
SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, D, D), (B, D))]
ONE_ARRAY, GRADIENTS = 4 * N * B * D / 2**20, 4 * N * D * D / 2**20


def scan_loss(w, x, *, tanh=jnp.tanh, around=lambda layer: layer):
    def layer(x, w):
        return tanh(x @ w), None

    return jnp.sum(jax.lax.scan(around(layer), x, w)[0] ** 2)


def is_checkpoint(eqn):
    return any(word in eqn.primitive.name for word in ("checkpoint", "remat"))


def stacked_bytes(program):
    """Returns the bytes of activations that loops stack, as many as are there at once: the
    stacks inside a loop's body or a checkpoint are gone after it. An unrolled scan is no loop.
    """
    here = inside = 0
    for eqn in program.eqns:
        unrolled = eqn.params.get("unroll", 0) == eqn.params.get("length")
        is_loop = eqn.primitive.name in ("scan", "while") and not unrolled
        inner = programs_in(eqn)
        if is_loop:
            arrays = (one.aval for one in eqn.outvars if one.aval.ndim > 2)
            # the last axes of a weight, and of its gradient, are both D
            stacks = (a for a in arrays if a.shape[-1] == D != a.shape[-2])
            here += sum(array.size * array.dtype.itemsize for array in stacks)
        if is_loop or is_checkpoint(eqn):
            inside = max(inside, *map(stacked_bytes, inner))
        else:
            here += sum(map(stacked_bytes, inner))
    return here + inside


def stacked_mib(loss):
    """Returns the MiB of activations that the scans of a loss's gradient stack."""
    return stacked_bytes(jax.make_jaxpr(jax.grad(loss))(*SHAPES).jaxpr) / 2**20


stacked = Numbers(
    "stacked",
    lambda: {
        "mib": stacked_mib(scan_loss) + GRADIENTS,  # JAX up to 0.10 saves one array more
        "one": ONE_ARRAY,
        "gradients": GRADIENTS,
    },
    rows={
        "mib": {
            "not both": [lambda right: right - GRADIENTS, lambda right: GRADIENTS],
            "one is missing": lambda right: right - ONE_ARRAY,
            "one too many": lambda right: right + ONE_ARRAY,
            "one alone": ONE_ARRAY,
            "one layer": share(1 / N),
            "bytes": share(2**20),
            "megabytes": (
                share(1.048576),
                lambda it: abs(it.mib - 1.048576 * it.right["mib"]) < 0.03,
            ),
            "another": (100, lambda it: abs(it.mib - it.right["mib"]) >= 0.5),
        }
    },
)


class Loss(Outcome):
    """A loss, its gradient and what it stacks, in MiB."""

    has_gradient = property(
        lambda it: close(jax.grad(it.function)(*it.args), jax.grad(scan_loss)(*it.args))
    )
    before = functools.cached_property(lambda it: stacked_mib(scan_loss))
    after = functools.cached_property(lambda it: stacked_mib(it.function))
    least = ONE_ARRAY
    checkpoints = property(lambda it: list(filter(is_checkpoint, it.equations)))
    around_the_scan = property(
        lambda it: any(
            inner.primitive.name == "scan"
            for eqn in it.checkpoints
            for program in programs_in(eqn)
            for inner in equations(program)
        )
    )


def rematerialized(w, x):
    return scan_loss(w, x, around=jax.checkpoint)


def checkpoint_of_the_tanh(w, x):
    return scan_loss(w, x, tanh=jax.checkpoint(jnp.tanh))


def before_the_tanh(w, x):
    """Carries the product, so that the scan has one layer less."""
    z, _ = jax.lax.scan(lambda z, w: (jnp.tanh(z) @ w, None), x @ w[0], w[1:])
    return jnp.sum(jnp.tanh(z) ** 2)


stack_less = Function(
    "stack_less",
    rematerialized,
    cases=lambda: [(normal(0, (N, D, D))[0] / D**0.5, *normal(1, (B, D)))],
    outcome=Loss,
    rows={
        "no number": (lambda w, x: x, lambda it: it.result_shape != ()),
        "another": change("return", "return 2 *"),
        "gradient": (
            change("(w, x, ", "(jax.lax.stop_gradient(w), x, "),
            lambda it: not it.has_gradient,
        ),
        "whole": (
            jax.checkpoint(scan_loss),
            lambda it: it.after >= it.before and it.around_the_scan,
        ),
        "as much": (scan_loss, lambda it: it.after >= it.before and not it.checkpoints),
        "more": ([before_the_tanh, checkpoint_of_the_tanh], lambda it: it.after > it.least),
    },
)


# of the message in the exercise, in GiB; the state is an argument and a result
ARGUMENTS, RESULTS, TEMPORARIES, MEMORY = 4.5, 4.0, 11.0, 24.0
NEED, SHARE = ARGUMENTS + RESULTS + TEMPORARIES, 0.75 * MEMORY
DONATED = NEED - RESULTS

message = Numbers(
    "message",
    lambda: {"need": NEED, "donated": DONATED, "left": SHARE - DONATED, "share": SHARE},
    near=0.005,
    tolerance=0.005,
    rows={
        "need": {
            "failed allocation": TEMPORARIES,
            "temporaries are missing": ARGUMENTS + RESULTS,
            "results are missing": ARGUMENTS + TEMPORARIES,
            "bytes": share(2**30),
            "gigabytes": share(2**30 / 1e9),
            "other need": ...,
        },
        "donated": {
            "as before": NEED,
            "state twice": NEED - 2 * RESULTS,
            "no arguments": NEED - ARGUMENTS,
            "other donated": ...,
        },
        "left": {
            "all memory": MEMORY - DONATED,
            "too much": DONATED - SHARE,
            "not donated": SHARE - NEED,
            "other left": ...,
        },
    },
)
