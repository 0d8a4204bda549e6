"""Checks of notebook 05's exercises."""

import functools
import itertools
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import tiny_transformer
from course_lib.lessons.check.answers import close, run
from course_lib.lessons.check.exercises import (
    Function,
    Numbers,
    Outcome,
    change,
    in_case,
    normal,
)


def count(N, D, V, L):
    """Returns the number of parameters of N layers of width D."""
    arrays = jax.eval_shape(
        lambda key: tiny_transformer.init(key, N, D, 4, V, L), jax.random.key(0)
    )
    return sum(array.size for name, array in arrays.items() if name != "output")


def lacks(N, D, V, L):
    """Returns how many parameters an answer lacks, by mistake. It makes one of each group."""
    return (
        {"positions": L * D},
        {
            "no norms": 2 * N * D,
            "one norm": N * D,
            "three norms": -N * D,
            "biases of norms": -2 * N * D,
            "biases of all norms": -(2 * N + 1) * D,
        },
        {"last norm": D, "large last norm": -D},
        {
            "no MLP": 8 * N * D**2,
            "no attention": 4 * N * D**2,
            "1 matrices": N * D**2,
            "2 matrices": 2 * N * D**2,
            "3 matrices": 3 * N * D**2,
            "narrow MLP": 6 * N * D**2,
            "16 matrices": -4 * N * D**2,
        },
        {"no tokens": V * D, "output": -V * D, "output with bias": -V * D - V},
        {"biases": -9 * N * D, "case study": -(11 * N * D + D + V * D + V)},
    )


def explanations(missing, groups):
    """Yields lists of up to three mistakes that explain what is missing, the shortest first."""
    choices = list(itertools.product(*({"": 0} | group for group in groups)))
    numbers = {row: number for group in groups for row, number in group.items()}
    for most in (1, 2, 3):
        for choice in choices:
            rows = [row for row in choice if row]
            if len(rows) == most and sum(numbers[row] for row in rows) == missing:
                yield rows


class Count(Outcome):
    """A number of parameters, and which mistakes explain it."""

    missing = property(lambda it: it.right - it.result)
    amount = property(
        lambda it: f"{abs(it.missing):,} too {'few' if it.missing > 0 else 'many'}"
    )

    @functools.cached_property
    def mistakes(self):
        found = explanations(self.missing, lacks(*self.args))
        return next(found, []) if self.missing else []

    @property
    def more(self):
        """The other mistakes, in words."""
        sentences = (self.exercise.sentences[row] for row in self.mistakes[1:])
        return "".join(f"; {one.split(': ')[2].removesuffix('{more}.')}" for one in sentences)


def with_mistake(row):
    """Returns a row: an answer with this mistake, and when it is the first of several."""

    def wrong(*sizes):
        return count(*sizes) - next(group[row] for group in lacks(*sizes) if row in group)

    return wrong, lambda it: it.mistakes[:1] == [row]


count_parameters = Function(
    "count_parameters",
    count,
    cases=lambda: [(24, 512, 2048, 512), (6, 1024, 2048, 512), (2, 128, 1000, 64)],
    outcome=Count,
    rows={
        "no number": (
            [lambda *sizes: [count(*sizes)], lambda *sizes: str(count(*sizes))],
            lambda it: not isinstance(it.result, numbers.Real),
        ),
        **{row: with_mistake(row) for group in lacks(1, 1, 1, 1) for row in group},
        "unexplained": (lambda *sizes: count(*sizes) + 1, lambda it: it.missing != 0),
    },
)


scores_outgrow_mlp = Numbers(
    "scores_outgrow_mlp",
    lambda: {"length": 256},
    rows={
        "length": {
            "float32": 512,
            "upside down": 1024,
            "heads": 2048,
            "no length": ([0, float("inf")], lambda it: not 0 < it.length < float("inf")),
            "another": ...,
        }
    },
)


@jax.jit
def causal(x):
    return jnp.tanh(jnp.cumsum(x, axis=0))


@jax.jit
def mixes_all(x):
    return x + x.mean(0)


@jax.jit
def leaks_at_the_end(x):
    return causal(x).at[-2].add(0.1 * x[-1])


@jax.jit
def cancels(x):
    later = jnp.concatenate([x[1:, :1], jnp.zeros((1, 1))])
    return causal(x) + later * jnp.array([1.0, -1.0, 0.0, 0.0])


@jax.jit
def skips(x):
    return causal(x).at[1, 2].add(-0.1 * x[3, 3])


@jax.jit
def turns(x):
    """Two features are those of a point on a circle: their squares add up to 1."""
    angle = jnp.append(x[1:, 0], 0.0)
    return causal(x).at[:, :2].set(jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1))


@jax.jit
def leaks_a_little(x):
    return causal(x).at[1, 2].add(1e-4 * x[3, 3])


@jax.jit  # one program for all pairs
def leaks(x, source, to):
    """One position reads a later one; at 0 and 1, no derivative shows."""
    later = x[source, source % 4]
    return causal(x).at[to, to % 4].add(0.1 * (later * (later - 1)) ** 2)


def leaks_from(source, to):
    return lambda x: leaks(x, source, to)


def looks(forward, x):
    """Whether any position reads a later one."""
    # [position, feature, other position, its feature]
    jacobian = np.asarray(jax.jacobian(forward)(x))
    reads = np.abs(jacobian).sum(1) > 1e-5
    return any(bool(reads[t, t + 1 :].any()) for t in range(len(x)))


FORWARDS = causal, mixes_all, leaks_at_the_end, skips, cancels, turns, leaks_a_little
PAIRS = [(source, to) for source in range(6) for to in range(source)]


def pairs():
    """Returns x and a leak for each pair of positions, one of them in a longer sequence."""
    x, longer = normal(0, (6, 4), (9, 4))
    return [*((leaks_from(*pair), x) for pair in PAIRS), (leaks_from(8, 7), longer)]


def is_wrong_about(function):
    return lambda it: it.forward is function and bool(it.result) != it.right


looks_ahead = Function(
    "looks_ahead",
    looks,
    cases=lambda: [*((forward, *normal(0, (6, 4))) for forward in FORWARDS), *pairs()],
    rows={
        "array": (lambda forward, x: jnp.ones((6, 6)), lambda it: np.ndim(it.result) > 0),
        "no answer": (
            lambda forward, x: "yes",
            lambda it: not isinstance(it.result, numbers.Real),
        ),
        "causal": (change("t + 1 :", "t:"), is_wrong_about(causal)),
        "mixes all": (lambda forward, x: False, is_wrong_about(mixes_all)),
        "last position": (
            change("range(len(x))", "range(3)"),
            is_wrong_about(leaks_at_the_end),
        ),
        "two ahead": (
            [change("t + 1 :", "t + 1 : t + 2"), change("np.abs(", "np.maximum(0, ")],
            is_wrong_about(skips),
        ),
        "cancels": (change("(jacobian).sum(1)", "(jacobian.sum(1))"), is_wrong_about(cancels)),
        "normalized": (
            change(
                "(forward)(x)",
                "(lambda x: forward(x) ** 2)(x)",
                "np.abs(jacobian).sum(1)",
                "np.abs(jacobian.sum(1))",
            ),
            is_wrong_about(turns),
        ),
        "tolerance": (change("1e-5", "1e-3"), is_wrong_about(leaks_a_little)),
        "one pair": (
            [
                change("t + 1 :", "t + 1 : t + 3"),
                change("range(len(x))", "(1, 4)"),
                change("range(len(x))", "range(6)"),
                change("(forward)(x)", "(forward)(jnp.zeros_like(x))"),
                change("(forward)(x)", "(forward)(jnp.ones_like(x))"),
            ],
            lambda it: bool(it.result) != it.right,
        ),
    },
)


def layer(w, x):
    return x + jnp.tanh(x @ w)


def scan(layer, w, x):
    carry, outputs = jax.lax.scan(lambda x, w: (layer(w, x),) * 2, x, w)
    return carry


def loop(layer, w, x):
    return functools.reduce(lambda x, w: layer(w, x), w, x)


class Program(Outcome):
    @functools.cached_property
    def lines(self):
        """Lines of program, by number of layers."""

        def length(N):
            w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((N, 8, 8), (4, 8)))
            lowered = jax.jit(lambda w, x: run(self.function, layer, w, x)).lower(w, x)
            return len(lowered.as_text().splitlines())

        return [length(60), length(120)]  # a scan may unroll some of them

    @property
    def is_one_layer(self):
        return any(close(self.result, layer(w, self.x)) for w in (self.w[0], self.w[-1]))


def layers_and_x():
    (w,), x = normal(0, (5, 8, 8)), jnp.ones((4, 8))
    return [(layer, w, x), (layer, w[:3], x)]


scan_over_layers = Function(
    "scan_over_layers",
    scan,
    cases=layers_and_x,
    outcome=Program,
    rows={
        "several": change("return carry", "return carry, outputs"),
        "shape": change("return carry", "return outputs"),
        "one layer": (change("x, w)\n", "x, w[:1])\n"), in_case(0, lambda it: it.is_one_layer)),
        "another": (change("x, w)\n", "x, w[::-1])\n"), in_case(0)),
        "five layers": (
            lambda layer, w, x: jax.lax.fori_loop(0, 5, lambda i, x: layer(w[i], x), x),
            in_case(1),
        ),
        "grows": (loop, lambda it: it.case == 1 and it.lines[1] > it.lines[0]),
    },
)
