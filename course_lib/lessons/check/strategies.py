"""Checks of notebook 12's exercises."""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding

from course_lib import measure, planner
from course_lib.lessons import compare, tiny_transformer
from course_lib.lessons.check.answers import call, close, same_structure
from course_lib.lessons.check.exercises import Function, Numbered, Numbers, Outcome
from course_lib.lessons.check.many_devices import mesh_of
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hlo, virtual
from course_lib.measure.ledger import KINDS


@functools.cache
def published_steps():
    """Returns the step of Nemotron-4 340B on 6,144 GPUs, and on twice as many."""
    # only this check needs the published steps
    from course_lib.lessons import backtest

    row = [row for row in backtest.load() if row.source == "nemotron4_2024"][-1]

    def step(times):
        axes = {**row.plan.axes, "data": times * row.plan.axes["data"]}
        cluster = Cluster(row.cluster.accelerator, times * row.cluster.count)
        plan = dataclasses.replace(row.plan, axes=axes)
        return planner.seconds(planner.step(row.shape, plan), cluster)

    return step(1), step(2)


class Steps(Numbered):
    """A part of the step, on some GPUs and on twice as many."""

    names = property(lambda it: [n for n, s in published_steps()[0].parts.items() if s])
    seconds = property(lambda it: published_steps()[0].parts[it.part])
    shorter = property(lambda it: it.seconds / published_steps()[1].parts[it.part])
    ratio = property(lambda it: it.right["speedup"])


twice_the_gpus = Numbers(
    "twice_the_gpus",
    lambda: {
        "speedup": published_steps()[0].total / published_steps()[1].total,
        "part": "data",
    },
    words=("part",),
    outcome=Steps,
    rows={
        "speedup": {
            "unknown": (dict(part="pipes"), lambda it: it.part not in it.names),
            "all halved": (2, lambda it: not it.speedup < 2),
            "slower": (1, lambda it: not it.speedup > 1),
        },
        "part": {
            "short": ("optimizer", lambda it: it.seconds <= 0.1),
            "shorter": (["products", "bubble"], lambda it: it.shorter > 1),
            # all parts but this one halved
            "too fast": (dict(speedup=1.95), lambda it: it.speedup > 1.04 * it.ratio),
            # no part of the bubble halved
            "too slow": (
                [dict(speedup=1.2), dict(speedup=1.66)],
                lambda it: it.speedup < 0.96 * it.ratio,
            ),
        },
    },
)

CUBE = {"data": 2, "pipe": 2, "tensor": 2}
LONG = {"data": 1, "pipe": 4, "tensor": 2}
M = 4
LAYER = ("qkv", "out", "up", "down")


@functools.cache
def batch():
    """Returns parameters, tokens, and one device's loss and gradients."""
    init = functools.partial(tiny_transformer.init, N=4, D=32, H=4, V=64, L=16)
    params = jax.jit(init)(jax.random.key(1))
    tokens = np.random.default_rng(1).integers(0, 64, (2, 16, 16)).astype(np.int32)
    right = jax.jit(jax.value_and_grad(tiny_transformer.mean_loss))(params, *tokens)
    return params, tokens, jax.device_get(right)


def make_gradient(mesh, M):
    """The course's answer. No learner needs it before this exercise."""
    from course_lib.lessons import three_axes

    return three_axes.make_gradient(mesh, M)


def in_shardings(mesh, M):
    specs, gradient = make_gradient(mesh, M)
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}, gradient


@dataclasses.dataclass(eq=False)
class ThreeAxes(Outcome):
    """A gradient on a mesh of three axes, compiled and run."""

    axes = property(lambda it: it.args[0])
    mesh = property(lambda it: mesh_of(it.axes))
    first = property(lambda it: it.case == 0)
    where = property(lambda it: "" if it.first else "With four stages: ")
    specs = property(lambda it: it.result[0])
    names = property(lambda it: sorted(batch()[0]))
    is_swapped = property(lambda it: Outcome.is_pair.fget(it) and callable(it.result[0]))
    has_shardings = property(
        lambda it: any(isinstance(leaf, NamedSharding) for leaf in jax.tree.leaves(it.specs))
    )
    has_specs = property(
        lambda it: isinstance(it.specs, dict) and set(it.specs) == set(it.names)
    )
    whole = property(lambda it: it.axes["pipe"] * it.axes["tensor"])

    @functools.cached_property
    def cut(self):
        """The first parameter that is cut into another number of parts, and this number."""
        for name in LAYER:
            shape = batch()[0][name].shape
            part = NamedSharding(self.mesh, self.specs[name]).shard_shape(shape)
            parts = int(np.prod(shape) / np.prod(part))
            if parts != self.whole:
                return {"name": name, "parts": parts}
        return None

    @functools.cached_property
    def placed(self):
        params, tokens, _ = batch()
        shardings = {name: NamedSharding(self.mesh, self.specs[name]) for name in params}
        return jax.device_put(params, shardings), *tokens

    @functools.cached_property
    def compiled(self):
        if isinstance(self.function, Changed):
            return self.best.compiled
        step = jax.jit(self.result[1])
        options = compare.QUICK | virtual.NO_FUSED_LIBRARY  # its memory is measured
        return call(lambda: step.lower(*self.placed).compile(options), hint="")

    @functools.cached_property
    def returned(self):
        if isinstance(self.function, Changed):
            return self.function.change(*self.best.returned)
        return jax.device_get(call(self.compiled, *self.placed, hint=""))

    waits = property(lambda it: waits_in_a_branch(it.compiled.as_text()))
    returns_pair = property(
        lambda it: isinstance(it.returned, tuple | list) and len(it.returned) == 2
    )
    is_reversed = property(lambda it: isinstance(it.returned[0], dict))
    loss = property(lambda it: float(it.returned[0]))
    right_loss = property(lambda it: float(batch()[2][0]))

    @functools.cached_property
    def pairs(self):
        """The gradients of each parameter, beside one device's."""
        grads, right = self.returned[1], batch()[2][1]
        same_structure(grads, right, "the gradient")
        return {name: (grads[name], right[name]) for name in right}

    @functools.cached_property
    def wrong(self):
        return [name for name, pair in self.pairs.items() if not close(*pair)]

    @property
    def scale(self):
        yours, right = self.pairs["output"]
        return float(np.vdot(yours, right)) / float(np.vdot(right, right))

    @property
    def is_scaled(self):
        pairs, scale = self.pairs.values(), self.scale
        return self.wrong and all(close(yours, scale * right, 1e-3) for yours, right in pairs)

    @functools.cached_property
    def sent(self):
        """The bytes that a device sends along each axis."""
        entries = measure.ledger(self.compiled, self.mesh).entries
        return {
            axis: sum(e.sent_bytes * e.executions for e in entries if axis in (e.axes or ()))
            for axis in self.axes
        }

    is_pair = property(lambda it: Outcome.is_pair.fget(it) and callable(it.result[1]))
    enough = property(lambda it: it.best.sent)
    memory = property(lambda it: measure.memory(it.compiled).temporaries)
    memory_enough = property(lambda it: it.best.memory)

    def sends_more(self, axis):
        return self.first and self.sent[axis] > 1.05 * self.enough[axis]


def waits_in_a_branch(text):
    """Returns whether a branch of a conditional, or a loop in it, holds a collective."""
    branches = [
        branch
        for computation in hlo.parse(text).computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "conditional"
        for branch in instruction.called
    ]
    seen = set()
    while branches:
        branch = branches.pop()
        if branch.name not in seen:
            seen.add(branch.name)
            for instruction in branch.instructions:
                if instruction.opcode.removesuffix("-start") in KINDS:
                    return True
                branches += instruction.called
    return False


@dataclasses.dataclass(frozen=True)
class Changed:
    """The course's answer, whose loss and gradients are changed afterwards."""

    change: Callable[..., tuple]

    def __call__(self, mesh, M):
        return make_gradient(mesh, M)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The course's answer, with another text in place of a part of its own."""

    part: str
    other: str

    def __call__(self, mesh, M):
        from course_lib.lessons import three_axes

        scope: dict = {}
        text = inspect.getsource(three_axes)
        assert self.part in text, self.part
        exec(text.replace(self.part, self.other), scope)
        return scope["make_gradient"](mesh, M)


def with_twice(name):
    """Returns a change that doubles one gradient."""
    return lambda loss, grads: (loss, grads | {name: 2 * grads[name]})


three_axes = Function(
    "three_axes",
    make_gradient,
    cases=lambda: [(CUBE, M), (LONG, M)],
    calls=lambda yours, axes, M: yours(mesh_of(axes), M),
    outcome=ThreeAxes,
    rows={
        "swapped": (lambda mesh, M: make_gradient(mesh, M)[::-1], lambda it: it.is_swapped),
        "no pair": lambda mesh, M: make_gradient(mesh, M)[1],
        "shardings": (in_shardings, lambda it: it.has_shardings),
        "specs": (lambda mesh, M: ({}, make_gradient(mesh, M)[1]), lambda it: not it.has_specs),
        "cut": (Rewritten('"pipe", None, None, "tensor"', '"pipe"'), lambda it: it.cut),
        "waits": (Rewritten("params = vary(", "vary("), lambda it: it.waits),
        "returns": (Changed(lambda loss, grads: grads), lambda it: not it.returns_pair),
        "reversed": (Changed(lambda loss, grads: (grads, loss)), lambda it: it.is_reversed),
        "loss": (
            Changed(lambda loss, grads: (2 * loss, grads)),
            lambda it: not close(it.loss, it.right_loss),
        ),
        "scaled": (
            Changed(lambda loss, grads: (loss, jax.tree.map(lambda g: 2 * g, grads))),
            lambda it: it.is_scaled,
        ),
        "gradients": ([Changed(with_twice("norm"))], lambda it: it.wrong),
        "data": (
            Rewritten(
                "= vary(params, ",
                '|= vary({"norm": params["norm"], "output": params["output"]}, ',
            ),
            lambda it: it.sends_more("data"),
        ),
        "tensor": (
            Rewritten(
                'x_BxLxD += jax.lax.psum(heads_BxLxD, "tensor")',
                'x_BxLxD += jax.lax.psum(heads_BxLxD, "tensor")\n'
                '    x_BxLxD += 0 * jax.lax.psum(vary(jnp.sin(x_BxLxD), "tensor"), "tensor")',
            ),
            lambda it: it.sends_more("tensor"),
        ),
        "pipe": (
            Rewritten(
                'jax.lax.ppermute(x_BxLxD, "pipe", to_next)',
                "jax.lax.psum((jnp.arange(stages) == (stage + 1) % stages)[:, None, None, None]"
                ' * x_BxLxD, "pipe")[stage]',
            ),
            lambda it: it.sends_more("pipe"),
        ),
        "memory": (
            Rewritten("@jax.checkpoint\n", ""),
            lambda it: it.first and it.memory > 1.5 * it.memory_enough,
        ),
    },
    slow=("tensor", "pipe", "memory"),
)
