"""What tests/measure/test_timing.py runs in a process of its own."""

import pathlib

import jax.numpy as jnp


def touch(path):
    pathlib.Path(path).touch()


def hold(megabytes):
    return jnp.ones((megabytes, 2**18))  # float32
