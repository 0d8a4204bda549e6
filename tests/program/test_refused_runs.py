"""Laws of runs that are refused, before anything is written."""

import contextlib
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import corpus, train

from course_lib import files
from course_lib.program import loop, processes
from course_lib.text import data

pytestmark = pytest.mark.usefixtures("quick")


def test_a_folder_in_which_another_process_trains_is_left_alone(text, tmp_path):
    with files.locked(tmp_path), pytest.raises(BlockingIOError, match="is in use by another"):
        train(text, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("kind", [RuntimeError, jax.errors.JaxRuntimeError])
def test_an_error_that_may_pass_is_no_refusal_after_which_nobody_would_try_again(
    text, tmp_path, monkeypatch, kind
):
    def fails(split, corpus):
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


@pytest.mark.parametrize("place", ["run", "."])
def test_a_run_inside_of_its_text_is_refused_as_it_could_not_go_on(text, place):
    before = sorted(Path(text).iterdir())
    with pytest.raises(loop.Refused, match="must not lie in corpus=.*take another --run"):
        train(text, Path(text) / place)
    assert sorted(Path(text).iterdir()) == before


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([3, 99, 3], r"tokens\[1\]=99 must be in \[0, vocab_size=99\)"),
        ([3], "two or more, not 1"),
    ],
)
def test_a_validation_split_that_does_not_work_is_refused_and_not_only_when_it_is_due(
    text, tmp_path, monkeypatch, tokens, message
):
    splits = {"train": np.arange(99).repeat(9), "validation": np.array(tokens)}
    monkeypatch.setattr(data, "tokens", lambda split, corpus: splits[split].astype(np.uint16))
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
        other = functools.partial(two_processes, change)
        monkeypatch.setattr(processes, "gather", other)
        with pytest.raises(loop.Refused) as error:
            train(text, tmp_path)
        assert re.search(f"{message}$", str(error.value))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_the_text_may_lie_elsewhere_in_another_process(text, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(processes, "gather", lambda words: said.append(words) or [words])
    for folder in (text, corpus(tmp_path / "other")):
        with contextlib.suppress(loop.Refused):
            train(folder, tmp_path / "run", mesh__data=3)  # of one device
    assert said[0] == said[1] and text not in said[0]
