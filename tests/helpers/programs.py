"""Programs for the instruments, none of them the course's, and what a process grows by."""

import ctypes
import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

M_MMAP_THRESHOLD = -3  # of malloc.h


def array(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def mlp(layers, x):
    for up, down in layers:
        x = x + jax.nn.relu(x @ up) @ down
    return x


def attention(q, k, v):
    return jax.nn.softmax(q @ k.mT) @ v


def cross_entropy(x, table, labels):
    logits = jax.nn.log_softmax(x @ table)
    return -jnp.take_along_axis(logits, labels[:, None], 1).mean()


def scanned(stacked, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    return (jax.lax.scan(layer, x, stacked)[0] ** 2).mean()


def step(layers, x):
    grads = jax.grad(lambda layers: (mlp(layers, x) ** 2).mean())(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, grads)


def layers(count, width, hidden):
    return [(array(width, hidden), array(hidden, width))] * count


# A function and the shapes of its arguments. These are large enough for a process to show.
LARGE = {
    "hidden layer": (
        lambda x, up, down: (jax.nn.relu(x @ up) @ down).sum(),
        (array(16384, 256), array(256, 4096), array(4096, 256)),
    ),
    "six layers": (
        lambda layers, x: (mlp(layers, x) ** 2).mean(),
        (layers(6, 256, 1024), array(65536, 256)),
    ),
    "attention": (attention, (array(8, 4096, 64),) * 3),
    "gated layer": (
        lambda x, up, gate: (jax.nn.silu(x @ gate) * (x @ up)).sum(-1),
        (array(16384, 1024), array(1024, 4096), array(1024, 4096)),
    ),
    "cross entropy": (
        cross_entropy,
        (array(4096, 256), array(256, 16384), array(4096, dtype=jnp.int32)),
    ),
    "attention's gradient": (
        jax.grad(lambda *args: attention(*args).sum(), (0, 1, 2)),
        (array(4, 4096, 64),) * 3,
    ),
    "a scan's gradient": (
        jax.grad(scanned),
        ((array(4, 256, 1024), array(4, 1024, 256)), array(16384, 256)),
    ),
    "donated step": (step, (layers(4, 1024, 4096), array(8192, 1024))),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(256, 1024, rngs=rngs), nnx.LayerNorm(1024, rngs=rngs)
        self.down = nnx.Linear(1024, 256, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))


GRAPH, STATE = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))


def accumulated(w, parts):
    gradient = jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).mean())
    total, _ = jax.lax.scan(lambda sum, x: (sum + gradient(w, x), None), 0 * w, parts)
    return total


def convolved(w, x):
    layout = ("NHWC", "HWIO", "NHWC")
    return (
        jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout) ** 2
    ).sum()


SQUARE = array(1024, 1024)
TABLE = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)
FOREIGN = {
    "while": (
        lambda x, w: jax.lax.while_loop(lambda x: x.max() < 9, lambda x: jnp.sin(x @ w) + x, x),
        (SQUARE, SQUARE),
    ),
    "cond": (
        lambda x, w, flag: jax.lax.cond(flag, lambda x: jnp.tanh(x @ w) @ w, jnp.sin, x),
        (SQUARE, SQUARE, array(dtype=jnp.bool)),
    ),
    "FFT": (lambda x: jnp.abs(jnp.fft.ifft(jnp.fft.fft(x) * 2)).sum(0), (array(512, 4096),)),
    "linear solve": (lambda a, b: jnp.linalg.solve(a, jnp.tanh(b)) @ b, (SQUARE, SQUARE)),
    "custom call": (lambda a: jnp.linalg.cholesky(a @ a.T) @ a, (SQUARE,)),
    "sort": (lambda x: jnp.sort(x)[:, :9] + x[jnp.argsort(x)[:, 0], :9], (SQUARE,)),
    "convolution": (jax.grad(convolved), (array(3, 3, 32, 64), array(8, 64, 64, 32))),
    "NNX": (
        jax.grad(lambda state, x: (nnx.merge(GRAPH, state)(x) ** 2).mean()),
        (STATE, array(4096, 256)),
    ),
    "constant": (
        lambda x, w: jnp.tanh(jnp.tanh((x + TABLE) @ w) @ w) @ w,
        (SQUARE, SQUARE),
    ),
    "constant of a frozen teacher": (
        jax.grad(lambda w, x: ((jnp.tanh(x @ w) - jnp.tanh(x @ TABLE)) ** 2).mean()),
        (SQUARE, SQUARE),
    ),
    "scan": (jax.grad(scanned), ((array(4, 256, 1024), array(4, 1024, 256)), array(4096, 256))),
    "minibatches": (accumulated, (array(512, 512), array(4, 2048, 512))),
    "donated": (step, (layers(3, 256, 1024), array(4096, 256))),
}


def lower_on_mesh(devices):
    """A `shard_map` over two devices, which gather and sum."""
    mesh = Mesh(devices, ("data",))
    rows = PartitionSpec("data")

    def local(w, x):
        w = jax.lax.all_gather(w, "data", tiled=True)
        return jax.lax.psum(jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w), "data")

    both = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=PartitionSpec())
    place = NamedSharding(mesh, rows)
    args = (
        jax.ShapeDtypeStruct(size, jnp.float32, sharding=place)
        for size in ((512, 512), (4096, 512))
    )
    return jax.jit(both).lower(*args)


def lower(name, place=lambda tree: tree):
    function, shapes = (LARGE | FOREIGN)[name]
    return jax.jit(function, donate_argnums=0 if name.startswith("donated") else ()).lower(
        *place(shapes)
    )


def main(name):
    """Runs a program as the instruments compile it, and prints as JSON, in bytes, its peak by
    `heap` and by `memory`, and its arguments with what the process grew by.
    """
    from course_lib.measure import heap, memory

    # An array gets pages of its own, which go back when it is freed: it never lies in what an
    # earlier one has left.
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    found = heap(lower(name))

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def arguments():
        shapes = LARGE[name][1]
        return jax.block_until_ready(jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), shapes))

    # The first run also brings code, which is no array, into memory.
    jax.block_until_ready(found.compiled(*arguments()))
    args = arguments()
    before = None
    while before != (now := resident()):  # XLA frees memory a moment after a result is there
        before = now
        time.sleep(0.2)
        libc.malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the most so far
    jax.block_until_ready(found.compiled(*args))
    with open("/proc/self/status") as file:
        [most] = (1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    print(json.dumps([found.peak, memory(found).peak, memory(found).arguments + most - before]))


if __name__ == "__main__":
    # With several threads XLA's products copy parts of their operands for each: up to 18% of
    # what attention takes, another number each time.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    main(sys.argv[1])
