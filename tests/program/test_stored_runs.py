"""Runs that an older version of this course began: they are restored, and go on as they would
have.
"""

import contextlib
import hashlib
import json
import pathlib
import shutil

import jax
import pytest
from slow_cases import slow
from small_run import numbers, stored_configuration

from course_lib import configs
from course_lib.program import journal, loop, settings
from course_lib.program.checkpoints import Checkpoints

DATA = pathlib.Path(__file__).parents[1] / "data"
DEVICES = {"one_device": 1, "eight_devices": 8}
NEW = {
    "model": "a_new_field",
    "optimizer": "of_the_optimizer",
    "data": "of_the_data",
    "training": "another",
    "run": "of_the_program",
    "new_part": "its_field",
}


def devices(name):
    return jax.devices("cpu")[: DEVICES[name]]


def digest(state):
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found.update(jax.tree_util.keystr(path).encode())
        found.update(numbers(leaf).tobytes())
    return found.hexdigest()


def restored(folder, whole, name):
    run, _ = loop.build(whole, devices(name))
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as found:
        return found.restore(run.abstract()[0])


@pytest.mark.parametrize("name", DEVICES)
def test_a_stored_run_is_restored_bit_for_bit(name):
    whole = stored_configuration(DATA / name)
    found = digest(restored(DATA / name, whole, name).state)
    assert found == json.loads((DATA / "digests.json").read_text())[name]


@pytest.mark.parametrize("name", ["one_device", slow("eight_devices")])
def test_a_stored_run_goes_on_as_the_version_that_stored_it_went_on(text, name, tmp_path):
    """Dropout is 0.1: with other masks than that version drew, the losses differ at once."""
    folder = shutil.copytree(DATA / name, tmp_path / name)
    whole = stored_configuration(folder)
    whole.run.corpus, whole.training.steps = text, 20
    assert loop.train(whole, folder, devices(name)) == loop.Ended(loop.DONE, 20)
    before = json.loads((DATA / "continued.json").read_text())[name]
    for line, other in zip(journal.read(folder), before, strict=True):  # newer: may have more
        assert {name: line.get(name) for name in other} == pytest.approx(other, rel=1e-4)


def test_no_default_is_another_than_when_the_runs_were_stored():
    """A stored run that lacks a field has its default: a default is never changed."""
    before = json.loads((DATA / "defaults.json").read_text())
    now = json.loads(json.dumps(settings.complete({}).to_dict()))
    for part, fields in before.items():
        if isinstance(fields, dict):
            assert fields == {field: now[part].get(field) for field in fields}, part
        else:
            assert fields == now[part]


@pytest.fixture
def new_fields(monkeypatch):
    """Gives the configuration new fields, and a new part."""
    template, parts = configs.published_155m(), settings.defaults()
    template.new_part = {}
    for part in NEW:
        (template if part in template else parts)[part][NEW[part]] = 0.5
    monkeypatch.setattr(configs, "published_155m", template.copy_and_resolve_references)
    monkeypatch.setattr(settings, "defaults", lambda: parts)
    monkeypatch.setitem(configs.OPTIMIZER, NEW["optimizer"], 0.5)  # checked where it is used


@pytest.mark.parametrize("name", DEVICES)
def test_of_an_older_run_new_fields_have_their_defaults_and_one_that_is_gone_is_named(
    name, new_fields
):
    [about] = (DATA / name / "checkpoints").glob("*/about.json")
    saved = json.loads(about.read_text())["config"]
    whole = stored_configuration(DATA / name)
    assert all(whole[part][field] == 0.5 for part, field in NEW.items())
    settings.check(whole)

    def changed():
        return settings.changed(saved, settings.fixed(whole) | {"corpus": saved["corpus"]})

    assert changed() == []
    whole.model.a_new_field = 0.25
    assert changed() == ["model.a_new_field: 0.5 saved, 0.25 given"]
    saved = saved | {"model": saved["model"] | {"a_new_field": 0.25, "gone": 1}}
    assert changed() == ["model.gone: 1 saved, not given"]
    with pytest.raises(ValueError, match=r"model\.gone=1 is no field"):
        settings.complete({"model": saved["model"]})


def test_a_field_that_was_fixed_and_is_free_now_does_not_stop_an_older_run():
    given = settings.fixed(settings.complete({}))
    saved = given | {"model": given["model"] | {"attention": "blocks"}}
    assert "attention" not in given["model"] and settings.changed(saved, given) == []
