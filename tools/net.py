"""Puts faults into a copy of the project, one at a time, and runs the test that must find each.

    python tools/net.py            all of tools/net.toml (about 15 minutes on two cores)
    python tools/net.py ring mfu   those whose names contain one of these words

A fault that no test finds is a hole in the tests. A fault whose text is no longer in its file
has to be written again for the new code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
FAULTS = tomllib.loads((ROOT / "tools" / "net.toml").read_text())
IGNORED = shutil.ignore_patterns(".git", ".venv*", "__pycache__", "runs", "*.ipynb")


def passes(copy: Path, tests: str, programs: Path) -> bool:
    """Whether the tests pass in this copy; stops where they do not run at all."""
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *tests.split()]
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if run.returncode not in (0, 1):  # no test was collected, or the file cannot be read
        raise SystemExit(f"{' '.join(command)}\n{run.stdout[-3000:]}{run.stderr[-1000:]}")
    return run.returncode == 0


def verdict(fault: dict[str, str], copy: Path, programs: Path) -> str:
    """Returns what became of a fault: found, NOT FOUND, or why it could not be tried."""
    path = copy / fault["file"]
    if not path.exists():
        return f"NOT TRIED: there is no {fault['file']}"
    text = path.read_text()
    if text.count(fault["old"]) != 1:
        return f"NOT TRIED: its text is {text.count(fault['old'])} times in {fault['file']}"
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        return "NOT FOUND" if passes(copy, fault["test"], programs) else "found"
    finally:
        path.write_text(text)


def main() -> None:
    """Tries the faults, two at a time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults whose names contain one of these")
    words = parser.parse_args().words
    chosen = {
        name: fault
        for name, fault in FAULTS.items()
        if not words or any(word in name for word in words)
    }
    with tempfile.TemporaryDirectory() as folder:
        copies: Queue[Path] = Queue()
        programs = Path(folder, "programs")
        for number in range(2):
            copies.put(Path(shutil.copytree(ROOT, Path(folder, str(number)), ignore=IGNORED)))

        def tried(name: str) -> bool:
            copy = copies.get()
            result = verdict(chosen[name], copy, programs)
            copies.put(copy)
            print(f"{name}: {result}", flush=True)
            return result == "found"

        def right(tests: str) -> bool:
            copy = copies.get()
            good = passes(copy, tests, programs)
            copies.put(copy)
            if not good:
                print(f"fails without a fault: {tests}", flush=True)
            return good

        with ThreadPoolExecutor(2) as pool:
            good = list(pool.map(right, sorted({fault["test"] for fault in chosen.values()})))
            found = list(pool.map(tried, chosen))
    print(f"{sum(found)} of {len(found)} faults found")
    sys.exit(not (all(good) and all(found)))


if __name__ == "__main__":
    main()
