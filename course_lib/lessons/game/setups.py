"""The optimizers that a submission may take, and the memory that its moments may be in.

Both are arguments of `submit`, and not the learner's own code: the score has to say which
optimizer a step trains with. The step still gets it as `config.optimizer`.
"""

import dataclasses
from typing import Any

import optax

from course_lib import configs, optimizers
from course_lib.lessons.check.answers import WrongAnswer, require
from course_lib.lessons.game import model
from course_lib.smaller_and_faster import offload

PyTree = Any

OPTIMIZERS = ("adamw", "adamw_bf16", "adamw_8bit", "lion", "adafactor")
"""Names of `course_lib.optimizers`. All but "adamw" make other updates than the first step."""

MOMENTS = ("device", "host")
"""Memories that the optimizer's moments are in when the step gets them, and when it ends."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a step trains with.

    Attributes:
      optimizer: one of `OPTIMIZERS`.
      moments: one of `MOMENTS`.
    """

    optimizer: str = "adamw"
    moments: str = "device"

    def config(self, sizes: model.Config) -> model.Config:
        """Returns the sizes, with this optimizer."""
        return dataclasses.replace(sizes, optimizer=make(self.optimizer))

    def place(self, optimizer: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """Returns an optimizer's state with its moments where they belong."""
        if self.moments == "device":
            return opt_state
        return optax.tree_map_params(optimizer, offload.to_host, opt_state)


FIRST = Setup()
"""That of the first step."""


def make(name: str) -> optax.GradientTransformation:
    """Returns an optimizer by its name."""
    if name == "adamw":
        return model.REAL.optimizer
    config = configs.get("155m").optimizer
    config.update(name=name, schedule="constant", learning_rate=3e-4, clip_norm=0.0)
    return optimizers.from_config(config)


def read(optimizer: str, moments: str) -> Setup:
    """Returns the setup of a submission.

    Raises:
      WrongAnswer: if there is no such optimizer or memory, or the optimizer has no moments that
        a step could fetch by layers.
    """
    for argument, value, known in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("moments", moments, MOMENTS),
    ):
        require(value in known, f"{argument}={value!r} must be one of {', '.join(known)}.")
    if moments == "host" and optimizer not in ("adamw", "lion"):
        raise WrongAnswer(
            f"moments='host' needs an optimizer that treats each parameter by itself and keeps"
            f" moments of its shape: 'adamw' or 'lion', not {optimizer!r}."
        )
    return Setup(optimizer, moments)
