"""Laws of tables that are computed where that is possible, and read elsewhere."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from course_lib.measure import recorded, virtual

ROWS = [
    {"case": "donated", "peak": 2**40, "shape": [2, 3]},
    {"case": "kept", "peak": 2.5, "shape": []},
]
HERE = f"computed here for a virtual NVIDIA RTX A5000, with jax {jax.__version__}"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)
    monkeypatch.delenv("COURSE_RECORD", raising=False)
    return tmp_path


@pytest.fixture
def here(monkeypatch):
    """Pretends that virtual devices can be had, or that they cannot for a reason."""

    def pretend(reason=None, recording=False):
        monkeypatch.setattr(virtual, "why_unavailable", lambda name: reason)
        monkeypatch.setenv("COURSE_RECORD", str(int(recording)))

    pretend()
    return pretend


@pytest.fixture
def table(folder, here):
    """A recorded table, on a machine that has no virtual devices from now on."""
    here(recording=True)
    recorded.live_or_recorded("table", lambda: ROWS, sizes={"B": 16, "D": 768})
    here("JAX is too old")
    return folder / "table.json"


SIZES = {"D": 768, "B": 16}


def never(*case):
    raise AssertionError("there is nothing to compute with")


def compute(case):
    return {"case": case, "peak": 1}


def test_where_virtual_devices_are_to_be_had_the_rows_are_computed(folder, here):
    table = recorded.live_or_recorded("table", lambda: [{"shape": (2, 3)}])
    assert table.live and table.rows == [{"shape": [2, 3]}]  # as they would be read
    assert table.note == HERE and not list(folder.iterdir())


def test_elsewhere_the_same_rows_are_read_and_the_note_says_when_and_why(table):
    read = recorded.live_or_recorded("table", never, sizes=SIZES)
    assert not read.live and read.rows == ROWS
    date = json.loads(table.read_text())["recorded"]
    when = f"recorded on {date} for a virtual NVIDIA RTX A5000 with jax {jax.__version__}, "
    assert read.note.startswith(when) and read.note.endswith(", because here JAX is too old")
    some = recorded.partly_live("table", never, live=["kept"], sizes=SIZES)
    assert some.rows == ROWS and "computed here" not in some.note


def test_the_note_names_all_accelerators_that_the_rows_name(folder, here):
    rows = [{"accelerator": name, "peak": 1} for name in ("h100", "t4", "h100")]
    here(recording=True)
    live = recorded.live_or_recorded("table", lambda: rows)
    here("JAX is too old")
    for found in (live, recorded.live_or_recorded("table", never)):
        assert "a virtual NVIDIA H100 SXM, NVIDIA T4" in found.note


def test_recording_rewrites_a_file_only_for_other_rows_or_other_sizes(table, here):
    here(recording=True)
    table.write_text(table.read_text().replace('"recorded": "', '"recorded": "1999-'))
    before = table.read_text()
    recorded.live_or_recorded("table", lambda: ROWS, sizes=SIZES)
    assert table.read_text() == before
    recorded.live_or_recorded("table", lambda: ROWS[:1], sizes=SIZES)
    assert json.loads(table.read_text())["rows"] == ROWS[:1]
    recorded.live_or_recorded("table", lambda: ROWS[:1], sizes={"B": 8})
    assert json.loads(table.read_text())["sizes"] == {"B": 8}


def test_rows_of_another_accelerator_or_of_other_sizes_are_not_shown(table):
    for accelerator, sizes, differs in (
        ("h100", SIZES, "accelerator='h100' (the record is for accelerator='a5000')"),
        ("a5000", {"B": 8, "D": 768}, "B=8 (the record is for B=16)"),
        ("a5000", None, "D=None"),
        ("a5000", SIZES | {"V": 50_257}, "V=50257 (the record is for V=None)"),
    ):
        read = recorded.live_or_recorded("table", never, accelerator, sizes)
        assert (
            read.rows == [] and not read.live and differs in read.note.replace("B=None, ", "")
        )
    assert "because here JAX is too old" in read.note and "takes about 1 s" in read.note


def step_of(optimizer=None, dtype=jnp.float32, activation=jnp.tanh, **options):
    """Traces a step of two layers."""
    optimizer = optimizer or optax.adam(1e-3)

    def loss(params, x):
        params = jax.tree.map(lambda w: w.astype(dtype), params)
        return (activation(x.astype(dtype) @ params[0]) @ params[1]).astype(jnp.float32).mean()

    def step(params, state, x):
        loss_now, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss_now

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    state = jax.eval_shape(optimizer.init, params)
    with jax.numpy_dtype_promotion("standard"):  # Optax adds integers to floats
        return jax.jit(step, **options).trace(params, state, x)


CHANGES = {
    "another optimizer": {"optimizer": optax.sgd(1e-3)},
    "another optimizer with the same state": {"optimizer": optax.adamw(1e-3)},
    "another policy": {"dtype": jnp.bfloat16},
    "another activation": {"activation": jax.nn.relu},
    "donation": {"donate_argnums": (0, 1)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_is_of_one_step_and_is_refused_for_a_changed_one(folder, here, name):
    def asked(step):
        sizes = {"B": 16, "step": recorded.fingerprint(step)}
        return recorded.live_or_recorded("own", lambda: ROWS, sizes=sizes)

    here(recording=True)
    asked(step_of())
    here("JAX is too old")
    assert asked(step_of(optax.adam(1e-2))).rows == ROWS  # another rate is no other program
    refused = asked(step_of(**CHANGES[name]))
    assert refused.rows == [] and refused.note.startswith("not recorded for step='")


def test_of_a_partly_live_table_some_rows_are_computed_and_the_others_read(table, here):
    here()
    cases = ["donated", "kept"]
    mixed = recorded.partly_live("table", compute, ["kept"], cases=cases, sizes=SIZES)
    assert mixed.rows == [ROWS[0], compute("kept")] and not mixed.live
    assert mixed.note.startswith(f"{HERE}: 'kept'; the other rows: recorded on ")
    assert mixed.note.endswith(", because here only some are computed, to save time")
    other = recorded.partly_live("table", compute, live=["kept"], sizes={"B": 8})
    assert other.rows == [compute("kept")] and "other rows: not recorded for" in other.note
    none = recorded.partly_live("table", never, live=[], sizes=SIZES)
    assert none.rows == ROWS and none.note.startswith("recorded on ")
    every = recorded.partly_live("table", compute, live=cases, cases=cases, sizes={"B": 8})
    assert every.rows == [compute(case) for case in cases] and every.note == HERE
    with pytest.raises(ValueError, match=r"live=\['lost'\] must be among cases=\['kept'\]"):
        recorded.partly_live("table", never, live=["lost"], cases=["kept"])


def test_recording_a_partly_live_table_writes_all_its_rows_if_it_knows_them(table, here):
    here(recording=True)
    recorded.partly_live("table", compute, live=["kept"], sizes=SIZES)  # recorded elsewhere
    assert json.loads(table.read_text())["rows"] == ROWS
    recorded.partly_live("table", compute, live=["new"], cases=["kept", "new"])
    assert json.loads(table.read_text())["rows"] == [compute("kept"), compute("new")]
    read = recorded.partly_live("table", compute, live=[], cases=["kept", "new"])
    assert read.note.endswith(", because here no new row was requested")


def test_a_row_that_cannot_be_computed_any_more_keeps_its_day_and_its_versions(table, here):
    here(recording=True)
    year = {"recorded": "1999-12-31", "versions": {"jax": "0.10.2"}}
    table.write_text(json.dumps(json.loads(table.read_text()) | year))

    def rows():
        return [compute("kept"), recorded.older_row("table", "donated")]

    said = "('donated' recorded on 1999-12-31 with jax 0.10.2)"
    for _ in range(2):  # recorded once more, it is not dated anew
        live = recorded.live_or_recorded("table", rows)
        stored = json.loads(table.read_text())
        assert live.rows == stored["rows"] == [compute("kept"), year | ROWS[0]]
        assert not live.live and live.note == f"{HERE} {said}"
        assert stored["versions"]["jax"] == jax.__version__
    here("JAX is too old")
    assert f" {said}, because here" in recorded.live_or_recorded("table", never).note


def test_what_was_never_recorded_is_an_error_that_says_what_to_do(table):
    with pytest.raises(FileNotFoundError, match=r"'unknown' .*JAX is too old.*COURSE_RECORD=1"):
        recorded.live_or_recorded("unknown", never)
    with pytest.raises(ValueError, match="case='lost' must be in the table 'table'"):
        recorded.older_row("table", "lost")
    with pytest.raises(FileNotFoundError, match="'unknown' .*'lost' cannot be computed"):
        recorded.older_row("unknown", "lost")


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_a_value_that_json_cannot_hold_is_refused(folder, here, value):
    with pytest.raises((ValueError, TypeError), match="JSON"):
        recorded.live_or_recorded("table", lambda: [{"peak": value}])


def test_each_table_of_the_package_can_be_read(here):
    here("this is a test")
    for file in sorted(recorded.FOLDER.glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        accelerator, sizes = record["accelerator"], record.get("sizes")
        table = recorded.live_or_recorded(file.stem, never, accelerator, sizes)
        assert table.rows and all(isinstance(row, dict) for row in table.rows), file


def test_a_printed_table_is_its_note_in_lines_of_at_most_100_characters():
    note = " ".join(["recorded on 2026-11-23 for a virtual NVIDIA H100 SXM,"] * 7)
    lines = str(recorded.Table([], False, note)).splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 100 and " ".join(lines) == note
