"""Laws of the programs that measure, as far as it shows without a GPU."""

import json
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import gpu, input, table
from course_lib import configs
from course_lib.text import data


@pytest.mark.parametrize("preset", configs.PRESETS)
def test_every_case_is_a_configuration_that_can_work(preset):
    for case, change in gpu.CHANGES.items():
        chosen = configs.get(preset)
        chosen.update_from_flattened_dict(change)
        # which has no kernel for float32: its row says so
        if (preset, case) == ("cpu", "attention cudnn"):
            with pytest.raises(
                ValueError,
                match="dtype='float32' must be 'bfloat16' or 'float16' for attention='cudnn'",
            ):
                configs.check(chosen)
        else:
            configs.check(chosen)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 2
    assert "finds no gpu here" in capsys.readouterr().err


def small() -> configs.ConfigDict:
    small = configs.cpu()
    small.model.update(num_layers=1, hidden_size=32, head_dim=16, num_heads=2, max_seq_len=16)
    small.model.update(vocab_size=64, num_outputs=64)
    small.data.update(batch_size=2, seq_len=16)
    return small


@pytest.mark.skipif(
    jax.default_backend() != "cpu",
    reason="on a GPU each case runs in a process without the small preset",
)
def test_results_say_what_was_measured_where_and_what_could_not_be(monkeypatch, tmp_path):
    monkeypatch.setitem(configs.PRESETS, "cpu", small)
    arguments = [
        "--device",
        "cpu",
        "--preset",
        "cpu",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
        "--cases",
    ]
    monkeypatch.setattr(
        "sys.argv", ["benchmarks.gpu", *arguments, "the preset", "attention cudnn"]
    )
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        gpu.main()
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert results["device"] == "cpu" and results["accelerator"] is None
    assert results["versions"]["jax"] == jax.__version__
    measured, refused = results["rows"]
    assert measured["not_run"] is None and measured["compiled_peak_bytes"] > 0
    assert measured["tokens_per_second"] == pytest.approx(
        2 * 16 / measured["step_seconds"]["median"]
    )
    # a CPU has no row in the table, nor a counter
    assert measured["mfu"] is None and measured["measured_peak_bytes"] is None
    assert "needs an NVIDIA GPU" in refused["not_run"]


def test_input_that_comes_in_half_the_time_of_a_step_is_twice_as_fast():
    rows = input.summary(
        {"input": [1.0, 1.0, 2.0], "step": [2.0] * 3, "fed": [2.5] * 3}, tokens=100
    )
    alone, step, fed = rows
    assert (
        alone["tokens/s"] == 100
        and alone["over steps alone"] == 2
        and alone["quartiles"] == [75, 100]
    )
    assert (
        step["tokens/s"] == 50
        and step["over steps alone"] == 1
        and fed["over steps alone"] == 0.8
    )


def test_what_lies_ready_when_a_turn_begins_is_not_timed(monkeypatch):
    now, ready = 0.0, 0

    def batch():  # takes a second, but for those that were made while the steps had their turn
        nonlocal now, ready
        ready, now = max(0, ready - 1), now + (not ready)

    def step():
        nonlocal now, ready
        ready, now = min(ready + 1, input.READY), now + 1

    monkeypatch.setattr(input, "time", types.SimpleNamespace(perf_counter=lambda: now))
    assert input.by_turns({"input": batch, "step": step}, 5, 3) == {
        "input": [5, 5, 5],
        "step": [5, 5, 5],
    }


def test_input_is_measured_against_the_steps_that_it_feeds(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(configs.PRESETS, "cpu", small)
    monkeypatch.setattr(data, "tokens", lambda split: np.arange(20_000, dtype=np.uint16) % 64)
    monkeypatch.setattr(
        "sys.argv",
        ["benchmarks.input", "--steps", "2", "--repeats", "3", "--out", str(tmp_path)],
    )
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        result = input.main()
    assert (
        json.loads(capsys.readouterr().out)
        == result
        == json.loads((tmp_path / "input.json").read_text())
    )
    assert [row["measured"] for row in result["rows"]] == list(input.NAMES.values())
    for row in result["rows"]:
        low, high = row["quartiles"]
        assert 0 < low <= row["tokens/s"] <= high


RESULT = {
    "name": "x",
    "date": "2026-01-02",
    "device": "abacus, 2 cores",
    "versions": {"jax": "1.2.3"},
    "rows": [
        {"what": "one", "s": 0.012346, "n": 12_000},
        {"what": "two", "s": [1.0, 2345.6], "n": None},
    ],
    "notes": "Counted by hand.",
}
PAGE = "# Page\n\nWords.\n\n<!-- x -->\nold | words\n<!-- end -->\n\nMore.\n"


def test_tables_of_the_page_are_made_from_the_results_and_the_words_stay():
    made = table.page(PAGE, [RESULT])
    assert made.startswith(
        "# Page\n\nWords.\n\n<!-- x -->\nCounted by hand.\n\n| what | s | n |\n|---|---|---|\n"
    )
    assert (
        "| one | 0.01235 | 12,000 |\n| two | 1 to 2,346 |  |\n\nabacus, 2 cores; jax 1.2.3;"
        " 2026-01-02\n" in made
    )
    assert made.endswith("<!-- end -->\n\nMore.\n") and "old" not in made
    assert table.page(made, [RESULT]) == made
    more = table.page(
        made, [RESULT, RESULT | {"name": "y", "device": {"cpu": "abacus", "cores": 2}}]
    )
    assert (
        more.startswith(made.rstrip())
        and "## y\n\n<!-- y -->\nCounted" in more
        and "abacus, 2; jax" in more
    )


def test_a_table_without_a_result_is_refused():
    with pytest.raises(
        ValueError, match=r"must only name measurements that there are, not \['x'\]"
    ):
        table.page(PAGE, [])


def test_the_page_shows_the_results_that_are_stored():
    root = Path(__file__).parents[1]
    text = (root / table.PAGE).read_text()
    results = [
        json.loads(path.read_text()) for path in sorted((root / table.RESULTS).glob("*.json"))
    ]
    assert results and table.page(text, results) == text


def test_what_words_say_of_the_step_is_what_was_measured():
    root = Path(__file__).parents[1]
    page, readme = (
        " ".join((root / name).read_text().split()) for name in (table.PAGE, "README.md")
    )
    rows = {
        row["step"]: row
        for row in json.loads((root / table.RESULTS / "torch_step.json").read_text())["rows"]
    }
    own, plain, eager = (
        rows[name] for name in ("this library", "without the three options", "PyTorch, eager")
    )
    clock, processor = "x PyTorch", "x PyTorch by the processor"
    assert (
        f"has {own[clock]:.2f} x in time and {own[processor]:.2f} x in processor time" in page
    )
    without = f"{plain[clock]:.2f} x in time and {plain[processor]:.2f} x in processor time"
    assert f"Without the three options it is {without}" in page
    busy = [row["processor (ms)"] / row["ms"] for row in (own, eager)]
    assert f"XLA keeps {busy[0]:.2f} of the two cores busy, PyTorch {busy[1]:.2f}" in page
    cases = (
        "memory returned after each step",
        "without flat products",
        "attention reference",
        "attention xla",
        "scanned layers",
    )
    for name in cases:
        assert f"{name} {rows[name]['processor (ms)'] / own['processor (ms)']:.2f}" in page
    assert (
        f"without options, it has {plain[clock]:.2f} times the speed of PyTorch eager; with"
        f" three options, {own[clock]:.2f} times"
    ) in readme
    compiled = rows["PyTorch, compiled"]
    assert f"Compiled PyTorch has {compiled[clock]:.2f} times" in readme
