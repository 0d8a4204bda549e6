"""Checks of notebook 11's exercises."""

import itertools
import math
import numbers
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import (
    WrongAnswer,
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
from course_lib.measure import hardware


@exercise
def two_way_product(your_product):
    """Checks `your_product(x, kernel)`, an all-gather and a matmul as two rings, one each way.

    It runs on four devices along "tensor": x [8 6] is cut into parts of two positions, the
    kernel [6 12] by columns. Half of a part's features travels right, half left. Compared are
    result, gradient, bytes and the directions of the transfers.
    """
    n = 4
    mesh = row_of_devices("tensor", n)
    x, kernel, weights = normal(3, (8, 6), (6, 12), (8, 12))

    def spread_on(mesh):
        return spread(
            your_product,
            mesh,
            (P("tensor"), P(None, "tensor")),
            P(None, "tensor"),
            hint="Write one ring first, for half of the features. Which rows of the kernel does"
            " it need?",
        )

    divided = spread_on(mesh)
    yours, ledger = compiled(divided, mesh, x, kernel)
    with jax.default_matmul_precision("highest"):
        right = x @ kernel
        right_gradient = gradient(jnp.matmul, weights)(x, kernel)
    same_shapes(yours, right, "the product")

    part = x.nbytes // n
    require(
        ledger.payload("all-gather") == 0,
        "The sequence is gathered at once: nothing can be multiplied meanwhile. Use"
        " `jax.lax.ppermute`.",
    )
    if not close(yours, right):
        shards = [yours[:, 3 * d : 3 * d + 3] for d in range(n)]
        expected = [right[:, 3 * d : 3 * d + 3] for d in range(n)]
        turned = all(
            any(
                close(a.reshape(n, 2, 3)[list(places)], b.reshape(n, 2, 3))
                for places in itertools.permutations(range(n))
            )
            for a, b in zip(shards, expected, strict=True)
        )
        require(
            not turned,
            "The right products in the wrong order: a device met the parts in an order of its"
            " own. Which part is it that arrives at each step?",
        )
        (first, second), (upper, lower) = jnp.split(x, 2, axis=1), jnp.split(kernel, 2)
        for a, b in ((upper, upper), (lower, lower), (lower, upper)):
            require(
                not close(yours, first @ a + second @ b),
                "A half of the features is multiplied with the rows of the kernel that belong"
                " to the other half.",
            )
        of_first, of_second = np.asarray(first @ upper), np.asarray(second @ lower)
        last_first = of_first.reshape(n, 2, -1)[::-1].reshape(of_first.shape)
        arrived = all(
            any(
                close(
                    yours[:, columns],
                    np.roll(going_right[:, columns], 2 * i, axis=0)
                    + np.roll(of_second[:, columns], 2 * j, axis=0),
                )
                for going_right in (of_first, last_first)
                for i, j in itertools.product(range(n), repeat=2)
            )
            for columns in (slice(3 * d, 3 * d + 3) for d in range(n))
        )
        require(
            not arrived,
            "Each half is right, but in the order of arrival. Turn each one back by as many"
            " parts as `axis_index` says before you add them.",
        )
        require(
            False,
            "Not x @ kernel. Each half of the features needs its own rows of the kernel, and"
            " the two products must be of the same positions before they are added.",
        )
    text = jax.jit(divided).lower(x, kernel).compile().as_text()
    along = {"right": 0, "left": 0}  # that the transfers of a direction have in all
    for line in text.splitlines():
        if "source_target_pairs" in line:
            sizes = re.findall(r"= \(?\w+\[([\d,]*)\]", line)[0].split(",")
            along["right" if "{0,1}" in line else "left"] += math.prod(map(int, sizes))
    require(
        all(along.values()),
        "The right product, but everything travels one way around. Send one half the other"
        " way.",
    )
    sent = ledger.sent("collective-permute")
    require(
        sent <= (n - 1) * part,
        f"The right product, but a device sends {sent} bytes. {n - 1} parts of {part} are"
        " enough: half of each part goes each way.",
    )
    require(
        along["right"] == along["left"],
        "The right product, but one direction carries more than the other. Half of each part's"
        " features goes each way.",
    )
    grads, _ = compiled(gradient(divided, weights), mesh, x, kernel)
    require(close(grads, right_gradient), "The product is right, its gradient is not.")
    two = row_of_devices("tensor", 2)
    try:
        of_two, _ = compiled(spread_on(two), two, x, kernel)
        right_on_two = of_two.shape == right.shape and close(of_two, right)
    except WrongAnswer:
        right_on_two = False
    require(
        right_on_two,
        "Right on four devices, wrong on two. Is the number of devices or of positions written"
        " into your function?",
    )
    return f"{sent} bytes, half of them each way: {n - 1} parts, as in one ring."


@exercise
def order_of_arrival(your_order):
    """Checks `your_order(device, n)`: the parts that a device of a ring multiplies, in order.

    The ring passes what a device has to the next one, device d to d + 1.
    """
    n = 8
    mesh = row_of_devices("tensor", n)
    hint = "Device d begins with part d. Whose part arrives next?"

    def ring(part):
        seen = []
        for _ in range(n):
            seen.append(part)
            part = jax.lax.ppermute(part, "tensor", [(i, (i + 1) % n) for i in range(n)])
        return jnp.concatenate(seen)

    seen = jax.shard_map(ring, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"))
    right = jax.jit(seen)(jnp.arange(n)).reshape(n, n).tolist()
    yours = [_parts(call(your_order, d, n, hint=hint)) for d in range(n)]
    require(
        all(len(order) == n for order in yours),
        f"A device multiplies {n} parts; your list for device 0 has {len(yours[0])}.",
    )
    require(
        yours != [[(d + k) % n for k in range(n)] for d in range(n)],
        "This is the order if parts travelled left. They go to d + 1, so device d receives"
        " from d - 1.",
    )
    require(
        yours != [[(d - k - 1) % n for k in range(n)] for d in range(n)],
        "A device multiplies its own part first, while the next arrives.",
    )
    require(
        all(0 <= part < n for order in yours for part in order),
        f"Parts are numbered 0 to {n - 1}: in front of part 0 is the last one. Modulo n?",
    )
    for d in (3, 0, 7, 1):
        require(
            yours[d][0] == d,
            f"Device {d} begins with its own part, not with part {yours[d][0]}.",
        )
        for step in range(1, n):
            require(
                yours[d][step] == right[d][step],
                f"Device {d} does not multiply part {yours[d][step]} in step {step}. Which part"
                f" did the device before it have in step {step - 1}?",
            )
    few = _parts(run(your_order, 1, 3))
    require(
        few == [1, 0, 2],
        f"Right on eight devices. On 3 devices, device 1 cannot multiply {few}.",
    )
    return "so device d must turn its products by d places before they are the sequence."


def _parts(order) -> list[int]:
    """Reads the learner's list of part numbers."""
    parts = list(order) if hasattr(order, "__iter__") else [None]
    require(
        all(isinstance(part, numbers.Real) or hasattr(part, "item") for part in parts),
        f"Return a list of part numbers, not {order!r}.",
    )
    return parts


@exercise
def hidden_with_latency(positions):
    """Checks from how many positions per part on a transfer hides, if each message takes 5 µs
    before its first byte: width 8,192, 4,096 columns per device, rated H100s, bfloat16.
    """
    predicted(
        positions,
        hint="Compute first how long the product of one position takes, and its transfer.",
    )
    h100, width, columns = hardware.get("h100"), 8192, 4096
    product = 2 * width * columns / h100.peak("bfloat16")
    transfer = 2 * width / h100.link_bandwidth
    right = 5e-6 / (product - transfer)
    require(
        abs(positions / (5e-6 / product) - 1) > 0.02,
        f"{positions} positions are multiplied in 5 µs, but bytes take time too: add the"
        " transfer to the latency.",
    )
    require(
        abs(positions / (8 * right) - 1) > 0.02,
        f"{positions} is a whole sequence on eight devices. A part is an eighth of it.",
    )
    require(
        positions > 0 and abs(positions / right - 1) < 0.02,
        f"With {positions} positions the matmul takes {1e6 * positions * product:.1f} µs and"
        f" the transfer {5 + 1e6 * positions * transfer:.1f}. They should be equal.",
    )
    return (
        f"{right:.0f} positions per part: one sequence of {8 * right:,.0f}, or eight of"
        f" {right:.0f}."
    )
