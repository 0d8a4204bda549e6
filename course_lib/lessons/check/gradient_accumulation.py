"""Checks of notebook 03's exercises."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

from course_lib.lessons.check.answers import close, run
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, in_case, is_wrong
from course_lib.lessons.check.many_devices import normal

WEIGHTS = [0.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0]  # 9 in all, unlike the number of examples


def model_and_batch():
    kernels, x, y = normal(1, (3, 5), (5, 1)), *normal(2, (8, 3), (8,))
    params = dict(zip(("in", "out"), map(jnp.asarray, kernels), strict=True))
    return [(params, (jnp.asarray(x), jnp.asarray(y), jnp.array(WEIGHTS)), 4)]


def loss_sum(params, x, y, weight, choose=lambda outputs: outputs[:, 0]):
    return jnp.sum(weight * (choose(jnp.tanh(x @ params["in"]) @ params["out"]) - y) ** 2)


def accumulate(
    params,
    batch,
    M,
    *,
    parts=None,
    each=lambda g, weight: g,
    total=lambda g, weight: sum(g) / weight,
    weight=lambda w: w,
    choose=lambda outputs: outputs[:, 0],
):
    """Adds the gradients of M parts."""
    x, y, w = batch
    cut = [jnp.split(a, parts or M) for a in (x, y, weight(w))]
    grads = [
        jax.tree.map(
            lambda g, w=part[2]: each(g, w.sum()), jax.grad(loss_sum)(params, *part, choose)
        )
        for part in zip(*cut, strict=True)
    ]
    return jax.tree.map(lambda *g: total(g, w.sum()), *grads)


def by_scan(params, batch, M):
    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss_sum)(params, *part)), None

    parts = jax.tree.map(lambda a: a.reshape(M, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda g: g / batch[2].sum(), total)


class Accumulated(Outcome):
    """The gradient, and how many examples go through the model at once."""

    total = sum(WEIGHTS)
    ratio = property(
        lambda it: np.linalg.norm(it.result["in"]) / np.linalg.norm(it.right["in"])
    )

    @functools.cached_property
    def text(self):
        """The program. Empty if JAX cannot trace it, for example an `if` on a weight."""
        params, batch, M = self.args
        try:
            return str(jax.make_jaxpr(lambda *args: self.function(*args, M))(params, batch))
        except Exception:
            return ""

    @property
    def sizes(self):
        return {int(size) for size in re.findall(r"f32\[(\d+),5\] = tanh", self.text)}

    size = property(lambda it: min(it.sizes, default=0))


def mean_of_part(g, weight):
    return g / jnp.maximum(weight, 1)


accumulation = Function(
    "accumulation",
    accumulate,
    cases=model_and_batch,
    name="the gradient",
    outcome=Accumulated,
    rows={
        "not divided": dict(total=lambda g, weight: sum(g)),
        "by examples": dict(total=lambda g, weight: sum(g) / 8),
        "by parts": dict(total=lambda g, weight: sum(g) / 4),
        "mean of means": dict(each=mean_of_part, total=lambda g, weight: sum(g) / len(g)),
        "sum of means": dict(each=mean_of_part, total=lambda g, weight: sum(g)),
        "one part": [dict(total=lambda g, weight, i=i: g[i] / weight) for i in (-1, 1, 2)],
        # `[0]` of a part is its first row; without it stays a column
        "mixed up": [
            dict(choose=lambda outputs: outputs[0]),
            dict(choose=lambda outputs: outputs),
        ],
        "without weights": [
            dict(weight=jnp.ones_like, total=lambda g, weight: sum(g) / 8),
            dict(weight=jnp.ones_like),
        ],
        "half": [
            dict(each=lambda g, weight: g / 2),
            dict(each=lambda g, weight: g / 2, total=lambda g, weight: sum(g)),
        ],
        "not finite": (
            dict(each=lambda g, weight: g / weight, total=lambda g, weight: sum(g)),
            lambda it: not np.isfinite(it.ratio),
        ),
        "opposite": dict(total=lambda g, weight: -sum(g) / weight),
        "another": (dict(total=lambda g, weight: sum(g) / 3), is_wrong),
        "at once": (dict(parts=1), lambda it: 8 in it.sizes),
        "size": (dict(parts=2), lambda it: it.sizes - {2}),
        "scan": (by_scan, lambda it: "scan[" in it.text),
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


def smallest(
    budget,
    arguments,
    parameters,
    activations,
    batch_size,
    *,
    peak=lambda M, arguments, parameters, activations: (
        arguments + 4 * parameters + activations / M
    ),
    candidates=range(1, 1000),
    divides=True,
    otherwise=None,
):
    for M in candidates:
        if divides and batch_size % M:
            continue
        if peak(M, arguments, parameters, activations) <= budget:
            return M
    return otherwise


class Smallest(Outcome):
    """The number of minibatches, and the peak in GiB."""

    budget = property(lambda it: it.args[0] / GIB)
    batch_size = property(lambda it: it.args[4])
    parts = property(lambda it: (it.args[1] / GIB, 4 * it.args[2] / GIB, it.args[3] / GIB))
    setting = property(
        lambda it: (
            f"budget {it.budget:g} GiB, arguments {it.parts[0]} GiB, {it.args[2] / 1e6:.0f}"
            f" million parameters, activations {it.parts[2]:g} GiB, a batch of {it.batch_size}"
        )
    )

    def peak(self, M):
        arguments, accumulator, activations = self.parts
        total = arguments + accumulator + activations / M
        parts = f"{arguments} + {accumulator:.2f} + {activations / M:.2f}"
        return f"the peak is {parts} = {total:.2f} GiB"

    your_peak = property(lambda it: it.peak(it.result))
    right_peak = property(lambda it: it.peak(it.right))
    is_none = property(lambda it: it.result is None)
    divides = property(
        lambda it: it.result == int(it.result) > 0 == it.batch_size % int(it.result)
    )
    forgets = property(lambda it: it.parts[0] + it.parts[2] / it.result <= it.budget)
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
            (1.2, 100e6, 64),
            (3.2, 5e8, 96),
            (1, 100e6, 64),
        )
    ],
    name=None,
    outcome=Smallest,
    rows={
        "none": (
            [
                dict(candidates=[1]),
                dict(candidates=[1, 2, 4, 8, 16, 32]),
                dict(peak=lambda M, a, p, b: a + 16 * p + b / M),
            ],
            lambda it: it.is_none and it.right is not None,
        ),
        "impossible": (dict(otherwise=128), lambda it: it.right is None and not it.is_none),
        "no divisor": (
            [
                dict(divides=False),
                lambda budget, a, p, b, size: math.ceil(b / (budget - a - 4 * p)),
                lambda budget, a, p, b, size: b / (budget - a - 4 * p),
            ],
            lambda it: not it.is_none and not it.divides,
        ),
        "too much and forgotten": (
            [dict(peak=lambda M, a, p, b: a + b / M), dict(peak=lambda M, a, p, b: b / M)],
            lambda it: not it.is_none and it.is_smaller and it.forgets,
        ),
        "too much": (lambda *sizes: 1, lambda it: not it.is_none and it.is_smaller),
        "not the smallest": (
            dict(candidates=[2**i for i in range(12)]),
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
    is_right = property(lambda it: abs(it.ratio - 1) < 1e-4)

    @property
    def is_proportional(self):
        shares = np.array(self.result, float) / float(sum(self.result))
        return close(shares, np.array(self.counts) / sum(self.counts))


def share(counts, m, *, of=lambda counts, m: len(counts) * counts[m] / sum(counts)):
    return of(counts, m)


def for_each_part(share, counts):
    shares = tuple(share(counts, m) for m in range(len(counts)))
    return None if any(one is None for one in shares) else shares


multi_steps_share = Function(
    "multi_steps_share",
    share,
    cases=lambda: [([4, 4, 1],), ([6, 2],)],
    calls=for_each_part,
    name=None,
    outcome=Shares,
    rows={
        "third": (
            dict(of=lambda counts, m: counts[m] / sum(counts)),
            lambda it: it.case == 0 and abs(it.ratio - 1 / 3) <= 1e-3,
        ),
        "equal": (
            dict(of=lambda counts, m: 1),
            lambda it: it.case == 0 and len(set(map(float, it.result))) == 1,
        ),
        "upside down": (
            dict(of=lambda counts, m: sum(counts) / len(counts) / counts[m]),
            lambda it: it.case == 0 and close(it.result, (3 / 4, 3 / 4, 3)),
        ),
        "proportional": (
            [
                dict(of=lambda counts, m: counts[m]),
                dict(of=lambda counts, m: counts[m] / max(counts)),
            ],
            in_case(0, lambda it: not it.is_right and it.is_proportional),
        ),
        "another": (dict(of=lambda counts, m: counts[m] + 1), in_case(0)),
        "two": (
            dict(of=lambda counts, m: 3 * counts[m] / sum(counts)),
            lambda it: it.case == 1 and not close(it.result, it.right),
        ),
    },
)
