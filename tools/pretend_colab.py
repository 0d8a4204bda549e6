"""Makes an environment with Colab's versions and runs a notebook's first cell in it.

usage: python tools/pretend_colab.py FOLDER       (needs Python 3.13)

The cell finds the packages of a CPU runtime and a module `google.colab`, and installs this
checkout in place of the one on GitHub. Afterwards FOLDER is what a learner has after the cell:
Colab's packages, JAX with virtual GPUs, and the library.
"""

import os
import subprocess
import sys

import make_venv

LACKING = ["course_lib", "ml_collections", "jaxtyping", "tensorboard-plugin-profile", "xprof"]
CELL = """
import sys, types
for name in ("google", "google.colab", "google.colab.output"):
    sys.modules[name] = types.ModuleType(name)
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_cell(sys.argv[1]).raise_error()
"""


def main(folder: str) -> int:
    """Makes the environment; returns 0 if virtual GPUs can be had there."""
    import stamp  # needs nbformat, which the environment of the tests has

    make_venv.main(folder, "colab")
    python = os.path.join(os.path.abspath(folder), "bin", "python")
    subprocess.run([python, "-m", "pip", "uninstall", "-qy", *LACKING], check=True)
    repo = stamp.repository()
    _, cell = stamp.notebook_texts("01_mixed_precision.ipynb", repo)
    cell = cell.replace(f"course_lib @ git+https://github.com/{repo}", str(stamp.ROOT))
    done = subprocess.run(
        [python, "-c", CELL, cell], check=True, cwd="/", stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)
    return int("virtual GPUs: yes" not in done.stdout)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
