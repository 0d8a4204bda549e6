"""Laws of a measured time: what runs, how often, in which order."""

import types

import jax
import jax.numpy as jnp
import pytest

from course_lib.measure import compare, peak_in_own_process, step_time, time, timing


def step(state, batch):
    return state + batch, {"loss": jnp.sum(state)}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still: tests move it, `clock[0] += 1`."""
    now = [0.0]
    monkeypatch.setattr(timing, "clock", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_each_step_gets_the_state_of_the_one_before():
    seen = []

    def remembering(state, batch):
        seen.append(state)
        return state + batch, {}

    found = step_time(remembering, 0, 2, steps=2)
    assert seen == [0, 2, 4, 6] and found.compile_seconds is None


def test_a_jitted_step_is_compiled_once_and_apart_and_its_donated_state_is_handed_on():
    traces, first = [], jnp.zeros(8)

    def traced(state, batch):
        traces.append(1)
        return step(state, batch)

    found = step_time(jax.jit(traced, donate_argnums=0), first, jnp.ones(8), steps=5)
    assert len(traces) == 1 and first.is_deleted()
    assert found.compile_seconds > found.median
    assert 0 < found.low <= found.median <= found.high


def test_the_first_calls_which_compile_are_not_in_the_time(clock):
    calls = []

    def slow_at_first():
        calls.append(1)
        clock[0] += 0.5 if len(calls) == 1 else 0.001

    found = time(slow_at_first, repeats=1)
    assert found.median == pytest.approx(0.001) and str(found) == "1 ms (1 to 1)"


def test_warm_up_steps_are_not_in_the_time_and_each_step_is_waited_for(clock):
    class Result:
        """The result of a step that takes a second to warm up, then a millisecond."""

        def __init__(self, number):
            self.number = number

        def block_until_ready(self):
            clock[0] += 1.0 if self.number <= 2 else 0.001
            return self

    found = step_time(lambda state, _: (Result(state.number + 1), {}), Result(0), 0, steps=3)
    assert (found.low, found.high) == pytest.approx((0.001, 0.001))


def test_functions_are_compared_by_turns_and_waited_for(clock):
    calls = []

    def call(name, seconds):
        calls.append(name)
        clock[0] += seconds

    found = compare({"a": lambda: call("a", 1), "b": lambda: call("b", 2)}, repeats=3)
    assert calls == ["a", "b"] * 5
    assert (found["a"].median, found["b"].median) == (1, 2)


COUNTS = jax.local_devices()[0].memory_stats() is not None


@pytest.mark.skipif(COUNTS, reason="this device counts the memory in use")
def test_where_devices_do_not_count_there_is_no_peak_and_nothing_runs(tmp_path):
    assert peak_in_own_process("own_process:touch", path=str(tmp_path / "ran")) is None
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not COUNTS, reason="a CPU does not count the memory in use")
def test_the_peak_of_another_process_is_that_of_its_arrays_alone():
    here = jnp.ones((64, 2**20))
    peak = peak_in_own_process("own_process:hold", megabytes=32)
    assert 32 * 2**20 <= peak < here.nbytes


def test_what_goes_wrong_in_the_other_process_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.Device, "memory_stats", lambda self: {}, raising=False)
    with pytest.raises(RuntimeError, match="No such file or directory"):
        peak_in_own_process("own_process:touch", path=str(tmp_path / "nowhere" / "ran"))
