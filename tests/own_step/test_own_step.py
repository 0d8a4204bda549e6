"""Laws of measuring a step of one's own, without the command line."""

import functools
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shapes import array, needs_virtual

from course_lib import measure
from course_lib.measure import hardware, virtual
from course_lib.one_device import buffer_donation
from course_lib.own_step import changes, command, costs, reading

ROOT = Path(__file__).parents[2]


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def plain(params, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))


donated = jax.jit(plain, donate_argnums=0)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
        self.again = self.down  # shared: its arrays are there once

    def __call__(self, x):
        return self.again(nnx.relu(self.up(self.down(nnx.relu(self.up(x))))))


@functools.partial(nnx.jit, donate_argnums=0)
def of_nnx(model, x):
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads))
    return loss


SHAPES_OF_NET = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
SGD = optax.sgd(0.1, momentum=0.9)


@jax.jit
def of_a_state(params, momentum, x):
    graph = nnx.graphdef(SHAPES_OF_NET)
    grads = jax.grad(lambda params: (nnx.merge(graph, params)(x) ** 2).mean())(params)
    updates, momentum = SGD.update(grads, momentum)
    return optax.apply_updates(params, updates), momentum


@functools.partial(nnx.jit, donate_argnums=0)
def of_nnx_that_returns(model, x):
    loss = of_nnx.__wrapped__(model, x)
    model.calls = nnx.Variable(jnp.zeros((64, 64)))  # a new array in a model
    return model, loss


def inner_donates(params, x):
    return donated(params, x)


def with_a_function(params, x, activation):
    return activation(x @ params[0])


@jax.jit
def in_place(params, x):
    grads = jax.grad(loss)([w[...] for w in params], x)
    for w, g in zip(params, grads, strict=True):
        w[...] = w[...] - 0.1 * g


WEIGHTS, X = [array(64, 64)] * 3, array(512, 64)
STEPS = {
    "plain": (plain, WEIGHTS, X),
    "donated": (donated, WEIGHTS, X),
    "NNX": (of_nnx, nnx.eval_shape(lambda: Net(nnx.Rngs(0))), X),
    "NNX, returned": (of_nnx_that_returns, nnx.eval_shape(lambda: Net(nnx.Rngs(0))), X),
    "a state of NNX": (
        of_a_state,
        nnx.state(SHAPES_OF_NET, nnx.Param),
        jax.eval_shape(SGD.init, nnx.state(SHAPES_OF_NET, nnx.Param)),
        X,
    ),
    "options": (
        jax.jit(plain, compiler_options={"xla_gpu_enable_triton_gemm": False}),
        WEIGHTS,
        X,
    ),
    "an inner jit donates": (inner_donates, WEIGHTS, X),
    "in place": (in_place, [jax.new_ref(jnp.ones((64, 64))) for _ in WEIGHTS], X),
    "a function among its arguments": (with_a_function, WEIGHTS, X, jnp.tanh),
}


def by_hand(name):
    """Returns a step, lowered as its owner would, for a GPU that is not there."""
    [gpu] = virtual.devices("h100")
    step, *args = STEPS[name.replace("in place", "donated")]
    if name == "a function among its arguments":
        return jax.jit(lambda params, x: step(params, x, jnp.tanh)).lower(
            *virtual.abstract(tuple(args[:2]), gpu)
        )
    if name.startswith("NNX"):
        graph, state = nnx.split(args[0])
        model = nnx.merge(graph, virtual.abstract(state, gpu))
        return step.lower(model, virtual.abstract(args[1], gpu))
    return (step if hasattr(step, "lower") else jax.jit(step)).lower(
        *virtual.abstract(tuple(args), gpu)
    )


@functools.cache
def figures_of(name):
    return costs.measured(lambda: STEPS[name], "h100")[:2]


@needs_virtual
@pytest.mark.parametrize("name", STEPS)
def test_the_figures_of_a_step_are_those_of_the_instruments_called_by_hand(name):
    found, heap = figures_of(name)
    lowered = by_hand(name)
    memory, traffic = measure.memory(lowered), measure.traffic(lowered)
    assert found["peak_bytes"] == memory.peak == heap.peak
    assert found["argument_bytes"] == memory.arguments
    assert found["temporary_bytes"] == memory.temporaries
    assert found["traffic_bytes"] == traffic.bytes
    report = buffer_donation.report(lowered)
    assert found["donation"]["aliased_bytes"] == report.aliased_bytes == memory.aliased
    assert bool(found["donation"]["donated"]) == (
        name in ("donated", "NNX", "NNX, returned", "in place")
    )
    assert sum(row["bytes"] for row in found["at_the_peak"]) <= heap.peak
    flops = measure.Flops(found["flops"], {})
    assert found["compiler"]["flops"] == found["flops"]
    gpu = hardware.get("h100")
    assert found["attainable_seconds"] == measure.attainable_seconds(flops, traffic, gpu)


@needs_virtual
def test_an_array_at_the_peak_has_the_line_that_made_it():
    found, _ = figures_of("plain")
    made = [row["from"] for row in found["at_the_peak"] if row["kind"] == "temporary"]
    line = 1 + Path(__file__).read_text().splitlines().index("        x = jnp.tanh(x @ w)")
    assert f"test_own_step.py:{line} in loss" in made
    arguments = {row["from"] for row in found["at_the_peak"] if row["kind"] == "argument"}
    assert arguments <= {"params", "x"}


@needs_virtual
def test_each_change_that_is_tried_is_that_step():
    def make_step(dtype=jnp.float32, remat=False, size=512):
        def step(params, x):
            one = jax.checkpoint(loss) if remat else loss
            grads = jax.grad(one)(
                jax.tree.map(lambda w: w.astype(dtype), params), x.astype(dtype)
            )
            return jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), params, grads)

        return step, WEIGHTS, array(size, 64)

    def peak(step, *args):
        return measure.memory(jax.jit(step, donate_argnums=donate).lower(*place(args))).peak

    place = functools.partial(virtual.abstract, place=virtual.devices("h100")[0])
    found, _, tries = costs.measured(make_step, "h100")
    rows, donate = list(tries), 0
    assert rows == found["tried"] and len(rows) == costs.MOST_TRIED
    assert [row["error"] for row in rows] == [None] * 3
    assert re.match(r"donate params, if .*: donate_argnums=\(0,\)", rows[0]["change"])
    assert rows[0]["peak_bytes"] == peak(*make_step()) < found["peak_bytes"]
    donate = ()
    assert rows[1]["peak_bytes"] == peak(*make_step(dtype=jnp.bfloat16))
    assert list(rows[1]["flops"]) == ["bfloat16"]
    assert rows[2]["peak_bytes"] == peak(*make_step(remat=True))
    assert found["not_tried"] == ["half the batch (notebook 3): 3 changes are tried"]

    # without switches: the batch
    found, _, tries = costs.measured(lambda: (donated, WEIGHTS, X), "h100")
    [half] = tries
    donate = 0
    assert half["peak_bytes"] == peak(plain, WEIGHTS, array(256, 64))
    assert (
        "(x: 256 of 512): the time is that of half the work. Two minibatches" in half["change"]
    )
    other = measure.gib(256 * 64 * 4)
    assert f"the other half, {other}, and a sum of gradients" in half["change"]
    assert [line[:9] for line in found["not_tried"]] == ["compute i", "recompute"]


@needs_virtual
def test_arrays_in_the_host_s_memory_are_not_in_the_gpu_s():
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def step(stack, x):
        move = functools.partial(jax.device_put, device=jax.memory.Space.Device)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ move(w)), None), x, stack)[0]

    found, heap, _ = costs.measured(
        lambda: (step, array(16, 512, 512, sharding=host), array(64, 512)), "h100"
    )
    assert found["peak_bytes"] == heap.peak < 16 * 512 * 512 * 4


def test_arguments_have_the_names_of_the_step_and_others_are_numbered():
    def step(a, *rest, flag=False):
        return a

    numbered = reading.step_of((step, X, X, X))
    assert numbered.names == ("a", "rest__0", "rest__1")
    numbered = reading.step_of((lambda *args, **options: args[0], X, X))
    assert numbered.names == ("args__0", "args__1")


@needs_virtual
def test_the_batch_is_what_shares_its_first_dimension_and_no_result_replaces():
    def step(state, key, frozen, x, y):
        return state, jnp.tanh(x).sum() + jnp.tanh(y).sum() + frozen.sum()

    key = array(2, dtype=jnp.uint32)
    args = [array(8, 8)], key, array(4, 8), array(16, 4), array(16)
    assert changes.batch(reading.step_of((step, *args))) == ([3, 4], 0, 16)
    odd = reading.step_of((step, *args[:3], np.zeros((5, 4)), np.zeros(5)))
    assert changes.batch(odd)[2] == 5  # which has no half
    assert [leaf.dtype for leaf in jax.tree.leaves(odd.arguments[3:])] == [jnp.float32] * 2


def test_the_batch_is_what_makes_the_arrays_smaller_and_refused_where_that_is_not_clear():
    def weighted(params, x, label, class_weight):
        logits = jnp.tanh(x @ params)
        return params + (x.T @ logits) * class_weight[label].mean(), class_weight * 2

    args = array(64, 64), array(256, 64), array(256, dtype=jnp.int32), array(10)
    assert changes.batch(reading.step_of((weighted, *args))) == ([1, 2], 0, 256)
    square = reading.step_of(
        (weighted, args[0], array(64, 64), array(64, dtype=jnp.int32), args[3])
    )
    assert changes.batch(square, "label") == ([1, 2], 0, 64)

    def masked(table, tokens, mask):
        x = table[tokens]
        scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", x, x), 0)
        return table + (jax.nn.softmax(scores) @ x).mean()

    args = array(100, 8), array(4, 16, dtype=jnp.int32), array(16, 16, dtype=bool)
    assert changes.batch(reading.step_of((masked, *args))) == ([1], 0, 4)
    one = reading.step_of((masked, args[0], array(1, 16, dtype=jnp.int32), args[2]))
    assert changes.batch(one)[2] == 0  # half of the sequence is no half of the batch

    def towers(w, x, y):
        return w, jnp.tanh(x).sum() + jnp.tanh(y).sum()

    together = reading.step_of((towers, array(8), array(4), array(4)))
    assert changes.batch(together) == ([1, 2], 0, 4)
    two = reading.step_of((towers, array(8), array(4), array(6)))
    assert changes.batch(two)[2] == 0
    assert changes.batch(two, "x") == ([1], 0, 4)


@needs_virtual
def test_full_float32_is_told_apart_before_and_after_compilation():
    full = functools.partial(jnp.matmul, precision="highest")
    found, *_ = costs.measured(lambda: (full, *[array(2048, 2048)] * 2), "h100")
    assert found["flops"] == found["compiler"]["flops"] == {"float32 (highest)": 2 * 2048**3}


@needs_virtual
def test_twice_as_many_minibatches_hold_half_a_step_and_the_other_half_of_the_batch():
    def step(w, batch):
        return (
            w
            - jax.lax.scan(lambda g, x: (g + jax.grad(loss)([w], x)[0], None), 0 * w, batch)[0]
        )

    measured = functools.partial(costs.measured, target="h100")
    found, _, tries = measured(
        lambda: (jax.jit(step, donate_argnums=0), array(64, 64), array(4, 1024, 64))
    )
    *_, half = tries
    twice = measured(
        lambda: (jax.jit(step, donate_argnums=0), array(64, 64), array(8, 512, 64))
    )[0]
    other = 4 * 512 * 64 * 4
    assert (
        f"Twice as many minibatches also hold the other half, {measure.gib(other)} ("
        in half["change"]
    )
    assert half["peak_bytes"] + other == pytest.approx(twice["peak_bytes"], rel=0.03)


@needs_virtual
def test_a_change_warns_of_nothing_and_the_step_s_own_code_does(recwarn):
    def step(table, x):
        warnings.warn("my own", stacklevel=1)
        return table + (x.T @ x).sum(), (x @ table).sum()

    *_, tries = costs.measured(lambda: (step, array(64, 64), array(512, 64)), "h100")
    assert "half the batch" in str([row["change"] for row in tries])
    assert [str(warning.message) for warning in recwarn] == ["my own"]


@needs_virtual
def test_on_several_devices_the_arguments_keep_their_places_on_their_mesh():
    def make_step(devices=None):
        mesh = jax.make_mesh((2,), ("data",), devices=devices)
        rows, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("data",), ()))
        return plain, [array(64, 64, sharding=whole)] * 3, array(512, 64, sharding=rows)

    found, heap, _ = costs.measured(lambda: make_step(), "h100", 2)
    on_virtual, *_ = costs.measured(make_step, "h100", 2)
    step, *args = make_step(virtual.devices("h100", 2))
    lowered = jax.jit(step).lower(*args)
    assert found["peak_bytes"] == on_virtual["peak_bytes"] == measure.memory(lowered).peak
    sent = measure.ledger(lowered, args[1].sharding.mesh).sent()
    assert found["sent_bytes"] == on_virtual["sent_bytes"] == sent > 0
    assert list(found["sent_by_kind"]) == ["all-reduce along data"]
    assert found["attainable_seconds"] is None and "attainable_seconds" in found["unknown"]
    assert "attainable time unknown: no step on several" in " ".join(
        command.text(found).split()
    )


def mesh_of_two(devices):
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
    return [NamedSharding(mesh, PartitionSpec(*axis)) for axis in ((), ("data",))]


@needs_virtual
def test_donation_counts_what_one_device_holds_and_says_why_it_is_in_vain():
    def make_step(devices, donate=()):
        whole, rows = mesh_of_two(devices)
        step = jax.jit(lambda x: x + 1, donate_argnums=donate, out_shardings=rows)
        return step, array(4096, 64, sharding=whole)

    found, *_ = costs.measured(make_step, "h100", 2)
    assert not found["donation"]["missed"]  # the half of x would gain nothing
    found, *_ = costs.measured(functools.partial(make_step, donate=0), "h100", 2)
    [row] = found["donation"]["in_vain"]
    assert (row["argument"], row["bytes"]) == ("x", 4096 * 64 * 4)
    assert "not used again: 1.00 MiB of x, since every output" in command.text(found)
    assert "divided otherwise over the devices" in row["why"]


@needs_virtual
@pytest.mark.parametrize(("divided", "per_device"), [(True, 1), (False, 2)])
def test_flops_of_one_device_are_those_that_it_runs(divided, per_device):
    def make_step(devices):
        place = mesh_of_two(devices)[divided]
        return jnp.matmul, array(256, 64, sharding=place), array(64, 64)

    found, *_ = costs.measured(make_step, "h100", 2)
    half = 256 * 64 * 64
    assert found["flops"] == {"float32": 2 * half}
    assert found["compiler"]["flops"] == {"float32": per_device * half}
    assert f"FLOPs per device {per_device * half:.3g} in float32" in command.text(found)


@needs_virtual
def test_a_mesh_that_only_the_jit_names_is_enough():
    def loss_of(devices, divided=True, by_jit=True):
        whole, rows = mesh_of_two(devices)
        places = {"in_shardings": (whole, rows), "out_shardings": whole} if by_jit else {}
        given = (None, None) if by_jit else (whole, rows)
        params, x = (array(512, 64, sharding=place) for place in given)
        return jax.jit(lambda w, x: w + (x.T @ x).sum(), **places), params, x

    found, *_ = costs.measured(loss_of, "h100", 2)
    by_arguments, *_ = costs.measured(functools.partial(loss_of, by_jit=False), "h100", 2)
    assert found["sent_by_kind"] == by_arguments["sent_by_kind"] != {}
    assert found["peak_bytes"] == by_arguments["peak_bytes"]


@nnx.jit(keep_unused=True)
def nnx_that_keeps(model, unused):
    model.up.bias[...] = 2 * model.up.bias[...]


KEPT = {
    "static": (jax.jit(lambda x, flag, unused: x, static_argnums=1), X, "a", X),
    "a number": (jax.jit(lambda x, rate, unused: x * rate), X, 0.1, X),
    "a reference": (jax.jit(lambda r, x: r[...]), jax.new_ref(jnp.ones((512, 64))), X),
    "NNX": (nnx_that_keeps, nnx.eval_shape(lambda: Net(nnx.Rngs(0))), X),
}


@needs_virtual
@pytest.mark.parametrize("name", KEPT)
def test_a_jit_that_keeps_unused_arguments_keeps_them_here(name):
    step, *args = KEPT[name]
    if name != "NNX":
        statics = {"static_argnums": 1} if name == "static" else {}
        step = jax.jit(step.__wrapped__, keep_unused=True, **statics)
    found, *_ = costs.measured(lambda: (step, *args), "h100")
    assert found["argument_bytes"] >= 512 * 64 * 4 * (1 + (name != "NNX"))


@needs_virtual
@pytest.mark.parametrize("kind", ["NNX", "reference", "static"])
def test_the_places_that_a_jit_asks_of_its_results_are_theirs(kind):
    def make_step(devices):
        whole, rows = mesh_of_two(devices)
        x = array(4096, 64, sharding=whole)
        if kind == "static":
            step = jax.jit(lambda x, n: n * x, static_argnums=1, out_shardings=rows)
            return step, x, 2
        if kind == "NNX":
            step = nnx.jit(lambda model, x: 2 * x, out_shardings=rows)
            return step, nnx.eval_shape(lambda: Net(nnx.Rngs(0))), x
        return jax.jit(lambda r, x: 2 * x, out_shardings=rows), jax.new_ref(jnp.ones(8)), x

    found, *_ = costs.measured(make_step, "h100", 2)
    assert found["output_bytes"] - found["aliased_bytes"] < 0.75 * 4096 * 64 * 4


def in_a_scan(w, batch):
    return w - jax.lax.scan(lambda g, x: (g + jax.grad(loss)([w], x)[0], None), 0 * w, batch)[0]


def in_a_loop(w, batch):
    add = lambda n, g: g + jax.grad(loss)([w], batch[n])[0]  # noqa: E731
    return w - jax.lax.fori_loop(0, 4, add, 0 * w)


def unrolled(w, batch):
    return w - sum(
        jax.grad(loss)([w], x.astype(w.dtype))[0] for x in batch.astype(jnp.bfloat16)
    )


def at_once(w, batch):
    return w - jax.grad(loss)([w], batch)[0]


@pytest.mark.parametrize("step", [in_a_scan, in_a_loop, unrolled, at_once])
@pytest.mark.parametrize("jit", [jax.jit, lambda step: step])
def test_minibatches_on_an_axis_in_front_are_not_taken_for_the_batch(step, jit):
    read = reading.step_of((jit(step), array(64, 64), array(4, 16, 64)))
    assert changes.batch(read) == (([1], 0, 4) if step is at_once else ([1], 1, 16))


@needs_virtual
def test_a_time_is_unknown_where_a_rate_or_a_function_s_work_is():
    def eight_bits(x):
        return jax.lax.dot(x, x, preferred_element_type=jnp.int32)

    x = array(256, 256, dtype=jnp.int8)
    found, *_ = costs.measured(lambda: (eight_bits, x), "a5000")
    assert found["flops"] == {"int8": 2 * 256**3} and found["attainable_seconds"] is None
    assert (
        "unknown: no rate for int8 products of NVIDIA RTX A5000 in accelerators.toml"
        in command.text(found)
    )
    found, *_ = costs.measured(lambda: (eight_bits, x), "h100")
    assert found["attainable_seconds"] > 0
    found, *_ = costs.measured(lambda: (jnp.linalg.cholesky, array(256, 256)), "h100")
    assert found["attainable_seconds"] is None
    assert "in no plan       the workspace of cusolver_potrf_ffi" in command.text(found)
    assert "in no plan" not in command.text(figures_of("plain")[0])


@needs_virtual
@pytest.mark.parametrize("jit", [jax.jit, lambda step: step])
def test_a_step_is_traced_once(jit):
    traces = []

    def step(params, x):
        traces.append(params)
        return plain(params, x)

    costs.measured(lambda: (jit(step), WEIGHTS, X), "h100")
    assert len(traces) == 1
