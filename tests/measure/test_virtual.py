"""Laws of devices that are not there."""

import inspect
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from shapes import needs_virtual
from slow_cases import slow

from course_lib import measure
from course_lib.measure import environment, hardware, virtual

GPUS = [name for name in hardware.names() if hardware.get(name).platform == "gpu"]


PATHS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def run_alone(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a Python of its own, with JAX's defaults and a PATH that does not lead to
    another CUDA.
    """
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "TF_CPP_", "TPU_"))
    }
    plain |= {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(virtual.__file__).parents[2]), *PATHS]),
        # a real GPU is shared with the process that runs the tests
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=plain | environment, capture_output=True, text=True
    )


COMPILE = """
from course_lib.measure import virtual
import jax, jax.numpy as jnp
device = virtual.devices("a5000")[0]
too_large = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32)  # 64 GiB, for 24 GiB
jax.jit(lambda x: jnp.tanh(x @ x)).lower(virtual.abstract(too_large, device)).compile()
print(jax.jit(lambda x: x + 1)(1))
"""


# Where virtual devices are to be had


@needs_virtual
@pytest.mark.parametrize("name", ["t4", "b200", *map(slow, GPUS[1:-1])])
def test_each_gpu_of_the_table_can_be_compiled_for_and_is_recognized(name):
    assert virtual.why_unavailable(name) is None
    assert hardware.recognize(virtual.devices(name)[0]) is hardware.get(name)


@needs_virtual
@pytest.mark.parametrize("count", [4, 6144])
def test_as_many_devices_come_as_were_asked_for_8_to_a_host_beside_those_that_jax_has(count):
    before, devices = jax.devices(), virtual.devices("h100", count)
    assert jax.devices() == before and not set(before) & set(devices)
    assert len(set(devices)) == count
    assert len({device.process_index for device in devices}) == -(-count // 8)


@needs_virtual
def test_machine_code_that_is_not_optimized_changes_nothing_that_is_read_of_a_program():
    """Scanned layers in bfloat16: few kernels, so that they compile quickly."""

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)
        return (x.astype(jnp.float32) ** 2).sum()

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 64, 64), (128, 64))]
    lowered = jax.jit(jax.grad(loss)).lower(
        *virtual.abstract(args, virtual.devices("a5000")[0])
    )
    plain, quick = lowered.compile(), virtual.compile(lowered)
    assert measure.memory(plain) == measure.memory(quick)
    assert measure.traffic(plain).bytes == measure.traffic(quick).bytes
    assert measure.ledger(plain).rows() == measure.ledger(quick).rows()


def noted_options(monkeypatch, refused=""):
    """Returns the options of each compilation from now on, which may be refused."""
    given, compile = [], jax.stages.Lowered.compile

    def spy(self, compiler_options=None):
        given.append(compiler_options)
        if refused:
            raise jax.errors.JaxRuntimeError(refused)
        return compile(self, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    return given


@needs_virtual
def test_only_programs_for_virtual_gpus_are_compiled_without_optimization(monkeypatch):
    [device] = virtual.devices("a5000")  # compiles a program to find out
    given = noted_options(monkeypatch)
    x, fn = jnp.ones(8), jax.jit(lambda x: x + 1)
    there = jax.sharding.SingleDeviceSharding(device)
    virtual.compile(fn.lower(x))
    virtual.compile(fn.lower(x), {"xla_dump_disable_metadata": True})
    virtual.compile(fn.lower(virtual.abstract(x, device)))
    virtual.compile(jax.jit(lambda: jnp.ones(8), out_shardings=there).lower())
    virtual.compile(fn.lower(virtual.abstract(x, device)), {"xla_gpu_autotune_level": 1})
    here = virtual.NO_FUSED_LIBRARY if jax.default_backend() == "cpu" else {}
    quickly = virtual.COMPILE_ONLY
    assert given == [
        here or None,
        here | {"xla_dump_disable_metadata": True},
        quickly,
        quickly,
        quickly | {"xla_gpu_autotune_level": 1},
    ]


@needs_virtual
def test_a_program_that_needs_xlas_choice_of_kernels_gets_it_else_xlas_own_words(monkeypatch):
    [device] = virtual.devices("a5000")
    lowered = jax.jit(lambda x: x + 1).lower(virtual.abstract(jnp.ones(8), device))
    given = noted_options(monkeypatch, "No supported config found")
    with pytest.raises(jax.errors.JaxRuntimeError, match="No supported config found"):
        virtual.compile(lowered)
    assert given == [virtual.COMPILE_ONLY, {"xla_backend_optimization_level": 0}]


def test_a_program_on_a_mesh_that_names_no_device_is_for_no_virtual_gpu(monkeypatch):
    nowhere = jax.sharding.AbstractMesh((1,), ("data",))
    place = NamedSharding(nowhere, PartitionSpec())
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)
    lowered = jax.jit(jnp.tan).trace(x).lower(lowering_platforms=("cpu",))
    given = noted_options(monkeypatch, "refused")
    with pytest.raises(jax.errors.JaxRuntimeError, match="refused"):
        virtual.compile(lowered)
    assert given == [virtual.NO_FUSED_LIBRARY or None]


@needs_virtual
@pytest.mark.slow
def test_it_works_where_jax_was_started_before_the_import():
    run = run_alone("import jax; jax.devices()" + COMPILE)
    assert (run.returncode, run.stdout) == (0, "2\n")


@needs_virtual
def test_nothing_is_written_to_the_screen_not_even_of_the_persistent_cache(tmp_path):
    """Virtual programs lie in a full cache, and cannot be loaded from there: JAX warns."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    trains = "from course_lib import training; import jax; jax.devices()"
    # as `why_unavailable` does
    probe = "x = virtual.abstract(jnp.float32(1), device); jax.jit(jnp.tan).lower(x).compile()"
    first = run_alone(trains + COMPILE + probe, **cache)
    strict = "import warnings; warnings.simplefilter('error'); print(virtual.why_unavailable())"
    second = run_alone("from course_lib.measure import virtual; " + strict, **cache)
    assert any(tmp_path.iterdir())
    assert (first.returncode, first.stderr, first.stdout) == (0, "", "2\n")
    assert (second.returncode, second.stderr, second.stdout) == (0, "", "None\n")


@pytest.mark.skipif(
    virtual.why_unavailable("v5e") is not None, reason=str(virtual.why_unavailable("v5e"))
)
def test_a_program_compiles_for_a_tpu():
    device = virtual.devices("v5e")[0]
    assert hardware.recognize(device) is hardware.get("v5e")
    x = virtual.abstract(jnp.ones((1024, 256)), device)
    compiled = jax.jit(lambda x: (x @ x.T).sum()).lower(x).compile()
    assert measure.memory(compiled).arguments == 1024 * 256 * 4


# Everywhere


@pytest.mark.parametrize(("asked", "found"), [("0", "0"), ("1", "3"), (None, "3")])
def test_a_user_who_asked_for_logs_keeps_them(monkeypatch, asked, found):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if asked is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", asked)
    environment.prepare()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == found


def test_a_place_that_is_no_device_is_refused():
    with pytest.raises(ValueError, match="place='h100' must be a device"):
        inspect.unwrap(virtual.abstract)({}, "h100")


@pytest.mark.parametrize(
    ("name", "count", "advice"),
    [("h100", 12, "take 8 or 16"), ("h100", 0, "1 to 8"), ("v5e", 3, "1, 4, 8, 16")],
)
def test_a_number_of_devices_that_fills_no_hosts_is_refused(name, count, advice):
    with pytest.raises(ValueError, match=f"count={count} .*{advice}"):
        virtual.devices(name, count)


@pytest.mark.parametrize("ask", [virtual.devices, virtual.why_unavailable])
def test_an_unknown_accelerator_is_refused(ask):
    with pytest.raises(ValueError, match="name='a500'"):
        ask("a500")


@pytest.mark.parametrize(
    ("what", "value", "reason"),
    [
        ("jax.__version_info__", (0, 7, 2), "cannot describe a GPU"),
        ("platform.system", lambda: "Darwin", "this is Darwin"),
        ("environment.version", lambda package: None, "plugin is not installed"),
        (
            "environment.version",
            lambda package: "0.11.0" if "cuda" in package else "0.10.2",
            "must be the same",
        ),
    ],
)
def test_each_missing_piece_has_its_reason(monkeypatch, what, value, reason):
    monkeypatch.setattr("course_lib.measure.virtual.jax.__version_info__", (0, 10, 2))
    monkeypatch.setattr("course_lib.measure.virtual.platform.system", lambda: "Linux")
    monkeypatch.setattr(f"course_lib.measure.virtual.{what}", value)
    assert reason in virtual._why_no_compiler("gpu")


def test_abstract_keeps_tree_shapes_dtypes_and_weak_types():
    device = jax.devices()[0]
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    tree = {
        "params": params,
        "opt_state": optax.adam(1e-3).init(params),
        "step": 0,
        "rng": jax.random.key(0),
        "batch": np.ones((4, 2), np.int32),
        "planned": jax.ShapeDtypeStruct((5,), jnp.float16),
        "nothing": None,
    }
    placed = virtual.abstract(tree, device)
    assert jax.tree.structure(placed) == jax.tree.structure(tree)
    leaves = jax.tree.leaves(jax.eval_shape(lambda tree: tree, tree))
    for before, after in zip(leaves, jax.tree.leaves(placed), strict=True):
        assert (after.shape, after.dtype, after.weak_type) == (
            before.shape,
            before.dtype,
            before.weak_type,
        )
        assert after.sharding == SingleDeviceSharding(device)


# The host's memory


@needs_virtual
def test_jax_drops_the_memory_kind_of_a_virtual_sharding_and_on_host_keeps_it():
    mesh = jax.sharding.Mesh(np.array(virtual.devices("a5000")), ("x",))
    plain = NamedSharding(mesh, PartitionSpec(), memory_kind=virtual.HOST_MEMORY)
    assert plain.memory_kind is None, "JAX keeps it now: on_host is no longer needed"
    kept = virtual.on_host(plain)
    assert kept.memory_kind == virtual.HOST_MEMORY
    assert kept != plain and plain != kept and kept == virtual.on_host(plain)


@needs_virtual
def test_arguments_on_the_host_stay_there():
    mesh = jax.sharding.Mesh(np.array(virtual.devices("a5000")), ("x",))
    place = NamedSharding(mesh, PartitionSpec())

    def two_arrays():
        on_host = jax.device_put(jnp.ones((512, 256)), jax.memory.Space.Host)
        return jnp.ones((256, 256)), on_host

    shapes = virtual.shapes(two_arrays)
    arguments = virtual.abstract(shapes, place)
    function = jax.jit(lambda a, b: a.sum() + jax.device_put(b, jax.memory.Space.Device).sum())
    need = function.lower(*arguments).compile().memory_analysis()
    assert need.argument_size_in_bytes == 256 * 256 * 4
    assert need.host_argument_size_in_bytes == 512 * 256 * 4


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="this JAX's make_jaxpr tells no weak types"
)
def test_shapes_keep_dtypes_that_may_still_change():
    def weak_and_strong():
        return jnp.sin(1.0), jnp.sin(jnp.float32(1.0))

    assert [leaf.weak_type for leaf in virtual.shapes(weak_and_strong)] == [True, False]


@needs_virtual
@pytest.mark.parametrize(
    "call", [lambda x: jax.debug.print("{}", x), lambda x: jax.pure_callback(np.sin, x, x)]
)
def test_a_step_that_calls_python_says_so_where_no_gpu_is(call):
    x = virtual.abstract(jnp.ones(8), virtual.devices("a5000")[0])
    with pytest.raises(RuntimeError) as raised:
        jax.jit(lambda x: (call(x), x + 1)).lower(x)
    assert "remove jax.debug.print" in virtual.why_not_lowered(raised.value)
    assert virtual.why_not_lowered(ValueError("another")) is None
