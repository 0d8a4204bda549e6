"""The table of accelerators, and the links between a GPU and the memory of its host."""

import dataclasses
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

import jax

from course_lib.measure.hardware.accelerator import Accelerator, GpuTarget, TpuTarget

_FILE = pathlib.Path(__file__).with_name("accelerators.toml")


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


@dataclasses.dataclass(frozen=True)
class HostLink:
    """A link between a GPU and its host."""

    name: str
    title: str  # for pictures and tables
    bandwidth: float  # bytes/s in one direction; both directions run at the same time
    source: str


# These are the rates of the wires; copies reach 80 to 90% of them. The sources give the sum of
# both directions: 64, 128 and 900 GB/s.
HOST_LINKS = {
    name: HostLink(name, title, bandwidth, source)
    for name, title, bandwidth, source in (
        (
            "pcie4",
            "PCIe 4.0 x16",
            32e9,
            "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet.pdf",
        ),
        (
            "pcie5",
            "PCIe 5.0 x16",
            64e9,
            "https://www.nvidia.com/en-us/data-center/h100/",
        ),
        (
            "nvlink-c2c",
            "NVLink-C2C of a Grace Hopper",
            450e9,
            "https://developer.nvidia.com/blog/nvidia-grace-hopper-superchip-architecture-in-depth/",
        ),
    )
}


def host_link(name: str) -> HostLink:
    """Returns a link between a GPU and its host."""
    if name not in HOST_LINKS:
        raise ValueError(f"name={name!r} must be a link of the table: {', '.join(HOST_LINKS)}")
    return HOST_LINKS[name]


def _row(name: str, fields: Mapping[str, Any]) -> Accelerator:
    fields = dict(fields)
    gpu, tpu = fields.pop("gpu", None), fields.pop("tpu", None)
    target: GpuTarget | TpuTarget
    if gpu:
        target = GpuTarget(**gpu | {"compute_capability": tuple(gpu["compute_capability"])})
    else:
        sold = {math.prod(map(int, shape.split("x"))): shape for shape in tpu["layouts"]}
        target = TpuTarget(tpu["prefix"], sold)
    fields["device_kinds"] = tuple(fields["device_kinds"])
    return Accelerator(name=name, target=target, **fields)


_TABLE = {
    name: _row(name, fields)
    for name, fields in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}
