"""Laws of the benchmark that compares the lightest optimizer with AdamW."""

import json

import pytest

from benchmarks import light
from course_lib import configs


def test_every_case_is_a_configuration_that_can_work_and_only_its_optimizer_differs():
    for changes in light.CASES.values():
        chosen = configs.get("cpu")
        chosen.update_from_flattened_dict(changes)
        configs.check(chosen)
        assert all(field.startswith("optimizer.") for field in changes)


def test_the_best_rate_of_the_first_seed_is_trained_with_the_other_seeds(monkeypatch, tmp_path):
    trained = []

    def lowest_at_the_middle(changes, folder):
        assert not folder.exists() and folder.parent == tmp_path
        rate, seed = changes["optimizer.learning_rate"], changes["seed"]
        trained.append((rate, seed))
        return {"loss": 4.5 + abs(rate - 1e-2) + seed / 10}

    monkeypatch.setattr(light.minute, "train", lowest_at_the_middle)
    rate, losses = light.train(light.ADAMW, 3, tmp_path)
    assert rate == 1e-2 and losses == pytest.approx([4.5, 4.6, 4.7])
    assert [seed for _, seed in trained] == [0, 0, 0, 1, 2]
    assert {rate for rate, seed in trained if seed} == {1e-2}


def test_a_row_compares_means_with_adamw():
    adamw, other = light.rows({light.ADAMW: (1e-2, [4.0, 5.0]), light.LIGHT: (0.1, [4.545])})
    assert adamw["validation loss (nats)"] == 4.5 and adamw["over AdamW"] == "+0.00%"
    assert other["over AdamW"] == "+1.00%" and other["best rate"] == "0.1"


def test_it_stores_what_it_prints(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(light, "train", lambda case, seeds, folder: (0.1, [4.5] * seeds))
    monkeypatch.setattr("sys.argv", ["light", "--seeds", "2", "--out", str(tmp_path)])
    light.main()
    stored = json.loads((tmp_path / "light.json").read_text())
    assert stored == json.loads(capsys.readouterr().out)
    assert [row["case"] for row in stored["rows"]] == list(light.CASES)
