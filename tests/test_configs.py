"""Laws of configurations."""

import inspect

import pytest

from course_lib import configs, optimizers
from course_lib.measure import hardware


def test_the_155m_preset_is_the_published_configuration():
    preset = configs.get("155m")
    model, optimizer = preset.model, preset.optimizer
    assert (model.num_layers, model.hidden_size, model.head_dim, model.num_heads) == (
        12,
        1024,
        128,
        8,
    )
    assert (model.mlp_expansion, model.vocab_size, model.max_seq_len, model.dropout_rate) == (
        4,
        2048,
        512,
        0.1,
    )
    assert (model.dtype, model.softmax_dtype, model.scan_layers, model.remat) == (
        "bfloat16",
        "float32",
        True,
        ("MLP", "Attn"),
    )
    assert (
        optimizer.name,
        optimizer.learning_rate,
        optimizer.warmup_steps,
        optimizer.decay_rate,
    ) == ("adam", 4e-4, 10, 0.99)
    assert (
        preset.data.batch_size,
        preset.data.seq_len,
        preset.training.num_minibatches,
        preset.seed,
    ) == (64, 512, 4, 42)


@pytest.mark.parametrize("name", configs.PRESETS)
def test_every_preset_can_work_and_says_what_to_expect(name):
    configs.check(configs.get(name))
    assert configs.PRESETS[name].__doc__


def test_a_preset_is_a_copy():
    configs.get("cpu").data.batch_size = 2
    assert configs.get("cpu").data.batch_size != 2


def test_an_unknown_preset_is_refused_with_the_names_that_exist():
    with pytest.raises(
        ValueError, match=r"preset='200m' must be one of \['155m', 'cpu', 't4', '80gb'\]"
    ):
        configs.get("200m")


def test_setting_a_misspelt_field_is_an_error_that_names_the_right_one():
    with pytest.raises(AttributeError, match='Did you mean "num_layers"'):
        configs.get("cpu").model.num_layer = 2


def test_a_misspelt_field_is_refused_however_it_came_in():
    whole = configs.get("cpu")
    with whole.unlocked():
        whole.model.remats = ("MLP",)
    with pytest.raises(
        ValueError, match=r"model.remats=\('MLP',\) is no field .* did you mean model.remat "
    ):
        configs.check(whole)


def test_a_missing_field_is_refused():
    whole = configs.get("cpu")
    with whole.unlocked():
        del whole.training.donate
    with pytest.raises(ValueError, match="training.donate must be given"):
        configs.check(whole)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.num_layers", 0, "model.num_layers=0 must be positive"),
        ("model.head_dim", 48, "head_dim=48 must be hidden_size / num_heads = 128 / 4"),
        ("model.dropout_rate", 1.0, r"model.dropout_rate=1.0 must be in \[0, 1\)"),
        ("model.dtype", "float64", "model.dtype='float64' must be one of"),
        ("model.remat", ("mlp",), r"remat=\('mlp',\) must hold names from"),
        ("model.remat_policy", "dot", "remat_policy='dot' must be one of"),
        ("model.remat_names", ("qkv",), "must be empty for remat_policy='nothing'"),
        ("model.attention", "pallas", "attention='pallas' must be one of"),
        ("model.num_outputs", 2000, "model.num_outputs=2000 must be vocab_size=2048"),
        ("model.num_outputs", 2056, "model.num_outputs=2056 must be vocab_size=2048"),
        ("model.loss_chunks", 3, "loss_chunks=3 must divide the 2048 .* take 2"),
        ("model.loss_chunks", 0, "loss_chunks=0 must divide the 2048 .* take 1"),
        ("model.loss_along", "rows", "loss_along='rows' must be one of"),
        ("data.seq_len", 129, "seq_len=129 must be at most max_seq_len=128"),
        ("optimizer.name", "adma", "optimizer.name='adma' must be one of"),
        ("optimizer.schedule", "cosine", "optimizer.schedule='cosine' must be one of"),
        ("seed", -1, "seed=-1 must be in"),
        ("seed", 2**32, r"seed=4294967296 must be in \[0, 2\*\*32\)"),
        ("optimizer.clip_norm", -1.0, "optimizer.clip_norm=-1.0 must not be negative"),
        ("training.num_minibatches", 3, "num_minibatches=3"),
        ("training.num_minibatches", 0, "training.num_minibatches=0 must be positive"),
        ("training.accumulation", "while", "training.accumulation='while' must be one of"),
        ("optimizer.block_size", 0, "optimizer.block_size=0 must be at least 16"),
        ("training.accumulator_dtype", "float16", "accumulator_dtype='float16' must be one of"),
        ("training.loss_scale", "big", "loss_scale='big' must be one of"),
    ],
)
def test_an_impossible_value_is_refused_with_the_field_the_value_and_the_fix(
    field, value, message
):
    whole = configs.get("cpu")
    whole.update_from_flattened_dict({field: value})
    with pytest.raises(ValueError, match=message):
        configs.check(whole)


def test_a_value_of_another_type_is_refused():
    whole = configs.get("cpu").to_dict()
    whole["training"]["donate"] = "yes"
    with pytest.raises(
        ValueError, match="training.donate='yes' must be of type bool, as in True"
    ):
        configs.check(configs.ConfigDict(whole))


def test_attention_is_checked_against_the_accelerator_if_one_is_given():
    whole = configs.get("cpu")
    whole.model.update(attention="cudnn", dtype="float16")
    whole.training.loss_scale = "dynamic"
    configs.check(whole)
    with pytest.raises(ValueError, match="model.attention='cudnn' cannot run on NVIDIA T4"):
        configs.check(whole, hardware.get("t4"))


@pytest.mark.parametrize(
    "name", [name for name, preset in configs.PRESETS.items() if preset().training.steps >= 100]
)
def test_a_preset_still_learns_halfway(name):
    preset = configs.get(name)
    schedule = optimizers.SCHEDULES[preset.optimizer.schedule](preset.optimizer)
    assert schedule(preset.training.steps // 2) > 0.01 * preset.optimizer.learning_rate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model.attention": "flash", "data.seq_len": 200},
            "seq_len=200 must be a multiple of 64, the tile of flash attention",
        ),
        (
            {"model.attention": "cudnn", "model.dtype": "float32"},
            "dtype='float32' must be .* for attention='cudnn'",
        ),
        (
            {"model.attention": "xla", "model.softmax_dtype": "bfloat16"},
            "softmax_dtype='bfloat16' must be 'float32'",
        ),
        (
            {
                "model.remat": ("Attn",),
                "model.remat_policy": "names",
                "model.remat_names": ("mlp_hidden",),
            },
            "must hold 'MLP' or",
        ),
        ({"model.dtype": "float16"}, "training.loss_scale='none' must be"),
        (
            {"optimizer.weight_decay": 0.1},
            "optimizer.weight_decay=0.1 must be 0 for optimizer.name='adam'",
        ),
        (
            {"optimizer.schedule": "warmup_cosine", "optimizer.warmup_steps": 2000},
            "warmup_steps=2000 must be under",
        ),
        (
            {"optimizer.schedule": "warmup_cosine", "training.steps": 1001},
            "training.steps=1001 must be at most .*=1000: ",
        ),
        ({"optimizer.decay_rate": 1.5}, r"optimizer.decay_rate=1.5 must be in \(0, 1\]"),
        (
            {"optimizer.learning_rate": float("inf")},
            "optimizer.learning_rate=inf must be a finite number",
        ),
        (
            {"optimizer.clip_norm": float("nan")},
            "optimizer.clip_norm=nan must be a finite number",
        ),
    ],
)
def test_values_that_undo_each_other_or_change_nothing_are_refused(changes, message):
    changed = configs.get("155m")
    changed.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        configs.check(changed)


def test_a_name_is_neither_a_configuration_nor_an_accelerator():
    as_a_user = inspect.unwrap(configs.check)  # without the tests' checks of types
    with pytest.raises(
        ValueError, match=r"config='cpu' must be a ConfigDict, as get\('cpu'\) returns one"
    ):
        as_a_user("cpu")
    with pytest.raises(
        ValueError, match=r"accelerator='t4' must be a row of the table: hardware.get\('t4'\)"
    ):
        as_a_user(configs.get("155m"), "t4")


def test_a_dtype_that_the_accelerator_lacks_is_refused():
    with pytest.raises(ValueError, match="model.dtype='bfloat16' must be one of"):
        configs.check(configs.get("155m"), hardware.get("t4"))
