"""The library is built as docs/design.md says."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "course_lib"
DESIGN = (ROOT / "docs" / "design.md").read_text()
FILES = sorted(PACKAGE.rglob("*.py"))
PARTS = sorted(
    path.stem
    for path in PACKAGE.iterdir()
    if path.suffix == ".py" or (path / "__init__.py").exists()
)

# The list of imports in docs/design.md, line by line, with what each line allows.
TOOLS = {"measure", "text", "show"}
MODELS = TOOLS | {"one_device", "smaller_and_faster", "models", "optimizers"}
TRAINING = MODELS | {"configs", "training"}
MAY_IMPORT = {
    "1. `measure`, `text`, `show`: they import nothing of models": {
        "measure": set(),
        "files": set(),
        "text": {"files"},
        "show": {"measure"},
    },
    "2. `one_device`, `smaller_and_faster`": {
        "one_device": TOOLS,
        "smaller_and_faster": TOOLS,
    },
    "3. `models`, `optimizers`": {
        "models": TOOLS | {"one_device", "smaller_and_faster"},
        "optimizers": TOOLS | {"one_device", "smaller_and_faster"},
    },
    "4. `configs`, `training`": {
        "configs": MODELS,
        "training": MODELS | {"configs"},
    },
    "5. `many_devices`": {"many_devices": TRAINING},
    "6. `program`": {
        "program": TRAINING | {"many_devices", "files"},
        "train": {"program"},
    },
    "7. `lessons`: no other part imports it": {
        "lessons": TRAINING | {"many_devices", "program", "files"}
    },
}
ALLOWED = {part: others for clause in MAY_IMPORT.values() for part, others in clause.items()}
ALLOWED |= {"__init__": {"xla_flags"}, "xla_flags": set()}
ALLOWED["one_device"] = ALLOWED["one_device"] | {"xla_flags"}


def imports(path: Path) -> set[str]:
    """Returns the parts of course_lib that a file imports, at its top or inside a function."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points to"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("course_lib.")}
    return parts


def part_of(path: Path) -> str:
    """Returns the folder of course_lib that a file is in, or its name if it is in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_list_of_imports_stands_in_the_design_and_names_every_part():
    text = " ".join(DESIGN.split())
    assert [clause for clause in MAY_IMPORT if clause not in text] == []
    assert set(ALLOWED) == set(PARTS)
    assert "`train` imports only `program`" in text and "`xla_flags` import no other" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_what_its_part_may_import(path):
    part = part_of(path)
    assert imports(path) - {part} <= ALLOWED[part]


def test_the_tree_of_the_design_is_the_tree_of_the_library():
    tree = (
        DESIGN[DESIGN.index("    course_lib/\n") :].split("\n\n")[0].split("    notebooks/")[0]
    )
    shown, folder = set(), "course_lib"
    for line in tree.splitlines():
        if line_of_folder := re.match(r" +(\w+)/", line):
            folder = line_of_folder[1]
        elif re.match(r" {6}\w", line):
            folder = "course_lib"
        shown |= {(folder, stem) for stem in re.findall(r"\b(\w+)\.py\b", line)}
    packages = {"hardware", "figures", "check", "game"}  # shown as folders, without their files
    files = {(path.parent.name, path.stem) for path in FILES if path.stem != "__init__"}
    assert shown == {(folder, stem) for folder, stem in files if folder not in packages}
    folders = {path.parent.name for path in FILES}
    assert folders <= set(re.findall(r"(\w+)/", tree))


def test_the_design_and_each_module_are_read_in_one_sitting():
    assert len(DESIGN.splitlines()) <= 250
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert {path.name: count for path, count in lines.items() if count > 500} == {}
    assert sorted(lines.values())[len(lines) // 2] < 300


def test_a_notebook_has_a_module_of_its_name():
    names = [path.stem.split("_", 1)[1] for path in (ROOT / "notebooks").glob("*.ipynb")]
    taught = [path for path in FILES if part_of(path) != "lessons"]
    modules = {path.stem for path in taught} | {path.parent.name for path in taught}
    assert set(names) - modules == {"3d_parallelism", "train_for_real"}  # strategies, program


def test_importing_the_package_imports_no_jax_and_none_of_its_modules_but_the_one_for_flags():
    assert imports(PACKAGE / "__init__.py") == {"xla_flags"}
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
def test_everything_public_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    public = [
        node
        for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    overrides = {"setup", "__call__"}  # Flax calls these: the docstring is the class's
    silent = [
        node.name
        for node in public
        if not ast.get_docstring(node) and node.name not in overrides
    ]
    assert ast.get_docstring(tree), "a file opens with a docstring"
    assert not silent


# A package has one file of tests, and so has a module together with one that serves it alone.
PIPELINE = "many_devices/pipeline_parallel/"
TESTED_WITH = {
    "measure/units.py": "measure/test_memory.py",
    "measure/hardware/": "measure/test_hardware.py",
    "show/figures/": "show/test_figures.py",
    "lessons/check/": "lessons/test_check.py",
    "lessons/game/": "lessons/test_game.py",
    "measure/heap.py": "measure/test_memory.py",
    "planner/": "planner/test_price.py",
    "many_devices/options.py": "many_devices/test_strategies.py",
    "many_devices/sharding.py": "many_devices/test_strategies.py",
    PIPELINE + "stage.py": PIPELINE + "test_pipeline.py",
    "train.py": "program/test_command.py",
}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.name != "__init__.py"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_every_module_has_its_tests_in_the_same_folder(path):
    name = path.relative_to(PACKAGE).as_posix()
    beside = str(Path(name).with_name(f"test_{path.name}"))
    wanted = next(
        (test for start, test in TESTED_WITH.items() if name.startswith(start)), beside
    )
    assert (ROOT / "tests" / wanted).exists()
