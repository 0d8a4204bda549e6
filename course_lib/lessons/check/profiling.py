"""Checks of notebook 06's exercises."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import slow_steps
from course_lib.lessons.check.answers import WrongAnswer, close, programs_in
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change
from course_lib.measure import program

PENALTY = jax.named_scope("penalty")


def of_the_model(w, x):
    return jnp.mean(jnp.tanh(x @ w))


def penalty_step(w, x):
    """A step of SGD whose penalty has a name."""

    def penalty(w):
        with jax.named_scope("penalty"):
            y = w @ w
            y = jnp.sin(y)
            y = jnp.exp(y)
            return jnp.mean(y)

    def loss(w):
        return of_the_model(w, x) + penalty(w)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def unnamed(w):
    """Adds the penalty's gradient, and 0."""
    value = jnp.mean(jnp.exp(jnp.sin(w @ w)))
    return value - jax.lax.stop_gradient(value)


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
    is_around = property(
        lambda it: not any(re.search(r"jvp\([^;]*\bpenalty\b", one) for one in it.named)
    )
    of_the_model = property(
        lambda it: [
            scope.rsplit("/", 1)[-1]
            for scope in it.named
            if any(len(it.x) in dims for dims in it.scopes[scope])
        ]
    )

    def has(self, phase):
        """Whether the name stands in a phase (a pattern), or around all of it."""
        patterns = phase + r"\([^;]*\bpenalty\b", rf"\bpenalty/[^;]*{phase}\("
        return any(re.search(one, scope) for one in patterns for scope in self.named)

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
    without = property(lambda it: it.w - 0.1 * jax.grad(of_the_model)(it.w, it.x))


def matrices():
    return [(jnp.full((32, 32), 0.01), jnp.ones((48, 32)))]


named_part = Function(
    "named_part",
    penalty_step,
    cases=matrices,
    outcome=Named,
    rows={
        "shape": (
            lambda *args: penalty_step(*args)[::-1],
            lambda it: it.result_shape != it.w.shape,
        ),
        "no gradient": (
            change("+ penalty(w)", "+ penalty(jax.lax.stop_gradient(w))"),
            lambda it: close(it.new, it.without),
        ),
        "numbers": (change("0.1", "0.2"), lambda it: not close(it.new, it.right[0])),
        "no name": (NOT_THERE, lambda it: not it.named),
        "outside": (
            NOT_THERE + change("jax.value_and_grad(loss)", "PENALTY(jax.value_and_grad(loss))"),
            lambda it: not it.has("jvp") or (it.is_around and it.of_the_model),
        ),
        "not backward": (
            change("+ penalty(w)", "+ penalty(jax.lax.stop_gradient(w)) + unnamed(w)"),
            lambda it: not it.has(r"transpose\(jvp"),
        ),
        "whole loss": (
            [
                change("def loss", "@PENALTY\n    def loss"),
                change("of_the_model(w, x)", "PENALTY(of_the_model)(w, x)"),
            ],
            lambda it: it.of_the_model,
        ),
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


class Faults(Numbers):
    """Words that are judged one at a time, while others are still stubs."""

    def judge(self, *yours, **named):
        words = self.__signature__.bind(*yours, **named).arguments
        words = {n: w.strip().lower() if isinstance(w, str) else w for n, w in words.items()}
        filled = {n: word for n, word in words.items() if word is not ... and word is not None}
        if not filled or len(filled) == len(words):
            return super().judge(**words)
        super().judge(**slow_steps.FAULTS | filled)  # as if the open ones were right
        raise WrongAnswer(f"Right so far: {', '.join(filled)}. Go on with the others.")


faults = Faults(
    "faults",
    lambda: slow_steps.FAULTS | {"parts": ", ".join(map(repr, PARTS))},
    words=tuple(slow_steps.FAULTS),
    rows={name: fault(name) for name in slow_steps.FAULTS},
)
