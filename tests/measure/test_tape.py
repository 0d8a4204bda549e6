"""Laws of the tape of a step: what it holds at each instruction adds up, and is told apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hlo_text import program
from shapes import DEVICES, NO_VIRTUAL, array, needs_virtual, place
from slow_cases import slow

from course_lib.measure import heap, memory, tape, virtual
from course_lib.measure.tape import KINDS, _Kinds

OLD = jax.__version_info__ < (0, 10)
pytestmark = pytest.mark.skipif(OLD, reason="XLA writes no lifetimes before JAX 0.10")
N, B, D, F = 4, 4096, 128, 512
WEIGHT_BYTES = 4 * 2 * N * D * F
HIDDEN_BYTES = 4 * B * F  # of one layer


@functools.cache
def lowered(device, remat=False, scan=False, minibatches=1):
    def layer(x, w):
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ w["up"]) @ w["down"]

    layer = jax.checkpoint(layer) if remat else layer

    def loss(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
        else:
            for w in params:
                x = layer(x, w)
        with jax.named_scope("loss"):
            return jnp.mean(x**2)

    def step(params, mu, batch):
        parts = batch.reshape(minibatches, -1, D)
        zeros = jax.tree.map(jnp.zeros_like, params)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

        grads = (
            jax.lax.scan(add, zeros, parts)[0]
            if minibatches > 1
            else jax.grad(loss)(params, batch)
        )
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, mu), mu

    params = [{"up": array(D, F), "down": array(F, D)} for _ in range(N)]
    if scan:
        params = {"up": array(N, D, F), "down": array(N, F, D)}
    arguments = place((params, params, array(B, D)), device)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments)


@functools.cache
def read(device, **options):
    """Returns the tape of a step, all of it."""
    return tape(lowered(device, **options), points=10**6)


def total(found):
    return sum(np.array(level) for level in found.bytes.values())


CASES = [{}, {"scan": True, "remat": True}, slow({"scan": True}), slow({"minibatches": 4})]


@pytest.mark.parametrize("options", CASES, ids=str)
@DEVICES
def test_its_highest_moment_is_the_peak_that_the_compiler_reports(device, options):
    found = read(device, **options)
    reported = memory(lowered(device, **options)).peak
    assert found.peak == total(found).max()
    assert found.peak == pytest.approx(reported, rel=1e-3)


AGREEING = [
    "NNX",
    "constant",
    *(slow(n) for n in programs.FOREIGN if n not in ("NNX", "constant")),
]
TARGETS = ["here", *(slow(name) for name in ("t4", "a5000", "h100"))]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*AGREEING, "shard_map"])
def test_all_readers_agree_on_the_peak_of_anybody_s_program(name, target):
    if target != "here" and NO_VIRTUAL:
        pytest.skip(NO_VIRTUAL)
    devices = jax.devices()[:2] if target == "here" else virtual.devices(target, 2)
    if name == "shard_map":
        lowered = programs.lower_on_mesh(devices)
    else:
        lowered = programs.lower(name, lambda shapes: place(shapes, target))
    peak = memory(lowered).peak
    found = heap(lowered)
    assert found.peak == sum(a.bytes for a in found.arrays) == pytest.approx(peak, rel=5e-3)
    assert tape(lowered).peak == pytest.approx(peak, rel=5e-3)


@DEVICES
def test_a_constant_that_a_function_captures_is_there_from_first_to_last_instruction(device):
    program = programs.lower("constant", lambda shapes: place(shapes, device))
    # it, and the arguments
    assert total(tape(program, points=10**6)).min() >= 3 * programs.TABLE.nbytes


@DEVICES
def test_donated_parameters_and_moments_are_there_from_the_first_to_the_last_instruction(
    device,
):
    found = read(device)
    for kind in ("parameters", "optimizer state"):
        assert min(found.bytes[kind]) > 0.9 * WEIGHT_BYTES
        assert max(found.bytes[kind]) <= WEIGHT_BYTES


@DEVICES
def test_activations_pile_up_forward_and_are_freed_backward(device):
    found = read(device)
    hidden = np.array(found.bytes["MLP"])
    turn = found.backward
    assert hidden[0] == 0 and hidden[turn] >= 0.8 * N * HIDDEN_BYTES
    assert hidden[-1] < HIDDEN_BYTES
    assert 0 < turn < len(hidden)


@needs_virtual
def test_rematerialized_layers_hold_one_layer_at_a_time_and_run_forward_first():
    """For a GPU: XLA's CPU compiler undoes rematerialization in some versions."""
    rematerialized = read("a5000", scan=True, remat=True)
    hidden = np.array(rematerialized.bytes["MLP"])
    assert HIDDEN_BYTES <= max(hidden[: rematerialized.backward])
    assert max(hidden) < 3 * HIDDEN_BYTES < max(read("a5000").bytes["MLP"])


def test_minibatches_divide_the_activations_and_keep_a_tree_of_gradients():
    if jax.default_backend() == "gpu":
        pytest.skip("on an H200 it was 0.61 in place of 0.4, which is not explained")
    whole, parts = read("here"), read("here", minibatches=4)
    assert max(parts.bytes["MLP"]) < 0.4 * max(whole.bytes["MLP"])
    for found in (parts, read("here", scan=True)):
        assert 0.9 * WEIGHT_BYTES < max(found.bytes["gradients"]) < 2.1 * WEIGHT_BYTES


def test_kinds_come_in_the_order_of_the_picture_and_only_those_that_occur():
    kinds = list(read("here").bytes)
    assert kinds == [kind for kind in KINDS if kind in kinds]
    assert {"parameters", "optimizer state", "MLP", "gradients"} <= set(kinds)
    assert "attention" not in kinds


def test_a_shortened_tape_keeps_its_peak_and_where_the_backward_pass_begins():
    long, short = read("here"), tape(lowered("here"), points=10)
    assert all(len(level) == 10 for level in short.bytes.values())
    assert short.peak == long.peak == total(short).max()
    assert abs(short.backward - 10 * long.backward / len(total(long))) <= 1


def test_the_backward_pass_begins_with_a_product_not_with_zeros_of_the_same_scope():
    text = """
HloModule step

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4] parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[4,4] broadcast(%zero), metadata={op_name="BACK"}
  %ahead = f32[4,4] dot(%x, %zeros), metadata={op_name="jvp(f)/dot_general"}
  %turned = f32[4,4] copy(%ahead), metadata={op_name="BACK"}
  ROOT %back = f32[4,4] dot(%ahead, %turned), metadata={op_name="BACK"}
}
"""
    module = program(text.replace("BACK", "transpose(jvp(f))/dot_general")).module
    kinds = _Kinds(module)
    assert [i.name for i in module.entry.instructions if kinds.is_backward(i.name)] == ["back"]
    assert not kinds.is_backward("an instruction that the text does not name")
    forward = tape(jax.jit(lambda x: jnp.sin(x) @ x.T).lower(array(64, 64)))
    assert forward.backward is None


@DEVICES
def test_the_place_of_what_is_not_donated_is_there_from_the_first_instruction(device):
    def step(state):
        params, mu = state
        return jax.tree.map(lambda w, m: w - m, params, mu), mu

    state = place([{"up": array(D, F), "down": array(F, D)}] * 2, device)
    size = 2 * 4 * D * F
    for donated, copies in ((0, 0), ((), 2)):
        lowered = jax.jit(step, donate_argnums=donated).lower(state)
        found, table = tape(lowered), 8 * 4  # the addresses of the results
        assert min(found.bytes["results"]) == copies * size + table
        assert found.bytes["parameters"][0] == found.bytes["optimizer state"][0] == size
        assert found.peak == pytest.approx(memory(lowered).peak, rel=1e-3)


@DEVICES
def test_without_scopes_the_functions_that_were_called_name_the_kinds(device):
    def loss(params, x):
        return (programs.attention(*(programs.mlp(params, x),) * 3) ** 2).mean()

    shapes = place((programs.layers(2, 64, 256), array(512, 64)), device)
    found = tape(jax.jit(jax.grad(loss)).lower(*shapes))
    assert max(found.bytes["attention"]) >= 4 * 512 * 512
    assert max(found.bytes["MLP"]) >= 2 * 4 * 512 * 256
    assert "logits and loss" not in found.bytes


def test_a_tape_tells_arguments_of_any_name_apart():
    def step(weights, moments, tokens):
        grads = jax.grad(lambda w: (jnp.tanh(tokens @ w["up"]) @ w["down"]).sum())(weights)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda w, m: w - m, weights, moments), moments

    weights = {"up": array(D, F), "down": array(F, D)}
    size = 4 * 2 * D * F
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(weights, weights, array(B, D))
    named = {"parameters": "weights", "optimizer state": "moments"}
    found = tape(lowered, arguments=named)
    assert found.bytes["parameters"][0] == found.bytes["optimizer state"][0] == size
    assert max(found.bytes["gradients"]) > 0
    unknown = tape(lowered)
    assert unknown.peak == found.peak and "parameters" not in unknown.bytes
    for wrong in ({"parameters": "wieghts"}, {"weights": "weights"}):
        with pytest.raises(ValueError, match="arguments=.* must have kinds of"):
            tape(lowered, arguments=wrong)
