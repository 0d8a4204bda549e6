"""The optimizers that a submission may use, and the memories that may hold their moments.

Both are arguments of `submit`, not the learner's own code: the score has to name the optimizer.
The step gets it as `config.optimizer`.
"""

import dataclasses
from typing import Any

import optax

from course_lib import configs, optimizers
from course_lib.lessons.check.answers import require
from course_lib.lessons.game import model
from course_lib.smaller_and_faster import offload

PyTree = Any

OPTIMIZERS = ("adamw", "adamw_bf16", "adamw_8bit", "lion", "adafactor")
MOMENTS = ("device", "host")


@dataclasses.dataclass(frozen=True)
class Setup:
    """An optimizer, and the memory of its moments before and after a step."""

    optimizer: str = "adamw"
    moments: str = "device"

    def config(self, sizes: model.Config) -> model.Config:
        """Returns a configuration with this optimizer."""
        return dataclasses.replace(sizes, optimizer=make(self.optimizer))

    def place(self, optimizer: optax.GradientTransformation, opt_state: PyTree) -> PyTree:
        """Moves an optimizer's moments to the memory `moments`."""
        if self.moments == "device":
            return opt_state
        return optax.tree_map_params(optimizer, offload.to_host, opt_state)


FIRST = Setup()  # of the first step


def make(name: str) -> optax.GradientTransformation:
    """Returns an optimizer by name, with the first step's learning rate."""
    if name == "adamw":
        return model.REAL.optimizer
    config = configs.get("155m").optimizer
    config.update(name=name, schedule="constant", learning_rate=3e-4, clip_norm=0.0)
    return optimizers.from_config(config, stacks=lambda name: name.startswith("layers/"))


def read(optimizer: str, moments: str) -> Setup:
    """Returns the setup of a submission."""
    known = {"optimizer": (optimizer, OPTIMIZERS), "moments": (moments, MOMENTS)}
    for argument, (value, names) in known.items():
        require(value in names, f"{argument}={value!r} must be one of {', '.join(names)}.")
    require(
        moments == "device" or optimizer in ("adamw", "lion"),
        f"moments='host' needs an optimizer that treats each parameter by itself and keeps"
        f" moments of its shape: 'adamw' or 'lion', not {optimizer!r}.",
    )
    return Setup(optimizer, moments)
