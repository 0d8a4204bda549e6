"""A training run spread over a mesh: the same model, loss, optimizer and train step as on one
device.

    grid = meshes.make({"data": 4, "tensor": 2})
    run = strategies.build(config, grid, Strategy(zero=1, sequence=True))
    state = run.init(jax.random.key(0))    # cut as the strategy says: no device ever has all
    state, metrics = run.train_step(state, batch)

What a mesh axis is for follows from its name; a `Strategy` says how. Every strategy can be
written `by="hand"`, with explicit collectives inside of a `jax.shard_map`, or `by="compiler"`,
as shardings that `jax.jit` has to respect. Both give the numbers of one device. A pipeline is
written by hand only:

    grid = meshes.make({"data": 2, "pipe": 2, "tensor": 2})
    run = strategies.build(config, grid, Strategy(schedule="zero_bubble", microbatches=4))
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import optimizers, training
from course_lib.many_devices import (
    async_tensor_parallel,
    context_parallel,
    data_parallel,
    expert_parallel,
    meshes,
    sharding,
    tensor_parallel,
)
from course_lib.many_devices.options import Strategy, check
from course_lib.many_devices.pipeline_parallel import pipeline, schedules
from course_lib.measure import virtual
from course_lib.models import losses
from course_lib.models.hooks import Hooks
from course_lib.models.transformer import Transformer
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn
from course_lib.text.data import Batch

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Run(training.Run):
    """A training run on a mesh: as on one device, and who holds what.

    Attributes:
      mesh: what it runs on.
      specs: a `TrainState` of PartitionSpecs.
    """

    mesh: Mesh
    specs: training.TrainState

    def abstract(self) -> tuple[training.TrainState, Batch]:
        """Returns the shapes of the state and of a batch, placed on the mesh, to lower the step
        with.
        """
        state, batch = super().abstract()
        cut = NamedSharding(self.mesh, P("data"))
        placed = jax.tree.map(virtual.abstract, state, sharding.place(self.specs, self.mesh))
        return placed, virtual.abstract(batch, cut)


def layout(
    config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()
) -> tuple[training.TrainState, PyTree]:
    """Returns who holds what.

    Args:
      config: a whole configuration.
      mesh: with an axis "data", "pipe" if the layers are to be divided, "context" if the
        sequences are, "expert" if the experts are, and "tensor" if heads, hidden width and
        vocabulary are.
      strategy: how the axes are used.

    Returns:
      The specs of the train state, as a `TrainState`, and those of the gradients.

    Raises:
      ValueError: if an axis does not divide a dimension that it has to.
    """
    check(config, mesh, strategy)
    return layout_of(training.build(config).abstract()[0], config, mesh, strategy)


def layout_of(
    state: training.TrainState, config: ConfigDict, mesh: meshes.Shape, strategy: Strategy
) -> tuple[training.TrainState, PyTree]:
    """Returns the same as `layout` of a state whose shapes are known, for a strategy that is
    checked.
    """
    rules = {"pipe": sharding.PIPELINE, "expert": sharding.EXPERTS, "tensor": sharding.TENSOR}
    whole = {
        name: axis
        for used, rule in rules.items()
        if used in mesh.shape
        for name, axis in rule.items()
    }
    cut = {**whole, **sharding.ZERO}
    params = sharding.specs(state.params, cut if strategy.zero == 3 else whole, mesh)
    kept = sharding.specs(state.params, cut if strategy.zero else whole, mesh)
    return (
        sharding.state_specs(state, optimizers.from_config(config.optimizer), params, kept),
        kept,
    )


def gradient(config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()) -> GradFn:
    """Returns the gradient function of a strategy, `grad_fn(params, batch, rng) -> (grads,
    metrics)`, on whole arrays.

    By hand it cuts the batch into minibatches itself; by the compiler it takes the batch whole,
    and the train step cuts it. Of a pipeline with several chunks the layers are in the order of
    `pipeline.to_stages`, as in the state that `init` returns. Arguments and errors as for
    `build`.
    """
    state, kept = layout(config, mesh, strategy)
    # What is changed later does not reach into the gradient function.
    config = FrozenConfigDict(config)
    loss_fn, gradient_fn = _on_one_device(config, mesh, strategy, state.params, kept)
    return gradient_fn(loss_fn)


def build(config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()) -> Run:
    """Builds a training run on a mesh. Nothing is computed yet.

    Its functions take and return whole arrays, as on one device; `init` starts from the same
    numbers as on one device.

    Args:
      config: a whole configuration. The batch is that of all devices together.
      mesh: with an axis "data", "pipe" if the layers are to be divided, "context" if the
        sequences are, "expert" if the experts are, and "tensor" if heads, hidden width and
        vocabulary are.
      strategy: how the axes are used.

    Raises:
      ValueError: if something does not divide, or does not exist: the name, its value and the
        fix.
    """
    state, kept = layout(config, mesh, strategy)
    single, placed = training.build(config), sharding.place(state, mesh)
    loss_fn, gradient_fn = _on_one_device(single.config, mesh, strategy, state.params, kept)
    by_hand = strategy.by == "hand"
    train_step = training.make_train_step(
        loss_fn,
        optimizers.from_config(config.optimizer),
        # By hand, minibatches are cut inside of the gradient function: what can be sent once
        # for all is sent once.
        num_minibatches=1 if by_hand else config.training.num_minibatches,
        method=config.training.accumulation,
        accumulator_dtype=config.training.accumulator_dtype,
        donate=config.training.donate,
        gradient_fn=gradient_fn,
        out_shardings=(placed, NamedSharding(mesh, P())),
    )
    init, apply_fn = single.init, single.apply_fn
    if "pipe" in mesh.shape:
        size = mesh.shape["pipe"], strategy.chunks
        whole_loss = pipeline.loss(
            loss_fn, *_pipeline(single.config, mesh, strategy, state.params)
        )

        def init(rng: Any) -> training.TrainState:
            # Optimizers start from the same numbers in all layers: only parameters move.
            new = single.init(rng)
            # Cut before they move: no device has them all.
            cut = jax.lax.with_sharding_constraint(new.params, placed.params)
            return dataclasses.replace(new, params=pipeline.to_stages(cut, *size))

        def apply_fn(params: PyTree, *args: Any) -> Array:
            return single.apply_fn(pipeline.from_stages(params, *size), *args)

    else:
        whole_loss = data_parallel.loss(loss_fn, mesh, state.params) if by_hand else loss_fn
    return Run(
        single.config,
        apply_fn,
        whole_loss,
        train_step,
        jax.jit(init, out_shardings=placed),
        mesh,
        state,
    )


def _on_one_device(
    config: ConfigDict, mesh: Mesh, strategy: Strategy, held: PyTree, kept: PyTree
) -> tuple[LossFn, Callable[[LossFn], GradFn]]:
    """Returns the loss that is differentiated, and what makes the gradient function of it."""
    if "pipe" in mesh.shape:
        given = _pipeline(config, mesh, strategy, held)
        loss_fn = pipeline.loss_of_head(given[0], _tensor(mesh, strategy)[1])
        return loss_fn, lambda loss_fn: pipeline.gradient(loss_fn, *given, kept)
    if strategy.by == "hand":
        loss_fn = _local_loss(config, mesh, strategy, held)
        return loss_fn, functools.partial(_gradient_by_hand, config, mesh, strategy, held, kept)
    return _constrained_loss(config, mesh, strategy), functools.partial(
        _gradient_by_compiler, sharding.place(kept, mesh)
    )


def _local_loss(config: ConfigDict, mesh: Mesh, strategy: Strategy, held: PyTree) -> LossFn:
    """Returns what one device computes of the loss, on parameters and sequences as it holds
    them.
    """
    hooks, score = _tensor(mesh, strategy)
    if strategy.zero == 3:
        scanned = config.model.scan_layers
        # A rematerialized block gathers again already.
        by_block = "Block" in config.model.remat and config.model.remat_policy == "nothing"
        again = strategy.gather_again and not by_block
        layer = data_parallel.gather_layers(
            held, config.model.dtype, again=again, scanned=scanned
        )
        hooks = dataclasses.replace(hooks, layer=layer)
    if "context" in mesh.shape:
        hooks = context_parallel.hooks(hooks)
    if "expert" in mesh.shape:
        hooks = expert_parallel.hooks(hooks)
    apply_fn = training.as_function(
        Transformer(config.model, hooks), balance=config.model.num_experts > 0
    )
    if strategy.zero == 3:
        apply_fn = data_parallel.gather_around(apply_fn, held, config.model.dtype)
    if strategy.sequence:
        apply_fn = tensor_parallel.own_dropout(apply_fn)
    loss_fn = losses.of_model(config.model, apply_fn, score)
    if "context" in mesh.shape:
        loss_fn = data_parallel.divided(loss_fn, "context", context_parallel.own)
    if "expert" in mesh.shape:
        loss_fn = data_parallel.divided(loss_fn, "expert", expert_parallel.own)
    return loss_fn


def _tensor(mesh: Mesh, strategy: Strategy) -> tuple[Hooks, Callable[..., Any]]:
    """Returns what one device along "tensor" does of the model and of the cross entropy: all,
    without that axis.
    """
    if "tensor" not in mesh.shape:
        return Hooks(), training.cross_entropy
    if strategy.overlap == "none":
        return (
            tensor_parallel.hooks(mesh, sequence=strategy.sequence),
            tensor_parallel.cross_entropy,
        )
    return (
        async_tensor_parallel.hooks(mesh, bidirectional=strategy.overlap == "two-way"),
        tensor_parallel.cross_entropy,
    )


def _pipeline(
    config: ConfigDict, mesh: Mesh, strategy: Strategy, held: PyTree
) -> tuple[Any, Mesh, PyTree, Any]:
    """Returns what a pipeline executes: the model in parts, the mesh, the specs of its
    parameters and the schedule.
    """
    stages, chunks = mesh.shape["pipe"], strategy.chunks
    apply_part = pipeline.parts(config.model, stages * chunks, _tensor(mesh, strategy)[0])
    if strategy.sequence:
        apply_part = tensor_parallel.own_dropout(apply_part)
    return (
        apply_part,
        mesh,
        held,
        schedules.make(strategy.schedule, stages, strategy.microbatches, chunks),
    )


def _gradient_by_hand(
    config: ConfigDict,
    mesh: Mesh,
    strategy: Strategy,
    held: PyTree,
    kept: PyTree,
    loss_fn: LossFn,
) -> GradFn:
    return data_parallel.gradient(
        loss_fn,
        mesh,
        held,
        kept,
        stage=strategy.zero,
        num_minibatches=config.training.num_minibatches,
        method=config.training.accumulation,
        accumulator_dtype=config.training.accumulator_dtype,
    )


def _constrained_loss(config: ConfigDict, mesh: Mesh, strategy: Strategy) -> LossFn:
    """Returns the loss of one device, which says of the values that the model names where they
    lie.
    """
    rules = sharding.activation_rules(mesh, strategy.sequence)

    def named(x: Array, name: str) -> Array:
        place = NamedSharding(mesh, sharding.spec(sharding.ACTIVATIONS[name], rules))
        return checkpoint_name(jax.lax.with_sharding_constraint(x, place), name)

    def at_experts(run: Callable[[Array], Array], tokens: Array) -> Array:
        """Says where tokens lie before they go to their experts, there, and after: the compiler
        brings them.
        """
        there = named(named(tokens, "dispatched"), "at_experts")
        return named(named(run(there), "at_experts"), "dispatched")

    model = Transformer(config.model, Hooks(named=named, experts=at_experts))
    return losses.of_model(
        config.model, training.as_function(model, balance=config.model.num_experts > 0)
    )


def _gradient_by_compiler(placed: PyTree, loss_fn: LossFn) -> GradFn:
    grad_fn = gradient_accumulation.gradient(loss_fn)

    def constrained(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree]:
        grads, metrics = grad_fn(params, batch, rng)
        return jax.lax.with_sharding_constraint(grads, placed), metrics

    return constrained
