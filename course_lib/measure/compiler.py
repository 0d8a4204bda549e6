"""Compares a step as it is written with the program that the compiler makes of it.

XLA gives the temporaries of a program for a GPU a budget: 95% of (80% of the memory - arguments
- results + donated bytes). If they would take more, even where they will lie in the results'
memory, it computes some of them again instead of keeping them (`HloRematerialization`,
https://github.com/openxla/xla/blob/main/xla/hlo/transforms/simplifiers/hlo_rematerialization.h).
`jax.config.update("jax_compiler_enable_remat_pass", False)` switches that off.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from course_lib.measure import hlo, origin
from course_lib.measure.ledger import meanwhile
from course_lib.measure.memory import Memory, planned
from course_lib.measure.program import read
from course_lib.measure.traffic import flops_of, is_free, kind_of, products, recomputed
from course_lib.measure.units import gib

_TRANSFERS = ("collective", "offload")


@dataclasses.dataclass(frozen=True)
class Clone:
    """An instruction that computes again what another one computes, too."""

    name: str
    kind: str  # one of `traffic.KINDS`
    scope: str  # where in the source it comes from; "" where XLA does not say
    bytes: int  # that one execution writes


@dataclasses.dataclass(frozen=True)
class Compiler:
    """The written step beside the program that runs. None is unknown."""

    clones: tuple[Clone, ...]  # that XLA's rematerialization added, in program order
    rewritten_bytes: int | None  # that they write per step
    added_flops: Mapping[str, int] | None  # of their matrix products, by dtype as in `Flops`
    flops: Mapping[str, int] | None  # of all matrix products that run, on one device
    # matrix products in the text of both programs, where a loop's body occurs once
    written: int | None  # as JAX wrote it; None for a step that was compiled elsewhere
    compiled: int
    executions: int | None  # of the compiled ones, per step
    fusions: int
    donated_bytes: int  # of results that overwrite donated arguments
    transfers: int | None  # collectives and copies between host and device, per step
    overlapped: int | None  # those during which other work runs
    temporaries: int  # bytes, as `Memory.temporaries`
    # XLA rematerializes where temporaries would take more bytes; None without the plan of a
    # GPU's program, or with the pass switched off
    budget: int | None

    def __str__(self) -> str:
        return "\n".join(
            [
                self.recomputation or "XLA recomputes nothing",
                f"matrix products: {_known(self.written)} written, {self.compiled:,} compiled;"
                f" executed per step: {_known(self.executions)}",
                f"{self.fusions:,} fusions; donation saves {gib(self.donated_bytes)}",
                f"collectives and host copies per step: {_known(self.transfers)};"
                f" beside other work: {_known(self.overlapped)}",
                f"temporaries: {gib(self.temporaries)}; XLA recomputes above:"
                f" {'unknown' if self.budget is None else gib(self.budget)}",
            ]
        )

    @property
    def recomputation(self) -> str:
        """One line on what XLA computes again, or "" if that is nothing."""
        if not self.clones:
            return ""
        products = [clone for clone in self.clones if clone.kind == "matmul"]
        line = f"XLA recomputes {len(self.clones)} instructions"
        if products:
            where = collections.Counter(origin.words(clone.scope) for clone in products)
            listed = "; ".join(f"{n} of {part}" for part, n in where.most_common())
            line += f", {len(products)} of them matrix products ({listed})"
        if self.rewritten_bytes is not None:
            line += f"; {gib(self.rewritten_bytes)} written again"
        return line if self.more_flops is None else f"{line}, {self.more_flops:.1%} more FLOPs"

    @property
    def more_flops(self) -> float | None:
        """The FLOPs of the clones as a share of all others."""
        if not self.flops or self.added_flops is None:
            return None
        added = sum(self.added_flops.values())
        return added / (sum(self.flops.values()) - added)


def compiler(step: Any) -> Compiler:
    """Compares what runs with what was written, for a step that is lowered or compiled.

    Recomputation by `jax.checkpoint` counts as written. The program for a GPU that is there can
    recompute other instructions than that for a virtual one, since autotuning chooses kernels.
    """
    program = read(step)
    module, plan, memory = program.module, program.plan, planned(program)
    known = True
    try:
        executed = hlo.scheduled(module, lambda i: len(products(i)))
    except ValueError:  # a loop that stops on a condition on data
        known, executed = False, []
    again, order = recomputed(module), [i for i, _ in executed]
    transfers = [
        (n, any(kind_of(j) not in _TRANSFERS for j in meanwhile(order, position)))
        for position, (i, n) in enumerate(executed)
        if kind_of(i) in _TRANSFERS and not is_free(i)
    ]
    per_step: dict[str, Any] = {
        "rewritten_bytes": sum(i.bytes * n for i, n in executed if i in again),
        "added_flops": flops_of((i, n) for i, n in executed if i in again),
        "flops": flops_of(executed),
        "executions": sum(n * len(products(i)) for i, n in executed),
        "transfers": sum(n for n, _ in transfers),
        "overlapped": sum(n for n, beside in transfers if beside),
    }
    return Compiler(
        clones=tuple(Clone(i.name, kind_of(i), origin.origin(i), i.bytes) for i in again),
        written=_products(hlo.parse(plan.written).entry) if plan else None,
        compiled=_products(module.entry),
        fusions=sum(i.opcode in origin.FUSIONS for i in module.instructions.values()),
        donated_bytes=memory.aliased,
        temporaries=memory.temporaries,
        budget=_budget(plan.config, memory) if plan else None,
        **(per_step if known else dict.fromkeys(per_step)),
    )


def _known(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _products(computation: hlo.Computation) -> int:
    """Counts the matrix products of a computation and of those that it calls."""
    called = (
        c for i in computation.instructions if i.opcode not in origin.FUSIONS for c in i.called
    )
    return sum(len(products(i)) for i in computation.instructions) + sum(map(_products, called))


def _budget(config: str, memory: Memory) -> int | None:
    """Returns the bytes that XLA leaves to temporaries (`GetSchedulerMemoryLimit`,
    https://github.com/openxla/xla/blob/main/xla/service/gpu/gpu_hlo_schedule.cc; the pass takes
    the results off that limit, while its warning, "can't reduce memory use", includes them).
    """
    size, slop = "device_memory_size", "xla_gpu_memory_limit_slop_factor"
    found = dict(re.findall(rf"^( *(?:{size}|{slop})): (\d+)$", config, re.M))
    if f"  {size}" not in found or '"rematerialization"' in config:
        return None  # not a GPU, or the pass is switched off
    base = int(found.get(size, int(found[f"  {size}"]) * 80 // 100))
    free = base - memory.arguments - memory.outputs + memory.aliased
    return max(0, free * int(found[f"  {slop}"]) // 100)
