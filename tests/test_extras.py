"""`pip install course-lib` brings few packages, and each technique works with them. A module
that needs another package names its extra.
"""

import importlib.metadata
import json
import pkgutil
import subprocess
import sys

import pytest
import sync_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import course_lib
from course_lib import extras
from course_lib.show import figures

CORE = (
    "configs extras fields files optimizers training measure models one_device many_devices"
    " smaller_and_faster planner own_step"
).split()
WITHOUT = """
import importlib, json, runpy, sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing, modules = json.loads(sys.argv[1])
sys.meta_path.insert(0, Without())
"""
IMPORT_ALL = """
errors = {}
for name in modules:
    try:
        module, _, attribute = name.partition(":")
        getattr(importlib.import_module(module), attribute or "__name__")
    except ModuleNotFoundError as error:
        errors[name] = str(error)
print(json.dumps(errors))
"""
RUN_ALL = """
for words in modules:
    sys.argv = words.split()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
"""


def packages(requirements):
    """Returns the names of all packages that requirements bring, as they are installed here."""
    found, waiting = set(), [Requirement(line) for line in requirements]
    while waiting:
        wanted = waiting.pop()
        if (name := canonicalize_name(wanted.name)) not in found:
            found.add(name)
            for inner in map(Requirement, importlib.metadata.requires(name) or []):
                marker, extras = inner.marker, wanted.extras or {""}
                if not marker or any(marker.evaluate({"extra": one}) for one in extras):
                    waiting.append(inner)
    return found


def without(missing, program, modules):
    """Runs a program on modules where packages are missing."""
    command = [sys.executable, "-c", WITHOUT + program, json.dumps([sorted(missing), modules])]
    return subprocess.run(command, check=True, capture_output=True, text=True)


def test_the_package_alone_brings_at_most_45_packages():
    assert len(packages(sync_environment.needed())) <= 45


def test_each_technique_loads_without_an_extra_and_the_rest_names_its_extra():
    everything = packages(sync_environment.needed("notebooks"))
    missing = {"IPython", "xprof"} | {
        name.replace("-", "_") for name in everything - packages(sync_environment.needed())
    }
    modules = [
        module.name
        for module in pkgutil.walk_packages(course_lib.__path__, "course_lib.")
        # pictures are loaded by their names
        if not module.name.endswith("__main__") and ".figures." not in module.name
    ] + [f"course_lib.show.figures:{name}" for name in figures.PICTURES["curves"].split()]
    errors = json.loads(without(missing, IMPORT_ALL, modules).stdout)
    core = {name for name in modules if name.split(".")[1] in CORE}
    assert core and not core & set(errors), core & set(errors)
    assert {"course_lib.program.loop", "course_lib.show.figures:lines"} <= set(errors)
    for name, error in errors.items():
        assert 'is not installed: pip install "course-lib[' in error, (name, error)


def test_a_command_without_its_extra_says_so_in_one_sentence_and_ends_with_2():
    commands = ["train --preset cpu", "sample RUN", "evaluate RUN", "export RUN FOLDER"]
    commands = [f"course_lib.{command}" for command in commands]
    error = 'error: tokenizers is not installed: pip install "course-lib[training]"'
    done = without(["tokenizers"], RUN_ALL, commands)
    assert done.stderr.splitlines() == 4 * [error, "2"] and done.stdout == ""


def test_a_package_of_no_extra_keeps_its_error():
    with pytest.raises(ModuleNotFoundError, match="No module named 'course_lib.nowhere'"):
        with extras.needed("training"):
            import course_lib.nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r'nowhere is not .*"course-lib\[training\]"'):
        with extras.needed("training"):
            import nowhere  # noqa: F401
