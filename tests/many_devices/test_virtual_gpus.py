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

pytestmark = pytest.mark.skipif(
    virtual.why_unavailable("h100") is not None, reason=str(virtual.why_unavailable("h100"))
)

BFLOAT16, FLOAT32 = 2, 4
# bytes of loss and accuracy as (sum, count); XLA may send their equal counts once, or know them
METRICS = (8, 12, 16)
STRATEGIES = {
    "data": (dict(data=8), Strategy(by="compiler")),
    "zero 1": (dict(data=8), Strategy(by="compiler", zero=1)),
    "zero 3": (dict(data=8), Strategy(by="compiler", zero=3)),
    "zero 3 by hand": (dict(data=8), Strategy(zero=3)),
    "tensor": (dict(data=1, tensor=8), Strategy(by="compiler")),
    "sequence": (dict(data=1, tensor=8), Strategy(by="compiler", sequence=True)),
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
    biases, last = count("bias") - count("norm", "bias"), count("block", "output_layer", "bias")
    kernels, scales = count("block", "kernel"), count("block", "norm", "scale")
    return types.SimpleNamespace(
        embeddings=count("embedding"),
        norms=count("norm"),
        scales=scales,
        biases=biases,
        last=last,
        kernels=kernels,
        of_output=count("kernel") - kernels,
        output_layer=count("['output_layer']") - count("block", "output_layer"),
    )


def test_data_parallelism_reduces_each_gradient_once_in_the_dtype_that_it_comes_in(p):
    """Kernels and biases have gradients in bfloat16, which are summed before they are cast."""
    found = ledger("data")
    assert moved(found, "all-reduce", "bfloat16") == BFLOAT16 * (
        p.kernels + p.of_output + p.biases
    )
    assert moved(found, "all-reduce", "float32") - FLOAT32 * (p.embeddings + p.norms) in METRICS
    assert found.payload() == found.payload("all-reduce", "data")


@pytest.mark.slow
def test_zero_one_scatters_each_gradient_in_its_dtype_and_gathers_the_new_parameters_in_theirs(
    p,
):
    found = ledger("zero 1")
    assert moved(found, "reduce-scatter", "bfloat16") == BFLOAT16 * (
        p.kernels + p.of_output + p.last
    )
    assert moved(found, "reduce-scatter", "float32") == FLOAT32 * (p.embeddings + p.norms)
    assert moved(found, "all-gather", "float32") == FLOAT32 * (
        p.kernels + p.of_output + p.last + p.embeddings + p.norms
    )
    # Biases without the model's width are whole everywhere.
    assert moved(found, "all-reduce", "bfloat16") == BFLOAT16 * (p.biases - p.last)
    assert moved(found, "all-reduce", "float32") in METRICS
    assert found.payload() == sum(
        found.payload(kind, "data") for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )


@pytest.mark.parametrize(
    "name", ["zero 3", pytest.param("zero 3 by hand", marks=pytest.mark.slow)]
)
def test_every_kernel_is_gathered_in_the_dtype_that_the_layers_compute_in_and_none_in_another(
    name, p
):
    found, by_hand = ledger(name), name.endswith("hand")
    # For each pass in the layers, once around them, and with them the biases that are added
    # last.
    assert moved(found, "all-gather", "bfloat16") == BFLOAT16 * (
        2 * p.kernels + p.of_output + p.last
    )
    # The rest belongs to no product. By hand the scales of norms are gathered once, and kept.
    assert moved(found, "all-gather", "float32") == FLOAT32 * (
        p.embeddings + p.norms + (0 if by_hand else p.scales)
    )
    assert found.payload("all-gather") == moved(found, "all-gather", "bfloat16") + moved(
        found, "all-gather", "float32"
    )


def test_zero_three_gathers_a_layer_when_it_runs_and_scatters_every_gradient_once(p):
    found = ledger("zero 3")
    assert moved(found, "all-gather", "bfloat16", inside=True) == BFLOAT16 * (
        2 * p.kernels + p.last
    )
    assert moved(found, "reduce-scatter", "bfloat16") == BFLOAT16 * (
        p.kernels + p.of_output + p.last
    )
    assert moved(found, "reduce-scatter", "float32") == FLOAT32 * (p.embeddings + p.norms)
    # Biases without the model's width are whole everywhere.
    assert moved(found, "all-reduce", "bfloat16") == BFLOAT16 * (p.biases - p.last)
    assert moved(found, "all-reduce", "float32") in METRICS
    assert found.payload() == sum(
        found.payload(kind, "data") for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )


def sizes():
    """Returns the tokens, the numbers of a residual [B, L, D], and the number of layers."""
    whole = large()
    tokens = 8 * whole.data.seq_len
    return tokens, tokens * whole.model.hidden_size, whole.model.num_layers


def test_tensor_parallelism_reduces_four_residuals_a_block():
    tokens, residual, layers = sizes()
    found = ledger("tensor")
    assert (
        moved(found, "all-reduce", "bfloat16", inside=True) == BFLOAT16 * 4 * residual * layers
    )
    # Around the layers: the gradient of the output layer's input; the embedding, in float32;
    # and two numbers per token in the loss. The largest logit and its place come from each
    # device.
    assert moved(found, "all-reduce", "bfloat16", inside=False) == BFLOAT16 * residual
    assert moved(found, "all-reduce", "float32") == FLOAT32 * (residual + 2 * tokens)
    assert (
        moved(found, "all-gather", "float32")
        == moved(found, "all-gather", "int32")
        == FLOAT32 * 8 * tokens
    )
    assert found.payload() == found.payload("all-reduce", "tensor") + found.payload(
        "all-gather", "tensor"
    )


@pytest.mark.slow
def test_along_the_sequence_it_scatters_four_residuals_a_block_and_gathers_six(p):
    """By hand four and four. The compiler gathers the inputs of the two column products again
    for the backward pass.
    """
    _, residual, layers = sizes()
    found = ledger("sequence")
    assert (
        moved(found, "reduce-scatter", "bfloat16", inside=True)
        == BFLOAT16 * 4 * residual * layers
    )
    assert (
        moved(found, "all-gather", "bfloat16", inside=True) == BFLOAT16 * 6 * residual * layers
    )
    # Around the layers it brings parameters to the tokens, where these are more: here the
    # tables, and the output layer.
    output, table = p.output_layer, p.embeddings - count("pos_emb")
    assert moved(found, "all-gather", "bfloat16", inside=False) == BFLOAT16 * output
    assert moved(found, "reduce-scatter", "bfloat16", inside=False) == BFLOAT16 * output
    # of the positions, the gradient
    assert moved(found, "all-gather", "float32") == FLOAT32 * p.embeddings
    assert moved(found, "reduce-scatter", "float32") == FLOAT32 * table
    # Each device has the gradient of norms, and of biases that are added last, from its part of
    # the sequence.
    assert moved(found, "all-reduce", "bfloat16") == BFLOAT16 * p.last
    assert moved(found, "all-reduce", "float32") - FLOAT32 * p.norms in METRICS
    assert found.payload() == sum(
        found.payload(kind, "tensor") for kind in ("all-gather", "reduce-scatter", "all-reduce")
    )


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
    ("by", "minibatches"),
    [slow("hand", 1), ("hand", 4), slow("compiler", 1)],
)
def test_zero_two_never_holds_more_than_an_nth_of_the_gradients_and_one_layers(by, minibatches):
    """Compared with stage 1 by hand, which holds all of them: the compiler may scatter early in
    stage 1, too. A layer's gradient is whole until it is scattered; two may be, while one
    travels.
    """
    stage_1, layers = gradient_memory("hand", 1, minibatches)
    stage_2, _ = gradient_memory(by, 2, minibatches)
    assert stage_1 - stage_2 > 7 / 8 * layers - 2 * layers / 8, (stage_1, stage_2, layers)
