#!/bin/sh
# On a CPU, a compiled program's plan of memory leaves out a whole hidden layer.
#
# Seen with JAX and jaxlib 0.12.0.1 on a CPU (x86-64). For (relu(x @ w1) @ w2).sum(), with x of
# [16384, 64] and 4096 hidden units, in float32:
#
#     planned: temporaries 0 MiB, peak 6 MiB
#     the hidden layer: 256 MiB; the process grew by 263 MiB
#
# A good guess would have been temporaries of 256 MiB. But XLA's CPU compiler hands products with
# what is elementwise between them to the library YNNPACK (`ynn_fusion` in the compiled program).
# What the library allocates is not in memory_analysis(). So a memory experiment on a CPU may
# find that a forward pass takes nothing.
#
# Needs Python 3.12 or newer: PYTHON=python3.13 findings/xla_cpu_hidden_memory.sh
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-compile --root-user-action=ignore --target "$folder/packages" \
    jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5

cat > "$folder/memory.py" <<'PROGRAM'
import resource

import jax
import numpy as np

MIB = 2**20
rows, width, hidden = 16384, 64, 4096


def loss(x, w1, w2):
    return (jax.nn.relu(x @ w1) @ w2).sum()


def most_so_far():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB, on Linux


sizes = (rows, width), (width, hidden), (hidden, width)
arguments = [jax.device_put(np.ones(size, np.float32)) for size in sizes]
program = jax.jit(loss).lower(*arguments).compile()
plan = program.memory_analysis()
temporaries, peak = plan.temp_size_in_bytes / MIB, plan.peak_memory_in_bytes / MIB
print(f"planned: temporaries {temporaries:.0f} MiB, peak {peak:.0f} MiB")
before = most_so_far()
program(*arguments).block_until_ready()
grew, layer = most_so_far() - before, 4 * rows * hidden / MIB
print(f"the hidden layer: {layer:.0f} MiB; the process grew by {grew:.0f} MiB")
assert temporaries < 0.1 * layer, "the plan has the hidden layer now"
assert grew > 0.8 * layer, "the hidden layer is not stored any more"
assert "ynn_fusion" in program.as_text(), "it is another instruction now"
PROGRAM

PYTHONPATH="$folder/packages" JAX_PLATFORMS=cpu "$python" "$folder/memory.py"
