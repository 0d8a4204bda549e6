"""Counts the bytes that a compiled program moves through device memory.

Between two instructions every array lies in device memory: each instruction reads its operands
and writes its results there. A fusion saves traffic by doing many operations in one pass over
its operands. Real traffic is lower where an array is still in the L2 cache, and higher where a
kernel reads an operand more than once, as large matrix products do.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from course_lib.measure import hlo, origin
from course_lib.measure.flops import FULL
from course_lib.measure.program import read

# The kinds of moves.
KINDS = (
    "matmul",  # matrix products and convolutions, with what XLA fused into them
    "dynamic-update-slice",  # one slice of a larger array is written: how a scan keeps results
    "dynamic-slice",  # one slice of a larger array is read out: how a scan gets its inputs
    # rows picked, written or added to by index: embeddings and their gradients
    "gather/scatter",
    "reduce",  # sums, maxima, softmax, normalization, with what XLA fused into them
    "elementwise",
    "copy",  # copies, transposes
    "fill",  # constants written: zeros before a loop
    "collective",
    "offload",  # between the host's memory and the device's; the device's side is counted
    "kernel",  # kernels written by hand, in Pallas or Triton; XLA cannot look inside
    "other",  # sorts, random bits, calls of libraries that do no matrix products
)

FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call async-start"
    " after-all opt-barrier add-dependency partition-id replica-id".split()
)
_SOLVERS = ("__cublas$triangularSolve",)
_LIBRARIES = ("__cublas$", "__cublas$lt", "__cudnn$")  # what XLA calls of cuBLAS and cuDNN
_KERNELS = ("__gpu$xla.gpu.triton", "triton_kernel_call", "mosaic_gpu", "tpu_custom_call")
_COLLECTIVES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "send", "recv")
_OTHER = frozenset(
    "custom-call sort rng-bit-generator topk fft triangular-solve cholesky".split()
)
_RENAMES = frozenset("parameter constant bitcast reshape get-tuple-element tuple".split())
_COPIES = _RENAMES.union(
    "copy copy-start transpose convert slice dynamic-slice".split(),
    "concatenate pad reverse".split(),
)
# XLA marks a copy of an instruction: `dot.5.remat`, `dot.5.remat2`, `dot.remat.1.remat`.
_CLONE = re.compile(r"\.remat\d*(?=\.|$)")
_HIGHEST = re.compile(r"operand_precision\W+(\w+\W+)?highest", re.I)
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d",]*)')


@dataclasses.dataclass(frozen=True)
class Move:
    """The traffic of one instruction."""

    op: str  # the instruction's name
    kind: str  # one of KINDS
    bytes: int  # read and written, in all its executions
    executions: int
    scope: str  # where in the source it comes from; empty where XLA does not say


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes read and written by a program."""

    bytes: int
    moves: tuple[Move, ...]  # in program order
    # of the matrix products that XLA computes again (`recomputed`), by dtype; None if unknown
    added_flops: Mapping[str, int] | None = dataclasses.field(default_factory=dict)

    def by_kind(self) -> dict[str, int]:
        """Returns the bytes of each kind that occurs, most first."""
        totals: collections.Counter[str] = collections.Counter()
        for move in self.moves:
            totals[move.kind] += move.bytes
        return dict(totals.most_common())


def traffic(step: Any) -> Traffic:
    """Counts the bytes that a step, compiled or lowered, moves through one device's memory.

    Adds the operands and results of every instruction, times its executions. Three operations
    count as the part of an array that they touch: an update in place moves the slice, a fusion
    that slices an operand reads the slice, and a gather reads the rows. A conditional counts as
    its most expensive branch. On a CPU, caches save much of this traffic.
    """
    program = read(step)
    program.check_nothing_hidden()
    executed = hlo.scheduled(program.module, weight=bytes_of)
    moved = ((i, n, n * bytes_of(i)) for i, n in executed)
    moves = tuple(
        Move(i.name, kind_of(i), bytes, n, origin.origin(i)) for i, n, bytes in moved if bytes
    )
    again = recomputed(program.module)
    added = flops_of((i, n) for i, n in executed if i in again)
    return Traffic(sum(move.bytes for move in moves), moves, added)


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """Bytes that a program sends over the link between the host and one device."""

    to_host: int
    to_device: int


def host_traffic(step: Any) -> HostTraffic:
    """Counts the bytes that a program moves between the memories of host and device: both
    directions of the kind "offload" of `traffic`.
    """
    totals = {True: 0, False: 0}
    for i, n in hlo.scheduled(read(step).module, weight=bytes_of):
        if kind_of(i) == "offload":
            root = next((part for part in origin.body(i) if part.is_root), i)
            # the shapes of a copy-start are the result, the operand, and a semaphore
            shapes = root.shapes[:1] if root.opcode == "copy-start" else root.shapes
            to_host = any(shape.space == hlo.HOST_SPACE for shape in shapes)
            totals[to_host] += bytes_of(i) * n
    return HostTraffic(to_host=totals[True], to_device=totals[False])


def recomputed(module: hlo.Module) -> list[hlo.Instruction]:
    """Returns the instructions that XLA's rematerialization added to a program.

    XLA marks them `.remat`. It marks two more kinds: instructions that it only moved, whose
    original is gone, and those that move no bytes.
    """
    marked = [i for i in module.instructions.values() if _CLONE.search(i.name)]
    there = module.instructions.keys() - {i.name for i in marked}
    again = []
    for i in marked:
        original = _CLONE.split(i.name)[0]
        if original in there and not is_free(i):
            again.append(i)
        there.add(original)  # without its original, the first of several clones was moved
    return again


def products(i: hlo.Instruction) -> list[hlo.Instruction]:
    """Returns the matrix products that an instruction is or that are fused into it."""
    return [j for j in origin.body(i) if is_product(j)]


def flops_of(executed: Iterable[tuple[hlo.Instruction, int]]) -> dict[str, int] | None:
    """Returns the FLOPs of the matrix products among (instruction, executions), by the dtype of
    their operands; None with a convolution or a kernel, whose FLOPs the program does not say.
    """
    total: collections.Counter[str] = collections.Counter()
    for i, n in executed:
        for product in products(i):
            contracted = _CONTRACTED.search(product.attributes)
            if not contracted:
                return None
            left, axes = product.operands[0].shapes[0], re.findall(r"\d+", contracted[1])
            inner = math.prod(left.dims[int(axis)] for axis in axes)
            full = left.dtype == "float32" and _HIGHEST.search(product.attributes)
            total[FULL if full else left.dtype] += 2 * n * inner * product.shapes[0].elements
        if kind_of(i) == "kernel":
            return None
    return dict(total)


def is_free(i: hlo.Instruction) -> bool:
    return i.opcode in FREE or i.opcode.endswith(("-done", "-update"))


def bytes_of(instruction: hlo.Instruction) -> int:
    """Returns the bytes that one execution reads and writes."""
    if is_free(instruction):
        return 0
    if instruction.opcode in origin.FUSIONS:
        return _fused_bytes(instruction.called[0].instructions, instruction.operands)
    inputs = {
        id(i): dataclasses.replace(i, opcode="parameter", operands=())
        for i in instruction.operands
    }
    alone = dataclasses.replace(
        instruction, operands=tuple(inputs[id(i)] for i in instruction.operands), is_root=True
    )
    return _fused_bytes((*inputs.values(), alone))


def _fused_bytes(
    instructions: tuple[hlo.Instruction, ...], operands: tuple[hlo.Instruction, ...] = ()
) -> int:
    """Walks from the results of a fused computation back to its parameters, and notes how many
    elements of each array are needed. An operand passed as two parameters is read once.
    """
    root = next(i for i in instructions if i.is_root)
    results = [origin.behind(i) for i in (root.operands if root.opcode == "tuple" else (root,))]
    needed = dict.fromkeys(map(id, instructions), 0.0)
    needed.update({id(i): i.elements for i in results})
    written = 0
    for i in reversed(instructions):
        in_place = i in results and _updates_parameter(i)
        written += _bytes_of_result(i, in_place) if i in results else 0
        for position, operand in enumerate(i.operands):
            if position == 0 and i.opcode in ("dynamic-slice", "slice", "gather"):
                elements = needed[id(i)]
            elif position == 0 and in_place:
                # Changed in place, the operand is not read; but scatter reads where it adds.
                elements = i.operands[-1].elements if _adds(i) else 0
            else:
                elements = operand.elements * needed[id(i)] / max(i.elements, 1)
            needed[id(operand)] = min(operand.elements, needed[id(operand)] + elements)
    read: dict[int, float] = {}
    for i in (i for i in instructions if i.opcode == "parameter"):
        array = id(operands[int(i.literal)]) if operands else id(i)
        size = _on_device(*i.shapes)
        read[array] = min(size, read.get(array, 0) + size * needed[id(i)] / max(i.elements, 1))
    return written + round(sum(read.values()))


def _bytes_of_result(i: hlo.Instruction, in_place: bool) -> int:
    if in_place:
        part = i.operands[-1 if i.opcode == "scatter" else 1]
        return part.bytes if _on_device(*i.shapes) else 0
    # cuBLAS and cuDNN append scratch memory to their results; the shapes of a copy-start are
    # the result, the operand, and a semaphore.
    if i.target.startswith(_LIBRARIES) or i.opcode == "copy-start":
        return _on_device(i.shapes[0])
    # The shapes are operands, results, and semaphores.
    if i.opcode.endswith("-start") and len(i.shapes) > len(i.operands):
        return _on_device(*i.shapes[len(i.operands) : 2 * len(i.operands)])
    return _on_device(*i.shapes)


def _on_device(*shapes: hlo.Shape) -> int:
    return sum(shape.bytes for shape in shapes if shape.space != hlo.HOST_SPACE)


def _adds(i: hlo.Instruction) -> bool:
    """Whether an instruction is a scatter that reads what it overwrites, unlike `.set`."""
    if i.opcode != "scatter":
        return False
    result = origin.behind(i.calls["to_apply"][0].root)
    return result.opcode != "parameter" or result.literal != "1"


def _updates_parameter(i: hlo.Instruction) -> bool:
    """Whether an instruction writes a part of a parameter: XLA leaves the rest in place."""
    return (
        i.opcode in ("dynamic-update-slice", "scatter")
        and origin.behind(i.operands[0]).opcode == "parameter"
    )


def is_product(i: hlo.Instruction) -> bool:
    """Whether an instruction is itself a matrix product or a convolution."""
    library = i.target.startswith(_LIBRARIES) and i.target not in _SOLVERS
    return i.opcode in ("dot", "convolution") or library


def kind_of(instruction: hlo.Instruction) -> str:
    """Returns which of KINDS an instruction is."""
    body = origin.body(instruction)
    # Opcodes of scalars do not count: they only address.
    opcodes = {i.opcode for i in body if any(array.elements > 1 for array in (i, *i.operands))}
    if instruction.opcode.startswith(_COLLECTIVES):
        return "collective"
    if any(shape.space == hlo.HOST_SPACE for i in body for shape in i.shapes):
        return "offload"
    if any(map(is_product, body)):
        return "matmul"
    if any(i.target.startswith(_KERNELS) for i in body):
        return "kernel"
    if "dynamic-update-slice" in opcodes:
        return "dynamic-update-slice"
    if "scatter" in opcodes:
        return "gather/scatter"
    if opcodes & {"reduce", "reduce-window"}:
        return "reduce"
    if opcodes & _OTHER:
        return "other"
    if "gather" in opcodes:
        return "gather/scatter"
    if opcodes <= _COPIES | {"broadcast", "iota"} and all(
        i.elements <= 1 for i in instruction.operands
    ):
        return "fill"
    if opcodes <= _COPIES and opcodes - _RENAMES - {"convert"}:
        if "dynamic-slice" in opcodes:
            return "dynamic-slice"
        return "copy"
    return "elementwise"
