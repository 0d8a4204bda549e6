#!/bin/sh
# JAX, Explicit axes: rows of a table, asked for as partial sums, come out once per device too large.
#
# Seen with JAX 0.12.0.1 on a CPU that shows as four devices. `out_sharding=P(unreduced={"tensor"})` says
# that a result is one partial sum per device, to be added up later. For a table whose rows are cut along
# "tensor" that is so: each device has some of the rows asked for, and zeros for the others. For a table
# that is whole on each device, or cut along its other dimension, each device has the rows themselves.
#
#     table                rows, added up             gradient of their squares
#     P("tensor", None)    right                     right
#     P(None, "tensor")    4 times too large         4 times too large
#     P()                  4 times too large         4 times too large
#
# A good guess would have been an error: `jnp.einsum` with the same `out_sharding` refuses operands that
# are not both cut along the summed dimension (ShardingTypeError). `.at[rows].get` accepts it, its type
# says "unreduced", and the numbers are wrong without a word.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/jax_gather_unreduced.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/lookup.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 4)
jax.set_mesh(jax.make_mesh((4,), ("tensor",)))  # Explicit by default
PARTIAL = jax.P(unreduced={"tensor"})
numbers = np.arange(64, dtype=np.float32).reshape(16, 4)
rows = jax.device_put(np.array([0, 3, 5, 9, 15, 15]), jax.P())
right = numbers[np.asarray(rows)]
right_gradient = np.zeros_like(numbers)
np.add.at(right_gradient, np.asarray(rows), 2 * right)


def lookup(table):
    return jax.reshard(table.at[rows].get(out_sharding=PARTIAL), jax.P())


def size(found, expected):
    factor = np.linalg.norm(found) / np.linalg.norm(expected)
    assert np.allclose(found, factor * expected)
    return round(float(factor), 6)


gradient = jax.grad(lambda table: (lookup(table) ** 2).sum())
found = []
for spec in (jax.P("tensor", None), jax.P(None, "tensor"), jax.P()):
    table = jax.device_put(numbers, spec)
    eager = size(lookup(table), right), size(jax.device_get(gradient(table)), right_gradient)
    rows_jit, gradient_jit = jax.jit(lookup)(table), jax.device_get(jax.jit(gradient)(table))
    found.append((*eager, size(rows_jit, right), size(gradient_jit, right_gradient)))
    print(spec, *found[-1], sep=" | ")
assert found == [(1, 1, 1, 1), (1, 1, 4, 4), (1, 1, 4, 4)]

whole = jax.device_put(numbers, jax.P())
try:
    jnp.einsum("ab,bc->ac", whole.T, whole, out_sharding=PARTIAL)
except Exception as error:
    print("einsum:", type(error).__name__)
    refused = type(error).__name__
assert refused == "ShardingTypeError"
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/lookup.py"
