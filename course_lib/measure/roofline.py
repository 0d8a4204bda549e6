"""The roofline model: the least time that a step can take, and how near a measured step comes.

A step has FLOPs to do and bytes to move. A chip that does both at its peak rates, and at the
same time, needs the longer of the two times: a floor under the step time, never a forecast
(Williams, Waterman and Patterson, 2009, https://doi.org/10.1145/1498765.1498785). The memory
floor holds for arrays larger than the chip's L2 cache (6 MiB on an A5000, 50 MiB on an H100).
"""

import dataclasses

from course_lib.measure import hardware
from course_lib.measure.flops import FULL, Flops
from course_lib.measure.traffic import Traffic

# How many bfloat16 products a TPU takes for one of float32
# (https://docs.jax.dev/en/latest/jax.lax.html#jax.lax.Precision).
_PASSES = {"float32": 1, "float32 (high)": 3, FULL: 6}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time that a step can take on an accelerator, in seconds."""

    compute_seconds: float  # its matrix products at the accelerator's peak rate
    memory_seconds: float  # its bytes at the peak bandwidth of device memory
    floor_seconds: float  # the longer of the two, as if they overlapped entirely


def roofline(flops: Flops, traffic: Traffic, accelerator: hardware.Accelerator) -> Roofline:
    """Returns the least time that a step can take on an accelerator that it is compiled for.
    All FLOPs count, since recomputing takes time too, also what the compiler adds.
    """
    if traffic.added_flops is None:
        raise ValueError(
            "traffic.added_flops=None must be known: the compiler computes a convolution or a"
            " kernel again, whose FLOPs its program does not say; see measure.compiler"
        )
    counts = [*flops.total.items(), *traffic.added_flops.items()]
    times = (count / peak(accelerator, dtype) for dtype, count in counts)
    compute = sum(times, start=0.0)
    memory = traffic.bytes / accelerator.memory_bandwidth
    return Roofline(compute, memory, max(compute, memory))


def attainable_seconds(
    flops: Flops,
    traffic: Traffic,
    accelerator: hardware.Accelerator,
    link: hardware.HostLink | None = None,
) -> float:
    """Returns the time of a step whose kernels are good and do not overlap.

    Products run at 77% of the peak rate, then bytes move at 85% of the peak bandwidth, then
    bytes of the kind "offload" cross the link to the host, if one is given, in one direction at
    a time. It compares two ways to write one step, and is no measurement.
    """
    limits = roofline(flops, traffic, accelerator)
    seconds = limits.compute_seconds / 0.77 + limits.memory_seconds / 0.85
    if link is not None:
        seconds += traffic.by_kind().get("offload", 0) / link.bandwidth
    return seconds


def mfu(flops: Flops, seconds: float, accelerator: hardware.Accelerator | None) -> float | None:
    """Returns the model FLOPs utilization (MFU): the model's FLOPs as a share of the peak rate.

    Recomputed FLOPs do not count (Chowdhery et al., 2022, appendix B,
    https://arxiv.org/abs/2204.02311). `seconds` is the measured time of a step. None on an
    unknown accelerator (None).
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0: the measured time of a step")
    if accelerator is None:
        return None
    at_peak = sum(count / peak(accelerator, dtype) for dtype, count in flops.model.items())
    return at_peak / seconds


def peak(accelerator: hardware.Accelerator, dtype: str) -> float:
    """Returns the peak rate of products of a dtype, named as in `Flops`, in FLOP/s.

    XLA computes float32 products as TensorFloat-32 on GPUs that have it, unless
    `precision="highest"` asks for more, and as bfloat16 on TPUs, which have nothing else.
    """
    units = ("tensorfloat32", "float32", "bfloat16")[dtype == FULL :]
    is_float32 = dtype in _PASSES
    unit = next(u for u in units if u in accelerator.peak_flops) if is_float32 else dtype
    rate = accelerator.peak(unit)
    if rate is None:
        raise ValueError(
            f"no rate for {dtype} products of {accelerator.title} in accelerators.toml, only"
            f" for {', '.join(accelerator.peak_flops)}"
        )
    return rate / _PASSES.get(dtype, 1) if unit == "bfloat16" else rate
