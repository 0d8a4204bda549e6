"""Checks of notebook 12's exercises."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from course_lib import measure, planner
from course_lib.lessons import compare, tiny_transformer
from course_lib.lessons.check.answers import (
    call,
    close,
    exercise,
    predicted,
    require,
    same_structure,
)
from course_lib.many_devices import meshes
from course_lib.many_devices.cluster_model import Cluster
from course_lib.measure import hlo
from course_lib.measure.ledger import KINDS

CUBE = {"data": 2, "pipe": 2, "tensor": 2}
LONG = {"data": 1, "pipe": 4, "tensor": 2}
M = 4
LAYER = ("qkv", "out", "up", "down")


@exercise
def twice_the_gpus(speedup, part):
    """Checks predictions about Nemotron-4 340B with the batch of its published run, on twice as
    many GPUs along "data": how many times as fast a step becomes, and which of its parts
    (`planner.Breakdown.parts`) does not become shorter.
    """
    predicted(
        speedup,
        hint="Take the parts of the published run with 6,144 GPUs. Which of them depend on how"
        " many microbatches a replica has, and which do not?",
    )
    # only this check needs the published steps
    from course_lib.lessons import backtest

    row = [row for row in backtest.load() if row.source == "nemotron4_2024"][-1]

    def step(times):
        axes = {**row.plan.axes, "data": times * row.plan.axes["data"]}
        cluster = Cluster(row.cluster.accelerator, times * row.cluster.count)
        plan = dataclasses.replace(row.plan, axes=axes)
        return planner.seconds(planner.step(row.shape, plan), cluster)

    once, twice = step(1), step(2)
    names = [name for name, seconds in once.parts.items() if seconds]
    require(part in names, f"`part` is one of {', '.join(map(repr, names))}, not {part!r}.")
    ratio = once.total / twice.total
    require(speedup < 2, "Twice as fast only if every part of the step were halved.")
    require(speedup > 1, "The products are halved, so a step is faster.")
    shorter = once.parts[part] / twice.parts[part]
    require(
        once.parts[part] > 0.1,
        f"{part!r} takes only {once.parts[part]:.3f} s of the step. Look at the parts that take"
        " more than 0.1 s.",
    )
    require(
        shorter <= 1,
        f"{part!r} becomes shorter, by a factor of {shorter:.2f}: twice as many GPUs share the"
        " microbatches. Which bytes does each GPU send once per step, however many share the"
        " batch?",
    )
    require(
        speedup <= 1.04 * ratio,
        f"The part is right. The step becomes less than {speedup:.2f} times as fast. How long"
        " does the pipeline take to fill, with half as many microbatches?",
    )
    require(
        speedup >= 0.96 * ratio,
        f"The part is right. The step becomes more than {speedup:.2f} times as fast. Look at"
        " the parts of the run with 6,144 GPUs: which are halved, and how much of the bubble?",
    )
    return f"{ratio:.2f} times as fast, since {part!r} and a part of the bubble stay."


@exercise
def three_axes(your_make_gradient):
    """Checks `your_make_gradient(mesh, M) -> (specs, gradient)`, with `gradient(params,
    inputs_BxL, labels_BxL) -> (loss, grads)`: the loss and gradients of the Transformer of
    notebook 5 on a mesh with the axes "data", "pipe" and "tensor".

    It compares gradients with one device's, on two meshes, and on the first also what each axis
    sends and the memory, with those of the course's own answer.
    """
    require(
        len(meshes.devices()) >= 8,
        "This needs eight devices: call `meshes.simulate(8)` before JAX starts.",
    )
    # the course's answer is the yardstick, and no learner needs it before this exercise
    from course_lib.lessons import three_axes as ours

    params = tiny_transformer.init(jax.random.key(1), N=4, D=32, H=4, V=64, L=16)
    tokens = np.random.default_rng(1).integers(0, 64, (2, 16, 16)).astype(np.int32)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.value_and_grad(tiny_transformer.mean_loss))(params, *tokens)
        cube = meshes.make(CUBE)
        compiled = _compiled(your_make_gradient, cube, params, tokens)
        _same(compiled(*compiled.placed), expected)
        best = _compiled(ours.make_gradient, cube, params, tokens)
        _as_few_bytes(compiled.program, best.program, cube)
        long = _compiled(your_make_gradient, meshes.make(LONG), params, tokens)
        _same(long(*long.placed), expected, "With four stages: ")
    return "one device's gradient, with no more bytes and no more memory than it takes."


class _compiled:
    """A learner's gradient, compiled for a mesh, with its arguments placed on it."""

    def __init__(self, make: Any, mesh: Any, params: Any, tokens: Any):
        hint = "Begin with a PartitionSpec for each parameter, and a loss on one device's part."
        made = call(make, mesh, M, hint=hint)
        require(
            isinstance(made, tuple) and len(made) == 2 and callable(made[1]),
            f"Return two things, the specs and the gradient function, not {type(made)}.",
        )
        specs, gradient = made
        require(
            isinstance(specs, dict) and set(specs) == set(params),
            f"`specs` needs a PartitionSpec for each of {sorted(params)}.",
        )
        for name in LAYER:
            parts = params[name].size // np.prod(
                NamedSharding(mesh, specs[name]).shard_shape(params[name].shape)
            )
            whole = mesh.shape["pipe"] * mesh.shape["tensor"]
            require(
                parts == whole,
                f"{name!r} is cut into {parts} parts; the axes pipe and tensor cut it into"
                f" {whole}: each stage has its layers, and each device its heads or its part of"
                " the MLP's width.",
            )
        shardings = {name: NamedSharding(mesh, specs[name]) for name in params}
        self.placed = jax.device_put(params, shardings), *tokens
        step = jax.jit(gradient)

        def compile(*arguments: Any) -> Any:
            return step.lower(*arguments).compile(compare.QUICK)

        self.program = call(compile, *self.placed, hint="")
        require(
            not _waits_in_a_branch(self.program.as_text()),
            "A branch of a conditional holds a collective. Not all devices take this branch, so"
            " the step would wait forever. `jax.grad` adds a sum wherever a parameter is used"
            " that all devices share. Make the parameters each device's own first"
            " (`meshes.vary`), so that the sum comes once, at the end.",
        )

    def __call__(self, *arguments: Any) -> Any:
        return call(self.program, *arguments, hint="")


def _waits_in_a_branch(text: str) -> bool:
    """Returns whether a branch of a conditional, or a loop in it, holds a collective."""
    branches = [
        branch
        for computation in hlo.parse(text).computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "conditional"
        for branch in instruction.called
    ]
    seen = set()
    while branches:
        branch = branches.pop()
        if branch.name not in seen:
            seen.add(branch.name)
            for instruction in branch.instructions:
                if instruction.opcode.removesuffix("-start") in KINDS:
                    return True
                branches += instruction.called
    return False


def _same(yours: Any, expected: Any, where: str = "") -> None:
    """Refuses a loss or gradients that are not one device's, naming what is wrong with them."""
    require(
        isinstance(yours, tuple) and len(yours) == 2,
        f"{where}`gradient` returns (loss, grads), as `jax.value_and_grad` does.",
    )
    (loss, grads), (right_loss, right) = jax.device_get(yours), jax.device_get(expected)
    same_structure(grads, right, "the gradient")
    scale = float(np.vdot(grads["output"], right["output"])) / float(
        np.vdot(right["output"], right["output"])
    )
    require(
        close(loss, right_loss),
        f"{where}The loss is {float(loss):.4f}, one device's {float(right_loss):.4f}: a mean"
        " over all labels of the batch, from the last stage alone.",
    )
    wrong = [name for name in right if not close(grads[name], right[name])]
    even = all(close(grads[name], scale * right[name], 1e-3) for name in right)
    require(
        not (wrong and even),
        f"{where}All gradients are {scale:.3g} times one device's. Sum over the axis data once,"
        " and divide by the number of labels of the whole batch.",
    )
    require(
        not wrong,
        f"{where}The gradients of {', '.join(wrong)} are not one device's. Which devices use"
        " these parameters, and is the sum over all of them, and over no others?",
    )


def _as_few_bytes(yours: Any, best: Any, mesh: Any) -> None:
    """Refuses a program that sends or holds more than the course's answer."""
    programs = measure.ledger(yours, mesh), measure.ledger(best, mesh)
    why = {
        "data": "gradients are summed once per step, not in each slot. `jax.grad` sums where a"
        " shared parameter is used; notebook 8 shows how to move that sum to the end",
        "tensor": "an all-reduce after attention and one after the MLP are enough, and one each"
        " in the backward pass",
        "pipe": "a stage sends its activation to the next, once per slot",
    }
    for axis, reason in why.items():
        send, enough = (
            sum(c.sent_bytes * c.executions for c in program.entries if axis in (c.axes or ()))
            for program in programs
        )
        require(
            send <= 1.05 * enough,
            f"Along {axis} a device sends {send:,} bytes; {enough:,} are enough: {reason}.",
        )
    memory, enough = (measure.memory(program).temporaries for program in (yours, best))
    require(
        memory <= 1.5 * enough,
        f"A device needs {memory:,} bytes for temporary arrays; {enough:,} are enough."
        " Rematerialize each layer (`jax.checkpoint`), and hold the logits of one microbatch at"
        " a time.",
    )
