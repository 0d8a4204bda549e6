"""Laws of the benchmarks that train, and of the comparison with PyTorch."""

import importlib.util
import json

import pytest

from benchmarks import light, minute, table, torch_step
from course_lib import configs


def test_every_case_is_a_configuration_that_can_work():
    cases = [*minute.CASES.values(), *light.CASES.values()]
    for changes in cases:
        chosen = configs.get("cpu")
        chosen.update_from_flattened_dict(changes)
        configs.check(chosen)
        assert chosen.optimizer.total_steps == chosen.training.steps
    for case in torch_step.CASES.values():
        chosen = torch_step.model_of_6m()
        chosen.update_from_flattened_dict(case.get("changes", {}))
        configs.check(chosen)


def test_the_best_rate_of_the_first_seed_is_trained_with_the_other_seeds():
    trained = []

    def lowest_at_the_middle(rate, seed):
        trained.append((rate, seed))
        return 4.5 + abs(rate - 1e-2) + seed / 10

    rate, losses = light.search(lowest_at_the_middle, 1e-2, 3)
    assert rate == 1e-2 and losses == pytest.approx([4.5, 4.6, 4.7])
    assert [seed for _, seed in trained] == [0, 0, 0, 1, 2]
    assert {rate for rate, seed in trained if seed} == {1e-2}


def test_a_row_compares_means_with_adamw():
    adamw, other = light.rows({light.ADAMW: (1e-2, [4.0, 5.0]), light.LIGHT: (0.1, [4.545])})
    assert adamw["validation loss (nats)"] == 4.5 and adamw["over AdamW"] == "+0.00%"
    assert other["over AdamW"] == "+1.00%" and other["best rate"] == "0.1"


@pytest.mark.parametrize(
    "loss, seconds, goal",
    [(4.5, 60, "met"), (4.51, 60, "missed"), (4.5, 60.1, "missed")],
)
def test_a_row_has_the_medians_and_says_whether_both_reach_the_goal(loss, seconds, goal):
    runs = [
        {"loss": loss + more, "seconds": seconds + more, "processor": 100 + more}
        for more in (-1, 0, 7)
    ]
    row = minute.row("the preset", runs)
    assert row["validation loss (nats)"] == loss and row["seconds"] == seconds
    assert row["processor (s)"] == 100 and row["steps"] == 1000 and row["goal"] == goal


@pytest.mark.slow
def test_it_trains_by_the_program_and_stores_what_it_prints(monkeypatch, capsys, tmp_path):
    few = {"training.steps": 2, "optimizer.total_steps": 2, "optimizer.warmup_steps": 1}
    few |= {"model.num_layers": 1, "run.validation_batches": 1}
    monkeypatch.setattr(minute, "CASES", {"tiny": few})
    words = ["minute", "--repeats", "1", "--cases", "tiny", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    table.run(minute.measure)
    stored = json.loads((tmp_path / "minute.json").read_text())
    assert stored == json.loads(capsys.readouterr().out)
    [row] = stored["rows"]
    assert row["case"] == "tiny" and row["steps"] == 2
    assert 6 < row["validation loss (nats)"] < 9  # log(2048) is 7.6; two steps learn little
    assert row["processor (s)"] > 1


def test_ratios_are_those_of_one_round_so_a_round_that_is_slow_for_all_changes_none():
    slow = [1.0, 1.0, 5.0]
    times = {
        torch_step.LIKE_EAGER: [(2.0 * s, 4.0 * s) for s in slow],
        "this library": [(1.0 * s, 3.0 * s) for s in slow],
        torch_step.LIKE_DROPOUT: [(6.0 * s, 6.0 * s) for s in slow],
        "this library, dropout 0.1": [(2.0 * s, 2.0 * s) for s in slow],
    }
    rows = {row["step"]: row for row in torch_step.rows_of(times, tokens=100)}
    ours, dropping = rows["this library"], rows["this library, dropout 0.1"]
    assert ours["x PyTorch"] == 2 and ours["quartiles"] == [2, 2]
    assert ours["x PyTorch by the processor"] == 1.333
    assert dropping["x PyTorch"] == 3  # of PyTorch's, which drops out as well
    assert ours["tokens/s"] == 100 and ours["ms"] == 1000 and ours["processor (ms)"] == 3000


def test_without_pytorch_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(torch_step, "has_torch", lambda python: False)
    with pytest.raises(SystemExit, match="pip install torch=="):
        torch_step.measure()


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed; the course does not need it",
)
def test_the_model_in_pytorch_is_the_same_and_a_measurement_says_what_was_measured(monkeypatch):
    small = torch_step.model_of_6m()
    small.model.update(num_layers=2, hidden_size=32, head_dim=8, max_seq_len=16)
    small.model.update(vocab_size=64, num_outputs=64)
    small.data.update(batch_size=2, seq_len=16)
    monkeypatch.setattr(torch_step, "model_of_6m", lambda: small)
    found = torch_step.measure(rounds=2, steps=1, cases=("this library",))
    assert found["gradients_apart"] < 1e-5 and found["losses_apart"] < 1e-5
    assert [row["step"] for row in found["rows"]] == ["PyTorch, eager", "this library"]
