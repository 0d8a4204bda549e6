"""Laws of the comparison with PyTorch."""

import importlib.util
import json
import sys

import pytest

from benchmarks import torch_step
from course_lib import configs

LIKE = torch_step.LIKE_EAGER, torch_step.LIKE_DROPOUT


def test_ratios_are_those_of_one_round_so_a_round_that_is_slow_for_all_changes_none():
    slow = [1.0, 1.0, 5.0]
    times = {
        LIKE[0]: [(2.0 * s, 4.0 * s) for s in slow],
        "this library": [(1.0 * s, 3.0 * s) for s in slow],
        LIKE[1]: [(6.0 * s, 6.0 * s) for s in slow],
        "this library, dropout 0.1": [(2.0 * s, 2.0 * s) for s in slow],
    }
    rows = {row["step"]: row for row in torch_step.rows_of(times, tokens=100)}
    ours, dropping = rows["this library"], rows["this library, dropout 0.1"]
    assert (
        ours["x PyTorch"] == 2
        and ours["quartiles"] == [2, 2]
        and ours["x PyTorch by the processor"] == 1.333
    )
    assert dropping["x PyTorch"] == 3  # of PyTorch's, which drops out as well
    assert ours["tokens/s"] == 100 and ours["ms"] == 1000 and ours["processor (ms)"] == 3000


def test_every_case_is_a_configuration_that_can_work():
    for case in torch_step.CASES.values():
        chosen = torch_step.model_of_6m()
        chosen.update_from_flattened_dict(case.get("changes", {}))
        configs.check(chosen)


def test_without_pytorch_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks.torch_step"])
    monkeypatch.setattr(torch_step, "has_torch", lambda python: False)
    assert torch_step.main() == 2
    assert "pip install torch==" in capsys.readouterr().err


def test_it_is_told_which_python_has_pytorch():
    without = importlib.util.find_spec("torch") is None
    assert torch_step.has_torch(sys.executable) is not without


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed; the course does not need it",
)
def test_the_model_in_pytorch_is_the_same_and_a_measurement_says_what_was_measured(
    monkeypatch, tmp_path
):
    small = torch_step.model_of_6m()
    small.model.update(
        num_layers=2, hidden_size=32, head_dim=8, max_seq_len=16, vocab_size=64, num_outputs=64
    )
    small.data.update(batch_size=2, seq_len=16)
    monkeypatch.setattr(torch_step, "model_of_6m", lambda: small)
    arguments = [
        "--rounds",
        "2",
        "--steps",
        "1",
        "--out",
        str(tmp_path),
        "--cases",
        "this library",
    ]
    monkeypatch.setattr("sys.argv", ["benchmarks.torch_step", *arguments])
    assert torch_step.main() == 0
    found = json.loads((tmp_path / "torch_step.json").read_text())
    assert found["gradients_apart"] < 1e-5 and found["losses_apart"] < 1e-5
    assert [row["step"] for row in found["rows"]] == ["PyTorch, eager", "this library"]
    assert {"name", "date", "device", "versions", "rows", "notes"} <= found.keys()
