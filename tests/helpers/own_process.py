"""Functions that tests run in a process of their own."""

import pathlib

import jax.numpy as jnp


def touch(path):
    pathlib.Path(path).touch()


def hold(megabytes):
    return jnp.ones((megabytes, 2**18))  # float32
