"""The costs of a submission, compiled for a GPU that is not there.

The *real step* is the submission's step for the large model, `model.REAL`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from course_lib import measure
from course_lib.lessons.check.answers import WrongAnswer, in_one_line, require
from course_lib.lessons.game import model
from course_lib.lessons.game.setups import FIRST, Setup
from course_lib.measure import hardware, virtual
from course_lib.measure.roofline import peak

# The target for memory. Parameters, moments and gradients alone are 2.4 GiB.
SMALL_PEAK = int(3.5 * measure.GIB)

# Bytes that a fast step may move. The target for the time is that of these bytes and of the
# first step's FLOPs.
FAST_BYTES = 160 * 10**9

# The link between a GPU and its host, by name in `hardware.HOST_LINKS`.
LINK_OF = dict.fromkeys(("l4", "a5000", "a100-40", "a100-80"), "pcie4") | {"h100": "pcie5"}

SECONDS, SECONDS_PER_LINE = 7, 0.003  # to compile a lowered program, on two idle cores


@dataclasses.dataclass(frozen=True)
class Score:
    """The costs of one submission on one GPU."""

    name: str
    gpu: str  # name in `hardware`
    peak: int  # bytes of the GPU's memory
    seconds: float  # attainable time of the step: `measure.attainable_seconds`
    extra_flops: float  # beyond the first step's, as a share of these
    host_bytes: int  # moved per step between host and GPU, both directions summed
    optimizer: str = "adamw"
    moments: str = "device"

    @property
    def fits(self) -> bool:
        return self.peak <= limit(self.gpu)

    @property
    def small(self) -> bool:
        return self.fits and self.peak <= SMALL_PEAK

    @property
    def fast(self) -> bool:
        return self.fits and self.seconds <= fast_seconds(self.gpu)


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled program behind a score, for hints."""

    flops: measure.Flops
    traffic: measure.Traffic
    aliased: int  # bytes of the old state that the new state overwrites
    largest: Any  # the largest temporary array at the peak; None if there is none
    recomputed: str = ""  # what XLA computes again


@dataclasses.dataclass(frozen=True)
class Level:
    """A target of Part III: memory and time at once."""

    notebook: int
    name: str
    peak: int  # bytes of the GPU's memory
    traffic: int  # bytes that the step may move; its time follows, as with `FAST_BYTES`
    optimizer: str | None = "adamw"  # the one to train with; None: any

    @property
    def move(self) -> str:
        """The name of a submission for this level, in the cell of its notebook."""
        return f"move {self.notebook - 8}"

    def seconds(self, gpu: str) -> float:
        return seconds_for(self.traffic, gpu)

    def is_reached(self, one: Score) -> bool:
        return (
            one.fits
            and one.peak <= self.peak
            and one.seconds <= self.seconds(one.gpu)
            and self.optimizer in (None, one.optimizer)
        )


# In order, for the GPUs of `LINK_OF`. The reference moves need a little less memory and time.
LEVELS = (
    Level(15, "loss in one pass", SMALL_PEAK, 225 * 10**9),
    Level(16, "small and fast", SMALL_PEAK, FAST_BYTES),
    Level(17, "lighter moments", int(2.6 * measure.GIB), FAST_BYTES, None),
    Level(18, "AdamW, moments on the host", int(2.1 * measure.GIB), 200 * 10**9),
    Level(19, "AdamW, gradients in place", int(1.7 * measure.GIB), 285 * 10**9),
)


def open_levels(submissions: Sequence[Score]) -> list[Level]:
    """Returns the levels that submissions for one GPU reached or were named for, and the next
    one.
    """
    names, coming = {one.name for one in submissions}, next_level(submissions)
    return [
        level
        for level in (LEVELS if submissions[0].gpu in LINK_OF else ())
        if level is coming or level.move in names or is_reached(level, submissions)
    ]


def next_level(submissions: Sequence[Score]) -> Level | None:
    """Returns the level that the last submission was named for and misses; else the first one
    after those that are reached. None before the targets of Part I are reached, or any level.
    """
    last = submissions[-1]
    if last.gpu not in LINK_OF:
        return None
    for level in LEVELS:
        if level.move == last.name and not level.is_reached(last):
            return level
    small, fast = (any(getattr(one, goal) for one in submissions) for goal in ("small", "fast"))
    reached = [i for i, level in enumerate(LEVELS, 1) if is_reached(level, submissions)]
    if not reached and not (small and fast):
        return None
    return next(iter(LEVELS[max(reached, default=0) :]), None)


def is_reached(level: Level, submissions: Sequence[Score]) -> bool:
    return any(level.is_reached(one) for one in submissions)


def limit(gpu: str) -> int:
    """Returns the bytes of a GPU's memory that a step may use."""
    return hardware.get(gpu).usable_bytes


def fast_seconds(gpu: str) -> float:
    """Returns the target for the time."""
    return seconds_for(FAST_BYTES, gpu)


def seconds_for(traffic: int, gpu: str) -> float:
    """Returns the attainable time of the first step's FLOPs in 16 bits and these bytes."""
    half = measure.Flops({half_dtype(gpu): reference_flops()}, {})
    return measure.attainable_seconds(half, measure.Traffic(traffic, ()), hardware.get(gpu))


def half_dtype(gpu: str) -> str:
    """Returns the 16-bit dtype that a GPU can multiply: float16 on a T4, else bfloat16."""
    return "bfloat16" if hardware.get(gpu).peak("bfloat16") else "float16"


@functools.cache
def reference_flops() -> int:
    return sum(measure.flops(model.first_step(model.REAL), *arguments()).total.values())


def arguments(setup: Setup = FIRST) -> tuple[Any, Any]:
    """Returns the abstract state and batch of the real step; `setup` places the moments."""
    optimizer = setup.config(model.REAL).optimizer
    params = jax.eval_shape(lambda: model.init(model.REAL, jax.random.key(0)))

    def init(params: Any) -> Any:
        return setup.place(optimizer, optimizer.init(params))

    state = params, virtual.shapes(init, params)
    shape = model.REAL.batch_size, model.REAL.length + 1
    return state, jax.ShapeDtypeStruct(shape, jnp.int32)


def state_bytes(setup: Setup = FIRST) -> int:
    state, _ = arguments(setup)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def compile_step(
    make_step: Any, gpu: str, name: str, setup: Setup = FIRST
) -> tuple[Score, Program]:
    """Compiles a learner's real step for a virtual GPU, after an estimate of how long this
    takes. Raises WrongAnswer if it cannot be traced or compiled.
    """
    accelerator = hardware.get(gpu)
    [device] = virtual.devices(gpu)
    link = hardware.host_link(LINK_OF[gpu]) if gpu in LINK_OF else None
    require(
        link or setup.moments == "device",
        f"moments='host' needs a GPU whose link to the host is known: one of"
        f" {', '.join(LINK_OF)}.",
    )
    state, batch = virtual.abstract(arguments(setup), device)
    try:
        step = make_step(setup.config(model.REAL))
        step = step if hasattr(step, "lower") else jax.jit(step)
        flops = measure.flops(step, state, batch)
        traced = step.trace(state, batch)
        lowered = traced.lower()
    except Exception as error:
        if reason := virtual.why_not_lowered(error):
            raise WrongAnswer(f"The step does not compile: {reason}.") from error
        raise WrongAnswer(
            f"The small step works, the real one raised {in_one_line(error)}. Does it depend"
            " on the small sizes? Take all sizes from `config`."
        ) from error
    for dtype in flops.total:
        try:
            peak(accelerator, dtype)
        except ValueError:
            raise WrongAnswer(
                f"An {accelerator.title} has no unit for products of {dtype}, so the program"
                f" does not compile for it. Its 16-bit dtype is {half_dtype(gpu)}. In float16,"
                " small gradients need a loss scale (notebook 1)."
            ) from None
    shapes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    require(
        str(shapes(lowered.out_info[0])) == str(shapes(state)),
        "The real step returns a state of other shapes or dtypes than it gets.",
    )
    require(
        not passed_through(traced.jaxpr.jaxpr, len(jax.tree.leaves(state))),
        "The real step returns an array of the old state. Each step changes all of them.",
    )
    # Repeated FLOPs do not count. The reference moves have 1.00 to 1.06 times these;
    # a step that skips all masked scores would have 0.93.
    missing = 1 - sum(flops.model.values()) / reference_flops()
    few = "fewer FLOPs than the first one. Does it compute each token, layer and gradient?"
    require(missing < 0.08, f"The real step has {missing:.0%} {few}")
    seconds = SECONDS + SECONDS_PER_LINE * len(lowered.as_text().splitlines())
    print(
        f"Compiling for an {accelerator.title} that is not there: about {seconds:.0f} s.",
        flush=True,
    )
    heap = measure.heap(lowered)
    changes = measure.compiler(heap)
    if changes.flops is not None:  # without kernels: attention's are 0.13 of all
        missing = 1 - sum(changes.flops.values()) / reference_flops()
        require(
            missing < 0.15, f"XLA drops what no result needs: the rest has {missing:.0%} {few}"
        )
    traffic = measure.traffic(heap.compiled)
    temporaries = (array for array in heap.arrays if array.kind == "temporary")
    score = Score(
        name=name,
        gpu=gpu,
        peak=heap.peak,
        seconds=measure.attainable_seconds(flops, traffic, accelerator, link),
        extra_flops=sum(flops.total.values()) / reference_flops() - 1,
        host_bytes=traffic.by_kind().get("offload", 0),
        optimizer=setup.optimizer,
        moments=setup.moments,
    )
    aliased = measure.memory(heap.compiled).aliased
    largest = next(temporaries, None)
    return score, Program(flops, traffic, aliased, largest, changes.recomputation)


def passed_through(jaxpr: Any, first: int) -> bool:
    """Whether one of the first results is an argument."""
    while [equation.primitive.name for equation in jaxpr.eqns] in (["jit"], ["pjit"]):
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    return any(result in jaxpr.invars for result in jaxpr.outvars[:first])
