"""Laws of strategies by types: the gradient and the bytes of those by hand."""

import dataclasses
import math

import jax
import numpy as np
import one_device
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import slow

from course_lib import measure, training
from course_lib.many_devices import by_types, meshes, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.measure import virtual

pytestmark = pytest.mark.skipif(
    not hasattr(jax, "reshard"), reason=f"the types of JAX {jax.__version__} have no sums"
)

BOTH = dict(data=2, tensor=2)
EXPERTS = {"model.num_experts": 6, "model.experts_per_token": 2, "model.capacity_factor": 1.0}


def by(**fields):
    return Strategy(by="types", **fields)


def name(value):
    if isinstance(value, Strategy):
        return f"zero{value.zero}" + "-sequence" * value.sequence
    return "-".join(map(str, value))[:40]


@pytest.mark.parametrize(
    ("axes", "chosen", "changes"),
    [
        (BOTH, by(zero=3, sequence=True), one_device.LLAMA),
        (dict(data=2, expert=3), by(zero=3), EXPERTS | {"data.batch_size": 12}),
        slow(dict(data=1, expert=2), by(), EXPERTS | one_device.LLAMA),
        slow(dict(data=2, expert=2), by(zero=1), EXPERTS),
        slow(dict(data=2), by(), EXPERTS),
        slow(dict(data=4), by(), {}),
        slow(dict(data=2), by(zero=1), {"model.scan_layers": False}),
        slow(BOTH, by(zero=3, gather_again=False), {"model.parallel_block": True}),
    ],
    ids=name,
)
def test_types_give_the_gradient_of_one_device(axes, chosen, changes):
    """At odd degrees, too: `test_strategies.py`."""
    one_device.check_gradient(one_device.small(**changes), axes, chosen)


def test_minibatches_give_the_gradient_of_the_batch():
    whole = one_device.small(**{"training.num_minibatches": 2, "model.num_layers": 1})
    alike = one_device.small(**{"model.num_layers": 1})
    one_device.check_gradient(whole, dict(data=2), by(zero=2), alike)


def sent(axes, gpus=False, changes=None, **fields):
    """Returns the payload of each kind of collective along each axis, by hand and by types,
    without the sums of metrics, which are less than 20 bytes.
    """
    # A learned table of positions is the one gradient that types sum before they cut it.
    rotary = {"model.positions": "rotary", "model.hidden_size": 32}
    whole = one_device.small(**rotary | (changes or {}))
    whole.model.update(head_dim=4, num_layers=2)
    count, found = math.prod(axes.values()), []
    devices = virtual.devices("h100", count) if gpus else jax.devices("cpu")[:count]
    mesh = meshes.make(axes, devices)
    for how in ("hand", "types"):
        chosen = Strategy(by=how, **fields)
        state, batch = strategies.build(whole, mesh, chosen).abstract()
        grad_fn = jax.jit(strategies.gradient(whole, mesh, chosen))
        lowered = grad_fn.lower(state.params, batch, jax.random.key(0))
        ledger = measure.ledger(virtual.compile(lowered), mesh)
        kinds = {(each.kind, each.axes) for each in ledger.entries}
        payload = {kind: ledger.payload(*kind) for kind in kinds}
        found.append({kind: size // 20 * 20 for kind, size in payload.items() if size > 20})
    return found


@pytest.mark.parametrize("axes", [dict(data=4), slow(dict(data=1, tensor=4))], ids=str)
def test_types_send_the_bytes_that_are_sent_by_hand(axes):
    by_hand, by_types = sent(axes)
    assert by_types == by_hand


@one_device.needs_h100
@pytest.mark.parametrize(
    ("axes", "fields", "changes", "kinds"),
    [
        (dict(data=4), dict(zero=3), {}, ["all-gather", "reduce-scatter"]),
        (dict(data=2, expert=2), dict(zero=3), EXPERTS, ["all-gather", "all-to-all"]),
        slow(dict(data=4), dict(zero=1), {}, ["reduce-scatter"]),
        slow(dict(data=1, tensor=4), dict(sequence=True), {}, ["all-gather", "reduce-scatter"]),
    ],
    ids=str,
)
def test_on_gpus_what_travels_is_what_travels_by_hand(axes, fields, changes, kinds):
    """XLA for CPUs knows no reduce-scatter here, and gathers all scores for `top_k`. Gradients
    of vectors are not compared: types sum them over two axes at once, by an all-reduce.
    """
    by_hand, by_types = (
        {kind: size for kind, size in each.items() if kind[0] in kinds}
        for each in sent(axes, gpus=True, changes=changes, **fields)
    )
    assert by_types == by_hand
    assert {kind for kind, _ in by_hand} == {*kinds}


def traced(axes, chosen, **changes):
    """Returns the traced gradient of a mesh without devices."""
    whole, mesh = one_device.small(**changes), AbstractMesh(tuple(axes.values()), tuple(axes))
    whole_mesh = NamedSharding(mesh, P())
    params = jax.eval_shape(training.build(whole).init, jax.random.key(0)).params
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole_mesh),
        (params, one_device.batch(whole), jax.eval_shape(jax.random.key, 0)),
    )
    return jax.jit(strategies.gradient(whole, mesh, chosen)).trace(*arguments)


def test_a_step_is_lowered_for_4096_devices_without_any():
    changes = {"model.hidden_size": 512, "model.head_dim": 64, "data.batch_size": 512}
    program = traced(dict(data=512, tensor=8), by(zero=3, sequence=True), **changes)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert '"data"=512, "tensor"=8' in text
    assert "num_partitions = 4096" in text


def test_a_product_whose_sum_nobody_names_is_an_error_while_tracing(monkeypatch):
    good = by_types.tensor(sequence=False)
    bad = dataclasses.replace(good, row=jax.lax.dot_general)
    monkeypatch.setattr(by_types, "tensor", lambda sequence: bad)
    with pytest.raises(Exception, match=r"Contracting dimensions are sharded .* ambiguous"):
        traced(BOTH, by())


def test_a_step_on_jaxs_own_mesh_has_the_bits_of_one_on_auto_axes():
    whole, same, results = one_device.small(), one_device.grid(data=2), []
    kinds = (AxisType.Explicit,)
    for mesh in (same, jax.make_mesh((2,), ("data",), kinds, devices=same.devices.flat)):
        run = strategies.build(whole, mesh, by(zero=3))
        state = one_device.call(run.init, jax.random.key(0))
        after = one_device.call(run.train_step, state, one_device.batch(whole))
        results.append(jax.device_get((after[0].params, after[0].opt_state, after[1])))
    for leaf, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize(
    ("axes", "changes", "message"),
    [
        (dict(data=1, context=2), {}, "by='types' .* axis 'context'"),
        (dict(data=1, pipe=2), {}, "by='types' .* axis 'pipe'"),
        (dict(data=2), EXPERTS | {"model.dropless": True}, "by='types' .* for dropless=True"),
        (dict(data=2), {"model.dropout_rate": 0.5}, "dropout_rate=0.5 must be 0"),
        (dict(data=2), {"model.loss_chunks": 2}, "loss_chunks=2 must be 1"),
        (dict(data=2), {"model.flat_products": True}, "flat_products=True must be False"),
        (BOTH, {"model.z_loss": 0.1}, "z_loss=0.1 must be 0"),
    ],
    ids=str,
)
def test_what_types_cannot_do_is_refused(axes, changes, message):
    for refused in (strategies.build, strategies.layout, strategies.gradient):
        with pytest.raises(ValueError, match=message):
            refused(one_device.small(**changes), one_device.grid(**axes), by())


def test_a_jax_whose_types_have_no_sums_is_named(monkeypatch):
    monkeypatch.delattr(jax, "reshard")
    with pytest.raises(ValueError, match=f"by='types' .* with JAX {jax.__version__}"):
        strategies.build(one_device.small(), one_device.grid(data=2), by())
