"""Studies: tables whose rows take long, so that notebooks read a record of them.

    study = Study("ladder_a5000", ("first writing", "bfloat16"), compile_rung)
    study.table(live=["bfloat16"])    # this row anew where possible, the other recorded

`python tools/record.py NAME` computes all rows and writes the record.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.measure import recorded


@dataclasses.dataclass(frozen=True)
class Study:
    """A recorded table with a row for each case."""

    name: str  # of the table in `measure.recorded`
    cases: Sequence[str]
    row: Callable[[str], dict[str, Any]]  # computes that of a case, with the case under "case"
    accelerator: str = "a5000"

    def table(self, live: Sequence[str] = ()) -> recorded.Table:
        """Returns the rows of all cases: those in `live` computed anew where possible, the
        others recorded.
        """
        if unknown := set(live) - set(self.cases):
            raise ValueError(f"live={sorted(unknown)} must be among {list(self.cases)}")
        return recorded.partly_live(self.name, self.row, live, accelerator=self.accelerator)

    def record(self) -> None:
        """Computes the rows of all cases, prints a line for each, and writes the record."""

        def rows() -> list[dict[str, Any]]:
            found = []
            for case in self.cases:
                start = time.perf_counter()
                found.append(self.row(case))
                print(f"{self.name}, {case}: {time.perf_counter() - start:.0f} s", flush=True)
            return found

        os.environ["COURSE_RECORD"] = "1"
        table = recorded.live_or_recorded(self.name, rows, self.accelerator)
        print(table.note, flush=True)
