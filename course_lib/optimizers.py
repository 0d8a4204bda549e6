"""Optimizers and learning rate schedules by name, as a configuration asks for them. The
mathematics is Optax's.

https://optax.readthedocs.io
"""

import optax
from ml_collections import ConfigDict

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
"""The learning rate: flat, or from 0 up over `warmup_steps`, then down by `decay_rate` a step
or along a cosine.

Each reads `learning_rate` and what stands behind its name above: "constant" ignores
`warmup_steps`, only "warmup_exponential" reads `decay_rate`, only "warmup_cosine"
`total_steps`. A configuration holds all of them, so that a schedule can be changed by its name
alone.
"""

OPTIMIZERS = {
    "sgd": lambda config, rate: optax.sgd(rate),
    "adam": lambda config, rate: optax.adam(rate, b1=config.b1, b2=config.b2),
    "adamw": lambda config, rate: optax.adamw(
        rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay
    ),
}
"""Plain descent, Adam (https://arxiv.org/abs/1412.6980), Adam with decoupled decay
(https://arxiv.org/abs/1711.05101).
"""


def from_config(config: ConfigDict) -> optax.GradientTransformation:
    """Returns the optimizer of a configuration: first the norm is clipped, if asked for, then
    comes the update.

    Args:
      config: the `optimizer` part of a configuration: `name`, `schedule`, `clip_norm` (0: no
        clipping), and what the first two read.

    Raises:
      ValueError: if `name` or `schedule` is unknown.
    """
    if config.name not in OPTIMIZERS:
        raise ValueError(f"optimizer.name={config.name!r} must be one of {list(OPTIMIZERS)}")
    if config.schedule not in SCHEDULES:
        raise ValueError(
            f"optimizer.schedule={config.schedule!r} must be one of {list(SCHEDULES)}"
        )
    update = OPTIMIZERS[config.name](config, SCHEDULES[config.schedule](config))
    return (
        optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
        if config.clip_norm
        else update
    )
