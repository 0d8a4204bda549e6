#!/bin/sh
# A program that JAX reads from its persistent compilation cache carries the names of another.
#
# Seen with JAX and jaxlib 0.12.0.1 on a CPU. Two functions compute the same, in the scopes
# "attention" and "mlp". Two processes compile one each, with one cache folder:
#
#     attention: its operations are in ['attention']
#     mlp: its operations are in ['attention']
#
# A good guess would have been ['mlp'] in the second line: the text of a compiled program names
# operations by the scopes of the source. But the cache's key leaves out those names, unless
# JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY=1. So the text of a compiled program may have the
# names of a model that another process compiled before it.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/jax_cache_names.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/names.py" <<'PROGRAM'
import re
import sys

import jax
import jax.numpy as jnp

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

name = sys.argv[2]


def step(x):
    with jax.named_scope(name):
        return jnp.tanh(x @ x).sum()


text = jax.jit(step).lower(jnp.ones((64, 64))).compile().as_text()
found = sorted(set(re.findall(r'op_name="jit\(step\)/(\w+)/', text)))
print(f"{name}: its operations are in {found}")
PROGRAM

export PYTHONPATH="$folder/packages" JAX_PLATFORMS=cpu
for name in attention mlp; do
    "$python" "$folder/names.py" "$folder/cache" $name | tee "$folder/seen"
done
grep -qx "mlp: its operations are in \['attention'\]" "$folder/seen"
echo "with JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY=1:"
export JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY=1
for name in attention mlp; do
    "$python" "$folder/names.py" "$folder/other" $name | tee "$folder/seen"
done
grep -qx "mlp: its operations are in \['mlp'\]" "$folder/seen"
