"""The library is built as docs/design.md says."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import net

from course_lib.program import settings

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "course_lib"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# The parts that each part may import, beside itself: the list of docs/design.md, line by line.
TOOLS = {"measure", "text", "show"}
MODELS = TOOLS | {"one_device", "smaller_and_faster", "models", "optimizers"}
TRAINING = MODELS | {"configs", "training"}
EVERYWHERE = {"fields", "arguments", "extras"}
ALLOWED = {
    "measure": set(),
    "files": set(),
    "text": {"files"},
    "show": {"measure"},
    "one_device": TOOLS | {"xla_flags"},
    "smaller_and_faster": TOOLS,
    "models": TOOLS | {"one_device", "smaller_and_faster"},
    "optimizers": TOOLS | {"one_device", "smaller_and_faster"},
    "configs": MODELS,
    "training": MODELS | {"configs"},
    "many_devices": TRAINING,
    "planner": TRAINING | {"many_devices"},
    "program": TRAINING | {"many_devices", "planner", "files"},
    "train": {"program"},
    "sample": {"program"},
    "evaluate": {"program"},
    "export": {"program"},
    "own_step": TOOLS | {"one_device"},
    "__main__": {"own_step"},
    "lessons": TRAINING | {"many_devices", "planner", "program", "files"},
    "fields": set(),
    "arguments": set(),
    "extras": set(),
    "__init__": {"xla_flags"},
    "xla_flags": set(),
}


def part_of(path):
    """Returns the folder of course_lib that a file is in, or its name if it is in none, or a
    program: `python -m course_lib.measure`.
    """
    parts = path.relative_to(PACKAGE).parts
    return parts["__main__.py" in parts and -1].removesuffix(".py")


def imports(path):
    """Returns the parts of course_lib that a file imports, at its top or inside a function."""
    names = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it points to"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("course_lib.")}


def test_each_part_imports_what_it_may():
    assert {part_of(path) for path in FILES} == set(ALLOWED)
    broken = {
        path: imports(path) - {part_of(path)} - EVERYWHERE - ALLOWED[part_of(path)]
        for path in FILES
    }
    assert {str(path): parts for path, parts in broken.items() if parts} == {}


def test_a_notebook_has_a_module_of_its_name():
    names = {path.stem.split("_", 1)[1] for path in NOTEBOOKS}
    taught = [path for path in FILES if part_of(path) != "lessons"]
    modules = {path.stem for path in taught} | {path.parent.name for path in taught}
    apart = {"memory_profiling", "3d_parallelism", "your_own_model", "a_run_that_survives"}
    assert names - modules == apart | {"which_numbers_to_choose"}


def test_importing_the_package_imports_no_jax_and_none_of_its_modules_but_the_one_for_flags():
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, course_lib; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = [name for name in imported if name.startswith("course_lib.")]
    assert ours == ["course_lib.xla_flags"]
    assert "jax" not in imported and "numpy" not in imported


def test_no_file_has_more_than_400_lines():
    lines = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in FILES}
    assert {name: n for name, n in lines.items() if n > 400} == {}


def definitions():
    """Yields each function and class of course_lib: its dotted name and its node."""

    def inside(node, name):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield f"{name}.{child.name}", child
                yield from inside(child, f"{name}.{child.name}")

    for path, tree in TREES.items():
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield from inside(tree, ".".join(parts).removesuffix(".__init__"))


DEFINED = dict(definitions())


def named(thing, names):
    """Yields where the things of `thing.a.b` are defined, of `thing` too."""
    for name in [None, *names]:
        thing = thing if name is None else getattr(thing, name, None)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            yield f"{thing.__module__}.{thing.__qualname__}"


def in_notebooks(of_sources=False):
    """Returns the definitions that the notebooks' code names, or whose source it shows."""
    found = set()
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        code = re.sub(r"^(\s*)[%!]", r"\1pass  # ", code, flags=re.M)
        nodes, known = list(ast.walk(ast.parse(code))), {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module.startswith("course_lib"):
                exec(ast.unparse(node), known)
        if of_sources:
            shown = [node for node in nodes if isinstance(node, ast.Call)]
            shown = [call for call in shown if ast.unparse(call.func) == "notebook.source"]
            nodes = [argument for call in shown for argument in call.args]
        names = [
            ast.unparse(n).split(".") for n in nodes if isinstance(n, ast.Attribute | ast.Name)
        ]
        for first, *rest in names:
            found |= set(named(known[first], rest)) if first in known else set()
    return found


ENDINGS = {"py", "yml", "txt", "toml", "safetensors"}  # of files
ABSENT = {"your_exercise", "train"}  # a stand-in, and what `modules` leaves out


def on_pages():
    """Returns the definitions that README, CONTRIBUTING and docs name, as in `configs.get`."""
    modules = {}
    for path in FILES:
        if path.stem != "__main__" and path.name != "train.py":
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            name = name.removesuffix(".__init__")
            modules[name.rpartition(".")[2]] = name
    found = set()
    for page in PAGES:
        for words in re.findall(r"`(?:\w+\.)*?(\w+(?:\.\w+)+)[`(]", page.read_text()):
            first, *rest = words.split(".")
            if first in modules and rest[-1] not in ENDINGS:
                module = importlib.import_module(modules[first])
                is_there = hasattr(module, rest[0]) or words in settings.FIELDS
                assert is_there or rest[0] in ABSENT, f"{page.name}: there is no {words}"
                found |= set(named(module, rest))
    return found


def test_what_a_notebook_or_a_page_names_says_what_it_is():
    named = (in_notebooks() | on_pages()) & DEFINED.keys()
    assert len(named) > 200
    assert sorted(name for name in named if not ast.get_docstring(DEFINED[name])) == []


WORDY = 74  # docstrings that are still longer than their function; the number may only shrink


def test_no_docstring_is_longer_than_its_function_unless_a_notebook_shows_it():
    shown, found = in_notebooks(of_sources=True), []
    for name, node in DEFINED.items():
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and name not in shown:
            text = node.body[0]
            if text.end_lineno - text.lineno + 1 > node.end_lineno - text.end_lineno:
                found.append(name)
    assert len(found) <= WORDY, found


# Tests of which no case is quick, and why none is.
ALWAYS_SLOW = {
    "processes are killed, or started by Slurm or Open MPI": """
        test_two_processes_of_which_one_is_killed_and_then_one_is_told_to_end_lose_nothing
        test_a_run_killed_at_random_moments_is_bit_for_bit_one_that_was_never_killed
        test_the_program_under_a_launcher_has_the_losses_of_one_process
        test_if_a_process_is_killed_or_silent_the_other_ends_in_time_and_says_why
        test_it_works_where_jax_was_started_before_the_import
        test_slurm_runs_the_batch_script""",
    "a record or a published number is compiled again; quick tests read the record": """
        test_compiled_memory_is_within_12_percent_of_the_published
        test_a_rung_compiles_to_its_record
        test_a_move_compiles_to_its_recorded_score
        test_the_measured_differences_leave_a_factor_of_two_to_the_tolerance""",
    "options together, each of which has a quick test": """
        test_each_reference_move_passes_at_the_real_length
        test_a_step_that_is_wrong_only_at_the_real_length_is_refused
        test_data_pipeline_and_tensor_update_parameters_as_one_device_does
        test_gradients_of_many_microbatches_in_bfloat16_add_up_as_those_of_one_device_do
        test_a_step_by_hand_draws_its_dropout_as_it_always_has
        test_a_run_with_offload_trains_like_one_without_on_both_ways_to_build_it
        test_the_program_trains_with_offload_and_continues_from_a_checkpoint
        test_codes_scales_and_keys_of_an_optimizer_outlive_a_stop
        test_odd_numbers_of_devices_have_the_same_gradient
        test_a_run_that_goes_on_without_donation_is_the_same_bit_for_bit""",
    "82 published layouts, each beside all that its software offers; quick tests take one": """
        test_nanotrons_winners_contradict_the_formula
        test_elsewhere_most_published_layouts_are_within_the_formulas_error""",
    "another package is installed, with gigabytes of PyTorch": """
        test_transformers_computes_the_same_logits_before_and_after""",
    "whole notebooks or benchmarks run": """
        test_it_trains_by_the_program_and_stores_what_it_prints
        test_a_notebook_at_other_sizes_runs_to_its_end_and_knows_that_they_are_others""",
}


def test_every_law_keeps_a_quick_case(request):
    quick = {}
    for item in request.session.items:
        one = not item.get_closest_marker("slow")
        quick[item.originalname] = quick.get(item.originalname, False) or one
    listed = {name for names in ALWAYS_SLOW.values() for name in names.split()}
    assert {name for name, any_quick in quick.items() if not any_quick} <= listed
    written = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in sorted(listed) if f"def {name}(" not in written] == []


def test_every_fault_of_the_net_can_be_put_into_the_code():
    stale = {name: net.stale(fault) for name, fault in net.FAULTS.items()}
    assert {name: why for name, why in stale.items() if why} == {}
