"""Checks of notebook 04's exercises."""

import warnings

import jax
import jax.numpy as jnp
import optax

from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    same_shapes,
)
from course_lib.one_device import buffer_donation


@exercise
def aliased_bytes(momentum, plain):
    """Checks how many bytes per parameter a step aliases if its state is donated, with
    `optax.sgd` with and without momentum.
    """
    predicted(
        momentum,
        plain,
        hint="Which arrays are part of the state, and how long do gradients live?",
    )

    def measured(optimizer, P=1000):
        def step(state, x):
            params, opt_state = state
            grads = jax.grad(lambda params: jnp.sum((params * x) ** 2))(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = jnp.ones(P)
        state = params, optimizer.init(params)
        compiled = jax.jit(step, donate_argnums=0).lower(state, jnp.ones(P)).compile()
        return buffer_donation.report(compiled).aliased_bytes / P

    for name, guess, optimizer in (
        ("With momentum", momentum, optax.sgd(0.1, momentum=0.9)),
        ("Without momentum", plain, optax.sgd(0.1)),
    ):
        right = measured(optimizer)
        require(
            guess != right + 4,
            f"{name}: {guess} counts one float32 too many. Which arrays are in the state?"
            " Gradients are not: they live within the step.",
        )
        require(
            guess == right,
            f"{name}: {guess} is too {'many' if guess > right else 'few'}. Count the bytes: 4"
            " for each float32 number per parameter in `(params, opt_state)`.",
        )
    return "the state is aliased, and nothing else."


@exercise
def best_state(your_loop):
    """Checks `your_loop(step, w, num_steps) -> (best loss, its parameters)`, where `step(w) ->
    (w, loss)` donates w.

    The loss that a step returns is that of the parameters before it.
    """
    # Steps too far, so that the lowest loss is not the last one.
    step = jax.jit(
        lambda w: (w - 1.6 * (w - 1.0) - 0.3, jnp.sum((w - 1.0) ** 2)), donate_argnums=0
    )
    start = 3.0
    path, losses = [start], []
    for _ in range(9):
        w, loss = step(jnp.array([path[-1]]))
        path.append(float(w[0]))
        losses.append(float(loss))
    best = min(range(9), key=losses.__getitem__)

    hint = "Which arrays still exist after `step(w)`?"
    result = call(your_loop, step, jnp.array([start]), 9, hint=hint)
    require(
        isinstance(result, tuple) and len(result) == 2 and jnp.shape(result[0]) == (),
        "Return two things: the lowest loss, a single number, and then its parameters.",
    )
    loss, w = result
    require(
        not (isinstance(w, jax.Array) and w.is_deleted()),
        "The parameters that you return are deleted: a second name is no copy.",
    )
    require(
        abs(float(loss) / losses[-1] - 1) > 1e-4,
        "This is the last loss. It is lower than the one before it, but not the lowest so far:"
        " compare each loss with the best one.",
    )
    require(
        abs(float(loss) / losses[best] - 1) < 1e-4,
        f"The lowest of the nine losses is {losses[best]:.4f}; you returned {float(loss):.4f}.",
    )
    value = float(jnp.ravel(jnp.asarray(w))[0])
    require(
        abs(value - path[best + 1]) > 1e-5,
        "These are the parameters after the best step. The loss is that of the parameters"
        " before it.",
    )
    require(
        abs(value - path[best]) < 1e-5,
        f"The parameters with the lowest loss are {path[best]:.4f}; you returned {value:.4f}.",
    )
    for num_steps in (best + 1, best):  # each has another lowest loss
        again = call(your_loop, step, jnp.array([start]), num_steps, hint=hint)
        lowest = min(losses[:num_steps])
        require(
            abs(float(again[0]) / lowest - 1) < 1e-4,
            f"With num_steps = {num_steps} the lowest loss is {lowest:.4f}; you returned"
            f" {float(again[0]):.4f}. Does the loop make num_steps steps?",
        )
    return "copied before the step, and still there."


@exercise
def all_of_the_state(your_step):
    """Checks `your_step(state, history) -> (state, history)`: the same numbers, and all of the
    state aliased.

    `state` is `{"mean": bfloat16 [8], "weight": float32 [4]}`, `history` float32 [16].
    """
    state = {"mean": jnp.linspace(0.1, 1, 8).astype(jnp.bfloat16), "weight": jnp.ones(4)}
    old = state["mean"].astype(jnp.float32)
    history = jnp.zeros(16)
    hint = "Compare the dtypes of the state that comes in and of the one that leaves."
    result = call(your_step, state, history, hint=hint)
    require(
        isinstance(result, tuple) and len(result) == 2,
        "Return two things: the new state and the new history.",
    )
    new, grown = result
    require(
        isinstance(new, dict) and set(new) == set(state),
        "Return the new state with the keys of the old one.",
    )
    require(
        new["mean"].dtype == jnp.bfloat16,
        f"`mean` came as bfloat16 and leaves as {new['mean'].dtype}: no output fits its"
        " buffer.",
    )
    same_shapes(new, state, "the state")
    right = {"mean": 0.9 * old + 0.1, "weight": 1 - jnp.full(4, old.sum())}
    require(
        close(jax.tree.map(lambda a: a.astype(jnp.float32), new), right, 1e-2),
        "The numbers changed: the new mean is 0.9 mean + 0.1, the new weight is the old one"
        " minus the sum of the old mean.",
    )
    require(
        close(new["weight"], right["weight"], 1e-5),
        "The weight lost bits: add up the mean in float32.",
    )
    same_shapes(grown, jax.ShapeDtypeStruct((24,), jnp.float32), "the history")
    require(
        close(grown, jnp.concatenate([jnp.zeros(16), old])),
        "The history should end in the old mean.",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = jax.jit(your_step, donate_argnums=0).lower(state, history).compile()
    report = buffer_donation.report(compiled)
    lost = [row.path for row in report.arguments if row.donated and row.aliased_to is None]
    require(
        not lost, f"No output reuses {', '.join(lost)}: return it with its old shape and dtype."
    )
    return f"{report.aliased_bytes} of {report.donated_bytes} bytes are aliased."
