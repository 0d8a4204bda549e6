"""Finds the scope in the source that an array of a compiled program comes from.

JAX gives XLA a scope with every operation (`jit(step)/jvp(Transformer)/mlp/dot_general`), and
XLA keeps most of them. Where it does not, the neighbouring instructions tell.
"""

import os
import re
import sysconfig
from collections.abc import Sequence

from course_lib.measure import hlo

FUSIONS = ("fusion", "fusion-start")
_RENAMES = ("bitcast", "get-tuple-element")
# Parts of a scope that name the program's structure or a change of form, not the model.
_STRUCTURE = frozenset(
    "while body cond scan eval_jaxpr checkpoint rematted_computation transpose"
    " convert_element_type reduce_precision dynamic_update_slice select_n broadcast_in_dim"
    " copy reshape".split()
)

# Files that are no model: Python's own, those of packages, and those that call one, which add
# themselves.
CALLERS: set[str] = set()
_STDLIB = re.escape(sysconfig.get_path("stdlib"))
_INSTALLED = re.compile(rf"{_STDLIB}|\b(?:site|dist)-packages\b")

# Modules of the library's Transformer, and JAX's product of matrices, in the text's words.
_IN_TEXT = {"attn": "attention", "mlp": "MLP", "dot_general": "product"}


def body(instruction: hlo.Instruction) -> list[hlo.Instruction]:
    """Returns the instructions fused into a fusion, or any other instruction itself."""
    if instruction.opcode not in FUSIONS:
        return [instruction]
    inside = (inner for called in instruction.called for inner in called.instructions)
    return [deeper for inner in inside for deeper in body(inner)]


def behind(instruction: hlo.Instruction) -> hlo.Instruction:
    """Returns the instruction that made an array, skipping renames and changes of layout."""
    while instruction.opcode in _RENAMES or instruction.opcode.endswith("-done"):
        instruction = instruction.operands[0]
    return instruction


def origin(instruction: hlo.Instruction) -> str:
    """Returns the scope that an instruction comes from, or ""."""
    return source(instruction).scope


def source(instruction: hlo.Instruction) -> hlo.Instruction:
    """Returns the instruction whose scope says where this one comes from. For an update that
    stores a scan's results it is that of the slice: all updates have one scope.
    """
    own = _named(instruction)
    updates = [i.operands[1] for i in body(instruction) if i.opcode == "dynamic-update-slice"]
    if not updates:
        return own
    made = updates[0]
    while made.operands and (not made.scope or "dynamic_update" in made.scope):
        made = made.operands[0]
    if instruction.opcode in FUSIONS and made in instruction.called[0].parameters:
        made = behind(instruction.operands[int(made.literal)])
    made = _named(made)
    return made if made.scope else own


def line(frames: Sequence[hlo.Frame]) -> str:
    """Returns the innermost line of code that is in no installed package, as "model.py:31 in
    Block.__call__", or of any code; "" without frames.
    """
    model = (f for f in frames if not (_INSTALLED.search(f.file) or f.file in CALLERS))
    for frame in (*model, *frames):
        function = frame.function.rpartition("<locals>.")[2]
        return f"{os.path.basename(frame.file)}:{frame.line} in {function}"
    return ""


def words(scope: str) -> str:
    """Names in the model's words where an array comes from: "block 3 / MLP / product,
    backward" for "jit(f)/transpose(jvp(Transformer))/block_3/mlp/dot_general".
    """
    if keys := re.findall(r"\['(\w+)'\]", scope):
        return " / ".join(map(_word, keys))
    # A named part of the forward pass: "loss" in "transpose(jvp(loss))". A class, such as
    # "Transformer", is the whole model.
    scope_parts = re.sub(r"(transpose\()?jvp\(([a-z]\w*)\)+", r"\2", scope).split("/")
    parts = [part for part in scope_parts if re.fullmatch(r"\w+", part)]
    modules = [part for part in dict.fromkeys(parts) if part not in _STRUCTURE]
    name = " / ".join(map(_word, modules)) or "loop over the layers"
    if "rematted_computation" in scope:
        return f"{name}, recomputed"
    if "transpose(" in scope:
        return f"{name}, backward"
    return f"{name}, forward" if "jvp(" in scope else name


def _word(part: str) -> str:
    """Returns one part of a scope as the text names it: "block 3" for "block_3"."""
    return _IN_TEXT.get(part) or re.sub(r"^(block)_(\d+)$", r"\1 \2", part)


def stacked(module: hlo.Module) -> dict[str, hlo.Instruction]:
    """Returns what made the arrays that loops fill slice by slice, by instruction name,
    followed by `{k}` for the k-th array of a tuple: before its loop such an array is zeros,
    without a scope.
    """
    made: dict[str, hlo.Instruction] = {}
    for loop in module.instructions.values():
        if loop.opcode != "while":
            continue
        # The initial values, and the results of an iteration, in the order of the tuple.
        first, last = loop.operands[0], loop.calls["body"][0].root
        if first.opcode != "tuple" or last.opcode != "tuple":
            continue
        for before, after in zip(first.operands, last.operands, strict=True):
            update = behind(after)
            if any(i.opcode == "dynamic-update-slice" for i in body(update)):
                for name in _names(before):
                    made.setdefault(name, source(update))
    return made


def _named(i: hlo.Instruction) -> hlo.Instruction:
    """Returns what has its scope: itself, the last operation fused into it, or its operand."""
    fused = (inner for inner in reversed(body(i)) if inner.scope)
    if i.scope or (inner := next(fused, None)) is None and not i.operands:
        return i
    return inner or _named(i.operands[0])


def _names(i: hlo.Instruction) -> list[str]:
    """Returns the names of an array's copies and of the instruction that made it."""
    names = [i.name]
    while i.opcode in (*_RENAMES, "copy"):
        index = re.search(r"\bindex=(\d+)", i.attributes)
        i = i.operands[0]
        names.append(f"{i.name}{{{index[1]}}}" if index else i.name)
    return names
