"""Reads a compiled program: its instructions, their order, and how often each runs.

`compiled.as_text()` prints the optimized program in XLA's language, HLO: computations made of
instructions, in order of execution. A fusion, a loop or a conditional calls other computations
(https://openxla.org/xla/operation_semantics).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping

HOST_SPACE = 5  # XLA's number for the host's memory, in a layout such as {1,0:S(5)}

_KINDS = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf": "bfloat", "c": "complex"}
_TYPE = re.compile(r"([a-z]+)(\d*)(\w*)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<= ]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")
_CALLS = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_COUNTS = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_ONLY_IF = re.compile(r"only_if_(\w*)/while$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array of the program: its HLO type (`bf16`), its dimensions, and its memory space."""

    type: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def dtype(self) -> str:
        """The type as JAX spells it: `bfloat16` for `bf16`, `float8_e4m3fn` for `f8e4m3fn`."""
        kind, bits, variant = _TYPE.fullmatch(self.type).groups()
        return _KINDS.get(kind, kind) + bits + (variant and f"_{variant}")

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes, with types narrower than a byte packed; a token has none."""
        kind, bits, _ = _TYPE.fullmatch(self.type).groups()
        return -(-self.elements * int(bits or 8 * (kind == "pred")) // 8)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str  # unique in its computation
    opcode: str  # "fusion", "while", "dot", "all-gather-start", ...
    shapes: tuple[Shape, ...]  # of its result: several if it is a tuple
    operands: "tuple[Instruction, ...]" = dataclasses.field(repr=False)
    # the computations that it calls, by role: "calls" of a fusion, "body" of a while, ...
    calls: "Mapping[str, tuple[Computation, ...]]" = dataclasses.field(repr=False)
    literal: str  # a parameter's number or a constant's value
    attributes: str = dataclasses.field(repr=False)  # everything else, as text
    is_root: bool  # its result is that of its computation

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def elements(self) -> int:
        return sum(shape.elements for shape in self.shapes)

    @property
    def called(self) -> "tuple[Computation, ...]":
        return tuple(itertools.chain(*self.calls.values()))

    @property
    def scope(self) -> str:
        """Its scope in the source, as `jit(step)/jvp(Transformer)/mlp/dot_general`, or ""."""
        match = _OP_NAME.search(self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    @property
    def frame(self) -> int:
        """The line of the source that made it, for `Module.frames`, or 0."""
        match = _FRAME.search(self.attributes)
        return int(match[1]) if match else 0

    @property
    def target(self) -> str:
        """The library function of a custom call (`__cublas$gemm`), else ""."""
        match = _TARGET.search(self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A named list of instructions, in execution order."""

    name: str
    instructions: tuple[Instruction, ...] = dataclasses.field(repr=False)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions if i.is_root)

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """Its parameters, in the order of the caller's operands."""
        parameters = (i for i in self.instructions if i.opcode == "parameter")
        return tuple(sorted(parameters, key=lambda i: int(i.literal)))


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of the source, in a function."""

    file: str
    line: int
    function: str  # as Python qualifies it: `Block.__call__`


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations by name, its entry, and its number of devices."""

    name: str
    entry: Computation
    computations: Mapping[str, Computation] = dataclasses.field(repr=False)
    devices: int = 1
    # by `Instruction.frame`: lines that called each other, innermost first
    frames: Mapping[int, tuple[Frame, ...]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """All by name, which XLA gives only once in a program."""
        return {i.name: i for c in self.computations.values() for i in c.instructions}


def parse(text: str) -> Module:
    """Reads the text of a compiled program: `compiled.as_text()`, of any backend."""
    header = re.match(r"HloModule ([\w.\-]+)", text)
    if header is None or "\nENTRY " not in text:
        raise ValueError(
            f"text={text[:40]!r}... must be HLO: pass compiled.as_text(). What is only lowered"
            " prints another language, StableHLO: lowered.compile().as_text()"
        )
    computations: dict[str, Computation] = {}
    entry = name = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name, instructions = opening[2], {}
            entry = name if opening[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions.values()))
        elif line.startswith(" ") and " = " in line:
            instruction = _instruction(line.strip(), instructions, computations)
            instructions[instruction.name] = instruction
    devices = math.prod(int(count) for count in _COUNTS.findall(text.split("\n", 1)[0]))
    return Module(header[1], computations[entry], computations, devices, _frames(text))


def _frames(text: str) -> dict[int, tuple[Frame, ...]]:
    """Reads XLA's four tables of source lines, which follow the first line of a program."""
    head = re.split(r"^(?:%|ENTRY )", text, maxsplit=1, flags=re.M)[0]
    tables = dict(re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", head, re.M))
    rows = {
        name: {int(row.partition(" ")[0]): row.partition(" ")[2] for row in table.splitlines()}
        for name, table in tables.items()
    }
    found: dict[int, tuple[Frame, ...]] = {}
    none = 0
    for number, row in rows.get("StackFrames", {}).items():
        place, parent = (*map(int, re.findall(r"_id=(\d+)", row)), 0)[:2]
        none = none if found else parent  # the first has no caller
        file, function, line, *_ = map(int, re.findall(r"=(\d+)", rows["FileLocations"][place]))
        names = rows["FileNames"][file], rows["FunctionNames"][function]
        frame = Frame(names[0].strip('"'), line, names[1].strip('"'))
        found[number] = frame, *found.get(parent - none, ())
    return found


def read_shapes(text: str) -> tuple[Shape, ...]:
    """Reads shapes as HLO writes them: `f32[4,16]{1,0}`, `(f32[4,16], s32[])` for a tuple."""
    shapes = _SHAPE.findall(text)
    return tuple(
        Shape(t, tuple(int(d.strip("<= ")) for d in ds.split(",") if d), int(s or 0))
        for t, ds, s in shapes
    )


def _trip_count(loop: Instruction) -> int:
    """Returns how often a `while` runs its body, as XLA derived it from the loop's bounds."""
    if match := _TRIPS.search(loop.attributes):
        return int(match[1])
    raise ValueError(
        f"while={loop.name!r} ({loop.scope}) must run a number of times that the compiler"
        " knows: it stops on a condition on data, so nothing inside it can be counted; use"
        " jax.lax.scan, or fori_loop with fixed bounds"
    )


def scheduled(
    module: Module,
    weight: Callable[[Instruction], int] | None = None,
    taken: Mapping[str, int] | None = None,
) -> list[tuple[Instruction, int]]:
    """Lists (instruction, number of executions) of a program, inside loops and calls too, but
    not inside fusions, in program order. With a `weight`, the cost of an instruction, a
    conditional counts as its most expensive branch, else all are listed. `taken` says how often
    the turn of a loop in the scope `only_if_NAME` runs, by NAME; such a loop has one turn or
    none, and counts as one.
    """

    def walk(computation: Computation, executions: int) -> list[tuple[Instruction, int]]:
        executed = []
        for i in computation.instructions:
            executed.append((i, executions))
            if i.opcode == "while":
                if match := _ONLY_IF.search(i.scope):
                    turns = (taken or {}).get(match[1], executions)
                else:
                    turns = executions * _trip_count(i)
                executed += walk(i.calls["condition"][0], executions + turns)
                executed += walk(i.calls["body"][0], turns)
            elif i.opcode == "conditional":
                branches = [walk(branch, executions) for branch in i.called]
                if weight is None:
                    executed += itertools.chain(*branches)
                else:
                    executed += max(branches, key=lambda b: sum(n * weight(j) for j, n in b))
            elif i.opcode in ("call", "async-start"):
                executed += [item for called in i.called for item in walk(called, executions)]
        return executed

    return walk(module.entry, 1)


def _instruction(
    line: str, known: Mapping[str, Instruction], computations: Mapping[str, Computation]
) -> Instruction:
    """Reads `[ROOT] %name = shape opcode(operands), attributes`."""
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shapes, (opcode, rest) = rest[:end], rest[end:].lstrip().split("(", 1)
    end = _closing("(" + rest) - 1
    inside, attributes = rest[: end - 1], rest[end:]
    calls = {
        role: tuple(computations[called] for called in _NAME.findall(names) or [names])
        for role, names in _CALLS.findall(attributes)
    }
    return Instruction(
        name=name.lstrip("%"),
        opcode=opcode,
        shapes=read_shapes(shapes),
        operands=tuple(known[operand] for operand in _NAME.findall(inside)),
        calls=calls,
        literal=inside if opcode in ("parameter", "constant") else "",
        attributes=attributes,
        is_root=line.startswith("ROOT "),
    )


def _closing(text: str) -> int:
    """Returns the position behind the parenthesis that closes the one `text` begins with."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"text={text[:40]!r}... must close its parenthesis")
