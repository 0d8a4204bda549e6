"""Makes a virtual environment with this project and exact versions of its dependencies.

usage: python make_venv.py FOLDER [pinned | py311 | colab | newest | site]

  pinned  requirements/reference.txt, or py311.txt where this is Python 3.11
  py311   requirements/py311.txt, on Python 3.11 alone
  colab   requirements/colab.txt, on Python 3.13 alone
  newest  the newest versions of today within the ranges of pyproject.toml
  site    requirements/site.txt, for `make site`: nothing of the course

Imports the standard library only, and runs on an old Python too, to refuse it with a message.
"""

import os
import subprocess
import sys

# JAX's CUDA plugin looks for cuDNN when JAX starts, and prints a traceback without it, though
# compiling for GPUs that are not there needs none. Python runs this line at every start in the
# environment. On a machine with a GPU (dxg: in Windows' Linux) it changes nothing.
QUIET = (
    'import os; any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))) or '
    'os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")\n'
)

# The Pythons for which requirements/*.txt were resolved.
PYTHONS = {
    "reference": ("3.12", "3.13", "3.14"),
    "py311": ("3.11",),
    "colab": ("3.13",),
    "newest": ("3.12", "3.13", "3.14"),
    "site": ("3.12", "3.13", "3.14"),
}
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main(folder, wanted="pinned"):
    """Makes the environment anew, installs into it, and writes its Python into `.installed`."""
    version = ".".join(map(str, sys.version_info[:2]))
    if wanted == "pinned":
        wanted = "py311" if version == "3.11" else "reference"
    if version not in PYTHONS[wanted]:
        sys.exit(
            f"{sys.executable} is Python {version}, and {' or '.join(PYTHONS[wanted])} is"
            " needed. Name one: make PYTHON=python3.13 ..."
        )
    try:
        import ensurepip  # noqa: F401  (Debian and Ubuntu leave it out of their python3)
        import venv
    except ImportError:
        sys.exit(
            f"{sys.executable} cannot make virtual environments. On Debian and Ubuntu: apt"
            " install python3-venv"
        )

    if wanted == "newest":
        installs = [["--upgrade", "--editable", ROOT + "[notebooks,test,virtual]"]]
    else:
        pins = os.path.join(ROOT, "requirements", wanted + ".txt")
        installs = [["--requirement", pins]]
        installs += [["--no-deps", "--editable", ROOT]] if wanted != "site" else []

    size = "0.3 GB" if wanted == "site" else "about 2 GB"
    print(f"Installing into {folder}: minutes, {size} of disk on Linux ...", flush=True)
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    pip = [os.path.join(folder, "bin", "python"), "-m", "pip", "-qq"]
    pip += ["--disable-pip-version-check", "install"]
    if any(wait_for(pip + install) for install in installs):
        sys.exit("pip could not install the dependencies: its message is above. Try again.")
    keep_quiet(os.path.join(folder, "lib", f"python3.{sys.version_info[1]}", "site-packages"))
    with open(os.path.join(folder, ".installed"), "w") as installed:
        print(sys.version.split()[0], sys.base_prefix, file=installed)


def wait_for(command, seconds=10):
    """Runs a command and returns its exit status. Prints a dot now and then: pip is silent."""
    process, dots = subprocess.Popen(command), ""
    while True:
        try:
            status = process.wait(timeout=seconds)
            print(end="\n" if dots else "", flush=True)
            return status
        except subprocess.TimeoutExpired:
            dots += "."
            print(end=".", flush=True)


def keep_quiet(site_packages):
    """Writes the file that keeps JAX quiet about a missing cuDNN in all scripts."""
    with open(os.path.join(site_packages, "course_quiet.pth"), "w") as file:
        file.write(QUIET)


if __name__ == "__main__":
    main(*sys.argv[1:])
