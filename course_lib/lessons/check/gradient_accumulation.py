"""Checks of notebook 03's exercises."""

import functools
import itertools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from course_lib.lessons.check.answers import close, equations, run
from course_lib.lessons.check.exercises import (
    Function,
    Numbers,
    Outcome,
    change,
    in_case,
    normal,
)

WEIGHTS = [0.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0]  # 9 in all, unlike the number of examples


def model_and_batch():
    kernels, x, y = normal(1, (3, 5), (5, 1)), *normal(2, (8, 3), (8,))
    params = dict(zip(("in", "out"), kernels, strict=True))
    return [(params, (x, y, jnp.array(WEIGHTS)), M) for M in (4, 2)]


def loss_sum(params, x, y, weight):
    return jnp.sum(weight * ((jnp.tanh(x @ params["in"]) @ params["out"])[:, 0] - y) ** 2)


def loss_of_mixed(params, x, y, weight):
    """Compares the output of one example with the y of another."""
    return jnp.sum(weight * (jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def accumulate(params, batch, M):
    """Adds the gradients of M parts."""
    x, y, w = batch
    parts = list(zip(*(jnp.split(a, M) for a in (x, y, w)), strict=True))
    grads = [jax.grad(loss_sum)(params, *part) for part in parts]
    return jax.tree.map(lambda *g: sum(g) / w.sum(), *grads)


EACH = "[jax.grad(loss_sum)(params, *part) for part in parts]"
OF_A_LOOP = "jax.grad(lambda p: sum(loss_sum(p, *part) for part in waiting))"
MEANS = change(
    "lambda *g: sum(g)", "lambda *g: sum(own / max(p[2].sum(), 1) for own, p in zip(g, parts))"
)


def by_scan(params, batch, M):
    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss_sum)(params, *part)), None

    parts = jax.tree.map(lambda a: a.reshape(M, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda g: g / batch[2].sum(), total)


def by_vmap(params, batch, M):
    parts = jax.tree.map(lambda a: a.reshape(M, -1, *a.shape[1:]), batch)
    grads = jax.vmap(lambda part: jax.grad(loss_sum)(params, *part))(parts)
    return jax.tree.map(lambda g: g.sum(0) / batch[2].sum(), grads)


def in_numpy(M):
    """Returns an answer that JAX cannot trace, with another M than it is called with."""
    return lambda params, batch, _: jax.tree.map(np.asarray, accumulate(params, batch, M))


class Accumulated(Outcome):
    factor = property(
        lambda it: np.linalg.norm(it.result["in"]) / np.linalg.norm(it.right["in"])
    )

    @functools.cached_property
    def program(self):
        """The equations in their order: a name, and the shape of the result. Empty if JAX
        cannot trace the function, for example an `if` on a weight.
        """
        params, batch, M = self.args
        try:
            traced = jax.make_jaxpr(lambda *args: self.function(*args, M))(params, batch)
        except Exception:
            return []
        return [(e.primitive.name, e.outvars[0].aval.shape) for e in equations(traced.jaxpr)]

    @functools.cached_property
    def seen(self):
        """The shapes of each tanh, of a function that JAX cannot trace."""
        with mock.patch.object(jnp, "tanh", side_effect=jnp.tanh) as tanh:
            self.function(*self.args)
        shapes = [call.args[0].shape for call in tanh.call_args_list]
        return [shape for shape in shapes if len(shape) > 1]  # else under `jax.vmap`

    @property
    def sizes(self):
        shapes = [shape for name, shape in self.program if name == "tanh"] or self.seen
        return {math.prod(shape[:-1]) for shape in shapes if shape[-1] == 5}

    @property
    def passes(self):
        """How often a forward pass (a tanh) is followed by a gradient of "in" [3 5]."""
        gradient = ("dot_general", 15), ("reduce_sum", 15)
        program = [(name, math.prod(shape)) for name, shape in self.program]
        forward = [
            name == "tanh" for name, n in program if name == "tanh" or (name, n) in gradient
        ]
        return sum(now and not then for now, then in itertools.pairwise(forward))

    loops = property(lambda it: any(name in ("scan", "while") for name, _ in it.program))
    right_size = property(lambda it: len(WEIGHTS) // it.args[2])


accumulation = Function(
    "accumulation",
    accumulate,
    cases=model_and_batch,
    name="the gradient",
    outcome=Accumulated,
    rows={
        "not divided": change(" / w.sum()", ""),
        "by examples": change("/ w.sum()", "/ 8"),
        "by parts": change("/ w.sum()", "/ 4"),
        "mean of means": MEANS + change("/ w.sum()", "/ M"),
        "sum of means": MEANS + change(" / w.sum()", ""),
        "one part": [change("sum(g)", f"g[{i}]") for i in (-1, 1, 2)],
        "mixed up": [
            change("loss_sum", "loss_of_mixed"),
            # `[0]` of a part is its first row
            change("loss_sum", "change('[:, 0]', '[0]').of(loss_sum)"),
        ],
        "without weights": [
            change("x, y, w = batch", "x, y, w = *batch[:2], jnp.ones(8)"),
            change("(x, y, w)", "(x, y, jnp.ones(8))"),
        ],
        "half": [change("sum(g)", "sum(g) / 2"), change("sum(g) / w.sum()", "sum(g) / 2")],
        "not finite": (
            MEANS + change("max(p[2].sum(), 1)", "p[2].sum()"),
            lambda it: not np.isfinite(it.factor),
        ),
        "opposite": change("sum(g)", "-sum(g)"),
        "rounded": (
            change("sum(g)", "sum(own.astype('bfloat16') for own in g).astype('float32')"),
            lambda it: it.is_near,
        ),
        "another": change("/ w.sum()", "/ 3"),
        "at once": (
            [change("(a, M)", "(a, 1)"), by_vmap, in_numpy(1)],
            lambda it: 8 in it.sizes,
        ),
        "size": (
            [change("(a, M)", "(a, 2)"), change("(a, M)", "(a, 4)"), in_numpy(4)],
            lambda it: it.sizes - {it.right_size},
        ),
        "scan": (by_scan, lambda it: it.loops),
        "waits": (
            [
                change(EACH, f"[{OF_A_LOOP}(params) for waiting in (parts,)]"),
                change(EACH, f"[{OF_A_LOOP}(params) for waiting in (parts[::2], parts[1::2])]"),
            ],
            lambda it: it.program and it.passes < it.args[2],
        ),
    },
)


def growth():
    gradient = jnp.array([0.3, -2.0, 5.0])

    def grows(optimizer):
        state = optimizer.init(gradient)
        right, wrong = (optimizer.update(g, state)[0] for g in (gradient, 4 * gradient))
        return float(jnp.mean(wrong / right))

    return {"adam": grows(optax.adam(1e-3)), "sgd": grows(optax.sgd(1e-3))}


forgotten_division = Numbers(
    "forgotten_division",
    growth,
    tolerance=0.01,
    rows={"adam": {"Adam": ...}, "sgd": {"SGD": ...}},
)

GIB = 2**30


def smallest(budget, arguments, parameters, activations, batch_size):
    for M in range(1, batch_size + 1):
        if batch_size % M:
            continue
        gradients = 4 * parameters * min(M, 2)
        if arguments + gradients + activations / M <= budget:
            return M
    return None


class Smallest(Outcome):
    parts = property(lambda it: (it.args[1] / GIB, 4 * it.args[2] / GIB, it.args[3] / GIB))
    setting = property(
        lambda it: (
            f"budget {it.budget / GIB:g} GiB, arguments {it.parts[0]} GiB,"
            f" {it.parameters / 1e6:.0f} million parameters,"
            f" activations {it.parts[2]:g} GiB, a batch of {it.batch_size}"
        )
    )

    def gib(self, M, gradients=2):
        arguments, gradient, activations = self.parts
        return arguments + min(M, gradients) * gradient + activations / M

    def peak(self, M):
        arguments, gradient, activations = self.parts
        parts = f"{arguments} + {min(M, 2)} x {gradient:.2f} + {activations / M:.2f}"
        return f"the peak is {parts} = {self.gib(M):.2f} GiB"

    is_none = property(lambda it: it.result is None)
    is_number = property(lambda it: np.issubdtype(np.asarray(it.result).dtype, np.number))
    divides = property(
        lambda it: it.result == int(it.result) > 0 == it.batch_size % int(it.result)
    )
    has_one = property(lambda it: it.gib(it.result, 1) <= it.budget / GIB)
    has_none = property(lambda it: it.gib(it.result, 0) <= it.budget / GIB)
    is_smaller = property(lambda it: it.right is not None and it.result < it.right)


class OrNone(Function):
    """An exercise whose answer may return None, but not in the first case."""

    def run(self, outcome):
        return run(outcome.function, *outcome.args) if outcome.case else super().run(outcome)


smallest_number_of_minibatches = OrNone(
    "smallest_number_of_minibatches",
    smallest,
    cases=lambda: [
        (budget * GIB, 0.5 * GIB, parameters, 20 * GIB, batch_size)
        for budget, parameters, batch_size in (
            (24, 100e6, 64),
            (8, 100e6, 64),
            (2.1, 100e6, 64),
            (1.6, 100e6, 64),
            (5.1, 5e8, 96),
            (21, 2**27, 64),  # fits exactly, and with one gradient only
            (6.5, 2**27, 64),  # exactly with 4
            (20.6, 100e6, 64),  # with no gradient, one minibatch would fit
            (1, 100e6, 64),
        )
    ],
    outcome=Smallest,
    rows={
        "no number": (lambda *sizes: "4", lambda it: not (it.is_none or it.is_number)),
        "none": (
            change("4 * parameters * min(M, 2)", "16 * parameters"),
            lambda it: it.is_none and it.right is not None,
        ),
        "impossible": (
            change("return None", "return 128"),
            lambda it: it.right is None and not it.is_none,
        ),
        "no divisor": (
            [
                change("if batch_size % M", "if False"),
                lambda budget, a, p, b, size: b / (budget - a - 4 * p),
            ],
            lambda it: not it.is_none and not it.divides,
        ),
        "one gradient": (
            change(" * min(M, 2)", ""),
            lambda it: not it.is_none and it.is_smaller and it.has_one,
        ),
        "too much and forgotten": (
            [change("gradients + ", ""), change("min(M, 2)", "(2 if M > 1 else 0)")],
            lambda it: not it.is_none and it.is_smaller and it.has_none,
        ),
        "too much": (lambda *sizes: 1, lambda it: not it.is_none and it.is_smaller),
        "not the smallest": (
            [
                change("if batch_size % M", "if batch_size % M or M.bit_count() > 1"),
                change("<= budget", "< budget"),
                change("min(M, 2)", "2"),
            ],
            lambda it: it.result != it.right,
        ),
    },
)


class Shares(Outcome):
    """The mean that `optax.MultiSteps` makes of gradients with these factors."""

    counts = property(lambda it: it.args[0])
    listed = property(lambda it: [round(share, 3) for share in map(float, it.result)])

    @functools.cached_property
    def means(self):
        """The mean with these factors, and the gradient of the whole batch."""
        x, weights = np.arange(1.0, 13.0), np.repeat([1.0, 0.0], [9, 3])
        gradients = [
            2 * np.sum((2.0 - x[part]) * weights[part]) / weights[part].sum()
            for part in (slice(4), slice(4, 8), slice(8, 12), slice(12))
        ]
        return float(np.dot(self.result, gradients[:3])) / 3, gradients[3]

    mean = property(lambda it: it.means[0])
    whole = property(lambda it: it.means[1])
    ratio = property(lambda it: it.mean / it.whole)
    is_right = property(
        lambda it: close(it.result, it.right) if it.case else abs(it.ratio - 1) < 1e-4
    )

    @property
    def is_proportional(self):
        shares = np.array(self.result, float) / float(sum(self.result))
        return close(shares, np.array(self.counts) / sum(self.counts))


def share(counts, m):
    return len(counts) * counts[m] / sum(counts)


def for_each_part(share, counts):
    shares = tuple(share(counts, m) for m in range(len(counts)))
    return None if any(one is None for one in shares) else shares


multi_steps_share = Function(
    "multi_steps_share",
    share,
    cases=lambda: [([4, 4, 1],), ([6, 2],)],
    calls=for_each_part,
    outcome=Shares,
    rows={
        "list": (
            lambda counts, m: [len(counts) * n / sum(counts) for n in counts],
            lambda it: np.ndim(it.result) > 1,
        ),
        "third": change("len(counts) * ", ""),
        "equal": (
            lambda counts, m: 1,
            in_case(0, lambda it: len(set(map(float, it.result))) == 1),
        ),
        "upside down": lambda counts, m: sum(counts) / len(counts) / counts[m],
        "proportional": (
            lambda counts, m: counts[m],
            in_case(0, lambda it: not it.is_right and it.is_proportional),
        ),
        "another": (lambda counts, m: counts[m] + 1, in_case(0)),
        "two": (change("len(counts)", "3"), in_case(1)),
    },
)
