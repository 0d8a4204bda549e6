"""What must be true of the measurements that `make gpu` takes, as far as a machine without a GPU can tell."""

import json

import jax
import pytest

from benchmarks import gpu
from course_lib import config


@pytest.mark.parametrize("preset", config.PRESETS)
def test_every_case_is_a_configuration_that_can_work(preset):
    for case, change in gpu.CHANGES.items():
        chosen = config.get(preset)
        chosen.update_from_flattened_dict(change)
        if (preset, case) == ("cpu", "attention cudnn"):  # which has no kernel for float32: its row says so
            with pytest.raises(ValueError, match="dtype='float32' must be 'bfloat16' or 'float16' for attention='cudnn'"):
                config.check(chosen)
        else:
            config.check(chosen)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 2
    assert "finds no gpu here" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU each case runs in a process without the small preset")
def test_results_say_what_was_measured_where_and_what_could_not_be(monkeypatch, tmp_path):
    def small():
        small = config.cpu()
        small.model.update(num_layers=1, hidden_size=32, head_dim=16, num_heads=2, max_seq_len=16)
        small.model.update(vocab_size=64, num_outputs=64)
        small.data.update(batch_size=2, seq_len=16)
        return small

    monkeypatch.setitem(config.PRESETS, "cpu", small)
    arguments = ["--device", "cpu", "--preset", "cpu", "--steps", "2", "--out", str(tmp_path), "--cases"]
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", *arguments, "the preset", "attention pallas"])
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        gpu.main()
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert results["device"] == "cpu" and results["accelerator"] is None
    assert results["versions"]["jax"] == jax.__version__
    measured, refused = results["rows"]
    assert measured["not_run"] is None and measured["compiled_peak_bytes"] > 0
    assert measured["tokens_per_second"] == pytest.approx(2 * 16 / measured["step_seconds"]["median"])
    assert measured["mfu"] is None and measured["measured_peak_bytes"] is None  # a CPU has no row in the table, nor a counter
    assert "needs an NVIDIA GPU" in refused["not_run"]
