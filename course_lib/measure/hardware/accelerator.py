"""The columns of the table, and the text that describes an accelerator to XLA's compiler."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

# The keys of `Accelerator.peak_flops`. "tensorfloat32" is float32 data, rounded to 10 bits of
# mantissa on its way into a tensor core (XLA's default for float32 products on GPUs that can);
# "float8" stands for every eight-bit format.
PRECISIONS = ("float32", "tensorfloat32", "float16", "bfloat16", "float8")


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
        """Returns XLA's `GpuTargetConfigProto` in text form, for
        `topologies.get_topology_desc(target_config=...)`; `description` becomes the
        `device_kind` of the devices.
        """
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
    "v5e:2x4".

    Source: the configurations listed for each chip in https://docs.cloud.google.com/tpu/docs.
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

    def peak(self, dtype: Any) -> float | None:
        """Returns the dense FLOP/s of matrix products with operands of a dtype.

        Args:
          dtype: anything that names a floating-point dtype (`jnp.bfloat16`, "float8_e4m3fn"),
            or one of `PRECISIONS`.

        Returns:
          FLOP/s, or None where the table has no figure: bfloat16 on a T4, float32 on a TPU,
            float64 and integers anywhere.
        """
        if isinstance(dtype, str) and dtype in PRECISIONS:
            return self.peak_flops.get(dtype)
        name = jnp.dtype(dtype).name
        return self.peak_flops.get("float8" if name.startswith("float8") else name)
