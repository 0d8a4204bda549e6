"""Arguments that would give silently wrong numbers are refused with the value and the fix.

While tests run, jaxtyping refuses many of them first, so a process without it makes the calls.
"""

import subprocess
import sys

SETUP = """
import jax, jax.numpy as jnp, optax
from course_lib.smaller_and_faster import (
    flash_attention, flash_kernels, large_vocabulary, optimizer_memory, smallest_step
)

def refused(words, call):
    try:
        print("accepted, without:", words, call())
    except ValueError as error:
        if words not in str(error):
            print("wanted:", words, "| said:", error)
"""
LOSS = """
x, W, labels = jnp.ones((2, 4, 8)), jnp.ones((8, 6)), jnp.zeros((2, 4), int)
def loss(x=x, W=W, labels=labels, bias=None, chunks=2):
    return large_vocabulary.linear_cross_entropy(x, W, labels, bias, chunks=chunks)
loss(bias=jnp.ones(6))
refused("labels of shape (4, 2) must be of shape (2, 4)", lambda: loss(labels=labels.T))
refused("labels of shape (8,) must be of shape (2, 4)", lambda: loss(labels=labels.ravel()))
refused("head of shape (6, 8) must be [D, V]", lambda: loss(W=W.T))
refused("head of shape (48,) must be [D, V]", lambda: loss(W=W.ravel()))
refused("bias of shape (5,) must be of shape (6,)", lambda: loss(bias=jnp.ones(5)))
refused(
    "labels of shape (4, 2) must be",
    lambda: large_vocabulary.statistics(large_vocabulary.Factors(x, W), labels.T, chunks=2),
)
"""
STEP = """
params = {"block": jnp.ones((3, 4, 4)), "head": jnp.ones(4)}
def add(total=params, head=lambda rest, x, batch: (x.mean(), {"loss": (x.sum(), 4.0)})):
    adds = smallest_step.gradient_in_place(
        lambda rest, batch: batch, lambda weights, x, key: x @ weights, head
    )
    return adds(total, params, jnp.ones((2, 4)), None)
add()
add(total=jax.tree.map(lambda p: p.astype(jnp.bfloat16), params))
refused("of the parameter's shape (4,)", lambda: add(total=params | {"head": jnp.ones(1)}))
"""
KERNELS = """
q, numbers = jnp.ones((1, 72, 2, 16)), jnp.ones((1, 2, 72))
words = "tile=16 must divide the 72 positions"
options = dict(causal=True, tile=16, interpret=True)
refused(words, lambda: flash_kernels.forward(q, q, q, **options))
refused(words, lambda: flash_kernels.backward(q, q, q, q, numbers, q, **options))
even = jax.device_put(q[:, :64], jax.devices("cpu")[0])
why = "query lies on a cpu" if jax.__version_info__ >= (0, 9) else "the kernel needs JAX 0.9"
refused(
    f"by='kernel' cannot be had: {why}",
    lambda: flash_attention.attend(even, even, even, by="kernel"),
)
"""
OPTIMIZERS = """
for dtype in ("int32", "bfloat16"):
    x, words = jnp.ones((2, 16), dtype), f"x of dtype {dtype} must be float32"
    refused(words, lambda: optimizer_memory.quantize(x))
    refused(words, lambda: optimizer_memory.stochastic_round(jax.random.key(0), x))
params = {"w": jnp.ones(4, jnp.bfloat16)}
optimizer = optimizer_memory.round_stochastically(optax.sgd(0.1))
refused("params=None must be", lambda: optimizer.update(params, optimizer.init(params)))
"""


def test_wrong_arguments_are_refused_with_the_value_and_the_fix():
    words = [sys.executable, "-c", SETUP + LOSS + STEP + KERNELS + OPTIMIZERS]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
