"""Laws of tables that are computed where that is possible, and read elsewhere."""

import json

import jax
import pytest

from course_lib.measure import recorded, virtual

ROWS = [
    {"case": "donated", "peak": 2**40, "shape": [2, 3]},
    {"case": "kept", "peak": 2.5, "shape": []},
]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.delenv("COURSE_RECORD", raising=False)
    return tmp_path


@pytest.fixture
def here(monkeypatch):
    """Pretends that virtual devices can be had, or that they cannot for a reason."""

    def pretend(reason):
        monkeypatch.setattr(virtual, "why_unavailable", lambda name: reason)

    pretend(None)
    return pretend


@pytest.fixture
def table(folder, here, monkeypatch):
    """A recorded table, on a machine that has no virtual devices from now on."""
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded.live_or_recorded("table", lambda: ROWS)
    monkeypatch.delenv("COURSE_RECORD")
    here("JAX is too old")
    return folder / "table.json"


def never():
    raise AssertionError("there is nothing to compute with")


def test_where_virtual_devices_are_to_be_had_the_rows_are_computed(folder, here):
    table = recorded.live_or_recorded("table", lambda: ROWS)
    assert table.live and table.rows == ROWS
    assert (
        table.note
        == f"computed here for a virtual NVIDIA RTX A5000, with jax {jax.__version__}"
    )
    assert not list(folder.iterdir())


def test_elsewhere_the_same_rows_are_read_and_the_note_says_when_and_why(table):
    read = recorded.live_or_recorded("table", never)
    assert not read.live and read.rows == ROWS
    date = json.loads(table.read_text())["recorded"]
    assert (
        f"recorded on {date} for a virtual NVIDIA RTX A5000 with jax {jax.__version__}, jaxlib "
        in read.note
    )
    assert read.note.endswith(", because here JAX is too old")


def test_the_note_names_all_accelerators_that_the_rows_name(folder, here, monkeypatch):
    monkeypatch.setenv("COURSE_RECORD", "1")
    rows = [{"accelerator": name, "peak": 1} for name in ("h100", "t4", "h100")]
    assert (
        "a virtual NVIDIA H100 SXM, NVIDIA T4, with jax"
        in recorded.live_or_recorded("table", lambda: rows).note
    )
    here("JAX is too old")
    assert (
        "a virtual NVIDIA H100 SXM, NVIDIA T4 with jax"
        in recorded.live_or_recorded("table", never).note
    )


def test_computed_rows_look_as_they_would_when_read(folder, here):
    table = recorded.live_or_recorded("table", lambda: [{"shape": (2, 3)}])
    assert table.rows == [{"shape": [2, 3]}]


def test_recording_equal_rows_again_leaves_the_file_as_it_is(table, here, monkeypatch):
    here(None)
    monkeypatch.setenv("COURSE_RECORD", "1")
    table.write_text(table.read_text().replace('"recorded": "', '"recorded": "1999-'))
    before = table.read_text()
    recorded.live_or_recorded("table", lambda: ROWS)
    assert table.read_text() == before


def test_recording_other_rows_replaces_the_file(table, here, monkeypatch):
    here(None)
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded.live_or_recorded("table", lambda: ROWS[:1])
    assert json.loads(table.read_text())["rows"] == ROWS[:1]


def test_a_table_that_nobody_recorded_is_an_error_that_says_what_to_do(folder, here):
    here("JAX is too old")
    with pytest.raises(FileNotFoundError, match=r"'unknown' .*JAX is too old.*COURSE_RECORD=1"):
        recorded.live_or_recorded("unknown", never)


def test_rows_of_another_accelerator_are_not_shown(table):
    read = recorded.live_or_recorded("table", never, accelerator="h100")
    assert read.rows == [] and not read.live
    assert "not recorded for accelerator='h100' (the record is for" in read.note


def test_rows_of_other_sizes_are_not_shown_and_the_note_says_what_differs(
    folder, here, monkeypatch
):
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded.live_or_recorded("table", lambda: ROWS, sizes={"B": 16, "D": 768})
    here("JAX is too old")
    for sizes in ({"B": 8, "D": 768}, {"D": 768}, None, {"B": 16, "D": 768, "V": 50_257}):
        read = recorded.live_or_recorded("table", never, sizes=sizes)
        assert read.rows == [] and not read.live
    read = recorded.live_or_recorded("table", never, sizes={"B": 8, "D": 768})
    assert read.note.startswith("not recorded for B=8 (the record is for B=16), and not")
    assert "because here JAX is too old" in read.note and "takes about 1 s" in read.note
    assert recorded.live_or_recorded("table", never, sizes={"D": 768, "B": 16}).rows == ROWS


def test_at_other_sizes_a_partly_live_table_shows_only_what_it_computed(table, here):
    assert recorded.partly_live("table", never, live=["kept"], sizes={"B": 8}).rows == []
    here(None)
    mixed = recorded.partly_live("table", compute, live=["kept"], sizes={"B": 8})
    assert mixed.rows == [compute("kept")] and "other rows: not recorded for B=8" in mixed.note


def test_recording_equal_rows_for_other_sizes_replaces_the_file(table, here, monkeypatch):
    here(None)
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded.live_or_recorded("table", lambda: ROWS, sizes={"B": 8})
    assert json.loads(table.read_text())["sizes"] == {"B": 8}


def compute(case):
    return {"case": case, "peak": 1}


def test_of_a_partly_live_table_some_rows_are_computed_and_the_others_read_in_the_records_order(
    table, here
):
    here(None)
    mixed = recorded.partly_live("table", compute, live=["kept"], cases=["donated", "kept"])
    assert mixed.rows == [ROWS[0], {"case": "kept", "peak": 1}] and not mixed.live
    assert (
        "computed here" in mixed.note and ": 'kept'; the other rows: recorded on " in mixed.note
    )
    assert mixed.note.endswith(", because here only some are computed, to save time")


def test_where_nothing_can_be_computed_all_rows_are_read(table):
    read = recorded.partly_live("table", never, live=["kept"])
    assert read.rows == ROWS and "computed here" not in read.note


def test_where_no_row_is_asked_for_anew_the_note_does_not_say_that_one_was_computed(
    table, here
):
    here(None)
    read = recorded.partly_live("table", never, live=[])
    assert (
        read.rows == ROWS
        and "computed" not in read.note
        and read.note.startswith("recorded on ")
    )


def test_a_table_whose_cases_are_all_computed_speaks_of_no_other_rows(table, here):
    here(None)
    cases = ["donated", "kept"]
    read = recorded.partly_live("table", compute, live=cases, cases=cases, sizes={"B": 8})
    assert read.rows == [compute(case) for case in cases] and not read.live
    assert "computed here" in read.note and "other rows" not in read.note


def test_recording_a_partly_live_table_computes_and_writes_all_of_its_rows(
    table, here, monkeypatch
):
    here(None)
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded.partly_live("table", compute, live=["new"], cases=["kept", "new"])
    assert json.loads(table.read_text())["rows"] == [compute("kept"), compute("new")]
    read = recorded.partly_live("table", compute, live=[], cases=["kept", "new"])
    assert read.note.endswith(", because here no new row was requested")


def test_a_table_that_is_recorded_elsewhere_is_not_written(table, here, monkeypatch):
    here(None)
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded.partly_live("table", compute, live=["kept"])
    assert json.loads(table.read_text())["rows"] == ROWS


def test_a_live_case_that_the_table_does_not_have_is_refused(table):
    with pytest.raises(ValueError, match=r"live=\['lost'\] must be among cases=\['kept'\]"):
        recorded.partly_live("table", never, live=["lost"], cases=["kept"])


def recorded_at(file, jax_version):
    """Pretends that a table was recorded in another year, with another JAX."""
    record = json.loads(file.read_text())
    file.write_text(
        json.dumps(record | {"recorded": "1999-12-31", "versions": {"jax": jax_version}})
    )


def test_a_row_that_cannot_be_computed_any_more_stays_with_the_day_and_the_versions_of_its_own(
    table, here, monkeypatch
):
    here(None)
    monkeypatch.setenv("COURSE_RECORD", "1")
    recorded_at(table, "0.10.2")

    def compute():
        return [compute_row("kept"), recorded.older_row("table", "donated")]

    def compute_row(case):
        return {"case": case, "peak": 1}

    older = {"recorded": "1999-12-31", "versions": {"jax": "0.10.2"}} | ROWS[0]
    said = "('donated' recorded on 1999-12-31 with jax 0.10.2)"
    for _ in range(2):  # recorded once more, it is not dated anew
        live = recorded.live_or_recorded("table", compute)
        assert (
            live.rows == json.loads(table.read_text())["rows"] == [compute_row("kept"), older]
        )
        assert not live.live and live.note.endswith(f"with jax {jax.__version__} {said}")
        assert json.loads(table.read_text())["versions"]["jax"] == jax.__version__
    here("JAX is too old")
    assert (
        f" {said}, because here JAX is too old"
        in recorded.live_or_recorded("table", never).note
    )


def test_a_row_that_was_never_recorded_cannot_be_kept(table):
    with pytest.raises(ValueError, match="case='lost' must be in the table 'table'"):
        recorded.older_row("table", "lost")
    with pytest.raises(FileNotFoundError, match="'unknown' .*'lost' cannot be computed"):
        recorded.older_row("unknown", "lost")


@pytest.mark.parametrize("name", ["", "../secret", "A table", "a-b"])
def test_a_name_that_is_no_plain_file_name_is_refused(folder, here, name):
    with pytest.raises(ValueError, match="name="):
        recorded.live_or_recorded(name, never)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, jax.numpy.float32])
def test_a_value_that_json_cannot_hold_is_refused(folder, here, value):
    with pytest.raises(ValueError, match="the rows of the table 'table'"):
        recorded.live_or_recorded("table", lambda: [{"peak": value}])


@pytest.mark.parametrize(
    "file", sorted(recorded.FOLDER.glob("*.json")), ids=lambda file: file.stem
)
def test_each_table_of_the_package_can_be_read(file, here):
    here("this is a test")
    record = json.loads(file.read_text(encoding="utf-8"))
    accelerator, sizes = record["accelerator"], record.get("sizes")
    table = recorded.live_or_recorded(file.stem, never, accelerator, sizes)
    assert table.rows and all(isinstance(row, dict) for row in table.rows)


def test_a_printed_table_is_its_note_in_lines_of_at_most_100_characters():
    table = recorded.Table(
        [], False, "recorded on 2026-11-23 for a virtual NVIDIA H100 SXM, " * 7
    )
    lines = str(table).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 100
    assert " ".join(lines) == table.note.strip()
