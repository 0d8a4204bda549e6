"""Reads a step once, for all instruments.

`read` takes a step as it is at hand. One that is only lowered is compiled here, and XLA's plan
of its memory is kept with it: a program that somebody else compiled has lost its plan.

    program = read(step.lower(state, batch))
    memory(program), heap(program), tape(program), traffic(program)  # one compilation for all
"""

import collections
import dataclasses
import functools
import pathlib
import re
import tempfile
import weakref
from typing import Any

import jax

from course_lib.measure import hlo, virtual

NO_PLAN = (
    "XLA wrote no plan of the program's memory. A program out of JAX's persistent compilation"
    ' cache has none: jax.config.update("jax_enable_compilation_cache", False) and'
    " jax.experimental.compilation_cache.compilation_cache.reset_cache(), both, switch it off"
)
# Fusions that XLA gives to a library for CPUs, by the name of their kind.
_LIBRARY = re.compile(r'"kind":"__(?:ynn|xnn|onednn)_fusion"')
_PASSES = ("dot", "convolution", "reduce")  # operations that cannot work in place
_NO_ARRAYS = frozenset("parameter constant tuple broadcast iota bitcast reshape".split())


@dataclasses.dataclass(frozen=True)
class Plan:
    """XLA's plan of a program's memory, as it dumps it."""

    proto: bytes  # the program with its plan: a serialized `HloProto`
    places: str  # `buffer-assignment.txt`: the allocation and offset of each value
    lifetimes: str  # `live-range.txt`: their first and last instruction; "" before JAX 0.10
    written: str  # the program before XLA's passes
    config: str  # XLA's options, and what it knows of the GPU


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled step, and the plan of its memory if it was compiled here."""

    compiled: Any  # jax.stages.Compiled
    plan: Plan | None = None

    @functools.cached_property
    def module(self) -> hlo.Module:
        return hlo.parse(self.compiled.as_text())

    @property
    def platform(self) -> str:
        """Where it runs: "cpu", "gpu" or "tpu"."""
        shardings = jax.tree.leaves(
            (self.compiled.input_shardings, self.compiled.output_shardings)
        )
        return next(iter(shardings[0].device_set)).platform

    def check_nothing_hidden(self) -> None:
        """Refuses a program for a CPU in which a library keeps large arrays to itself."""
        fusions = (i for i in self.module.instructions.values() if i.opcode == "fusion")
        hidden = {i: _hidden(i) for i in fusions if _LIBRARY.search(i.attributes)}
        if not any(hidden.values()):
            return
        stats = self.compiled.memory_analysis()
        known = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        if sum(hidden.values()) > 0.01 * (known + stats.output_size_in_bytes):
            name = max(hidden, key=lambda i: hidden[i]).name
            raise ValueError(
                "step=<Compiled> must be lowered, not yet compiled: pass jax.jit(f).lower(...),"
                " or virtual.compile(jax.jit(f).lower(...)), which compile without the library"
                f" that runs {name!r} on a CPU: large arrays inside it are in no plan of memory"
            )


_read: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def read(step: Any) -> Program:
    """Returns the program of a step: lowered, compiled, or read already (also a `Heap`).

    What `nnx.jit` and `eqx.filter_jit` lower or compile is taken as it is.
    """
    step = getattr(step, "program", step)  # of a heap
    if isinstance(step, Program):
        return step
    step = getattr(step, "lowered", getattr(step, "compiled", step))  # of Flax and Equinox
    if not isinstance(step, jax.stages.Lowered | jax.stages.Compiled):
        raise ValueError(
            f"step=<{type(step).__name__}> must be lowered or compiled: jax.jit(f).lower(...),"
            " or jax.jit(f).lower(...).compile()"
        )
    if step not in _read:
        _read[step] = _compile(step) if isinstance(step, jax.stages.Lowered) else Program(step)
    return _read[step]


def with_plan(step: Any) -> tuple[Program, Plan]:
    """Returns the program of a step and the plan of its memory."""
    program = read(step)
    if program.plan is None:
        raise ValueError(
            "step=<Compiled> must be lowered, not yet compiled: jax.jit(f).lower(...). A"
            " compiled program has lost the plan of its memory"
        )
    return program, program.plan


def _hidden(fusion: hlo.Instruction) -> int:
    """Estimates the bytes of the arrays that a library keeps inside a fusion: products, and
    what is read twice. One product may lie where the result will be, unless it is reduced too.
    """
    inside, root = fusion.called[0].instructions, fusion.called[0].root
    readers = collections.Counter(id(array) for i in inside for array in i.operands)
    in_place = results = {id(i) for i in (root.operands if root.opcode == "tuple" else (root,))}
    for i in reversed(inside):  # up to the products from which elementwise operations lead here
        if id(i) in in_place and i.opcode not in _PASSES:
            in_place = in_place | {id(a) for a in i.operands if a.elements == i.elements}
    reduced = {id(array) for i in inside if i.opcode == "reduce" for array in i.operands}
    products = {id(i): i.bytes for i in inside if i.opcode in ("dot", "convolution")}
    in_place = in_place - (reduced & products.keys() - results)
    twice = {
        id(i): i.bytes for i in inside if readers[id(i)] > 1 and i.opcode not in _NO_ARRAYS
    }
    apart = sum(size for i, size in (products | twice).items() if i not in in_place)
    shared = sum(size for i, size in products.items() if i in in_place)
    return apart + max(0, shared - fusion.bytes)


def _compile(lowered: jax.stages.Lowered) -> Program:
    """Compiles a program, and reads XLA's dump of it."""
    with tempfile.TemporaryDirectory() as folder, virtual.without_cache():
        dump = {"xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
        compiled = virtual.compile(lowered, {"xla_dump_to": folder, **dump})

        def dumped(ending: str) -> bytes:
            # The largest: smaller ones belong to programs that a GPU times to choose kernels.
            files = (path.read_bytes() for path in pathlib.Path(folder).glob(f"*{ending}"))
            return max(files, key=len, default=b"")

        proto = dumped("after_optimizations.hlo.pb")
        if not proto:
            raise RuntimeError(NO_PLAN)
        places, lifetimes = dumped("buffer-assignment.txt"), dumped("live-range.txt")
        texts = (
            places,
            lifetimes,
            dumped("before_optimizations.txt"),
            dumped(".config.pbtxt") + dumped("target_config.pbtxt"),
        )
        return Program(compiled, Plan(proto, *(text.decode() for text in texts)))
