"""Accelerators: their memory, bandwidths and peak rates, and how to compile for them.

The figures of each row come from its `source`. Three pitfalls of such documents:

- Sparse or dense. NVIDIA quotes most tensor-core rates "with sparsity" (two of every four
  weights are zero), twice the dense rate. This table has dense rates, which a training step
  could reach.
- GB or GiB. An H100's "80 GB" are about 80 GiB of chips, minus a little for firmware and
  driver. `memory_bytes` is the memory left for a program, as the CUDA driver reports it, or the
  TPU's compiler.
- One direction or both. NVLink's "900 GB/s" counts both directions. `link_bandwidth`,
  `network_bandwidth` and the `bandwidth` of a link to the host count one.
"""

import dataclasses
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

# The keys of `Accelerator.peak_flops`. "tensorfloat32" is float32 data, rounded to 10 bits of
# mantissa on its way into a tensor core (XLA's default for float32 products on GPUs that can);
# "float8" stands for every eight-bit format.
PRECISIONS = ("float32", "tensorfloat32", "float16", "bfloat16", "float8", "int8", "float64")

# Shares of a GPU's memory: the rest is for CUDA and NCCL. JAX takes less by default.
GPU_SHARE, JAX_SHARE = 0.9, 0.75


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """An NVIDIA GPU as XLA's compiler sees it: a *core* is a streaming multiprocessor.

    Sources: the CUDA programming guide's technical specifications per compute capability
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities) and XLA's own
    targets (https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs).
    """

    compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int  # float32 lanes
    clock_ghz: float  # boost
    l2_bytes: int
    shared_memory_per_core: int  # bytes
    shared_memory_per_block: int  # bytes, the most that one block can ask for
    threads_per_core: int

    def text(self, description: str, memory_bytes: int, memory_bandwidth: float) -> str:
        """Returns XLA's `GpuTargetConfigProto` as text; `description` becomes `device_kind`."""
        # XLA rematerializes on its own when a program comes close to `device_memory_size`.
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.core_count}
              fpus_per_core: {self.fpus_per_core}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {memory_bytes}
              memory_bandwidth: {int(memory_bandwidth)}
              l2_cache_size: {self.l2_bytes}
              shared_memory_per_core: {self.shared_memory_per_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory_per_block}
              threads_per_core_limit: {self.threads_per_core}
              threads_per_block_limit: 1024  threads_per_warp: 32
              registers_per_core_limit: 65536  registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
            }}
            platform_name: "CUDA"
            runtime_version {{ major: 13 }}  dnn_version_info {{ major: 9 minor: 7 }}
            device_description_str: "{description}"
            """


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """How chips are arranged: `prefix` "v5e" and `layouts[8] == "2x4"` make the topology
    "v5e:2x4" (https://docs.cloud.google.com/tpu/docs).
    """

    prefix: str
    layouts: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One row of the table."""

    name: str
    title: str
    memory_bytes: int  # what a program can use
    memory_bandwidth: float  # bytes/s between device memory and the chip
    link_bandwidth: float  # bytes/s in one direction over `link`
    link: str  # the fastest way to a neighbour
    peak_flops: Mapping[str, float]  # dense, by precision; float32 is without tensor cores
    device_kinds: tuple[str, ...]  # jax.Device.device_kind; virtual devices carry the first
    target: GpuTarget | TpuTarget
    source: str
    network_bandwidth: float | None = None  # bytes/s to another host; None: no such figure

    @property
    def platform(self) -> str:
        """Returns "gpu" or "tpu", as `jax.Device.platform` does."""
        return "gpu" if isinstance(self.target, GpuTarget) else "tpu"

    @property
    def usable_bytes(self) -> int:
        """The memory that a step may use: of a GPU's, 90%."""
        return int((GPU_SHARE if self.platform == "gpu" else 1) * self.memory_bytes)

    @property
    def default_bytes(self) -> int:
        """The memory that JAX takes by default: of a GPU's, 75%."""
        return int((JAX_SHARE if self.platform == "gpu" else 1) * self.memory_bytes)

    def peak(self, dtype: Any) -> float | None:
        """Returns the dense FLOP/s of matrix products with operands of a dtype, or of one of
        `PRECISIONS`; None where the table has no figure, as for bfloat16 on a T4.
        """
        if isinstance(dtype, str) and dtype in PRECISIONS:
            return self.peak_flops.get(dtype)
        name = jnp.dtype(dtype).name
        return self.peak_flops.get("float8" if name.startswith("float8") else name)


@dataclasses.dataclass(frozen=True)
class HostLink:
    """A link between a GPU and its host."""

    name: str
    title: str  # for pictures and tables
    bandwidth: float  # bytes/s in one direction; both directions run at the same time
    source: str


def get(name: str) -> Accelerator:
    """Returns the row of an accelerator."""
    if name not in _TABLE:
        raise ValueError(
            f"name={name!r} must be an accelerator of the table: {', '.join(_TABLE)}"
        )
    return _TABLE[name]


def check(accelerator: Any) -> None:
    """Refuses a name in place of a row of the table."""
    if isinstance(accelerator, str):
        raise ValueError(
            f"accelerator={accelerator!r} must be a row of the table:"
            f" hardware.get({accelerator!r})"
        )


def names() -> tuple[str, ...]:
    """Returns the names in the table: GPUs in order of age, then TPUs."""
    return tuple(_TABLE)


def recognize(device: jax.Device) -> Accelerator | None:
    """Returns the row of a device, real or virtual; None if the table does not have it.

    `device_kind` must match exactly: the names of an H100 PCIe, an A5000 in a laptop or a slice
    of a shared GPU (MIG) contain a name of the table, but these are slower or smaller.
    """
    rows = _TABLE.values()
    return next((row for row in rows if device.device_kind in row.device_kinds), None)


def host_link(name: str) -> HostLink:
    """Returns a link between a GPU and its host."""
    if name not in HOST_LINKS:
        raise ValueError(f"name={name!r} must be a link of the table: {', '.join(HOST_LINKS)}")
    return HOST_LINKS[name]


def cores() -> int:
    """Returns how many cores of the host this process may use, as XLA counts them: it takes as
    many threads.
    """
    threads = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    if threads and threads.isdecimal():
        return int(threads)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _row(name: str, gpu: Any = None, tpu: Any = None, **fields: Any) -> Accelerator:
    target: GpuTarget | TpuTarget
    if gpu:
        target = GpuTarget(**gpu | {"compute_capability": tuple(gpu["compute_capability"])})
    else:
        sold = {math.prod(map(int, shape.split("x"))): shape for shape in tpu["layouts"]}
        target = TpuTarget(tpu["prefix"], sold)
    fields["device_kinds"] = tuple(fields["device_kinds"])
    return Accelerator(name=name, target=target, **fields)


def _rows(file: str) -> dict[str, Any]:
    text = pathlib.Path(__file__).with_name(file).read_text(encoding="utf-8")
    return tomllib.loads(text)


_TABLE = {name: _row(name, **fields) for name, fields in _rows("accelerators.toml").items()}
HOST_LINKS = {name: HostLink(name, **row) for name, row in _rows("host_links.toml").items()}
