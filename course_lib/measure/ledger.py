"""The ledger: lists the communication of a compiled step.

In a program for several devices, every communication is an instruction called a collective
(https://openxla.org/xla/operation_semantics). It names its arrays, and the groups of devices in
which it runs. For a GPU or TPU, XLA can split it into a start and an end: the instructions
between them overlap with it.

Compilers merge and split collectives: compare bytes, not numbers of operations. XLA:CPU
communicates bfloat16 as float32, and where the compiler partitions a program, it uses an
all-reduce in place of a reduce-scatter. (`jax.lax.psum_scatter`, written by hand, stays.)
"""

import collections
import dataclasses
import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from course_lib.measure import groups, hlo, origin
from course_lib.measure.program import read
from course_lib.measure.traffic import FREE, is_free, kind_of

# The kinds of collectives, and how often each of n devices sends (n-1)/n of the payload.
KINDS = {
    "all-reduce": 2,  # a reduce-scatter, then an all-gather
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,  # counts the space for rows; how many are sent depends on the data
    "collective-broadcast": 1,
    "collective-permute": 1,  # the 1 is not used: see `sent_bytes`
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """The arrays of one dtype that one instruction communicates."""

    kind: str  # one of KINDS
    # the axes of the mesh along which it runs; () if its groups fit none, None without a mesh
    axes: tuple[str, ...] | None
    dtype: str  # of the arrays as they are sent
    # bytes of its larger side on one device in one execution: the result of an all-gather, the
    # operand of all others (for a reduce-scatter the array before it is cut)
    payload_bytes: int
    # the least bytes that a device sends in one execution, rounded up (Patarasuk and Yuan,
    # 2009, https://doi.org/10.1016/j.jpdc.2008.09.002). With n devices in a group: 2 (n-1)/n of
    # the payload for an all-reduce, (n-1)/n for the others. For a permutation, the mean over
    # all devices, of which some may send nothing
    sent_bytes: int
    executions: int  # per step; in a loop, once per iteration
    # the kinds (`traffic.KINDS`) of the instructions that compute between its start and end, as
    # in ("matmul", "elementwise"); () if the devices wait for it
    overlapped: tuple[str, ...]
    group_size: int  # devices in a group; in a permutation, those along one chain
    scope: str  # where in the source it comes from; "" where XLA does not say


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The collectives of a step, in program order."""

    entries: tuple[Collective, ...]
    axis_names: tuple[str, ...] | None = None  # of the mesh

    def payload(self, kind: str | None = None, axis: str | Sequence[str] | None = None) -> int:
        """Returns the payload of all executions in bytes, of one of KINDS or of all.

        `axis` selects collectives along exactly this axis, or exactly these, so that the bytes
        of all combinations add up; `()` those that fit no axes.
        """
        return sum(entry.payload_bytes * entry.executions for entry in self._select(kind, axis))

    def sent(self, kind: str | None = None, axis: str | Sequence[str] | None = None) -> int:
        """Returns the bytes that a device sends; in permutations, the mean over devices."""
        return sum(entry.sent_bytes * entry.executions for entry in self._select(kind, axis))

    def overlapped_payload(
        self, kind: str | None = None, axis: str | Sequence[str] | None = None
    ) -> int:
        """Returns the part of `payload` that is sent during matmuls."""
        entries = self._select(kind, axis)
        return Ledger(tuple(e for e in entries if "matmul" in e.overlapped)).payload()

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each kind, axes, dtype and group size, those that send most first.
        Bytes are those of all executions; `overlapped` counts executions during which a device
        computes.
        """
        together: dict[Any, list[Collective]] = collections.defaultdict(list)
        for entry in self.entries:
            together[entry.kind, entry.axes, entry.dtype, entry.group_size].append(entry)
        rows = [
            {
                "kind": kind,
                "axes": None if axes is None else ", ".join(axes) or "fits none",
                "dtype": dtype,
                "devices": size,
                "executions": sum(entry.executions for entry in entries),
                "overlapped": sum(entry.executions for entry in entries if entry.overlapped),
                "payload_bytes": Ledger(tuple(entries)).payload(),
                "sent_bytes": Ledger(tuple(entries)).sent(),
            }
            for (kind, axes, dtype, size), entries in together.items()
        ]
        return sorted(rows, key=lambda row: -row["sent_bytes"])

    def _select(self, kind: str | None, axis: str | Sequence[str] | None) -> list[Collective]:
        if kind is not None:
            _check_kind(kind)
        entries = [entry for entry in self.entries if kind in (None, entry.kind)]
        if axis is None:
            return entries
        if self.axis_names is None:
            raise ValueError(f"axis={axis!r} needs a mesh: pass it to `ledger`")
        axes = {axis} if isinstance(axis, str) else set(axis)
        if not axes <= set(self.axis_names):
            raise ValueError(f"axis={axis!r} must name axes of the mesh: {self.axis_names}")
        return [entry for entry in entries if set(entry.axes or ()) == axes]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} must be a collective: one of {', '.join(KINDS)}")


def ledger(
    step: Any,
    mesh: jax.sharding.Mesh | None = None,
    *,
    taken: Mapping[str, int] | None = None,
) -> Ledger:
    """Lists the communication of a compiled program.

    A conditional counts as the branch that communicates most, and a loop that runs its body
    once or not at all (`pipeline_parallel.stage.only_if`) as one iteration each time. A
    collective along an axis of one device sends nothing and is left out.

    Args:
      step: compiled or lowered, for real, simulated or virtual devices.
      mesh: the mesh of the program's arrays. Without it, the entries have no axes.
      taken: how often per step each such loop runs its body, by the loop's name. The compiled
        program does not say; `slots.taken` computes it from a pipeline's schedule.
    """
    program = read(step).module
    if mesh is not None and mesh.size != program.devices:
        raise ValueError(
            f"mesh={dict(mesh.shape)} must be the program's: it has {mesh.size} devices, the"
            f" program {program.devices}; pass the mesh on which the arguments of the step lie"
        )

    def weight(i: hlo.Instruction) -> int:
        return sum(sum(_payload(j, program.devices).values()) for j in _inside(i))

    executed = hlo.scheduled(program, weight, taken)
    order = [i for i, _ in executed]
    for i in order:
        if i.opcode == "send" and "is_host_transfer=true" not in i.attributes:
            raise ValueError(
                f"the program uses send and recv ({i.name!r}), which the ledger cannot count:"
                " use `jax.lax.ppermute`, and leave XLA's options for collective-permute unset"
            )
    entries = (
        entry
        for position, (i, executions) in enumerate(executed)
        for collective in _inside(i)
        for entry in _entries(
            collective, executions, meanwhile(order, position), program.devices, mesh
        )
    )
    return Ledger(tuple(entries), None if mesh is None else tuple(mesh.axis_names))


def schedule_around(step: Any, kind: str) -> list[str]:
    """Lists the kernels of the first loop that starts a collective of a kind, else of the main
    program, in the order in which they run.

    For each kernel its kind (`traffic.KINDS`); for the start and the end of the collective its
    opcode, such as "all-gather-start". On a CPU no collective has a start.
    """
    _check_kind(kind)
    for computation in read(step).module.computations.values():
        opcodes = {i.opcode for i in computation.instructions}
        if f"{kind}-start" in opcodes:
            return [
                i.opcode if i.opcode.startswith(kind) else kind_of(i)
                for i in computation.instructions
                if i.opcode.startswith(kind) or i.opcode not in FREE
            ]
    raise ValueError(
        f"kind={kind!r}: the program has no {kind}-start. Only programs for a GPU or TPU have"
        " one, and only where something runs meanwhile"
    )


def _entries(
    i: hlo.Instruction,
    executions: int,
    meanwhile: list[hlo.Instruction],
    devices: int,
    mesh: jax.sharding.Mesh | None,
) -> list[Collective]:
    """Returns an entry for each dtype among the operands; none if nothing is sent."""
    kind, pairs = _kind(i), groups.pairs(i.attributes)
    members = groups.groups(i.attributes, devices)
    size = max(map(len, members), default=1)
    if kind == "collective-permute":
        share = fractions.Fraction(sum(source != target for source, target in pairs), devices)
    else:
        share = KINDS[kind] * fractions.Fraction(size - 1, size)
    if not share:
        return []
    along = groups.axes_of_pairs if pairs else groups.axes_of_groups
    computed = tuple(kind for kind in map(kind_of, meanwhile) if kind != "collective")
    return [
        Collective(
            kind=kind,
            axes=along(pairs or members, mesh.shape) if mesh else None,
            dtype=dtype,
            payload_bytes=payload,
            sent_bytes=math.ceil(share * payload),
            executions=executions,
            overlapped=computed,
            group_size=size,
            scope=origin.origin(i),
        )
        for dtype, payload in _payload(i, devices).items()
    ]


def _kind(i: hlo.Instruction) -> str:
    return i.opcode.removesuffix("-start")


def _inside(i: hlo.Instruction) -> list[hlo.Instruction]:
    """Returns the collectives that an instruction is or contains; often none."""
    return [inner for inner in origin.body(i) if _kind(inner) in KINDS]


def _payload(i: hlo.Instruction, devices: int) -> Mapping[str, int]:
    """Returns the bytes of one execution by dtype."""
    gathers = _kind(i) == "all-gather"
    copies = max(map(len, groups.groups(i.attributes, devices))) if gathers else 1
    # The other operands of a ragged all-to-all are offsets and sizes.
    operands = i.operands[:1] if _kind(i) == "ragged-all-to-all" else i.operands
    payload: collections.Counter[str] = collections.Counter()
    for shape in (shape for operand in operands for shape in operand.shapes):
        payload[shape.dtype] += copies * shape.bytes
    return payload


def meanwhile(order: list[hlo.Instruction], position: int) -> list[hlo.Instruction]:
    """Lists what works between a collective's start and end; operations on scalars do not."""
    start = order[position]
    if not start.opcode.endswith("-start"):  # blocking, or wrapped in an `async-start`
        wrappers = [
            i
            for i in order[:position]
            if i.opcode == "async-start" and start in i.called[0].instructions
        ]
        if not wrappers:
            return []
        start = wrappers[-1]
    between = []
    for i in order[position + 1 :]:
        if i.opcode.endswith("-done") and _first(i) is start:
            break
        if not is_free(i) and any(array.elements > 1 for array in (i, *i.operands)):
            between.append(i)
    return between


def _first(done: hlo.Instruction) -> hlo.Instruction:
    """Returns the instruction that started what this one ends."""
    start = done.operands[0]
    return _first(start) if start.opcode.endswith("-update") else start
