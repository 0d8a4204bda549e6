"""Gradient accumulation: computes the gradient of a large batch one minibatch at a time.

The loss of a batch is a weighted mean over its labels. With C_m the summed weights of minibatch
m and g_m the gradient of that minibatch's own mean, the gradient of the batch is

    g = (C_1 g_1 + ... + C_M g_M) / (C_1 + ... + C_M)

which is the plain mean of the g_m only where all C_m are equal: not with padding, nor with
labels of unequal weight.

Conventions: `loss_fn(params, batch, rng) -> (loss, metrics)` with `metrics` a dict of `(sum,
count)` in float32, and `metrics["loss"][1]` the summed weights; `grad_fn(params, batch, rng) ->
(grads, metrics)`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from course_lib import arguments

PyTree = Any
Metrics = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]
LossFn = Callable[..., tuple[Float[Array, ""], Metrics]]
GradFn = Callable[..., tuple[PyTree, Metrics]]

METHODS = ("scan", "loop")  # one compiled body that runs M times, or M copies of it
# Weighted gradients soon exceed float16's largest number, 65504.
ACCUMULATOR_DTYPES = ("float32", "bfloat16")


def gradient(loss_fn: LossFn) -> GradFn:
    """Returns a loss's gradient function, `grad_fn(params, batch, rng) -> (grads, metrics)`."""
    value_and_grad = jax.value_and_grad(
        lambda *args: check_result(loss_fn(*args)), has_aux=True
    )

    def grad_fn(params, batch, rng):
        (_, metrics), grads = value_and_grad(params, batch, rng)
        return grads, metrics

    return grad_fn


def check_result(result: Any) -> Any:
    """Passes on what a loss function returned; refuses what is no loss with its metrics."""
    match result:
        case (loss, metrics) if jnp.shape(loss) == () and _are_sums(metrics):
            return result
    raise ValueError(
        "loss_fn must return (loss, metrics): a scalar, and a dict with 'loss' of (sum, count),"
        f" also scalars, not {jax.tree.map(jnp.shape, result)}"
    )


def _are_sums(metrics: Any) -> bool:
    pairs = metrics.values() if isinstance(metrics, Mapping) and "loss" in metrics else [None]
    return all(jax.tree.map(jnp.shape, pair) in ([(), ()], ((), ())) for pair in pairs)


def check_loss(loss_fn: LossFn, params: PyTree, batch: Any) -> None:
    """Refuses a loss that is no weighted mean over labels: its gradient would depend on how the
    batch is cut into minibatches.

    Computes it without dropout: of the batch, of each half, and, if the batch has `weights`,
    with weights of 0 in the first half. Each half must have a label with weight.
    """
    check_divides(batch, 2)
    half = len(jax.tree.leaves(batch)[0]) // 2
    run = jax.jit(lambda each: check_result(loss_fn(params, each, None)))

    def numbers(each: Any) -> np.ndarray:
        loss, metrics = run(each)
        return np.array([*metrics["loss"], loss], np.float64)

    second = numbers(jax.tree.map(lambda x: x[half:], batch))
    first = numbers(jax.tree.map(lambda x: x[:half], batch))
    if not (first[1] and second[1]):
        empty = "second" if first[1] else "first"
        raise ValueError(
            f"batch must have a label with weight in each half: metrics['loss'] of its {empty}"
            " half counts a weight of 0"
        )
    total, count, _ = first + second
    cases = [("", batch, np.array([total, count, total / count]))]
    part, has_weights = change_entry(
        batch, "weights", lambda leaf: jnp.asarray(leaf).at[:half].set(0)
    )
    if has_weights:
        cases.append((" with weights of 0 in the first half", part, second))
    for which, each, expected in cases:
        if not np.allclose(found := numbers(each), expected, rtol=1e-3, atol=0):
            raise ValueError(
                "loss_fn must return the mean over labels, each times its weight, and as"
                " metrics['loss'] the sum and the summed weights: by the halves of the batch"
                f"{which}, sum, weights and mean are {expected.tolist()}, not {found.tolist()}"
            )


def change_entry(batch: Any, name: str, change: Callable[[Any], Any]) -> tuple[Any, bool]:
    """Returns a batch with the arrays of its entry `name` changed, and whether it has one."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    its = [arguments.name_in_tree(path).split("/")[0] == name for path, _ in leaves]
    changed = [change(x) if it else x for it, (_, x) in zip(its, leaves, strict=True)]
    return jax.tree.unflatten(tree, changed), any(its)


def nonzero(count: Float[Array, ""]) -> Float[Array, ""]:
    """Replaces a count of 0 by 1, so that a mean over nothing is 0, with gradient 0."""
    return jnp.where(count != 0, count, 1)


def accumulate(
    grad_fn: GradFn,
    params: PyTree,
    batch: PyTree,
    rng: Key[Array, ""],
    *,
    num_minibatches: int,
    method: str = "scan",
    accumulator_dtype: Any = jnp.float32,
) -> tuple[PyTree, Metrics]:
    """Computes the gradient of a batch, one minibatch after the other.

    Minibatch m is the m-th of M equal slices of the batch, with the key
    `jax.random.split(rng, M)[m]`, also where M = 1. One minibatch costs no more than `grad_fn`.
    More add one tree of gradients in `accumulator_dtype` to the memory of one minibatch. A
    minibatch whose weights are all 0 adds nothing, whatever its loss and gradient; if all are,
    the gradient is 0. With M = 1 that depends on the loss: dividing by weights of 0 gives NaN;
    the losses of `models.losses` are 0, with gradient 0.

    Args:
      grad_fn: gradient of a weighted mean, with `metrics["loss"] == (sum, count)`.
      params: pytree of parameters.
      batch: pytree of arrays that share their first axis, of size B.
      rng: typed random key.
      num_minibatches: M, a divisor of B.
      method: one of `METHODS`.
      accumulator_dtype: one of `ACCUMULATOR_DTYPES`, in which the gradients are summed.

    Returns:
      The gradient of the weighted mean over the batch, in the dtypes that `grad_fn` returns,
        and the summed metrics.
    """
    dtype = check_options(num_minibatches, method, accumulator_dtype)
    check_divides(batch, num_minibatches)
    if num_minibatches == 1:
        return _checked(grad_fn(params, batch, jax.random.split(rng, 1)[0]), params)

    def add(total, params, minibatch, rng):
        grads, metrics = grad_fn(params, minibatch, rng)
        count = metrics["loss"][1]

        def add_leaf(total, grad):
            weighted = (grad.astype(jnp.float32) * count).astype(dtype)
            # A gradient without weight may be 0 / 0.
            return jnp.where(count != 0, total + weighted, total)

        return jax.tree.map(add_leaf, total, grads), metrics

    def first(minibatch, rng):
        return _checked(grad_fn(params, minibatch, rng), params)

    return add_up(add, first, params, batch, rng, num_minibatches, method, dtype)


def accumulate_in_place(
    add: Callable[[PyTree, PyTree, PyTree, Key[Array, ""]], tuple[PyTree, Metrics]],
    params: PyTree,
    batch: PyTree,
    rng: Key[Array, ""],
    *,
    num_minibatches: int,
    method: str = "scan",
    accumulator_dtype: Any = jnp.float32,
) -> tuple[PyTree, Metrics]:
    """Computes the gradient of a batch with a function that adds to the sum of the gradients.

    `add(total, params, minibatch, rng) -> (total, metrics)` adds the gradient of the weighted
    sum over labels (`smallest_step.gradient_in_place`). The result, the other arguments and the
    keys are those of `accumulate`, but only one tree of gradients exists. A minibatch whose
    weights are all 0 must have a finite gradient, as with the losses of `models.losses`.
    """
    dtype = check_options(num_minibatches, method, accumulator_dtype)
    check_divides(batch, num_minibatches)

    def first(minibatch, rng):
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), params)
        return params, add(zeros, params, minibatch, rng)[1]

    return add_up(add, first, params, batch, rng, num_minibatches, method, dtype)


def add_up(add, first, params, batch, rng, num_minibatches, method, dtype):
    """Adds up gradients and metrics, with the shapes of `first`, which never runs."""
    rngs = jax.random.split(rng, num_minibatches)
    minibatches = jax.tree.map(lambda x: x.reshape(num_minibatches, -1, *x.shape[1:]), batch)
    like, metrics = jax.eval_shape(
        lambda batches, rngs: first(_take(batches, 0), rngs[0]), minibatches, rngs
    )
    zeros = (
        jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype), like),
        jax.tree.map(jnp.zeros_like, metrics),
    )

    def add_minibatch(total, params, minibatch, rng):
        sums, metrics = add(total[0], params, minibatch, rng)
        # The sum of a minibatch without weight may be NaN.
        metrics = {name: (jnp.where(n != 0, sum, 0), n) for name, (sum, n) in metrics.items()}
        return sums, jax.tree.map(jnp.add, total[1], metrics)

    run = scan_minibatches if method == "scan" else loop_minibatches
    total, metrics = run(add_minibatch, zeros, params, minibatches, rngs)
    count = nonzero(metrics["loss"][1])
    grads = jax.tree.map(
        lambda sum, leaf: (sum.astype(jnp.float32) / count).astype(leaf.dtype), total, like
    )
    return grads, metrics


def in_minibatches(grad_fn: GradFn, **options: Any) -> GradFn:
    """Returns a gradient function that cuts its batch into minibatches, with the options of
    `accumulate`; without any, into one.
    """
    return functools.partial(accumulate, grad_fn, **dict(num_minibatches=1) | options)


def of_loss(loss_fn: LossFn, **options: Any) -> GradFn:
    """Returns the gradient function of a loss, with the options of `in_minibatches`."""
    return in_minibatches(gradient(loss_fn), **options)


def _checked(result, params):
    """Passes on the result of a gradient function; refuses a loss in place of gradients."""
    # Names and ranks are compared, not shapes: a device may return a part of each gradient.
    match result:
        case (grads, metrics) if _are_sums(metrics) and _ranks(grads) == _ranks(params):
            return result
    raise ValueError(
        "grad_fn must return (gradients like params, metrics with 'loss', all (sum, count)),"
        f" not {jax.tree.map(jnp.shape, result)}: gradient_accumulation.gradient(loss_fn) makes"
        " one of a loss function"
    )


def _ranks(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.ndim(leaf) for path, leaf in leaves}


def scan_minibatches(add, total, params, minibatches, rngs):
    """Adds up the minibatches in a `jax.lax.scan`: one compiled body that runs M times."""

    def body(total, xs):
        return add(total, params, *xs), None

    return jax.lax.scan(body, total, (minibatches, rngs))[0]


def loop_minibatches(add, total, params, minibatches, rngs):
    """Adds up the minibatches in a Python loop: M copies of the body in the program."""
    for index in range(len(rngs)):
        # No minibatch depends on the one before: a compiler may compute all of them first and
        # add later, with the activations and gradients of all M alive (notebook 3 measures it).
        # A branch has to wait for its inputs. This one reads the total so far and is always
        # taken, which the compiler cannot know. XLA:GPU copies the outputs of a branch, which
        # costs up to half a tree of gradients beyond "scan". jax.lax.optimization_barrier would
        # cost nothing, but XLA removes it before it orders the program.
        def minibatch(total, index=index):
            return add(total, params, _take(minibatches, index), rngs[index])

        with jax.named_scope(f"minibatch_{index}"):
            count = total[1]["loss"][1]
            total = jax.lax.cond(count != jnp.inf, minibatch, lambda total: total, total)
    return total


def _take(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def check_divides(batch: PyTree, num_minibatches: int) -> None:
    """Refuses a batch (arrays or their shapes) that cannot be cut into equal minibatches."""
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    sizes = {
        jax.tree_util.keystr(path): tuple(getattr(leaf, "shape", ()))[:1]
        for path, leaf in leaves
    }
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise ValueError(
            "batch must hold arrays with one first axis, the examples, but their sizes there"
            f" are {sizes}"
        )
    size = leaves[0][1].shape[0]
    if size % num_minibatches:
        divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
        divisors.sort(key=lambda divisor: abs(divisor - num_minibatches))
        raise ValueError(
            f"num_minibatches={num_minibatches} must divide the batch of {size} examples:"
            f" {size % num_minibatches} would be left over; nearest are"
            f" {' and '.join(map(str, divisors[:2]))}"
        )


def check_options(num_minibatches: int, method: str, accumulator_dtype: Any) -> jnp.dtype:
    """Refuses options that do not exist, and returns the accumulator's dtype."""
    if num_minibatches < 1:
        raise ValueError(f"num_minibatches={num_minibatches} must be at least 1")
    arguments.one_of("method", method, METHODS)
    for dtype in map(jnp.dtype, ACCUMULATOR_DTYPES):
        if dtype == accumulator_dtype:
            return dtype
    raise ValueError(
        f"accumulator_dtype={accumulator_dtype!r} must be one of {list(ACCUMULATOR_DTYPES)}: a"
        " narrower one would overflow or lose the later minibatches"
    )
