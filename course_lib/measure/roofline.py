"""How fast a step could be at best: the roofline model, and how near a measured step comes to
it.

A step has to do its FLOPs and to move its bytes. A chip that does both at its peak rates, and
at the same time, needs the longer of the two times. No program gets there: this is a floor
under the step time, never a forecast.

The floor of the memory holds where arrays are larger than the chip's L2 cache (6 MiB on an
A5000, 50 MiB on an H100). An array that fits may still be there when the next instruction reads
it; it is counted as if it were moved all the same. (Williams, Waterman and Patterson, 2009,
https://doi.org/10.1145/1498765.1498785)
"""

import dataclasses

from course_lib.measure import hardware
from course_lib.measure.flops import Flops
from course_lib.measure.hardware import Accelerator
from course_lib.measure.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time that a step can take on an accelerator, in seconds.

    Attributes:
      compute_seconds: its matrix products at the accelerator's peak rate.
      memory_seconds: its bytes at the peak bandwidth of device memory.
      floor_seconds: the longer of the two, as if they overlapped entirely.
    """

    compute_seconds: float
    memory_seconds: float
    floor_seconds: float

    @property
    def bound(self) -> str:
        """What the floor comes from: "compute" or "memory"."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    def __str__(self) -> str:
        compute, memory, floor = (
            1e3 * s for s in (self.compute_seconds, self.memory_seconds, self.floor_seconds)
        )
        return (
            f"at least {floor:.4g} ms (a floor, not a forecast): products {compute:.4g} ms,"
            f" memory {memory:.4g} ms"
        )


def roofline(
    flops: Flops,
    traffic: Traffic,
    accelerator: Accelerator,
    *,
    float32_precision: str | None = None,
) -> Roofline:
    """Returns the floor under a step's time on one accelerator.

    Args:
      flops: what the step computes; `total` counts, since what is recomputed takes time too.
      traffic: what the step compiled for this accelerator moves.
      accelerator: a row of `hardware`.
      float32_precision: how float32 products are computed, a name of `accelerator.peak_flops`.
        By default "tensorfloat32" where the accelerator has it, as XLA does without
        `precision="highest"`, else "float32", and "bfloat16" on a TPU, which has nothing else.

    Raises:
      ValueError: if the accelerator has no unit for the dtype of a product.
    """
    compute = sum(
        count / peak(accelerator, dtype, float32_precision)
        for dtype, count in flops.total.items()
    )
    memory = traffic.bytes / accelerator.memory_bandwidth
    return Roofline(compute, memory, max(compute, memory))


def mfu(
    flops: Flops,
    seconds: float,
    accelerator: Accelerator | None,
    *,
    float32_precision: str | None = None,
) -> float | None:
    """Returns the model FLOPs utilization: the part of the peak rate that went into what the
    model needs.

    Recomputed FLOPs do not count (Chowdhery et al., 2022, appendix B,
    https://arxiv.org/abs/2204.02311).

    Args:
      flops: of the step.
      seconds: measured step time.
      accelerator: what it ran on, None if unknown.
      float32_precision: as of `roofline`.

    Returns:
      A fraction of 1, or None on an unknown accelerator.

    Raises:
      ValueError: if the accelerator has no unit for the dtype of a product, or no time went by.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0: the measured time of a step")
    if accelerator is None:
        return None
    at_peak = sum(
        count / peak(accelerator, dtype, float32_precision)
        for dtype, count in flops.model.items()
    )
    return at_peak / seconds


def peak(accelerator: Accelerator, dtype: str, float32_precision: str | None = None) -> float:
    """Returns the peak rate of products of a dtype, as XLA computes them, in FLOP/s.

    Args:
      accelerator: a row of `hardware`.
      dtype: of the operands.
      float32_precision: as of `roofline`.

    Raises:
      ValueError: if the accelerator has no unit for the dtype.
    """
    hardware.check(accelerator)
    if dtype == "float32":
        units = ("tensorfloat32", "float32", "bfloat16")  # a TPU multiplies float32 as bfloat16
        default = next(unit for unit in units if unit in accelerator.peak_flops)
        dtype = float32_precision or default
    rate = accelerator.peak(dtype)
    if rate is None:
        raise ValueError(
            f"dtype={dtype!r} must be one of {', '.join(accelerator.peak_flops)}:"
            f" {accelerator.title} has no unit for products of it, and what it does instead has"
            " no peak; choose another dtype or accelerator"
        )
    return rate
