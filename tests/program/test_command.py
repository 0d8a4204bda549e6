"""Laws of the command `python -m course_lib.train`."""

import contextlib
import json
import os
import pathlib
import re
import types

import jax
import pytest

import course_lib.__main__
from course_lib import configs
from course_lib.measure import hardware
from course_lib.models import transformer
from course_lib.program import command, dry_run, loop, settings
from course_lib.program.checkpoints import CheckpointError
from course_lib.text import data


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was(no_launcher, monkeypatch):
    """As if a user had started it in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    # so that it is taken back whatever comes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    # cannot be taken back
    monkeypatch.setattr(command.environment, "keep_memory", lambda: None)


GPT2 = dict(model_type="gpt2", n_embd=768, n_head=12, n_layer=12, n_positions=1024)
GPT2 |= dict(vocab_size=50257, layer_norm_epsilon=1e-05)


def asked(*given):
    return command.configuration(command.arguments().parse_args(given))


def test_help_tells_every_option_preset_field_and_exit_code():
    text = command.arguments().format_help()
    options = "preset config model set data tokenizer from run"
    options += " devices coordinator process processes dry-run target"
    for option in options.split():
        told = rf"^  --{option}\b.* {{2,}}\w|^  --{option}\b.*\n {{10,}}\w"
        assert re.search(told, text, re.M), option
    # there are no others
    assert set(re.findall(r"^  --([a-z-]+)", text, re.M)) == set(options.split())
    codes = text[text.index("exit codes:") :]
    for code in (0, 1, 2, 3, 75, 77, 130):
        assert re.search(rf"(^|  ){code} \w", codes, re.M), code
    assert all(len(line) <= 128 for line in text.splitlines())
    fields = [field for part in settings.defaults().values() for field in part]
    for name in (*configs.PRESETS, *fields):
        assert re.search(rf"\b{name}\b", text), name


def test_the_list_of_commands_names_them_all():
    listed = set(re.findall(r"^python -m course_lib\.(\w+)", course_lib.__main__.__doc__, re.M))
    folder = pathlib.Path(course_lib.__file__).parent
    programs = [*folder.glob("*.py"), *folder.glob("*/__main__.py")]
    runs = {p for p in programs if "sys.exit(extras.exit_code(main))" in p.read_text()}
    assert listed == {(p.parent if p.stem == "__main__" else p).stem for p in runs}


def test_help_says_how_large_each_preset_is_and_it_is_true():
    text = re.sub(r"\s+", " ", command.arguments().format_help())
    for name in configs.PRESETS:
        stated, unit = re.search(
            rf"{name}: [^;]*?([\d.]+) (million|billion) parameters", text
        ).groups()
        model = configs.get(name)
        tokens = jax.ShapeDtypeStruct((1, model.data.seq_len), "int32")
        with jax.numpy_dtype_promotion("standard"):  # as Flax's LayerNorm needs
            found = transformer.num_params(
                transformer.abstract_params(transformer.Transformer(model.model), tokens)
            )
        assert f"{found / {'million': 1e6, 'billion': 1e9}[unit]:.1f}" == stated


def test_the_examples_of_help_can_be_given(tmp_path, monkeypatch):
    joined = command.EPILOG.replace("\\\n", "")
    lines = re.findall(r"^  python -m course_lib\.train (.*)$", joined, re.M)
    assert len(lines) >= 6
    monkeypatch.chdir(tmp_path)
    settings.write(settings.complete(configs.get("cpu")), tmp_path / "runs" / "mine")
    (of_hub := tmp_path / "hub" / "gpt2").mkdir(parents=True)
    (of_hub / "config.json").write_text(json.dumps(GPT2))
    for line in lines:
        given = line.split()
        if "--config" in given:
            given[given.index("--config") + 1] = str(tmp_path / "config.json")
            (tmp_path / "config.json").write_text(
                json.dumps(settings.complete(configs.get("cpu")).to_dict())
            )
        settings.check(asked(*given))


def test_fields_are_set_in_order_over_a_preset_or_a_file(tmp_path):
    sets = "--set model.num_layers=6 --set model.num_layers=7".split()
    whole = asked("--preset", "155m", *sets, "--data", str(tmp_path))
    assert (whole.model.num_layers, whole.model.hidden_size) == (7, 1024)
    assert whole.run.corpus == str(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole.to_dict()))
    assert asked("--config", str(path)) == whole
    assert asked("--config", str(path), "--set", " seed = 3").seed == 3
    path.write_text('{"model": {"num_layers": 3}}')  # the rest is 155m's, as --help says
    assert asked("--config", str(path)) == asked(
        *"--preset 155m --set model.num_layers=3".split()
    )


def test_a_vocabulary_has_the_size_of_its_tokenizer_unless_it_is_set(tmp_path):
    model = data.tokenizer()
    model.add_tokens(["more"])
    model.save(str(path := tmp_path / "tokenizer.json"))
    for given, size in (("", 2049), ("--set model.vocab_size=3000", 3000)):
        whole = asked("--tokenizer", str(path), *given.split())
        assert (whole.model.vocab_size, whole.model.num_outputs) == (size, size)
        assert whole.run.tokenizer == str(path)
    assert asked("--tokenizer", "own").run.tokenizer == "own"
    settings.check(asked(*"--tokenizer own --set model.vocab_size=512".split()))


def test_a_run_that_begins_with_another_has_its_model_and_its_fields_unless_others_are_given(
    tmp_path,
):
    whole = asked(*"--set model.num_layers=2 --set seed=5 --data".split(), str(tmp_path))
    settings.write(whole, tmp_path, data.tokenizer())
    begun = asked("--from", str(tmp_path))
    assert begun.model == whole.model and begun.seed == 5 and begun.run.corpus == str(tmp_path)
    assert begun.run.weights == str(tmp_path)
    assert begun.run.tokenizer == str(tmp_path / "tokenizer.json")
    other = asked("--from", str(tmp_path), "--preset", "155m")
    assert other.model == whole.model and other.data == configs.get("155m").data


MISTAKES = [
    ("--set model.num_layer=6", "model.num_layer='6' is no field and would change nothing"),
    ("--set model.num_layers", "--set model.num_layers must be FIELD=VALUE"),
    ("--set model.num_heads=3", "head_dim=32 must be hidden_size / num_heads = 128 / 3, or"),
    ("--config /no/such/file", "--config /no/such/file cannot be read"),
    ("--devices 0", "--devices 0 must be at least 1"),
    ("--data ", "--data is empty, perhaps because a shell variable is not set"),
    ("--run ", "--run is empty"),
    ("--from /no/such/run", "'/no/such/run' must be the folder of a run: "),
    ("--tokenizer theirs", "tokenizer='theirs' must be 'course', 'own' or a tokenizer.json"),
    ("--config ", "--config is empty"),
    ("--run \udcff", "'\\udcff' has a name that is not UTF-8"),
    ("--set model.dtype=" + 999 * "x", f"model.dtype='{78 * 'x'}… must be "),
    ("--set " + 999 * "x", f"--set {79 * 'x'}… must be FIELD=VALUE"),
    ("--dry-run --devices 0", "--devices 0 must be at least 1"),
    (
        "--coordinator here:1",
        "coordinator='here:1', process=None, processes=None must be given",
    ),
    ("--dry-run --target abacus", "--target abacus must be one of t4, "),
    ("--preset 80gb --dry-run --target t4", "model.attention='xla' cannot run on NVIDIA T4: "),
    (f"--run {__file__}", f"folder={__file__!r} must be a folder, and"),
    (f"--run {__file__}/run", "folder="),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(given, message, capsys):
    more = ["--set", "data.batch_size=8"] if __file__ in given else []  # for eight devices
    assert command.main([*given.split(" "), *more]) == command.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}") and said.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    [
        '{"model": 3}',
        '{"run": {"more": 1}}',
        "3",
        "{",
        "[" * 100_000,
        '{"model": {"num_layers": -3}}',
    ],
)
def test_a_file_that_is_no_configuration_is_one_line_and_exit_code_2(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert command.main(["--config", str(tmp_path / "config.json")]) == command.USAGE
    said = capsys.readouterr().err
    assert said.startswith("error: --config ") or "num_layers" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "given", ["--target h100", "--preset gpu", "--preset cpu --config x", "--steps 3"]
)
def test_arguments_that_do_not_go_together_are_refused(given, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(given.split())
    assert error.value.code == command.USAGE
    assert "usage: python -m course_lib.train" in capsys.readouterr().err


def test_the_share_of_a_gpus_memory_is_set_before_jax_looks_for_devices(monkeypatch):
    order, share = [], "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(share, raising=False)

    def start(*_):
        assert os.environ[share] == str(hardware.GPU_SHARE)  # what the dry run says is there
        order.append("devices")
        return contextlib.nullcontext()

    monkeypatch.setattr(command.processes, "start", start)
    monkeypatch.setattr(command, "_train", lambda *_: order.append("steps") or 0)
    assert command.main([]) == 0 and order == ["devices", "steps"]


def test_on_a_cpu_the_command_takes_what_is_faster_unless_it_is_told_otherwise(
    monkeypatch, tmp_path
):
    def attention(*given):
        chosen = []
        monkeypatch.setattr(command, "_train", lambda config, _: chosen.append(config) or 0)
        assert command.main([*given]) == 0
        return chosen[0].model.attention

    kept = []
    monkeypatch.setattr(command.environment, "keep_memory", lambda: kept.append(True))
    assert attention() == "blocks" and kept
    assert attention("--set", "model.attention=xla") == "xla"
    (tmp_path / "config.json").write_text(json.dumps(configs.get("cpu").to_dict()))
    assert attention("--config", str(tmp_path / "config.json")) == "reference"


ENDS = [
    (loop.Ended(loop.DONE, 9), 0),
    (loop.Ended(loop.PREEMPTED, 9), 75),
    (loop.Ended(loop.NOT_FINITE, 9), 77),
    (loop.Refused("seq_len"), 2),
    (CheckpointError("all damaged"), 1),
    (OSError("no space"), 1),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of 3 GiB"), 1),
    (BlockingIOError("in use"), 1),  # 2 would keep launchers from trying again
    # not the configuration's: with its traceback, of which Python makes exit code 1
    (ValueError("deep in a library"), None),
    (RuntimeError("deep in a library"), None),
]


@pytest.mark.parametrize(("ended", "code"), ENDS)
def test_how_a_training_ends_is_its_exit_code(ended, code, monkeypatch, capsys):
    def stand_in(whole, folder):
        assert folder == "runs/cpu"
        if isinstance(ended, Exception):
            raise ended
        return ended

    monkeypatch.setattr(loop, "train", stand_in)
    if code is None:
        with pytest.raises(type(ended), match="deep in a library"):
            command.main([])
        return
    assert command.main([]) == code
    said = capsys.readouterr().err
    assert str(ended) in said if isinstance(ended, Exception) else "9" in said


@pytest.mark.parametrize(
    ("fits", "refused", "code"), [(True, "", 0), (False, "", 3), (True, "batch_size", 2)]
)
def test_a_dry_run_that_does_not_fit_has_its_own_exit_code(
    fits, refused, code, monkeypatch, capsys
):
    def found(whole, target, count):
        assert (target, count) == ("h100", 64)
        return types.SimpleNamespace(fits=fits, refused=refused, text=lambda: "found")

    monkeypatch.setattr(dry_run, "dry_run", found)
    for given in (["--devices", "64"], ["--target", "64xh100"]):
        assert command.main(["--dry-run", *given]) == code
        assert capsys.readouterr().out == "found\n"
