"""The table of accelerators: memory, bandwidths and peak rates.

Each figure comes from its row's `source`, except `network_bandwidth`, which belongs to the
machine around the GPU: in NVIDIA's servers of eight, every GPU has a network card of its own,
of 200 Gb/s beside an A100
(https://docs.nvidia.com/dgx/dgxa100-user-guide/introduction-to-dgxa100.html), of 400 Gb/s
beside an H100, H200 or B200
(https://docs.nvidia.com/dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html).
It is None for a T4, an L4 and an A5000, found in all kinds of servers, and for TPUs, whose
links reach past their host.
"""

import math
import os
from typing import Any

import jax

from course_lib.measure.hardware.accelerator import (
    PRECISIONS,
    Accelerator,
    GpuTarget,
    TpuTarget,
)
from course_lib.measure.units import GIB, MIB


def get(name: str) -> Accelerator:
    """Returns the row of an accelerator.

    Raises:
      ValueError: if the table has no such name.
    """
    if name not in names():
        raise ValueError(
            f"name={name!r} must be an accelerator of the table: {', '.join(_TABLE)}"
        )
    return _TABLE[name]


def check(accelerator: Any) -> None:
    """Refuses a name in place of a row of the table.

    Raises:
      ValueError: saying how to get the row.
    """
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
    return next((row for row in _ROWS if device.device_kind in row.device_kinds), None)


def cores() -> int:
    """Returns how many cores of the host this process may use, as XLA counts them: it takes as
    many threads.
    """
    threads = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    if threads and threads.isdecimal():
        return int(threads)
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


_A100 = GpuTarget((8, 0), 108, 64, 1.41, 40 * MIB, 167_936, 166_912, 2048)


def _peaks(*rates: float) -> dict[str, float]:
    """Names the peak rates of a GPU with tensor cores, in the order of `PRECISIONS`."""
    return dict(zip(PRECISIONS, rates, strict=False))


def _layouts(*shapes: str) -> dict[int, str]:
    """Lists the shapes in which chips are sold by their number: {8: "2x4"}."""
    return {math.prod(map(int, shape.split("x"))): shape for shape in shapes}


_A100_PEAK = _peaks(19.5e12, 156e12, 312e12, 312e12)
_HOPPER_PEAK = _peaks(67e12, 494.5e12, 989e12, 989e12, 1979e12)
_2D = _layouts("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_3D = _layouts("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8")

_ROWS = (
    Accelerator(
        name="t4",
        title="NVIDIA T4",
        memory_bytes=15_843_721_216,
        memory_bandwidth=320e9,
        link_bandwidth=16e9,
        link="PCIe 3.0 x16, through the host",
        network_bandwidth=None,
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
        network_bandwidth=None,
        peak_flops=_peaks(30.3e12, 60e12, 121e12, 121e12, 242.5e12),
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
        network_bandwidth=None,
        peak_flops=_peaks(27.8e12, 55.5e12, 111e12, 111e12),
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
        network_bandwidth=200e9 / 8,
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
        network_bandwidth=200e9 / 8,
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
        network_bandwidth=400e9 / 8,
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
        network_bandwidth=400e9 / 8,
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
        network_bandwidth=400e9 / 8,
        peak_flops=_peaks(75e12, 1.1e15, 2.25e15, 2.25e15, 4.5e15),
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
        network_bandwidth=None,
        peak_flops={"bfloat16": 197e12},
        device_kinds=("TPU v5 lite", "TPU v5e"),
        target=TpuTarget("v5e", _2D),
        source="https://docs.cloud.google.com/tpu/docs/v5e",
    ),
    Accelerator(
        name="v5p",
        title="TPU v5p",
        memory_bytes=int(95.74 * GIB),
        memory_bandwidth=2765e9,
        link_bandwidth=100e9,
        link="one of 6 ICI links, to the next chip of a 3D torus",
        network_bandwidth=None,
        peak_flops={"bfloat16": 459e12},
        device_kinds=("TPU v5", "TPU v5p"),
        target=TpuTarget("v5p", _3D),
        source="https://docs.cloud.google.com/tpu/docs/v5p",
    ),
    Accelerator(
        name="v6e",
        title="TPU v6e",
        memory_bytes=int(31.25 * GIB),
        memory_bandwidth=1600e9,
        link_bandwidth=100e9,
        link="one of 4 ICI links, to the next chip of a 2D torus",
        network_bandwidth=None,
        peak_flops={"bfloat16": 918e12},
        device_kinds=("TPU v6 lite", "TPU v6e"),
        target=TpuTarget("v6e", _2D),
        source="https://docs.cloud.google.com/tpu/docs/v6e",
    ),
)
_TABLE = {accelerator.name: accelerator for accelerator in _ROWS}
