"""Laws of models of the Hugging Face Hub: their fields and numbers are ours, and back."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import venv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from llama_in_numpy import logits as in_numpy
from slow_cases import slow
from small_run import full_disk, one_device

from course_lib import configs, evaluate, export, sample
from course_lib.many_devices.pipeline_parallel import pipeline
from course_lib.models import parameters, transformer
from course_lib.program import command, hub, loop, settings, trained
from course_lib.text import data

LLAMA2 = dict(model_type="llama", hidden_act="silu", hidden_size=4096, intermediate_size=11008)
LLAMA2 |= dict(max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32)
LLAMA2 |= dict(num_key_value_heads=32, rms_norm_eps=1e-05, rope_scaling=None, vocab_size=32000)
LLAMA2 |= dict(architectures=["LlamaForCausalLM"], pretraining_tp=1, torch_dtype="float16")
MISTRAL = LLAMA2 | dict(model_type="mistral", intermediate_size=14336, num_key_value_heads=8)
MISTRAL |= dict(max_position_embeddings=32768, rope_theta=1e6, torch_dtype="bfloat16")
LLAMA3 = MISTRAL | dict(model_type="llama", vocab_size=128256, max_position_embeddings=8192)
LLAMA3 |= dict(rope_theta=500000.0)
QWEN3 = MISTRAL | dict(model_type="qwen3", num_hidden_layers=36, intermediate_size=12288)
QWEN3 |= dict(head_dim=128, vocab_size=151936, rms_norm_eps=1e-06, use_sliding_window=False)
GPT2 = dict(model_type="gpt2", activation_function="gelu_new", n_ctx=1024, n_embd=768)
GPT2 |= dict(n_head=12, n_layer=12, n_positions=1024, vocab_size=50257, resid_pdrop=0.1)
GPT2 |= dict(layer_norm_epsilon=1e-05)
MODEL = "model.safetensors"
SCALED = dict(factor=8.0, original_max_position_embeddings=8192, rope_type="llama3")
SCALED |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA31 = LLAMA3 | dict(max_position_embeddings=131072, rope_scaling=SCALED)
QWEN2 = QWEN3 | dict(model_type="qwen2", num_hidden_layers=28, intermediate_size=18944)
QWEN2 |= dict(
    hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064
)
QWEN3_4B = QWEN3 | dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)


def stored(folder, hub_config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hub_config))
    return folder / "config.json"


def with_model(model, preset="cpu", **changes):
    whole = settings.complete(configs.get(preset))
    whole.model.update({**model, **changes})
    return whole


@pytest.mark.parametrize(
    ("name", "hub_config", "published"),
    [
        ("Llama 2 7B", LLAMA2, 6_738_415_616),
        ("Llama 3 8B", LLAMA3, 8_030_261_248),
        ("Llama 3.1 8B", LLAMA31, 8_030_261_248),
        ("Mistral 7B", MISTRAL | dict(sliding_window=4096), 7_241_732_096),
        ("Qwen2.5 7B", QWEN2, 7_615_616_512),
        ("Qwen3 4B", QWEN3_4B, 4_022_468_096),
        ("Qwen3 8B", QWEN3, 8_190_735_360),
        ("GPT-2", GPT2, 124_439_808),
    ],
)
def test_a_model_has_the_published_number_of_parameters(name, hub_config, published, tmp_path):
    whole = with_model(hub.model(stored(tmp_path, hub_config)), "155m")
    settings.check(whole)
    shapes = jax.eval_shape(lambda: parameters.init(jax.random.key(0), whole.model))
    assert transformer.num_params(shapes) == published


def test_both_spellings_of_a_field_are_read(tmp_path):
    new = {n: x for n, x in MISTRAL.items() if n not in ("torch_dtype", "rope_theta")}
    new |= dict(dtype="bfloat16", rope_parameters=dict(rope_theta=1e6, rope_type="default"))
    del new["rope_scaling"]
    old = hub.model(stored(tmp_path / "old", MISTRAL))
    assert hub.model(stored(tmp_path / "new", new)) == old == hub.model(tmp_path / "new")
    assert hub.model(stored(tmp_path / "half", LLAMA2))["dtype"] == "bfloat16"
    assert old["rotary_base"] == 1e6 and old["dtype"] == "bfloat16"
    assert old["num_kv_heads"] == 8 and not old["tied_embeddings"]
    assert hub.model(stored(tmp_path, GPT2))["tied_embeddings"]


@pytest.mark.parametrize(
    ("hub_config", "message"),
    [
        (
            LLAMA3 | dict(rope_scaling=SCALED | dict(low_freq_factor=2.0)),
            'rope_scaling=.*"low_freq_factor": 2.0.* must be null, or linear',
        ),
        (LLAMA2 | dict(rope_parameters=dict(rope_type="llama3")), "rope_parameters=.* must be"),
        (LLAMA2 | dict(rope_scaling=dict(type="yarn", factor=2.0)), "rope_scaling=.*yarn"),
        (LLAMA2 | dict(rope_scaling=dict(type="linear")), "rope_scaling=.* must be null, or"),
        (
            LLAMA2 | dict(rope_scaling=dict(type="linear", factor="2")),
            "rotary_factor='2' must be of type float",
        ),
        (LLAMA2 | dict(rope_parameters={"full": dict(rope_theta=1.0)}), "rope_parameters="),
        (
            MISTRAL | dict(layer_types=["full_attention"], sliding_window=4096),
            "sliding_window=4096 must be null or at least",
        ),
        (
            QWEN3 | dict(use_sliding_window=True, sliding_window=4096),
            "sliding_window=4096 must be null",
        ),
        (
            QWEN3 | dict(layer_types=["sliding_attention"], sliding_window=4096),
            "sliding_window=4096 must be null",
        ),
        (LLAMA2 | dict(attention_bias=True), "attention_bias=true must be false"),
        (
            LLAMA2 | dict(mlp_bias=True, hidden_act="gelu"),
            'hidden_act="gelu" must be "silu"; mlp_bias=true must be false',
        ),
        (LLAMA2 | dict(quantization_config={}), "quantization_config={} must be null"),
        (GPT2 | dict(n_head=7), "7 heads must divide 768, the width"),
        (GPT2 | dict(tie_word_embeddings=False), "tie_word_embeddings=false must be true"),
        (GPT2 | dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
        (GPT2 | dict(activation_function="relu"), '"relu" must be "gelu_new"'),
        (
            LLAMA2 | dict(model_type="mamba"),
            r"'mamba' must be one of \['llama', 'mistral', 'qwen2', 'qwen3', 'gpt2'\]",
        ),
        (
            dict(model_type="llama", vocab_size=3),
            "lacks num_hidden_layers, hidden_size, num_att",
        ),
        (LLAMA2 | dict(num_hidden_layers="32"), "num_layers='32' must be of type int"),
        (LLAMA2 | dict(num_attention_heads=0), "num_heads=0 must be positive"),
        (LLAMA2 | dict(torch_dtype="int8"), "dtype='int8' must be one of"),
        (LLAMA2 | dict(rope_scaling="linear"), "must be a config.json of the Hub: "),
        ([1], "must be a config.json of the Hub: "),
        ({}, "model_type=None must be one of"),
    ],
)
def test_what_our_model_has_not_is_refused_by_name_on_one_line(hub_config, message, tmp_path):
    path = stored(tmp_path, hub_config)
    with pytest.raises(ValueError, match=message) as error:
        hub.model(path)
    assert str(error.value).startswith(f"{path} must be a config.json") and "\n" not in str(
        error.value
    )


def test_a_mistral_has_a_window_and_a_qwen_only_one_that_no_sequence_outgrows(tmp_path):
    assert hub.model(stored(tmp_path, MISTRAL | dict(sliding_window=4096)))["window"] == 4096
    assert hub.model(stored(tmp_path, QWEN3 | dict(sliding_window=4096)))["window"] == 0


def test_scaled_positions_and_wide_heads_are_read_as_both_versions_write_them(tmp_path):
    old, new = dict(LLAMA31), LLAMA31 | dict(rope_parameters=SCALED | dict(rope_theta=5e5))
    del new["rope_scaling"], new["rope_theta"]
    old = hub.model(stored(tmp_path / "old", old))
    assert hub.model(stored(tmp_path / "new", new)) == old
    assert (old["rotary_scaling"], old["rotary_factor"]) == ("llama3", 8.0)
    assert (old["rotary_length"], old["rotary_base"]) == (8192, 500000.0)
    linear = LLAMA2 | dict(rope_scaling=dict(type="linear", factor=2))
    assert hub.model(stored(tmp_path, linear))["rotary_scaling"] == "linear"
    wide = hub.model(stored(tmp_path, QWEN3_4B))
    assert (wide["head_dim"], wide["attention_width"]) == (128, 4096)


OF_LLAMA = LLAMA2 | dict(hidden_size=16, num_attention_heads=4, num_hidden_layers=2)
OF_LLAMA |= dict(intermediate_size=20, max_position_embeddings=16, num_key_value_heads=2)
OF_LLAMA |= dict(vocab_size=2048, torch_dtype="float32")
OF_QWEN3 = OF_LLAMA | dict(model_type="qwen3", num_key_value_heads=4, tie_word_embeddings=True)
OF_QWEN2 = OF_LLAMA | dict(model_type="qwen2")
OF_WIDE = OF_QWEN3 | dict(head_dim=6, num_key_value_heads=2)
OF_LLAMA31 = OF_LLAMA | dict(rope_theta=1e3)
OF_LLAMA31 |= dict(rope_scaling=SCALED | dict(original_max_position_embeddings=16))
OF_LINEAR = OF_LLAMA | dict(rope_scaling=dict(rope_type="linear", factor=4.0))
OF_MISTRAL = OF_LLAMA | dict(model_type="mistral", sliding_window=5)
OF_GPT2 = GPT2 | dict(n_embd=16, n_head=4, n_layer=2, n_positions=16, vocab_size=2048)
SMALL = dict(llama=OF_LLAMA, qwen2=OF_QWEN2, qwen3=OF_QWEN3, wide=OF_WIDE, gpt2=OF_GPT2)
SMALL |= dict(llama31=OF_LLAMA31, linear=OF_LINEAR, mistral=OF_MISTRAL)
CLASSES = dict(llama="LlamaForCausalLM", qwen2="Qwen2ForCausalLM", qwen3="Qwen3ForCausalLM")
CLASSES |= dict(mistral="MistralForCausalLM", gpt2="GPT2LMHeadModel")


def small(name, folder, **changes):
    """Returns a run with random parameters, as if it had been trained."""
    whole = with_model(hub.model(stored(folder, SMALL[name])), **changes)
    whole.data.seq_len = 16
    settings.check(whole)
    shapes = jax.eval_shape(lambda: parameters.init(jax.random.key(0), whole.model))
    normal = np.random.default_rng(1).normal
    params = jax.tree.map(lambda x: jnp.asarray(normal(size=x.shape), x.dtype), shapes)
    return trained.Trained(whole, data.tokenizer(), 7, params)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_a_model_that_was_exported_is_loaded_bit_for_bit(name, scanned, tmp_path):
    run = small(name, tmp_path, scan_layers=scanned)
    assert hub.export(run, tmp_path / "out") == CLASSES[SMALL[name]["model_type"]]
    assert_equal(hub.load(tmp_path / "out", run.config.model), run.params)
    model = hub.model(tmp_path / "out")
    assert model == hub.model(tmp_path / "config.json") | dict(dtype="float32")
    with pytest.raises(ValueError, match="exists: name a new folder"):
        hub.export(run, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == data.end_of(run.tokenizer)
    assert trained.tokenizer(tmp_path / "out").to_str() == run.tokenizer.to_str()


@pytest.mark.parametrize("attention", ["reference", slow("blocks"), slow("xla")])
@pytest.mark.parametrize("name", [name for name in SMALL if name != "gpt2"])
def test_logits_are_those_of_the_published_definition(name, attention, tmp_path):
    run = small(name, tmp_path, attention=attention)
    hub.export(run, folder := tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    tokens = np.random.default_rng(0).integers(0, 2048, 16)
    expected = in_numpy(config, safetensors.numpy.load_file(folder / MODEL), tokens)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(transformer.function(run.config.model))(run.params, tokens[None])
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-4 * expected.std())


def test_numbers_of_16_bits_stay_what_they_are(tmp_path):
    run = small("gpt2", tmp_path)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), run.params)
    hub.export(trained.Trained(run.config, run.tokenizer, 7, half), tmp_path / "out")
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {x.dtype for x in written.values()} == {jnp.dtype("bfloat16")}
    assert hub.model(tmp_path / "out")["dtype"] == "bfloat16"
    again = hub.load(tmp_path / "out", run.config.model)
    assert_equal(again, jax.tree.map(lambda x: x.astype(jnp.float32), half))


def test_a_matrix_multiplies_as_the_linear_and_the_conv1d_of_transformers_do(tmp_path):
    """Linear computes W @ x, Conv1D x @ W; heads lie one after another, queries before keys."""
    x = np.arange(16.0, dtype=np.float32)
    for name in SMALL:
        run = small(name, tmp_path / name, scan_layers=False)
        hub.export(run, tmp_path / name / "out")
        file = tmp_path / name / "out" / "model.safetensors"
        theirs, ours = safetensors.numpy.load_file(file), run.params["block_1"]["attn"]
        if name == "gpt2":
            products = np.split(x @ theirs["transformer.h.1.attn.c_attn.weight"], 3)
        else:
            layer = "model.layers.1.self_attn"
            products = [theirs[f"{layer}.{which}_proj.weight"] @ x for which in "qkv"]
        if "qkv" in ours:
            expected = np.split(np.einsum("d,dhk->hk", x, ours["qkv"]["kernel"]), 3, axis=1)
        else:
            expected = [np.einsum("d,dhk->hk", x, ours["q"]["kernel"])]
            expected += np.split(np.einsum("d,dgk->gk", x, ours["kv"]["kernel"]), 2, axis=1)
        for one, other in zip(products, expected, strict=True):
            np.testing.assert_allclose(one, other.reshape(-1), rtol=1e-4, atol=1e-4)


def test_a_model_in_several_files_or_without_its_head_is_loaded_and_constants_left_out(
    tmp_path,
):
    run = small("gpt2", tmp_path)
    hub.export(run, folder := tmp_path / "out")
    whole = safetensors.numpy.load_file(folder / "model.safetensors")
    whole = {name.removeprefix("transformer."): x for name, x in whole.items()}
    whole |= {"h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}
    whole["lm_head.weight"] = whole["wte.weight"]
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        safetensors.numpy.save_file({name: whole[name] for name in inside}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {name: file for file, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_equal(hub.load(folder, run.config.model), run.params)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match="must have model.safetensors"):
        hub.load(folder, run.config.model)


def test_tensors_of_another_model_are_refused_by_name(tmp_path):
    run = small("llama", tmp_path)
    hub.export(run, folder := tmp_path / "out")
    whole = safetensors.numpy.load_file(file := folder / "model.safetensors")
    up, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    for changes, message in (
        ({norm: None}, f"{norm} must have the shape \\(16,\\), and has None"),
        ({up: whole[up].T.copy()}, f"{up} must have .*\\(20, 16\\), and has \\(16, 20\\)"),
        ({"model.layers.0.self_attn.q_proj.bias": whole[norm]}, "also has .*q_proj.bias"),
    ):
        changed = {name: x for name, x in (whole | changes).items() if x is not None}
        safetensors.numpy.save_file(changed, file)
        for only_check in (True, False):
            with pytest.raises(ValueError, match=message):
                hub.load(folder, run.config.model, only_check=only_check)
    file.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="must have model.safetensors"):
        hub.load(folder, run.config.model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(norm="layer", positions="learned"),
            "^model.norm='layer' must be 'rms'; model.positions='learned' must be 'rotary':"
            " only then is it a LlamaForCausalLM; models of the preset 'llama' can be exported",
        ),
        (dict(attention_first=False), "^model.attention_first=False must be True: "),
        (dict(num_experts=2, dtype="float32"), "^model.num_experts=2 must be 0: only"),
    ],
)
def test_a_shape_that_no_class_has_is_refused_with_the_values_that_it_needs(
    changes, message, tmp_path
):
    run = small("llama", tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        hub.export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_preset_is_a_llama_and_can_be_exported():
    whole = settings.complete(configs.get("llama"))
    assert hub._kind(whole.model) == "llama"


def test_an_export_that_is_stopped_leaves_nothing(tmp_path, monkeypatch):
    run = small("gpt2", tmp_path)
    before = list(tmp_path.iterdir())
    with (
        full_disk(10_000),
        pytest.raises(OSError, match="cannot be written: no space|too large"),
    ):
        hub.export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == before

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pathlib.Path, "rename", stopped)
        hub.export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == before
    hub.export(run, tmp_path / "out")
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o644}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.fixture
def here(quick, monkeypatch, text):
    """Lets a command train on one device, with few steps of the tests' text, in which no
    parameter moves: all runs have one program.
    """
    train = loop.train
    monkeypatch.setattr(loop, "train", lambda whole, folder: train(whole, folder, one_device()))
    few = "data.seq_len=16 training.steps=2 run.checkpoint_every=2 run.log_every=1"
    few += " run.sample_tokens=3 run.validation_batches=1 optimizer.warmup_steps=1"
    few += " optimizer.learning_rate=1e-30"
    return ["--data", text, *(word for each in few.split() for word in ("--set", each))]


@pytest.mark.parametrize("name", ["llama", slow("gpt2")])
def test_a_user_trains_exports_and_begins_again(name, here, tmp_path, capsys):
    config, out = stored(tmp_path, SMALL[name]), tmp_path / "out"
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert command.main(["--model", str(config), "--run", first, *here]) == 0
    assert export.main([first, str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: a {CLASSES[name]}, of {first} after step 2\n"
    other = ["--set", "seed=7"]  # that would begin with other parameters
    assert command.main(["--from", str(out), "--run", second, *here, *other]) == 0
    begun, before = trained.load(second), trained.load(first)
    assert begun.config.model == before.config.model
    assert begun.config.run.tokenizer == str(out / "tokenizer.json")
    assert_equal(begun.params, before.params)
    assert sample.main([second, "def f", "--tokens", "3"]) == 0
    assert evaluate.main([second]) == 0
    said = capsys.readouterr().out
    assert said.startswith("def f") and f"{second}, after step 2: " in said
    assert export.main([first, str(out)]) == 2
    assert capsys.readouterr().err == f"error: '{out}' exists: name a new folder\n"


def test_a_model_of_the_hub_that_does_not_fit_the_run_is_refused_before_it_begins(
    here, tmp_path, capsys
):
    out, run = tmp_path / "out", str(tmp_path / "run")
    hub.export(small("llama", tmp_path), out)
    other = data.tokenizer()
    other.add_tokens(["more"])
    other.save(str(tmp_path / "other.json"))
    begin = ["--from", str(out), "--run", run, *here]
    for given, message in (
        (["--set", "model.num_layers=3"], "model.num_layers: 2 saved, 3 given"),
        (
            ["--tokenizer", str(tmp_path / "other.json")],
            f"run.tokenizer: give '{out}/tokenizer",
        ),
        (["--tokenizer", str(tmp_path / "other.json")], "model.vocab_size: 2048 saved, 2049"),
    ):
        assert command.main([*begin, *given]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and message in said and said.count("\n") == 1
    (out / "tokenizer.json").rename(tmp_path / "its.json")
    assert command.main(begin) == 2
    assert "run.tokenizer: give the tokenizer.json of this model" in capsys.readouterr().err
    assert not os.path.exists(f"{run}/config.json")
    assert command.main([*begin, "--tokenizer", str(tmp_path / "its.json")]) == 0
    shutil.rmtree(run)
    file = out / "model.safetensors"
    whole = safetensors.numpy.load_file(file)
    del whole["model.layers.1.mlp.up_proj.weight"]
    safetensors.numpy.save_file(whole, file)
    assert command.main([*begin, "--tokenizer", str(tmp_path / "its.json")]) == 2
    assert "is another model: model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err


def asked(*given):
    return command.configuration(command.arguments().parse_args(given))


def test_a_model_of_the_hub_replaces_that_of_the_preset_and_nothing_else(tmp_path):
    path = str(stored(tmp_path, MISTRAL))
    whole, preset = asked("--model", path, "--preset", "80gb"), configs.get("80gb")
    assert whole.data == preset.data and whole.optimizer == preset.optimizer
    assert whole.model.mlp_size == 14336 and whole.model.remat == preset.model.remat
    assert asked("--model", path, "--set", "model.num_layers=2").model.num_layers == 2
    assert asked("--model", path).model.scan_layers and not asked().model.scan_layers
    assert not asked("--model", path, "--preset", "cpu").model.scan_layers
    dry = asked("--model", path, "--dry-run")
    assert dry.data == preset.data and dry.model.attention == preset.model.attention
    larger = data.tokenizer()
    larger.add_tokens([f"more{i}" for i in range(40_000)])
    for saved, size in ((data.tokenizer(), 32_000), (larger, 42_048)):
        saved.save(str(tmp_path / "tokenizer.json"))
        whole = asked("--model", path, "--tokenizer", str(tmp_path / "tokenizer.json"))
        assert whole.model.vocab_size == whole.model.num_outputs == size


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--model /no/such/file", "/no/such/file must be a config.json of the Hub: "),
        ("--model ", "--model is empty"),
        ("--from {folder}", "{folder}/config.json must be a config.json of the Hub: rope_scal"),
        (
            "--model {folder} --dry-run",
            "{folder}/config.json must be a config.json of the Hub: ",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(given, message, tmp_path, capsys):
    stored(tmp_path, LLAMA3 | dict(rope_scaling=dict(type="yarn")))
    assert command.main(given.format(folder=tmp_path).split(" ")) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith(f"error: {message.format(folder=tmp_path)}") and said.count("\n") == 1
    )


def test_one_run_begins_with_one_model(capsys):
    with pytest.raises(SystemExit) as error:
        command.main(["--model", "config.json", "--from", "runs/cpu"])
    assert error.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_on_a_mesh_a_run_begins_with_the_same_parameters(tmp_path):
    run = small("llama", tmp_path, num_layers=4, scan_layers=True)
    hub.export(run, tmp_path / "out")
    whole = run.config
    whole.run.weights = str(tmp_path / "out")
    whole.mesh.update(pipe=2, data=2)
    whole.strategy.update(chunks=2, microbatches=2, zero=1, schedule="breadth_first")
    built, _ = loop.build(whole, jax.devices("cpu")[:4])
    fresh = built.init(jax.random.key(0))
    begun = trained.begin(fresh, whole)
    assert jax.tree.map(lambda leaf: leaf.sharding, begun.params) == jax.tree.map(
        lambda leaf: leaf.sharding, fresh.params
    )
    assert_equal(pipeline.from_stages(begun.params, 2, 2), run.params)


@pytest.fixture(scope="module")
def theirs():
    """Runs helpers/with_transformers.py in an environment with `transformers`: a new one, of
    about 6 GB, or that of the Python that COURSE_TRANSFORMERS names.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = os.environ.get("COURSE_TRANSFORMERS")
        if not python:
            python = f"{folder}/bin/python"
            venv.create(folder, with_pip=True)
            wanted = ["torch", "transformers>=5,<6", "numpy"]
            installed = subprocess.run(
                [python, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True
            )
            if installed.returncode:
                pytest.skip(f"pip cannot install {wanted}: {installed.stderr[-200:]}")
        program = pathlib.Path(__file__).parents[1] / "helpers" / "with_transformers.py"

        def run(what, *folders):
            command = [python, str(program), what, *map(str, folders)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            files = (each / "answer.json" for each in folders)
            return [json.loads(file.read_text()) for file in files if what == "read"]

        yield run


def all_tensors(folder):
    files = map(safetensors.numpy.load_file, folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in file.items()}


def assert_their_logits(answer, config, params):
    config.dtype, params = "float32", jax.tree.map(jnp.asarray, params)
    logits = transformer.function(config)(params, jnp.asarray(answer["tokens"], jnp.int32))
    expected = np.asarray(answer["logits"], np.float32)
    assert answer["dtype"] == "torch.float32" and answer["problems"] == [0, 0]
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_transformers_computes_the_same_logits_before_and_after(theirs, quick, text, tmp_path):
    """Into a run and out again, and out of a run that was trained here for two steps."""
    theirs("make", made := tmp_path / "made")
    folders = sorted(made.iterdir())
    made = "gpt2 linear llama llama31 mistral qwen2 qwen3 tied wide"
    assert " ".join(f.name for f in folders) == made
    assert len(list((folders[2]).glob("*.safetensors"))) > 1
    for folder, answer in zip(folders, theirs("read", *folders), strict=True):
        whole = with_model(hub.model(folder))
        params = hub.load(folder, whole.model)
        assert_their_logits(answer, whole.model, params)
        run = trained.Trained(whole, data.tokenizer(), 0, params)
        hub.export(run, again := tmp_path / "again" / folder.name)
        before, after = all_tensors(folder), all_tensors(again)
        assert before.keys() == after.keys()
        for name, x in before.items():
            np.testing.assert_array_equal(x, after[name], strict=True)
        [after] = theirs("read", again)
        assert after["logits"] == answer["logits"]
    for name in SMALL:
        whole = with_model(hub.model(stored(tmp_path / f"{name}-config", SMALL[name])))
        whole.run.update(corpus=text, sample_tokens=0, validation_batches=1)
        whole.data.seq_len, whole.training.steps = 16, 2
        loop.train(whole, tmp_path / f"{name}-run", one_device())
        run = trained.load(tmp_path / f"{name}-run")
        hub.export(run, out := tmp_path / f"{name}-out")
        [answer] = theirs("read", out)
        assert_their_logits(answer, run.config.model, run.params)
        assert answer["ids"] == run.tokenizer.encode(answer["text"]).ids
        assert answer["end"] == data.end_of(run.tokenizer)
