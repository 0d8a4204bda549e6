"""Answers that learners gave, right and wrong, not taken from the tables."""

import fractions
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from course_lib.lessons import check
from course_lib.lessons.check import answers
from course_lib.many_devices import collectives


def norm_with_mean(x):
    """The mean of the devices' means."""
    return x / jnp.sqrt(jax.lax.pmean((x**2).mean(1, keepdims=True), "tensor"))


def in_four_collectives(x):
    part = jax.lax.psum_scatter(x, "tensor", tiled=True)
    own = jax.lax.psum_scatter(part, "data", tiled=True)
    part = jax.lax.all_gather(own, "data", tiled=True)
    return jax.lax.all_gather(part, "tensor", tiled=True)


def while_reading(grads, capacity):
    """Closes a bucket while it goes through the gradients; a dict says where each one is."""
    sums, bucket = {}, {}
    for i, grad in enumerate(grads):
        bucket[i] = grad
        last = i + 1 == len(grads) or grads[i + 1].dtype != grad.dtype
        if last or sum(one.nbytes for one in bucket.values()) >= capacity:
            flat = jnp.concatenate([one.reshape(-1) for one in bucket.values()])
            ends = np.cumsum([one.size for one in bucket.values()])[:-1].tolist()
            parts = jnp.split(jax.lax.psum(flat, "data"), ends)
            sums |= dict(zip(bucket, parts, strict=True))
            bucket = {}
    return tuple(sums[i].reshape(grad.shape) for i, grad in enumerate(grads))


def last_unsummed(grads, capacity):
    return [*while_reading(grads, capacity)[:-1], grads[-1]]


def fsdp_loop(shards, x, y, around=jax.checkpoint):
    """FSDP as a Python loop."""

    @around
    def layer(x, shard):
        return x + jnp.tanh(x @ jax.lax.all_gather(shard, "data", tiled=True))

    for shard in shards:
        x = layer(x, shard)
    return jax.lax.psum(jnp.sum((x - y) ** 2), "data")


@jax.checkpoint
def all_layers_again(shards, x, y):
    return fsdp_loop(shards, x, y, around=lambda layer: layer)


def pipeline(slots=3, masked=True, late=0, to_next=((0, 1), (1, 2), (2, 3)), zero=0.0):
    """GPipe with a carry that begins as a copy of x, and masks of numbers."""

    def loss(kernel, x, y):
        stage = jax.lax.axis_index("pipe")

        def slot(carry, time):
            arrived, error = carry
            h = jnp.where(stage == 0, x[jnp.clip(time, 0, 5)], arrived)
            h = h + jnp.tanh(h @ kernel[0])
            adds = jnp.float32((stage == 3) & (time >= 3)) if masked else 1.0
            error += adds * ((h - y[(time - 3 - late) % 6]) ** 2).sum()
            return (jax.lax.ppermute(h, "pipe", to_next), error), None

        start = 0 * x[0] + zero * stage, zero * stage
        (_, error), _ = jax.lax.scan(slot, start, jnp.arange(6 + slots))
        return jax.lax.psum(error, "pipe")

    return loss


def alike_everywhere(kernel, x, y):
    """A carry that starts equal on all devices."""
    step = lambda h, k: (h + jnp.tanh(h @ kernel[0]), None)  # noqa: E731
    h, _ = jax.lax.scan(step, x, jnp.arange(4))
    return jax.lax.psum(jnp.sum((h - y) ** 2), "pipe")


def one_ring(in_order):
    def product(x, kernel):
        n, products = jax.lax.axis_size("tensor"), []
        for _ in range(n):
            products.append(x @ kernel)
            x = jax.lax.ppermute(x, "tensor", [(d, (d + 1) % n) for d in range(n)])
        if in_order:
            return collectives.join(products[::-1], 1 - n, "tensor", 0)
        return jnp.concatenate(products[::-1])

    return product


def share(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def scattered_then_gathered(*args):
    """An all-reduce in two halves, whose result JAX cannot prove equal on all devices."""
    part = jax.lax.psum_scatter(share(*args), "tensor", scatter_dimension=1, tiled=True)
    return jax.lax.all_gather(part, "tensor", axis=1, tiled=True)


def gathered_then_summed(*args):
    return jax.lax.all_gather(share(*args), "tensor").sum(0)


def of_whole_table(table, tokens):
    return jax.lax.all_gather(table, "tensor", tiled=True)[tokens]


def merged_with_log_sum_exp(a, b):
    """Scales with the log-sum-exp of the two tops' largest."""
    top = jnp.maximum(a[0], b[0])
    scale = [jnp.exp(jnp.where(top == -jnp.inf, 0, block[0] - top)) for block in (a, b)]
    total = scale[0] * a[1] + scale[1] * b[1]
    return [top, total, scale[0][:, None] * a[2] + scale[1][:, None] * b[2]]


def by_sorting(experts, E, C):
    order = np.argsort(np.asarray(experts), kind="stable")
    begins = np.searchsorted(np.asarray(experts)[order], np.asarray(experts)[order])
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order)) - begins
    return np.where(places < C, places, -1)


def doubled_gradient(mesh, M):
    from course_lib.lessons import three_axes

    specs, gradient = three_axes.make_gradient(mesh, M)
    return specs, lambda *args: (gradient(*args)[0], gradient(*args)[0])


def goodput_of_random_failures(interval, copy, write, restart, between):
    """Exact, where the table's answer is of first order."""
    loses = math.exp(-write / between) / math.expm1(interval / between)
    return (interval - copy) * loses / (between + restart)


def goodput_as_product(interval, copy, write, restart, between):
    again = (interval / 2 + write) / between
    return (1 - copy / interval) * (1 - again) * between / (between + restart)


def goodput_with_a_longer_loss(interval, copy, write, restart, between):
    lost = copy / interval + (interval / 2 + write + copy) / between
    return (1 - lost) * between / (between + restart)


RIGHT = [
    (check.goodput, goodput_of_random_failures),
    (check.goodput, goodput_as_product),
    (check.cut_norm, norm_with_mean, 96),
    (check.two_levels, in_four_collectives),
    (check.sum_in_buckets, while_reading),
    (check.fsdp, fsdp_loop),
    (check.gpipe, pipeline()),
    (check.gated_mlp, scattered_then_gathered),
    (check.merge, merged_with_log_sum_exp),
    (check.places, by_sorting),
    (check.order_of_arrival, lambda device, n: (device - np.arange(n)) % n),
    (check.padded_vocabulary, lambda V, n, m: np.float64(n * m * np.ceil(V / (n * m)))),
    (check.bubble_share, fractions.Fraction(7, 31), 134, 45),
    (check.dropped, 4.7, 0),  # of a normal distribution
    (check.dropped, 5, 0),
    (check.stash, jnp.int32(3200), np.float64(800)),
]
WRONG = [
    (check.goodput, (goodput_with_a_longer_loss,), "the goodput is 60.73%"),
    (check.may_change, ({"training.steps": True}.get,), "mesh.tensor you return nothing"),
    (check.cut_norm, (norm_with_mean, ...), "No prediction yet. Which array"),
    (check.sum_in_buckets, (last_unsummed,), "for grads[7]"),
    (check.fsdp, (all_layers_again,), "spans 6 layers"),
    slow(check.gpipe, (pipeline(slots=0),), "Only 3 of the 6"),
    slow(check.gpipe, (pipeline(masked=False),), "Is too much added?"),
    slow(check.gpipe, (pipeline(late=1),), "the y of another one"),
    (check.gpipe, (pipeline(to_next=((3, 2), (2, 1), (1, 0))),), "computes with zeros"),
    (check.gpipe, (alike_everywhere,), "starts with a value that is equal"),
    (check.gated_mlp, (share,), "different arrays"),
    (check.gated_mlp, (gathered_then_summed,), "you gather an array"),
    (check.divided_embedding, (of_whole_table,), "the table is gathered"),
    (check.two_way_product, (one_ring(True),), "one way around"),
    (check.two_way_product, (one_ring(False),), "wrong order"),
    (
        check.ring_bytes,
        (lambda n, numbers, width: n * (n - 1) * numbers * width,),
        "Compiled for 2",
    ),
    (check.three_axes, (doubled_gradient,), "the gradient should have the structure"),
    (check.dropped, (float("nan"), 0.0), "A prediction is a number, not nan"),
    (check.dropped, (4.3,), "missing a required argument: 'percent_at_2'"),
]


def name(the_check):
    return getattr(the_check, "id", None) or the_check.__name__


def answer(capsys, the_check, *yours):
    capsys.readouterr()
    assert the_check(*yours) is None
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("the_check", "right"),
    [(one, yours) for one, *yours in RIGHT],
    ids=lambda value: name(value) if callable(value) else "",
)
def test_a_right_answer_written_in_another_way_passes(the_check, right, capsys):
    assert answer(capsys, the_check, *right).startswith("✓ Right: ")


@pytest.mark.parametrize(
    ("the_check", "wrong", "words"), WRONG, ids=lambda one: getattr(one, "id", "")
)
def test_a_wrong_answer_is_told_what_is_wrong(the_check, wrong, words, capsys):
    printed = answer(capsys, the_check, *wrong)
    assert printed.startswith("✗ ") and words in printed


def fails(*arguments):
    raise KeyError("nope")


def test_an_error_of_an_answer_is_repeated(capsys):
    for the_check in (check.padded_vocabulary, check.gpipe, check.three_axes):
        assert "Your function raised KeyError: 'nope'" in answer(capsys, the_check, fails)
        assert "Pass your function itself, not 3." in answer(capsys, the_check, 3)


def test_a_check_that_cannot_read_an_answer_says_so(capsys):
    broken = answers.exercise(lambda yours: yours.missing)
    assert "could not read" in answer(capsys, broken, 1)
    assert "not 'four'" in answer(capsys, check.dropped, "four", 0)


def test_the_dtype_of_an_array_counts_and_that_of_a_number_does_not():
    right = np.ones(3, np.float32)
    with pytest.raises(answers.WrongAnswer, match="the loss is float16; float32 is expected"):
        answers.same_dtypes(right.astype(np.float16), right, "the loss")
    answers.same_dtypes([1.0], [np.float32(1)], "the loss")


def test_each_exercise_is_described_and_listed():
    exercises = [getattr(check, one) for one in dir(check)]
    assert all(one.__doc__ for one in exercises)
    with pytest.raises(AttributeError, match="There is no exercise 'acumulation'"):
        operator.attrgetter("acumulation")(check)
