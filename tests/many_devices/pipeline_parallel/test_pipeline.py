"""A pipeline computes the gradient of one device, whatever the schedule, and does what its
table says.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import pytest
from ml_collections import FrozenConfigDict
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import meshes, sharding, strategies
from course_lib.many_devices.pipeline_parallel import pipeline, schedules, slots
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import hlo, virtual
from course_lib.models import transformer
from course_lib.one_device import gradient_accumulation

KEY = jax.random.key(2)
WIDTH, LENGTH, BATCH = 16, 8, 24

CASES = (
    ("gpipe", 2, 3, 1, 1),
    ("1f1b", 2, 12, 1, 2),
    ("depth_first", 2, 2, 2, 2),
    ("breadth_first", 2, 3, 2, 1),
    ("zero_bubble", 4, 8, 1, 1),
    ("zb_v", 2, 3, 2, 1),
    ("dualpipe_v", 2, 6, 2, 2),
    slow(("zb_v", 4, 8, 2, 1)),
    slow(("dualpipe_v", 4, 8, 2, 1)),
    slow(("1f1b", 4, 2, 1, 1)),
    slow(("zero_bubble", 4, 1, 1, 1)),
    slow(("depth_first", 4, 8, 2, 1)),
)
assert {case[0] for case in CASES[:7]} == set(schedules.SCHEDULES)


def small(**changes):
    size = {"model.num_layers": 8, "model.num_heads": 2, "model.head_dim": 8}
    return one_device.small(
        **(size | {"data.batch_size": BATCH, "data.seq_len": LENGTH} | changes)
    )


def reference(whole):
    """Returns parameters, gradient and metrics of one device, on no device in particular."""
    params, grads, metrics = one_device.reference(FrozenConfigDict(whole))
    return jax.device_get(params), grads, metrics


@functools.cache
def executed(name, stages, microbatches, chunks, n):
    """Returns what a schedule executes, and what comes out, with the layers in the model's
    order.
    """
    whole, grid = small(), one_device.grid(data=n, pipe=stages)
    params, _, _ = reference(whole)
    found = schedules.make(name, stages, microbatches, chunks)
    parts = transformer.parts(FrozenConfigDict(whole.model))
    held = sharding.specs(params, sharding.PIPELINE, grid)
    count = pipeline.count(pipeline.loss_of_head(parts), parts, grid, held, found)
    given = pipeline.to_stages(params, stages, chunks, name)
    given = jax.device_put(given, sharding.place(held, grid))
    with jax.default_matmul_precision("highest"):
        compiled = one_device.jit(count).lower(given, one_device.batch(whole), None).compile()
    batch = jax.device_put(one_device.batch(whole), compiled.input_shardings[0][1])
    grads, metrics, counts = compiled(given, batch, None)
    grads, counts = jax.device_get((grads, counts))
    grads = pipeline.from_stages(grads, stages, chunks, name)
    return types.SimpleNamespace(
        **dict(schedule=found, program=slots.program(found), mesh=grid, compiled=compiled),
        **dict(grads=grads, metrics=metrics, counts=counts),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_schedule_gives_the_gradient_of_one_device(case):
    found = executed(*case)
    _, expected, metrics = reference(small())
    assert not one_device.different_leaves(found.grads, expected)
    assert training.mean_metrics(found.metrics) == pytest.approx(
        training.mean_metrics(metrics), rel=1e-5
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_execution_idles_and_keeps_what_the_table_predicts(case):
    found = executed(*case)
    planned, taken = found.schedule, found.counts["slots"]
    assert sum(taken["idle"]) / sum(map(sum, taken.values())) == schedules.bubble(planned)
    assert list(found.counts["peak_live"]) == schedules.peak_live(planned)
    each = [planned.microbatches * planned.chunks] * planned.stages
    assert all(list(taken[kind]) == each for kind in taken if kind != "idle")


def test_the_compiled_program_stashes_as_many_microbatches_as_are_live():
    found = executed("zero_bubble", 4, 8, 1, 1)
    module = hlo.parse(found.compiled.as_text())
    [scan] = [i for i in module.entry.instructions if i.opcode == "while"]
    hidden = BATCH // 8, LENGTH, 4 * WIDTH
    kept = [shape.dims[0] for shape in scan.shapes if shape.dims[1:] == hidden]
    live, layers = max(schedules.peak_live(found.schedule)), 2
    assert found.program.sizes["stash"] == live
    passed = found.program.sizes["passed"]
    assert set(kept) == {live * layers, passed * layers}
    # One gradient of the MLP's first product is passed on to W.
    assert kept.count(passed * layers) == 1 or passed == live


@one_device.needs_h100
def test_the_peak_on_h100s_holds_a_stage_s_gradients_once():
    whole = small(**{"model.head_dim": 64, "model.num_heads": 8, "model.hidden_size": 512})
    whole.model.remat = ("Block",)
    grid = meshes.make({"data": 1, "pipe": 2}, virtual.devices("h100", 2))
    chosen = Strategy(schedule="1f1b", microbatches=BATCH)
    state, batch = strategies.build(whole, grid, chosen).abstract()
    grad_fn = jax.jit(strategies.gradient(whole, grid, chosen))
    memory = measure.memory(virtual.compile(grad_fn.lower(state.params, batch, None)))
    per_stage = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params["block"])) // 2
    # The outputs are the gradients. Beside them: one layer's, and those of embedding and head.
    assert memory.outputs > per_stage
    assert memory.temporaries < per_stage / 2


def test_forward_and_recomputation_drop_the_same_and_all_else_drops_differently():
    whole = small(**{"model.dropout_rate": 0.5, "model.num_layers": 4})
    params, _, _ = reference(small(**{"model.num_layers": 4}))
    batch, grid = one_device.batch(whole), one_device.grid(data=2, pipe=2)
    parts = transformer.parts(FrozenConfigDict(whole.model))
    loss_fn, held = (
        pipeline.loss_of_head(parts),
        sharding.specs(params, sharding.PIPELINE, grid),
    )
    grad_fn = pipeline.gradient(loss_fn, parts, grid, held, schedules.zero_bubble(2, 2))
    microbatch = jax.tree.map(lambda x: jnp.asarray(x.reshape(2, 2, -1, LENGTH)), batch)

    def replayed(params):
        """The same, one microbatch and stage after the other, with a key for each share,
        microbatch and stage.
        """

        def loss_of(place):
            part = jax.tree.map(lambda x: x[place[0], place[1]], microbatch)
            rng = jax.random.fold_in(jax.random.fold_in(KEY, place[0]), place[1])
            x = parts.embed(params, part.inputs)
            for number in range(4):
                block = jax.tree.map(lambda leaf, number=number: leaf[number], params["block"])
                stage, layer = divmod(number, 2)
                keys = jax.random.split(jax.random.fold_in(rng, stage), 2)
                x = parts.layer(block, x, keys[layer])
            return loss_fn(params, dataclasses.replace(part, inputs=x), None)[1]["loss"][0]

        places = jnp.array([[0, 0], [0, 1], [1, 0], [1, 1]])
        return jax.lax.map(loss_of, places).sum() / batch.weights.sum()

    with jax.default_matmul_precision("highest"):
        expected = one_device.jit(jax.grad(replayed))(params)
        grads, _ = one_device.jit(grad_fn)(params, batch, KEY)
    assert not one_device.different_leaves(grads, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["depth_first", "dualpipe_v"])
def test_data_pipeline_and_tensor_update_parameters_as_one_device_does(name):
    whole = small(**{"training.donate": False, "training.loss_scale": "static"})
    chosen = Strategy(zero=1, sequence=True, schedule=name, microbatches=2, chunks=2)
    run = strategies.build(whole, one_device.grid(data=2, pipe=2, tensor=2), chosen)
    params, grads, metrics = reference(small())
    batch = one_device.batch(whole)
    with jax.default_matmul_precision("highest"):
        before = one_device.call(run.init, jax.random.key(0))
        after, _ = one_device.call(run.train_step, before, batch)
        loss, _ = one_device.jit(run.loss_fn)(before.params, batch, None)
        logits = one_device.jit(run.apply_fn)(before.params, batch.inputs)
        expected = one_device.jit(training.build(whole).apply_fn)(params, batch.inputs)
    assert loss == pytest.approx(training.mean_metrics(metrics)["loss"], rel=1e-5)
    np.testing.assert_allclose(logits, expected, atol=1e-5)  # of numbers near 1
    updated = pipeline.from_stages(jax.device_get(after.params), 2, 2, name)
    for new, old, grad in zip(*map(jax.tree.leaves, (updated, params, grads)), strict=True):
        # An update is a difference of numbers near 1: float32 leaves it 6e-8 of these, not of
        # itself.
        move = -whole.optimizer.learning_rate * grad
        atol = 1e-5 * float(np.linalg.norm(move)) + 1e-6
        np.testing.assert_allclose(new - old, move, atol=atol)


def test_activations_are_passed_in_the_dtype_that_layers_compute_in():
    whole = small(**{"model.dtype": "bfloat16"})
    params, _, _ = reference(small())
    with jax.numpy_dtype_promotion("standard"):  # as Flax's LayerNorm needs it
        grad_fn = strategies.gradient(
            whole, one_device.grid(data=1, pipe=2), Strategy(microbatches=2)
        )
        lowered = one_device.jit(grad_fn).lower(params, one_device.batch(whole), None)
    sent = [line for line in lowered.as_text().splitlines() if "collective_permute" in line]
    assert len(sent) == 2 and all(
        f"{BATCH // 2}x{LENGTH}x{WIDTH}xbf16" in line for line in sent
    )


@pytest.mark.slow
def test_gradients_of_many_microbatches_in_bfloat16_add_up_as_those_of_one_device_do():
    """Added up in bfloat16, gradients of 64 microbatches were 2% off."""
    whole = small(**{"model.num_layers": 2, "data.batch_size": 64})
    params, exact, _ = reference(whole)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    grad_fn = strategies.gradient(
        whole, one_device.grid(data=1, pipe=2), Strategy(microbatches=64)
    )
    with jax.numpy_dtype_promotion("standard"):  # as Flax's LayerNorm needs it
        found, _ = one_device.jit(grad_fn)(rounded, one_device.batch(whole), None)
        on_one = gradient_accumulation.gradient(training.functions(whole).loss_fn)
        alone, _ = one_device.jit(on_one)(rounded, one_device.batch(whole), None)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("bfloat16")}

    def flat(tree):
        return np.concatenate([np.ravel(x).astype(np.float32) for x in jax.tree.leaves(tree)])

    off, off_alone = (np.linalg.norm(flat(grads) - flat(exact)) for grads in (found, alone))
    assert off < 1.2 * off_alone, (off, off_alone)


@pytest.mark.parametrize(
    ("stages", "chunks", "name", "order"),
    [
        (2, 4, "depth_first", [0, 2, 4, 6, 1, 3, 5, 7]),
        (4, 2, "depth_first", [0, 4, 1, 5, 2, 6, 3, 7]),
        (4, 2, "zb_v", [0, 7, 1, 6, 2, 5, 3, 4]),
        (2, 2, "dualpipe_v", [0, 1, 6, 7, 2, 3, 4, 5]),
    ],
)
def test_layers_of_a_device_lie_together_and_come_back_in_order(stages, chunks, name, order):
    params = {"block": {"kernel": np.arange(8)[:, None]}, "embed": np.ones(3)}
    placed = pipeline.to_stages(params, stages, chunks, name)
    np.testing.assert_array_equal(placed["block"]["kernel"][:, 0], order)
    back = pipeline.from_stages(placed, stages, chunks, name)
    np.testing.assert_array_equal(back["block"]["kernel"], params["block"]["kernel"])
    assert pipeline.to_stages(params, 4, 1) is params


@pytest.mark.parametrize(("name", "chunks"), [slow("1f1b", 1), ("depth_first", 2), ("zb_v", 2)])
def test_no_device_ever_holds_all_layers_while_they_are_made(name, chunks):
    whole = small(**{"model.num_layers": 16})
    chosen = Strategy(schedule=name, microbatches=8, chunks=chunks)
    run = strategies.build(whole, one_device.grid(data=1, pipe=8), chosen)
    made = measure.memory(run.init.lower(jax.random.key(0)).compile())
    state, _ = run.abstract()
    layers = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params["block"]))
    assert made.outputs + made.temporaries < layers


def test_a_schedule_for_other_devices_or_an_illegal_one_is_refused():
    grid, legal = one_device.grid(data=1, pipe=2), schedules.gpipe(2, 2)
    parts = transformer.parts(FrozenConfigDict(small().model))
    with pytest.raises(ValueError, match="stages=4 must be the number of devices"):
        pipeline.gradient(print, parts, grid, {}, schedules.gpipe(4, 2))
    late = dataclasses.replace(legal, table=((None,) + legal.table[0][1:], legal.table[1]))
    with pytest.raises(ValueError, match=r"table\[0\] must have F of microbatch 0"):
        pipeline.gradient(print, parts, grid, {}, late)
