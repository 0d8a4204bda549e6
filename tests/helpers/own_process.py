"""Functions that tests run in a process of their own."""

import pathlib


def touch(path):
    pathlib.Path(path).touch()


def hold(megabytes):
    import jax.numpy as jnp

    return jnp.ones((megabytes, 2**18))  # float32
