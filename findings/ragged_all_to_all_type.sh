#!/bin/sh
# JAX: the type of a ragged all-to-all's result has the varying axes of its output buffer alone.
#
# Seen with JAX 0.12.0.1, traced on a CPU (XLA's CPUs do not run it). Inside `shard_map` with its check
# of varying axes (`check_vma`, the default), on a mesh of "data" and "expert", the rows that travel
# differ along both axes, and the buffer of zeros into which they are written along "expert" alone:
#
#     rows + buffer                       float32[4,2]{V:(data,expert)}
#     ragged_all_to_all(rows, buffer)     float32[4,2]{V:expert}
#
# A good guess would have been the union, as for every other operation of two arrays. The result holds
# rows of one's own data group, so it differs along "data". `out_specs=P("expert")`, which promises that
# it does not, is accepted without a word; for the sum it is refused. Make the buffer vary as the rows
# do (`jax.lax.pcast(zeros, axes, to="varying")`) before it is passed.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/ragged_all_to_all_type.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/types.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType

P = jax.P
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)


def varying(array, *axes):
    return jax.lax.pcast(array, axes, to="varying")


def exchanged(rows, buffer):
    start = varying(jnp.zeros(2, jnp.int32), "data", "expert")
    count = varying(jnp.ones(2, jnp.int32), "data", "expert")
    return jax.lax.ragged_all_to_all(
        rows, buffer, start, count, start, count, axis_name="expert"
    )


def outcome(operation):
    def of_device(rows):
        result = operation(rows, varying(jnp.zeros((4, 2)), "expert"))
        types.append(str(jax.typeof(result)))
        return result

    types = []
    rows = jnp.zeros((16, 2))
    mapped = jax.shard_map(
        of_device, mesh=mesh, in_specs=P(("data", "expert")), out_specs=P("expert")
    )
    try:
        jax.make_jaxpr(mapped)(rows)
    except ValueError:
        return types[0], "refused"
    return types[0], "accepted"


found = [outcome(jnp.add), outcome(exchanged)]
print(*found, sep="\n")
assert found == [
    ("float32[4,2]{V:(data,expert)}", "refused"),
    ("float32[4,2]{V:expert}", "accepted"),
]
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/types.py"
