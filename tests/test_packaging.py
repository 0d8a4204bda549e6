"""Everything that says which versions, which files and which address agrees with
pyproject.toml.
"""

import functools
import itertools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import make_venv
import nbformat
import PIL.Image
import pin_versions
import pytest
import record
import stamp
import sync_environment
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from course_lib.show import colab, notebook

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, SETUPTOOLS = PYPROJECT["project"], PYPROJECT["tool"]["setuptools"]
EXTRAS = PROJECT["optional-dependencies"]
LIBRARY = sync_environment.needed(*pin_versions.LIBRARY)
SETS = {
    name: sync_environment.pins(ROOT / "requirements" / f"{name}.txt")
    for name in ("reference", "py311", "colab")
}


def test_the_exact_versions_lie_in_the_ranges():
    wanted = sync_environment.needed("notebooks", "test")
    for name, pins in SETS.items():
        for line in wanted + (EXTRAS["virtual"] if name != "colab" else []):
            requirement = Requirement(line)
            (exact,) = pins[canonicalize_name(requirement.name)].specifier
            assert exact.operator == "==" and exact.version in requirement.specifier, line


def test_the_lower_bounds_are_what_colab_ships():
    """Pip leaves Colab's packages alone, and `make test-colab` tests each bound."""
    for bound in map(Requirement, pin_versions.lower_bounds(LIBRARY)):
        (exact,) = SETS["colab"][canonicalize_name(bound.name)].specifier
        assert exact.version in bound.specifier, bound  # ==3.10 holds 3.10.0


def test_colabs_set_is_colabs_own_but_for_what_the_set_up_cell_raises_there():
    shipped = sync_environment.pins(ROOT / "requirements" / "colab-published.txt")
    both = set(shipped) & set(SETS["colab"])
    assert {"jax", "flax", "numpy", "ipython", "ipykernel", "protobuf"} < both
    raised = {name for name in both if shipped[name] != SETS["colab"][name]}
    assert raised == pin_versions.RAISED_ON_COLAB


def test_the_cuda_plugin_is_of_jaxs_version_and_only_where_it_runs():
    linux = {"sys_platform": "linux", "platform_machine": "x86_64"}
    mac = {"sys_platform": "darwin", "platform_machine": "arm64"}
    for pins in (SETS["reference"], SETS["py311"]):
        for wheel in ("jax-cuda13-plugin", "jax-cuda13-pjrt"):
            assert pins[wheel].specifier == pins["jax"].specifier
        for wheel in ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-nvvm"):
            assert pins[wheel].marker.evaluate(linux) and not pins[wheel].marker.evaluate(mac)
        # the compiler alone, not gigabytes of CUDA
        assert not any("cudnn" in pin or "cublas" in pin for pin in pins)


def test_environment_yml_is_in_step():
    found = (ROOT / "environment.yml").read_text()
    assert found == sync_environment.environment(), "run make environment"


def test_colab_gets_what_it_lacks_and_the_library_without_its_dependencies():
    needed = {canonicalize_name(Requirement(r).name) for r in LIBRARY}
    asked = {canonicalize_name(Requirement(r).name) for r in colab.requirements("gpu")}
    shipped = sync_environment.pins(ROOT / "requirements" / "colab-published.txt")
    assert needed - set(shipped) <= asked < needed
    assert "--no-deps" in stamp.SETUP
    assert set(colab.RAISED) == pin_versions.RAISED_ON_COLAB


def test_the_set_up_checks_for_the_oldest_jax_that_is_allowed():
    [jax] = [line for line in map(Requirement, PROJECT["dependencies"]) if line.name == "jax"]
    assert f">={notebook.OLDEST_JAX}" in map(str, jax.specifier)


def test_data_files_travel_with_the_package():
    package, patterns = ROOT / "course_lib", SETUPTOOLS["package-data"]["course_lib"]
    carried = {file for pattern in patterns for file in package.glob(pattern)}
    data = {f for f in package.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")}
    assert data and data <= carried, f"not in the wheel: {sorted(map(str, data - carried))}"


def test_the_readme_links_to_the_projects_own_address():
    readme, address = (ROOT / "README.md").read_text(), r"google\.com/github/([\w.-]+/[\w.-]+)/"
    assert set(re.findall(address, readme)) <= {stamp.repository()}, "run make badges"
    assert "OWNER/REPO" not in readme, "the first page works as it stands"


def test_stamping_twice_is_stamping_once():
    cell = nbformat.v4.new_markdown_cell("# Title\n\nWhat it is.")
    nb = nbformat.v4.new_notebook(cells=[cell])
    stamp.stamp_notebook(nb, "01_x.ipynb", "ada/course")
    first = nbformat.writes(nb)
    stamp.stamp_notebook(nb, "01_x.ipynb", "ada/course")
    assert nbformat.writes(nb) == first
    title, setup = (cell.source for cell in nb.cells[:2])
    assert title.startswith("# Title\n\n[![Open In Colab]") and title.endswith("What it is.")
    assert "git+https://github.com/ada/course" in setup
    stamp.stamp_notebook(nb, "01_x.ipynb", "bob/course")
    assert "ada/course" not in nbformat.writes(nb)


def test_the_readmes_picture_shows_the_recorded_rows():
    with PIL.Image.open(ROOT / "docs" / "case_study.png") as picture:
        digest = record.PICTURES["case_study"].digest()
        assert picture.text["Description"] == digest, "run tools/record.py --draw case_study"


WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
TARGETS = set(
    re.search(r"^\.PHONY: ((?:.|\\\n)*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
)


def commands(event):
    """Returns what the jobs of the workflow run on an event, with the values of their matrix
    filled in.
    """
    lines = []
    for job in WORKFLOW["jobs"].values():
        condition = job.get("if", "true").replace("github.event_name", repr(event))
        if eval(condition.replace("||", "or"), {"true": True}):
            numbers = job.get("strategy", {}).get("matrix", {}).get("number", [""])
            runs = [step["run"] for step in job["steps"] if "run" in step]
            lines += [x.replace("${{ matrix.number }}", n) for x in runs for n in numbers]
    return lines


def test_what_the_workflow_runs_are_targets_of_make_as_they_stand():
    runs = commands("pull_request") + commands("schedule")
    every = {words[1]: words[1:] for words in map(str.split, runs)}
    assert set(every) <= TARGETS and "$" not in str(every)
    ours = ("MAKE", "MFLAGS", "GNUMAKE")
    environ = {name: x for name, x in os.environ.items() if not name.startswith(ours)}
    dry = ["make", "--dry-run", *itertools.chain(*every.values())]
    done = subprocess.run(dry, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [notebook] = [word.removeprefix("NB=") for word in every["nbval"][1:]]
    assert notebook + "*.ipynb" in done.stdout


def test_the_workflow_runs_all_on_pull_requests_and_the_newest_packages_at_night():
    paths = (ROOT / "notebooks").glob("*.ipynb")
    rest = ["make lint", "make unit-all", "make test-py311", "make test-colab"]
    every = [*rest, *(f"make nbval NB={path.name[:2]}" for path in paths)]
    assert sorted(commands("pull_request")) == sorted(every)
    assert commands("schedule") == ["make test-latest"]


def test_a_commit_is_checked_by_the_lint_of_the_workflow():
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in repo["hooks"]] == ["make lint"]
    assert "make lint" in commands("pull_request")


@pytest.fixture
def why_only_facts(monkeypatch):
    """That of the project's own conftest.py, not of the one in tests/."""
    monkeypatch.delenv("COURSE_COMPARE", raising=False)
    monkeypatch.delenv("COURSE_BACKEND", raising=False)
    return runpy.run_path(str(ROOT / "conftest.py"))["why_only_facts"]


def exact_version(name, package):
    (exact,) = SETS[name][package].specifier
    return exact.version


def test_every_output_is_compared_at_the_reference_and_only_facts_elsewhere(
    why_only_facts, monkeypatch
):
    at = {name: functools.partial(exact_version, name) for name in SETS}
    assert why_only_facts(at["reference"]) is None
    for name in ("py311", "colab"):
        assert f"jax {at[name]('jax')}" in why_only_facts(at[name])
    monkeypatch.setenv("COURSE_COMPARE", "facts")
    assert why_only_facts(at["reference"]) == "COURSE_COMPARE=facts"
    monkeypatch.setenv("COURSE_BACKEND", "gpu")
    assert why_only_facts(at["reference"]) == "on a GPU"


def test_an_environment_of_a_python_that_its_versions_are_not_for_is_refused(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    with pytest.raises(SystemExit, match=r"is Python 3\.10, and 3\.1[123].* is needed"):
        make_venv.main(str(tmp_path / "venv"), "reference")
    assert not list(tmp_path.iterdir())
