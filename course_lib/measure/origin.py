"""Where an array of a compiled program comes from, in the words of the source.

JAX hands XLA a scope with every operation (`jit(step)/jvp(Transformer)/mlp/dot_general`), and
XLA keeps most of them. Where it does not, or where the scope says nothing, the instructions
around tell more.
"""

import re

from course_lib.measure import hlo

FUSIONS = ("fusion", "fusion-start")
_RENAMES = ("bitcast", "get-tuple-element")


def body(instruction: hlo.Instruction) -> list[hlo.Instruction]:
    """Returns the instruction itself, or if it is a fusion all that were fused into it."""
    if instruction.opcode not in FUSIONS:
        return [instruction]
    return [
        deeper
        for called in instruction.called
        for inner in called.instructions
        for deeper in body(inner)
    ]


def behind(instruction: hlo.Instruction) -> hlo.Instruction:
    """Returns the instruction that made an array, behind those that only give it another name
    or layout.
    """
    while instruction.opcode in _RENAMES or instruction.opcode.endswith("-done"):
        instruction = instruction.operands[0]
    return instruction


def origin(instruction: hlo.Instruction) -> str:
    """Returns the scope that an instruction comes from, empty if XLA kept none.

    An update of one slice of a larger array, which is how a scan keeps what an iteration made,
    comes from where the slice does: else all of them would be called `dynamic_update_slice`.
    """
    own = _scope(instruction)
    updates = [i.operands[1] for i in body(instruction) if i.opcode == "dynamic-update-slice"]
    if not updates:
        return own
    source = updates[0]
    while source.operands and (not source.scope or "dynamic_update" in source.scope):
        source = source.operands[0]
    if instruction.opcode in FUSIONS and source in instruction.called[0].parameters:
        source = behind(instruction.operands[int(source.literal)])
    return _scope(source) or own


def stacked(module: hlo.Module) -> dict[str, str]:
    """Returns the scopes of the arrays that loops fill slice by slice.

    Such an array exists before its loop, as zeros of which the scope says `broadcast_in_dim`.
    Its slices say more.

    Returns:
      Instruction name, with `{k}` behind it for the k-th array of a tuple, to the scope of the
        slices.
    """
    scopes: dict[str, str] = {}
    for computation in module.computations.values():
        for loop in computation.instructions:
            if loop.opcode != "while":
                continue
            # What the loop begins with, and what an iteration hands to the next, both in the
            # order of the loop's tuple.
            first, last = loop.operands[0], loop.calls["body"][0].root
            if first.opcode != "tuple" or last.opcode != "tuple":
                continue
            for before, after in zip(first.operands, last.operands, strict=True):
                update = behind(after)
                if any(i.opcode == "dynamic-update-slice" for i in body(update)):
                    for name in _names(before):
                        scopes.setdefault(name, origin(update))
    return scopes


def _scope(i: hlo.Instruction) -> str:
    """The scope of an instruction; where XLA kept none, of the last operation fused into it, or
    of its operand.
    """
    fused = (inner.scope for inner in reversed(body(i)) if inner.scope)
    return i.scope or next(fused, "") or (_scope(i.operands[0]) if i.operands else "")


def _names(i: hlo.Instruction) -> list[str]:
    """The names under which an array may be listed: those of its copies, and of the instruction
    that made it.
    """
    names = [i.name]
    while i.opcode in (*_RENAMES, "copy"):
        index = re.search(r"\bindex=(\d+)", i.attributes)
        i = i.operands[0]
        names.append(f"{i.name}{{{index[1]}}}" if index else i.name)
    return names
