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

from course_lib.measure.hardware.accelerator import (
    PRECISIONS,
    Accelerator,
    GpuTarget,
    TpuTarget,
)
from course_lib.measure.hardware.table import (
    HOST_LINKS,
    HostLink,
    check,
    cores,
    get,
    host_link,
    names,
    recognize,
)

__all__ = [
    "HOST_LINKS",
    "PRECISIONS",
    "Accelerator",
    "GpuTarget",
    "HostLink",
    "TpuTarget",
    "check",
    "cores",
    "get",
    "host_link",
    "names",
    "recognize",
]
