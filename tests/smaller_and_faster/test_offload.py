"""Laws of offload."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_run
from slow_cases import slow

from course_lib import configs, measure, training
from course_lib.lessons import check
from course_lib.many_devices import meshes, strategies
from course_lib.measure import GIB, hardware, virtual
from course_lib.program import loop
from course_lib.smaller_and_faster import offload
from course_lib.text.data import Batch

needs_virtual = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason=str(virtual.why_unavailable())
)
needs_host = pytest.mark.skipif(
    offload.why_unavailable() is not None, reason=str(offload.why_unavailable())
)
N, D = 16, 4096  # layers and width of the large example
OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "lion": optax.lion(1e-2),
}


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax raises a float to the power of an int32 step count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def example_params():
    draw = np.random.default_rng(0)
    kernel, bias, embed = (
        jnp.asarray(draw.normal(size=shape), jnp.float32)
        for shape in ((3, 5, 7), (3, 7), (11, 5))
    )
    return {"block": {"kernel": kernel, "bias": bias}, "embed": embed}


def after_steps(optimizer):
    """Returns parameters and optimizer state after three steps with given gradients."""
    params, grads = example_params(), example_params()
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, i):
        given = jax.tree.map(lambda p: jnp.cos(i * p), grads)
        updates, state = optimizer.update(given, state, params)
        return optax.apply_updates(params, updates), state

    for i in (1.0, 2.0, 3.0):
        params, state = step(params, state, i)
    return params, state


def memory_kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


# The streamed update.


@needs_host
@pytest.mark.parametrize("name", ["adamw", "lion", slow("momentum"), slow("adam")])
def test_a_streamed_optimizer_makes_the_updates_of_the_same_optimizer(name):
    ordinary = after_steps(OPTIMIZERS[name])
    params, state = streamed = after_steps(offload.streamed(OPTIMIZERS[name]))
    assert jax.tree.structure(ordinary) == jax.tree.structure(streamed)
    for leaf, expected in zip(*map(jax.tree.leaves, (streamed, ordinary)), strict=True):
        # equal operations; XLA:CPU may fuse them differently, which rounds the last bit
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(expected), rtol=1e-6, atol=1e-6)
    # moments stay on the host, and the count of steps on the device
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape]
    counts = [leaf for leaf in jax.tree.leaves(state) if not leaf.shape]
    assert memory_kinds(moments) == {"pinned_host"}
    assert memory_kinds((params, counts)) == {"device"}


@needs_host
def test_a_norm_over_all_gradients_belongs_in_front():
    clip, adam = optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)
    ordinary = after_steps(optax.chain(clip, adam))[0]
    in_front = after_steps(optax.chain(clip, offload.streamed(adam)))[0]
    inside = after_steps(offload.streamed(optax.chain(clip, adam)))[0]
    np.testing.assert_allclose(in_front["embed"], ordinary["embed"], rtol=1e-6)
    assert not np.allclose(inside["embed"], ordinary["embed"], rtol=1e-3)


@needs_host
def test_what_cannot_be_streamed_is_refused():
    optimizer, params = offload.streamed(optax.adam(1e-2)), example_params()
    uneven = {"block": [jnp.ones((3, 2)), jnp.ones((4, 2))]}
    for given, state, message in (
        ({"w": jnp.ones(3)}, optimizer.init({"w": jnp.ones(3)}), r"stacked=\('block',\)"),
        (uneven, optimizer.init(uneven), "leaves all have the same number"),
        (params, optax.adam(1e-2).init(params), "must have it in the host"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.update(given, state)


def test_where_jax_has_no_host_memory_nothing_is_offloaded_in_silence(monkeypatch):
    monkeypatch.setattr(offload, "why_unavailable", lambda: "this JAX leaves it on the device")
    for offloads in (offload.to_host, offload.streamed(optax.adam(1e-2)).init):
        with pytest.raises(RuntimeError, match="nothing can be offloaded here: this JAX"):
            offloads(example_params())


@pytest.mark.skipif(
    offload.why_no_host_compute() is not None, reason=str(offload.why_no_host_compute())
)
def test_the_host_computes_a_part_of_a_program_and_keeps_its_results():
    halve = offload.on_host(lambda x: (x / 2, x.astype(jnp.bfloat16)))
    half, rounded = jax.jit(lambda x: halve(offload.to_host(x)))(jnp.arange(4.0))
    assert memory_kinds((half, rounded)) == {"pinned_host"}
    np.testing.assert_array_equal(half, jnp.arange(4.0) / 2)


def test_where_the_host_computes_nothing_the_error_says_why(monkeypatch):
    monkeypatch.setattr(offload, "why_no_host_compute", lambda: "JAX 0.10 and newer can")
    with pytest.raises(RuntimeError, match="host's processor cannot.*JAX 0.10 and newer can"):
        offload.on_host(jnp.negative)


def chosen(values, rate, link):
    return [name for name, (flops, size) in values.items() if 2 * size / link < flops / rate]


def test_names_come_in_any_collection_of_texts(capsys):
    check.what_to_offload(lambda *args: iter(chosen(*args)))  # it can be read only once
    assert capsys.readouterr().out.startswith("✓ Right")


# Formulas.


def test_a_streamed_update_fetches_what_the_optimizer_keeps_per_parameter():
    params = jax.eval_shape(example_params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, per_parameter in (("momentum", 4), ("adam", 8), ("adamw", 8), ("lion", 4)):
        assert offload.bytes_each_way(OPTIMIZERS[name], params) == per_parameter * size


def test_break_even_on_three_links():
    a5000, h100 = (hardware.get(name).peak("bfloat16") for name in ("a5000", "h100"))
    pcie4, pcie5, c2c = map(hardware.host_link, ("pcie4", "pcie5", "nvlink-c2c"))
    tokens = [offload.break_even_tokens(*pair) for pair in ((a5000, pcie4), (h100, pcie5))]
    np.testing.assert_allclose(tokens, [4_625, 20_604], rtol=1e-3)
    # a host's memory serves both directions: it is a limit below twice the link
    for memory, most in ((2 * c2c.bandwidth, 2_930), (546e9, 4_830)):
        tokens = offload.break_even_tokens(h100, c2c, host_memory=memory)
        np.testing.assert_allclose(tokens, most, rtol=1e-3)
    # Adam on the host: a quarter of the bytes on the link, twice those of the host's memory
    on_host = functools.partial(
        offload.break_even_tokens, h100, bytes_each_way=2, host_bytes=32
    )
    np.testing.assert_allclose(on_host(pcie5), 20_604 / 4, rtol=1e-3)
    np.testing.assert_allclose(on_host(c2c, host_memory=546e9), 2 * 4_830, rtol=1e-3)


# Compiled for a GPU that is not there.


def compiled_adam(optimizer):
    shapes = {"block": {"w": jax.ShapeDtypeStruct((N, D, D), jnp.float32)}}
    state = virtual.shapes(optimizer.init, shapes)
    arguments = virtual.abstract((shapes, state, shapes), virtual.devices("a5000")[0])

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates  # in place of gradients

    lowered = step.lower(*arguments)
    return virtual.compile(lowered), measure.tape(lowered)


@needs_virtual
def test_streamed_moments_need_one_layer_of_device_memory_and_cross_the_link_twice():
    ordinary, streamed = optax.adam(1e-3), offload.streamed(optax.adam(1e-3))
    memory = {}
    for name, optimizer in (("device", ordinary), ("streamed", streamed)):
        compiled, tape = compiled_adam(optimizer)
        need = measure.memory(compiled)
        memory[name] = need.arguments + need.outputs - need.aliased + need.temporaries
        sent = measure.host_traffic(compiled)
        assert tape.peak == pytest.approx(memory[name], rel=0.01)  # arrays on the host are not
    assert memory["device"] == pytest.approx(4 * GIB, rel=1e-3)
    one_layer = 2 * D * D * 4  # both moments
    assert memory["streamed"] < 2 * GIB + 2.5 * one_layer
    assert need.host == pytest.approx(2 * GIB, rel=1e-3)
    predicted = offload.bytes_each_way(
        ordinary, {"w": jax.ShapeDtypeStruct((N, D, D), jnp.float32)}
    )
    assert sent.to_device == pytest.approx(predicted, rel=1e-3)
    assert sent.to_host == pytest.approx(predicted, rel=1e-3)
    assert measure.traffic(compiled).by_kind()["offload"] == sent.to_host + sent.to_device


# As an option of the train step.


def small_config(**changes):
    config = configs.get("cpu")
    config.model.update(num_layers=2, hidden_size=32, num_heads=1, max_seq_len=16)
    config.model.update(vocab_size=64, num_outputs=64, scan_layers=True)
    config.data.update(batch_size=2, seq_len=16)
    config.optimizer.update(offload=True)
    config.update_from_flattened_dict(changes)
    return config


def steps_of(run):
    state = run.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 64)
    for _ in range(2):
        state, _ = run.train_step(state, Batch(tokens, tokens, jnp.ones((2, 16))))
    return state


@pytest.mark.slow
@needs_host
def test_a_run_with_offload_trains_like_one_without_on_both_ways_to_build_it():
    # moments are compared: they are linear in gradients, or in their squares
    ordinary = steps_of(training.build(small_config(**{"optimizer.offload": False})))
    offloaded = steps_of(training.build(small_config()))
    mesh = meshes.make({"data": 1}, jax.devices()[:1])
    on_mesh = steps_of(strategies.build(small_config(), mesh))
    assert memory_kinds(on_mesh.opt_state) == {"pinned_host", "device"}
    for state in (offloaded, on_mesh):
        for leaf, expected in zip(
            jax.tree.leaves(state.opt_state), jax.tree.leaves(ordinary.opt_state), strict=True
        ):
            leaf, expected = np.asarray(leaf), np.asarray(expected)
            scale = np.linalg.norm(expected) + 1e-6
            assert np.linalg.norm(leaf - expected) <= 1e-3 * scale


@needs_host
def test_a_run_s_shapes_say_what_is_on_the_host():
    state, _ = training.build(small_config()).abstract()
    kinds = {leaf.sharding and leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}
    assert kinds == {None, "pinned_host"}


# `tests/test_configs.py` has what a configuration refuses.
def test_several_devices_and_skipped_updates_are_refused():
    config = small_config()
    with pytest.raises(ValueError, match="optimizer.offload=True must be False on 2 devices"):
        strategies.build(config, meshes.make({"data": 2}, meshes.devices(2)))
    mesh = meshes.make({"data": 1}, jax.devices()[:1])
    with pytest.raises(ValueError, match="must have run.non_finite='stop'"):
        strategies.build(config, mesh, strategies.Strategy(), skip_not_finite=True)


@needs_host
@pytest.mark.slow
def test_the_program_trains_with_offload_and_continues_from_a_checkpoint(tmp_path):
    text = small_run.corpus(tmp_path / "text")

    def train(folder, steps, offloads):
        options = dict(optimizer__offload=offloads, model__scan_layers=True)
        options |= dict(training__steps=steps, run__checkpoint_every=2)
        config = small_run.configuration(text, **options)
        loop.train(config, tmp_path / folder, devices=jax.devices()[:1])
        return (tmp_path / folder / "metrics.jsonl").read_text().splitlines()[-1]

    ordinary = train("ordinary", 4, False)
    train("continued", 2, True)
    assert train("continued", 4, True) == ordinary
