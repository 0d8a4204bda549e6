"""Laws of the benchmark that trains the preset `cpu` for a minute."""

import json
import sys

import pytest

from benchmarks import minute
from course_lib import configs

TINY = minute.FAST | {
    "model.num_layers": 1,
    "training.steps": 2,
    "optimizer.total_steps": 2,
    "optimizer.warmup_steps": 1,
    "run.validation_batches": 1,
}


def test_every_case_is_a_configuration_that_can_work_and_decays_until_its_last_step():
    for changes in minute.CASES.values():
        chosen = configs.get("cpu")
        chosen.update_from_flattened_dict(changes)
        configs.check(chosen)
        assert chosen.optimizer.total_steps == chosen.training.steps


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
    monkeypatch.setattr(minute, "CASES", {"tiny": TINY})
    monkeypatch.setattr("sys.argv", ["minute", "--repeats", "1", "--out", str(tmp_path)])
    minute.main()
    stored = json.loads((tmp_path / "minute.json").read_text())
    assert stored == json.loads(capsys.readouterr().out)
    [row] = stored["rows"]
    assert row["case"] == "tiny" and row["steps"] == 2
    assert 6 < row["validation loss (nats)"] < 9  # log(2048) is 7.6; two steps learn little
    assert row["processor (s)"] > 1
    assert sys.executable not in json.dumps(stored)
