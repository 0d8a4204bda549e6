"""Reads the tape of a step: what it holds in device memory at each instruction, by kind.

XLA plans the memory of a program before it runs. Its dump says from which instruction to which
each value lives (`...live-range.txt`), how large it is, and which values take the place of an
argument (`...buffer-assignment.txt`). JAX's scopes say what the value is for.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from course_lib.measure import hlo, origin
from course_lib.measure.program import NO_PLAN, with_plan
from course_lib.measure.traffic import kind_of, recomputed

REST, AGAIN = "other activations, batch", "recomputed by XLA"

TOO_OLD = f"a tape needs JAX 0.10 or newer: the XLA of {jax.__version__} writes no lifetimes"

# In the order in which a picture stacks them.
KINDS = (
    "parameters",
    "optimizer state",
    "results",
    "residual stream",
    "attention",
    "MLP",
    "logits and loss",
    "gradients",
    AGAIN,
    REST,
)

# The first pattern found in a value's scope names its kind. Flax writes a module's name into
# the scope, plain JAX what `jax.named_scope` says.
_SCOPES = {
    # the output layer of the model, not that of an MLP
    "logits and loss": r"logits|loss|cross_entropy|unembed|(?<!mlp/)output_layer",
    "attention": r"\battn\b|attention",
    "MLP": r"\bmlp\b|\bMLP\b",
    "residual stream": r"norm|block|embed|residual|layer",
}
_INDEX = re.compile(r"\{(\d+)\}")
_JITTED = re.compile(r"\bjit\([^)]*\)")
_ARGUMENTS = {
    "optimizer state": r"opt_state|(^|_)(mu|nu)_|^state_1_|^opt",
    "parameters": r"params|^state_0_|^model_",
}


@dataclasses.dataclass(frozen=True)
class Tape:
    """The memory of one device over a program's instructions, by kind."""

    # kind -> bytes alive at each instruction, in the order of the program, from the first to
    # the last that holds a temporary. A loop's body occurs once. Only kinds that occur
    bytes: dict[str, list[int]]
    backward: int | None  # the index of the first product of the backward pass, None without
    peak: int  # the most bytes alive at one moment


def tape(step: Any, *, points: int = 400, arguments: Mapping[str, str] | None = None) -> Tape:
    """Reads what a step holds at each instruction.

    "gradients" are values with the shape of a parameter, or of one layer of it, which the
    backward pass makes or which are float32. "results" is the memory of outputs that overwrite
    no donated argument; temporaries may use it earlier. "recomputed by XLA" is what its clones
    hold (`measure.compiler`). The scope of any other activation names its kind: the names of
    Flax's modules, or `jax.named_scope("attention")` in plain JAX.

    Args:
      step: `jax.jit(step).lower(...)`, or its `measure.heap`. Its arguments are told apart by
        their names: "params" or "model"; "opt_state", "optimizer", or "mu" and "nu"; or
        "state", a pair of both.
      points: the most instructions to return. Longer programs are cut into as many parts, and
        each shows its instruction with the most bytes.
      arguments: how other names begin, by kind: {"parameters": "weights"}, or "weights[0]".
    """
    program, plan = with_plan(step)
    if not plan.lifetimes:
        # older versions of XLA write where each value lies, but not how long it lives
        raise RuntimeError(TOO_OLD if plan.places else NO_PLAN)
    order, lifetimes = _lifetimes(plan.lifetimes)
    kinds = _Kinds(program.module, arguments)
    levels = {kind: np.zeros(len(order), np.int64) for kind in KINDS}
    for allocation in re.split(r"^allocation \d+: ", plan.places, flags=re.M)[1:]:
        head = allocation.partition("\n")[0]
        if f"color {hlo.HOST_SPACE}," in head:  # in the memory of the host
            continue
        values = _values(allocation, lifetimes)
        size = int(re.match(r"size (\d+)", allocation)[1])
        # Arguments, results and constants are there from the first to the last instruction.
        if re.search(r"\bparameter \d", head):
            levels[kinds.of_argument(values[0].name)] += size
        elif "maybe-live-out" in head:
            levels["results"] += size
        elif "constant" in head:
            levels[kinds.of_chain(values)] += size
        else:
            for chain in _chains(values):
                level = levels[kinds.of_chain(chain)]
                for value in chain:
                    level[value.first : value.last + 1] += value.bytes
    backward = next((i for i, name in enumerate(order) if kinds.is_backward(name)), None)
    total = np.sum(list(levels.values()), axis=0)
    [work] = np.nonzero(total > total.min() + total.max() // 1000)
    first, last = (work[0], work[-1] + 1) if work.size else (0, len(order))
    levels = {kind: level[first:last] for kind, level in levels.items()}
    if backward is not None:
        backward = max(backward - int(first), 0)
    return _shorten(levels, backward, points)


def _lifetimes(live: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Returns the instructions in order, and the first and last one of each value."""
    sequence, ranges = live.split("BufferLiveRange:")
    order = re.findall(r"^    \d+:(\S+)$", sequence, re.M)
    lifetimes = {
        name: (int(first), min(int(last), len(order) - 1))
        for name, first, last in re.findall(r"^    (\S+\{[\d,]*\}):(\d+)-(\d+)$", ranges, re.M)
    }
    return order, lifetimes


@dataclasses.dataclass
class _Value:
    """A value in an allocation: from which byte, how many bytes, and when it lives."""

    name: str
    offset: int
    bytes: int
    first: int
    last: int


def _values(allocation: str, lifetimes: Mapping[str, tuple[int, int]]) -> list[_Value]:
    """Returns the values in one allocation, in the order in which they are made."""
    listed = re.findall(
        r"value: <\d+ (\S+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)", allocation
    )
    names = [(name if "{" in name else f"{name}{{}}", size, at) for name, size, at in listed]
    values = [
        _Value(name, int(at), int(size), *lifetimes[name])
        for name, size, at in names
        if name in lifetimes
    ]
    return sorted(values, key=lambda value: (value.first, value.last))


def _chains(values: list[_Value]) -> list[list[_Value]]:
    """Joins values that hand their bytes on, as a loop's carry does: each ends where the next
    begins. Of an operation in place, both are alive at once, and the bytes are there once.
    """
    begin: dict[int, list[_Value]] = {}
    for value in values:
        begin.setdefault(value.first, []).append(value)
    chains: dict[int, list[_Value]] = {}
    for value in values:
        chain = chains.setdefault(id(value), [value])
        for after in begin.get(value.last, ()):
            first, last = sorted((value, after), key=lambda value: value.offset)
            apart = first.offset + first.bytes <= last.offset
            if after is value or apart or value.first >= after.first:
                continue
            value.last = after.first - 1
            if (after.offset, after.bytes) == (value.offset, value.bytes):
                chain.append(after)
                chains[id(after)] = chain
            break
    return list({id(chain): chain for chain in chains.values()}.values())


class _Kinds:
    """Tells what a value of a program is for."""

    def __init__(self, module: hlo.Module, arguments: Mapping[str, str] | None = None):
        self.module, self.arguments = module, arguments or {}
        names = [i.scope for i in module.entry.parameters]
        for kind, start in self.arguments.items():
            if kind not in KINDS or not any(name.startswith(start) for name in names):
                raise ValueError(
                    f"arguments={dict(self.arguments)} must have kinds of {KINDS}, and how the"
                    f" names of the step's arguments begin: they are {names}"
                )
        self.stacked = origin.stacked(module)
        # Flax NNX, Equinox and plain JAX name no scopes: the functions that were called do
        scopes = {_JITTED.sub("", i.scope) for i in module.instructions.values()}
        kinds = (_first_match(_SCOPES, scope) for scope in scopes if "/" in scope)
        self.are_named = any(kind != REST for kind in kinds)
        self.again = {i.name for i in recomputed(module)}
        shapes = {
            shape.dims
            for i in module.entry.parameters
            for shape in i.shapes
            if self.of_argument(i.name) == "parameters" and len(shape.dims) > 1
        }
        # a scan over layers stacks the parameters, and its body makes one layer's gradient
        self.parameter_shapes = shapes | {dims[1:] for dims in shapes if len(dims) > 2}

    def of_argument(self, name: str) -> str:
        scope = self.module.instructions[name.split("{")[0]].scope
        given = (kind for kind, start in self.arguments.items() if scope.startswith(start))
        return next(given, None) or _first_match(_ARGUMENTS, name)

    def of_chain(self, chain: list[_Value]) -> str:
        kinds = [self.of(value.name) for value in chain]
        if "gradients" in kinds:
            return "gradients"
        return next((kind for kind in kinds if kind != REST), REST)

    def of(self, value: str) -> str:
        """Returns the kind of one value: `fusion.3{1}` is the second result of `fusion.3`."""
        if value.split("{")[0] in self.again:
            return AGAIN
        index = _INDEX.search(value)
        which = int(index[1]) if index else 0
        instruction = self.module.instructions.get(value.split("{")[0])
        shapes = instruction.shapes[which : which + 1] if instruction else ()
        source = self._source(value)
        scope = source.scope if source else ""
        if shapes and shapes[0].dims in self.parameter_shapes:
            # what is made of a parameter in the forward pass is its copy in 16 bits
            if "transpose(" in scope or shapes[0].dtype == "float32":
                return "gradients"
        if self.are_named or source is None:
            return _first_match(_SCOPES, scope)
        calls = self.module.frames.get(source.frame, ())
        kinds = [_first_match(_SCOPES, call.function.lower()) for call in calls]
        # the function of the loss also calls the model
        inner = kinds[:1] + [kind for kind in kinds[1:] if kind != "logits and loss"]
        return next((kind for kind in inner if kind != REST), REST)

    def is_backward(self, name: str) -> bool:
        """Whether an instruction is a product of the backward pass."""
        # The scope alone does not tell: XLA gives it to zeros and changes of layout, too, and
        # puts those long before the backward pass.
        instruction, source = self.module.instructions.get(name), self._source(name)
        is_product = instruction is not None and kind_of(instruction) == "matmul"
        scope = source.scope if source else ""
        return is_product and "transpose(" in scope and "dot_general" in scope

    def _source(self, value: str) -> hlo.Instruction | None:
        name = value.split("{")[0]
        if value in self.stacked or name in self.stacked:
            return self.stacked.get(value) or self.stacked[name]
        instruction = self.module.instructions.get(name)
        if instruction is None:
            return None
        # one of a fusion's several results
        index = _INDEX.search(value)
        output = instruction
        if index and instruction.opcode in origin.FUSIONS:
            root = instruction.called[0].root
            output = root.operands[int(index[1])] if root.opcode == "tuple" else instruction
        source = origin.source(output)
        return source if source.scope else origin.source(instruction)


def _first_match(patterns: Mapping[str, str], name: str) -> str:
    return next((kind for kind, found in patterns.items() if re.search(found, name)), REST)


def _shorten(levels: Mapping[str, np.ndarray], backward: int | None, points: int) -> Tape:
    """Cuts a tape into at most `points` parts and keeps the highest moment of each."""
    total = np.sum(list(levels.values()), axis=0)
    parts = np.array_split(np.arange(len(total)), min(points, len(total)))
    highest = [int(part[total[part].argmax()]) for part in parts]
    begins = None
    if backward is not None:
        begins = next(k for k, part in enumerate(parts) if part[-1] >= backward)
    occurring = {kind: level[highest].tolist() for kind, level in levels.items() if level.any()}
    return Tape(occurring, begins, int(total.max()))
