"""Lets the training program train another language model than the course's.

ended = loop.train(config, "runs/mine", builder=own_model.builder(apply_fn, init_params))
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

from course_lib import measure, optimizers, training
from course_lib.many_devices import meshes
from course_lib.many_devices.options import Strategy
from course_lib.models.losses import ApplyFn
from course_lib.one_device import mixed_precision
from course_lib.program import settings

PyTree = Any


def builder(
    apply_fn: ApplyFn, init_params: Callable[[Any], PyTree], matrices: Any = None
) -> Callable[..., tuple[training.Run, NamedSharding]]:
    """Returns a function that builds a run, for `loop.train`.

    Along "data", the only axis, each device has all parameters and a share of the batch, by the
    compiler. The configuration's `model` is not read, except for `vocab_size`.

    Args:
      apply_fn: `apply_fn(params, tokens, rng) -> logits`; `training.as_function` makes one.
      init_params: `init_params(rng)` returns float32 parameters.
      matrices: for Muon, as of `optimizers.get`: which parameters are matrices.
    """

    def build(
        config: ConfigDict, devices: Sequence[jax.Device] | None = None
    ) -> tuple[training.Run, NamedSharding]:
        devices = jax.devices() if devices is None else devices
        mesh = meshes.make(settings.axes(config, len(devices)), devices)
        _check(config, set(mesh.shape))
        config = FrozenConfigDict(config)
        muon = dict(where=matrices) if config.optimizer.name == "muon" else {}
        optimizer = optimizers.from_config(config.optimizer, **muon)
        scale = mixed_precision.loss_scale(config.training.loss_scale)

        def init(rng: Any) -> training.TrainState:
            param_rng, state_rng = jax.random.split(rng)
            params = optimizers.cast_params(config.optimizer, init_params(param_rng))
            return training.init_state(params, optimizer, state_rng, scale)

        loss_fn, everywhere = training.next_token_loss(apply_fn), NamedSharding(mesh, P())
        step = training.make_train_step(
            loss_fn,
            optimizer,
            **training.minibatches(config),
            donate=config.training.donate,
            skip_not_finite=config.run.non_finite == "skip",
            out_shardings=everywhere,
        )
        specs = jax.tree.map(lambda _: P(), jax.eval_shape(init, jax.random.key(0)))
        init = jax.jit(init, out_shardings=everywhere)
        run = training.Run(config, apply_fn, loss_fn, step, init, mesh, specs)
        run = dataclasses.replace(run, flops=lambda: measure.flops(step, *run.abstract()))
        return run, NamedSharding(mesh, P("data"))

    return build


def _check(config: ConfigDict, axes: set[str]) -> None:
    """Refuses what would need to know the layers."""
    strategy = settings.strategy(config)
    usual = vars(Strategy(by=strategy.by))
    for name, value, needed in (
        ("mesh", axes, {"data"}),
        *((f"strategy.{name}", value, usual[name]) for name, value in vars(strategy).items()),
        ("optimizer.offload", config.optimizer.offload, False),
        ("training.backward", config.training.backward, "autodiff"),
    ):
        if value != needed:
            raise ValueError(
                f"{name}={value} must be {needed} for another model than the course's: the"
                " program does not know its layers"
            )
