"""Training runs on a mesh: the model, loss, optimizer and train step of one device.

    mesh = meshes.make({"data": 4, "tensor": 2})
    run = strategies.build(config, mesh, Strategy(zero=1, sequence=True))
    state = run.init(jax.random.key(0))    # divided from the start: no device ever holds it all
    state, metrics = run.train_step(state, batch)

The name of a mesh axis says what it divides; a `Strategy` says how. Most strategies exist
`by="hand"`, with explicit collectives inside a `jax.shard_map`, and `by="compiler"`, as
shardings that `jax.jit` has to respect. Both compute the same numbers as one device. Pipelines
and `overlap` exist by hand only:

    mesh = meshes.make({"data": 2, "pipe": 2, "tensor": 2})
    run = strategies.build(config, mesh, Strategy(schedule="zero_bubble", microbatches=4))
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

from course_lib import configs, optimizers, training
from course_lib.many_devices import (
    async_tensor_parallel,
    data_parallel,
    meshes,
    options,
    sharding,
    tensor_parallel,
)
from course_lib.many_devices.options import Strategy
from course_lib.many_devices.pipeline_parallel import pipeline, schedules
from course_lib.models import losses, transformer
from course_lib.models.hooks import Hooks
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn
from course_lib.training import Run as Run

PyTree = Any


def check(config: ConfigDict, mesh: meshes.AnyMesh, strategy: Strategy) -> None:
    """Refuses a configuration, a mesh and a strategy that do not go together. Arguments as for
    `build`; the shape of a mesh will do.
    """
    configs.check(config)
    _check_strategy(config, mesh, strategy)


def _check_strategy(config: ConfigDict, mesh: meshes.AnyMesh, strategy: Strategy) -> None:
    options.check(
        config.model,
        mesh,
        strategy,
        batch_size=config.data.batch_size,
        seq_len=config.data.seq_len,
        num_minibatches=config.training.num_minibatches,
        accumulator_dtype=config.training.accumulator_dtype,
    )
    if config.training.backward == "in_place" and mesh.size > 1:
        raise ValueError(
            f"training.backward='in_place' must be 'autodiff' on {mesh.size} devices: the"
            " backward pass by hand does not sum gradients over devices; ZeRO stage 2 divides"
            " them (strategy.zero=2)"
        )


def layout(
    config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()
) -> tuple[training.TrainState, PyTree]:
    """Returns which device holds what. Arguments and errors as for `build`.

    Returns:
      The specs of the train state, as a `TrainState`, and those of the gradients.
    """
    check(config, mesh, strategy)
    state = _shapes(training.functions(FrozenConfigDict(config))[2])
    return layout_of(state, mesh, strategy)


def _shapes(init: Callable[..., training.TrainState]) -> training.TrainState:
    return jax.eval_shape(init, jax.random.key(0))


def layout_of(
    state: training.TrainState, mesh: meshes.AnyMesh, strategy: Strategy
) -> tuple[training.TrainState, PyTree]:
    """Returns the specs of a train state (or its shapes) and of its gradients, for a checked
    strategy.
    """
    model = {name: cut for axis in options.used(mesh) for name, cut in axis.params.items()}
    divided = {**model, **sharding.ZERO}
    params = sharding.specs(state.params, divided if strategy.zero == 3 else model, mesh)
    grads = sharding.specs(state.params, divided if strategy.zero else model, mesh)
    return sharding.state_specs(state, params, grads, mesh), grads


def activation_rules(mesh: meshes.AnyMesh, sequence: bool) -> sharding.Rules:
    """Returns which mesh axes cut the dimensions of activations: "data" cuts the batch,
    "tensor" the heads and the hidden width, and with `sequence` also norms and residuals.
    """
    rules = {name: cut for axis in options.used(mesh) for name, cut in axis.activations.items()}
    return rules | ({"length": "tensor"} if sequence else {})


def gradient(config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()) -> GradFn:
    """Returns a strategy's `grad_fn(params, batch, rng) -> (grads, metrics)` on global arrays.

    It cuts the batch into minibatches itself. In a pipeline with several chunks the layers are
    in the order of `pipeline.to_stages`, as in the state that `init` returns. Arguments and
    errors as for `build`.
    """
    specs, grad_specs = layout(config, mesh, strategy)
    # Later changes of the argument do not reach the gradient function.
    config = FrozenConfigDict(config)
    loss_fn, gradient_fn, _ = _ways(config, mesh, strategy, (specs.params, grad_specs))
    return gradient_fn(loss_fn)


def build(config: ConfigDict, mesh: Mesh, strategy: Strategy = Strategy()) -> Run:
    """Builds a training run on a mesh. Nothing is computed yet.

    Its functions take and return global arrays. `init` returns the numbers that it returns on
    one device.

    Args:
      config: a configuration. Its batch is that of all devices together.
      mesh: with an axis "data", and with "pipe" to divide the layers, "context" the sequences,
        "expert" the experts, "tensor" heads, hidden width and vocabulary. On one device the run
        computes the same as the one of `training.build`.
      strategy: how the axes are used.

    Raises:
      ValueError: if a size does not divide, or a value does not exist: naming the field, its
        value and the fix.
    """
    configs.check(config)
    return of_checked(config, mesh, strategy)


def of_checked(
    config: ConfigDict, mesh: Mesh, strategy: Strategy, *, skip_not_finite: bool = False
) -> Run:
    """Builds a run as `build` does, from a configuration that `configs.check` has passed.

    `skip_not_finite` is that of `training.make_train_step`.
    """
    _check_strategy(config, mesh, strategy)
    _check_offload(config, mesh, skip_not_finite)
    config = FrozenConfigDict(config)
    apply_fn, _, init = training.functions(config)
    optimizer = optimizers.from_config(config.optimizer)
    specs, grad_specs = layout_of(_shapes(init), mesh, strategy)
    placed = sharding.place(specs, mesh)
    if config.optimizer.offload:
        placed = dataclasses.replace(placed, opt_state=None)  # the optimizer places it
    loss_fn, gradient_fn, evaluated = _ways(config, mesh, strategy, (specs.params, grad_specs))
    by_hand = mesh.size > 1 and strategy.by == "hand"
    train_step = training.make_train_step(
        loss_fn,
        optimizer,
        donate=config.training.donate,
        gradient_fn=_with_own_key(gradient_fn) if by_hand else gradient_fn,
        skip_not_finite=skip_not_finite,
        out_shardings=(placed, NamedSharding(mesh, P())),
    )
    if _piped(mesh):
        init, apply_fn = _in_stages(init, apply_fn, mesh, strategy, placed)
    init = jax.jit(init, out_shardings=placed)
    return Run(config, apply_fn, evaluated, train_step, init, mesh, specs)


def _check_offload(config: ConfigDict, mesh: Mesh, skip_not_finite: bool) -> None:
    if not config.optimizer.offload:
        return
    if mesh.size > 1:
        raise ValueError(
            f"optimizer.offload=True must be False on {mesh.size} devices: moments are streamed"
            " to one device; divide them instead, with ZeRO (strategy.zero=1)"
        )
    if skip_not_finite:
        raise ValueError(
            "optimizer.offload=True must have run.non_finite='stop': an update is skipped after"
            " it is computed, when the old moments on the host are overwritten"
        )


def _with_own_key(gradient_fn: Callable[[LossFn], GradFn]) -> Callable[[LossFn], GradFn]:
    """Splits the step's key once more, as older versions did, so that stored runs keep their
    dropout masks. The masks of `gradient` therefore differ from the step's.
    """

    def of_loss(loss_fn: LossFn) -> GradFn:
        grad_fn = gradient_fn(loss_fn)
        return lambda params, batch, rng: grad_fn(params, batch, jax.random.split(rng, 1)[0])

    return of_loss


def _piped(mesh: meshes.AnyMesh) -> bool:
    return "pipe" in mesh.shape and mesh.size > 1


def _in_stages(init: Any, apply_fn: Any, mesh: Mesh, strategy: Strategy, placed: Any) -> Any:
    """Returns both functions for layers in the order of a pipeline's stages."""
    size = mesh.shape["pipe"], strategy.chunks

    def init_in_stages(rng: Any) -> training.TrainState:
        new = init(rng)
        # Divide before moving: no device can hold all of them.
        divided = jax.lax.with_sharding_constraint(new.params, placed.params)
        # Only parameters move: optimizers start from the same numbers in all layers.
        return dataclasses.replace(new, params=pipeline.to_stages(divided, *size))

    def apply_to_stages(params: PyTree, *args: Any) -> Array:
        return apply_fn(pipeline.from_stages(params, *size), *args)

    return init_in_stages, apply_to_stages


def _ways(
    config: ConfigDict,
    mesh: Mesh,
    strategy: Strategy,
    specs: tuple[PyTree, PyTree],
) -> tuple[LossFn, Callable[[LossFn], GradFn], LossFn]:
    """Returns the loss to differentiate, a function that makes its gradient function, and the
    loss of global arrays.

    The gradient function cuts the batch into minibatches, so that it can send once per step
    what all of them need. One device has nobody to send to: its program has no `jax.shard_map`.

    Args:
      config: a frozen, checked configuration.
      mesh: of the devices.
      strategy: how its axes are used.
      specs: of the parameters, and of their gradients.
    """
    model, (param_specs, grad_specs) = config.model, specs
    if mesh.size == 1:
        loss_fn = training.loss_of(model)
        return loss_fn, training.gradient_from(config), loss_fn
    cut: Callable[[GradFn], GradFn] = functools.partial(
        gradient_accumulation.in_minibatches, **training.minibatches(config)
    )
    if _piped(mesh):
        parts = _pipeline(model, mesh, strategy, param_specs)
        loss_fn = pipeline.loss_of_head(parts[0], _tensor(model, mesh, strategy)[1])
        return (
            loss_fn,
            lambda loss_fn: pipeline.gradient(loss_fn, *parts, grad_specs),
            pipeline.loss(loss_fn, *parts),
        )
    if strategy.by == "hand":
        loss_fn = _local_loss(model, mesh, strategy, specs)
        by_hand = functools.partial(
            data_parallel.gradient,
            mesh=mesh,
            param_specs=param_specs,
            grad_specs=grad_specs,
            stage=strategy.zero,
            cut=cut,
        )
        return loss_fn, by_hand, data_parallel.loss(loss_fn, mesh, param_specs)
    placed = sharding.place(grad_specs, mesh)
    loss_fn = _constrained_loss(model, mesh, strategy, grad_specs)
    return loss_fn, lambda loss_fn: cut(_gradient_by_compiler(placed, loss_fn)), loss_fn


def _local_loss(
    model: ConfigDict, mesh: Mesh, strategy: Strategy, specs: tuple[PyTree, PyTree]
) -> LossFn:
    """Returns one device's share of the loss, on its part of parameters and sequences. Takes
    the specs of the parameters, and of their gradients.
    """
    param_specs, grad_specs = specs
    hooks, score = _tensor(model, mesh, strategy)
    if strategy.zero == 2:
        layer = data_parallel.scatter_layers(grad_specs, scanned=model.scan_layers)
        hooks = dataclasses.replace(hooks, layer=layer)
    if strategy.zero == 3:
        # A rematerialized block gathers again anyway.
        by_block = "Block" in model.remat and model.remat_policy == "nothing"
        again = strategy.gather_again and not by_block
        layer = data_parallel.gather_layers(
            param_specs, model.dtype, again=again, scanned=model.scan_layers
        )
        hooks = dataclasses.replace(hooks, layer=layer)
    for axis in options.used(mesh):
        hooks = axis.hooks(hooks)
    apply_fn = transformer.function(model, hooks, balance=model.num_experts > 0)
    if strategy.zero == 2:
        apply_fn = data_parallel.scatter_around(apply_fn, grad_specs)
    if strategy.zero == 3:
        apply_fn = data_parallel.gather_around(apply_fn, param_specs, model.dtype)
    loss_fn = losses.transformer_loss(model, apply_fn, score)
    for axis in options.used(mesh):
        if axis.own:
            loss_fn = data_parallel.divided(loss_fn, axis.name, axis.own)
    return loss_fn


def _tensor(
    model: ConfigDict, mesh: Mesh, strategy: Strategy
) -> tuple[Hooks, Callable[..., Any]]:
    """Returns the hooks and the cross entropy of one device along "tensor". Without that axis,
    returns those of the full model.
    """
    if "tensor" not in mesh.shape:
        return training.hooks_and_score(model, Hooks())
    if strategy.overlap == "none":
        hooks = tensor_parallel.hooks(mesh, sequence=strategy.sequence)
    else:
        two_way = strategy.overlap == "two-way"
        hooks = async_tensor_parallel.hooks(mesh, bidirectional=two_way)
    if model.loss_chunks == 1:
        return hooks, tensor_parallel.cross_entropy
    factors = tensor_parallel.gather_factors if strategy.sequence else tensor_parallel.factors
    score = functools.partial(
        tensor_parallel.linear_cross_entropy, chunks=model.loss_chunks, along=model.loss_along
    )
    return dataclasses.replace(hooks, output=factors), score


def _pipeline(
    model: ConfigDict, mesh: Mesh, strategy: Strategy, param_specs: PyTree
) -> tuple[Any, Mesh, PyTree, Any]:
    """Returns what a pipeline executes: the model in parts, the mesh, the specs of the
    parameters and the schedule.
    """
    stages, chunks = mesh.shape["pipe"], strategy.chunks
    parts = transformer.parts(model, _tensor(model, mesh, strategy)[0])
    schedule = schedules.make(strategy.schedule, stages, strategy.microbatches, chunks)
    return parts, mesh, param_specs, schedule


def _constrained_loss(
    model: ConfigDict, mesh: Mesh, strategy: Strategy, grad_specs: PyTree
) -> LossFn:
    """Returns the loss of one device, with sharding constraints on the values that the model
    names, and in ZeRO stage 2 on the gradients of each layer.
    """
    rules = activation_rules(mesh, strategy.sequence)

    def named(x: Array, name: str) -> Array:
        place = NamedSharding(mesh, sharding.spec(sharding.ACTIVATIONS[name], rules))
        return checkpoint_name(jax.lax.with_sharding_constraint(x, place), name)

    def at_experts(run: Callable[[Array], Array], tokens: Array) -> Array:
        """Constrains tokens before, at and after their experts: the compiler moves them."""
        dispatched = named(named(tokens, "dispatched"), "at_experts")
        return named(named(run(dispatched), "at_experts"), "dispatched")

    hooks = Hooks(named=named, experts=at_experts)
    if strategy.zero == 2:
        layer = data_parallel.constrain_layers(grad_specs, mesh, scanned=model.scan_layers)
        hooks = dataclasses.replace(hooks, layer=layer)
    return training.loss_of(model, hooks)


def _gradient_by_compiler(placed: PyTree, loss_fn: LossFn) -> GradFn:
    grad_fn = gradient_accumulation.gradient(loss_fn)

    def constrained(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree]:
        grads, metrics = grad_fn(params, batch, rng)
        return jax.lax.with_sharding_constraint(grads, placed), metrics

    return constrained
