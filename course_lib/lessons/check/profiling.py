"""Checks of notebook 06's exercises."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import slow_steps
from course_lib.lessons.check.answers import close, equations, programs_in
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, normal, share
from course_lib.measure import program

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
    stacks inside a loop's body or a checkpoint are gone after it.
    """
    here = inside = 0
    for eqn in program.eqns:
        is_loop, inner = eqn.primitive.name in ("scan", "while"), programs_in(eqn)
        if is_loop:
            arrays = (one.aval for one in eqn.outvars if {B, D} <= set(one.aval.shape))
            here += sum(array.size * array.dtype.itemsize for array in arrays if array.ndim > 2)
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
            "one layer": share(1 / N),
            "bytes": share(2**20),
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


def in_a_python_loop(w, x):
    for one in w:
        x = jnp.tanh(x @ one)
    return jnp.sum(x**2)


def checkpoint_of_the_tanh(w, x):
    return scan_loss(w, x, tanh=jax.checkpoint(jnp.tanh))


def before_the_tanh(w, x):
    """Carries the product, so that the scan has one layer less."""
    z, _ = jax.lax.scan(lambda z, w: (jnp.tanh(z) @ w, None), x @ w[0], w[1:])
    return jnp.sum(jnp.tanh(z) ** 2)


stack_less = Function(
    "stack_less",
    rematerialized,
    cases=lambda: [(normal(0, (N, 16, 16))[0] / 4, *normal(1, (4, 16)))],
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
        "nothing": (in_a_python_loop, lambda it: it.after == 0),
        "more": ([before_the_tanh, checkpoint_of_the_tanh], lambda it: it.after > it.least),
    },
)


PENALTY = jax.named_scope("penalty")


def penalty_step(w, x):
    """A step of SGD whose penalty has a name."""

    def penalty(w):
        with jax.named_scope("penalty"):
            y = w @ w
            y = jnp.sin(y)
            y = jnp.exp(y)
            return jnp.mean(y)

    def loss(w):
        return jnp.mean(jnp.tanh(x @ w)) + penalty(w)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


NOT_THERE = change('"penalty"', '"my_penalty"')


def places(program, outer=""):
    """Yields each operation of a program with its scope."""
    for eqn in program.eqns:
        place = f"{outer}/{eqn.source_info.name_stack}"
        yield place, eqn
        for inner in programs_in(eqn):
            yield from places(inner, place)


class Named(Outcome):
    """Which operations carry the name."""

    @functools.cached_property
    def scopes(self):
        """Each scope, without names of functions, with the shapes of its operations."""
        # lowered: it is compiled without JAX's cache, which keeps another's names
        module = program.read(jax.jit(self.function).lower(*self.args)).module
        scopes: dict[str, set] = collections.defaultdict(set)
        for one in module.instructions.values():
            if one.scope:
                scopes[re.sub(r"jit\(\w*\)", "", one.scope)] |= {s.dims for s in one.shapes}
        return scopes

    named = property(
        lambda it: [scope for scope in it.scopes if "penalty" in re.split(r"[/();]", scope)]
    )
    of_the_model = property(
        lambda it: [
            scope.rsplit("/", 1)[-1]
            for scope in it.named
            if any(len(it.x) in dims for dims in it.scopes[scope])
        ]
    )

    def has(self, pattern):
        return any(re.search(pattern, scope) for scope in self.named)

    missing = property(
        lambda it: (
            [
                name
                for name in ("dot_general", "sin", "exp")
                if name not in {scope.rsplit("/", 1)[-1] for scope in it.named}
            ]
            + ["mean" for place in it.sums if "penalty" not in re.split(r"[/();]", place)]
        )
    )
    # in JAX's program: a step that returns no loss is compiled without its sums
    sums = property(
        lambda it: [
            place
            for place, eqn in places(it.program)
            if eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.shape == it.w.shape
        ]
    )
    new = property(
        lambda it: it.result[0] if isinstance(it.result, tuple | list) else it.result
    )
    result_shape = property(lambda it: np.shape(it.new))


def matrices():
    return [(jnp.full((32, 32), 0.01), jnp.ones((48, 32)))]


named_part = Function(
    "named_part",
    penalty_step,
    cases=matrices,
    outcome=Named,
    rows={
        "no name": (NOT_THERE, lambda it: not it.named),
        "outside": (
            NOT_THERE + change("jax.value_and_grad(loss)", "PENALTY(jax.value_and_grad(loss))"),
            lambda it: not it.has(r"jvp\([^;]*\bpenalty\b"),
        ),
        "not backward": (
            change("+ penalty(w)", "+ penalty(jax.lax.stop_gradient(w))"),
            lambda it: not it.has(r"transpose\(jvp\([^;]*\bpenalty\b"),
        ),
        "whole loss": (
            [
                change("def loss", "@PENALTY\n    def loss"),
                change("x @ w", "PENALTY(jnp.matmul)(x, w)"),
            ],
            lambda it: it.of_the_model,
        ),
        "shape": (
            lambda *args: penalty_step(*args)[::-1],
            lambda it: it.result_shape != it.w.shape,
        ),
        "numbers": (change("0.1", "0.2"), lambda it: not close(it.new, it.right[0])),
        "a part": (
            [
                change("    return jnp.mean(y)", "return jnp.mean(y)"),
                change("y = w @ w", "y = w", "+ penalty(w)", "+ penalty(w @ w)"),
                change("            y = jnp.exp(y)\n    ", "", "mean(y)", "mean(jnp.exp(y))"),
            ],
            lambda it: it.missing,
        ),
    },
)


PARTS = "host", "attention", "mlp", "recomputation", "optimizer"


def fault(name):
    """Returns the rows of one step: a word that names no part, and each wrong part."""
    right = slow_steps.FAULTS[name]
    return {
        f"{name}: no part": ("cpu", lambda it: it.yours[name] not in PARTS),
        name: ([part for part in PARTS if part != right], lambda it: it.yours[name] != right),
    }


faults = Numbers(
    "faults",
    lambda: slow_steps.FAULTS | {"parts": ", ".join(map(repr, PARTS))},
    words=tuple(slow_steps.FAULTS),
    rows={name: fault(name) for name in slow_steps.FAULTS},
)
