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
from course_lib.program import checksums, loop, settings
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


@pytest.fixture(scope="module", params=["one_device", slow("eight_devices")])
def name(request):
    return request.param


def devices(name):
    return jax.devices("cpu")[: DEVICES[name]]


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Builds every configuration, and takes the first, compiled one of so many devices: their
    fields differ in name only.
    """
    build, built = loop.build, {}

    def build_once(config, devices):
        return built.setdefault(len(devices), build(config, devices))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "build", build_once)
        yield


def copied(name, folder, of_config=lambda tree: tree, of_checkpoint=lambda tree: tree):
    """Copies a stored run, with changes to its `config.json` and to its checkpoint's
    configuration.
    """
    shutil.copytree(DATA / name, folder)
    [checkpoint] = (folder / "checkpoints").iterdir()
    about = json.loads((checkpoint / "about.json").read_text())
    about["config"] = of_checkpoint(about["config"])
    (checkpoint / "about.json").write_text(json.dumps(about, indent=1))
    checksums.write(checkpoint)
    whole = of_config(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(whole, indent=1))
    return folder


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


def continued(folder, text, name):
    """Trains a run on to step 20 as its `config.json` says, and returns what became of it."""
    whole = stored_configuration(folder)
    whole.run.corpus, whole.training.steps = text, 20
    assert loop.train(whole, folder, devices(name)) == loop.Ended(loop.DONE, 20)
    return (folder / "metrics.jsonl").read_bytes(), digest(restored(folder, whole, name).state)


@pytest.fixture(scope="module")
def as_stored(text, name, tmp_path_factory):
    return continued(copied(name, tmp_path_factory.mktemp("stored") / name), text, name)


@pytest.mark.parametrize("name", DEVICES)
def test_a_stored_run_is_restored_bit_for_bit(name):
    whole = stored_configuration(DATA / name)
    found = digest(restored(DATA / name, whole, name).state)
    assert found == json.loads((DATA / "digests.json").read_text())[name]


def test_a_stored_run_goes_on_as_the_version_that_stored_it_went_on(name, as_stored):
    """Dropout is 0.1: with other masks than that version drew, the losses differ at once."""
    lines = [json.loads(line) for line in as_stored[0].splitlines()]
    before = json.loads((DATA / "continued.json").read_text())[name]
    for line, other in zip(lines, before, strict=True):  # a newer version may measure more
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


def with_new(tree):
    for part in NEW.keys() & tree.keys():
        tree[part][NEW[part]] = 0.5
    return tree


@pytest.fixture
def new_fields(monkeypatch):
    """Gives the configuration new fields, and a new part."""
    template, parts = configs.published_155m, settings.defaults

    def with_new_part():
        found = template()
        found.new_part = {}
        return with_new(found)

    monkeypatch.setattr(configs, "published_155m", with_new_part)
    monkeypatch.setattr(settings, "defaults", lambda: with_new(parts()))
    monkeypatch.setitem(configs.OPTIMIZER, NEW["optimizer"], 0.5)  # checked where it is used


@pytest.mark.parametrize(
    "written_out", [False, True], ids=["older than the fields", "with the fields"]
)
def test_new_fields_change_nothing_for_an_older_run(
    text, name, tmp_path, new_fields, as_stored, written_out
):
    def in_config(tree):
        return with_new(tree | {"new_part": {}})

    def in_checkpoint(tree):
        run = dict(tree["run"])
        return in_config(tree) | {"run": run}  # of which a checkpoint holds some fields only

    changes = (in_config, in_checkpoint) if written_out else ()
    folder = copied(name, tmp_path / name, *changes)
    assert continued(folder, text, name) == as_stored
    written = json.loads((folder / "config.json").read_text())
    assert all(written[part][field] == 0.5 for part, field in NEW.items())


def test_an_older_run_does_not_go_on_with_another_value_of_a_new_field(
    text, name, tmp_path, new_fields
):
    def another(tree):
        return tree | {"model": tree["model"] | {"a_new_field": 0.25}}

    folder = copied(name, tmp_path / name, another)
    with pytest.raises(loop.Refused, match=r"model\.a_new_field: 0\.5 saved, 0\.25 given"):
        continued(folder, text, name)


def test_a_field_of_a_stored_run_that_is_gone_is_named(text, name, tmp_path):
    def with_old(tree):
        return tree | {"model": tree["model"] | {"gone": 1}}

    folder = copied(name, tmp_path / "checkpoint", of_checkpoint=with_old)
    with pytest.raises(loop.Refused, match=r"model\.gone: 1 saved, not given"):
        continued(folder, text, name)
    folder = copied(name, tmp_path / "config", with_old)
    with pytest.raises(ValueError, match=r"model\.gone=1 is no field"):
        continued(folder, text, name)


def test_a_field_that_was_fixed_and_is_free_now_does_not_stop_an_older_run():
    given = settings.fixed(settings.complete({}))
    saved = given | {"model": given["model"] | {"attention": "blocks"}}
    assert "attention" not in given["model"] and settings.changed(saved, given) == []
