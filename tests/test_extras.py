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
IMPORT_ALL = """
import importlib, json, sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

missing, modules = json.loads(sys.argv[1])
sys.meta_path.insert(0, Without())
errors = {}
for name in modules:
    try:
        module, _, attribute = name.partition(":")
        getattr(importlib.import_module(module), attribute or "__name__")
    except ModuleNotFoundError as error:
        errors[name] = str(error)
print(json.dumps(errors))
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


def errors_without(missing, modules):
    """Returns the errors of modules that cannot be imported where packages are missing."""
    task = json.dumps([sorted(missing), modules])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, task], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout)


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
    errors = errors_without(missing, modules)
    core = {name for name in modules if name.split(".")[1] in CORE}
    assert core and not core & set(errors), core & set(errors)
    assert {"course_lib.program.loop", "course_lib.show.figures:lines"} <= set(errors)
    for name, error in errors.items():
        assert 'is not installed: pip install "course-lib[' in error, (name, error)


def test_a_package_of_no_extra_keeps_its_error():
    with pytest.raises(ModuleNotFoundError, match="No module named 'course_lib.nowhere'"):
        with extras.needed("training"):
            import course_lib.nowhere  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r'nowhere is not .*"course-lib\[training\]"'):
        with extras.needed("training"):
            import nowhere  # noqa: F401
