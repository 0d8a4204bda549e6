"""Laws of validation, samples and speed beside the steps of a run."""

import dataclasses
import io
import itertools
import os
import re
import sys
import termios
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_run import configuration

from course_lib import configs, measure, training
from course_lib.measure import hardware
from course_lib.program import journal, loop, observe, settings
from course_lib.text import data


def metrics(loss, count=4.0, **others):
    found = {"loss": (jnp.float32(loss * count), jnp.float32(count))}
    return found | {
        name: (jnp.float32(value), jnp.float32(1)) for name, value in others.items()
    }


def test_a_tally_gives_the_mean_over_labels_says_what_is_not_finite_and_counts_skips():
    tally = observe.Tally()
    assert tally.add(metrics(1.0, 1.0)) and tally.add(metrics(3.0, 3.0))
    assert tally.line() == {"loss": 2.5} and tally.line() == {}
    assert tally.add(metrics(0.0, 0.0, skipped=1.0))
    assert tally.line() == {"loss": None, "skipped": 1}
    tally.add(metrics(2.0, skipped=0.0))
    assert tally.line() == {"loss": 2.0, "skipped": 1}
    assert not tally.add(metrics(float("nan"))) and not tally.add(metrics(float("inf")))


def test_a_step_in_a_dtype_without_a_unit_is_no_part_of_a_peak(text):
    run = training.build(configuration(text, model__dtype="bfloat16"))
    flops, why = observe._flops_for_mfu(run, hardware.get("h100"))
    assert measure.mfu(flops, 1.0, hardware.get("h100")) > 0 and why == ""
    assert (
        "no rate for bfloat16 products of NVIDIA T4"
        in observe._flops_for_mfu(run, hardware.get("t4"))[1]
    )
    assert observe._flops_for_mfu(run, None) == (None, "unknown device")


def test_the_bigram_model_is_that_of_the_text_or_none(text):
    tokens = {split: data.tokens(split, text) for split in data.SPLITS}
    whole, part = configuration(text, run__validation_batches=0), configuration(text)
    loss = observe.bigram_loss(tokens, whole)
    assert 0 < loss["bigram_loss"] < np.log(data.VOCAB_SIZE)
    short = tokens | {"validation": tokens["validation"][: 2 * 4 * 16 + 1]}
    assert observe.bigram_loss(tokens, part) == observe.bigram_loss(short, whole) != loss
    assert observe.bigram_loss(tokens | {"train": tokens["train"][:10]}, whole) == {}


def test_of_a_large_validation_split_a_part_is_used_and_of_the_courses_all(text):
    def used(tokens, config):
        return len(observe.validated(tokens, config))

    endless, shipped = np.broadcast_to(np.uint16(7), 2**40), data.tokens("validation")
    whole, many = (configuration(text, run__validation_batches=n) for n in (0, 10_000))
    assert used(endless, whole) == observe.VALIDATED + 1
    assert used(endless, many) == 10_000 * 4 * 16 + 1
    assert used(shipped, settings.complete(configs.get("cpu"))) == len(shipped)


def test_validation_is_the_mean_on_any_devices_in_any_minibatches_and_can_be_shortened(text):
    tokens, rows = data.tokens("validation", text), []

    def loss_fn(params, batch, rng):  # in place of the model
        rows.append(len(batch.inputs))
        loss = (batch.weights * (params + batch.labels)).sum()
        return loss, {"loss": (loss, batch.weights.sum())}

    def validated(count, **changes):
        whole = configuration(text, **changes)
        run, place = loop.build(whole, jax.devices("cpu")[:count])
        run = dataclasses.replace(run, loss_fn=loss_fn)
        return observe.validate(run, jnp.float32(0.5), tokens, whole, place)["loss"]

    everything = 0.5 + tokens[1:].astype(np.float64).mean()
    shortened = 0.5 + tokens[1 : 2 * 4 * 16 + 1].astype(np.float64).mean()
    assert shortened != pytest.approx(everything, rel=1e-5)
    for count, limit, mean in ((1, 0, everything), (4, 0, everything), (4, 2, shortened)):
        found = validated(count, run__validation_batches=limit)
        assert found == pytest.approx(mean, rel=1e-5)
    found = validated(1, run__validation_batches=0, training__num_minibatches=4)
    assert found == pytest.approx(everything, rel=1e-5) and rows == [4, 4, 1]  # each traced


def test_the_same_step_gives_the_same_sample_and_another_step_another(text):
    whole = configuration(text)
    run, _ = loop.build(whole, jax.devices("cpu")[:1])
    params = run.init(jax.random.key(0)).params
    first, again, other = (
        observe.sample(run, params, whole, data.tokenizer(), step) for step in (1, 1, 2)
    )
    assert first == again != other


PARAMS = {
    "kernel": jax.ShapeDtypeStruct((3, 4), "float32"),
    "bias": jax.ShapeDtypeStruct((2,), "float32"),
}


def metrics_line(loss):
    return {"loss": loss, "learning_rate": 0.003, "gradient_norm": 0.5}


def ticks(monkeypatch, *times):
    clock = iter(times)
    now = types.SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(observe, "time", now)


def test_speed_leaves_out_pauses_and_what_compiles_and_mfu_is_of_all_devices(
    text, tmp_path, monkeypatch
):
    whole, h100 = configuration(text, model__dtype="bfloat16"), hardware.get("h100")
    monkeypatch.setattr(hardware, "recognize", lambda device: h100)
    ticks(monkeypatch, 30.0, 30.0, 37.0, 38.0)
    with journal.Journal(tmp_path, 0, 10) as book:
        speed = observe.Speed(training.build(whole), book, 0, 2, PARAMS)
        speed.write(1, metrics_line(3.0))
        with speed.paused():
            pass
        speed.write(3, metrics_line(None))  # two steps
    device, first, second = journal.read(tmp_path, "times")
    assert (device["parameters"], device["tokens_a_step"]) == (14, 4 * 16)
    assert device["device"].startswith("2 x ") and "tokens_per_second" not in first
    assert second["tokens_per_second"] == 4 * 16 / 0.5
    mfu = measure.mfu(training.step_flops(whole), 0.5, h100) / 2
    assert second["mfu"] == pytest.approx(mfu)


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self):
        return True


@pytest.mark.parametrize("known", ["h100", None])
def test_in_80_columns_the_line_is_whole_and_the_bar_is_one(text, tmp_path, monkeypatch, known):
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    terminal = Terminal()
    terminal.fileno = lambda: theirs  # of which tqdm asks the size
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(hardware, "recognize", lambda device: known and hardware.get(known))
    monkeypatch.setattr(observe, "_memory", lambda device: 45 * 2**30)
    ticks(monkeypatch, 10.0, 10.0 + 64 / 98_765)
    # On a busy machine hours are left, and the bar is shorter.
    steady = itertools.count(step=0.01)
    monkeypatch.setattr("tqdm.std.time", lambda: next(steady))
    with journal.Journal(tmp_path, 1000, 2000) as book:
        run = training.build(configuration(text, model__dtype="bfloat16"))
        speed = observe.Speed(run, book, 0, 1, PARAMS)
        speed.write(1001, metrics_line(3.5))
        book.say("aloud")
        speed.write(1002, metrics_line(3.25))
        book._bar.refresh()
    os.close(ours)
    os.close(theirs)
    line = sys.stderr.getvalue().split("\r")[-1].strip()
    assert "aloud\n" in sys.stderr.getvalue()
    first, *_, last = journal.read(tmp_path, "times")
    assert ("unknown device: no MFU" in first["device"]) == (known is None)
    assert last["memory_bytes"] == 45 * 2**30
    words = rf"loss 3\.250, 98,765 tokens/s, {'MFU [0-9.]+%, ' if known else ''}45\.00 GiB"
    shown = re.fullmatch(rf"\|(.{{4,}})\| 1002/2000 \[\S+ left, {words}\]", line)
    assert shown and len(line) <= 80, line


def test_on_a_cpu_the_memory_is_that_of_the_process_and_on_a_device_its_peak():
    stats = {"peak_bytes_in_use": 5, "bytes_in_use": 3}
    assert observe._memory(types.SimpleNamespace(memory_stats=lambda: stats)) == 5
    if sys.platform == "linux":
        assert 2**25 < observe._memory(jax.devices("cpu")[0]) < 2**40


def test_the_learning_rate_is_computed_by_the_cpu_whatever_device_is_busy():
    seen = []

    def schedule(step):
        seen.append(jnp.zeros(()).devices())
        return jnp.float32(step) / 8

    with jax.default_device(jax.devices("cpu")[3]):
        assert observe.learning_rate(schedule, 3) == 3 / 8
    assert seen == [{jax.devices("cpu")[0]}]
