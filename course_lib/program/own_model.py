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

from course_lib import configs, measure, optimizers, training
from course_lib.many_devices import meshes
from course_lib.many_devices.options import Strategy
from course_lib.models.losses import ApplyFn
from course_lib.one_device import mixed_precision
from course_lib.program import settings

PyTree = Any

FIELDS = "vocab_size", "num_outputs", "max_seq_len"  # of `model`


def builder(
    apply_fn: ApplyFn,
    init_params: Callable[[Any], PyTree],
    **by_name: Callable[[str], Any],
) -> Callable[..., tuple[training.Run, NamedSharding]]:
    """Returns a function that builds a run, for `loop.train`.

    Along "data", the only axis, each device has all parameters and a share of the batch, by the
    compiler. `FIELDS` of the configuration's `model` are read. The others do nothing, and have
    to be those of a preset.

    Args:
      apply_fn: `apply_fn(params, tokens, rng) -> logits`; `training.as_function` makes one.
      init_params: `init_params(rng)` returns float32 parameters.
      by_name: `matrices` and `stacks`, as in `optimizers.get`.
    """

    def build(
        config: ConfigDict, devices: Sequence[jax.Device] | None = None
    ) -> tuple[training.Run, NamedSharding]:
        devices = jax.devices() if devices is None else devices
        mesh = meshes.make(settings.axes(config, len(devices)), devices)
        _check(config, set(mesh.shape))
        config = FrozenConfigDict(config)
        optimizer = optimizers.from_config(config.optimizer, **by_name)
        scale = mixed_precision.loss_scale(config.training.loss_scale)

        def init(rng: Any) -> training.TrainState:
            param_rng, state_rng = jax.random.split(rng)
            params = optimizers.cast_params(config.optimizer, init_params(param_rng))
            return training.init_state(params, optimizer, state_rng, scale)

        loss_fn, everywhere = training.next_token_loss(apply_fn), NamedSharding(mesh, P())
        step = training.make_train_step(
            loss_fn,
            optimizer,
            gradient_fn=training.functions(config).gradient,
            donate=config.training.donate,
            skip_not_finite=config.run.non_finite == "skip",
            out_shardings=everywhere,
        )
        specs = jax.tree.map(lambda _: P(), jax.eval_shape(init, jax.random.key(0)))
        init = jax.jit(init, out_shardings=everywhere)
        run = training.Run(config, apply_fn, loss_fn, step, init, mesh, specs)
        run = dataclasses.replace(run, flops=lambda: measure.flops(step, *run.abstract()))
        _check_logits(run)
        return run, NamedSharding(mesh, P("data"))

    return build


def _check(config: ConfigDict, axes: set[str]) -> None:
    """Refuses what would need to know the layers, and their sizes."""
    strategy = settings.strategy(config)
    usual = vars(Strategy(by=strategy.by))
    for name, value, needed in (
        ("mesh", axes, {"data"}),
        *((f"strategy.{name}", value, usual[name]) for name, value in vars(strategy).items()),
        ("optimizer.offload", config.optimizer.offload, False),
        ("training.backward", config.training.backward, "autodiff"),
        *_changed(config.model),
    ):
        if value != needed:
            raise ValueError(
                f"{name}={value} must be {needed} for another model than the course's: the"
                " program does not know its layers, and would ignore the field"
            )


def _changed(model: ConfigDict) -> list[tuple[str, Any, Any]]:
    """Returns the fields that do nothing and differ from those of the nearest preset."""
    presets = (configs.get(name).model for name in configs.PRESETS)
    unread = [name for name in model if name not in FIELDS]
    each = (
        [(f"model.{n}", model[n], preset[n]) for n in unread if model[n] != preset[n]]
        for preset in presets
    )
    return min(each, key=len)


def _check_logits(run: training.Run) -> None:
    """Refuses logits of another width than the vocabulary: labels or samples would be lost."""
    state, batch = run.abstract()
    logits = jax.eval_shape(lambda p, x: run.apply_fn(p, x, None), state.params, batch.inputs)
    expected = *batch.inputs.shape, run.config.model.vocab_size
    if (shape := getattr(logits, "shape", None)) != expected:
        raise ValueError(
            f"apply_fn must return logits [B L V] of shape {expected}, not {shape}: V is"
            " model.vocab_size"
        )
