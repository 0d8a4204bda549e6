"""Checks that a step changes the state as the first step does, on a small model.

The optimizer is SGD with momentum: Adam would hide a wrong scale. The new momentum shows the
step's gradient, which is compared with that of `model.loss` in float32 at the highest
precision.

A step with another optimizer, or with moments on the host, then runs once more, with that
optimizer. Its updates must be those that the optimizer computes from the step's own gradient.
"""

import collections
import contextlib
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course_lib import measure
from course_lib.lessons.check.answers import WrongAnswer, call, equations, require, same_shapes
from course_lib.lessons.game import model, small
from course_lib.lessons.game.setups import FIRST, Setup
from course_lib.lessons.game.small import DECAY, RATE, SMALL, difference, gradient, start

PyTree = Any

TOLERANCE = {"float32": 1e-4, "float16": 0.04, "bfloat16": 0.04}
"""The largest accepted difference, by the dtype of the products: see `difference`.

Measured on a CPU. Right: float32 with the loss in parts 3e-7; bfloat16 0.012 to 0.018; float16
0.002. A bfloat16 sum of 16 minibatches, the most there are: 0.005, so a step in bfloat16 may
have one, and a step in float32 may not. Wrong: GELU by the error function 0.0004 (noticed in
float32 only, so `check` looks for that function); logits capped at 30 0.13; one of 16 sequences
left out 0.2; SiLU for GELU 0.24; one of six layers detached 0.39; a sum of four minibatches 3.
"""

LOSS = 0.002
"""The largest accepted difference of the returned loss, as a share. Right steps in 16 bits: up
to 0.0004. The loss of the last half of the batch: 0.02 and more.
"""


def check(make_step: Any, setup: Setup = FIRST) -> str:
    """Returns how close the updates of a learner's step are to the first step's. Raises
    WrongAnswer, saying what differs.
    """
    step, (new, (momentum, _)), loss = one_step(make_step, SMALL, None, setup)
    (old, (old_momentum, _)), _ = start()
    yours = jax.tree.map(lambda m, o: m - DECAY * o, momentum.trace, old_momentum.trace)
    traced = trace(step, copy_of(SMALL, start()[0], setup), start()[1])
    dtype, off = dtype_of_products(traced), difference(yours, gradient())
    if not (off <= TOLERANCE[dtype] and abs(small.scale(yours) - 1) <= small.SCALE):
        raise WrongAnswer(small.explain(yours))
    for name, (along, size) in small.along_the_right(
        yours
    ).items():  # bfloat16: off by up to 0.03
        factor = along / size
        require(
            abs(factor - 1) <= 0.1,
            f"The gradient of {name} is {factor:.2f} times the right one; most are right.",
        )
    moved = jax.tree.map(lambda n, o: n - o, new, old)
    require(
        difference(moved, jax.tree.map(lambda m: -RATE * m, momentum.trace)) < 1e-3,
        "The gradient is right, but the parameters do not follow it: add the updates of"
        " config.optimizer to the parameters, once, in float32.",
    )
    require(
        abs(loss - (right := small.start_loss_and_gradient()[0])) <= LOSS * right,
        f"The update is right, but the step returns the loss {loss:.4g}. The mean over all"
        f" labels is {right:.4g}.",
    )
    require(
        not any(eqn.primitive.name.startswith("erf") for eqn in equations(traced.jaxpr.jaxpr)),
        "The step computes an error function, too near to the game's GELU for 16 bits to tell:"
        " `game.mlp` takes the form with tanh, the default of jax.nn.gelu.",
    )
    if setup != FIRST:
        check_optimizer(make_step, setup, yours)
    return f"differ by {off:.1e}, and {dtype} may differ by {TOLERANCE[dtype]:g}."


def one_step(
    make_step: Any, config: model.Config, state: PyTree, setup: Setup
) -> tuple[Any, PyTree, float]:
    """Makes a learner's step and runs it once: returns the step, the new state as NumPy arrays,
    and the loss.

    `state` None is that of `start`: a stub gets its answer before that is computed.
    """
    hint = "Begin with a copy of `game.first_step`, and change one thing."
    require(
        _takes_config(make_step),
        "Submit `make_step` itself: it takes the configuration alone, and returns the step.",
    )
    step = call(make_step, config, hint=hint)
    require(callable(step), f"make_step should return the function `step`, not {step!r}.")
    state = start()[0] if state is None else state
    copies = copy_of(config, state, setup)
    places = memories(copies)
    with jax.default_matmul_precision("highest"):
        batch = jnp.array(start()[1])
        hint = "A step returns the new state and the loss."
        if setup.moments == "host":
            _same_memories(call(memories_after, step, copies, batch, hint=hint), places)
        result = call(step, copies, batch, hint=hint)
    require(
        isinstance(result, tuple) and len(result) == 2,
        "A step returns two things: the new state and the loss.",
    )
    require(
        str(jax.tree.structure(result[0])) == str(jax.tree.structure(state)),
        "The new state should be built like the old one: the parameters, and the state of"
        " config.optimizer.",
    )
    same_shapes(result[0], state, "The new state")
    if setup.moments == "host":
        _same_memories(memories(result[0]), places)
    loss = np.asarray(result[1])
    require(loss.shape == (), f"The loss is one number, not an array of shape {loss.shape}.")
    return step, jax.tree.map(_numbers, result[0]), float(loss)


def _takes_config(make_step: Any) -> bool:
    with contextlib.suppress(ValueError, TypeError):
        signature = inspect.signature(make_step)
        try:
            signature.bind(SMALL)
        except TypeError:
            return False
    return True


def copy_of(config: model.Config, state: PyTree, setup: Setup) -> PyTree:
    """Copies a state, because the step may donate it, and moves its moments to their memory."""
    params, opt_state = jax.tree.map(jnp.array, state)
    return params, setup.place(config.optimizer, opt_state)


def memories(tree: PyTree) -> dict[str, int]:
    """Returns the number of a tree's arrays in each memory."""
    return dict(collections.Counter(a.sharding.memory_kind for a in jax.tree.leaves(tree)))


def memories_after(step: Any, state: PyTree, batch: Any) -> dict[str, int]:
    """Returns the same of a step's new state, by types alone: JAX ends a process in which a
    donated array on the host becomes a result on the device.
    """
    names = {jax.memory.Space.Host: "pinned_host", jax.memory.Space.Device: "device"}
    results = jax.make_jaxpr(step)(state, batch).out_avals[: len(jax.tree.leaves(state))]
    return dict(collections.Counter(names[result.memory_space] for result in results))


def _same_memories(new: dict[str, int], old: dict[str, int]) -> None:
    require(
        new == old,
        f"The new state is in other memories than the old one: {new} in place of {old}. Moments"
        " go back to the host, everything else stays on the device.",
    )


def _numbers(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def check_optimizer(make_step: Any, setup: Setup, yours: PyTree) -> None:
    """Raises WrongAnswer unless a step's updates are those of its gradient, `yours`."""
    config, update, opt_state = second_step(setup)
    params = jax.tree.map(jnp.array, start()[0][0])
    _, (new, new_state), _ = one_step(make_step, config, (params, opt_state), setup)
    updates, expected = update(yours, opt_state, params)
    moved = jax.tree.map(lambda n, o: n - np.asarray(o), new, params)
    name = setup.optimizer
    require(
        difference(moved, updates) < 0.1,
        f"The gradient is right, but {name} makes other updates of it than your step. Do the"
        " old state and the parameters go into config.optimizer.update, and all updates into"
        " the parameters, once?",
    )
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(new_state),
        jax.tree.leaves(jax.tree.map(_numbers, expected)),
        strict=True,
    )
    wrong = [jax.tree_util.keystr(path) for (path, a), b in pairs if not _close(a, b)]
    require(
        not wrong,
        f"The parameters are right, but the new state of {name} is not: {len(wrong)} of its"
        f" arrays differ, the first is {(wrong or [''])[0]}. Each step changes the state once.",
    )


def second_step(setup: Setup) -> tuple[model.Config, Any, PyTree]:
    """Returns a setup's configuration, its compiled update, and the state after one update."""
    config, update = _update(setup)
    params = start()[0][0]
    return config, update, update(gradient(), config.optimizer.init(params), params)[1]


@functools.cache
def _update(setup: Setup) -> tuple[model.Config, Any]:
    config = setup.config(SMALL)
    return config, jax.jit(config.optimizer.update)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of an optimizer's state are equal to rounding. Counts and keys must be
    equal. Fewer than 5% of 8-bit codes may differ by more than one.
    """
    if a.dtype == np.uint8:
        return bool(np.mean(np.abs(a.astype(int) - b.astype(int)) > 1) < 0.05)
    if a.dtype.kind in "iu":
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    return bool(np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(b))


def trace(step: Any, state: PyTree, batch: Any) -> Any:
    """Returns the program of a step, jitted or not: `jax.stages.Traced`."""
    return (step if hasattr(step, "trace") else jax.jit(step)).trace(state, batch)


def dtype_of_products(traced: Any) -> str:
    """Returns the dtype with the fewest bits that a step multiplies."""
    flops = str(measure.flops(traced).total)
    dtypes = [dtype for dtype in ("bfloat16", "float16", "float32") if dtype in flops]
    require(dtypes, "This step multiplies no matrices. It should train the model: `game.loss`.")
    return dtypes[0]
