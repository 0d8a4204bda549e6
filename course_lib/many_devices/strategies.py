"""Training runs on a mesh: the model, loss, optimizer and train step of one device.

    mesh = meshes.make({"data": 4, "tensor": 2})
    run = strategies.build(config, mesh, Strategy(zero=1, sequence=True))
    state = run.init(jax.random.key(0))    # divided from the start: no device ever holds it all
    state, metrics = run.train_step(state, batch)

The name of a mesh axis says what it divides; a `Strategy` says how. Most strategies exist
`by="hand"`, with explicit collectives inside a `jax.shard_map`, and `by="compiler"`, as
shardings that `jax.jit` has to respect; "data", "expert" and "tensor" also `by="types"`
(`by_types`). All compute the same numbers as one device. Pipelines and `overlap` exist by hand
only:

    mesh = meshes.make({"data": 2, "pipe": 2, "tensor": 2})
    run = strategies.build(config, mesh, Strategy(schedule="zero_bubble", microbatches=4))
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import configs, optimizers, training
from course_lib.many_devices import axis, meshes, options, sharding
from course_lib.many_devices.axis import Share
from course_lib.many_devices.options import Strategy
from course_lib.models import transformer
from course_lib.models.hooks import Hooks
from course_lib.one_device import gradient_accumulation
from course_lib.one_device.gradient_accumulation import GradFn, LossFn
from course_lib.training import Run as Run

PyTree = Any
Ways = tuple[LossFn, Callable[[LossFn], GradFn], LossFn]


def check(config: ConfigDict, mesh: meshes.AnyMesh, strategy: Strategy) -> None:
    """Refuses a configuration, a mesh and a strategy that do not go together. Arguments as for
    `build`; the shape of a mesh will do.
    """
    configs.check(config)
    options.check(config, mesh, strategy)


def layout(
    config: ConfigDict, mesh: meshes.AnyMesh, strategy: Strategy = Strategy()
) -> tuple[training.TrainState, PyTree]:
    """Returns which device holds what. Arguments and errors as for `build`.

    Returns:
      The specs of the train state, as a `TrainState`, and those of the gradients.
    """
    check(config, mesh, strategy)
    state = _shapes(training.functions(FrozenConfigDict(config)).init)
    return layout_of(state, mesh, strategy)


def _shapes(init: Callable[..., training.TrainState]) -> training.TrainState:
    return jax.eval_shape(init, jax.random.key(0))


def layout_of(
    state: training.TrainState, mesh: meshes.AnyMesh, strategy: Strategy
) -> tuple[training.TrainState, PyTree]:
    """Returns the specs of a train state (or its shapes) and of its gradients, for a checked
    strategy.
    """
    model = {name: cut for each in axis.used(mesh) for name, cut in each.params.items()}
    divided = {**model, **sharding.ZERO}
    params = sharding.specs(state.params, divided if strategy.zero == 3 else model, mesh)
    grads = sharding.specs(state.params, divided if strategy.zero else model, mesh)
    return sharding.state_specs(state, params, grads, mesh), grads


def activation_rules(mesh: meshes.AnyMesh, sequence: bool) -> sharding.Rules:
    """Returns which mesh axes cut the dimensions of activations: "data" cuts the batch,
    "tensor" the heads and the hidden width, and with `sequence` also norms and residuals.
    """
    rules = {name: cut for each in axis.used(mesh) for name, cut in each.activations.items()}
    return rules | ({"length": "tensor"} if sequence else {})


def gradient(
    config: ConfigDict, mesh: meshes.AnyMesh, strategy: Strategy = Strategy()
) -> GradFn:
    """Returns a strategy's `grad_fn(params, batch, rng) -> (grads, metrics)` on global arrays.

    It cuts the batch into minibatches itself. In a pipeline with several chunks the layers are
    in the order of `pipeline.to_stages`, as in the state that `init` returns. Arguments and
    errors as for `build`.
    """
    if meshes.explicit(mesh):
        inside = gradient(config, meshes.auto(mesh), strategy)
        grad_specs = layout(config, mesh, strategy)[1]
        return meshes.with_auto_axes(inside, mesh, (grad_specs, P()))
    specs, grad_specs = layout(config, mesh, strategy)
    # Later changes of the argument do not reach the gradient function.
    config = FrozenConfigDict(config)
    share = Share(config, mesh, strategy, specs.params, grad_specs)
    loss_fn, gradient_fn, _ = _ways(share)
    return gradient_fn(loss_fn)


def build(
    config: ConfigDict,
    mesh: Mesh,
    strategy: Strategy = Strategy(),
    *,
    skip_not_finite: bool = False,
    gradient_norm: bool = False,
) -> Run:
    """Builds a training run on a mesh, of global arrays; `init` returns the numbers of one
    device. Nothing is computed yet. The configuration's batch is that of all devices together.
    The mesh has an axis "data", and "pipe" to divide the layers, "context" the sequences,
    "expert" the experts, "tensor" heads, hidden width and vocabulary. One device computes the
    same as `training.build`. The two options are those of `training.make_train_step`.
    """
    if meshes.explicit(mesh):
        options = dict(skip_not_finite=skip_not_finite, gradient_norm=gradient_norm)
        return _outside(build(config, meshes.auto(mesh), strategy, **options), mesh)
    check(config, mesh, strategy)
    if config.optimizer.offload and skip_not_finite:
        raise ValueError(
            "optimizer.offload=True must have run.non_finite='stop': an update is skipped after"
            " it is computed, when the old moments on the host are overwritten"
        )
    config = FrozenConfigDict(config)
    apply_fn, init = transformer.function(config.model), training.functions(config).init
    state, around = _shapes(init), None
    specs, grad_specs = layout_of(state, mesh, strategy)
    if optimizers.OPTIMIZERS[config.optimizer.name].whole and mesh.size > 1:
        from course_lib.many_devices import muon

        around = functools.partial(
            muon.on_stacks, params=state.params, specs=grad_specs, mesh=mesh
        )
    optimizer = optimizers.from_config(config.optimizer, around=around)
    placed = sharding.place(specs, mesh)
    if config.optimizer.offload:
        placed = dataclasses.replace(placed, opt_state=None)  # the optimizer places it
    share = Share(config, mesh, strategy, specs.params, grad_specs)
    loss_fn, gradient_fn, evaluated = _ways(share)
    by_hand = mesh.size > 1 and strategy.by == "hand"
    train_step = training.make_train_step(
        loss_fn,
        optimizer,
        donate=config.training.donate,
        gradient_fn=_with_own_key(gradient_fn) if by_hand else gradient_fn,
        skip_not_finite=skip_not_finite,
        gradient_norm=gradient_norm,
        out_shardings=(placed, NamedSharding(mesh, P())),
    )
    if _piped(mesh):
        init, apply_fn = _in_stages(init, apply_fn, mesh, strategy, placed)
    init = jax.jit(init, out_shardings=placed)
    return Run(config, apply_fn, evaluated, train_step, init, mesh, specs)


def _outside(run: Run, mesh: Mesh) -> Run:
    """Returns a run on a mesh with Explicit axes, from that with Auto axes."""
    on_mesh = functools.partial(meshes.with_auto_axes, mesh=mesh)
    donated = 0 if run.config.training.donate else None
    return dataclasses.replace(
        run,
        apply_fn=on_mesh(run.apply_fn, out_specs=P()),
        loss_fn=on_mesh(run.loss_fn, out_specs=P()),
        train_step=on_mesh(run.train_step, out_specs=(run.specs, P()), donate_argnums=donated),
        init=on_mesh(run.init, out_specs=run.specs),
        mesh=mesh,
    )


def _with_own_key(gradient_fn: Callable[[LossFn], GradFn]) -> Callable[[LossFn], GradFn]:
    """Splits the key once more, as older versions did: stored runs keep their dropout masks."""

    def of_loss(loss_fn: LossFn) -> GradFn:
        grad_fn = gradient_fn(loss_fn)
        return lambda params, batch, rng: grad_fn(params, batch, jax.random.split(rng, 1)[0])

    return of_loss


def _piped(mesh: meshes.AnyMesh) -> bool:
    return "pipe" in mesh.shape and mesh.size > 1


def _in_stages(init: Any, apply_fn: Any, mesh: Mesh, strategy: Strategy, placed: Any) -> Any:
    """Returns both functions for layers in the order of a pipeline's stages."""
    from course_lib.many_devices.pipeline_parallel import pipeline

    size = mesh.shape["pipe"], strategy.chunks, strategy.schedule

    def init_in_stages(rng: Any) -> training.TrainState:
        new = init(rng)
        # Divide before moving: no device can hold all of them.
        divided = jax.lax.with_sharding_constraint(new.params, placed.params)
        # Only parameters move: optimizers start from the same numbers in all layers.
        return dataclasses.replace(new, params=pipeline.to_stages(divided, *size))

    def apply_to_stages(params: PyTree, *args: Any) -> Array:
        return apply_fn(pipeline.from_stages(params, *size), *args)

    return init_in_stages, apply_to_stages


def _ways(share: Share) -> Ways:
    """Returns the loss to differentiate, a function that makes its gradient function, and the
    loss of global arrays. The gradient function cuts the batch into minibatches, so that it can
    send once per step what all need. One device's program has no `jax.shard_map`.
    """
    if share.mesh.size == 1:
        whole = training.functions(share.config)
        return whole.loss_fn, whole.gradient, whole.loss_fn
    if _piped(share.mesh):
        return _in_a_pipeline(share)
    if share.strategy.by == "types":
        from course_lib.many_devices import by_types

        return by_types.ways(share)
    return (_by_hand if share.strategy.by == "hand" else _by_compiler)(share)


def _functions(share: Share) -> training.Functions:
    """Returns the functions of one device, as all axes change them together."""
    axes = axis.used(share.mesh)
    hooks = functools.reduce(operator.or_, (each.hooks(share) for each in axes))
    scores = (each.score(share) for each in axes)  # one axis at most cuts the vocabulary
    return training.functions(share.config, hooks, next(filter(None, scores), None))


def _by_hand(share: Share) -> Ways:
    """Returns what `_ways` returns: collectives are written out inside `jax.shard_map`."""
    from course_lib.many_devices import data_parallel

    own = _functions(share)
    loss_fn = own.loss_fn
    for each in axis.used(share.mesh):
        if each.own:
            loss_fn = data_parallel.divided(loss_fn, each.name, each.own)
    gradient_fn = functools.partial(
        data_parallel.gradient,
        mesh=share.mesh,
        param_specs=share.params,
        grad_specs=share.grads,
        stage=share.strategy.zero,
        cut=own.in_minibatches,
    )
    return loss_fn, gradient_fn, data_parallel.loss(loss_fn, share.mesh, share.params)


def _in_a_pipeline(share: Share) -> Ways:
    """Returns what `_ways` returns, of the program that executes a schedule."""
    from course_lib.many_devices.pipeline_parallel import pipeline, schedules

    mesh, strategy = share.mesh, share.strategy
    own = _functions(share)
    schedule = schedules.make(
        strategy.schedule, mesh.shape["pipe"], strategy.microbatches, strategy.chunks
    )
    runs = transformer.parts(share.model, own.hooks), mesh, share.params, schedule
    loss_fn = pipeline.loss_of_head(runs[0], own.score)
    return (
        loss_fn,
        lambda loss_fn: pipeline.gradient(loss_fn, *runs, share.grads),
        pipeline.loss(loss_fn, *runs),
    )


def _by_compiler(share: Share) -> Ways:
    """Returns what `_ways` returns: the program of one device, with sharding constraints."""
    mesh, strategy = share.mesh, share.strategy
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
        from course_lib.many_devices import data_parallel

        specs = data_parallel.of_layer(share.grads, share.model.scan_layers)
        hooks |= Hooks(layer=data_parallel.constrain_layers(specs, mesh))
    own, placed = training.functions(share.config, hooks), sharding.place(share.grads, mesh)

    def gradient_fn(loss_fn: LossFn) -> GradFn:
        grad_fn = gradient_accumulation.gradient(loss_fn)

        def constrained(params: PyTree, batch: PyTree, rng: Any) -> tuple[PyTree, PyTree]:
            grads, metrics = grad_fn(params, batch, rng)
            return jax.lax.with_sharding_constraint(grads, placed), metrics

        return own.in_minibatches(constrained)

    return own.loss_fn, gradient_fn, own.loss_fn
