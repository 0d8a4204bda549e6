#!/bin/sh
# Flax NNX: a step under plain jax.jit trains one weight, which two layers share, as two weights.
#
# Seen with Flax 0.12.12 and JAX 0.12.0.1 on a CPU. A module has one layer under two names:
#
#     before the step: one layer True, weights equal True
#     after jax.jit:   one layer False, weights equal False
#     after nnx.jit:   one layer True, weights equal True
#
# A good guess would have been an error, or the same result: since Flax 0.12 a module is a pytree,
# which jax.jit, jax.grad and jax.tree.map take without a word. But a pytree has no shared parts.
# Each name gets a copy, a gradient of its own, and another update; a model with its output
# layer tied to its embedding has one layer more from then on. nnx.jit, nnx.grad and nnx.split keep
# what is shared.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/nnx_tied_weights.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 flax==0.12.12 numpy==2.5.5

cat > "$folder/tied.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
from flax import nnx


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def loss(model, x):
    return (model(x) ** 2).mean()


@jax.jit
def plain_step(model, x):
    grads = jax.grad(loss)(model, x)
    return jax.tree.map(lambda w, g: w - 0.1 * g, model, grads)


@nnx.jit
def nnx_step(model, x):
    grads = nnx.grad(loss)(model, x)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads))


def show(when, model):
    first, second = model.first, model.second
    one, equal = first is second, bool((first.kernel[...] == second.kernel[...]).all())
    print(f"{when:16} one layer {one}, weights equal {equal}")
    return one, equal


x = jnp.ones((2, 4))
model = Tied(nnx.Rngs(0))
before = show("before the step:", model)
after_jax = show("after jax.jit:", plain_step(model, x))
nnx_step(model, x)
after_nnx = show("after nnx.jit:", model)
assert (before, after_jax, after_nnx) == ((True, True), (False, False), (True, True))
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/tied.py"
