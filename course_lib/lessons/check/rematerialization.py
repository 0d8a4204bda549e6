"""Checks of notebook 02's exercises."""

import math

import jax
import jax.numpy as jnp

from course_lib import configs, measure
from course_lib.lessons.check.answers import (
    call,
    close,
    equations,
    exercise,
    predicted,
    require,
)
from course_lib.models import layers, parameters
from course_lib.models.hooks import Hooks
from course_lib.models.products import with_products
from course_lib.one_device import rematerialization


@exercise
def keep_one_value(your_gelu):
    """Checks `your_gelu(x)`: GELU that saves x and the tanh, and computes the tanh once."""

    def gelu(x):
        return 0.5 * x * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = jnp.linspace(-3, 3, 64)
    hint = (
        "A policy is a function of an operation: `policy(primitive, *shapes, **params) ->"
        " bool`."
    )
    yours = call(your_gelu, x, hint=hint)
    require(close(yours, gelu(x)), "The values are not those of GELU.")
    require(
        close(jax.grad(lambda x: your_gelu(x).sum())(x), jax.grad(lambda x: gelu(x).sum())(x)),
        "The derivative is not that of GELU.",
    )
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    saved = rematerialization.residuals(your_gelu, shape)
    num_bytes = sum(array.bytes for array in saved if array.shape == shape.shape)
    program = jax.make_jaxpr(jax.grad(lambda x: your_gelu(x).sum()))(x).jaxpr
    tanhs = sum(eqn.primitive.name == "tanh" for eqn in equations(program))
    mib = num_bytes / 2**20
    require(
        num_bytes >= 2 * 4 * 2**20,
        f"Only {mib:.0f} MiB are saved, and the tanh is computed {tanhs} times: does the policy"
        " of `jax.checkpoint` keep the tanh?",
    )
    require(
        num_bytes == 2 * 4 * 2**20,
        f"{mib:.0f} MiB are saved; two arrays of 4 MiB are enough. Is the function inside"
        " `jax.checkpoint`, and does its policy keep the tanh alone?",
    )
    require(
        tanhs == 1,
        f"The tanh is computed {tanhs} times. Its derivative uses its own result;"
        " `checkpoint_name` makes a second value of it, and only that one is kept. A policy can"
        " decide by operation instead of by name.",
    )
    return "8 MiB, and the tanh is computed once."


@exercise
def square_root(your_layers):
    """Checks `your_layers(layer, w, x)`: 64 layers of `layer(w, x) -> x`, rematerialized in
    groups and one by one.

    `w` is [64 16 16], `x` [32 16]. The backward pass may hold 16 inputs of layers at most.
    """

    def layer(w, x):
        return jnp.sin(x @ w)

    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (64, 16, 16)) / 4, jax.random.normal(keys[1], (32, 16))

    def plain(w, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]

    def yours(w, x):
        return your_layers(layer, w, x)

    hint = "Write it with two nested scans first, without `jax.checkpoint`."
    result = call(yours, w, x, hint=hint)
    require(
        close(result, plain(w, x)), "The result is not that of 64 layers, one after another."
    )
    shapes = jax.eval_shape(lambda: (w, x))
    inputs = [
        array.shape
        for array in rematerialization.residuals(yours, *shapes)
        if array.shape[-2:] == x.shape
    ]
    # a scan stacks its inputs, beside x itself; a loop saves them one by one
    stacked = [math.prod(shape[:-2]) for shape in inputs if len(shape) > 2]
    groups = max(stacked) if stacked else max(len(inputs), 1)

    def flops(fn):
        gradient = jax.grad(lambda w, x: fn(w, x).sum(), argnums=(0, 1))
        return sum(measure.flops(gradient, *shapes).total.values())

    forward = flops(plain) / 3
    passes = round(flops(yours) / forward) - 2
    require(
        not (groups == 1 and passes > 1),
        "All 64 layers are one group: while it is recomputed, 64 inputs are held. Cut it"
        " into more.",
    )
    require(passes > 1, "Nothing is recomputed: where is `jax.checkpoint`?")
    program = jax.make_jaxpr(yours)(w, x).jaxpr
    nested = any(
        inner.primitive.name == "scan" and inner.params["length"] > 1
        for outer in equations(program)
        if outer.primitive.name == "scan"
        for inner in equations(outer.params["jaxpr"].jaxpr)
    )
    require(
        groups < 64 or not nested,
        f"{groups} inputs are saved, though there are groups: only the layers are"
        " rematerialized. What does a group save?",
    )
    require(
        groups < 64,
        f"{groups} inputs are saved: each layer is a group of its own. Scan over groups of"
        " layers.",
    )
    require(
        passes <= 3,
        f"{passes} forward passes: three are enough. Nest two levels, groups and layers.",
    )
    require(
        passes == 3,
        f"{passes} forward passes: groups are recomputed, and inside of a group every layer"
        " saves all it needs. Rematerialize the layers, too.",
    )
    held = groups + 64 // groups
    require(
        held == 16,
        f"{groups} groups of {64 // groups} layers hold {held} inputs at the most. Which"
        " number of groups holds 16?",
    )
    return "16 inputs in place of 64, for a third forward pass."


def saved_by_a_layer(*modules: str) -> int:
    """Returns the bytes that a layer of width 1024 saves of 16 x 512 tokens.

    Args:
      *modules: what is rematerialized, of `rematerialization.MODULES`.
    """
    model = configs.get("155m").model
    model.update(dropout_rate=0.0, remat=modules)
    block = layers.changed_layer(model, with_products(Hooks(), flat_products=False))
    x = jax.ShapeDtypeStruct((16, 512, 1024), jnp.bfloat16)
    params = jax.eval_shape(lambda: parameters.init(jax.random.key(0), model))["block"]
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    arrays = rematerialization.residuals(lambda params, x: block(params, x, None)[0], params, x)
    return sum(array.bytes for array in arrays if "argument [0]" not in array.why)


@exercise
def depth(without, with_remat):
    """Checks how many layers of width 1024 fit into 22 GiB with 16 x 512 tokens: a prediction,
    within a tenth.
    """
    hint = "What does one more layer add to the memory, in each case?"
    predicted(without, with_remat, hint=hint)

    state, budget = 16 * 12 * 1024**2, 22 * 2**30
    measured = []
    for name, guess, num_bytes in (
        ("without rematerialization", without, saved_by_a_layer()),
        ("with rematerialized blocks", with_remat, saved_by_a_layer("Block")),
    ):
        right = budget // (state + num_bytes)
        measured.append(right)
        require(
            abs(guess / (budget // num_bytes) - 1) > 0.02,
            f"{guess} layers {name}: the state is missing, 16 bytes for each of 12 x 1024^2"
            " parameters of a layer.",
        )
        require(
            abs(guess / (budget // state) - 1) > 0.02 or num_bytes < state,
            f"{guess} layers {name}: the arrays that a layer saves are missing.",
        )
        require(
            abs(guess / right - 1) <= 0.1,
            f"{guess} layers {name} are too {'many' if guess > right else 'few'}: measured, a"
            f" layer saves {num_bytes / 2**20:,.0f} MiB beside its state.",
        )
    return (
        f"measured, {measured[0]} and {measured[1]}. Activations limit the first number,"
        " parameters and optimizer state the second."
    )
