"""The house is built as docs/design.md says."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "course_lib"
DESIGN = (ROOT / "docs" / "design.md").read_text()
LONGEST_FILE = 300
MODULES = sorted(
    path.stem
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)
FILES = sorted(PACKAGE.rglob("*.py"))


def floors() -> dict[str, int]:
    """Returns each module's floor, from the table in docs/design.md."""
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", DESIGN, re.M)
    return {
        module: int(floor)
        for floor, modules in rows
        for module in re.findall(r"`(\w+)`", modules)
    }


def exceptions() -> set[tuple[str, str]]:
    """Returns the pairs on one floor of which docs/design.md says that one reads the other:
    "`a` reads `b` and `c`".
    """
    found = re.findall(r"`(\w+)` reads ((?:`\w+`(?:, | and )?)+)", DESIGN)
    return {
        (reader, read) for reader, others in found for read in re.findall(r"`(\w+)`", others)
    }


def files_of(module: str) -> list[Path]:
    """Returns the files of a module, which is one file or a folder of them."""
    return sorted((PACKAGE / module).rglob("*.py")) or [PACKAGE / f"{module}.py"]


def imports(module: str) -> set[str]:
    """Returns the modules of course_lib that a module imports, at its top or inside a function."""
    found = set()
    for node in (
        node for file in files_of(module) for node in ast.walk(ast.parse(file.read_text()))
    ):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import hides where it points to"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("course_lib.")}
    return found - {module}


def test_every_module_has_a_floor_and_every_floor_its_modules():
    assert set(floors()) == set(MODULES) - {"__init__"}


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_imports_point_down(module):
    floor = floors()
    for other in imports(module):
        if (module, other) not in exceptions():
            assert floor[other] < floor[module], (
                f"{module} imports {other}: floors {floor[module]}, {floor[other]}"
            )


def test_importing_the_package_imports_no_jax_and_none_of_its_modules_but_the_one_for_flags():
    assert imports("__init__") == {"xla_flags"}
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, course_lib; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert [name for name in imported if name.startswith("course_lib.")] == [
        "course_lib.xla_flags"
    ]
    assert "jax" not in imported and "numpy" not in imported


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_reader_gets_through_the_file(path):
    assert len(path.read_text().splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    public = [
        node
        for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    overrides = {"setup", "__call__"}  # what Flax calls: the class says what it does
    silent = [
        node.name
        for node in public
        if not ast.get_docstring(node) and node.name not in overrides
    ]
    assert ast.get_docstring(tree), "a file opens with what it is"
    assert not silent


@pytest.mark.parametrize("module", [module for module in MODULES if module != "__init__"])
def test_every_module_has_its_tests(module):
    assert (ROOT / "tests" / f"test_{module}.py").exists() or list(
        (ROOT / "tests").glob(f"test_{module}_*.py")
    )
