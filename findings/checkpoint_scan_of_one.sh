#!/bin/sh
# JAX on a CPU: jax.checkpoint inside of a lax.scan recomputes two layers, and does nothing for one.
#
# Seen with JAX 0.12.0.1 on a CPU. Two products per layer; matrix products in the compiled gradient (a
# loop's body counts once), by the number of layers that are scanned:
#
#     layers   plain   jax.checkpoint(prevent_cse=False)   jax.checkpoint()
#     1        5       5                                   5
#     2        6       8                                   8
#     3        6       8                                   8
#
# A good guess would have been two more products in every row: the advice to set prevent_cse=False inside
# of a scan says that the loop itself keeps both forward passes apart. XLA replaces a loop of one turn by
# its body, in which common subexpression elimination merges them. Nothing warns: the values are right,
# and the memory is that without jax.checkpoint. On a CPU the barriers of prevent_cse=True are gone by
# then, too; compiled for an NVIDIA GPU, they hold.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/checkpoint_scan_of_one.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/one.py" <<'PROGRAM'
import jax
import jax.numpy as jnp

ROWS, WIDTH = 64, 128
PLAIN, KEPT, BARRIERS = None, False, True  # of prevent_cse


def products(layers, prevent_cse):
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    if prevent_cse is not None:
        layer = jax.checkpoint(layer, prevent_cse=prevent_cse)

    def loss(w):
        return jax.lax.scan(layer, jnp.ones((ROWS, WIDTH)), w)[0].sum()

    w = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    compiled = jax.jit(jax.grad(loss)).lower(w).compile()
    return round(compiled.cost_analysis()["flops"] / (2 * ROWS * WIDTH * WIDTH))


found = {n: [products(n, way) for way in (PLAIN, KEPT, BARRIERS)] for n in (1, 2, 3)}
for layers, row in found.items():
    print(layers, *row)
assert found == {1: [5, 5, 5], 2: [6, 8, 8], 3: [6, 8, 8]}
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/one.py"
