"""Accelerators: what they hold, what they move, what they compute, and what a compiler must
know to target them.

The figures of each row come from its `source`. Three things to know when reading such
documents:

- Sparse or dense. NVIDIA quotes most tensor-core rates "with sparsity" (two of every four
  weights are zero), which is twice the dense rate. This table holds dense rates: the ones that
  a training step could reach.
- GB or GiB. An H100's "80 GB" are about 80 GiB of chips, of which firmware and driver keep a
  little. `memory_bytes` is what is left for a program: for GPUs what the CUDA driver reports,
  for TPUs what its compiler calls available.
- One direction or both. NVLink's "900 GB/s" count both directions. `link_bandwidth` is one
  direction. `network_bandwidth`, too.
"""

from course_lib.measure.hardware.accelerator import (
    PRECISIONS,
    Accelerator,
    GpuTarget,
    TpuTarget,
)
from course_lib.measure.hardware.table import check, cores, get, names, recognize

__all__ = [
    "PRECISIONS",
    "Accelerator",
    "GpuTarget",
    "TpuTarget",
    "check",
    "cores",
    "get",
    "names",
    "recognize",
]
