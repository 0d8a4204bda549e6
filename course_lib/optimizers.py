"""Optimizers and learning rate schedules by name. The mathematics is Optax's
(https://optax.readthedocs.io).
"""

import optax
from ml_collections import ConfigDict

from course_lib.smaller_and_faster import offload

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
}
"""Gradient descent, Adam (https://arxiv.org/abs/1412.6980), and Adam with decoupled weight
decay (https://arxiv.org/abs/1711.05101).
"""


def from_config(config: ConfigDict) -> optax.GradientTransformation:
    """Returns the optimizer of a configuration; with `clip_norm` it clips the gradient first.

    Args:
      config: the `optimizer` part of a configuration: `name`, `schedule`, `clip_norm` (0: no
        clipping), `offload` (whether its moments are on the host), and the fields that name and
        schedule read.

    Raises:
      ValueError: if `name` or `schedule` is unknown, or the warm-up does not end.
    """
    for field, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
        if config[field] not in known:
            raise ValueError(
                f"optimizer.{field}={config[field]!r} must be one of {list(known)}"
            )
    if config.schedule == "warmup_cosine" and config.warmup_steps >= config.total_steps:
        raise ValueError(
            f"optimizer.warmup_steps={config.warmup_steps} must be under"
            f" total_steps={config.total_steps}: the rate would never come down"
        )
    update = OPTIMIZERS[config.name](config, SCHEDULES[config.schedule](config))
    if config.offload:
        update = offload.streamed(update)  # after the norm, which needs all gradients
    if not config.clip_norm:
        return update
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
