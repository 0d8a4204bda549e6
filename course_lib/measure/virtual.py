"""Virtual devices: compile programs for an accelerator that is not there, and read them.

A compiler does not need the chip that it compiles for: JAX can describe a machine and return
its devices (`jax.experimental.topologies`, https://docs.jax.dev/en/latest/aot.html). What is
lowered for arguments on them compiles as usual, and tells what memory the machine would need:

    device = virtual.devices("a5000")[0]
    x = virtual.abstract(jnp.ones((4096, 4096)), device)
    print(virtual.compile(jax.jit(lambda x: jnp.tanh(x @ x)).lower(x)).memory_analysis())

`jax.devices()` does not change. Unlike on the machine itself, the program cannot be called, and
XLA cannot time several kernels for a product and keep the fastest (*autotuning*). Nor can it
call Python: `.lower()` of a step with `jax.debug.print` raises "Unknown backend: 'gpu'".
"""

import contextlib
import functools
import importlib.metadata
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from course_lib.measure import environment, hardware

PyTree = Any

GPUS_PER_HOST = 8
# Options of programs that never run: their machine code is not optimized, and the compiler does
# not try several kernels for a product.
COMPILE_ONLY = {"xla_backend_optimization_level": 0, "xla_gpu_autotune_level": 0}
# From JAX 0.10 on, XLA gives products on CPUs, with the operations between them, to the library
# YNNPACK: one `ynn_fusion`, whose insides are in no plan of memory. This option forbids it.
NO_FUSED_LIBRARY: dict[str, Any] = (
    {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.__version_info__ >= (0, 10) else {}
)
HOST_MEMORY = "pinned_host"  # JAX's name for host memory from which a device copies by itself


class NoCompiler(RuntimeError):
    """There is no compiler for an accelerator here. The message says why, and what to do."""


def devices(name: str, count: int = 1) -> list[jax.Device]:
    """Returns virtual devices of an accelerator, one of `hardware.names()`.

    `count` is up to 8 GPUs in one host, or whole hosts of 8; for TPUs, a size that is sold.
    """
    accelerator = hardware.get(name)
    _check_count(accelerator, count)
    if reason := why_unavailable(name):
        is_gpu = accelerator.platform == "gpu"
        extra, newer = ("virtual", " and JAX 0.9 or newer") if is_gpu else ("tpu", "")
        raise NoCompiler(
            f"no virtual devices of name={name!r} here: {reason}. They need Linux on"
            f' x86_64{newer}, and the compiler: `pip install "course-lib[{extra}]"`. Elsewhere,'
            " `recorded.live_or_recorded` shows the results of another machine"
        )
    return list(_describe(name, count))


def why_not_lowered(error: BaseException) -> str | None:
    """Returns why a step that calls Python does not lower for a virtual GPU, or None."""
    if "Unknown backend: 'gpu'" not in str(error):
        return None
    return (
        "a GPU that is not there calls no Python: remove jax.debug.print, jax.pure_callback and"
        " other callbacks from the step"
    )


@functools.cache
def why_unavailable(name: str = "a5000") -> str | None:
    """Returns None if `devices(name)` works here, else the reason.

    The first call for a name compiles a tiny program (a fraction of a second) to find out.
    """
    accelerator = hardware.get(name)
    if reason := _why_no_compiler(accelerator.platform):
        return reason
    try:
        x = abstract(jax.ShapeDtypeStruct((), jnp.float32), _describe(name, 1)[0])
        with without_cache():
            jax.jit(jnp.tan).lower(x).compile()
    except Exception as error:  # any error of the compiler is a reason
        if "ptx" in str(error).lower():
            return "NVIDIA's assembler `ptxas` is missing (package nvidia-cuda-nvcc)"
        if "libdevice" in str(error):
            return "NVIDIA's `libdevice` is missing (package nvidia-nvvm)"
        message = str(error).strip().splitlines() or [type(error).__name__]
        return f"the compiler for {accelerator.title} fails: {message[0][:200]}"
    return None


def abstract(tree: PyTree, place: jax.Device | Sharding) -> PyTree:
    """Replaces each leaf (an array, a typed random key, a shape, a Python number) by its shape
    and dtype, placed on a device or by one sharding: a tree that is ready for `.lower()`.

    Nothing is copied or computed. Leaves in the host's memory stay there (`on_host`).
    """
    if not isinstance(place, jax.Device | Sharding):
        raise ValueError(
            f"place={place!r} must be a device, as devices('h100')[0], or a sharding"
        )
    sharding = place if isinstance(place, Sharding) else SingleDeviceSharding(place)

    def of_leaf(leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
        where = on_host(sharding) if kind == HOST_MEMORY else sharding
        return jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=where, weak_type=shape.weak_type
        )

    return jax.tree.map(of_leaf, tree, jax.eval_shape(lambda tree: tree, tree))


def shapes(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Returns the shapes of a function's results, as `jax.eval_shape` does, and marks those
    that are on the host: with a sharding of JAX's default device, which `abstract` replaces.
    """
    traced, tree = jax.make_jaxpr(function, return_shape=True)(*args)
    here = on_host(_named(jax.devices()[0]))
    avals = iter(traced.out_avals)

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        space = getattr(next(avals), "memory_space", None)  # JAX 0.7 has none for results
        where = here if getattr(space, "name", "").lower() == "host" else None
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where, weak_type=leaf.weak_type
        )

    return jax.tree.map(place, tree)


def on_host(place: jax.Device | Sharding) -> NamedSharding:
    """Returns a sharding over the same devices (or one device), in the memory of the host: for
    arguments of a step that offloads.

    Virtual devices list no memories, and JAX drops the memory kind of their shardings; this one
    keeps it. It cannot be among a jitted function's `out_shardings`: leave None there, and move
    the result with `jax.device_put(x, jax.memory.Space.Host)` inside the function.
    """
    if isinstance(place, SingleDeviceSharding):
        place = next(iter(place.device_set))
    sharding = _named(place) if isinstance(place, jax.Device) else place
    assert isinstance(sharding, NamedSharding), place
    moved = sharding.with_memory_kind(HOST_MEMORY)
    return moved if moved.memory_kind == HOST_MEMORY else _OnHost(sharding.mesh, sharding.spec)


def _named(device: jax.Device) -> NamedSharding:
    """Returns a sharding whose memory kind JAX reads, unlike a `SingleDeviceSharding`'s."""
    return NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())


class _OnHost(NamedSharding):
    """A sharding whose memory kind stays the host's, also on virtual devices."""

    memory_kind = HOST_MEMORY

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnHost) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((HOST_MEMORY, super().__hash__()))


def compile(
    lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compiles a program to be read: as `.compile()` does, but faster for virtual GPUs, and for
    a CPU without the library whose insides no plan of memory shows (`NO_FUSED_LIBRARY`).

    Memory, traffic and collectives are decided before XLA makes machine code: `COMPILE_ONLY`
    skips its optimization. More compiler `options` take precedence.
    """
    asked = dict(options or {})
    # JAX has no public way to ask what a program was lowered for.
    client = lowered._lowering.compile_args["backend"]  # type: ignore[attr-defined]
    if client.platform == "cpu":
        asked = {**NO_FUSED_LIBRARY, **asked}
    if not (client.platform == "gpu" and "compile_only" in client.runtime_type):
        return lowered.compile(compiler_options=asked or None)
    with without_cache():
        # With JAX 0.12 some programs, such as that of notebook 14's experts, compile only at
        # XLA's own level of autotuning ("No supported config found").
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return lowered.compile(compiler_options={**COMPILE_ONLY, **asked})
        return lowered.compile({"xla_backend_optimization_level": 0, **asked})


_lock = threading.Lock()
_inside = 0  # how many threads are inside of `without_cache`
_before = True


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Switches JAX's persistent compilation cache off, for all threads: it cannot load a
    virtual program, may return one with the names of another's operations, and XLA plans no
    memory of what it loads.
    """
    global _inside, _before

    def enable(cache: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", cache)
        compilation_cache.reset_cache()  # JAX looks at its configuration once

    with _lock:
        if not _inside:
            _before = jax.config.jax_enable_compilation_cache
            enable(False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                enable(_before)


@contextlib.contextmanager
def triton_without_gpu() -> Iterator[None]:
    """Lets Pallas lower a Triton kernel where no GPU is: put it around `pallas_call`."""
    # From JAX 0.11 on, Pallas asks which GPU a kernel is for, and does not ask the device that
    # the program is lowered for. The answer decides only whether a kernel may convert numbers
    # to float8_e4m3fn. The A10 that is named here may not. XLA compiles for the right GPU.
    mesh = jax.sharding.get_abstract_mesh()
    if jax.__version_info__ < (0, 11) or mesh.shape or jax.default_backend() == "gpu":
        yield
        return
    gpu = jax.sharding.AbstractDevice("NVIDIA A10", None, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        yield


def _check_count(accelerator: hardware.Accelerator, count: int) -> None:
    host = GPUS_PER_HOST
    whole = max(count // host * host, host)
    fits = 1 <= count <= host or count == whole
    sizes = f"1 to {host}, or whole hosts of {host}: take {whole} or {whole + host}"
    if isinstance(accelerator.target, hardware.TpuTarget):
        layouts = accelerator.target.layouts
        fits, sizes = count in layouts, ", ".join(map(str, layouts))
    if not fits:
        raise ValueError(f"count={count} must be a number of {accelerator.title}: {sizes}")


def _why_no_compiler(platform_name: str) -> str | None:
    if platform.system() != "Linux":
        return f"the compiler comes for Linux only, and this is {platform.system()}"
    if platform_name == "tpu":
        return None if environment.version("libtpu") else "libtpu is not installed"
    if jax.__version_info__ < (0, 9):
        return (
            f"JAX {jax.__version__} cannot describe a GPU that is not there, JAX 0.9 and"
            " newer can"
        )
    plugin = environment.version("jax-cuda13-pjrt") or environment.version("jax-cuda12-pjrt")
    if plugin is None:
        return "JAX's CUDA plugin is not installed"
    jaxlib = environment.version("jaxlib")
    if plugin.split(".")[:3] != jaxlib.split(".")[:3]:
        return (
            f"JAX's CUDA plugin is of version {plugin}, jaxlib of version {jaxlib}: they must"
            " be the same"
        )
    return None


@functools.cache
def _describe(name: str, count: int) -> tuple[jax.Device, ...]:
    accelerator = hardware.get(name)
    target = accelerator.target
    if isinstance(target, hardware.TpuTarget):
        chips = {"chips_per_host_bounds": (1, 1, 1)} if count == 1 else {}
        topology = topologies.get_topology_desc(
            f"{target.prefix}:{target.layouts[count]}", platform="tpu", **chips
        )
        return tuple(topology.devices)
    hosts = -(-count // GPUS_PER_HOST)
    described = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=target.text(
            accelerator.device_kinds[0], accelerator.memory_bytes, accelerator.memory_bandwidth
        ),
        topology=f"1x{hosts}x{count // hosts}",  # slices x hosts x GPUs per host
    )
    try:
        return tuple(described().devices)
    except NotImplementedError:
        _load_cuda_plugin()
        return tuple(described().devices)


def _load_cuda_plugin() -> None:
    """Loads the plugin again, without the check for cuDNN that failed at JAX's start."""
    jax.devices()  # JAX chooses its own devices first
    before = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        for plugin in importlib.metadata.entry_points(group="jax_plugins"):
            if "cuda" in plugin.name:
                plugin.load().initialize()
    finally:
        del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]
        if before is not None:
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = before
