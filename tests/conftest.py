"""Configures the unit tests: types and shapes are checked, implicit promotion is refused, and
warnings are errors (pyproject.toml).

Only the tests are this strict. A learner's session has JAX's defaults.
"""

import os
import shutil
import sys
import tempfile

# The tests run on the CPU, or with COURSE_BACKEND=gpu on a GPU (`make gpu`). JAX reads its
# platforms when it first looks for devices, so set them before anything imports it. Virtual
# devices do not depend on them.
if os.environ.get("COURSE_BACKEND", "cpu") == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"

# One cache of compiled programs for a session: its workers and the processes that tests start
# inherit these variables. Names belong to the key, or an instrument would read those of another
# program.
OWN_CACHE = None
if os.environ.get("COURSE_BACKEND", "cpu") == "cpu":
    os.environ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"] = "1"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        OWN_CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="course_")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Where it is installed, jsonschema has it compile grammars of web addresses, which no notebook
# needs: nbformat would be imported in 1.5 s instead of 0.2.
sys.modules.setdefault("rfc3987_syntax", None)

import checked_types
import jaxtyping

# Checks the jaxtyping annotations of course_lib on every call. Must come before the first
# import of course_lib.
checked_types.install()
jaxtyping.install_import_hook("course_lib", "beartype.beartype")

from course_lib import xla_flags

xla_flags.name_kernels()  # some tests record profiles

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# The tests of course_lib.many_devices need eight devices: the CPU shows as eight, unless there
# are eight GPUs. Other tests use the first. JAX reads this when it starts.
jax.config.update("jax_num_cpu_devices", 8)

# A GPU multiplies float32 numbers as TensorFloat-32, with three digits, unless told otherwise.
# Tests compare with float32's seven.
if jax.config.jax_platforms != "cpu":
    jax.config.update("jax_default_matmul_precision", "highest")

# Tests compare the numbers, memory and traffic of many small programs, never their times: the
# optimization of the CPU's machine code is left out. Processes that tests start have it.
jax.config.update("jax_disable_most_optimizations", jax.config.jax_platforms == "cpu")

# Source lines belong to the key, too, those of the test among them: without them, tests share
# the programs that are equal.
SOURCE_LINES = jax.config.jax_traceback_in_locations_limit
jax.config.update("jax_traceback_in_locations_limit", 0)


def files(names):
    return {f"test_{name}" for name in names.split()}


# bfloat16 + float32 is an error here, not a silent float32. Flax's LayerNorm
# (promote_types(float16, float32)) and Optax's Adam (a float to the power of an int32 step)
# promote on purpose, and JAX cannot allow it for them alone. Tests that call them have JAX's
# default.
CALLS_FLAX_OR_OPTAX = files(
    """
    gradient_accumulation faults losses case_study checkpoints processes buffer_donation
    dry_run routing mlp observe context_parallel data_parallel layouts course frozen
    expert_parallel strategies tensor_parallel virtual_gpus stored_runs loop training
    transformer own_model own_models virtual ladder
    """
)
# Code that a learner types runs with JAX's defaults.
A_LEARNERS_CODE = files(
    """
    solutions tables learners_answers learners_answers_one_device game tiny_transformer
    three_axes by_processes own_step own_step_command
    """
)

# A program out of the cache has no plan of its memory, and other tests' programs have no source
# lines; these tests read them (measure.heap).
READS_PLANS = files(
    """
    memory tape profiling smallest_step offload figures own_step own_step_command
    """
)

# Files that take long. One process runs a whole file, so these start first: started last, they
# would keep one process busy while the others idle.
LONG = files(
    """
    sizes game case_study virtual processes course pipeline strategies tables faults
    command stored_runs loop loop_goes_on hub virtual_gpus solutions layouts training
    """
)


def pytest_configure(config):
    if OWN_CACHE:
        config.add_cleanup(lambda: shutil.rmtree(OWN_CACHE, ignore_errors=True))
    config.addinivalue_line(
        "markers", "slow: runs with COURSE_SLOW=1 only; docs/versions.md says why"
    )


def pytest_runtest_setup(item):
    """Skips slow tests unless COURSE_SLOW=1; skipped here, they are one line of the summary."""
    if item.get_closest_marker("slow") and os.environ.get("COURSE_SLOW") != "1":
        pytest.skip("slow: `make test-all`, or COURSE_SLOW=1, runs it")


def pytest_terminal_summary(terminalreporter, config):
    """Says how many cases were left out; `make test` says it again at its end."""
    skipped = terminalreporter.stats.get("skipped", ())
    left_out = sum("slow: " in str(report.longrepr) for report in skipped)
    config.cache.set("course/left_out", left_out)
    if left_out:
        terminalreporter.write_line(f"{left_out} slow cases were left out: make test-all")


def pytest_collection_modifyitems(items):
    """Puts the long files first; `--no-loadscope-reorder` (Makefile) keeps them there."""
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(scope="module", autouse=True)
def promotion(request):
    """Refuses implicit promotion of dtypes, and of ranks, as in (B, 1) + (B,) = (B, B)."""
    name = request.module.__name__.rpartition(".")[2]
    dtypes = "standard" if name in CALLS_FLAX_OR_OPTAX | A_LEARNERS_CODE else "strict"
    ranks = "allow" if name in A_LEARNERS_CODE else "raise"
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion(ranks):
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled_anew(request):
    """Compiles every program of a file that reads plans of memory, with its source lines."""
    if request.module.__name__.rpartition(".")[2] not in READS_PLANS:
        yield
        return
    before = jax.config.jax_enable_compilation_cache
    use_cache(False)
    jax.config.update("jax_traceback_in_locations_limit", SOURCE_LINES)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)
    use_cache(before)


@pytest.fixture(scope="module", autouse=True)
def memory_given_back():
    """Forgets a file's programs at its end: the next file has no use for them."""
    yield
    jax.clear_caches()


def use_cache(yes):
    compilation_cache.reset_cache()  # JAX looks once whether it is to use one
    jax.config.update("jax_enable_compilation_cache", yes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Gives the tests of a module a cache folder of their own, empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COURSE_CACHE", str(folder))
        yield folder
