"""Puts faults into copies of the project, one at a time, and asks the tests to find each.

    python tools/net.py            all of tools/net.toml (under 20 minutes on two idle cores)
    python tools/net.py ring mfu   those whose names contain one of these words

NOT FOUND: the tests have a hole. NOT TRIED: the fault has to be written anew for today's code.
"""

import argparse
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = tomllib.loads((ROOT / "tools" / "net.toml").read_text())
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "*.ipynb")
PYTEST = "-m pytest -q --tb=short -n 0 -p no:nbval".split()
FOUND = "found by"


def stale(fault: dict[str, str]) -> str:
    """Returns why a fault cannot be put into today's code, "" if it can."""
    files = [test.partition("::")[0] for test in fault["test"].split()]
    if gone := [file for file in (fault["file"], *files) if not (ROOT / file).exists()]:
        return f"there is no {gone[0]}"
    count = (ROOT / fault["file"]).read_text().count(fault["old"])
    return "" if count == 1 else f"its text is {count} times in {fault['file']}"


def tests_of(fault: dict[str, str]) -> list[str]:
    """Returns the tests to run; a whole file if it has no test of that name any more."""
    found = []
    for test in fault["test"].split():
        file, _, name = test.partition("::")
        here = f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
        found.append(test if here else file)
    return found


def pytest(copy: Path, *args: str) -> tuple[int, str]:
    """Runs tests in a copy; returns pytest's exit code and the last line that says why."""
    command = [sys.executable, *PYTEST, *args]
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "COLUMNS": "300",  # of pytest's line about a failure
        "JAX_COMPILATION_CACHE_DIR": str(copy.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        run = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return -1, "it takes longer than 15 minutes"
    lines = run.stdout.splitlines() + run.stderr.splitlines()
    told = [line for line in lines if line.startswith(("FAILED ", "ERROR "))] or lines
    return run.returncode, told[-1] if told else ""


def outcome(fault: dict[str, str], copy: Path) -> str:
    """Puts a fault into a copy for as long as its tests run, and returns what became of it."""
    path = copy / fault["file"]
    text = path.read_text()
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        code, why = pytest(copy, "-x", *tests_of(fault))
    finally:
        path.write_text(text)
    said = {0: "NOT FOUND", 1: f"{FOUND} {why.removeprefix('FAILED ')}"}
    return said.get(code, f"NOT TRIED: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    words = parser.parse_args().words
    asked = {n: f for n, f in FAULTS.items() if not words or any(w in n for w in words)}
    if not asked:
        parser.error(f"no fault's name contains {' or '.join(words)}")
    why_not = {name: stale(fault) for name, fault in asked.items()}
    for name, why in filter(lambda each: each[1], why_not.items()):
        print(f"{name}: NOT TRIED: {why}", flush=True)
    chosen = {name: fault for name, fault in asked.items() if not why_not[name]}
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in "12":
            copies.put(Path(shutil.copytree(ROOT, Path(folder, number), ignore=NOT_COPIED)))

        @contextlib.contextmanager
        def a_copy() -> Iterator[Path]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def is_found(name: str) -> bool:
            with a_copy() as copy:
                said = outcome(chosen[name], copy)
            print(f"{name}: {said[:200]}", flush=True)
            return said.startswith(FOUND)

        def pass_without(tests: list[str]) -> bool:
            with a_copy() as copy:
                code, why = pytest(copy, *tests)
            if code:
                print(f"without a fault: {why}", flush=True)
            return code == 0

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(is_found, chosen))
            # The same tests without a fault, in two processes.
            every = sorted({t for fault in chosen.values() for t in tests_of(fault)})
            good = list(pool.map(pass_without, filter(None, (every[::2], every[1::2]))))
    print(f"{sum(found)} of {len(asked)} faults found")
    sys.exit(not all(good) or sum(found) < len(asked))


if __name__ == "__main__":
    main()
