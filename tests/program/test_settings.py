"""Laws of the program's configuration."""

import json
import math

import jax
import pytest

from course_lib import configs
from course_lib.many_devices.options import Strategy
from course_lib.one_device import mixed_precision
from course_lib.program import settings


def small(**changes):
    whole = settings.complete(configs.get("cpu"))
    whole.update_from_flattened_dict(changes)
    return whole


@pytest.mark.parametrize("preset", configs.PRESETS)
def test_every_preset_with_the_programs_parts_is_accepted_and_comes_back_from_json(preset):
    whole = settings.complete(configs.get(preset))
    settings.check(whole)
    again = settings.complete(json.loads(json.dumps(whole.to_dict())))
    assert again == whole
    settings.check(again)
    configs.check(whole)
    with whole.unlocked():
        for part in configs.PROGRAM:
            del whole[part]
    assert whole.to_dict() == configs.get(preset).to_dict()


SET = [
    ("model.num_layers", "6", 6),
    ("optimizer.learning_rate", "1", 1.0),
    ("optimizer.learning_rate", "3e-4", 3e-4),
    ("model.scan_layers", "true", True),
    ("model.dtype", "bfloat16", "bfloat16"),
    ("model.remat", "MLP, Attn", ("MLP", "Attn")),
    ("model.remat", "", ()),
    ("model.remat", '["MLP", "Attn"]', ("MLP", "Attn")),  # as config.json has it
    ("run.corpus", "/a folder=b", "/a folder=b"),
    ("seed", "7", 7),
]


@pytest.mark.parametrize(("field", "text", "value"), SET)
def test_a_field_is_set_in_its_own_type(field, text, value):
    whole = small()
    settings.set_field(whole, field, text)
    part, _, name = field.rpartition(".")
    found = (whole[part] if part else whole)[name]
    assert found == value and type(found) is type(value)


NOT_SET = [
    ("model.num_layer", "6", r"model\.num_layer='6' is no field .*mean model\.num_layers"),
    ("model", "6", "is no field"),
    ("model.num_layers", "6.0", r"model\.num_layers=6\.0 must be a whole number"),
    ("model.num_layers", "true", "must be a whole number"),
    ("model.scan_layers", "1", "must be true or false"),
    ("optimizer.learning_rate", "fast", "must be a number"),
]


@pytest.mark.parametrize(("field", "text", "message"), NOT_SET)
def test_a_misspelt_field_or_a_value_of_another_type_is_refused(field, text, message):
    with pytest.raises(ValueError, match=message):
        settings.set_field(small(), field, text)


BAD = [
    ("run.log_every", 0, r"run\.log_every=0 must be at least 1 step"),
    ("run.keep", 1, r"run\.keep=1 must be at least 2"),
    ("run.non_finite", "hope", r"run\.non_finite='hope' must be one of"),
    ("mesh.data", -1, r"mesh\.data=-1 must be at least 1, or 0 for all devices"),
    ("run.corpus", "", r"run\.corpus='' must be 'shipped', or a folder"),
    (
        "strategy.by",
        "magic",
        r"strategy\.by='magic' must be one of \('hand', 'compiler', 'types'\)",
    ),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_what_cannot_work_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        settings.check(small(**{field: value}))


def test_numbers_of_a_file_that_have_no_fraction_are_of_the_type_of_their_field():
    tree = small().to_dict()
    tree["optimizer"] = tree["optimizer"] | {"clip_norm": 1, "weight_decay": 0}
    whole = settings.complete(json.loads(json.dumps(tree)))
    settings.check(whole)
    with_fractions = small(**{"optimizer.clip_norm": 1.0, "optimizer.weight_decay": 0.0})
    assert settings.changed(settings.fixed(with_fractions), settings.fixed(whole)) == []
    settings.set_field(whole, "optimizer.clip_norm", "0.5")
    assert whole.optimizer.clip_norm == 0.5


def test_a_loss_scale_that_looks_for_its_value_is_not_stopped():
    scale = mixed_precision.DynamicLossScale()
    halvings = math.log(scale.largest / scale.smallest, scale.factor)
    assert halvings < small().run.skips_in_a_row <= halvings + 1


def test_numbers_are_rounded_as_before_where_a_new_field_has_its_default():
    found = settings.numerics(small(), jax.devices("cpu")[:1])
    older = {**found, "strategy": {"by": "hand"}, "model": {"remat": []}}
    assert settings.rounded_otherwise(older, found) == []
    older["model"] = {"remat": [], "attention": "xla"}
    assert settings.rounded_otherwise(older, found) == [
        "model.attention: 'xla' saved, 'reference' given"
    ]


def test_data_takes_the_devices_that_other_axes_leave():
    def axes(**sizes):
        return settings.axes(small(**{f"mesh.{axis}": n for axis, n in sizes.items()}), 8)

    assert axes() == {"data": 8}
    assert axes(tensor=2, pipe=2) == {"data": 2, "pipe": 2, "tensor": 2}
    assert axes(data=1, tensor=8) == {"data": 1, "tensor": 8}
    for sizes in ({"tensor": 3}, {"data": 4}, {"tensor": 16}):
        with pytest.raises(ValueError, match="must multiply to the number of devices, 8"):
            axes(**sizes)


MAY_CHANGE = {
    **{"run.log_every": 3, "run.corpus": "x", "run.keep": 9, "run.skips_in_a_row": 9},
    **{"mesh.tensor": 2, "mesh.pipe": 2, "strategy.zero": 1},
    **{"training.steps": 5, "training.donate": False, "training.accumulation": "loop"},
    **{"model.remat": ("MLP",), "model.remat_policy": "dots", "model.attention": "xla"},
}
MAY_NOT = {
    **{"seed": 1, "data.batch_size": 8, "training.num_minibatches": 2},
    **{"model.dtype": "bfloat16", "run.validation_batches": 2},
}


def test_what_only_says_who_computes_or_how_or_how_long_may_change_and_all_else_may_not():
    same = settings.fixed(small())
    assert settings.fixed(small(**MAY_CHANGE)) == same
    assert settings.fixed(small(**{"training.backward": "in_place"})) == same
    for field, value in MAY_NOT.items():
        [said] = settings.changed(same, settings.fixed(small(**{field: value})))
        assert said.startswith(f"{field}: ") and said.endswith(f" saved, {value!r} given")


def test_a_run_may_begin_to_leave_updates_out_but_not_end_to():
    stop, skip = (
        settings.fixed(small(**{"run.non_finite": how})) for how in settings.NON_FINITE
    )
    assert settings.changed(stop, skip) == settings.changed(skip, skip) == []
    assert settings.changed(skip, stop) == ["run.non_finite: 'skip' saved, 'stop' given"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (True, "blocks")),
        ({"mesh.tensor": 2}, (False, "reference")),  # has products of its own
        ({"mesh.context": 2}, (False, "reference")),  # has attention of its own
        ({"strategy.by": "types"}, (False, "reference")),  # refuses flat products
        ({"data.seq_len": 2048, "model.max_seq_len": 2048}, (True, "reference")),
        ({"model.attention": "xla"}, (True, "xla")),
        ({"model.flat_products": False}, (False, "blocks")),
        ({"model.attention": "reference"}, (True, "reference")),
    ],
)
def test_on_a_cpu_the_faster_fields_are_taken_where_nobody_chose_others(changed, expected):
    config = settings.complete(configs.get("cpu"))
    for field, value in changed.items():
        part, name = field.split(".")
        config[part][name] = value
    settings.fast_on_cpu(config, set(changed))
    settings.check(config)
    assert (config.model.flat_products, config.model.attention) == expected


def test_where_layers_are_stored_in_the_order_of_stages_these_stay():
    two = settings.fixed(small(**{"strategy.chunks": 2, "mesh.pipe": 2}))
    assert two != settings.fixed(small(**{"mesh.pipe": 2})) and two != settings.fixed(small())
    assert two != settings.fixed(small(**{"strategy.chunks": 2, "mesh.pipe": 4}))
    in_a_v = {"strategy.chunks": 2, "mesh.pipe": 2, "strategy.schedule": "zb_v"}
    v_shaped = settings.fixed(small(**in_a_v))
    [said] = settings.changed(two, v_shaped)
    assert said == "strategy.schedule: not saved, 'zb_v or dualpipe_v' given"
    assert "strategy.schedule" in settings.FIELDS
    assert settings.changed(v_shaped, two) and not settings.changed(v_shaped, v_shaped)
    assert settings.strategy(small(**{"strategy.chunks": 2})) == Strategy(chunks=2)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("config.json", '{"architectures": ["GPT"]}', "config.json"),
        ("config.json", "no JSON", "config.json"),
        ("metrics.jsonl", '{"epoch": 1}\n', "metrics.jsonl"),
    ],
)
def test_a_run_does_not_begin_over_files_of_something_else(tmp_path, name, text, named):
    (tmp_path / name).write_text(text)
    assert f"holds {named}, but no configuration of a run" in settings.why_not_begun(tmp_path)


def test_a_run_begins_anew_only_if_its_first_checkpoint_was_not_whole_yet(tmp_path):
    assert settings.why_not_begun(tmp_path / "new") == ""
    (tmp_path / "metrics.jsonl").touch()  # killed while it began
    assert settings.why_not_begun(tmp_path) == ""
    settings.write(small(**{"run.checkpoint_every": 10}), tmp_path)
    for step, why in ((20, ""), (21, "has no checkpoints any more")):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
        assert why in settings.why_not_begun(tmp_path) and bool(why) == bool(
            settings.why_not_begun(tmp_path)
        )
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "report.md").touch()
    assert "has no checkpoints any more" in settings.why_not_begun(tmp_path)


def test_what_rounding_follows_from_names_devices_and_processes(monkeypatch):
    whole = settings.complete(configs.get("cpu"))
    whole.strategy.zero = 1
    one, four = (settings.numerics(whole, jax.devices("cpu")[:count]) for count in (1, 4))
    assert (one["device"], one["processes"]) == ("cpu", 1)
    for found, count, zero in ((one, 1, 0), (four, 4, 1)):
        assert (found["mesh"], found["strategy"]["zero"]) == ({"data": count}, zero)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert settings.numerics(whole, jax.devices("cpu")[:4]) == four | {"processes": 2}
