"""Laws of configurations."""

import pytest

from course_lib import configs, optimizers
from course_lib.measure import hardware


def test_the_155m_preset_is_the_published_configuration():
    preset, published = configs.get("155m"), dict(optimizer={}, data={}, training={})
    published["model"] = dict(num_layers=12, hidden_size=1024, head_dim=128, num_heads=8)
    published["model"] |= dict(mlp_expansion=4, vocab_size=2048, max_seq_len=512)
    published["model"] |= dict(dropout_rate=0.1, dtype="bfloat16", softmax_dtype="float32")
    published["model"] |= dict(scan_layers=True, remat=("MLP", "Attn"))
    published["optimizer"] |= dict(name="adam", learning_rate=4e-4, warmup_steps=10)
    published["optimizer"] |= dict(decay_rate=0.99)
    published["data"] |= dict(batch_size=64, seq_len=512)
    published["training"] |= dict(num_minibatches=4)
    for part, values in published.items():
        assert {name: preset[part][name] for name in values} == values
    assert preset.seed == 42


@pytest.mark.parametrize("name", configs.PRESETS)
def test_every_preset_can_work_and_still_learns_halfway(name):
    preset = configs.get(name)
    configs.check(preset)
    if preset.training.steps >= 100:
        schedule = optimizers.SCHEDULES[preset.optimizer.schedule](preset.optimizer)
        assert schedule(preset.training.steps // 2) > 0.01 * preset.optimizer.learning_rate


def test_a_preset_is_a_copy_that_takes_no_misspelt_field_and_no_second_one_of_its_name():
    configs.get("cpu").data.batch_size = 2
    assert configs.get("cpu").data.batch_size != 2
    with pytest.raises(AttributeError, match='Did you mean "num_layers"'):
        configs.get("cpu").model.num_layer = 2
    with pytest.raises(ValueError, match="name='cpu' must be new: it is cpu"):
        configs.preset("cpu")(lambda: configs.get("155m"))


COSINE = {"optimizer.schedule": "warmup_cosine"}
OFFLOAD = {"optimizer.offload": True}
IN_PLACE = {"training.backward": "in_place", "model.remat": ("Block",)}
NAMES = {"model.remat_policy": "names", "model.remat_names": ("mlp_hidden",)}
EXPERTS = {"model.num_experts": 2}
HALF = {"model.dtype": "float16", "training.loss_scale": "static"}
ODD_HEADS = {"model.positions": "rotary", "model.num_heads": 1024, "model.head_dim": 1}
ONE_ORDER = {"model.attention_first": True, "model.parallel_block": True, "model.remat": ()}
TIED = {"model.tied_embeddings": True, "model.num_outputs": 2056}
# A table of fields refuses what is outside of one field's rule: `tests/test_fields.py`.
BAD = [
    ({"model.num_layers": 0}, "model.num_layers=0"),
    ({"model.remat": ("mlp",)}, "model.remat=.* must hold names from"),
    ({"model.remat_names": ("mlp",)}, "model.remat_names=.* must hold names from"),
    ({"seed": 2**32}, "seed=4294967296"),
    # between fields of the model
    ({"data.seq_len": 513}, "seq_len=513 must be at most max_seq_len=512"),
    ({"model.head_dim": 48}, "head_dim=48 must be hidden_size / num_heads = 1024 / 8"),
    ({"model.attention_width": 512}, "or attention_width=512 their product"),
    ({"model.rotary_scaling": "linear"}, "must be 'none' without positions='rotary'"),
    ({"model.window": 8, "model.causal_mask": False}, "window=8 must be 0 without causal_mask"),
    ({"model.num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=8"),
    (ODD_HEADS, "head_dim=1 must be even"),
    (EXPERTS | {"model.experts_per_token": 3}, "experts_per_token=3"),
    (EXPERTS | {"model.parallel_block": True}, "num_experts=2"),
    ({"model.dropless": True}, "dropless=True must be False for num_experts=0"),
    ({"model.parallel_block": True}, "remat=.* for parallel_block=True"),
    (ONE_ORDER, "attention_first=True must be False"),
    (TIED, "num_outputs=2056 must be vocab_size=2048 for tied_embeddings=True"),
    ({"model.loss_chunks": 4096}, "loss_chunks=4096 must be .* 2048 columns .* take 2048"),
    ({"model.remat_names": ("qkv",)}, "remat_names=.* must be empty"),
    ({"model.remat_policy": "names"}, "remat_names=.* must name a value"),
    ({"model.remat_policy": "dots", "model.remat": ()}, "remat_policy='dots'"),
    (NAMES | {"model.remat": ("Attn",)}, "remat=.* must hold 'MLP' or 'Block'"),
    ({"model.attention": "xla", "model.softmax_dtype": "bfloat16"}, "softmax_dtype='bfloat16'"),
    ({"model.attention": "cudnn", "model.dtype": "float32"}, "dtype='float32'"),
    # between parts
    ({"model.num_outputs": 2056}, "model.num_outputs=2056 must be vocab_size=2048"),
    ({"training.num_minibatches": 3}, "training.num_minibatches=3 must divide"),
    ({"model.dtype": "float16"}, "training.loss_scale='none'"),
    (HALF | {"optimizer.param_dtype": "bfloat16"}, "optimizer.param_dtype='bfloat16'"),
    (COSINE | {"optimizer.warmup_steps": 2000}, "optimizer.warmup_steps=2000 must be under"),
    (COSINE | {"training.steps": 1001}, "training.steps=1001 must be at most .*=1000: "),
    (OFFLOAD | {"optimizer.name": "sgd"}, "optimizer.name='sgd' must be 'adam' or .*offload"),
    (OFFLOAD | {"optimizer.param_dtype": "bfloat16"}, "optimizer.param_dtype='bfloat16'"),
    (OFFLOAD | {"model.scan_layers": False}, "model.scan_layers=False"),
    (OFFLOAD | {"training.loss_scale": "static"}, "training.loss_scale='static'"),
    (IN_PLACE | {"model.scan_layers": False}, "model.scan_layers=False"),
    (IN_PLACE | {"model.remat": ()}, r"model.remat=\(\) must be \('Block',\)"),
    (IN_PLACE | EXPERTS, "model.num_experts=2"),
    (IN_PLACE | {"training.loss_scale": "static"}, "training.loss_scale='static'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_cannot_work_is_refused_with_the_field_and_its_value(changes, message):
    config = configs.get("155m")
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        configs.check(config)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="preset='200m' must be one of .*'155m'"):
        configs.get("200m")


def test_a_configuration_is_checked_against_the_accelerator_if_one_is_given():
    config = configs.get("155m")
    with pytest.raises(ValueError, match="model.dtype='bfloat16' must be one of"):
        configs.check(config, hardware.get("t4"))
    config.model.update(attention="cudnn", dtype="float16")
    config.training.loss_scale = "dynamic"
    configs.check(config)
    with pytest.raises(ValueError, match="model.attention='cudnn' cannot run on NVIDIA T4"):
        configs.check(config, hardware.get("t4"))
