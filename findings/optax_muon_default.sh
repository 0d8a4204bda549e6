#!/bin/sh
# Optax: `scale_by_muon()` with its defaults works on one array, and on no tree of parameters.
#
# Seen with Optax 0.2.8 and JAX 0.12.0.1. Every transformation of Optax takes any tree of arrays, and
# `weight_dimension_numbers` is documented as optional (None: each matrix is orthogonalized as it is):
#
#     optax.contrib.scale_by_muon() on an array                works
#     optax.contrib.scale_by_muon() on {"w": array}            ValueError: pytree structure error
#     optax.contrib.muon(1e-3) on {"w": array}                 works
#     scale_by_muon(weight_dimension_numbers={"w": MuonDimensionNumbers()})   works
#
# A good guess would have been that the transformation works wherever the optimizer built of it does.
# None is mapped over the tree as if it were the tree of an array; `muon` fills in the tree first.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/optax_muon_default.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5 optax==0.2.8

cat > "$folder/muon.py" <<'PROGRAM'
import jax.numpy as jnp
import optax
from optax import contrib

array = jnp.ones((4, 8))
given = {"w": contrib.MuonDimensionNumbers()}


def outcome(optimizer, tree):
    try:
        optimizer.update(tree, optimizer.init(tree), tree)
    except Exception as error:
        return type(error).__name__
    return "works"


found = [
    outcome(contrib.scale_by_muon(), array),
    outcome(contrib.scale_by_muon(), {"w": array}),
    outcome(contrib.muon(1e-3), {"w": array}),
    outcome(contrib.scale_by_muon(weight_dimension_numbers=given), {"w": array}),
]
print(*found, sep="\n")
assert found == ["works", "ValueError", "works", "works"]
PROGRAM
JAX_PLATFORMS=cpu PYTHONPATH="$folder/packages" "$python" "$folder/muon.py"
