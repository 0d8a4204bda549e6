"""Programs for the instruments, none of them the course's, and what a process grows by."""

import json
import os
import sys

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


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
    def loss(layers):
        y = x
        for up, down in layers:
            y = y + jax.nn.relu(y @ up) @ down
        return (y**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))


# A function and the shapes of its arguments. These are large enough for a process to show.
LARGE = {
    "hidden layer": (
        lambda x, up, down: (jax.nn.relu(x @ up) @ down).sum(),
        (array(16384, 1024), array(1024, 4096), array(4096, 1024)),
    ),
    "attention": (attention, (array(8, 4096, 64),) * 3),
    "cross entropy": (
        cross_entropy,
        (array(4096, 256), array(256, 16384), array(4096, dtype=jnp.int32)),
    ),
    "a scan's gradient": (
        jax.grad(scanned),
        ((array(4, 256, 1024), array(4, 1024, 256)), array(16384, 256)),
    ),
    "donated step": (step, ([(array(1024, 4096), array(4096, 1024))] * 4, array(8192, 1024))),
}


SQUARE = array(1024, 1024)
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
    "custom call": (lambda a: jnp.linalg.cholesky(a @ a.T) @ a, (SQUARE,)),
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
    sizes = (512, 512), (4096, 512)
    return jax.jit(both).lower(
        *(jax.ShapeDtypeStruct(size, jnp.float32, sharding=place) for size in sizes)
    )


def main(name):
    """Runs a program as the instruments compile it, and prints as JSON, in bytes, its peak by
    `heap` and by `memory`, and its arguments with what the process grew by.
    """
    from course_lib.measure import heap, memory

    function, shapes = LARGE[name]
    donated = 0 if name.startswith("donated") else ()
    found = heap(jax.jit(function, donate_argnums=donated).lower(*shapes))
    args = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    jax.block_until_ready(args)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forgets the most so far
    jax.block_until_ready(found.compiled(*args))
    with open("/proc/self/status") as file:
        [most] = (1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    print(json.dumps([found.peak, memory(found).peak, memory(found).arguments + most - before]))


if __name__ == "__main__":
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # XLA has buffers per thread
    main(sys.argv[1])
