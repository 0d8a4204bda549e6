"""Laws of a run that goes on with the same or another configuration, and of runs that are
refused before anything is written.
"""

import contextlib
import functools
import json
import re
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from programs import LARGE
from small_run import (
    assert_same_losses,
    configuration,
    corpus,
    losses,
    one_device,
    stored_configuration,
    train,
)

from course_lib import files, measure, training
from course_lib.measure import hardware
from course_lib.program import journal, loop, processes, room, settings
from course_lib.text import data

WRITTEN = ("metrics.jsonl", "samples.jsonl")
DOES_NOT_FIT, STEP_MEMORY = room.does_not_fit, room.step_memory
pytestmark = pytest.mark.usefixtures("quick")


def test_a_run_that_ended_and_goes_on_counts_every_step_once(text, unbroken, tmp_path):
    ends = [7, 14, 21, 28, 35, 40]
    for steps in (5, 40):
        train(text, tmp_path, training__steps=steps, run__sample_tokens=0)
        assert (tmp_path / "report.md").exists()
    found = [step for step, _ in journal.pairs(journal.read(tmp_path), "loss")]
    assert found == [5, *ends]
    np.testing.assert_allclose(losses(tmp_path, ends), losses(unbroken, ends), rtol=1e-12)


def test_what_is_done_is_not_done_again(text, at, capsys):
    folder = at(40)
    before = {name: (folder / name).read_bytes() for name in WRITTEN}
    assert train(text, folder, training__steps=5) == loop.Ended(loop.DONE, 40)
    assert "goes on after step 40 of 40\n" in capsys.readouterr().err
    assert before == {name: (folder / name).read_bytes() for name in WRITTEN}
    assert stored_configuration(folder).training.steps == 5


def test_before_the_first_step_a_run_is_checked_once_and_built_once(
    text, tmp_path, monkeypatch
):
    class Begins(Exception):
        pass

    whole = configuration(text, data__batch_size=8)  # of a batch that no other test builds
    times = {(settings, "check"): 1, (training, "check"): 0}
    times |= {(training, "next_token_loss"): 1, (training, "make_train_step"): 1}
    called = {of: mock.Mock(wraps=getattr(*of)) for of in times}
    for of in times:
        monkeypatch.setattr(*of, called[of])
    monkeypatch.setattr(loop, "Loop", mock.Mock(side_effect=Begins))
    with pytest.raises(Begins):
        loop.train(whole, tmp_path, one_device())
    assert {of: called[of].call_count for of in times} == times


def test_a_step_that_does_not_fit_is_refused_and_its_folder_may_be_used(
    text, tmp_path, monkeypatch
):
    monkeypatch.setattr(room, "does_not_fit", DOES_NOT_FIT)
    monkeypatch.setattr(room, "step_memory", STEP_MEMORY)
    told = r"not fit into the .* GiB of cpu. Per device it needs: peak .*: arguments"
    huge = dict(data__batch_size=10**9, model__dropout_rate=0.0)  # compiles in half the time
    with pytest.raises(loop.Refused, match=told) as refused:
        train(text, tmp_path, **huge)
    tried = re.findall(r"([\d.]+ GiB) with --set (\S+)=(\S+?)(?:,|$)", str(refused.value))
    # "model.remat" only where it needs less, which not every version of XLA makes of it
    assert {"training.num_minibatches", "model.loss_chunks"} <= {name for _, name, _ in tried}
    needs, name, value = tried[-1]
    whole = configuration(text, **huge)
    settings.set_field(whole, name, value)
    run, _ = loop.build(whole, one_device())
    assert measure.gib(measure.memory(run.train_step.lower(*run.abstract())).peak) == needs
    small = dict(training__steps=1, run__sample_tokens=0)
    assert train(text, tmp_path, **small).reason == loop.DONE


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_a_step_fits_if_its_peak_does_on_each_device(platform, monkeypatch):
    step, shape = jax.jit(lambda x: x @ x), jax.ShapeDtypeStruct((64, 64), "float32")
    peak = measure.memory(step.lower(shape).compile()).peak
    device = mock.Mock(spec=jax.Device, platform=platform)
    device.memory_stats = mock.Mock()
    run = mock.Mock(spec=training.Run, train_step=step, abstract=lambda: (shape,))
    for most in (peak, peak - 1):
        device.memory_stats.return_value = {"bytes_limit": most} if platform == "gpu" else None
        pages = {"SC_PHYS_PAGES": 2 * most, "SC_PAGE_SIZE": 1}
        monkeypatch.setattr(room.os, "sysconf", pages.__getitem__)
        assert bool(DOES_NOT_FIT(STEP_MEMORY(run), [device, device])) == (most < peak)


def test_a_container_may_have_less_memory_than_its_machine(tmp_path, monkeypatch):
    whole = room.host_memory()
    files = tmp_path / "memory.max", tmp_path / "none"
    monkeypatch.setattr(room, "CGROUP_LIMITS", files)
    for text, most in (("max", whole), (f"{whole // 2}\n", whole // 2), (f"{2**63}", whole)):
        files[0].write_text(text)
        assert room.host_memory() == most


def test_a_step_whose_memory_a_library_hides_from_the_plan_is_trained_all_the_same():
    function, shapes = LARGE["hidden layer"]
    run = mock.Mock(spec=training.Run, train_step=jax.jit(function), abstract=lambda: shapes)
    assert DOES_NOT_FIT(STEP_MEMORY(run), jax.devices("cpu")[:1]) == ""


def test_the_loss_is_what_training_by_hand_gives(text, unbroken):
    first = [line for line in journal.read(unbroken) if "loss" in line][0]
    whole = configuration(text)
    run, place = loop.build(whole, one_device())
    batches = loop.read_batches(whole, data.tokens("train", text), place)
    state, total = run.init(jax.random.key(whole.seed)), None
    for _ in range(7):
        state, metrics = run.train_step(state, next(batches))
        total = metrics if total is None else training.add_metrics(total, metrics)
    np.testing.assert_allclose(first["loss"], training.mean_metrics(total)["loss"], rtol=1e-6)
    assert first["step"] == 7 and first["learning_rate"] == pytest.approx(1e-2 * 6 / 10)


def test_a_run_goes_on_on_another_mesh_with_the_same_losses(text, tmp_path, capsys):
    alone, four = tmp_path / "alone", tmp_path / "four"
    same = dict(model__dropout_rate=0.0, run__sample_tokens=0)
    train(text, alone, training__steps=10, **same)
    shutil.copytree(alone, four)
    train(text, alone, training__steps=20, **same)
    capsys.readouterr()
    spread = dict(training__steps=20, mesh__tensor=2, strategy__zero=1, **same)
    train(text, four, jax.devices("cpu")[:4], **spread)
    said = capsys.readouterr().err
    for change in ("data: 1 saved, 2", "tensor: not saved, 2", "zero: 0 saved, 1"):
        assert f"{change} given" in said
    assert_same_losses(four, alone)


def test_what_says_how_it_is_computed_may_change_and_the_losses_stay(
    text, unbroken, at, monkeypatch, capsys
):
    folder = at(30)
    given = dict(model__remat=("MLP", "Attn"), model__attention="xla", run__sample_tokens=0)
    with monkeypatch.context() as patched:
        patched.setattr(jax, "__version__", "0.99")
        patched.setattr(hardware, "cores", lambda: 99)
        train(text, folder, **given)
    lines = capsys.readouterr().err.splitlines()
    [said] = [line for line in lines if "rounded differently: " in line]
    told = r"jax: '.*' saved, '0.99' given; cores: .*; model.attention: .*; model.remat: \[\] "
    assert re.search(told, said)
    assert_same_losses(folder, unbroken)


def test_a_run_with_another_configuration_is_refused_and_stays_as_it_was(text, at, tmp_path):
    folder = at(40)
    before = (folder / "config.json").read_bytes()
    whole = configuration(text, optimizer__learning_rate=0.02)
    whole.seed = 43
    told = r"optimizer\.learning_rate: 0\.01 saved, 0\.02 given; seed: 42 saved, 43 given"
    with pytest.raises(loop.Refused, match=told) as error:
        loop.train(whole, folder, one_device())
    assert "model." not in str(error.value)
    assert (folder / "config.json").read_bytes() == before
    other = corpus(tmp_path / "other")
    # the same text in another place is the same
    assert train(other, folder).reason == loop.DONE
    (tmp_path / "other" / "00.py").write_text("a = 1\n")
    with pytest.raises(loop.Refused, match=r"corpus\.\w+\.tokens: \d+ saved, \d+ given"):
        train(other, folder)


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew_over_its_metrics(
    text, unbroken, at
):
    folder = at(40)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(loop.Refused, match="has no checkpoints any more.* give another folder"):
        train(text, folder)
    for name in (*WRITTEN, "report.md", "times.jsonl", "config.json"):
        assert (folder / name).read_bytes() == (unbroken / name).read_bytes()


def test_a_folder_in_which_another_process_trains_is_left_alone(text, tmp_path):
    with files.locked(tmp_path), pytest.raises(BlockingIOError, match="is in use by another"):
        train(text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("kind", [RuntimeError, jax.errors.JaxRuntimeError])
def test_an_error_that_may_pass_is_no_refusal_after_which_nobody_would_try_again(
    text, tmp_path, monkeypatch, kind
):
    def fails(split, corpus, tokenizer):
        raise kind("changed while it was read, or UNAVAILABLE")

    monkeypatch.setattr(data, "tokens", fails)
    with pytest.raises(kind):
        train(text, tmp_path)


BAD = [
    ({"data__seq_len": 15_000, "model__max_seq_len": 15_000}, "seq_len=15000"),
    ({"mesh__tensor": 3}, "mesh="),
]


@pytest.mark.parametrize(("changes", "field"), BAD)
def test_a_mistake_is_refused_before_anything_is_written(text, tmp_path, changes, field):
    with pytest.raises(loop.Refused, match=field):
        train(text, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_a_run_inside_of_its_text_is_refused_as_it_could_not_go_on(text):
    before = sorted(Path(text).iterdir())
    for place in ("run", "."):
        with pytest.raises(loop.Refused, match="must not lie in corpus=.*take another --run"):
            train(text, Path(text) / place)
    assert sorted(Path(text).iterdir()) == before


def test_a_validation_split_that_does_not_work_is_refused_and_not_only_when_it_is_due(
    text, tmp_path, monkeypatch
):
    splits = {"train": np.arange(99).repeat(9)}
    monkeypatch.setattr(data, "tokens", lambda split, *_: splits[split].astype(np.uint16))
    for tokens, message in (([3, 99, 3], r"tokens\[1\]=99"), ([3], "two or more, not 1")):
        splits["validation"] = np.array(tokens)
        with pytest.raises(loop.Refused, match=f"the validation split: .*{message}"):
            train(text, tmp_path, model__vocab_size=99, model__num_outputs=99)


OTHER_PROCESS = [
    ({"seed": 7}, "must have the same configuration: seed: 42 in process 0, 7 in process 1"),
    ({"jax": "0.0"}, "jax: '.*' in process 0, '0.0' in process 1"),
    ({"folder": "elsewhere"}, "folder: '.*' in process 0, 'elsewhere' in process 1"),
    ({"corpus": {}}, r"corpus\.train\.tokens: \d+ in process 0, not in process 1; .*"),
    ({"refused": "no folder"}, "refused: not in process 0, 'no folder' in process 1"),
]


def two_processes(change, said):
    return [said, json.dumps(json.loads(said) | change)]


def test_what_another_process_is_told_or_finds_must_be_the_same(text, tmp_path, monkeypatch):
    for change, message in OTHER_PROCESS:
        monkeypatch.setattr(processes, "gather", functools.partial(two_processes, change))
        with pytest.raises(loop.Refused, match=f"{message}$"):
            train(text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_text_may_lie_elsewhere_in_another_process(text, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(processes, "gather", lambda words: said.append(words) or [words])
    for folder in (text, corpus(tmp_path / "other")):
        with contextlib.suppress(loop.Refused):
            train(folder, tmp_path / "run", mesh__data=3)  # of one device
    assert said[0] == said[1] and text not in said[0]
