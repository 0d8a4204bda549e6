"""What must be true of units: a gibibyte is defined once."""

from pathlib import Path

from course_lib import measure
from course_lib.measure import units


def test_a_gibibyte_is_1024_mebibytes_and_measure_counts_in_them():
    assert units.GIB == 1024 * units.MIB == 1024**3
    assert measure.GIB is units.GIB and measure.MIB is units.MIB


def test_no_other_module_spells_a_gibibyte_out():
    package = Path(units.__file__).parents[1]
    assert [path.name for path in package.rglob("*.py") if "2**30" in path.read_text()] == [
        "units.py"
    ]
