"""The gradient that one device computes, with which every parallel strategy is compared.

Float32 at the highest matmul precision, dropout off, plain gradients. Labels carry unequal
weights, so that the devices' means differ in weight: a mean of means would show.
"""

import functools
import math

import jax
import numpy as np
import pytest
from ml_collections import FrozenConfigDict

from course_lib import configs, training
from course_lib.many_devices import meshes, strategies
from course_lib.measure import virtual
from course_lib.one_device import gradient_accumulation
from course_lib.text import data

# of a leaf's norm: float32 has 6e-8, and sums of a few thousand terms in another order lose two
# digits
CLOSE = 1e-5
# of the whole gradient's norm: leaves below are zero in theory, such as the bias of the keys
ZERO = 1e-7

needs_h100 = pytest.mark.skipif(
    virtual.why_unavailable("h100") is not None, reason=str(virtual.why_unavailable("h100"))
)


# All that Llama's models have, with tied embeddings, as the small ones have them. Heads of two
# numbers would turn by one angle, whatever the base.
LLAMA = {"model.hidden_size": 32, "model.head_dim": 4, "model.num_heads": 8}
LLAMA |= {"model.num_kv_heads": 4}
LLAMA |= {"model.norm": "rms", "model.norm_epsilon": 1e-3, "model.attention_first": True}
LLAMA |= {"model.mlp_gate": True, "model.mlp_activation": "silu", "model.mlp_size": 24}
LLAMA |= {"model.positions": "rotary", "model.rotary_base": 50.0, "model.use_bias": False}
LLAMA |= {"model.tied_embeddings": True}
UNTIED = LLAMA | {"model.tied_embeddings": False}


def small(**changes):
    """Returns a configuration of a Transformer that compiles in a second, with plain SGD."""
    whole = configs.get("cpu")
    whole.model.update(
        num_layers=2, hidden_size=16, head_dim=2, num_heads=8, vocab_size=32, num_outputs=32
    )
    whole.model.update(max_seq_len=16, scan_layers=True)
    whole.optimizer.update(
        name="sgd", learning_rate=0.1, weight_decay=0.0, schedule="constant", warmup_steps=0
    )
    whole.optimizer.update(clip_norm=0.0)
    whole.data.update(batch_size=8, seq_len=16)
    whole.update_from_flattened_dict(changes)
    return whole


def jit(fn):
    """Returns a function that is compiled for simulated devices: quickly, not well."""
    return jax.jit(fn, compiler_options=quickly())


def call(jitted, *args):
    """Calls a function that somebody else gave to `jax.jit`, compiled as quickly, and for this
    call alone.
    """
    return jitted.lower(*args).compile(compiler_options=quickly())(*args)


@functools.cache
def quickly():
    """Returns options without XLA:CPU's emitters of fusions, and without the library that hides
    memory.

    They take as long to compile as all else together, for programs that run for milliseconds
    here, and what is compared is what the programs compute, and send. XLA of JAX 0.12 has no
    others any more.
    """
    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        options = {}
    return options | virtual.NO_FUSED_LIBRARY


def batch(whole):
    """Returns random tokens whose labels weigh 0, 1 or 2, most of the zeros in the first
    sequences; on no device in particular.
    """
    draw = np.random.default_rng(1)
    shape = whole.data.batch_size, whole.data.seq_len
    tokens = draw.integers(0, whole.model.vocab_size, (2, *shape), np.int32)
    weights = draw.integers(0, 3, shape).astype(np.float32)
    weights[: shape[0] // 2, 4:] = 0
    return data.Batch(*tokens, weights)


@functools.cache
def reference(frozen):
    """Returns parameters, gradient and metrics of one device."""
    run = training.build(frozen)
    params = call(run.init, jax.random.key(0)).params
    with jax.default_matmul_precision("highest"):
        grads, metrics = jit(gradient_accumulation.gradient(run.loss_fn))(
            params, batch(frozen), None
        )
    return *jax.device_get((params, grads)), metrics


def grid(**axes):
    """Returns a mesh of the first simulated devices."""
    return meshes.make(axes, jax.devices("cpu")[: math.prod(axes.values())])


def compiled(whole, axes, chosen):
    """Returns a strategy's gradient function, compiled, and its mesh."""
    mesh = grid(**axes)
    state, abstract_batch = strategies.build(whole, mesh, chosen).abstract()
    grad_fn = jit(strategies.gradient(whole, mesh, chosen))
    return grad_fn.lower(state.params, abstract_batch, jax.random.key(0)).compile(), mesh


def check_gradient(whole, axes, chosen, alike=None):
    """Compares a strategy's gradient and metrics with one device's, which may be those of a
    configuration `alike`.
    """
    params, expected, expected_metrics = reference(FrozenConfigDict(alike or whole))
    grad_fn = jit(strategies.gradient(whole, grid(**axes), chosen))
    with jax.default_matmul_precision("highest"):
        grads, metrics = grad_fn(params, batch(whole), jax.random.key(2))
    assert not different_leaves(grads, expected)
    metrics, expected_metrics = map(training.mean_metrics, (metrics, expected_metrics))
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)


def different_leaves(found, expected):
    """Returns the leaves that differ: by more than CLOSE of their norm, or of ZERO of the norm
    of all.
    """
    whole = math.sqrt(sum(float(np.vdot(leaf, leaf)) for leaf in jax.tree.leaves(expected)))
    different = {}
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(jax.device_get(found)),
        strict=True,
    ):
        norm, distance = np.linalg.norm(leaf), np.linalg.norm(leaf - other)
        if not distance <= max(CLOSE * norm, ZERO * whole):
            different[jax.tree_util.keystr(path)] = distance / norm if norm else distance
    return different
