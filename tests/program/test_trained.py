"""Laws of what a run leaves: its model predicts, samples, and begins another run."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from slow_cases import slow
from small_run import assert_same_run, configuration, final_state, numbers, train

from course_lib import evaluate, sample
from course_lib.program import journal, loop, trained
from course_lib.text import data

pytestmark = pytest.mark.usefixtures("quick")
STORED = pathlib.Path(__file__).parents[1] / "data" / "one_device"
WHOLE = dict(run__validation_batches=0, run__sample_tokens=0)


@pytest.fixture(scope="module")
def folder(text, quickly, tmp_path_factory):
    """A run that validated on all of its text."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with quickly():
        train(text, folder, **WHOLE, training__steps=20)
    return folder


@pytest.fixture(scope="module")
def found(folder, quickly):
    with quickly():
        return trained.load(folder)


def last_loss(folder):
    return journal.pairs(journal.read(folder), "validation_loss")[-1][1]


def test_a_run_predicts_its_own_text_as_well_as_its_last_validation_said(folder, found, text):
    result = trained.evaluate(found)
    assert result["nats"] == pytest.approx(last_loss(folder), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(result["nats"]))
    assert result == trained.evaluate(found, text) and found.step == 20


def test_of_a_checkpoint_that_orbax_wrote_only_the_parameters_are_read():
    params, whole = trained.load(STORED).params, final_state(STORED).state.params
    for one, other in zip(*map(jax.tree.leaves, (params, whole)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        dict(mesh__pipe=2, strategy__chunks=2, strategy__microbatches=2),
        slow(dict(mesh__data=2, strategy__zero=3, optimizer__param_dtype="bfloat16")),
    ],
    ids=["in chunks", "in bfloat16"],
)
def test_a_run_on_a_mesh_is_loaded_on_one_device_with_its_layers_in_order(
    text, tmp_path, changes
):
    model = dict(model__num_layers=4, model__scan_layers=True, **WHOLE, training__steps=10)
    schedule = dict(strategy__schedule="breadth_first") if "strategy__chunks" in changes else {}
    train(text, tmp_path / "run", jax.devices("cpu")[:2], **model, **changes, **schedule)
    found = trained.load(tmp_path / "run")
    assert trained.evaluate(found)["nats"] == pytest.approx(
        last_loss(tmp_path / "run"), rel=1e-4
    )


def test_bits_per_byte_are_those_of_the_texts_bytes_whatever_the_tokens(found, text):
    words = [one.text for one in data.documents("validation", text)]
    result = trained.evaluate(found)
    tokens = data.tokens("validation", text)
    first = len(found.tokenizer.decode(tokens[:1].tolist()).encode())
    size = sum(len(each.encode()) for each in words) - first
    nats = result["nats"] * (len(tokens) - 1)
    assert result["tokens"] == len(tokens) - 1
    assert result["bits"] == pytest.approx(nats / math.log(2) / size, rel=1e-6)


def test_a_sample_goes_on_from_its_prompt_and_ends_with_the_document(found, monkeypatch):
    first, again, other = (
        trained.sample(found, "def é(", length=30, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other and first.startswith("def é(")
    end = data.end_of(found.tokenizer)

    def drawn(apply_fn, params, prompt, *_, **__):
        assert prompt[0, 0] == end  # a document begins
        new = found.tokenizer.encode("ab").ids
        return np.concatenate([prompt[0], new, [end], new])[None]

    monkeypatch.setattr(trained.sampling, "generate", drawn)
    assert trained.sample(found, "x = ") == "x = ab" and trained.sample(found) == "ab"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(mesh__data=2, strategy__zero=1, model__dtype="bfloat16"),
        slow(dict(optimizer__param_dtype="bfloat16", optimizer__name="lion")),
    ],
    ids=["as it was", "on two devices", "in bfloat16"],
)
def test_a_run_begins_with_the_parameters_of_another_and_nothing_else_of_it(
    folder, text, changes
):
    count = changes.get("mesh__data", 1)
    whole = configuration(text, run__weights=str(folder), **changes)
    run, _ = loop.build(whole, jax.devices("cpu")[:count])
    fresh = run.init(jax.random.key(whole.seed))
    begun, before = trained.begin(fresh, whole), final_state(folder).state
    assert jax.tree.map(lambda leaf: leaf.sharding, begun) == jax.tree.map(
        lambda leaf: leaf.sharding, fresh
    )
    for new, old in zip(*map(jax.tree.leaves, (begun.params, before.params)), strict=True):
        np.testing.assert_array_equal(new, np.asarray(old).astype(new.dtype))
    others = (dataclasses.replace(state, params=None) for state in (begun, fresh))
    for new, old in zip(*map(jax.tree.leaves, others), strict=True):
        np.testing.assert_array_equal(numbers(new), numbers(old))


def test_a_run_that_began_with_another_goes_on_without_it_bit_for_bit(folder, text, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    changes = dict(run__weights=str(source), run__tokenizer=str(source / "tokenizer.json"))
    changes |= dict(optimizer__schedule="constant", run__keep=4)
    through, stopped = tmp_path / "through", tmp_path / "stopped"
    train(text, through, **changes)
    shutil.copytree(through, stopped)  # as a kill after step 20 leaves it
    for step in (30, 40):
        shutil.rmtree(stopped / "checkpoints" / f"{step:08d}")
    shutil.rmtree(source)
    train(text, stopped, **changes)
    assert_same_run(through, stopped)
    losses = journal.pairs(journal.read(through), "loss")
    assert losses[0][1] < journal.pairs(journal.read(folder), "loss")[0][1] - 0.5


def test_weights_of_another_model_or_for_other_tokens_are_refused(folder, text, tmp_path):
    for changes, message in (
        (dict(model__hidden_size=32, model__head_dim=8), "hidden_size: 16 saved, 32 given"),
        (dict(model__mlp_activation="squared_relu"), "mlp_activation: 'gelu' saved"),
        (
            dict(run__tokenizer="own", model__vocab_size=300, model__num_outputs=300),
            "tokenizer",
        ),
        (dict(run__weights=str(tmp_path)), "must be the folder of a run"),
    ):
        changes = dict(run__weights=str(folder)) | changes
        with pytest.raises(loop.Refused, match=message):
            train(text, tmp_path / "new", **changes)
    assert not (tmp_path / "new" / "config.json").exists()


def test_a_folder_without_a_run_or_a_checkpoint_is_refused(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match="must have a checkpoint: it has none yet"):
        trained.load(tmp_path)
    other = shutil.copytree(folder, tmp_path / "other")
    whole = json.loads((other / "config.json").read_text())
    whole["model"]["hidden_size"] = whole["model"]["head_dim"] = 32  # as if of another model
    whole["model"]["num_heads"] = 1
    (other / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="run of this library's Transformer, not of a model"):
        trained.load(other)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="must be the folder of a run: "):
        trained.load(tmp_path)


def test_a_run_of_before_kept_no_tokenizer_and_has_the_courses(folder, tmp_path):
    assert trained.tokenizer(tmp_path).to_str() == data.tokenizer().to_str()
    assert trained.tokenizer(folder).to_str() == data.tokenizer().to_str()


def test_the_commands_answer_in_a_sentence_and_with_their_exit_code(folder, text, capsys):
    assert evaluate.main([str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"after step 20: {last_loss(folder):.3f} nats per token, perplexity" in said
    assert "bits per byte, on" in said and evaluate.main([str(folder), text]) == 0
    assert capsys.readouterr().out == said
    assert sample.main([str(folder), "def f", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def f")
    for program, given, message in (
        (evaluate, [str(folder), "nowhere"], "corpus='nowhere': no such file or folder"),
        (evaluate, ["nowhere"], "'nowhere' must be the folder of a run"),
        (sample, [str(folder), "x", "--tokens", "0"], "length=0 must be at least 1 token"),
        (sample, [str(folder), "x", "--temperature", "0"], "temperature=0.0 must be at least"),
    ):
        assert program.main(given) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {message}") and told.count("\n") == 1


def test_a_run_with_a_tokenizer_of_its_text_keeps_it_and_samples_with_it(text, tmp_path):
    size = dict(model__vocab_size=300, model__num_outputs=300, run__tokenizer="own")
    train(text, tmp_path / "run", **size, training__steps=10)
    found = trained.load(tmp_path / "run")
    assert found.tokenizer.get_vocab_size() == 300
    assert found.tokenizer.to_str() == data.tokenizer("own", text, 300).to_str()
    [lines] = [journal.pairs(journal.read(tmp_path / "run", "samples"), "text")[-1:]]
    assert lines and isinstance(trained.sample(found, "def add", length=5), str)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["run"]["tokenizer"] == "own"
