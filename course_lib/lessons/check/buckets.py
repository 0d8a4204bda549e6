"""The check of notebook 08's exercise about buckets, on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.data_parallel import gather, summed
from course_lib.lessons.check.exercises import change
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices

# Shapes and dtypes of a device's gradients, in the order of the backward pass.
GRADIENTS = (
    ((4, 8), jnp.float32),
    ((32,), jnp.float32),
    ((8,), jnp.float32),
    ((16, 12), jnp.float32),  # larger than the small capacity
    ((5, 8), jnp.float32),
    ((8, 8), jnp.bfloat16),
    ((16,), jnp.bfloat16),
    ((3,), jnp.float32),  # never fills a bucket
)
SHAPES = [shape for shape, _ in GRADIENTS]


def bucket_sum(grads, capacity):
    """Sums gradients over "data" in buckets."""
    sums, bucket = {}, []
    for i, grad in enumerate(grads):
        bucket.append(i)
        changes = i + 1 == len(grads) or grads[i + 1].dtype != grad.dtype
        if changes or sum(grads[j].nbytes for j in bucket) >= capacity:
            flat, start = summed(jnp.concatenate([grads[j].ravel() for j in bucket])), 0
            for j in bucket:
                sums[j] = flat[start : start + grads[j].size].reshape(grads[j].shape)
                start += grads[j].size
            bucket = []
    return [sums[i] for i in sorted(sums)]


# Other rules for when a bucket is closed.
RULES = {
    "never full": change(">= capacity", ">= 10**9"),
    "numbers": change("nbytes", "size"),
    "stays open": change(">= capacity", "> capacity"),
    "too early": change("in bucket) >=", "in [*bucket, min(i + 1, 7)]) >"),
}


class Buckets(OnDevices):
    """The bytes sent, and the first gradient whose sum differs."""

    is_list = property(lambda it: isinstance(it.result, list | tuple))
    shapes = property(lambda it: [one.shape[1:] for one in it.result])
    count = property(lambda it: len(it.result))

    def first(self, differs):
        pairs = enumerate(zip(self.result, self.right, strict=True))
        return next((i for i, (one, right) in pairs if differs(one, right)), None)

    other_shape = property(lambda it: it.first(lambda one, right: one.shape != right.shape))
    dtype = property(lambda it: it.first(lambda one, right: one.dtype != right.dtype))
    unsummed = property(lambda it: it.first(lambda one, right: np.ptp(one, axis=0).max() > 0))
    wrong = property(lambda it: it.first(lambda one, right: not np.array_equal(one, right)))

    @functools.cached_property
    def is_mixed(self):
        mine, right = (
            np.sort(np.concatenate([np.float32(one).ravel() for one in tree]))
            for tree in (self.result, self.right)
        )
        return self.wrong is not None and np.array_equal(mine, right)

    @functools.cached_property
    def others(self):
        kinds = "all_gather", "reduce_scatter", "all_to_all", "ppermute"
        return ", ".join(sorted({one for one in self.primitives if one.startswith(kinds)}))

    @functools.cached_property
    def sent(self):
        sums = [e for e in self.equations if e.primitive.name.startswith("psum")]
        return [v.aval.size * v.aval.dtype.itemsize for e in sums for v in e.invars]

    bytes = property(lambda it: sum(it.sent))
    all_bytes = property(lambda it: sum(it.best.sent))
    largest = max(np.prod(shape) * 4 for shape in SHAPES)
    buckets = property(lambda it: len(it.sent))

    def sends_as(self, row):
        """Whether this sends what a row's first example sends, and it is not right."""
        example = self.exercise.outcome_of(self.exercise.wrong[row][0], self.case)
        mine, like, right = (sorted(one.sent) for one in (self, example, self.best))
        return mine == like != right


def of_integers():
    random = np.random.default_rng(0)  # small integers: their sums are exact, in bfloat16 too
    grads = [jnp.asarray(random.integers(-15, 16, (8, *s)), dtype) for s, dtype in GRADIENTS]
    return [(grads, 256), (grads, 2048)]  # the second is larger than all gradients together


def in_pieces(capacity, flat):
    cuts = range(capacity // flat.dtype.itemsize, flat.size, capacity // flat.dtype.itemsize)
    return jnp.concatenate([summed(part) for part in jnp.split(flat, list(cuts))])


def scattered(flat):
    padded = jnp.pad(flat, (0, -flat.size % 8))
    return gather(jax.lax.psum_scatter(padded, "data", tiled=True))[: flat.size]


def in_float32(grads, capacity):
    sums = bucket_sum([grad.astype(jnp.float32) for grad in grads], capacity)
    return [one.astype(grad.dtype) for one, grad in zip(sums, grads, strict=True)]


sum_in_buckets = DeviceFunction(
    "sum_in_buckets",
    bucket_sum,
    cases=of_integers,
    calls=lambda yours, grads, capacity: yours([own[0] for own in grads], capacity),
    axes={"data": 8},
    in_specs=(P("data"),),
    stacked=True,
    outcome=Buckets,
    rows={
        "no list": (lambda grads, capacity: grads[0], lambda it: not it.is_list),
        "last": (
            change("sorted(sums)", "sorted(sums)[:-1]"),
            lambda it: 0 < it.count < 8 and it.shapes == SHAPES[: it.count],
        ),
        "largest": (
            lambda grads, c: [g for g in bucket_sum(grads, c) if g.nbytes < 512],
            lambda it: SHAPES[3] not in it.shapes,
        ),
        "count": (change("sorted(sums)", "sorted(sums)[1:]"), lambda it: it.count != 8),
        "order": (
            change("sorted(sums)", "sorted(sums)[::-1]"),
            lambda it: it.shapes != SHAPES and sorted(it.shapes) == sorted(SHAPES),
        ),
        "shape": (
            lambda grads, c: [g if g.size != 40 else g.ravel() for g in bucket_sum(grads, c)],
            lambda it: it.other_shape is not None,
        ),
        "dtype": (
            change(" or grads[i + 1].dtype != grad.dtype", ""),
            lambda it: it.dtype is not None,
        ),
        "unsummed": (
            [change("summed(", "("), lambda grads, c: grads],
            lambda it: it.unsummed is not None,
        ),
        "mean": change("summed(", "1 / 8 * summed("),
        "twice": change("summed(", "8 * summed("),
        "mixed": (change("for j in bucket:", "for j in bucket[::-1]:"), lambda it: it.is_mixed),
        "wrong": (change("summed(", "1 + summed("), lambda it: it.wrong is not None),
        "other collectives": (change("summed(", "scattered("), lambda it: it.others),
        "each alone": (
            [change("if changes", "if True"), lambda grads, c: summed(grads)],
            lambda it: it.sends_as("each alone"),
        ),
        "one": (lambda grads, c: in_float32(grads, 10**9), lambda it: it.buckets == 1),
        "bytes": (in_float32, lambda it: it.bytes != it.all_bytes),
        **{row: (one, lambda it, r=row: it.sends_as(r)) for row, one in RULES.items()},
        "pieces": (
            change("summed(", "in_pieces(capacity, "),
            lambda it: max(it.sent) < it.largest,
        ),
        "another": (
            lambda grads, capacity: bucket_sum(grads[::-1], capacity)[::-1],
            lambda it: sorted(it.sent) != sorted(it.best.sent),
        ),
    },
)
