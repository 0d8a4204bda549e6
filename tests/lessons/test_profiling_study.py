"""Laws of the rows of notebook 06, on small programs."""

import jax
import jax.numpy as jnp
import pytest

from course_lib import measure
from course_lib.lessons import profiling_study
from course_lib.measure import hardware, hlo, recorded, virtual
from course_lib.measure.traffic import KINDS
from course_lib.one_device import profiling, rematerialization
from course_lib.show import figures

SIZES = {"layers": 3, "batch_size": 2, "seq_len": 16, "width": 128}
needs_gpus = pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason="needs virtual GPUs"
)


@pytest.fixture(autouse=True)
def promotion_as_flax_needs_it():
    with jax.numpy_dtype_promotion("standard"):
        yield


def event(op, start, duration, inside=0.0):
    return profiling.Event(op, start, duration, duration - inside, "line")


def saved(remat):
    run = profiling_study.few_layers({"model.remat": remat}, **SIZES)
    state, batch = run.abstract()
    arrays = rematerialization.residuals(
        lambda params, batch: run.loss_fn(params, batch, None)[0], state.params, batch
    )
    return profiling_study.of_each_layer(arrays, SIZES["layers"])


def test_phases_add_up_self_time_apart_for_products_and_in_the_order_of_a_step():
    events = [
        event("while.1", 0.0, 4.0, inside=4.0),  # its time is that of the operations inside
        event("loop_fusion", 0.0, 1.0),
        event("ynn_fusion.3", 1.0, 3.0),
        event("dot.7", 4.0, 4.0),
    ]
    rows = profiling_study.milliseconds_by_phase(
        events,
        lambda event: "backward" if event.start >= 4 else "forward",
        frozenset({"ynn_fusion.3", "dot.7"}),
    )
    assert sum(row["share"] for row in rows) == 1
    assert [row["phase"] for row in rows] == ["forward", "backward"]
    forward, backward = rows
    assert (forward["products"], forward["all else"]) == (3000, 1000)
    assert (backward["products"], backward["together"]) == (4000, 4000)
    assert forward["share"] == backward["share"] == 0.5
    assert set(figures.PHASES) > {"forward", "backward"}


def test_products_are_the_dots_of_a_program_and_not_its_softmax():
    def fn(w, x):
        return jax.nn.softmax(jnp.tanh(x @ w)) @ w

    w, x = jnp.ones((256, 256)), jnp.ones((64, 256))
    compiled = jax.jit(fn).lower(w, x).compile()
    entry = {i.name for i in hlo.parse(compiled.as_text()).entry.instructions}
    assert len(entry & profiling_study.products(compiled)) == 2 < len(entry)
    alone = profiling_study.products(jax.jit(jax.nn.softmax).lower(x).compile())
    assert not alone


def test_the_shortest_step_of_a_trace_and_its_longest_gap_are_in_ms():
    events = (event("a", 10.0, 8.0), event("b", 20.0, 1.0), event("c", 24.0, 1.0))
    trace = profiling.Trace("/host:CPU", ((10.0, 20.0), (20.0, 25.0)), events)
    assert profiling_study.shortest_step(trace) == {
        "step": 5000,
        "busy": 2000,
        "idle": 3000,
        "longest gap": 3000,
        "at": 1000,
    }
    full = profiling.Trace("/host:CPU", ((0.0, 1.0),), (event("a", 0.0, 1.0),))
    assert profiling_study.shortest_step(full)["longest gap"] == 0


def test_saved_arrays_are_named_in_the_models_words_by_their_shapes():
    inputs = saved(("MLP", "Attn"))
    assert [array.shape for array in inputs] == [(3, 2, 16, 128)] * 2
    names = {}
    for array in saved(()):
        names.setdefault(profiling_study.in_words(array, 16), set()).add(array.shape[1:])
    assert set(names) == {
        "block / MLP / hidden layer, GELU",
        "block / MLP / normalization",
        "block / MLP / weights, in bfloat16",
        "block / attention / normalization",
        "block / attention / q, k, v, output",
        "block / attention / softmax",
        "block / attention / weights, in bfloat16",
    }
    assert names["block / MLP / hidden layer, GELU"] == {(2, 16, 512)}
    assert names["block / attention / softmax"] == {(2, 1, 16, 16), (2, 1, 16, 1)}
    assert names["block / attention / q, k, v, output"] == {(2, 16, 1, 128)}
    assert names["block / MLP / weights, in bfloat16"] == {(128, 512), (512, 128)}


@needs_gpus
def test_costs_are_those_of_measure_and_add_up():
    gpu = hardware.get("a5000")

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    w, x = jnp.ones((256, 256)), jnp.ones((64, 256))
    lowered = jax.jit(jax.grad(loss)).lower(
        *virtual.abstract((w, x), virtual.devices("a5000")[0])
    )
    heap, flops = measure.heap(lowered), measure.flops(jax.grad(loss), w, x)
    row = profiling_study.costs(
        heap, flops, gpu, lambda scope: "forward" if "tanh" in scope else "other"
    )
    counted = measure.traffic(heap.compiled)
    assert sum(row["kinds"].values()) == sum(row["phases"].values()) == counted.bytes
    assert row["peak"] == max(row["timeline"]) == row["tape"]["peak"]
    assert row["memory_seconds"] == counted.bytes / gpu.memory_bandwidth
    rows = profiling_study.largest_arrays([{"case": "it"} | row])
    assert len(rows) == len(row["largest"]) and {r["case"] for r in rows} == {"it"}
    assert (0.25, "(256, 256)", "w") in {(r["MiB"], r["shape"], r["origin"]) for r in rows}


def test_every_kind_of_traffic_of_a_step_on_one_device_is_in_one_bar():
    kinds = [kind for together in profiling_study.TRAFFIC.values() for kind in together]
    assert len(kinds) == len(set(kinds))
    elsewhere = {"collective", "offload", "kernel"}
    assert set(kinds) == set(KINDS) - elsewhere
    bytes_of = {kind: 2**i for i, kind in enumerate(kinds)}
    assert sum(profiling_study.moved(bytes_of).values()) == sum(bytes_of.values())


@needs_gpus
def test_the_pages_of_a_session_have_the_compilers_peak_and_no_times(tmp_path):
    lowered = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(
        virtual.abstract(jnp.ones((256, 256)), virtual.devices("a5000")[0])
    )
    compiled = measure.write_session(lowered, tmp_path, "virtual")
    pages = profiling_study.viewer_pages(tmp_path / "plugins" / "profile" / "virtual")
    assert pages["peak"] == measure.memory(compiled).peak
    assert pages["timed"] == 0 and "memory_viewer" in pages["offered"]


@needs_gpus
def test_the_order_of_a_program_has_its_products_and_its_sum_over_gpus():
    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(x @ kernel)
        return jnp.sum(x.astype(jnp.float32))

    lowered = profiling_study.data_parallel(loss, layers=2, width=256, gpus=2)
    order = profiling_study.order_of(virtual.compile(lowered), "all-reduce")
    # two products forward; backward one for each kernel, and one for the inner layer's input
    assert order == ["product"] * 5 + ["all-reduce"]


def test_the_records_have_the_rows_of_the_notebook():
    sizes = {"N": 4, "B": 8, "L": 512, "D": 512}
    table = recorded.partly_live("profiling_scan", lambda case: {}, (), sizes=sizes)
    assert [row["case"] for row in table.rows] == ["scan", "scan, remat", "unrolled"]
    for row in table.rows:
        assert sum(row["kinds"].values()) == sum(row["phases"].values())
    scan, again, plain = (profiling_study.moved(row["kinds"]) for row in table.rows)
    assert again["fill"] + again["dynamic-update-slice"] < (
        scan["fill"] + scan["dynamic-update-slice"]
    )
    assert plain["dynamic-update-slice"] == 0
