#!/bin/sh
# On a CPU, the largest of many numbers leaves out a NaN.
#
# Seen with JAX and jaxlib 0.12.0.1 and 0.10.2 on a CPU (x86-64), not with 0.7.2. Of 4095 and of
# 4096 numbers, all 1.0 but one that is NaN:
#
#     max               4095 nan   4096 1.0
#     min               4095 nan   4096 1.0
#     sum of max(x, 0)  4095 nan   4096 4095.0
#     sum               4095 nan   4096 nan
#
# A good guess would have been nan in all places, as NumPy has it. But XLA's CPU compiler hands
# reductions of 4096 numbers and more to the library YNNPACK (`ynn_fusion` in the compiled
# program), whose maximum of a NaN and a number is the number. In bfloat16 and float16, only the
# minimum loses it. So `assert jnp.abs(x - y).max() < 1e-5` holds for an x with a NaN.
# jnp.isfinite(x).all() is right, and with XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce
# so are all of them.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/xla_cpu_lost_nan.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/nan.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp

FUNCTIONS = {
    "max": jnp.max,
    "min": jnp.min,
    "sum of max(x, 0)": lambda x: jnp.maximum(x, 0).sum(),
    "sum": jnp.sum,
}
lost = []
for name, function in FUNCTIONS.items():
    few, many = (jax.jit(function)(jnp.ones(n).at[3].set(jnp.nan)) for n in (4095, 4096))
    print(f"{name:17} 4095 {few}   4096 {many}")
    assert jnp.isnan(few)
    if not jnp.isnan(many):
        lost.append(name)
assert jax.jit(lambda x: ~jnp.isfinite(x).all())(jnp.ones(4096).at[3].set(jnp.nan))
assert lost == (["max", "min", "sum of max(x, 0)"] if sys.argv[1] == "loses" else [])
PROGRAM

export PYTHONPATH="$folder/packages" JAX_PLATFORMS=cpu
"$python" "$folder/nan.py" loses
echo "with XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce:"
XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce "$python" "$folder/nan.py" keeps
