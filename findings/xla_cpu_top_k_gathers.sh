#!/bin/sh
# On a CPU, the k largest of each row gather the rows of all devices, though every row lies on one of them.
#
# Seen with JAX 0.12.0.1, a CPU that shows as four devices, and scores [64 tokens, 8 experts] whose rows
# are cut over them, as a router's are:
#
#     computed from the scores              all-gathers    largest result on a device
#     jax.lax.top_k(scores, 2)              1              64 rows, all of them
#     jnp.sort(scores)[:, -2:]              0              16 rows, its own
#     jnp.argsort(scores)[:, -2:]           0              16 rows
#     top_k inside of jax.shard_map         0              16 rows
#
# It is the same on Auto and on Explicit axes. With the latter the type of the result says that its rows
# are cut, which a reader takes for "nothing is sent". XLA:CPU compiles `top_k` to a call of a function
# outside (TopK) that its partitioner cannot cut. XLA:GPU of the same version sends nothing (compiled for
# two H100s, not by this script).
#
# A good guess would have been no collective in any of the four: each row is sorted by itself.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/xla_cpu_top_k_gathers.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/top_k.py" <<'PROGRAM'
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

jax.config.update("jax_num_cpu_devices", 4)
ROWS = jax.P("data")


def top_two(scores):
    return jax.lax.top_k(scores, 2)[1]


seen = {}
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("data",), (kind,))
    cut = NamedSharding(mesh, ROWS)
    scores = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=cut)
    own = jax.shard_map(top_two, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    ways = {
        "top_k": top_two,
        "sort": lambda scores: jnp.sort(scores)[:, -2:],
        "argsort": lambda scores: jnp.argsort(scores)[:, -2:],
        "shard_map": own,
    }
    for name, way in ways.items():
        lowered = jax.jit(way, out_shardings=cut).lower(scores)
        text = lowered.compile().as_text()
        body = text[text.index("ENTRY") :]
        gathers, whole = text.count(" all-gather("), "f32[64," in body
        print(f"{kind.name:8} {name:10} {gathers} all-gathers, all rows on a device: {whole}")
        seen[kind.name, name] = gathers, whole
    if kind is AxisType.Explicit:
        typed = jax.jit(top_two).trace(scores).jaxpr.out_avals[0]
        print("type:", typed.str_short())
        assert typed.sharding.spec[0] == "data", "its rows are not cut"

expected = {key: (1, True) if key[1] == "top_k" else (0, False) for key in seen}
assert len(seen) == 8 and seen == expected
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/top_k.py"
