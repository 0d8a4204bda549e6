"""Checks of notebook 06's exercises."""

import jax
import jax.numpy as jnp
import numpy as np

from course_lib.lessons import case_study, profiling_study
from course_lib.lessons.check.answers import (
    WrongAnswer,
    call,
    close,
    equations,
    exercise,
    predicted,
    require,
)
from course_lib.measure import hardware
from course_lib.one_device import profiling, rematerialization

N, B, D = 8, 256, 512
UNROLLED = "bfloat16, unrolled"  # a case of the case study
_W, _X = (
    jax.ShapeDtypeStruct((N, D, D), jnp.float32),
    jax.ShapeDtypeStruct((B, D), jnp.float32),
)


@exercise
def busy_and_idle(your_function):
    """Checks `your_function(events) -> (busy, idle)`: from (start, duration) of what one device
    ran, the seconds in which at least one event runs, and the rest of the time from the first
    start to the last end.
    """
    hint = (
        "Draw [(0, 3), (2, 3), (6, 1)] on a line. How many of the 7 seconds are covered, and"
        " how many are not?"
    )

    def compare(events):
        """Returns the learner's busy and idle time, the right ones, and the four in words."""
        yours = _two_numbers(call(your_function, list(events), hint=hint))
        right = _busy_and_idle(events)
        what = f"{events}:" if len(events) < 9 else f"A list of {len(events)} events:"
        words = (
            f"{what} you say {yours[0]:g} s busy and {yours[1]:g} s idle; it is {right[0]:g} s"
            f" busy and {right[1]:g} s idle."
        )
        return *yours, np.allclose(yours, right, atol=1e-4), words

    # Each list adds one difficulty to those before it.
    busy, idle, right, words = compare([(0, 2), (3, 2), (7, 3)])
    require((busy, idle) != (3, 7), f"{words} Return the busy seconds first.")
    require(
        busy != -3 and (busy, idle) != (2, 1),
        f"{words} The second number of an event is its duration, not its end.",
    )
    require(
        busy != 4,
        f"{words} The last event is missing: count what is still open when the list ends.",
    )
    require(busy != 2, f"{words} This is the first event alone: go through all of them.")
    for wrong, reason in (
        (
            (0, 7),
            "Idle is what the busy seconds leave of the time from the first start to the last"
            " end (not to the last start).",
        ),
        ((10,), "This is the whole time, busy and idle."),
        ((2,), "This is the longest gap alone."),
    ):
        require(busy != 7 or idle not in wrong, f"{words} {reason}")
    require(right, words)

    busy, idle, right, words = compare([(0, 3), (2, 3), (6, 1)])
    require(
        busy != 7,
        f"{words} The sum of the durations counts the second from 2 to 3 twice.",
    )
    require(right, f"{words} The first two events overlap.")

    busy, idle, right, words = compare([(0, 6), (1, 1), (3, 1), (8, 4), (9, 1)])
    require(
        (busy, idle) != (10, 0),
        f"{words} The event that starts last is not the one that ends last.",
    )
    require(
        right,
        f"{words} The event (1, 1) lies inside (0, 6) and ends earlier: keep the latest end.",
    )

    busy, idle, right, words = compare([(5, 2), (8, 1)])
    require(
        idle != 6,
        f"{words} The time before the first start does not count: begin there, not at 0.",
    )
    require(right, f"{words} The first event starts at 5.")

    _, _, right, words = compare([(7, 1), (0, 2), (4, 1), (1, 2)])
    require(right, f"{words} The events come in any order: sort them by their start first.")

    rng = np.random.default_rng(0)  # in tenths of a second: some events touch, or start as one
    times = np.stack([rng.integers(0, 500, 60), rng.integers(1, 16, 60)], axis=1) / 10
    many = [(start, duration) for start, duration in times.tolist()]
    _, _, right, words = compare(many)
    require(right, f"{words} Try events that touch, and events that start together.")
    busy, idle = _busy_and_idle(many)
    return (
        f"{len(many)} events, {times[:, 1].sum():.0f} s in all, keep a device busy for"
        f" {busy:.0f} s and leave it idle for {idle:.0f} s."
    )


def _two_numbers(yours):
    """Returns a pair of floats, or raises `WrongAnswer`."""
    try:
        busy, idle = yours
        return float(busy), float(idle)
    except (TypeError, ValueError):
        raise WrongAnswer(
            f"Return two numbers, the busy and the idle seconds, not {yours!r}."
        ) from None


def _busy_and_idle(events):
    """Returns what the library says about the time from the first start to the last end."""
    first = min(start for start, _ in events)
    last = max(start + duration for start, duration in events)
    listed = [
        profiling.Event("op", float(start - first), float(time), float(time), "line")
        for start, time in events
    ]
    busy = profiling.busy_time(listed, float(last - first))
    return busy.busy, busy.idle


def _loss(w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)


def _stacked_mib(loss):
    """Returns the MiB of the arrays that a loss saves for each layer and of w's gradients."""
    saved = profiling_study.of_each_layer(rematerialization.residuals(loss, _W, _X), N)
    return (sum(array.bytes for array in saved) + 4 * N * D * D) / 2**20


@exercise
def stacked(mib):
    """Checks how many MiB the differentiated scan stacks: saved arrays and gradients."""
    predicted(
        mib,
        hint="Differentiate one layer on paper: which arrays of the forward pass are in its"
        " derivatives?",
    )
    right = _stacked_mib(_loss)
    gradients, one = 4 * N * D * D / 2**20, 4 * N * B * D / 2**20
    require(
        mib not in (right - gradients, gradients),
        f"{mib}: count both, the arrays that the forward pass saves for each layer and the"
        " gradients of w.",
    )
    require(
        mib != right - one,
        f"{mib}: one array of {one:.0f} MiB is missing. The backward pass of a layer needs"
        " its input and the derivative of its tanh.",
    )
    require(
        mib != right + one,
        f"{mib}: one array of {one:.0f} MiB too many. The result of a tanh is the next layer's"
        " input: it is saved once.",
    )
    require(mib != right / N, f"{mib}: this is one layer; the scan stacks {N} of them.")
    require(mib != right * 2**20, f"{mib}: these are bytes. Divide by 2^20.")
    require(
        abs(mib - right) < 0.5,
        f"{mib} MiB; counted, it is {'less' if mib > right else 'more'}.",
    )
    return f"{right:.0f} MiB, {gradients:.0f} of them gradients."


@exercise
def stack_less(your_loss):
    """Checks `your_loss(w, x)`: the same loss and gradient as the scan's, with one stacked
    array of activations.
    """
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (3, 16, 16)) / 4, jax.random.normal(keys[1], (8, 16))
    yours = call(your_loss, w, x, hint="Begin with the loss as it is in the stub.")
    require(
        jnp.shape(yours) == (), f"A loss is one number; yours has shape {jnp.shape(yours)}."
    )
    require(close(yours, _loss(w, x)), f"The loss is {yours}; the scan's is {_loss(w, x)}.")
    require(
        close(jax.grad(your_loss)(w, x), jax.grad(_loss)(w, x)),
        "The gradient is not that of the scan. Is something stopped on its way back?",
    )
    before, after = _stacked_mib(_loss), _stacked_mib(your_loss)
    program = jax.make_jaxpr(your_loss)(w, x).jaxpr
    names = {eqn.primitive.name for eqn in equations(program)}
    require(
        after < before or not any("checkpoint" in name or "remat" in name for name in names),
        "It still stacks as much as the loss in the stub. `jax.checkpoint` saves the inputs of"
        " its function, and what a policy keeps. What stands outside saves its own. How many"
        " arrays of the size of x does that make for one layer?",
    )
    require(
        after < before,
        "It still stacks as much as the loss in the stub (counted in JAX, before the compiler"
        " unrolls or fuses anything).",
    )
    least = (4 * N * B * D + 4 * N * D * D) / 2**20
    require(
        after >= least,
        "No activations are stacked for the layers: the whole scan is recomputed as one piece,"
        " and stacks as much as before then, or it is no scan any more. How much would be"
        " stacked if one layer at a time were recomputed?",
    )
    require(
        after == least,
        f"{after:.0f} MiB are stacked; {least:.0f} are possible. `jax.checkpoint` saves the"
        " inputs of its function, and what a policy keeps.",
    )
    return f"{after:.0f} MiB are stacked instead of {before:.0f}."


@exercise
def named_part(your_step):
    """Checks `your_step(w, x)`: an SGD step whose penalty carries the scope "penalty", forward
    and backward.
    """
    w, x = jnp.full((32, 32), 0.01), jnp.ones((32, 32))
    hint = "Write the step without the scope first. `mean_loss` above names its own parts."
    yours = call(your_step, w, x, hint=hint)
    scopes = set(profiling.op_scopes(jax.jit(your_step).lower(w, x).compile()).values())
    named = [scope for scope in scopes if "penalty" in scope]
    require(
        named,
        f'No operation carries the name "penalty"; there are {len(scopes)} scopes.'
        " `jax.named_scope` names operations; `TraceAnnotation` would name Python's time, and"
        " what does not change the result is not compiled.",
    )
    require(
        len(named) < len(scopes),
        "Every operation carries the name. Name the penalty alone.",
    )
    require(
        any("jvp(penalty)" in scope for scope in named),
        "The name stands outside of the function that is differentiated, so it says nothing"
        " about forward and backward. Put it inside of the loss.",
    )
    require(
        any("transpose(jvp(penalty))" in scope for scope in named),
        "No operation of the backward pass carries the name. Does the gradient flow through"
        " the penalty?",
    )
    require(
        not any(scope.endswith("/tanh") for scope in named),
        "The whole loss carries the name, its tanh too. Name the penalty alone.",
    )
    operations = {scope.rsplit("/", 1)[-1] for scope in named}
    missing = [name for name in ("dot_general", "sin", "exp") if name not in operations]
    require(
        not missing,
        f"Only a part of the penalty carries the name: none of its operations {missing} does.",
    )

    def loss(w):
        return jnp.mean(jnp.tanh(x @ w)) + jnp.mean(jnp.exp(jnp.sin(w @ w)))

    new = yours[0] if isinstance(yours, tuple) else yours
    require(
        jnp.shape(new) == w.shape,
        f"The name is right. Return the new w, of shape {w.shape}, or a pair that begins with"
        f" it; yours has shape {jnp.shape(new)}.",
    )
    require(
        close(new, w - 0.1 * jax.grad(loss)(w)),
        "The name is right, the numbers are not: return `w - 0.1 * gradient` of the loss in"
        " the task.",
    )
    return f"{len(named)} of {len(scopes)} scopes carry the name, forward and backward."


@exercise
def mfu(your_mfu):
    """Checks `your_mfu(forward_flops, seconds, peak)`: the share of the peak rate that went
    into the model.
    """
    hint = "The formula stands above. How many FLOPs does the whole step have?"
    yours = call(your_mfu, 3e12, 0.7, 27.8e12, hint=hint)
    right = 3 * 3e12 / (0.7 * 27.8e12)
    for factor, reason in (
        (1 / 3, "only the forward pass is counted; the backward pass has twice as many FLOPs"),
        (2 / 3, "the backward pass has twice the FLOPs of the forward pass, not as many"),
        (
            4 / 3,
            "recomputation is counted: MFU counts the model's FLOPs once, HFU what the chip"
            " did",
        ),
        (100, "a share lies between 0 and 1; this is a percentage"),
        (0.7, "the seconds are missing: divide by them, too"),
        (0.7**2, "this multiplies by the seconds; divide by them"),
        (27.8e12, "these are FLOPs per second; divide them by the peak rate"),
        (1 / right**2, "this is the inverse of the share"),
    ):
        require(abs(yours / right / factor - 1) > 1e-3, f"{yours:.3g}: {reason}.")
    require(
        abs(yours / right - 1) < 1e-3,
        f"3e12 FLOPs forward in 0.7 s at a peak of 27.8e12 FLOP/s: {yours:.3g} is too"
        f" {'much' if yours > right else 'little'}.",
    )
    other = call(your_mfu, 1e12, 2.0, 10e12, hint="")
    require(
        abs(other / 0.15 - 1) < 1e-3,
        f"1e12 FLOPs forward in 2 s at a peak of 10e12 FLOP/s: you say {other:.3f}, it"
        " is 0.150.",
    )
    return f"{right:.1%}."


@exercise
def on_h100(seconds, floor):
    """Checks predictions about the published unrolled step, 0.73 s on an A5000, on an H100: its
    seconds at the same MFU, and which of its floors is the longer one there, "products" or
    "memory".
    """
    predicted(seconds, hint="`hardware.get` knows both GPUs. Print them.")
    published = 0.73
    a5000, h100 = hardware.get("a5000"), hardware.get("h100")
    faster = h100.peak("bfloat16") / a5000.peak("bfloat16")
    for factor, reason in (
        (faster / 1e3, "these are milliseconds"),
        (1 / faster, "an H100 has the higher peak rate, so the step becomes shorter"),
        (
            h100.memory_bandwidth / a5000.memory_bandwidth,
            "this divides by the ratio of the bandwidths. MFU is a share of the peak rate",
        ),
        (
            h100.peak("float32") / a5000.peak("float32"),
            "these are the peak rates of float32. The step computes in bfloat16",
        ),
    ):
        require(abs(seconds * factor / published - 1) > 0.02, f"{seconds:.3f} s: {reason}.")
    right = published / faster
    require(
        abs(seconds / right - 1) < 0.05,
        f"{seconds:.3f} s is too {'long' if seconds > right else 'short'}. At the same MFU,"
        " seconds times peak rate are the same on both GPUs.",
    )
    require(
        floor in ("products", "memory"),
        f"The longer floor is 'products' or 'memory', not {floor!r}.",
    )
    [row] = [row for row in case_study.recorded_rows("h100") if row["case"] == UNROLLED]
    floors = {"products": row["compute_seconds"], "memory": row["memory_seconds"]}
    require(
        floors[floor] == max(floors.values()),
        "The seconds are right, the floor is not. By which factor does each floor of the A5000"
        " become shorter?",
    )
    return f"{right:.3f} s; on an H100 the floor of {floor} is {floors[floor]:.3f} s."
