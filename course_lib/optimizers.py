"""Optimizers and learning rate schedules by name. The mathematics is Optax's
(https://optax.readthedocs.io).
"""

from collections.abc import Collection
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from course_lib.smaller_and_faster import offload, optimizer_memory

SCHEDULES = {
    "constant": lambda config: optax.constant_schedule(config.learning_rate),
    "warmup_exponential": lambda config: optax.warmup_exponential_decay_schedule(
        0.0,
        config.learning_rate,
        config.warmup_steps,
        transition_steps=1,
        decay_rate=config.decay_rate,
    ),
    "warmup_cosine": lambda config: optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_steps, config.total_steps
    ),
}
"""Learning rates: constant, or rising from 0 over `warmup_steps` and then falling, by the
factor `decay_rate` per step or along a cosine that ends at `total_steps`.

A configuration has the fields of all of them, so that changing `schedule` is enough. A schedule
ignores the fields that it does not name above.
"""

OPTIMIZERS = {
    "sgd": lambda config, rate: optax.sgd(rate),
    "adam": lambda config, rate: optax.adam(rate, b1=config.b1, b2=config.b2),
    "adamw": lambda config, rate: optax.adamw(
        rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
    ),
    "adamw_bf16": lambda config, rate: _adamw(
        optimizer_memory.scale_by_adam_bf16(config.b1, config.b2), config, rate
    ),
    "adamw_8bit": lambda config, rate: _adamw(
        optimizer_memory.scale_by_adam_8bit(config.b1, config.b2, block_size=config.block_size),
        config,
        rate,
    ),
    "lion": lambda config, rate: optax.lion(
        rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
    ),
    "muon": lambda config, rate: optax.contrib.muon(
        rate,
        adam_b1=config.b1,
        adam_b2=config.b2,
        weight_decay=config.weight_decay,
        adam_weight_decay=config.weight_decay,
        muon_weight_dimension_numbers=optimizer_memory.matrices,
        consistent_rms=0.2,  # updates as large as AdamW's, so the rate means the same
    ),
    "adafactor": lambda config, rate: optax.adafactor(rate, min_dim_size_to_factor=32),
}
"""Optimizers by name:

    sgd         gradient descent
    adam        Adam (https://arxiv.org/abs/1412.6980)
    adamw       with decoupled weight decay (https://arxiv.org/abs/1711.05101)
    adamw_bf16  with moments in bfloat16: `optimizer_memory.scale_by_adam_bf16`
    adamw_8bit  with moments in 8 bits: `optimizer_memory.scale_by_adam_8bit`
    lion        one moment, and updates of one size (https://arxiv.org/abs/2302.06675)
    muon        one moment, made orthogonal (https://kellerjordan.github.io/posts/muon), with
                AdamW for embeddings, output layer, norms and biases
    adafactor   no first moment; the second one as its row and column means
                (https://arxiv.org/abs/1804.04235); the rate is relative to a parameter's size
"""

DECAYING = ("adamw", "adamw_bf16", "adamw_8bit", "lion", "muon")
"""The optimizers that read `weight_decay`."""

PARAM_DTYPES = ("float32", "bfloat16")
"""Dtypes of the stored parameters. bfloat16 ones are rounded stochastically."""


def _adamw(
    scale_by_adam: optax.GradientTransformation, config: ConfigDict, rate: optax.Schedule
) -> optax.GradientTransformation:
    return optax.chain(
        scale_by_adam,
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def cast_params(config: ConfigDict, params: Any) -> Any:
    """Returns parameters in the dtype of a configuration's `optimizer` part.

    Args:
      config: its `param_dtype` is one of `PARAM_DTYPES`.
      params: pytree of float32 arrays.
    """
    if config.param_dtype == "float32":
        return params
    return jax.tree.map(lambda leaf: leaf.astype(config.param_dtype), params)


def from_config(
    config: ConfigDict, schedule: optax.Schedule | None = None
) -> optax.GradientTransformation:
    """Returns the optimizer of a configuration; with `clip_norm` it clips the gradient first.

    Args:
      config: the `optimizer` part of a configuration: `name`, `schedule`, `clip_norm` (0: no
        clipping), `param_dtype` of the parameters, `offload` (whether its moments are on the
        host), and the fields that name and schedule read.
      schedule: the learning rate by step; None: that of the configuration.

    Raises:
      ValueError: if `name`, `schedule` or `param_dtype` is unknown, or the warm-up does not
        end.
    """
    known_values: dict[str, Collection[str]] = dict(
        name=OPTIMIZERS, schedule=SCHEDULES, param_dtype=PARAM_DTYPES
    )
    for field, known in known_values.items():
        if config[field] not in known:
            raise ValueError(
                f"optimizer.{field}={config[field]!r} must be one of {list(known)}"
            )
    if config.schedule == "warmup_cosine" and config.warmup_steps >= config.total_steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} must be under"
            f" total_steps={config.total_steps}: the rate would never come down"
        )
    rate = SCHEDULES[config.schedule](config) if schedule is None else schedule
    update = OPTIMIZERS[config.name](config, rate)
    if config.offload:
        update = offload.streamed(update)  # after the norm, which needs all gradients
    if config.clip_norm:
        update = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    if config.param_dtype == "bfloat16":
        # Not the seed of the moments' rounding.
        update = optimizer_memory.round_stochastically(update, seed=1)
    return update
