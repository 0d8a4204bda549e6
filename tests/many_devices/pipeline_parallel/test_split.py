"""F, B and W of a layer compute what `jax.vjp` computes, and nothing twice."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib.many_devices.pipeline_parallel import split
from course_lib.models import layers, parameters
from course_lib.models.hooks import Hooks
from course_lib.models.products import with_products
from course_lib.one_device import rematerialization

B, L, D = 2, 8, 16
# Heads of two numbers could not be normalized: the gradient would cancel.
PARALLEL = {"parallel_block": True, "qk_norm": True, "num_heads": 2, "head_dim": 8}
MODELS = {
    "plain": {},
    "dropout": {"dropout_rate": 0.5},
    "remat": {"remat": ("Block",), "dropout_rate": 0.5},
    "remat by name": {"remat": ("Block",), "remat_policy": "names", "remat_names": ("qkv",)},
    "parallel": PARALLEL | {"num_kv_heads": 1},
    "rotary": {"positions": "rotary", "mlp_activation": "squared_relu", "use_bias": False},
    "gate": {
        "mlp_gate": True,
        "mlp_activation": "silu",
        "norm": "rms",
        "attention_first": True,
    },
}


@functools.cache
def cut(name):
    """Returns a layer as a function, its arguments and its split."""
    changes = {"max_seq_len": L} | MODELS[name]
    whole = one_device.small(**{f"model.{field}": new for field, new in changes.items()})
    model = FrozenConfigDict(whole.model)
    layer = layers.changed_layer(model, with_products(Hooks(), model.flat_products))
    draw = np.random.default_rng(0)
    x, dy = jnp.asarray(draw.normal(size=(2, B, L, D)), jnp.float32)
    params = jax.eval_shape(lambda: parameters.init(jax.random.key(2), model)["block"])

    def random(path, leaf):  # biases and scales start at 0 and 1, where an error could hide
        scale = leaf.shape[1] ** -0.5 if path[-1].key == "kernel" else 0.1
        moved = (path[-1].key == "scale") + scale * draw.normal(size=leaf.shape[1:])
        return jnp.asarray(moved, jnp.float32)

    params = jax.tree_util.tree_map_with_path(random, params)
    apply, key = (lambda *args: layer(*args)[0]), jax.random.key(4)
    return apply, (params, x, key), dy, split.split(apply, params, x, key)


@functools.cache
def run(name):
    """Returns output, gradients, and what is saved and passed on, and JAX's gradients."""
    apply, args, dy, programs = cut(name)

    @jax.jit
    def both(params, x, rng):
        y, saved = programs.forward(params, x, rng)
        dx, passed = programs.backward(params, saved, dy, rng)
        found = y, dx, programs.weight_gradient(params, saved, passed, rng)
        y, pull_back = jax.vjp(lambda params, x: apply(params, x, rng), params, x)
        return found, (y, *pull_back(dy)[::-1]), saved, passed

    with jax.default_matmul_precision("highest"):
        return both(*args)


def products(equations):
    """Counts matmuls in a list of equations, inside its loops and calls too."""
    count = 0
    for equation in equations:
        count += equation.primitive.name == "dot_general"
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            count += products(inner.eqns) if hasattr(inner, "eqns") else 0
    return count


def counted(programs):
    return {kind: products(program) for kind, program in programs.equations.items()}


@pytest.mark.parametrize(
    "name", [slow(n) if n in ("rotary", "gate", "remat by name") else n for n in MODELS]
)
def test_the_three_programs_compute_what_jax_computes(name):
    found, expected, *_ = run(name)
    assert not one_device.different_leaves(found, jax.device_get(expected))


@pytest.mark.parametrize("name", MODELS)
def test_every_matmul_of_the_gradient_is_in_one_program(name):
    apply, (params, x, rng), dy, programs = cut(name)

    def gradient(params, x, rng, dy):
        y, pull_back = jax.vjp(lambda params, x: apply(params, x, rng), params, x)
        return y, pull_back(dy)

    traced = jax.make_jaxpr(gradient)(params, x, rng, dy)
    counts = counted(programs)
    assert sum(counts.values()) == products(traced.jaxpr.eqns)
    # with grouped queries, q and kv apart; with a gate, a product of its own
    assert counts["F"] == 6 + (name in ("parallel", "gate"))
    if name == "plain":  # inside of attention, B has two more than W
        assert counts == {"F": 6, "B": 8, "W": 4}


def test_a_rematerialized_layer_saves_its_input_and_recomputes_in_b():
    _, (_, x, _), _, programs = cut("remat")
    *_, saved, passed = run("remat")
    assert [leaf.shape for leaf in saved] == [x.shape]
    # All but the last matmul of F again. Only W needs the fifth, attention's output, but B has
    # what it is computed from.
    assert counted(programs) == {"F": 6, "B": 8 + 5, "W": 4}
    assert not any(leaf.shape[-2:] == (L, L) for leaf in passed), "probabilities are passed on"
    assert sum(leaf.nbytes for leaf in passed) > sum(leaf.nbytes for leaf in run("plain")[3])


def test_no_weight_is_saved_and_not_more_than_jax_saves():
    apply, args, _, _ = cut("plain")
    *_, saved, passed = run("plain")
    assert all(leaf.shape[0] == B for leaf in (*saved, *passed))
    by_jax = rematerialization.residuals(lambda params, x: apply(params, x, args[2]), *args[:2])
    kept = sum(each.bytes for each in by_jax if "argument [0]" not in each.why)
    assert sum(leaf.nbytes for leaf in saved) <= kept


def test_a_mask_is_made_again_and_a_dropout_mask_is_saved_in_one_byte_each():
    plain, dropped = run("plain")[2], run("dropout")[2]
    extra = collections.Counter((leaf.shape, str(leaf.dtype)) for leaf in dropped)
    extra -= collections.Counter((leaf.shape, str(leaf.dtype)) for leaf in plain)
    assert extra[(B, L, D), "bool"] == 2
    assert not any(leaf.dtype == bool for leaf in plain)  # in whatever shape
    assert not any(leaf.shape == (L, L) for leaf in (*plain, *dropped))


def test_gradients_that_one_call_computes_together_are_cut_apart():
    @jax.jit
    def layer(weights, x):
        return jnp.tanh(x @ weights)

    weights, x = jnp.ones((4, 4)), jnp.ones((2, 4))
    programs = split.split(layer, weights, x)
    assert counted(programs) == {"F": 1, "B": 1, "W": 1}
