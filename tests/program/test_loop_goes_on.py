"""Laws of a run that goes on with the same or with another configuration."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from slow_cases import slow
from small_run import assert_same_losses, configuration, corpus, losses, one_device, train

from course_lib import training
from course_lib.measure import hardware
from course_lib.program import journal, loop, settings
from course_lib.text import data

WRITTEN = ("metrics.jsonl", "samples.jsonl")
pytestmark = pytest.mark.usefixtures("quick")


def loss_steps(folder):
    return [step for step, _ in journal.pairs(journal.read(folder), "loss")]


def test_a_run_that_ended_and_goes_on_counts_every_step_once(text, unbroken, tmp_path):
    for steps in (5, 20, 40):
        train(text, tmp_path, training__steps=steps)
        assert (tmp_path / "report.md").exists()
    ends = [7, 14, 21, 28, 35, 40]
    assert loss_steps(unbroken) == ends and loss_steps(tmp_path) == sorted([5, 20, *ends])
    np.testing.assert_allclose(losses(tmp_path, ends), losses(unbroken, ends), rtol=1e-12)


def test_what_is_done_is_not_done_again(text, at, capsys):
    folder = at(40)
    before = {name: (folder / name).read_bytes() for name in WRITTEN}
    assert train(text, folder, training__steps=5) == loop.Ended(loop.DONE, 40)
    assert "goes on after step 40 of 40\n" in capsys.readouterr().err
    assert before == {name: (folder / name).read_bytes() for name in WRITTEN}
    assert json.loads((folder / "config.json").read_text())["training"]["steps"] == 5


@pytest.mark.parametrize("count", [1, slow(2)])
def test_before_the_first_step_a_run_is_checked_once_and_built_once(
    text, tmp_path, monkeypatch, count
):
    class Begins(Exception):
        pass

    def begins(*_):
        raise Begins

    whole, called = configuration(text, data__batch_size=8), []
    for owner, name in (
        (settings, "check"),
        (training, "check"),
        (training, "functions"),
        (training, "make_train_step"),
    ):
        right = getattr(owner, name)
        monkeypatch.setattr(
            owner,
            name,
            lambda *a, right=right, name=name, **o: (called.append(name), right(*a, **o))[1],
        )
    monkeypatch.setattr(loop, "Loop", begins)
    with pytest.raises(Begins):
        loop.train(whole, tmp_path, jax.devices("cpu")[:count])
    assert called == ["check", "functions", "make_train_step"]


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


@pytest.mark.parametrize("back", [False, slow(True)], ids=["to four devices", "back to one"])
def test_a_run_goes_on_on_another_mesh_with_the_same_losses(text, tmp_path, capsys, back):
    spread = dict(mesh__tensor=2, strategy__zero=1, model__dropout_rate=0.0)
    alone, four = (
        (one_device(), dict(model__dropout_rate=0.0)),
        (jax.devices("cpu")[:4], spread),
    )
    (before, first), (after, second) = (four, alone) if back else (alone, four)
    a, b = tmp_path / "a", tmp_path / "b"
    assert train(text, a, before, training__steps=10, **first).step == 10
    shutil.copytree(a, b)
    train(text, b, before, training__steps=20, **first)
    capsys.readouterr()
    train(text, a, after, training__steps=20, **second)
    said = capsys.readouterr().err
    for field, pair in {"data": (1, 2), "tensor": ("not", 2), "zero": (0, 1)}.items():
        old, new = pair[::-1] if back else pair
        assert f"{field}: {old} saved, {new} given" in said
    assert_same_losses(a, b)


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
