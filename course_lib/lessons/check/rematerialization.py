"""Checks of notebook 02's exercises."""

import functools
import math

import jax
import jax.numpy as jnp

from course_lib import measure
from course_lib.lessons import saved_arrays
from course_lib.lessons.check.answers import close, equations, programs_in
from course_lib.lessons.check.exercises import (
    Function,
    Numbers,
    Outcome,
    change,
    normal,
)
from course_lib.one_device import rematerialization

TWO_ARRAYS = 2 * 4 * 2**20
BY_NAME = jax.checkpoint_policies.save_only_these_names("t")


def plain_gelu(x):
    t = jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t)


named_gelu = change("+ t)", "+ jax.ad_checkpoint.checkpoint_name(t, 't'))").of(plain_gelu)


def keeps_tanh(primitive, *shapes, **params):
    return primitive.name == "tanh"


def gelu(x):
    return jax.checkpoint(plain_gelu, policy=keeps_tanh)(x)


def derivative(function, x):
    return jax.grad(lambda x: function(x).sum())(x)


class Gelu(Outcome):
    """The arrays that GELU saves, and how often it computes the tanh."""

    has_derivative = property(
        lambda it: close(derivative(it.function, it.x), derivative(plain_gelu, it.x))
    )

    @functools.cached_property
    def num_bytes(self):
        shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        saved = rematerialization.residuals(self.function, shape)
        return sum(array.bytes for array in saved if array.shape == shape.shape)

    @property
    def tanhs(self):
        program = jax.make_jaxpr(lambda x: derivative(self.function, x))(self.x).jaxpr
        return sum(eqn.primitive.name == "tanh" for eqn in equations(program))


keep_one_value = Function(
    "keep_one_value",
    gelu,
    cases=lambda: [(jnp.linspace(-3, 3, 64),)],
    name="the result",
    outcome=Gelu,
    rows={
        "another": change("plain_gelu", "jnp.tanh"),
        "derivative": (
            change("policy=keeps_tanh)(x)", "policy=keeps_tanh)(jax.lax.stop_gradient(x))"),
            lambda it: not it.has_derivative,
        ),
        "no tanh": (
            lambda x: x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
            lambda it: not it.tanhs,
        ),
        "too few": (change("keeps_tanh", "None"), lambda it: it.num_bytes < TWO_ARRAYS),
        "too many": (plain_gelu, lambda it: it.num_bytes > TWO_ARRAYS),
        "twice": (
            change("plain_gelu", "named_gelu", "keeps_tanh", "BY_NAME"),
            lambda it: it.tanhs != 1,
        ),
    },
)


def grouped(layer, w, x, k=8):
    """Layers in groups of k."""

    @jax.checkpoint
    def add_layer(x, w):
        return layer(w, x), None

    @jax.checkpoint
    def add_group(x, w):
        return jax.lax.scan(add_layer, x, w)[0], None

    return jax.lax.scan(add_group, x, w.reshape(-1, k, *w.shape[1:]))[0]


WITHOUT_BARRIERS = functools.partial(jax.checkpoint, prevent_cse=False)


def unrolled(add, x, w):
    for i in range(len(w)):
        x, _ = add(x, w[i])
    return x, None


def can_merge(program, inside_scan=False):
    """Whether a compiler can merge a recomputation with the first computation: it has no
    barriers, and no loop keeps the two apart.
    """
    unguarded = [
        e for e in program.eqns if "prevent_cse" in e.params and not e.params["prevent_cse"]
    ]
    if len(unguarded) > inside_scan:
        return True
    return any(
        can_merge(inner, eqn.primitive.name == "scan")
        for eqn in program.eqns
        for inner in programs_in(eqn)
    )


LAYERS_ALONE = change("    @jax.checkpoint\n    def add_group", "    def add_group")
GROUPS_ALONE = change("    @jax.checkpoint\n    def add_layer", "    def add_layer")


def three_levels(layer, w, x):
    """Layers in groups of four in groups of four."""

    def four_groups(w, x):
        return grouped(layer, w, x, k=4)

    return GROUPS_ALONE.of(grouped)(four_groups, w.reshape(4, 16, 16, 16), x, k=1)


class Layers(Outcome):
    """The arrays that layers save, and how often layers are computed."""

    shapes = property(lambda it: jax.eval_shape(lambda: it.args[1:]))

    def of(self, w, x):
        return self.function(self.args[0], w, x)

    @functools.cached_property
    def groups(self):
        """The number of saved inputs. A scan stacks them; a loop saves them one by one."""
        saved = [array.shape for array in rematerialization.residuals(self.of, *self.shapes)]
        inputs = [shape for shape in saved if shape[-2:] == self.args[2].shape]
        stacked = [math.prod(shape[:-2]) for shape in inputs if len(shape) > 2]
        return max(stacked) if stacked else max(len(inputs), 1)

    per_group = property(lambda it: math.ceil(64 / it.groups))
    held = property(lambda it: it.groups + it.per_group)

    @functools.cached_property
    def passes(self):
        """How often the forward pass is computed."""
        w, x = self.shapes
        gradient = jax.grad(lambda w, x: self.of(w, x).sum(), argnums=(0, 1))
        flops = sum(measure.flops(gradient, w, x).total.values())
        return round(flops / (64 * 2 * 32 * 16 * 16)) - 2

    @property
    def nested(self):
        """Whether a scan is inside of another."""
        scans = [e for e in equations(jax.make_jaxpr(self.of)(*self.args[1:]).jaxpr)]
        scans = [e for e in scans if e.primitive.name == "scan"]
        return any(
            inner.primitive.name == "scan" and inner.params["length"] > 1
            for outer in scans
            for inner in equations(outer.params["jaxpr"].jaxpr)
        )


def sine(w, x):
    return jnp.sin(x @ w)


def weights_and_inputs():
    w, x = normal(0, (64, 16, 16), (32, 16))
    return [(sine, w / 4, x)]


square_root = Function(
    "square_root",
    grouped,
    cases=weights_and_inputs,
    name="the result",
    first=("several",),
    outcome=Layers,
    rows={
        "several": change("w.shape[1:]))[0]", "w.shape[1:]))"),
        "another": lambda layer, w, x: layer(w[0], x),
        "one group": (change("k=8", "k=64"), lambda it: it.groups == 1 and it.passes > 1),
        "nothing": (LAYERS_ALONE + GROUPS_ALONE, lambda it: it.passes <= 1),
        "layers alone": (LAYERS_ALONE, lambda it: it.groups >= 64 and it.nested),
        "no groups": (change("k=8", "k=1"), lambda it: it.groups >= 64),
        "three levels": (three_levels, lambda it: it.passes > 3),
        "groups alone": (GROUPS_ALONE, lambda it: it.passes != 3),
        "other groups": (change("k=8", "k=4"), lambda it: it.held != 16),
        "merged": (
            change("@jax.checkpoint", "@WITHOUT_BARRIERS", "jax.lax.scan(", "unrolled("),
            lambda it: can_merge(jax.make_jaxpr(it.of)(*it.args[1:]).jaxpr),
        ),
    },
)

STATE, BUDGET = 16 * 12 * 1024**2, 22 * 2**30  # bytes of a layer, and of the GPU


@functools.cache
def saved_by_a_layer(*modules):
    """Returns the bytes that a layer of width 1024, in a scan, saves of 16 x 512 tokens.

    `modules` are rematerialized, of `rematerialization.MODULES`.
    """
    return saved_arrays.of_one_more_layer(16, remat=modules)


def alone():
    """Returns how many layers would fit if each saved what a block alone saves."""
    return BUDGET // (STATE + sum(array.bytes for array in saved_arrays.of_block(16)))


depth = Numbers(
    "depth",
    lambda: {
        "without": BUDGET // (STATE + saved_by_a_layer()),
        "with_remat": BUDGET // (STATE + saved_by_a_layer("Block")),
        "budget": BUDGET / 2**20,
        "state": STATE >> 20,
        "saved": saved_by_a_layer() / 2**20,
        "input": saved_by_a_layer("Block") / 2**20,
    },
    tolerance=0.1,
    near=0.02,
    rows={
        "without": {
            "state": lambda right: BUDGET // saved_by_a_layer(),
            "arrays": BUDGET // STATE,
            "alone": lambda right: alone(),
            "not positive": (0, lambda it: not it.without >= 1),
            "number": ...,
        },
        "with_remat": {
            "state with": lambda right: BUDGET // saved_by_a_layer("Block"),
            "input": BUDGET // STATE,
            "two inputs": lambda right: BUDGET // (STATE + 2 * saved_by_a_layer("Block")),
            "12 bytes": [
                lambda right: BUDGET // (STATE * 3 // 4 + saved_by_a_layer("Block")),
                BUDGET // (STATE * 3 // 4),
            ],
            "not positive with": (0, lambda it: not it.with_remat >= 1),
            "number with": ...,
        },
    },
)
