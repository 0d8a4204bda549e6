"""Laws of the published measurements and their compiled counterparts."""

import json
import pathlib

import jax
import pytest

from course_lib import measure
from course_lib.lessons import case_study
from course_lib.measure import recorded, virtual

PUBLISHED = [case for case in case_study.CASES if case.published_gib]
# a compiler of another year, without the GPU's context and its libraries' workspace
TOLERANCE = 0.12


def _recorded(accelerator):
    return {row["case"]: row for row in case_study.recorded_rows(accelerator)}


def _is_near(row):
    return abs(row["peak_bytes"] / 2**30 / row["published_gib"] - 1) <= TOLERANCE


def test_every_case_is_recorded_for_every_accelerator_and_can_be_configured():
    names = [case.name for case in case_study.CASES]
    for accelerator in case_study.ACCELERATORS:
        rows = _recorded(accelerator)
        assert list(rows) == names
        for case in case_study.CASES:
            published = case.published_gib, case.published_seconds
            row = rows[case.name]
            expected = published if accelerator == "a5000" else (None, None)
            assert (row["published_gib"], row["published_seconds"]) == expected
    for case in case_study.CASES:
        case.config()


def test_each_row_but_the_first_is_one_changed_line_of_another_row():
    for first, *others in (case_study.CASES, case_study.LESSONS):
        names = [first.name]
        for case in others:
            (changed,) = case.change.items()
            before = case_study.BY_NAME[case.on].config()
            assert case.on in names and dict([changed]).items() <= case.changes.items()
            assert case.config() != before
            names.append(case.name)


def test_no_lesson_takes_more_memory_than_the_one_before_and_the_last_is_a_published_row():
    rows = case_study.LESSON_BY_LESSON.table().rows
    peaks = [row["peak_bytes"] for row in rows]
    assert [row["case"] for row in rows] == [case.name for case in case_study.LESSONS]
    assert peaks == sorted(peaks, reverse=True)
    published = _recorded("a5000")["remat MLP+Attn"]["peak_bytes"]
    assert peaks[-1] == pytest.approx(published, rel=1e-4)  # another week's model: 32 kB


def test_recorded_memory_is_within_12_percent_of_the_published():
    rows = _recorded("a5000")
    assert [case.name for case in PUBLISHED if not _is_near(rows[case.name])] == []


def test_no_published_step_is_faster_than_its_floor():
    for row in case_study.recorded_rows("a5000"):
        assert (
            row["published_seconds"] is None or row["floor_seconds"] < row["published_seconds"]
        )


def test_the_largest_arrays_without_remat_are_attention_weights_and_activations_of_the_mlp():
    largest = _recorded("a5000")["bfloat16"]["largest"]
    assert ("float32", [12, 16, 8, 512, 512]) == (largest[0]["dtype"], largest[0]["shape"])
    assert {"bfloat16"} == {
        array["dtype"] for array in largest if array["shape"] == [12, 16, 512, 4096]
    }


def test_flash_attention_takes_less_memory_and_does_the_same_model_flops():
    rows = _recorded("a5000")
    for flash, written_out in [("flash", "bfloat16"), ("flash, remat Block", "remat Block")]:
        assert rows[flash]["peak_bytes"] < rows[written_out]["peak_bytes"]
        assert rows[flash]["model_flops"] == rows[written_out]["model_flops"]


def test_rows_that_are_not_as_the_notebook_describes_them_are_refused():
    rows = _recorded("a5000")
    case_study.check_story(rows)
    other = {"flash": {"peak_bytes": 2**34}, "bfloat16, unrolled": rows["bfloat16"]}
    for name, change in other.items():
        with pytest.raises(AssertionError):
            case_study.check_story(rows | {name: rows[name] | change})


def test_remat_adds_flops_and_takes_none_from_the_model():
    rows = _recorded("a5000")
    assert rows["bfloat16"]["recomputed_flops"] == 0
    assert (
        0 < rows["remat MLP+Attn"]["recomputed_flops"] < rows["remat Block"]["model_flops"] / 3
    )
    assert (
        len({rows[case.name]["model_flops"] for case in PUBLISHED if "256" not in case.name})
        == 1
    )


def test_recording_keeps_the_rows_of_cases_that_this_jax_cannot_compile_and_says_so(
    monkeypatch, tmp_path, capsys
):
    rows = [
        {k: v for k, v in row.items() if k not in ("recorded", "versions")}
        for row in case_study.table("h100").rows
    ]
    by_case = {row["case"]: row for row in rows}
    old = {"recorded": "1999-12-31", "versions": {"jax": "0.10.2"}}
    file = tmp_path / "case_study_h100.json"
    file.write_text(json.dumps(old | {"accelerator": "h100", "rows": rows}))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.setenv("COURSE_RECORD", "")  # `record` sets it, and the test takes it back
    monkeypatch.setattr(virtual, "why_unavailable", lambda name: None)
    monkeypatch.setattr(virtual, "devices", lambda name: [None])
    gone = {"flash": "gone"}
    monkeypatch.setattr(case_study.attention, "stand_in", lambda name, gpu: gone.get(name))

    def compiled(case, device):
        return by_case[case.name] | {"peak_bytes": 1}

    monkeypatch.setattr(case_study, "compile_case", compiled)
    case_study.study("h100").record()
    written = json.loads(file.read_text())
    assert written["versions"]["jax"] == jax.__version__
    assert written["rows"] == [
        old | row if "flash" in row["case"] else row | {"peak_bytes": 1} for row in rows
    ]
    assert (
        "'flash', 'flash, unrolled', 'flash, remat Block' recorded on 1999-12-31 with jax"
        " 0.10.2" in capsys.readouterr().out
    )


TINY = {
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.head_dim": 16,
    "model.remat": ["Block"],  # as it comes back from JSON
    "data.batch_size": 2,
    "data.seq_len": 16,
}


def test_a_step_that_is_run_here_is_compiled_once_and_has_its_time_and_its_peak(monkeypatch):
    """Without a device that counts: a pretended one, whose process runs here, counts a megabyte
    more than planned.
    """
    timed, step_time = [], measure.step_time

    def noted(step, *args, **options):
        timed.append(step)
        return step_time(step, *args, **options)

    def run_here(target, **arguments):
        assert target == "course_lib.lessons.case_study:run_steps"
        arguments = json.loads(json.dumps(arguments))
        case_study.run_steps(**arguments)
        row = json.loads(pathlib.Path(arguments["out"]).read_text())
        return row["compiled_peak_bytes"] + 2**20

    monkeypatch.setattr(measure, "peak_in_own_process", run_here)
    monkeypatch.setattr(measure, "step_time", noted)
    with jax.numpy_dtype_promotion("standard"):  # Optax' Adam promotes on purpose
        row = case_study.measure_here("cpu", TINY, steps=2)
    assert row["not_run"] is None
    assert isinstance(timed[0], jax.stages.Compiled)
    assert row["measured_peak_bytes"] == row["compiled_peak_bytes"] + 2**20
    assert 0 < row["step_seconds"]["low"] <= row["step_seconds"]["median"]
    assert row["tokens_per_second"] == pytest.approx(2 * 16 / row["step_seconds"]["median"])


def test_a_step_that_fails_in_its_process_is_a_row_with_the_reason(monkeypatch):
    def fails(target, **arguments):
        raise RuntimeError(
            "failed in its own process:\nTraceback\nRESOURCE_EXHAUSTED: Out of memory"
        )

    monkeypatch.setattr(measure, "peak_in_own_process", fails)
    reason = "RESOURCE_EXHAUSTED: Out of memory"
    assert case_study.measure_here("cpu", {}) == {"not_run": reason}


@pytest.mark.slow
@pytest.mark.skipif(
    virtual.why_unavailable() is not None, reason=str(virtual.why_unavailable())
)
@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.name)
def test_compiled_memory_is_within_12_percent_of_the_published(case):
    row = case_study.compile_case(case, virtual.devices("a5000")[0])
    assert _is_near(row), row
