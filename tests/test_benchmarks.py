"""Laws of the programs that measure, as far as it shows without a GPU."""

import gc
import io
import json
import statistics
import subprocess
import sys
import types
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import gpu, gpu_cases, gpu_page, input, table
from course_lib import configs, measure, training
from course_lib.lessons import ladder
from course_lib.measure import hardware, virtual
from course_lib.text import data


def test_every_case_is_a_configuration_that_can_work():
    for preset in configs.PRESETS:
        for case, change in gpu_cases.CHANGES.items():
            chosen = configs.get(preset)
            chosen.update_from_flattened_dict(change)
            # which has no kernel for float32: its row says so
            if (chosen.model.dtype, case) != ("float32", "attention cudnn"):
                configs.check(chosen)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 2
    assert "finds no gpu here" in capsys.readouterr().err


ROOT = Path(__file__).parents[1]
NO_VIRTUAL = virtual.why_unavailable()


def small():
    small = configs.cpu()
    small.model.update(num_layers=1, hidden_size=32, head_dim=16, num_heads=2, max_seq_len=16)
    small.model.update(vocab_size=64, num_outputs=64)
    small.data.update(batch_size=2, seq_len=16)
    return small


def served(make, monkeypatch, capsys):
    """The row that the process of a case prints, once it was told to run."""
    monkeypatch.setattr("sys.stdin", io.StringIO("run\n"))
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        gpu.serve(make, steps=2)
    first, row = capsys.readouterr().out.splitlines()
    assert first == "compiled"
    return json.loads(row)


def test_a_step_is_compiled_and_timed_and_its_row_says_what_it_computes(monkeypatch, capsys):
    config = small()
    row = served(lambda: gpu_cases.step_of(config), monkeypatch, capsys)
    flops = sum(training.step_flops(config).total.values())
    assert (row["not_run"], row["tokens"], row["flops"]) == (None, 2 * 16, flops)
    assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    state, batch = training.build(config).abstract()
    numbers = sum(leaf.size for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert row["peak_bytes"] > 4 * numbers


def test_a_profile_has_the_operations_of_one_step_scanned_and_unrolled(tmp_path):
    file = tmp_path / "cpu-profile.json"
    arguments = ["--preset", "cpu", "--profile", str(file)]
    subprocess.run([sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, check=True)
    assert file.stat().st_size < 1e6
    profile = json.loads(file.read_text())
    assert set(profile["versions"]) >= {"jax", "jaxlib"} and profile["device"]

    def copies(case):
        return sum("dynamic_update_slice" in scope for _, scope, *_ in profile["steps"][case])

    assert copies("scan") > 0 == copies("unrolled")
    rows = [row for rows in profile["steps"].values() for row in rows]
    assert all(seconds >= 0 <= start for _, _, start, seconds in rows)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU may have cuDNN")
def test_what_cannot_run_here_is_a_row_with_the_reason(monkeypatch, capsys):
    def make():
        return gpu_cases.attention_gradient("cudnn", 512)

    assert "cudnn attention needs" in served(make, monkeypatch, capsys)["not_run"]


def test_the_first_state_is_not_kept_beside_the_next(monkeypatch, capsys):
    def looks(compiled, state, batch, *, steps):
        first = weakref.ref(jax.tree.leaves(state)[0])
        del state
        gc.collect()
        assert first() is None
        return measure.Time(0.5, 0.25, 1.0)

    monkeypatch.setattr(measure, "step_time", looks)
    row = served(lambda: gpu_cases.step_of(small()), monkeypatch, capsys)
    assert row["seconds"] == {"median": 0.5, "low": 0.25, "high": 1.0}


@pytest.mark.skipif(NO_VIRTUAL is not None, reason=str(NO_VIRTUAL))
def test_a_prediction_has_the_bytes_of_arrays_and_the_seconds_of_the_data_sheet():
    a100 = hardware.get("a100-80")
    row = gpu.predict(lambda: gpu_cases.copy(lambda x: x + 1, gibibytes=1), "a100-80")
    assert row["peak_bytes"] == row["traffic_bytes"] == 2 * measure.GIB
    assert row["floor_seconds"] == pytest.approx(2 * measure.GIB / a100.memory_bandwidth)
    assert row["attainable_seconds"] == pytest.approx(row["floor_seconds"] / 0.85)
    row = gpu.predict(lambda: gpu_cases.matmuls("bfloat16", 2_048, times=3), "a100-80")
    assert row["flops"] == 3 * 2 * 2_048**3
    assert row["attainable_seconds"] > row["flops"] / a100.peak("bfloat16") / 0.77


def test_a_chunked_loss_computes_the_logits_twice_and_causal_attention_half_of_the_products():
    by_chunks = {n: gpu_cases.loss_gradient(n).flops["bfloat16"] for n in (1, 8)}
    product = 2 * 8_192 * 2_304 * 256_000
    assert by_chunks == {1: 3 * product, 8: 4 * product}
    every, causal = (
        gpu_cases.attention_gradient("written out", 512, causal).flops["bfloat16"]
        for causal in (False, True)
    )
    assert every == 6 * 2 * 32_768 * 512 * 8 * 128
    assert causal == every * (512 + 1) // (2 * 512)  # and the diagonal


def test_processes_compile_side_by_side_run_in_turn_and_one_that_dies_says_why(monkeypatch):
    """None runs before the others have compiled, nor before the one before it has ended; the
    third dies.
    """
    program = """
import json, sys, time
compiled = time.monotonic()
print("compiled", flush=True)
sys.stdin.readline()
row = {"not_run": None, "compiled": compiled, "ran": time.monotonic()}
print(json.dumps(row | {"ended": time.monotonic()}))
"""
    dies = "import sys; print('Traceback', file=sys.stderr); sys.exit('out of memory')"

    def start(group, case, options, folder):
        log = folder / case
        with log.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            code = dies if case == "dies" else program
            return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes), log

    monkeypatch.setattr(gpu, "_start", start)
    options = types.SimpleNamespace(at_once=3, logs=None)
    first, second, third = gpu.measure_all([("a", "1"), ("a", "2"), ("b", "dies")], options)
    assert max(first["compiled"], second["compiled"]) <= min(first["ran"], second["ran"])
    assert first["ended"] <= second["ran"]
    assert third == {"group": "b", "case": "dies", "not_run": "out of memory"}


def test_rows_that_are_measured_again_replace_those_of_the_file(tmp_path, capsys):
    file = tmp_path / "results" / "abacus.json"
    row = {"group": "rates", "case": "one", "not_run": "later"}
    gpu.write(file, {"gpu": None}, [row, row | {"case": "two"}])
    gpu.write(file, {"gpu": None}, [row | {"not_run": None, "peak_bytes": measure.GIB}])
    one, two = json.loads(file.read_text())["rows"]
    assert (one["peak_bytes"], two["not_run"]) == (measure.GIB, "later")
    assert one["versions"]["jax"] == jax.__version__
    assert "compiled 1.00 GiB" in capsys.readouterr().out


def test_names_choose_groups_and_cases_and_a_wrong_one_is_refused():
    every = gpu.chosen("155m", [])
    assert gpu.chosen("155m", ["ladder"]).keys() == {("ladder", n) for n in ladder.BY_NAME}
    assert list(gpu.chosen("155m", ["all logits"])) == [("loss", "all logits")]
    assert len(every) == sum(map(len, gpu_cases.groups().values()))
    with pytest.raises(ValueError, match=r"only=\['laddr'\] must be cases"):
        gpu.chosen("155m", ["laddr"])


def test_a_summary_says_by_how_much_predictions_were_off():
    def pair(took, estimate, more, group="ladder"):
        before = {"peak_bytes": measure.GIB, "attainable_seconds": estimate}
        row = {"group": group, "case": "x", "measured_peak_bytes": measure.GIB + more * 2**20}
        return row | {"seconds": {"median": took}}, before

    wrong_order = pair(0.3, 0.1, 1024), pair(0.21, 0.2, 110)
    without_prediction = pair(1, 1, 1)[0], None
    found = [*wrong_order, without_prediction, pair(9, 9, 9, "attention"), pair(0.3, 0.1, 110)]
    row = gpu_page.summary("h200", found)
    assert (row["steps"], row["measured / attainable time, median"]) == (3, "3.00")
    assert (row["least, most (MiB)"], row["least, most"]) == ("110, 1,024", "1.05, 3.00")
    assert row["pairs over 8% apart in the right order"] == "0 of 2"


CHUNKS_128 = "128 chunks of the vocabulary"
LOSSES = ("all logits", "8 chunks of the vocabulary", "8 chunks of tokens")


def measured_words():
    """Words about the measurements on the H200, made from the results: (file, words)."""
    found = gpu_page.pairs("h200", ROOT / gpu_page.RESULTS)
    ms = {row["case"]: row["seconds"]["median"] * 1e3 for row, _ in found}
    gib = {row["case"]: row["measured_peak_bytes"] / measure.GIB for row, _ in found}
    known = gpu_page.compared(found)
    slower = {
        row["case"]: gpu_page.slower(row, before)
        for row, before in found
        if before and row["group"] in gpu_page.STEPS
    }
    estimate = {
        row["case"]: 1e3 * before["attainable_seconds"] for row, before in found if before
    }
    more = {
        row["case"]: gpu_page.more_bytes(row, before) / measure.MIB for row, before in known
    }
    least, most = (f"{f(more.values()):.0f}" for f in (min, max))
    times = sorted(gpu_page.slower(*pair) for pair in known)
    quick, many = ([x for x in times if (x < 1.2) == low] for low in (True, False))
    order = gpu_page.summary("h200", found)["pairs over 8% apart in the right order"].split(
        " of "
    )
    ours, theirs = ms["flash, our kernel, 2,048"], ms["cudnn, 2,048"]
    far, theirs_far = ms["flash, our kernel, 8,192"], ms["cudnn, 8,192"]
    loss = ms["8 chunks of the vocabulary"], ms["all logits"]
    written_out, tiles = ms["written out, 2,048"], ms["flash, tiles in JAX, 2,048"]
    far_written_out, far_tiles = ms["written out, 8,192"], ms["flash, tiles in JAX, 8,192"]
    program = {
        row["case"]: (row["peak_bytes"] - b["peak_bytes"]) / measure.MIB for row, b in known
    }
    rest = {name: more[name] - program[name] for name in more}
    rungs = ["no dropout", "unrolled", *(name for name in slower if slower[name] >= 1.2)]
    compiled = {row["case"]: b["peak_bytes"] / measure.GIB for row, b in found if b}
    page, readme = "docs/gpu.md", "README.md"
    return [
        (
            readme,
            f"each of {len(known)} training steps took {least} to {most} MiB",
        ),
        (readme, f"{len(quick)} took {quick[0]:.2f} to {quick[-1]:.2f} times the predicted"),
        (readme, f"took {many[0]:.1f} to {many[-1]:.1f} times as long"),
        (page, f"took {least} to {most} MiB more than predicted"),
        (page, f"{len(quick)} of the {len(known)} steps"),
        (page, "of {1} pairs are over 8% apart; {0} of these".format(*order)),
        (page, f"{ms['PyTorch, eager'] / ms['this library']:.2f} times the speed"),
        (page, f"with {gib['this library'] / gib['PyTorch, eager'] - 1:.0%} more memory"),
        (page, f"takes {ms['bfloat16 parameters'] - ms['Adafactor']:.0f} ms more"),
        (page, f"has {theirs / ours:.0%} of the speed of cuDNN's"),
        (page, f"{theirs_far / far:.0%} for 8,192"),
        (page, f"{loss[0] / loss[1]:.2f} times the time of all logits"),
        (page, f"they take {tiles / written_out:.1f} times as long"),
        (page, f"and {far_tiles / far_written_out:.0f} times for 8,192 tokens"),
        (page, f"take another {ms[CHUNKS_128] / loss[0] - 1:.0%} of time"),
        (page, f"time, and {gib[CHUNKS_128]:.2f} GiB"),
        (page, f"needed up to {max(program.values()):.0f} MiB more"),
        (page, f"The rest, {min(rest.values()):.0f} to {max(rest.values()):.0f} MiB"),
        (page, f"It is {rest.pop('no donation'):.0f} for *no donation*"),
        (page, f"at most {max(rest.values()):.0f} for the others"),
        ("05", f"each of {len(known)} measured steps"),
        ("05", f"{times[0]:.2f} to {times[-1]:.2f} times its attainable time"),
        ("05", f"in the median {statistics.median(times):.2f} times"),
        *(
            (
                "15",
                f"({estimate[n]:.2f}, {ms[n]:.2f}, {compiled[n]:.2f}, {gib[n]:.2f})",
            )
            for n in (*LOSSES, CHUNKS_128)
        ),
        (
            "16",
            f'"our kernel": ({ours:.3f}, {ms["flash, our kernel, 2,048, not causal"]:.3f},'
            f" {far:.3f})",
        ),
        (
            "16",
            f'"cuDNN\'s": ({theirs:.3f}, {ms["cudnn, 2,048, not causal"]:.3f},'
            f" {theirs_far:.3f})",
        ),
        ("16", f'"written out": ({written_out:.3f}, None, {far_written_out:.3f})'),
        ("16", f'a scan in JAX": ({tiles:.3f}, None, {far_tiles:.3f})'),
        ("16", f'own": (None, {ms[gpu_cases.MOSAIC + ", 2,048"]:.3f}, None)'),
        ("18", f"{ms['moments on the host']:.1f} ms instead of {ms['64 minibatches']:.1f}"),
        ("18", f"{ms['moments on the host'] - ms['64 minibatches']:.0f} ms longer"),
        ("19", f"takes {ms['bfloat16 parameters'] - ms['Adafactor']:.0f} ms more"),
        ("20", f"{len(known)} steps took {least} to {most} MiB more"),
        *(
            ("19", f"| {name} | {estimate[name]:.1f} | {ms[name]:.1f} | {slower[name]:.2f} |")
            for name in rungs
        ),
    ]


def test_words_about_the_gpu_say_what_was_measured():
    for name, words in measured_words():
        path = ROOT / name
        if not path.exists():
            (path,) = (ROOT / "notebooks").glob(f"{name}_*.ipynb")
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "".join("".join(cell["source"]) + "\n" for cell in cells)
        assert words in " ".join(text.split()), f"{path.name} does not say: {words}"


def test_the_pages_show_the_results_that_are_stored_and_the_words_stay():
    text = (ROOT / gpu_page.PAGE).read_text()
    assert gpu_page.page(text, "h200", ROOT / gpu_page.RESULTS) == text
    assert gpu_page.draw("h200", ROOT / gpu_page.RESULTS).axes
    text = (ROOT / table.PAGE).read_text()
    assert table.page(text, ROOT / table.RESULTS) == text
    one = "Words.\n\n<!-- x -->\nold\n<!-- end -->\n\nMore.\n"
    assert table.fill(one, {"x": "new"}) == one.replace("old", "new")
    with pytest.raises(ValueError, match="one place for each of"):
        table.fill(one, {"y": "new"})


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
    words = ["benchmarks.input", "--steps", "2", "--repeats", "3", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        result = table.run(input.measure)
    stored = json.loads((tmp_path / "input.json").read_text())
    assert json.loads(capsys.readouterr().out) == result == stored
    assert [row["measured"] for row in result["rows"]] == list(input.NAMES.values())
    for row in result["rows"]:
        low, high = row["quartiles"]
        assert 0 < low <= row["tokens/s"] <= high


def test_what_words_say_of_the_step_is_what_was_measured():
    page, training = (
        " ".join((ROOT / name).read_text().split()) for name in (table.PAGE, "docs/training.md")
    )
    stored = json.loads((ROOT / table.RESULTS / "torch_step.json").read_text())
    rows = {row["step"]: row for row in stored["rows"]}
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
    ) in training
    compiled = rows["PyTorch, compiled"]
    assert f"Compiled PyTorch has {compiled[clock]:.2f} times" in training
