#!/bin/sh
# JAX, Explicit axes: indexing a table whose type is `reduced` fails with the wrong error.
#
# Seen with JAX 0.12.0.1 on a CPU. Parameters of the type P(reduced={"data"}) are whole on each device,
# and their gradient is summed later. Looking up rows whose numbers are cut along "data", as any
# data-parallel language model does:
#
#     type of table            table[rows]           jnp.take(table, rows, 0)   table.at[rows].get(out_sharding=...)
#     P()                      ShardingTypeError     ShardingTypeError          works
#     P(reduced={"data"})      ValueError            ShardingTypeError          works
#
# A good guess would have been the same error in both rows: it says to name the result's sharding, as
# the last column does, and the lookup then works, with a gradient of the type P(unreduced={"data"}).
# The ValueError, "partitions cannot overlap with reduced axes passed to PartitionSpec", speaks of a
# PartitionSpec that the program never wrote, and of no fix.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/jax_reduced_table.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/table.py" <<'PROGRAM'
import jax
import jax.numpy as jnp

jax.config.update("jax_num_cpu_devices", 8)
jax.set_mesh(jax.make_mesh((8,), ("data",)))  # Explicit by default
rows = jax.device_put(jnp.arange(8), jax.P("data"))
lookups = (
    lambda table: table[rows].sum(),
    lambda table: jnp.take(table, rows, 0).sum(),
    lambda table: table.at[rows].get(out_sharding=jax.P("data")).sum(),
)


def outcome(lookup, table):
    try:
        grad = jax.grad(lookup)(table)
    except Exception as error:
        return type(error).__name__
    return f"works: {jax.typeof(grad)}"


found = []
for spec in (jax.P(), jax.P(reduced={"data"})):
    table = jax.device_put(jnp.ones((16, 4)), spec)
    found.append([outcome(lookup, table) for lookup in lookups])
    print(jax.typeof(table), *found[-1], sep=" | ")
refused = "ShardingTypeError"
assert found == [
    [refused, refused, "works: float32[16,4]"],
    ["ValueError", refused, "works: float32[16,4]{U:data}"],
]
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/table.py"
