"""Checks of notebook 11's exercises, on four devices in a ring."""

import dataclasses
import functools
import itertools
import math
import numbers
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib.lessons.check.answers import WrongAnswer, close
from course_lib.lessons.check.exercises import Function, Numbers, Outcome, change, normal, share
from course_lib.lessons.check.many_devices import DeviceFunction, OnDevices
from course_lib.many_devices import meshes
from course_lib.measure import hardware


def pass_on(x, by=1):
    """Sends to the neighbour on the right, or (by=-1) on the left."""
    n = jax.lax.axis_size("tensor")
    return jax.lax.ppermute(x, "tensor", [(d, (d + by) % n) for d in range(n)])


def product(x, kernel):
    """An all-gather and a matmul as two rings: half of the features travels each way."""
    n, d = jax.lax.axis_size("tensor"), jax.lax.axis_index("tensor")
    right, left = jnp.split(x, 2, axis=1)
    upper, lower = jnp.split(kernel, 2)
    total = meshes.vary(jnp.zeros((n, len(x), kernel.shape[1])), "tensor")
    for step in range(n):
        first, second = (d - step) % n, (d + step) % n
        total = total.at[first].add(right @ upper).at[second].add(left @ lower)
        right, left = pass_on(right), pass_on(left, -1)
    return total.reshape(-1, kernel.shape[1])


# All features travel right, and the products stay in the order of arrival.
ONE_WAY = change("pass_on(left, -1)", "pass_on(left)", "(d + step)", "(d - step)")
BY_ARRIVAL = change("(d - step) % n, (d + step) % n", "step, step")


class Rings(OnDevices):
    """The product of four devices, and what travels each way."""

    n = 4
    sent = property(lambda it: it.ledger.sent("collective-permute"))

    def columns(self, product):
        """Returns each device's columns of a product, as the four parts of the sequence."""
        return np.split(np.reshape(product, (self.n, 2, -1)), self.n, axis=2)

    @property
    def is_mixed(self):
        """Whether each device has the right parts of the product in another order."""
        orders = [list(order) for order in itertools.permutations(range(self.n))]
        pairs = zip(self.columns(self.result), self.columns(self.right), strict=True)
        return not self.is_right and all(
            any(close(yours[order], right) for order in orders) for yours, right in pairs
        )

    @property
    def is_by_arrival(self):
        """Whether each device has added its two halves, turned or in the order of arrival."""
        x, kernel = self.args
        (first, second), (upper, lower) = np.split(x, 2, axis=1), np.split(kernel, 2)
        columns = zip(
            *map(self.columns, (self.result, first @ upper, second @ lower)), strict=True
        )
        turns = list(itertools.product((1, -1), range(self.n), range(self.n)))
        return not self.is_right and all(
            any(
                close(yours, np.roll(right[::way], i, axis=0) + np.roll(left, j, axis=0))
                for way, i, j in turns
            )
            for yours, right, left in columns
        )

    @functools.cached_property
    def ways(self):
        """How many numbers travel right and left, in all."""
        ways = {"right": 0, "left": 0}
        for line in self.compiled.as_text().splitlines():
            if "source_target_pairs" in line:
                sizes = re.findall(r"= \(?\w+\[([\d,]*)\]", line)[0].split(",")
                ways["right" if "{0,1}" in line else "left"] += math.prod(map(int, sizes))
        return ways

    @property
    def is_right_on_two(self):
        try:
            return ring_of_two.outcome_of(self.function, 0).is_right
        except WrongAnswer:
            return False


two_way_product = DeviceFunction(
    "two_way_product",
    product,
    one_device=jnp.matmul,
    cases=lambda: [normal(3, (8, 6), (6, 12))],
    in_specs=(P("tensor"), P(None, "tensor")),
    out_specs=P(None, "tensor"),
    of=(0, 1),
    name="the product",
    outcome=Rings,
    rows={
        "gathers": lambda x, kernel: jax.lax.all_gather(x, "tensor", tiled=True) @ kernel,
        "order": (
            BY_ARRIVAL + change("pass_on(left, -1)", "pass_on(left)"),
            lambda it: it.is_mixed,
        ),
        "other half": [
            change("left @ lower", "left @ upper"),
            change("right @ upper", "right @ lower"),
            change("upper, lower =", "lower, upper ="),
        ],
        "arrival": ([BY_ARRIVAL, change("(d - step)", "-step")], lambda it: it.is_by_arrival),
        "another": change("return total", "return 2 * total"),
        "one way": (ONE_WAY, lambda it: not all(it.ways.values())),
        "sends more": (
            change("jnp.split(x, 2, axis=1)", "x, x")
            + change("jnp.split(kernel, 2)", "kernel / 2, kernel / 2")
        ),
        "unequal": (
            change("split(x, 2,", "split(x, [2],", "split(kernel, 2)", "split(kernel, [2])"),
            lambda it: it.ways["right"] != it.ways["left"],
        ),
        "gradient": change("left @ lower", "(left + jax.lax.stop_gradient(left)) / 2 @ lower"),
        "two": (change('jax.lax.axis_size("tensor")', "4"), lambda it: not it.is_right_on_two),
    },
)
ring_of_two = dataclasses.replace(two_way_product, axes={"tensor": 2}, rows={})


def arrivals(device, n):
    return [(device - step) % n for step in range(n)]


class Order(Outcome):
    """The parts that a device multiplies."""

    @functools.cached_property
    def parts(self):
        """The numbers of a list, None if it is no list of numbers."""
        parts = list(self.result) if hasattr(self.result, "__iter__") else [None]
        is_number = [isinstance(one, numbers.Real) or hasattr(one, "item") for one in parts]
        return parts if all(is_number) else None

    pairs = property(lambda it: list(zip(it.parts, it.right, strict=True)))
    step = property(lambda it: next((i for i, (a, b) in enumerate(it.pairs) if a != b), None))
    part = property(lambda it: it.parts[it.step])


order_of_arrival = Function(
    "order_of_arrival",
    arrivals,
    cases=lambda: [*((device, 8) for device in (3, 0, 7, 1, 2, 4, 5, 6)), (1, 3)],
    outcome=Order,
    rows={
        "no list": (lambda device, n: "ring", lambda it: it.parts is None),
        "length": (lambda device, n: [device], lambda it: it.n == 8 != len(it.parts)),
        "left": change("device - step", "device + step"),
        "own first": change("- step", "- step - 1"),
        "no modulo": (
            change("% n", "% 99"),
            lambda it: it.n == 8 and not all(0 <= one < 8 for one in it.parts),
        ),
        "begins": (
            lambda device, n: list(range(n)),
            lambda it: it.n == 8 and it.parts[0] != it.device,
        ),
        "step": (change("- step", "- 3 * step"), lambda it: it.n == 8 and it.step is not None),
        "three": (change("% n", "% 8"), lambda it: it.parts != it.right),
    },
)


def equal_times():
    """Of a layer of width 8,192 on eight H100s: seconds per position, and the positions for
    which product and transfer take equally long.
    """
    h100, width, columns = hardware.get("h100"), 8192, 4096
    product = 2 * width * columns / h100.peak("bfloat16")
    transfer = 2 * width / h100.link_bandwidth
    return {
        "positions": 5e-6 / (product - transfer),
        "latency alone": 5e-6 / product,
        "product": product,
        "transfer": transfer,
    }


hidden_with_latency = Numbers(
    "hidden_with_latency",
    equal_times,
    tolerance=0.02,
    near=0.02,
    rows={
        "positions": {
            "latency alone": lambda right: equal_times()["latency alone"],
            "sequence": share(8),
            "another": ...,
        }
    },
)
