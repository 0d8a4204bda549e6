"""Configures how `pytest --nbval notebooks` runs and compares.

On a CPU with the versions of requirements/reference.txt it compares every stored output except
those of cells tagged nbval-ignore-output. With other versions, on a GPU (COURSE_BACKEND=gpu)
and with COURSE_COMPARE=facts it compares only facts: cells tagged nbval-check-output. The last
lines of a run say which.
"""

import importlib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parent / "requirements" / "reference.txt"
# other versions of these print other digits
PRINTING = ("jax", "jaxlib", "flax", "optax", "numpy")
NBVALS_OWN_TIMEOUT = 2000  # seconds; a dead kernel would also wait that long


def why_only_facts(installed=metadata.version):
    """Returns the reason to compare only facts here, or None to compare everything."""
    if os.environ.get("COURSE_BACKEND", "cpu") == "gpu":
        return "on a GPU"
    if os.environ.get("COURSE_COMPARE") == "facts":
        return "COURSE_COMPARE=facts"
    lines = (
        line.partition(" ;")[0].partition("==") for line in REFERENCE.read_text().splitlines()
    )
    reference = {name: version for name, _, version in lines}
    others = [
        f"{name} {installed(name)}" for name in PRINTING if installed(name) != reference[name]
    ]
    return f"{', '.join(others)} instead of the reference's" if others else None


def compares(config):
    """Returns whether this run compares notebooks."""
    return getattr(config.option, "nbval", False) or getattr(config.option, "nbval_lax", False)


def own_fonts(config):
    """Gives the session's workers and kernels a cache of Matplotlib's fonts of their own.

    A cache that another environment wrote may name other files; then Matplotlib warns under a
    picture.
    """
    folder = tempfile.mkdtemp(prefix="course_fonts_")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["MPLCONFIGDIR"] = folder
    importlib.import_module("matplotlib.font_manager")  # writes it


def pytest_configure(config):
    option = config.option
    if not hasattr(config, "workerinput"):
        own_fonts(config)
    if not compares(config):
        return
    # the kernel of this Python, not one that is installed elsewhere
    option.nbval_current_env = True
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(
        Path(__file__).parent / "nbval_sanitize.cfg"
    )
    if option.nbval_cell_timeout == NBVALS_OWN_TIMEOUT:
        option.nbval_cell_timeout = 1800.0
    option.nbval_kernel_startup_timeout = max(option.nbval_kernel_startup_timeout, 300.0)
    if why_only_facts():
        option.nbval_lax = True  # wins over --nbval
    if (
        os.environ.get("COURSE_BACKEND", "cpu") != "gpu"
        and Path("/proc/driver/nvidia/version").exists()
    ):
        os.environ["JAX_PLATFORMS"] = (
            "cpu"  # this machine has a GPU, but this run does not use it
        )
    if getattr(option, "numprocesses", None) and option.dist in ("no", "load"):
        option.dist = "loadscope"  # a notebook is one kernel, so one worker


def pytest_collection_modifyitems(items):
    for item in items:
        # a cell: seconds that nbval waits for each of its messages, by default five
        if hasattr(item, "output_timeout"):
            item.output_timeout = 60


@pytest.hookimpl(trylast=True)  # after the durations
def pytest_terminal_summary(terminalreporter, config):
    if compares(config):
        reason = why_only_facts()
        which = (
            f"facts alone, {reason}"
            if reason
            else "all that is not a measurement, at the reference"
        )
        terminalreporter.write_line(f"compared with the stored outputs: {which}")
