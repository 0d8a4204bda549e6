"""Right and wrong answers to the exercise about buckets of notebook 8, for `test_check`."""

import jax
import jax.numpy as jnp

from course_lib.lessons import check

FUNCTIONS = [check.sum_in_buckets]


def nbytes(bucket):
    return sum(grad.nbytes for grad in bucket)


def full(bucket, grad, capacity):
    return nbytes(bucket) >= capacity


def grouped(grads, capacity, full=full, by_dtype=True):
    buckets = []
    for grad in grads:
        changes = buckets and by_dtype and grad.dtype != buckets[-1][0].dtype
        if not buckets or changes or full(buckets[-1], grad, capacity):
            buckets.append([])
        buckets[-1].append(grad)
    return buckets


def total(x):
    return jax.lax.psum(x, "data")


def joined(bucket, total=total, dtype=None, cut=lambda bucket: bucket):
    """Returns the sums of a bucket, which travels as one array."""
    flat = total(
        jnp.concatenate([(grad.astype(dtype or grad.dtype)).ravel() for grad in bucket])
    )
    sums, start = {}, 0
    for grad in cut(bucket):
        sums[id(grad)] = flat[start : start + grad.size].reshape(grad.shape)
        start += grad.size
    return [sums[id(grad)].astype(dtype or grad.dtype) for grad in bucket]


def in_buckets(sum_bucket=joined, change=lambda sums: sums, **rule):
    def sum_in_buckets(grads, capacity):
        buckets = grouped(grads, capacity, **rule)
        return change([one for bucket in buckets for one in sum_bucket(bucket)])

    return sum_in_buckets


def other(**changes):
    return lambda bucket: joined(bucket, **changes)


def while_reading(grads, capacity):
    """Closes a bucket while it goes through the gradients; a dict says where each one is."""
    sums, bucket = {}, {}
    for i, grad in enumerate(grads):
        bucket[i] = grad
        last = i + 1 == len(grads) or grads[i + 1].dtype != grad.dtype
        if last or nbytes(bucket.values()) >= capacity:
            flat = jnp.concatenate([one.reshape(-1) for one in bucket.values()])
            ends, end = [], 0
            for one in list(bucket.values())[:-1]:
                ends.append(end := end + one.size)
            sums |= dict(zip(bucket, jnp.split(total(flat), ends), strict=True))
            bucket = {}
    return tuple(sums[i].reshape(grad.shape) for i, grad in enumerate(grads))


def without_last(grads, capacity):
    """Sums a bucket when it is closed, and forgets the one that never is."""
    return in_buckets()(grads, capacity)[:-1]


def without_largest(grads, capacity):
    return in_buckets()([grad for grad in grads if grad.nbytes <= capacity], capacity)


def last_unsummed(grads, capacity):
    return [*in_buckets()(grads, capacity)[:-1], grads[-1]]


def in_pieces(grads, capacity):
    """Sums at most `capacity` bytes at a time."""

    def total(flat):
        size = capacity // flat.dtype.itemsize
        parts = [flat[start : start + size] for start in range(0, flat.size, size)]
        return jnp.concatenate([jax.lax.psum(part, "data") for part in parts])

    return in_buckets(other(total=total))(grads, capacity)


def from_the_end(grads, capacity):
    return in_buckets()(grads[::-1], capacity)[::-1]


def promoted(bucket):
    """Sums in float32, which a bucket of mixed dtypes becomes."""
    sums = joined(bucket, dtype=jnp.float32)
    return [one.astype(grad.dtype) for one, grad in zip(sums, bucket, strict=True)]


def scattered(flat):
    padded = jnp.pad(flat, (0, -flat.size % 8))
    own = jax.lax.psum_scatter(padded, "data", tiled=True)
    return jax.lax.all_gather(own, "data", tiled=True)[: flat.size]


def swapped(grads, capacity):
    """Puts the fifth gradient into the second one's bucket, and the second into the fifth's."""
    order = [0, 4, 2, 3, 1, 5, 6, 7]
    sums = in_buckets()([grads[i] for i in order], capacity)
    return [sums[order.index(i)] for i in range(len(grads))]


def never(*_):
    return False


RIGHT = [(check.sum_in_buckets, (while_reading,)), (check.sum_in_buckets, (in_buckets(),))]
WRONG = [
    (check.sum_in_buckets, (lambda grads, capacity: grads[0],), "list of arrays"),
    (check.sum_in_buckets, (lambda grads, capacity: grads,), "not summed over"),
    (check.sum_in_buckets, (last_unsummed,), "for grads[7]"),
    (
        check.sum_in_buckets,
        (lambda grads, capacity: jax.lax.psum(grads, "data"),),
        "one all-reduce per gradient",
    ),
    (
        check.sum_in_buckets,
        (in_buckets(promoted, full=never, by_dtype=False),),
        "share one all-reduce",
    ),
    (check.sum_in_buckets, (in_buckets(full=never),), "no bucket is ever full"),
    (
        check.sum_in_buckets,
        (in_buckets(other(total=lambda x: jax.lax.pmean(x, "data"))),),
        "A mean over",
    ),
    (check.sum_in_buckets, (in_buckets(other(total=lambda x: 8 * total(x))),), "summed twice"),
    (
        check.sum_in_buckets,
        (in_buckets(other(dtype=jnp.float32), by_dtype=False),),
        "An array has one dtype",
    ),
    (check.sum_in_buckets, (in_buckets(promoted, by_dtype=False),), "in its own dtype"),
    (check.sum_in_buckets, (in_buckets(change=lambda sums: sums[::-1]),), "another order"),
    (
        check.sum_in_buckets,
        (in_buckets(other(cut=lambda bucket: bucket[::-1])),),
        "another gradient's place",
    ),
    (check.sum_in_buckets, (without_last,), "Only the first 7"),
    (check.sum_in_buckets, (without_largest,), "stays whole"),
    (check.sum_in_buckets, (in_pieces,), "cut into pieces"),
    (
        check.sum_in_buckets,
        (in_buckets(full=lambda bucket, _, capacity: nbytes(bucket) > capacity),),
        "*at least*",
    ),
    (
        check.sum_in_buckets,
        (in_buckets(full=lambda b, grad, capacity: nbytes(b) + grad.nbytes > capacity),),
        "before the gradient that would fill it",
    ),
    (check.sum_in_buckets, (from_the_end,), "Taken in their order"),
    (check.sum_in_buckets, (swapped,), "Taken in their order"),
    (
        check.sum_in_buckets,
        (in_buckets(full=lambda b, _, capacity: sum(g.size for g in b) >= capacity),),
        "`capacity` is in bytes",
    ),
    (check.sum_in_buckets, (in_buckets(other(total=scattered)),), "travel by"),
]
