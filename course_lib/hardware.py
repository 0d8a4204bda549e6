"""Accelerators: what they hold, what they move, what they compute, and what a compiler must know to target them.

The figures of each row come from its `source`. Three things to know when reading such documents:

- Sparse or dense. NVIDIA quotes most tensor-core rates "with sparsity" (two of every four weights are zero), which is
  twice the dense rate. This table holds dense rates: the ones that a training step could reach.
- GB or GiB. An H100's "80 GB" are about 80 GiB of chips, of which firmware and driver keep a little. `memory_bytes` is
  what is left for a program: for GPUs what the CUDA driver reports, for TPUs what its compiler calls available.
- One direction or both. NVLink's "900 GB/s" count both directions. `link_bandwidth` is one direction.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

GIB = 2**30
MIB = 2**20

# The keys of `Accelerator.peak_flops`. "tensorfloat32" is float32 data, rounded to 10 bits of mantissa on its way into
# a tensor core (XLA's default for float32 products on GPUs that can); "float8" stands for every eight-bit format.
PRECISIONS = ("float32", "tensorfloat32", "float16", "bfloat16", "float8")


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """What XLA's compiler asks about an NVIDIA GPU, in XLA's words: a *core* is a streaming multiprocessor.

    Sources: the CUDA programming guide's technical specifications per compute capability
    (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities) and XLA's own targets
    (https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs).
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
        """Returns XLA's `GpuTargetConfigProto` in text form, for `topologies.get_topology_desc(target_config=...)`.

        Args:
          description: becomes the `device_kind` of the devices.
          memory_bytes: device memory. XLA rematerializes on its own when a program comes close to it.
          memory_bandwidth: bytes per second.
        """
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
            platform_name: "CUDA"  runtime_version {{ major: 13 }}  dnn_version_info {{ major: 9 minor: 7 }}
            device_description_str: "{description}"
            """


@dataclasses.dataclass(frozen=True)
class TpuTarget:
    """How chips are arranged: `prefix` "v5e" and `layouts[8] == "2x4"` make the topology "v5e:2x4".

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
    peak_flops: Mapping[str, float]  # dense FLOP/s of matrix products, by precision; float32 is without tensor cores
    device_kinds: tuple[str, ...]  # as jax.Device.device_kind spells it; virtual devices carry the first
    target: GpuTarget | TpuTarget
    source: str

    @property
    def platform(self) -> str:
        """Returns "gpu" or "tpu", as `jax.Device.platform` does."""
        return "gpu" if isinstance(self.target, GpuTarget) else "tpu"

    def peak(self, dtype: Any) -> float | None:
        """Returns the dense FLOP/s of matrix products with operands of a dtype.

        Args:
          dtype: anything that names a floating-point dtype (`jnp.bfloat16`, "float8_e4m3fn"), or one of `PRECISIONS`.

        Returns:
          FLOP/s, or None where the table has no figure: bfloat16 on a T4, float32 on a TPU, float64 anywhere.

        Raises:
          ValueError: if `dtype` is no floating-point dtype.
        """
        if isinstance(dtype, str) and dtype in PRECISIONS:
            return self.peak_flops.get(dtype)
        try:
            name = jnp.dtype(dtype).name
            is_float = jnp.issubdtype(name, jnp.floating)
        except TypeError:
            is_float = False
        if not is_float:
            raise ValueError(f"dtype={dtype!r} must be a floating-point dtype or one of {', '.join(PRECISIONS)}")
        return self.peak_flops.get("float8" if name.startswith("float8") else name)


def get(name: str) -> Accelerator:
    """Returns the row of an accelerator.

    Raises:
      ValueError: if the table has no such name.
    """
    if name not in _TABLE:
        raise ValueError(f"name={name!r} must be an accelerator of the table: {', '.join(_TABLE)}")
    return _TABLE[name]


def names() -> tuple[str, ...]:
    """Returns the names in the table: GPUs in order of age, then TPUs."""
    return tuple(_TABLE)


def recognize(device: jax.Device) -> Accelerator | None:
    """Returns the row of a device, real or virtual; None if it is not exactly a product of the table.

    The whole `device_kind` must match. An H100 PCIe, an A5000 in a laptop or a slice of a shared GPU (MIG) contain a
    name of the table in theirs, and are slower or smaller.
    """
    return next((row for row in _ROWS if device.device_kind in row.device_kinds), None)


_A100 = GpuTarget((8, 0), 108, 64, 1.41, 40 * MIB, 167_936, 166_912, 2048)
_L4_PEAK = {"float32": 30.3e12, "tensorfloat32": 60e12, "float16": 121e12, "bfloat16": 121e12, "float8": 242.5e12}
_A100_PEAK = {"float32": 19.5e12, "tensorfloat32": 156e12, "float16": 312e12, "bfloat16": 312e12}
_HOPPER_PEAK = {"float32": 67e12, "tensorfloat32": 494.5e12, "float16": 989e12, "bfloat16": 989e12, "float8": 1979e12}
_B200_PEAK = {"float32": 75e12, "tensorfloat32": 1.1e15, "float16": 2.25e15, "bfloat16": 2.25e15, "float8": 4.5e15}
_LAYOUTS_2D = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_LAYOUTS_3D = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}

_ROWS = (
    Accelerator(
        name="t4",
        title="NVIDIA T4",
        memory_bytes=15_843_721_216,
        memory_bandwidth=320e9,
        link_bandwidth=16e9,
        link="PCIe 3.0 x16, through the host",
        peak_flops={"float32": 8.1e12, "float16": 65e12},
        device_kinds=("Tesla T4",),
        target=GpuTarget((7, 5), 40, 64, 1.59, 4 * MIB, 65_536, 65_536, 1024),
        source="https://www.nvidia.com/en-us/data-center/tesla-t4/",
    ),
    Accelerator(
        name="l4",
        title="NVIDIA L4",
        memory_bytes=22_563 * MIB,
        memory_bandwidth=300e9,
        link_bandwidth=32e9,
        link="PCIe 4.0 x16, through the host",
        peak_flops=_L4_PEAK,
        device_kinds=("NVIDIA L4",),
        target=GpuTarget((8, 9), 58, 128, 2.04, 48 * MIB, 102_400, 101_376, 1536),
        source="https://www.nvidia.com/en-us/data-center/l4/",
    ),
    Accelerator(
        name="a5000",
        title="NVIDIA RTX A5000",
        memory_bytes=25_282_281_472,
        memory_bandwidth=768e9,
        link_bandwidth=32e9,
        link="PCIe 4.0 x16, through the host",
        peak_flops={"float32": 27.8e12, "tensorfloat32": 55.5e12, "float16": 111e12, "bfloat16": 111e12},
        device_kinds=("NVIDIA RTX A5000", "RTX A5000"),
        target=GpuTarget((8, 6), 64, 128, 1.7, 6 * MIB, 102_400, 101_376, 1536),
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/gtcs21/rtx-a5000/nvidia-rtx-a5000-datasheet.pdf",
    ),
    Accelerator(
        name="a100-40",
        title="NVIDIA A100 SXM 40 GB",
        memory_bytes=42_331_013_120,
        memory_bandwidth=1555e9,
        link_bandwidth=300e9,
        link="NVLink 3, to the GPUs of the host",
        peak_flops=_A100_PEAK,
        device_kinds=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        target=_A100,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf",
    ),
    Accelerator(
        name="a100-80",
        title="NVIDIA A100 SXM 80 GB",
        memory_bytes=85_100_068_864,
        memory_bandwidth=2039e9,
        link_bandwidth=300e9,
        link="NVLink 3, to the GPUs of the host",
        peak_flops=_A100_PEAK,
        device_kinds=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        target=_A100,
        source="https://www.nvidia.com/en-us/data-center/a100/",
    ),
    Accelerator(
        name="h100",
        title="NVIDIA H100 SXM",
        memory_bytes=84_942_979_072,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        link="NVLink 4, to the GPUs of the host",
        peak_flops=_HOPPER_PEAK,
        device_kinds=("NVIDIA H100 80GB HBM3",),
        target=GpuTarget((9, 0), 132, 128, 1.98, 50 * MIB, 233_472, 232_448, 2048),
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    Accelerator(
        name="h200",
        title="NVIDIA H200 SXM",
        memory_bytes=143_156 * MIB,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        link="NVLink 4, to the GPUs of the host",
        peak_flops=_HOPPER_PEAK,
        device_kinds=("NVIDIA H200",),
        target=GpuTarget((9, 0), 132, 128, 1.98, 60 * MIB, 233_472, 232_448, 2048),
        source="https://www.nvidia.com/en-us/data-center/h200/",
    ),
    Accelerator(
        name="b200",
        title="NVIDIA B200 SXM",
        memory_bytes=191_514_411_008,
        memory_bandwidth=7.7e12,
        link_bandwidth=900e9,
        link="NVLink 5, to the GPUs of the host",
        peak_flops=_B200_PEAK,
        device_kinds=("NVIDIA B200",),
        target=GpuTarget((10, 0), 148, 128, 1.965, 132_644_864, 233_472, 232_448, 2048),
        source="https://www.nvidia.com/en-us/data-center/hgx/",
    ),
    Accelerator(
        name="v5e",
        title="TPU v5e",
        memory_bytes=int(15.75 * GIB),
        memory_bandwidth=819e9,
        link_bandwidth=50e9,
        link="one of 4 ICI links, to the next chip of a 2D torus",
        peak_flops={"bfloat16": 197e12},
        device_kinds=("TPU v5 lite", "TPU v5e"),
        target=TpuTarget("v5e", _LAYOUTS_2D),
        source="https://docs.cloud.google.com/tpu/docs/v5e",
    ),
    Accelerator(
        name="v5p",
        title="TPU v5p",
        memory_bytes=int(95.74 * GIB),
        memory_bandwidth=2765e9,
        link_bandwidth=100e9,
        link="one of 6 ICI links, to the next chip of a 3D torus",
        peak_flops={"bfloat16": 459e12},
        device_kinds=("TPU v5", "TPU v5p"),
        target=TpuTarget("v5p", _LAYOUTS_3D),
        source="https://docs.cloud.google.com/tpu/docs/v5p",
    ),
    Accelerator(
        name="v6e",
        title="TPU v6e",
        memory_bytes=int(31.25 * GIB),
        memory_bandwidth=1600e9,
        link_bandwidth=100e9,
        link="one of 4 ICI links, to the next chip of a 2D torus",
        peak_flops={"bfloat16": 918e12},
        device_kinds=("TPU v6 lite", "TPU v6e"),
        target=TpuTarget("v6e", _LAYOUTS_2D),
        source="https://docs.cloud.google.com/tpu/docs/v6e",
    ),
)
_TABLE = {accelerator.name: accelerator for accelerator in _ROWS}
