"""Helpers of Part II's checks: they run a learner's function on simulated devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from course_lib import measure
from course_lib.lessons.check.answers import (
    WrongAnswer,
    call,
    equations,
    in_one_line,
    programs_in,
)
from course_lib.measure.ledger import Ledger


def row_of_devices(axis: str, count: int = 4) -> Mesh:
    """Returns a mesh of simulated CPU devices with one axis.

    Raises:
      WrongAnswer: if this CPU shows as fewer devices.
    """
    cpus = jax.devices("cpu")
    if len(cpus) < count:
        raise WrongAnswer(
            f"This needs {count} devices: run the notebook's first cell, in a new kernel."
        )
    return Mesh(cpus[:count], (axis,))


def spread(
    your_function: Any, mesh: Mesh, in_specs: Any, out_specs: Any, *extra: Any, hint: str
) -> Callable[..., Any]:
    """Returns a function of whole arrays; each device runs the learner's on its shards, and on
    what is passed in addition.
    """

    def on_one_device(*shards: Any) -> Any:
        return call(your_function, *shards, *extra, hint=hint)

    return jax.shard_map(on_one_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def compiled(function: Callable[..., Any], mesh: Mesh, *args: Any) -> tuple[Any, Ledger]:
    """Compiles and runs a function at the highest matmul precision.

    Returns:
      Its result, and the ledger of its collectives.

    Raises:
      WrongAnswer: if it cannot be traced.
    """
    try:
        with jax.default_matmul_precision("highest"):
            program = jax.jit(function).lower(*args).compile()
            result = jax.device_get(jax.jit(function)(*args))
    except WrongAnswer:
        raise
    except Exception as error:
        if "out_specs" in str(error):
            raise WrongAnswer(
                "The devices return different arrays. The result must be equal on all of them:"
                " which collective adds up what each has?"
            ) from error
        raise WrongAnswer(f"Your function raised {in_one_line(error)}") from error
    return result, measure.ledger(program, mesh)


def gradient(function: Callable[..., Any], weights: Any) -> Callable[..., Any]:
    """Returns the gradient, for all arguments, of the result's sum with these weights."""

    def weighted(*args: Any) -> Any:
        return jnp.vdot(function(*args), weights)

    def all_gradients(*args: Any) -> Any:
        return jax.grad(weighted, argnums=tuple(range(len(args))))(*args)

    return all_gradients


def normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Returns an array of normal numbers for each shape."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def without_residual(kernels: jax.Array, x: jax.Array) -> jax.Array:
    """Returns x after layers `tanh(x @ kernel)`, often written for `x + tanh(x @ kernel)`."""
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return x


def most_gathers_of_a_checkpoint(program: Any) -> int:
    """Returns how many all-gathers one `jax.checkpoint` executes, the most of any."""

    def gathers(jaxpr: Any) -> int:
        count = 0
        for eqn in jaxpr.eqns:
            turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            count += eqn.primitive.name.startswith("all_gather")
            count += turns * sum(map(gathers, programs_in(eqn)))
        return count

    rematerialized = ("checkpoint", "remat")
    return max(
        (
            sum(map(gathers, programs_in(eqn)))
            for eqn in equations(program)
            if eqn.primitive.name.startswith(rematerialized)
        ),
        default=0,
    )
