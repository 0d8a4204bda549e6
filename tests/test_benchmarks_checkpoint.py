"""Tests of the benchmark of checkpoints."""

import json

import jax
import pytest
from small_run import configuration, corpus

from benchmarks import checkpoint, table
from course_lib import configs


def test_the_cost_of_a_save_is_the_extra_time_of_the_steps_with_it():
    plain = [5.0, 6.0, 9.0]  # seconds of 50 steps, on a machine that gets slower
    row = checkpoint.summary(plain, [5.3, 6.2, 9.3], 50, [100, 1000])
    assert row["per step (s)"] == 6 / 50 and row["per save (s)"] == pytest.approx(0.3)
    assert row["quartiles (s)"] == pytest.approx([0.2, 0.3])
    assert (
        row["overhead every 100 steps"] == "2.50%"
        and row["overhead every 1000 steps"] == "0.25%"
    )
    assert row["under 3% from every"] == 84  # 0.3 s are 3% of the 10 s that 83.3 steps take


def test_a_save_that_costs_nothing_fits_into_every_step():
    row = checkpoint.summary([5.0, 5.0], [4.9, 4.9], 50, [1])
    assert row["under 3% from every"] == 1 and row["overhead every 1 steps"].startswith("-")


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="compiles a small model where that is quick"
)
def test_the_programs_own_loop_is_measured(monkeypatch, capsys, tmp_path):
    # compiles faster; conftest.py turns it off again
    jax.config.update("jax_disable_most_optimizations", True)
    tiny = configuration(corpus(tmp_path / "text"))
    monkeypatch.setitem(configs.PRESETS, "cpu", lambda: tiny)
    runs, train = [], checkpoint.loop.train

    def noted(config, folder, devices):
        config.run.corpus = tiny.run.corpus
        ended = train(config, folder, devices)
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        runs.append((config.run.checkpoint_every, ended.step, kept))
        return ended

    monkeypatch.setattr(checkpoint.loop, "train", noted)
    # its pictures take their time
    monkeypatch.setattr(checkpoint.loop.journal, "report", lambda folder: None)
    out, folder = tmp_path / "out", tmp_path / "runs"
    folder.mkdir()
    args = f"--every 3 --saves 2 --repeats 1 --folder {folder} --out {out}".split()
    monkeypatch.setattr("sys.argv", ["benchmarks.checkpoint", *args])
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        result = table.run(checkpoint.measure)
    stored = json.loads((out / "checkpoint.json").read_text())
    assert result == json.loads(capsys.readouterr().out) == stored
    assert runs == 2 * [(10, 9, ["00000009"]), (3, 9, ["00000003", "00000006", "00000009"])]
    wall, cpu = result["rows"]
    assert wall["clock"] == "wall" and wall["per step (s)"] > 0 and cpu["per step (s)"] > 0
    assert list(folder.iterdir()) == []  # nothing is left behind
