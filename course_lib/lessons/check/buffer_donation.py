"""Checks of notebook 04's exercises."""

import functools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from course_lib.lessons.check.answers import close, same_shapes
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, in_case
from course_lib.one_device import buffer_donation


def aliased(optimizer, P=1000):
    """Returns the bytes per parameter that a step aliases."""

    def step(state, x):
        params, opt_state = state
        grads = jax.grad(lambda params: jnp.sum((params * x) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jnp.ones(P)
    state = params, optimizer.init(params)
    compiled = jax.jit(step, donate_argnums=0).lower(state, jnp.ones(P)).compile()
    return buffer_donation.report(compiled).aliased_bytes / P


aliased_bytes = Numbers(
    "aliased_bytes",
    lambda: {
        "with_momentum": aliased(optax.sgd(0.1, momentum=0.9)),
        "without": aliased(optax.sgd(0.1)),
    },
    rows={
        "with_momentum": {"gradients": 12, "bytes": ...},
        "without": {"plain gradients": 8, "plain bytes": ...},
    },
)


@functools.partial(jax.jit, donate_argnums=0)
def leap(w):
    """A step that goes too far, so that the lowest loss is not the last one."""
    return w - 1.6 * (w - 1.0) - 0.3, jnp.sum((w - 1.0) ** 2)


@functools.cache
def path():
    """Returns the parameters before each of nine steps, and the losses."""
    parameters, losses = [3.0], []
    for _ in range(9):
        losses.append((parameters[-1] - 1.0) ** 2)
        parameters.append(parameters[-1] - 1.6 * (parameters[-1] - 1.0) - 0.3)
    return parameters, losses


def keep_best(step, w, num_steps):
    lowest, kept = jnp.inf, None
    for _ in range(num_steps):
        before = jnp.copy(w)
        w, loss = step(w)
        if loss < lowest:
            lowest, kept = loss, before
    return lowest, kept


class Best(Outcome):
    num_steps = property(lambda it: it.args[0])
    lowest_at = property(lambda it: int(np.argmin(path()[1][: it.num_steps])))
    lowest = property(lambda it: path()[1][it.lowest_at])
    weight = property(lambda it: path()[0][it.lowest_at])
    is_pair = property(lambda it: Outcome.is_pair.fget(it) and np.shape(it.result[0]) == ())
    is_deleted = property(
        lambda it: any(
            isinstance(leaf, jax.Array) and leaf.is_deleted()
            for leaf in jax.tree.leaves(it.result)
        )
    )
    dtype = property(lambda it: jnp.result_type(*jax.tree.leaves(it.result[1])))
    cast = property(lambda it: float(jnp.asarray(it.weight, it.dtype)))
    your_loss = property(lambda it: float(it.result[0]))
    your_weight = property(lambda it: float(np.ravel(np.asarray(it.result[1]))[0]))

    @property
    def has_view(self):
        """Whether a step could not delete its state, because NumPy held a view of it."""
        deleted = []

        def step(w):
            new = leap(w)
            deleted.append(w.is_deleted())
            return new

        self.function(step, jnp.array([3.0]), self.num_steps)
        return not all(deleted)

    def has_loss(self, loss):
        return abs(self.your_loss / loss - 1) < 1e-4

    def has_weight(self, weight):
        return abs(self.your_weight - weight) < 1e-5


best_state = Function(
    "best_state",
    keep_best,
    cases=lambda: [(9,), *((int(np.argmin(path()[1])) + more,) for more in (1, 0))],
    calls=lambda loop, num_steps: loop(leap, jnp.array([3.0]), num_steps),
    outcome=Best,
    rows={
        "no pair": change("return lowest, kept", "return kept, lowest"),
        "deleted": (change("jnp.copy(w)", "w"), lambda it: it.is_deleted),
        "last": (
            lambda step, w, n: (path()[1][-1], w),
            in_case(0, lambda it: it.has_loss(path()[1][-1])),
        ),
        "another loss": (
            lambda step, w, n: (step(w)[1], jnp.ones(1)),
            in_case(0, lambda it: not it.has_loss(it.lowest)),
        ),
        "after": (
            change("loss, before", "loss, jnp.copy(w)"),
            in_case(0, lambda it: it.has_weight(path()[0][it.lowest_at + 1])),
        ),
        "rounded": (
            [
                change("lowest, kept\n", f"lowest, kept.astype(jnp.{dtype})\n")
                for dtype in ("bfloat16", "float16")
            ],
            in_case(0, lambda it: it.dtype.itemsize < 4 and it.has_weight(it.cast)),
        ),
        "another state": (
            change("return lowest, kept", "return lowest, jnp.ones(1)"),
            in_case(0, lambda it: not it.has_weight(it.weight)),
        ),
        "num_steps": (
            [
                change("(num_steps)", "(9)"),
                change("(num_steps)", "(num_steps - (num_steps < 9))"),
            ],
            lambda it: not it.has_loss(it.lowest),
        ),
        "view": (change("jnp.copy(w)", "np.asarray(w)"), lambda it: it.has_view),
    },
)


def state_and_history():
    mean = np.linspace(0.1, 1, 8).astype(ml_dtypes.bfloat16)
    return [({"mean": mean, "weight": np.ones(4, np.float32)}, np.zeros(16, np.float32))]


def casts(state, history):
    mean = state["mean"].astype(jnp.float32)
    new = {
        "mean": (0.9 * mean + 0.1).astype(jnp.bfloat16),
        "weight": state["weight"] - mean.sum(),
    }
    return new, jnp.concatenate([history, mean])


def low(state, history):
    """Computes all in bfloat16."""
    mean = state["mean"]
    new = {"mean": 0.9 * mean + 0.1, "weight": state["weight"] - mean.sum()}
    return new, jnp.concatenate([history, mean.astype(jnp.float32)])


class State(Outcome):
    new = property(lambda it: it.result[0])
    traced = functools.cached_property(lambda it: jax.eval_shape(it.function, *it.args))
    has_keys = property(lambda it: isinstance(it.new, dict) and set(it.new) == set(it.right[0]))
    dtype = property(lambda it: it.traced[0]["mean"].dtype)
    means = property(lambda it: (np.asarray(it.new["mean"]), np.asarray(it.right[0]["mean"])))
    differing = property(lambda it: int(np.sum(it.means[0] != it.means[1])))

    @property
    def has_numbers(self):
        same_shapes(self.traced[0], self.right[0], "the state")
        yours, right = (
            jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), state)
            for state in (self.new, self.right[0])
        )
        return close(yours, right, 1e-2)

    @property
    def has_history(self):
        same_shapes(self.traced[1], self.right[1], "the history")
        return close(self.result[1], self.right[1])

    @functools.cached_property
    def report(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = jax.jit(self.function, donate_argnums=0)
            return buffer_donation.report(step.lower(*self.args).compile())


all_of_the_state = Function(
    "all_of_the_state",
    casts,
    cases=state_and_history,
    # copies: the step may donate its arguments
    calls=lambda step, *args: step(*jax.tree.map(jnp.array, args)),
    outcome=State,
    rows={
        "no pair": lambda state, history: state,
        "keys": (lambda *args: casts(*args)[::-1], lambda it: not it.has_keys),
        "mean": (change("bfloat16", "float32"), lambda it: it.dtype != jnp.bfloat16),
        "numbers": (change("0.9 * mean", "0.8 * mean"), lambda it: not it.has_numbers),
        "lost bits": (
            [low, change("mean.sum()", 'state["mean"].sum()')],
            lambda it: not close(it.new["weight"], it.right[0]["weight"], 1e-5),
        ),
        "rounded": (change("0.9 * mean", '0.9 * state["mean"]'), lambda it: it.differing > 1),
        "history": (change("history, mean]", "mean, history]"), lambda it: not it.has_history),
    },
)
