"""Checks of notebook 13's exercises."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    run,
    same_shapes,
)
from course_lib.lessons.check.many_devices import (
    compiled,
    gradient,
    normal,
    row_of_devices,
    spread,
)
from course_lib.many_devices import context_parallel


@exercise
def merge(your_merge):
    """Checks `your_merge(a, b)`, which joins the softmax of two blocks of keys.

    Both are `(top [Q], total [Q], out [Q D])` for Q queries: the largest score, the sum of
    exp(score - top), and the values summed with these weights. A query that sees no key of a
    block has the top -inf, and zeros.
    """

    def summary(scores, values):
        top = scores.max(-1)
        weights = jnp.where(
            jnp.isfinite(scores),
            jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0)[:, None]),
            0,
        )
        return top, weights.sum(-1), weights @ values

    scores, values = normal(4, (3, 6), (6, 2))
    scores = scores.at[1].add(jnp.array([0.0, 0, 0, 200, 200, 200]))  # overflows if not shifted
    right = summary(scores, values)
    parts = [summary(scores[:, i : i + 3], values[i : i + 3]) for i in (0, 3)]
    yours = call(
        your_merge,
        *parts,
        hint="If top becomes larger, by which factor does a sum of exp(s - top) change?",
    )
    same_shapes(yours, right, "the merged block")
    added = tuple(a + b for a, b in zip(*parts, strict=True))
    require(
        not close(yours[1], added[1]) and not close(yours[2], added[2]),
        "Sums relative to different tops do not add. Multiply each block by"
        " exp(its top - the new top) first.",
    )
    require(
        bool(jnp.isfinite(yours[1]).all() and jnp.isfinite(yours[2]).all()),
        "Not finite: exp overflows if you subtract the smaller top. Subtract the larger one.",
    )
    require(close(yours[0], right[0]), "The merged top should be the larger of the two.")
    require(close(yours[1], right[1]), "The merged total is not the sum of all weights.")
    require(
        not close(yours[2], right[2] / right[1][:, None]),
        "The output is divided by the total. Then it cannot be merged with a third block:"
        " divide after the last one.",
    )
    require(close(yours[2], right[2]), "The merged output is not the weighted sum of values.")
    hidden = scores.at[0, 3:].set(-jnp.inf)
    for order, name in ((slice(None), "second"), (slice(None, None, -1), "first")):
        blocks = [summary(hidden[:, i : i + 3], values[i : i + 3]) for i in (0, 3)][order]
        yours = run(your_merge, *blocks)
        require(
            close(yours, summary(hidden, values)),
            f"A query that sees no key of the {name} block comes out wrong.",
        )
    nothing = tuple(jnp.array(x) for x in ([-jnp.inf], [0.0], [[0.0, 0.0]]))
    yours = run(your_merge, nothing, nothing)
    require(
        not any(bool(jnp.isnan(x).any()) for x in yours),
        "A query that sees no key of either block comes out NaN: -inf minus -inf. Subtract a"
        " finite number for this query.",
    )
    require(
        not yours[1].any() and not yours[2].any(),
        "A query that sees no key of either block should have zeros.",
    )
    require(
        bool((yours[0] == -jnp.inf).all()),
        f"A query that sees no key of either block has the top {float(yours[0][0]):g}. A third"
        " block with a smaller top would be scaled to it: subtract a finite number, but return"
        " the larger top, -inf.",
    )
    return "and a query that has seen no key yet stays at zero."


@exercise
def ulysses(your_attention):
    """Checks `your_attention(query, key, value, attend)`, attention by all-to-alls (Ulysses).

    It runs on four devices along "context": each has 2 of 8 positions of all 4 heads,
    [1 2 4 3]. `attend` is causal attention on whole sequences. The check compares result,
    gradient and bytes.
    """
    n = 4
    mesh, cut = row_of_devices("context", n), P(None, "context")
    *args, weights = normal(5, *[(1, 8, 4, 3)] * 4)

    def attend(query, key, value):
        scores = jnp.einsum("blhk,bmhk->bhlm", query, key) / query.shape[-1] ** 0.5
        mask = jnp.tri(query.shape[1], key.shape[1], dtype=bool)
        seen = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        return jnp.einsum("bhlm,bmhk->blhk", seen, value)

    divided = spread(
        your_attention,
        mesh,
        (cut,) * 3,
        cut,
        attend,
        hint="`jax.lax.all_to_all(x, 'context', split_axis, concat_axis, tiled=True)` exchanges"
        " positions for heads: `split_axis` is the dimension that is cut now, `concat_axis` the"
        " one that was cut before.",
    )
    yours, ledger = compiled(divided, mesh, *args)
    with jax.default_matmul_precision("highest"):
        right = attend(*args)
        right_gradient = gradient(attend, weights)(*args)
        alone = jax.shard_map(attend, mesh=mesh, in_specs=(cut,) * 3, out_specs=cut)(*args)
    require(
        jnp.shape(yours) != (1, 32, 1, 3),
        "Each device still has all 8 positions of one head, [1, 8, 1, 3]: a fourth all-to-all"
        " brings its own positions back.",
    )
    same_shapes(yours, right, "the output")
    require(
        not close(yours, alone),
        "Each device attends to its own two positions only. Positions must be exchanged for"
        " heads first.",
    )
    require(
        ledger.payload("all-gather") == 0,
        f"Keys and values are gathered: {ledger.payload('all-gather')} bytes. Ulysses sends"
        " parts of four arrays by all-to-alls.",
    )
    require(
        close(yours, right),
        "Not the attention of the whole sequence. Is the output brought back, heads for"
        " positions, and are the two axes of each all-to-all in the right order?",
    )
    most = 4 * right.nbytes // n
    require(
        ledger.payload() <= most,
        f"The right output, but {ledger.payload()} bytes are exchanged; query, key, value and"
        f" output have {most}.",
    )
    grads, _ = compiled(gradient(divided, weights), mesh, *args)
    require(close(grads, right_gradient), "The output is right, its gradient is not.")
    return f"four all-to-alls of {right.nbytes // n} bytes, of which 3/4 leave the device."


@exercise
def work_in_order(pairs):
    """Checks the number of pairs of parts that the slowest device computes in each step, summed
    over the steps of a ring of eight. Device i has the neighbouring parts 2i and 2i + 1.
    """
    predicted(
        pairs,
        hint="Count first for device 7: which pairs does it compute in step 0, and in step 1?",
    )
    n = 8
    steps = np.array(
        [
            [
                sum(
                    key <= query
                    for query in (2 * device, 2 * device + 1)
                    for key in (2 * ((device - step) % n), 2 * ((device - step) % n) + 1)
                )
                for device in range(n)
            ]
            for step in range(n)
        ]
    )
    right = int(steps.max(axis=1).sum())
    require(
        pairs != 2 * n + 1,
        "17 is right for the zigzag layout; here it is only the mean over devices. The slowest"
        " device decides how long each step takes.",
    )
    require(
        pairs != 4 * n,
        "In the first step keys are the device's own, and the mask hides one of four pairs.",
    )
    require(
        pairs != steps.sum(),
        "This is the work of all devices together. How long do they wait for the slowest?",
    )
    require(
        pairs != 4 * (n - 1),
        "The first step is missing: there each device works on its own keys.",
    )
    require(
        pairs != 3 * n,
        "The diagonal of the mask crosses only a device's own keys. In which step does a device"
        " have them?",
    )
    require(
        pairs == right,
        f"{pairs:g} pairs are too {'many' if pairs > right else 'few'}. Write down for each of"
        " the eight steps how many pairs its busiest device computes, then add.",
    )
    return f"{right} pairs in place of 17, with the same work in all."


@exercise
def ring_bytes(your_bytes):
    """Checks `your_bytes(n, numbers, width)`: the bytes that each of n devices sends for one
    layer of ring attention, in the forward and the backward pass.

    Keys and values of a device's positions are `numbers` numbers together, of `width` bytes
    each. Their gradients are float32. Two compiled rings decide what is right.
    """
    cases, numbers = ((4, 2), (8, 2), (3, 4)), 60
    hint = "How often does a device send keys and values, and how often their gradients?"
    yours = [call(your_bytes, n, numbers, width, hint=hint) for n, width in cases]

    def is_like(formula):
        return yours == [numbers * formula(n, width) for n, width in cases]

    require(
        not is_like(lambda n, width: (n - 1) * width),
        "This is the forward pass alone.",
    )
    require(
        not is_like(lambda n, width: 2 * (n - 1) * width),
        "The backward pass computes gradients of keys and values. They travel, too.",
    )
    require(
        not is_like(lambda n, width: (n - 1) * width + 4 * n),
        "The backward pass needs all keys and values once more: no device kept them.",
    )
    require(
        not is_like(lambda n, width: (2 * (n - 1) + n) * width),
        "The gradients are float32, whatever keys and values are.",
    )
    require(
        not is_like(lambda n, width: 2 * n * width + 4 * n),
        "After n - 1 steps a device has seen all keys and values. They need not come home.",
    )
    require(
        not is_like(lambda n, width: 2 * (n - 1) * width + 4 * (n - 1)),
        "A gradient is complete when all devices have added to it, and then it is one step away"
        " from the device whose keys it belongs to.",
    )
    for n in (2, 4):
        has, sent = _measured_ring(n)
        answer = run(your_bytes, n, has, 4)
        require(
            answer == sent,
            f"Compiled for {n} devices, with {has} numbers in float32 on each of them, a device"
            f" sends {sent:,.0f} bytes, not {answer}. Count keys and values, then their"
            " gradients.",
        )
    require(
        is_like(lambda n, width: 2 * (n - 1) * width + 4 * n),
        "Right in float32, but not for keys and values of 2 bytes. Which of the arrays that"
        " travel become smaller?",
    )
    return f"with four devices, {sent:,.0f} bytes per layer, as compiled."


def _measured_ring(n):
    """Returns how many numbers of keys and values a device of a compiled ring has, in float32,
    and the bytes that it sends per layer.
    """
    mesh, cut, layers = row_of_devices("context", n), P(None, "context"), 2

    def loss(x):
        def layer(x, _):
            return context_parallel.attend(x, x, 2 * x), None

        return jax.lax.scan(layer, x, length=layers)[0].sum()

    x = jnp.ones((1, 16, 2, 4))
    program = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=cut, out_specs=cut)
    _, ledger = compiled(program, mesh, x)
    return 2 * x.size // n, ledger.sent("collective-permute") / layers
