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
from course_lib.models import losses
from course_lib.models.hooks import Hooks
from course_lib.models.transformer import Transformer
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn
from course_lib.training import Run as Run

PyTree = Any


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
    training.check(config)
    check(config, mesh, strategy)
    return layout_of(
        _shapes(training.functions(FrozenConfigDict(config))[2]), config, mesh, strategy
    )


def _shapes(init: Callable[..., training.TrainState]) -> training.TrainState:
    return jax.eval_shape(init, jax.random.key(0))


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

    It gets the batch whole, and cuts it into minibatches itself. Of a pipeline with several
    chunks the layers are in the order of `pipeline.to_stages`, as in the state that `init`
    returns. Arguments and errors as for `build`.
    """
    state, kept = layout(config, mesh, strategy)
    # What is changed later does not reach into the gradient function.
    config = FrozenConfigDict(config)
    of_one = training.functions(config)[1]
    loss_fn, gradient_fn, _ = _ways(config, mesh, strategy, of_one, state.params, kept)
    return gradient_fn(loss_fn)


def build(config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()) -> Run:
    """Builds a training run on a mesh. Nothing is computed yet.

    Its functions take and return whole arrays, as on one device; `init` starts from the same
    numbers as on one device.

    Args:
      config: a whole configuration. The batch is that of all devices together.
      mesh: with an axis "data", "pipe" if the layers are to be divided, "context" if the
        sequences are, "expert" if the experts are, and "tensor" if heads, hidden width and
        vocabulary are. It may have one device only, which computes what `training.build` does.
      strategy: how the axes are used.

    Raises:
      ValueError: if something does not divide, or does not exist: the name, its value and the
        fix.
    """
    training.check(config)
    return of_checked(config, mesh, strategy)


def of_checked(
    config: ConfigDict, mesh: Mesh, strategy: Strategy, *, skip_not_finite: bool = False
) -> Run:
    """Builds a training run as `build` does, from a configuration that is checked already.

    Args:
      config: a whole configuration, which `configs.check` has passed.
      mesh: as for `build`.
      strategy: as for `build`.
      skip_not_finite: as for `training.make_train_step`.

    Raises:
      ValueError: if the configuration, the mesh and the strategy do not go together.
    """
    check(config, mesh, strategy)
    config = FrozenConfigDict(config)
    apply_fn, of_one, init = training.functions(config)
    specs, kept = layout_of(_shapes(init), config, mesh, strategy)
    placed = sharding.place(specs, mesh)
    loss_fn, gradient_fn, evaluated = _ways(config, mesh, strategy, of_one, specs.params, kept)
    by_hand = mesh.size > 1 and strategy.by == "hand"
    train_step = training.make_train_step(
        loss_fn,
        optimizers.from_config(config.optimizer),
        donate=config.training.donate,
        gradient_fn=_of_one_key(gradient_fn) if by_hand else gradient_fn,
        skip_not_finite=skip_not_finite,
        out_shardings=(placed, NamedSharding(mesh, P())),
    )
    if _piped(mesh):
        init, apply_fn = _in_stages(init, apply_fn, mesh, strategy, placed)
    return Run(
        config,
        apply_fn,
        evaluated,
        train_step,
        jax.jit(init, out_shardings=placed),
        mesh,
        specs,
    )


def _of_one_key(gradient_fn: Callable[[LossFn], GradFn]) -> Callable[[LossFn], GradFn]:
    """Splits the step's key once more, as older versions did: stored runs keep their dropout
    masks. `gradient` does not, so its masks are others than the step's.
    """

    def of_loss(loss_fn: LossFn) -> GradFn:
        grad_fn = gradient_fn(loss_fn)
        return lambda params, batch, rng: grad_fn(params, batch, jax.random.split(rng, 1)[0])

    return of_loss


def _piped(mesh: meshes.Shape) -> bool:
    return "pipe" in mesh.shape and mesh.size > 1


def _in_stages(init: Any, apply_fn: Any, mesh: Mesh, strategy: Strategy, placed: Any) -> Any:
    """Returns both functions for layers in the order of a pipeline's stages."""
    size = mesh.shape["pipe"], strategy.chunks

    def init_in_stages(rng: Any) -> training.TrainState:
        new = init(rng)
        # Cut before they move: no device has them all.
        cut = jax.lax.with_sharding_constraint(new.params, placed.params)
        # Only parameters move: optimizers start from the same numbers in all layers.
        return dataclasses.replace(new, params=pipeline.to_stages(cut, *size))

    def apply_to_stages(params: PyTree, *args: Any) -> Array:
        return apply_fn(pipeline.from_stages(params, *size), *args)

    return init_in_stages, apply_to_stages


def _ways(
    config: ConfigDict,
    mesh: Mesh,
    strategy: Strategy,
    of_one: LossFn,
    held: PyTree,
    kept: PyTree,
) -> tuple[LossFn, Callable[[LossFn], GradFn], LossFn]:
    """Returns the loss that is differentiated, what makes the gradient function of it, and the
    loss of whole arrays.

    Here a batch is cut into minibatches: inside of the gradient function, so that what can be
    sent once for all of them is sent once. And here one device goes its own way: it has nobody
    to send to, so its program has no `jax.shard_map`.
    """
    cut: Callable[[GradFn], GradFn] = functools.partial(
        gradient_accumulation.in_minibatches, **training.minibatches(config)
    )
    if mesh.size == 1:
        return of_one, lambda loss_fn: cut(gradient_accumulation.gradient(loss_fn)), of_one
    if _piped(mesh):
        given = _pipeline(config, mesh, strategy, held)
        loss_fn = pipeline.loss_of_head(given[0], _tensor(mesh, strategy)[1])
        return (
            loss_fn,
            lambda loss_fn: pipeline.gradient(loss_fn, *given, kept),
            pipeline.loss(loss_fn, *given),
        )
    if strategy.by == "hand":
        loss_fn = _local_loss(config, mesh, strategy, held)
        by_hand = functools.partial(
            data_parallel.gradient,
            mesh=mesh,
            param_specs=held,
            grad_specs=kept,
            stage=strategy.zero,
            cut=cut,
        )
        return loss_fn, by_hand, data_parallel.loss(loss_fn, mesh, held)
    loss_fn, placed = _constrained_loss(config, mesh, strategy), sharding.place(kept, mesh)
    return loss_fn, lambda loss_fn: cut(_gradient_by_compiler(placed, loss_fn)), loss_fn


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
