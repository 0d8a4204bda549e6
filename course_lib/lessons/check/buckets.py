"""The check of notebook 08's exercise about buckets, on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.data_parallel import alone, gather, mean, summed
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
SIZES = [int(np.prod(shape)) * jnp.dtype(dtype).itemsize for shape, dtype in GRADIENTS]

# When a bucket of this many bytes is closed, before a gradient of this size.
FULL = {
    "at least": lambda bucket, size, capacity: bucket >= capacity,
    "each alone": lambda *_: True,
    "never full": lambda *_: False,
    "numbers": lambda bucket, size, capacity: bucket >= 4 * capacity,
    "stays open": lambda bucket, size, capacity: bucket > capacity,
    "too early": lambda bucket, size, capacity: bucket + size > capacity,
}


def in_buckets(sizes, dtypes, full, capacity):
    """Returns the numbers of the gradients in each bucket."""
    buckets: list[list[int]] = []
    for i, size in enumerate(sizes):
        changes = not buckets or dtypes[i] != dtypes[i - 1]
        if changes or FULL[full](sum(sizes[j] for j in buckets[-1]), size, capacity):
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def bucket_bytes(full, capacity):
    buckets = in_buckets(SIZES, [dtype for _, dtype in GRADIENTS], full, capacity)
    return [sum(SIZES[i] for i in bucket) for bucket in buckets]


def bucket_sum(
    grads,
    capacity,
    *,
    full="at least",
    split=True,
    total=summed,
    cut=1,
    wide=False,
    order=range(8),
    first=None,
):
    """Sums gradients over "data" in buckets; the options are mistakes."""
    own = [grads[i].astype(jnp.float32) if wide else grads[i] for i in order]
    dtypes = [one.dtype if split else None for one in own]
    sums = {}
    for bucket in in_buckets([one.nbytes for one in own], dtypes, full, capacity)[:first]:
        flat, start = total(jnp.concatenate([own[i].ravel() for i in bucket])), 0
        for i in bucket[::cut]:
            sums[order[i]] = flat[start : start + own[i].size].reshape(own[i].shape)
            start += own[i].size
    return [sums[i].astype(grads[i].dtype) if wide else sums[i] for i in sorted(sums)]


class Buckets(OnDevices):
    """What is sent, and the first gradient whose sum differs."""

    capacity = property(lambda it: it.args[1])
    here = property(lambda it: f"Right, but with a capacity of {it.capacity} bytes")
    is_list = property(lambda it: isinstance(it.result, list | tuple))
    shapes = property(lambda it: [one.shape[1:] for one in it.result])
    count = property(lambda it: len(it.result))

    def first(self, differs):
        pairs = enumerate(zip(self.result, self.right, strict=True))
        return next((i for i, (one, right) in pairs if differs(one, right)), None)

    shape = property(lambda it: it.first(lambda one, right: one.shape != right.shape))
    dtype = property(lambda it: it.first(lambda one, right: one.dtype != right.dtype))
    unsummed = property(lambda it: it.first(lambda one, right: np.ptp(one, axis=0).max() > 0))
    wrong = property(lambda it: it.first(lambda one, right: not np.array_equal(one, right)))

    def is_times(self, factor):
        return (
            self.first(
                lambda one, right: not np.allclose(np.float32(one), np.float32(factor * right))
            )
            is None
        )

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
        return ", ".join(
            sorted(
                {e.primitive.name for e in self.equations if e.primitive.name.startswith(kinds)}
            )
        )

    @functools.cached_property
    def sent(self):
        sums = [e for e in self.equations if e.primitive.name.startswith("psum")]
        return [v.aval.size * v.aval.dtype.itemsize for e in sums for v in e.invars]

    bytes = property(lambda it: sum(it.sent))
    all_bytes = sum(SIZES)
    largest = max(SIZES)
    largest_shape = SHAPES[3]
    buckets = property(lambda it: len(it.sent))
    listed = property(lambda it: ", ".join(map(str, it.sent)))
    expected = property(lambda it: ", ".join(map(str, bucket_bytes("at least", it.capacity))))

    def closed(self, full):
        """Whether buckets are closed by a rule, and not by the right one."""
        sent, right = sorted(self.sent), sorted(bucket_bytes("at least", self.capacity))
        return sent == sorted(bucket_bytes(full, self.capacity)) and (
            sent != right or full == "at least"
        )


def of_integers():
    random = np.random.default_rng(0)  # small integers: their sums are exact, in bfloat16 too
    grads = [jnp.asarray(random.integers(-15, 16, (8, *s)), dtype) for s, dtype in GRADIENTS]
    return [(grads, 256), (grads, 2048)]  # the second is larger than all gradients together


def in_pieces(grads, capacity):
    def total(flat):
        size = capacity // flat.dtype.itemsize
        cuts = list(range(size, flat.size, size))
        return jnp.concatenate([summed(part) for part in jnp.split(flat, cuts)])

    return bucket_sum(grads, capacity, total=total)


def scattered(flat):
    padded = jnp.pad(flat, (0, -flat.size % 8))
    return gather(jax.lax.psum_scatter(padded, "data", tiled=True))[: flat.size]


sum_in_buckets = DeviceFunction(
    "sum_in_buckets",
    bucket_sum,
    cases=of_integers,
    calls=lambda yours, grads, capacity: yours([own[0] for own in grads], capacity),
    axes={"data": 8},
    in_specs=(P("data"),),
    stacked=True,
    name=None,
    outcome=Buckets,
    rows={
        "no list": (lambda grads, capacity: grads[0], lambda it: not it.is_list),
        "last": (
            dict(first=-1),
            lambda it: 0 < it.count < 8 and it.shapes == SHAPES[: it.count],
        ),
        "largest": (
            lambda grads, c: [g for g in bucket_sum(grads, c) if g.nbytes < 512],
            lambda it: SHAPES[3] not in it.shapes,
        ),
        "count": (lambda grads, c: bucket_sum(grads, c)[1:], lambda it: it.count != 8),
        "order": (
            lambda grads, c: bucket_sum(grads, c)[::-1],
            lambda it: it.shapes != SHAPES and sorted(it.shapes) == sorted(SHAPES),
        ),
        "shape": (
            lambda grads, c: [g if g.size != 40 else g.ravel() for g in bucket_sum(grads, c)],
            lambda it: it.shape is not None,
        ),
        "dtype": (dict(split=False), lambda it: it.dtype is not None),
        "unsummed": (
            [dict(total=alone), lambda grads, c: grads],
            lambda it: it.unsummed is not None,
        ),
        "mean": (dict(total=mean), lambda it: it.is_times(1 / 8)),
        "twice": (dict(total=lambda x: 8 * summed(x)), lambda it: it.is_times(8)),
        "mixed": (dict(cut=-1), lambda it: it.is_mixed),
        "wrong": (dict(total=lambda x: summed(x + 1)), lambda it: it.wrong is not None),
        "other collectives": (dict(total=scattered), lambda it: it.others),
        "each alone": (
            [dict(full="each alone"), lambda grads, c: summed(grads)],
            lambda it: it.closed("each alone"),
        ),
        "one": (dict(wide=True, full="never full"), lambda it: it.buckets == 1),
        "bytes": (dict(wide=True), lambda it: it.bytes != it.all_bytes),
        **{
            rule: (dict(full=rule), lambda it, rule=rule: it.closed(rule))
            for rule in list(FULL)[2:]
        },
        "pieces": (in_pieces, lambda it: max(it.sent) < it.largest),
        "another": (
            [dict(order=[0, 4, 2, 3, 1, 5, 6, 7]), dict(order=range(8)[::-1])],
            lambda it: not it.closed("at least"),
        ),
    },
)
