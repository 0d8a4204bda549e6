"""Laws of a profile: it times the steps, names the operations, and adds up."""

import collections
import os
import shutil
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from course_lib.measure import program
from course_lib.one_device import profiling

# seconds: on a busy machine a thread may wait for a tenth of that between two operations
SLEEP = 0.5


@jax.jit
def step(weights, batch):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    def loss(weights):
        return jnp.mean(jax.lax.scan(layer, batch, weights)[0] ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * gradient, {"loss": value}


def slow_step(weights, batch):
    """A step that waits before it computes: a host that is late with its data."""
    time.sleep(SLEEP)
    return step(weights, batch)


WEIGHTS, BATCH = jnp.full((3, 64, 64), 0.01), jnp.ones((128, 64))


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def state(logdir):
    return profiling.trace(logdir, slow_step, WEIGHTS, BATCH, steps=3)


@pytest.fixture(scope="module")
def trace(logdir, state):
    return profiling.read(logdir)


def test_a_step_takes_at_least_what_happens_in_it(state, trace):
    """Tracing trains one step to warm up, and then those it records."""
    expected = WEIGHTS
    for _ in range(4):
        expected, _ = step(expected, BATCH)
    np.testing.assert_array_equal(state, expected)
    assert len(trace.steps) == 3
    assert min(trace.steps) >= SLEEP
    for (_, end), (start, _) in zip(trace.spans, trace.spans[1:], strict=False):
        assert end <= start
    assert len({e.program_id for e in trace.events if e.program == "jit_step"}) == 1


def test_operations_lie_inside_their_steps_and_none_is_lost(trace):
    inside = [event for i in range(3) for event in trace.during(i)]
    assert len(inside) == len(trace.events) > 0
    for i, seconds in enumerate(trace.steps):
        assert all(
            0 <= event.start and event.start + event.duration <= seconds
            for event in trace.during(i)
        )


def test_busy_and_idle_add_up_to_the_step_and_the_sleep_is_its_longest_gap(trace):
    for busy, seconds in zip(trace.busy(), trace.steps, strict=True):
        assert busy.seconds == seconds and busy.busy > 0
        assert busy.idle == pytest.approx(sum(length for _, length in busy.gaps))
        start, length = busy.gaps[0]
        assert start == 0 and length >= SLEEP


def test_a_scan_calls_each_operation_of_its_body_once_a_layer_and_they_know_their_scope(trace):
    scopes = profiling.op_scopes(step.lower(WEIGHTS, BATCH).compile())
    calls = collections.Counter((event.program, event.op) for event in trace.events)
    ops = [op for op in calls if scopes.get(op, "").endswith("layer/dot_general")]
    assert ops
    if jax.default_backend() == "cpu":  # on a GPU the loop may be unrolled
        assert {calls[op] / len(trace.steps) for op in ops} == {3}


@jax.jit
def branching_step(x, _):
    def double(x):
        return jnp.sin(x @ x) * 2

    x = jax.lax.cond(x.sum() > 0, lambda x: double(double(x)), lambda x: x @ x, x)
    x = jax.lax.switch(jnp.argmax(x[0]) % 2, [double, lambda x: double(x) @ x], x)
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), x), {}


def record(folder, step, *arguments):
    profiling.trace(folder, step, *arguments, steps=3)
    return profiling.read(folder)


@pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="a GPU's streams hold kernels, and no loops around them",
)
def test_loops_and_conditionals_are_the_containers_whatever_their_names(tmp_path):
    compiled = branching_step.lower(jnp.ones((200, 200)), 0).compile()
    trace = record(tmp_path, compiled, jnp.ones((200, 200)), 0)
    opcodes = {
        name: one.opcode for name, one in program.read(compiled).module.instructions.items()
    }
    containers = {event.op for event in trace.events if event.container}
    assert {opcodes[op] for op in containers} == {"while", "conditional"}
    assert containers == {
        e.op for e in trace.events if opcodes[e.op] in ("while", "conditional")
    }
    for number, busy in enumerate(trace.busy()):
        own = {e.container: 0.0 for e in trace.events}
        for e in trace.during(number):
            own[e.container] += e.self_time
        assert own[True] == 0.0 and own[False] == pytest.approx(busy.busy, rel=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs several devices of one host")
def test_of_two_devices_one_is_read(tmp_path):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    halves = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.device_put(jnp.ones((2, 300, 300)), halves)
    trace = record(tmp_path, jax.jit(lambda x, _: (jnp.tanh(x @ x), {})), x, 0)
    calls = collections.Counter((event.program_id, event.op) for event in trace.events)
    assert set(calls.values()) == {len(trace.steps)}


def test_a_record_without_steps_or_operations_is_refused(logdir, trace, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold plugins/profile"):
        profiling.read(tmp_path)
    profiling.trace(tmp_path, lambda state, batch: (state, batch), 0, 0, steps=1)
    with pytest.raises(ValueError, match="must hold steps named 'train', with operations"):
        profiling.read(tmp_path)
    monkeypatch.setattr(profiling, "STEP", "evaluate")
    with pytest.raises(ValueError, match="must hold steps named 'evaluate'"):
        profiling.read(logdir)


def test_of_several_records_the_newest_is_read(logdir, trace, tmp_path):
    shutil.copytree(logdir, tmp_path, dirs_exist_ok=True)
    damaged = tmp_path / "plugins" / "profile" / "later_by_name" / "host.xplane.pb"
    damaged.parent.mkdir()
    damaged.write_bytes(b"no record")
    os.utime(damaged, (0, 0))  # older than the other
    assert len(profiling.read(tmp_path).steps) == len(trace.steps)


def test_on_a_gpu_kernels_must_have_names_before_anything_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match=r"call xla_flags\.name_kernels\(\) before JAX"):
        profiling.trace(tmp_path, None, None, None)


def test_gaps_are_what_no_operation_covers_on_any_thread():
    events = tuple(
        profiling.Event(op, start, duration, duration, line, container=op == "while.1")
        for op, start, duration, line in (
            ("while.1", 10.0, 9.0, "a"),  # around the others: does not count
            ("fusion.1", 11.0, 2.0, "a"),
            ("fusion.2", 12.0, 3.0, "b"),  # overlaps: counts once
            ("fusion.3", 18.0, 5.0, "a"),  # reaches beyond the step: cut there
        )
    )
    [busy] = profiling.Trace("/host:CPU", ((10.0, 20.0),), events).busy()
    assert (busy.seconds, busy.busy, busy.idle) == (10.0, 6.0, 4.0)
    assert busy.gaps == ((5.0, 3.0), (0.0, 1.0))


GPU_RECORD = """
planes { name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "train" } }
  event_metadata { key: 2 value { id: 2 name: "launch" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_op" } }
  lines { id: 1 name: "python"
    events { metadata_id: 1 duration_ps: 9000000
      stats { metadata_id: 1 int64_value: 0 } } }
  lines { id: 2 name: "pool"
    events { metadata_id: 2 duration_ps: 100
      stats { metadata_id: 2 str_value: "fusion.1" } } }
}
planes { name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_op" } }
  lines { id: 13 name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 3000000
      stats { metadata_id: 2 str_value: "fusion.1" } }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 1000000 } }
  lines { id: 14 name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 3000000
      stats { metadata_id: 2 str_value: "fusion.1" } } }
}
"""


CPU_RECORD = """
planes { name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "train" } }
  event_metadata { key: 2 value { id: 2 name: "dot.1" } }
  event_metadata { key: 3 value { id: 3 name: "end: dot.1" } }
  event_metadata { key: 4 value { id: 4 name: "fusion.2" } }
  stat_metadata { key: 1 value { id: 1 name: "step_num" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_op" } }
  stat_metadata { key: 3 value { id: 3 name: "_p" } }
  stat_metadata { key: 4 value { id: 4 name: "_c" } }
  lines { id: 1 name: "python"
    events { metadata_id: 1 duration_ps: 9000000
      stats { metadata_id: 1 int64_value: 0 } } }
  lines { id: 2 name: "tf_XLAEigen/1"
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 1000000
      stats { metadata_id: 2 str_value: "dot.1" } stats { metadata_id: 3 uint64_value: 7 } }
    events { metadata_id: 4 offset_ps: 3000000 duration_ps: 2000000
      stats { metadata_id: 2 str_value: "fusion.2" } } }
  lines { id: 3 name: "tf_XLAEigen/2"
    events { metadata_id: 3 offset_ps: 7000000 duration_ps: 0
      stats { metadata_id: 4 uint64_value: 7 } } }
}
"""


def read_text(folder, record):
    folder = folder / "plugins" / "profile" / "run"
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        serialized = ProfileData.text_proto_to_serialized_xspace(record)
    (folder / "vm.xplane.pb").write_bytes(serialized)
    return profiling.read(folder.parents[2])


def test_a_cpus_operation_runs_until_its_end_on_any_thread_and_shares_time_equally(tmp_path):
    trace = read_text(tmp_path, CPU_RECORD)
    dot, fusion = trace.events
    assert (dot.op, fusion.op) == ("dot.1", "fusion.2")
    assert (dot.duration, fusion.duration) == pytest.approx((6e-6, 2e-6))
    assert (dot.self_time, fusion.self_time) == pytest.approx((5e-6, 1e-6))
    [busy] = trace.busy()
    assert busy.busy == pytest.approx(6e-6)


def test_on_a_gpu_the_streams_count_and_not_their_launches_or_summaries(tmp_path):
    trace = read_text(tmp_path, GPU_RECORD)
    assert trace.device == "/device:GPU:0"
    assert [(event.op, event.line) for event in trace.events] == [
        ("fusion.1", "Stream #13(Compute)"),
        ("MemcpyD2D", "Stream #13(Compute)"),
    ]
    [busy] = trace.busy()
    assert busy.busy == pytest.approx(4e-6) and busy.idle == pytest.approx(5e-6)
