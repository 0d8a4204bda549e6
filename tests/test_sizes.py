"""Laws of playing with numbers: a notebook at other sizes runs from top to bottom."""

import ast
import functools
import os
import re

import nbformat
import pytest
import stamp
from nbclient import NotebookClient

FOLDER = stamp.ROOT / "notebooks"

# Per notebook two sets of sizes that differ from the stored ones.
OTHER_SIZES = {
    "01_mixed_precision": (
        {"B": 64, "C": 48, "STEPS": 12, "TERMS": 1_000, "GPU_B": 1_024},
        {"D": 8, "METRES": 1.0, "RATE": 0.001, "SCALE": 1_024.0, "GROWTH": 2, "GPU_F": 512},
    ),
    "02_rematerialization": (
        {"TOKENS": 512, "WIDTH": 64, "HIDDEN": 128, "DEPTH": 3, "B": 2, "N": 3},
        {"HIDDEN": 256, "B": 4, "N": 2},
    ),
    "03_gradient_accumulation": (
        dict(B=96, M=3, D=16, F=32, C=10, WIDE_B=1024, WIDE_D=64, WIDE_F=128, MS=(1, 2, 4)),
        dict(B=64, M=8, WIDE_B=512, WIDE_D=32, WIDE_F=256, MS=(1, 2), ACCELERATOR="h100"),
    ),
    "04_buffer_donation": (
        dict(B=8, D=16, F=48, BATCHES=(64, 8), WIDE_D=32, WIDE_F=64),
        dict(B=32, D=64, F=64, BATCHES=(256,), WIDE_D=128, ACCELERATOR="h100"),
    ),
    "05_transformer": [
        {"N": 2, "D": 64, "H": 2, "B": 2, "L": 32, "BYTE_STEPS": 12, "STEPS": 40},
        {
            "N": 1,
            "L": 48,
            "BYTE_STEPS": 30,
            "STEPS": 21,
            "LEARNING_RATE": 1e-3,
            "REAL_V": 32_000,
        },
    ],
    "06_profiling": [
        dict(N=2, B=4, L=64, D=32, STEPS=2),
        dict(N=4, B=2, L=128, STEPS=1, LATE=0.1),
    ],
    "07_collectives": [
        {"n": 4, "K": 512},
        {"n": 6, "K": 1_536},
    ],
    "08_data_parallel": [
        dict(N=2, D=32, V=64, L=16, B=8, WIDE_N=4, WIDE_D=256, WIDE_L=128, DDP_N=2),
    ],
    "09_pipeline_parallel": [
        {"S": 2, "M": 4, "N": 4, "B": 8, "D": 16},
        {"S": 3, "M": 2, "N": 3, "L": 8},
    ],
    "10_tensor_parallel": [
        {"T": 4, "N": 1, "D": 16, "H": 4, "B": 2},
        {"T": 3, "N": 3, "D": 24, "H": 6, "V": 51, "L": 9},
    ],
    "11_async_tensor_parallel": [
        {"T": 4, "L": 32, "D": 8, "F": 16, "WIDE_L": 1024, "WIDE_D": 2048},
        {"T": 5, "L": 20, "D": 6, "F": 40, "WIDE_L": 640, "WIDE_D": 1280},
    ],
    "13_context_parallel": [
        {"T": 4, "N": 1, "D": 16, "H": 2, "L": 32},
        {"T": 3, "L": 48},
    ],
    "14_expert_parallel": [
        {"T": 4, "D": 16, "S": 16},
        {"T": 3, "E": 6, "S": 20, "K": 1},
    ],
    "15_large_vocabulary": [
        {"T": 100, "D": 256, "V": 50_257, "CHUNKS": 16, "TENSOR": 3},
        {"T": 512, "V": 65_536, "CHUNKS": 64, "FEW": 32, "SMALL": 200},
    ],
    "16_flash_attention": [
        {"L": 128, "K": 16, "TILE": 16, "B": 1, "H": 2, "G": 1, "LENGTHS": (128, 256)},
        {"L": 96, "K": 64, "TILE": 32, "H": 6, "G": 3, "LENGTHS": (256, 512)},
    ],
    "17_optimizer_memory": [
        {"ROWS": 64, "WIDTH": 256, "BLOCK": 64, "STEPS": 5},
        {"ROWS": 128, "BLOCK": 8, "UPDATE": -1e-6, "TIMES": 50},
    ],
    "18_offload": [
        {"N": 4, "D": 256, "T": 64},
        {"N": 3, "D": 128, "ACCELERATOR": "h100", "LINK": "pcie5"},
    ],
    "19_smallest_step": [{"N": 4, "D": 256, "T": 64}, {"M": 2, "ACCELERATOR": "h100"}],
    "20_your_own_model": [
        dict(D=32, N=1, L=32, B=4, M=2, STEPS=9, WIDE_V=512, WIDE_D=64, WIDE_L=64, WIDE_N=1),
        dict(H=2, M=8, WIDE_V=4096, WIDE_D=128, WIDE_L=256, WIDE_N=2, ACCELERATOR="a5000"),
    ],
    "23_memory_profiling": [
        dict(N=2, B=4, L=128, D=256, ROWS=65_536),
        dict(N=3, B=3, L=256, D=128, ROWS=98_304),
    ],
}


def at(sizes, code):
    """Returns the cell of sizes with other values."""
    tree = ast.parse(code)
    names = [node.targets[0].id for node in tree.body[:-1]]
    assert set(sizes) <= set(names), f"{set(sizes) - set(names)} are no sizes of this notebook"
    for node in tree.body[:-1]:
        if node.targets[0].id in sizes:
            node.value = ast.Constant(sizes[node.targets[0].id])
    return ast.unparse(tree)


STORED = {path.stem for path in FOLDER.glob("*.ipynb")}
assert set(OTHER_SIZES) == STORED - {
    "12_3d_parallelism",
    "21_a_run_that_survives",
    "22_which_numbers_to_choose",
}

# All of them take many minutes: COURSE_SIZES is the number of sets that run, 2 if not set.
SETS = int(os.environ.get("COURSE_SIZES", "2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, sizes) for name, both in OTHER_SIZES.items() for sizes in both[:SETS]],
    ids=lambda value: value[:2] if isinstance(value, str) else None,
)
def test_a_notebook_at_other_sizes_runs_to_its_end_and_knows_that_they_are_others(
    name, sizes, monkeypatch
):
    monkeypatch.delenv("COURSE_RECORD", raising=False)
    # a notebook sees the devices of a learner, not the eight of these tests
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    cell = next(cell for cell in notebook.cells if "sizes" in cell.metadata.get("tags", ()))
    cell.source = at(sizes, cell.source) + "\nassert not as_stored, 'other sizes are as stored'"
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()


def file_of(module):
    """The file of a module of this repository, or None."""
    path = stamp.ROOT.joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.is_file()), None)


@functools.cache
def nodes_of(module):
    return list(when_imported(ast.parse(file_of(module).read_text())))


def when_imported(node):
    """Yields what importing a module evaluates: no bodies of functions, no `TYPE_CHECKING`."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field != "body" or not isinstance(node, ast.FunctionDef | ast.Lambda):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from when_imported(child)


@functools.cache
def home(package, name):
    """The module that `package.name` loads: some packages load what they are asked for."""
    if file_of(f"{package}.{name}"):
        return f"{package}.{name}"
    for node in nodes_of(package):
        table = isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if table and node.targets[0].id in ("_MODULES", "PICTURES"):
            for module, names in ast.literal_eval(node.value).items():
                if name in (names.split() if isinstance(names, str) else names):
                    return f"{package}.{module}"
    return package


def loaded_by(nodes):
    """The modules of course_lib that code imports, or asks a package for."""
    where, found = {}, set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("course_lib"):
            for one in node.names:
                where[one.asname or one.name] = home(node.module, one.name)
            found |= {node.module, *(home(node.module, one.name) for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.startswith("course_lib")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in where:
            package = where[node.value.id]
            if file_of(package).name == "__init__.py":
                found.add(home(package, node.attr))
    return found


# Lines that a notebook of Part I may load, and any other.
MOST_LINES = {True: 7_000, False: 10_000}


@pytest.mark.parametrize("name", sorted(STORED))
def test_the_imports_of_a_notebook_load_a_part_of_the_library(name):
    cells = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    tree = ast.parse(re.sub(r"^(\s*)[%!]", r"\1pass  # ", code, flags=re.M))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    waiting, loaded = loaded_by(imports), set()
    while waiting:
        module = waiting.pop()
        loaded.add(module)
        parent = {module.rpartition(".")[0]} - {""}
        waiting |= (parent | loaded_by(nodes_of(module))) - loaded
    lines = {module: len(file_of(module).read_text().splitlines()) for module in loaded}
    most = MOST_LINES[name < "07" or name == "23_memory_profiling"]
    assert sum(lines.values()) <= most, sorted(lines.items(), key=lambda each: -each[1])
