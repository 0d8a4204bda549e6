"""Laws of the bytes that strategies send on GPUs, and of their dtypes: above all by the
compiler.
"""

import functools
import math
import types

import jax
import one_device
import pytest
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import meshes, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import virtual

pytestmark = one_device.needs_h100

BFLOAT16, FLOAT32 = 2, 4
# bytes of loss and accuracy as (sum, count); XLA may send their equal counts once, or know them
METRICS = (8, 12, 16)
STRATEGIES = {
    "data": (dict(data=8), Strategy(by="compiler")),
    "zero 3": (dict(data=8), Strategy(by="compiler", zero=3)),
    "zero 3 by hand": (dict(data=8), Strategy(zero=3)),
    "tensor": (dict(data=1, tensor=8), Strategy(by="compiler")),
}


def large():
    """Returns a model whose activations, 1,024 tokens per device, and kernels are of like size,
    as it is never run.
    """
    whole = one_device.small(
        **{"model.dtype": "bfloat16", "model.hidden_size": 512, "model.head_dim": 64}
    )
    whole.model.update(vocab_size=256, num_outputs=256, max_seq_len=128)
    whole.data.seq_len = 128
    return whole


@functools.cache
def ledger(name):
    """Returns what a step with plain SGD sends: a few seconds each, and shared by the tests."""
    axes, chosen = STRATEGIES[name]
    whole, grid = large(), meshes.make(axes, virtual.devices("h100", math.prod(axes.values())))
    whole.data.batch_size = 8 * axes["data"]
    run = strategies.build(whole, grid, chosen)
    return measure.ledger(virtual.compile(run.train_step.lower(*run.abstract())), grid)


def moved(found, kind, dtype, inside=None):
    """Returns the payload in bytes; inside of the layers, which run as a loop, or outside; or
    both.
    """
    layers = large().model.num_layers
    return sum(
        entry.payload_bytes * entry.executions
        for entry in found.entries
        if (entry.kind, entry.dtype) == (kind, dtype)
        and inside in (None, entry.executions == layers)
    )


def count(*words):
    """Returns the number of parameters with all of these words in their path."""
    params = jax.eval_shape(training.build(large()).init, jax.random.key(0)).params
    paths = [
        (jax.tree_util.keystr(path), leaf.size)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    return sum(size for path, size in paths if all(word in path for word in words))


@pytest.fixture(scope="module")
def p():
    """Numbers of parameters. `biases` are those of products; the `last` of them are added to
    the residual.
    """
    kernels, last = count("block", "kernel"), count("block", "output_layer", "bias")
    return types.SimpleNamespace(
        embeddings=count("embedding"),
        norms=count("norm"),
        scales=count("block", "norm", "scale"),
        biases=count("bias") - count("norm", "bias"),
        last=last,
        kernels=kernels,
        of_output=count("kernel") - kernels,
        scattered=count("kernel") + last,
    )


# Kernels and biases have gradients in bfloat16, which are summed before they are cast; biases
# without the model's width are whole everywhere. A layer's parameters are gathered in the dtype
# that it computes in, once for each pass, and with them the biases that are added last; the
# scales of norms belong to no product. By hand these are gathered once, and kept.
EXPECTED = {
    "data": lambda p: {
        ("all-reduce", "bfloat16"): BFLOAT16 * (p.kernels + p.of_output + p.biases),
        ("all-reduce", "float32"): FLOAT32 * (p.embeddings + p.norms),
    },
    "zero 3": lambda p: {
        ("all-gather", "bfloat16"): BFLOAT16 * (p.kernels + p.scattered),
        ("all-gather", "float32"): FLOAT32 * (p.embeddings + p.norms + p.scales),
        ("reduce-scatter", "bfloat16"): BFLOAT16 * p.scattered,
        ("reduce-scatter", "float32"): FLOAT32 * (p.embeddings + p.norms),
        ("all-reduce", "bfloat16"): BFLOAT16 * (p.biases - p.last),
    },
    "zero 3 by hand": lambda p: {
        ("all-gather", "bfloat16"): BFLOAT16 * (p.kernels + p.scattered),
        ("all-gather", "float32"): FLOAT32 * (p.embeddings + p.norms),
    },
}


@pytest.mark.parametrize("name", ["data", "zero 3", slow("zero 3 by hand")])
def test_each_parameter_and_gradient_is_sent_once_in_its_dtype(name, p):
    found, expected = ledger(name), EXPECTED[name](p)
    summed = moved(found, "all-reduce", "float32") - expected.pop(("all-reduce", "float32"), 0)
    for (kind, dtype), size in expected.items():
        assert moved(found, kind, dtype) == size, (kind, dtype)
    if name != "zero 3 by hand":
        assert summed in METRICS
        assert found.payload() == sum(expected.values()) + moved(found, "all-reduce", "float32")
        assert found.payload() == found.payload(axis="data")


def test_zero_three_gathers_a_layer_when_it_runs(p):
    inside = moved(ledger("zero 3"), "all-gather", "bfloat16", inside=True)
    assert inside == BFLOAT16 * (2 * p.kernels + p.last)


def sizes():
    """Returns the tokens, the numbers of a residual [B, L, D], and the number of layers."""
    model, tokens = large().model, 8 * large().data.seq_len
    return tokens, tokens * model.hidden_size, model.num_layers


def test_tensor_parallelism_reduces_four_residuals_a_block():
    tokens, residual, layers = sizes()
    found = ledger("tensor")
    inside, outside = (moved(found, "all-reduce", "bfloat16", where) for where in (True, False))
    assert inside == BFLOAT16 * 4 * residual * layers
    # Around the layers: the gradient of the output layer's input; the embedding, in float32;
    # and two numbers per token in the loss. The largest logit and its place come from each
    # device.
    assert outside == BFLOAT16 * residual
    assert moved(found, "all-reduce", "float32") == FLOAT32 * (residual + 2 * tokens)
    for dtype in ("float32", "int32"):
        assert moved(found, "all-gather", dtype) == FLOAT32 * 8 * tokens
    kinds = "all-reduce", "all-gather"
    assert found.payload() == sum(found.payload(kind, "tensor") for kind in kinds)


@functools.cache
def gradient_memory(by, stage, minibatches):
    """Returns the temporaries of the gradient of eight rematerialized layers, and the bytes of
    the layers' gradients.
    """
    whole, grid = large(), meshes.make({"data": 8}, virtual.devices("h100", 8))
    whole.model.update(num_layers=8, scan_layers=True, remat=("Block",))
    whole.data.batch_size = 32
    whole.training.num_minibatches = minibatches
    chosen = Strategy(by=by, zero=stage)
    state, batch = strategies.build(whole, grid, chosen).abstract()
    grad_fn = jax.jit(strategies.gradient(whole, grid, chosen))
    compiled = virtual.compile(grad_fn.lower(state.params, batch, jax.random.key(0)))
    layers = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params["block"]))
    return compiled.memory_analysis().temp_size_in_bytes, layers


@pytest.mark.parametrize(
    ("by", "minibatches"), [slow("hand", 1), ("hand", 4), slow("compiler", 1)]
)
def test_zero_two_never_holds_more_than_an_nth_of_the_gradients_and_one_layers(by, minibatches):
    """Compared with stage 1 by hand, which holds all of them: the compiler may scatter early in
    stage 1, too. A layer's gradient is whole until it is scattered; two may be, while one
    travels.
    """
    stage_1, layers = gradient_memory("hand", 1, minibatches)
    stage_2, _ = gradient_memory(by, 2, minibatches)
    assert stage_1 - stage_2 > 7 / 8 * layers - 2 * layers / 8, (stage_1, stage_2, layers)
