"""How `pytest --nbval notebooks` runs and compares.

On a CPU with the pinned versions every stored output is compared, but for cells tagged
nbval-ignore-output. Elsewhere only the facts, cells tagged nbval-check-output: on a GPU
(COURSE_BACKEND=gpu), and with other versions (COURSE_COMPARE=facts).
"""

import os
from pathlib import Path

NBVALS_OWN_TIMEOUT = 2000  # seconds; also what a kernel that died would wait


def pytest_configure(config):
    option = config.option
    if not (getattr(option, "nbval", False) or getattr(option, "nbval_lax", False)):
        return
    # the kernel of this Python, whatever kernels are installed elsewhere
    option.nbval_current_env = True
    option.nbval_sanitize_with = option.nbval_sanitize_with or str(
        Path(__file__).parent / "nbval_sanitize.cfg"
    )
    if option.nbval_cell_timeout == NBVALS_OWN_TIMEOUT:
        option.nbval_cell_timeout = 1800.0
    option.nbval_kernel_startup_timeout = max(option.nbval_kernel_startup_timeout, 300.0)
    on_gpu = os.environ.get("COURSE_BACKEND", "cpu") == "gpu"
    if on_gpu or os.environ.get("COURSE_COMPARE") == "facts":
        option.nbval_lax = True  # wins over --nbval
    if not on_gpu and Path("/proc/driver/nvidia/version").exists():
        os.environ["JAX_PLATFORMS"] = "cpu"  # there is a GPU, but it was not asked for
    if getattr(option, "numprocesses", None) and option.dist in ("no", "load"):
        option.dist = "loadscope"  # a notebook is one kernel, so one worker


def pytest_collection_modifyitems(items):
    for item in items:
        # a cell: seconds that nbval waits for each of its messages, by default five
        if hasattr(item, "output_timeout"):
            item.output_timeout = 60
