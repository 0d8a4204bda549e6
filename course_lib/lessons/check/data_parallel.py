"""Checks of notebook 08's exercises. They run and compile for eight devices, simulated where
there are no eight accelerators.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib import measure
from course_lib.lessons.check.answers import (
    WrongAnswer,
    call,
    close,
    equations,
    exercise,
    predicted,
    require,
)
from course_lib.lessons.check.many_devices import (
    most_gathers_of_a_checkpoint,
    without_residual,
)
from course_lib.many_devices import meshes


@exercise
def fsdp(your_loss):
    """Checks `your_loss(shards, x, y)`: one device's part of FSDP, run inside `jax.shard_map`
    over the axis "data".

    On each of eight devices `shards` is [6 2 16], its rows of six layers' kernels, and x and y
    are [2 16], its rows of the batch. A layer maps x to `x + tanh(x @ kernel)`; the loss is the
    sum of `(x - y) ** 2` after the last layer, over the whole batch.
    """
    mesh = meshes.make({"data": 8}, meshes.devices(8))
    keys = jax.random.split(jax.random.key(0), 3)
    kernels = 0.3 * jax.random.normal(keys[0], (6, 16, 16))
    x, y = jax.random.normal(keys[1], (16, 16)), jax.random.normal(keys[2], (16, 16))
    layer_bytes = 4 * 16 * 16

    def one_device(kernels, x, y):
        for kernel in kernels:
            x = x + jnp.tanh(x @ kernel)
        return jnp.sum((x - y) ** 2)

    def on_each(shards, x, y):
        hint = (
            "Write it for one device with whole kernels. Then ask: which rows does a device"
            " lack when a layer runs, and until when does it need them?"
        )
        return call(your_loss, shards, x, y, hint=hint)

    cut = P(None, "data")
    in_specs = (cut, P("data"), P("data"))
    loss = jax.shard_map(
        lambda *args: meshes.vary(on_each(*args), "data").reshape(1),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P("data"),
    )
    places = [NamedSharding(mesh, spec) for spec in in_specs]
    arguments = jax.device_put((kernels, x, y), tuple(places))
    with jax.default_matmul_precision("highest"):
        right, expected = jax.value_and_grad(one_device)(kernels, x, y)
        losses = jax.device_get(jax.jit(loss)(*arguments))
        require(
            not (abs(sum(losses) / right - 1) < 1e-4 and np.ptp(losses) > 0),
            "Each device returns the loss of its own rows. Sum them over the devices.",
        )
        require(
            abs(losses[0] * 8 / right - 1) > 1e-4,
            "An eighth of the loss: a sum over the batch is `psum`, not `pmean`.",
        )
        entries = x.size // 8  # of a device's rows
        require(
            min(abs(losses[0] * n / right - 1) for n in (entries, 8 * entries)) > 1e-4,
            "The loss is the sum over all entries, not their mean.",
        )
        require(
            abs(losses[0] / jnp.sum((without_residual(kernels, x) - y) ** 2) - 1) > 1e-4,
            "A layer adds tanh(x W) to its input. Yours returns tanh(x W) alone.",
        )
        require(
            np.allclose(losses, right, rtol=1e-4),
            f"The loss on device 0 is {losses[0]:.2f}; on one device it is {right:.2f}.",
        )
        total = jax.shard_map(on_each, mesh=mesh, in_specs=in_specs, out_specs=P())
        compiled = jax.jit(jax.grad(total)).lower(*arguments).compile()
        grads = jax.device_get(compiled(*arguments))
    require(np.any(grads), "The loss is right, but no gradient reaches the kernels.")
    require(close(grads, expected), "The loss is right, the gradient is not.")

    ledger = measure.ledger(compiled, mesh)
    require(
        ledger.payload("all-gather", "data") > 0,
        "Right, but nothing is all-gathered: the kernels travel by"
        f" {', '.join(sorted({entry.kind for entry in ledger.entries}))}. Which collective puts"
        " the devices' rows together, and sends each row once?",
    )
    gathers = [entry for entry in ledger.entries if entry.kind == "all-gather"]
    most = max((entry.payload_bytes for entry in gathers), default=0)
    gathered = ledger.payload("all-gather", "data")
    require(
        most <= layer_bytes,
        f"Right, but one all-gather makes {most // layer_bytes} layers whole at once. When does"
        " a device need each of them?",
    )
    at_once = most_gathers_of_a_checkpoint(jax.make_jaxpr(total)(*arguments).jaxpr)
    require(
        at_once <= 1,
        f"Right, but one `jax.checkpoint` spans {at_once} layers: the backward pass computes"
        " all of them again first, and keeps their kernels whole. How many layers should it"
        " compute again at a time?",
    )
    require(
        gathered > 6 * layer_bytes,
        "Right, but each kernel is gathered once: all six stay whole until the backward pass."
        " What does `jax.grad` save of each layer, and who could compute it again?",
    )
    require(
        gathered <= 12 * layer_bytes,
        f"Right, but {gathered // layer_bytes} kernels are gathered per step; six layers need"
        " 12, each once forward and once backward.",
    )
    return (
        "one device's gradient; per step, 12 kernels are gathered and"
        f" {ledger.payload('reduce-scatter', 'data') // layer_bytes} gradients"
        " reduce-scattered."
    )


@exercise
def traffic_of_minibatches(gathered, scattered):
    """Checks the bytes that FSDP gathers and reduce-scatters per step, for six layers of
    [16 16] float32 and four minibatches. Payloads, as in the ledger.
    """
    predicted(
        gathered, scattered, hint="A kernel has 1,024 bytes. How often does each one travel?"
    )
    mesh = meshes.make({"data": 8}, meshes.devices(8))

    @jax.checkpoint
    def add_layer(x, shard):
        return x + jnp.tanh(x @ jax.lax.all_gather(shard, "data", tiled=True)), None

    def own_gradient(shards, x):
        def loss_sum(shards, x):
            return jnp.sum(jax.lax.scan(add_layer, x, shards)[0] ** 2)

        def add(total, minibatch):
            return total + jax.grad(loss_sum)(shards, minibatch), None

        return jax.lax.scan(add, jnp.zeros_like(shards), x.reshape(4, -1, 16))[0]

    cut = P(None, "data")
    gradient = jax.shard_map(own_gradient, mesh=mesh, in_specs=(cut, P("data")), out_specs=cut)
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((6, 16, 16), cut), ((64, 16), P("data")))
    ]
    ledger = measure.ledger(jax.jit(gradient).lower(*shapes).compile(), mesh)
    right = {kind: ledger.payload(kind, "data") for kind in ("all-gather", "reduce-scatter")}
    require(
        gathered != right["all-gather"] / 4,
        "This is what one minibatch gathers. No layer stays whole until the next minibatch.",
    )
    require(
        gathered != right["all-gather"] / 2,
        "Each minibatch has a backward pass, too, which gathers again.",
    )
    require(
        gathered != right["all-gather"] * 7 / 8,
        "These bytes leave the device. The payload of an all-gather is its whole result: a"
        " device's own eighth counts, too.",
    )
    require(
        gathered == right["all-gather"],
        f"Not {gathered:,} bytes gathered. Count layers, passes and minibatches.",
    )
    require(
        scattered != right["reduce-scatter"] / 4,
        "This is what one minibatch scatters. A device has no room for the whole gradient, so"
        " it cannot add up four of them first.",
    )
    require(
        scattered == right["reduce-scatter"],
        f"Not {scattered:,} bytes scattered. Each minibatch has one gradient per layer.",
    )
    return (
        f"compiled, {right['all-gather']:,} bytes are gathered and"
        f" {right['reduce-scatter']:,} reduce-scattered."
    )


@exercise
def summed_once(your_gradient):
    """Checks `your_gradient(loss, params, batch)`, run on each of eight devices inside
    `jax.shard_map`, with the kernel's rows cut over "data" and the bias whole.

    `loss(params, batch)` gathers the kernel and returns the sum over the device's own rows.
    """
    mesh = meshes.make({"data": 8}, meshes.devices(8))
    specs = {"kernel": P("data"), "bias": P()}
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"kernel": jax.random.normal(keys[0], (16, 4)), "bias": jnp.ones(4)}
    batch = jax.random.normal(keys[1], (32, 16)), jax.random.normal(keys[2], (32, 4))

    def one_device(params, batch):
        x, y = batch
        return jnp.sum((x @ params["kernel"] + params["bias"] - y) ** 2)

    def own_rows(params, batch):
        kernel = jax.lax.all_gather(params["kernel"], "data", tiled=True)
        return one_device({**params, "kernel": kernel}, batch)

    def on_each(params, batch):
        own = meshes.vary(params, "data")
        hint = "Begin with `jax.grad(loss)(params, batch)`: which leaf is not summed yet?"
        grads = call(your_gradient, own_rows, own, batch, hint=hint)
        require(
            isinstance(grads, dict) and set(grads) == set(params),
            "Return a dict with the gradients of 'kernel' and 'bias', as `jax.grad` does.",
        )
        return jax.tree.map(lambda g: meshes.vary(g, "data")[None], grads)

    run = jax.shard_map(on_each, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    with jax.default_matmul_precision("highest"):
        right = jax.grad(one_device)(params, batch)
        grads = jax.device_get(jax.jit(run)(params, batch))
    own_slices = right["kernel"].reshape(8, 2, 4)
    bias = jnp.broadcast_to(right["bias"], (8, 4))
    yours = {name: jnp.asarray(grads[name]) for name in params}
    require(
        yours["kernel"].shape == own_slices.shape,
        f"The kernel's gradient is {yours['kernel'].shape[1:]} on a device; its slice is"
        " (2, 4).",
    )
    require(
        float(jnp.ptp(yours["kernel"], axis=0).max()) > 1e-3,
        "The kernel's gradient has the same two rows on all devices, though each device holds"
        " other rows of the kernel. Print what `jax.grad(loss)` returns on two devices: which"
        " sums does it have already?",
    )
    require(
        not close(yours["kernel"], own_slices / 8),
        "The kernel's gradient is an eighth of the right one: it came summed, not averaged.",
    )
    scale = float(jnp.vdot(yours["kernel"], own_slices) / jnp.vdot(own_slices, own_slices))
    require(
        abs(scale - 1) < 1e-4 or not close(yours["kernel"], scale * own_slices),
        f"The kernel's gradient is {scale:.3g} times the right one: it came summed, once.",
    )
    require(close(yours["kernel"], own_slices), "The kernel's gradient is wrong.")
    require(
        float(jnp.ptp(yours["bias"], axis=0).max()) < 1e-3,
        "The bias's gradient differs between devices: every device has its own rows, so it"
        " must be summed.",
    )
    require(
        not close(yours["bias"], bias / 8),
        "The bias's gradient is a mean over devices; the loss is a sum.",
    )
    require(close(yours["bias"], bias), "The bias's gradient is wrong.")
    return "the kernel's gradient came summed, the bias's is summed by you."


# Shapes and dtypes of a device's gradients, in the order of the backward pass.
_GRADIENTS = (
    ((4, 8), jnp.float32),
    ((32,), jnp.float32),
    ((8,), jnp.float32),
    ((16, 12), jnp.float32),  # larger than the small capacity
    ((5, 8), jnp.float32),
    ((8, 8), jnp.bfloat16),
    ((16,), jnp.bfloat16),
    ((3,), jnp.float32),  # never fills a bucket
)
_LARGEST = 3
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "ppermute")


@exercise
def sum_in_buckets(your_sum):
    """Checks `your_sum(grads, capacity)`, run on each of eight devices inside `jax.shard_map`:
    `grads` are the device's gradients in the order of the backward pass.

    It returns their sums over "data", with one all-reduce per bucket. A bucket is closed when
    it has at least `capacity` bytes, and where the dtype changes.
    """
    mesh = meshes.make({"data": 8}, meshes.devices(8))
    random = np.random.default_rng(0)
    # small integers: their sums are exact, in bfloat16 too
    grads = [
        jnp.asarray(random.integers(-15, 16, (8, *shape)), dtype) for shape, dtype in _GRADIENTS
    ]
    sizes = [grad.nbytes // 8 for grad in grads]
    for capacity in (256, 2048):  # the second is larger than all gradients together

        def on_each(grads, capacity=capacity):
            own = [grad[0] for grad in grads]
            hint = (
                "Write it for one bucket first: flatten its gradients, concatenate them, sum"
                " them over the devices, and cut the result again. Then ask: when does the"
                " next bucket begin?"
            )
            sums = call(your_sum, own, capacity, hint=hint)
            _like_gradients(sums, own)
            return [meshes.vary(one, "data")[None] for one in sums]

        cut = P("data")
        run = jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=cut, out_specs=cut))
        program = run.trace(grads).jaxpr.jaxpr
        _sums_of(jax.device_get(run(grads)), [np.asarray(g, np.float32) for g in grads])
        _in_buckets(program, sizes, capacity)
    right = _buckets(sizes, lambda bucket, _: bucket >= 256)
    return (
        f"{len(sizes)} gradients of {sum(sizes):,} bytes; with a capacity of 256 they travel"
        f" in {len(right)} all-reduces of {', '.join(map(str, right))} bytes."
    )


def _like_gradients(sums: Any, grads: Sequence[jax.Array]) -> None:
    """Raises `WrongAnswer` unless there is a sum like each gradient."""
    require(
        isinstance(sums, list | tuple) and all(hasattr(one, "dtype") for one in sums),
        "Return a list of arrays, one sum for each of `grads`.",
    )
    shapes, yours = [grad.shape for grad in grads], [one.shape for one in sums]
    require(
        len(yours) == len(shapes) or not yours or yours != shapes[: len(yours)],
        f"Only the first {len(yours)} of {len(shapes)} gradients come back. The last bucket"
        " must be summed as well, though it has fewer than `capacity` bytes.",
    )
    require(
        shapes[_LARGEST] in yours,
        f"The sum of the largest gradient is missing, or has another shape than"
        f" {shapes[_LARGEST]}. A gradient with more than `capacity` bytes stays whole.",
    )
    require(
        len(yours) == len(shapes), f"{len(yours)} sums come back for {len(shapes)} gradients."
    )
    require(
        yours == shapes or sorted(yours) != sorted(shapes),
        "The sums come back in another order. Return them in the order of `grads`.",
    )
    for i, (one, grad) in enumerate(zip(sums, grads, strict=True)):
        require(
            one.shape == grad.shape,
            f"The sum of grads[{i}] has shape {one.shape}; the gradient has {grad.shape}.",
        )
        require(
            one.dtype == grad.dtype,
            f"The sum of grads[{i}] is {one.dtype}; the gradient is {grad.dtype}. An array has"
            " one dtype: concatenated with float32 numbers, bfloat16 ones become float32, too."
            " Begin a new bucket where the dtype changes.",
        )


def _sums_of(yours: Sequence[Any], grads: Sequence[np.ndarray]) -> None:
    """Raises `WrongAnswer` unless each device has the sum of each gradient.

    Args:
      yours: the sums of all devices, stacked along the first axis.
      grads: likewise the gradients.
    """
    sums = [np.asarray(one, np.float32) for one in yours]
    right = [np.broadcast_to(grad.sum(0), grad.shape) for grad in grads]
    for i, one in enumerate(sums):
        require(
            np.ptp(one, axis=0).max() == 0,
            f"The devices return different numbers for grads[{i}]: it is not summed over"
            " `data`.",
        )

    def times(factor):
        return all(map(np.allclose, sums, [factor * one for one in right]))

    def numbers(arrays):
        return np.sort(np.concatenate([one.ravel() for one in arrays]))

    require(not times(1 / 8), "A mean over the devices. `psum` gives the sum.")
    require(not times(8), "8 times too large: each gradient is summed twice.")
    require(
        times(1) or not np.array_equal(numbers(sums), numbers(right)),
        "The numbers are right, but some stand in another gradient's place. Cut a bucket in the"
        " order in which its gradients were concatenated.",
    )
    for i, (one, like) in enumerate(zip(sums, right, strict=True)):
        require(np.array_equal(one, like), f"The sum of grads[{i}] is wrong.")


def _buckets(sizes: Sequence[int], full: Callable[[int, int], bool]) -> list[int]:
    """Returns the bytes of each bucket.

    Args:
      sizes: bytes of each gradient.
      full: takes the bytes of a bucket and of the next gradient, and returns whether the
        bucket is closed before this gradient.
    """
    buckets: list[int] = []
    for i, size in enumerate(sizes):
        changes = i > 0 and _GRADIENTS[i][1] != _GRADIENTS[i - 1][1]  # of dtype
        if not buckets or changes or full(buckets[-1], size):
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _in_buckets(program: Any, sizes: Sequence[int], capacity: int) -> None:
    """Raises `WrongAnswer` unless the program sums one array per bucket."""
    sent, others = [], set()
    for eqn in equations(program):
        if eqn.primitive.name.startswith("psum"):  # of several arrays, one all-reduce each
            sent += [v.aval.size * v.aval.dtype.itemsize for v in eqn.invars]
        elif eqn.primitive.name.startswith(_COLLECTIVES):
            others.add(eqn.primitive.name)
    names = ", ".join(sorted(others))
    require(
        not others,
        f"Right, but the gradients travel by {names}. One `psum` per bucket suffices.",
    )
    right = _buckets(sizes, lambda bucket, _: bucket >= capacity)
    if sorted(sent) == sorted(right):
        return

    def yours(full: Callable[[int, int], bool]) -> bool:
        return sorted(sent) == sorted(_buckets(sizes, full))

    here = f"Right, but with a capacity of {capacity} bytes"
    require(
        not yours(lambda bucket, _: True),
        f"Right, but with one all-reduce per gradient, {len(sent)} in all, and each one pays"
        " the latency. (`psum` of a list sums each array by itself.) Concatenate the gradients"
        " of a bucket first.",
    )
    require(
        len(sent) > 1,
        "Right, but all gradients share one all-reduce, which waits for the last of them."
        " Close a bucket when it has `capacity` bytes.",
    )
    require(
        sum(sent) == sum(sizes),
        f"Right, but {sum(sent):,} bytes are all-reduced, and the gradients have"
        f" {sum(sizes):,}. Sum each gradient once, and in its own dtype.",
    )
    require(
        not yours(lambda bucket, _: False),
        f"{here} no bucket is ever full: buckets end only where the dtype changes.",
    )
    require(
        sorted(sent) != sorted(_buckets(sizes, lambda bucket, _: bucket >= 4 * capacity)),
        f"{here} a bucket is closed when it has {capacity} numbers. `capacity` is in bytes.",
    )
    require(
        not yours(lambda bucket, _: bucket > capacity),
        f"{here} a bucket of {capacity} bytes stays open. It is full: it has *at least*"
        " `capacity` bytes.",
    )
    require(
        not yours(lambda bucket, size: bucket + size > capacity),
        f"{here} a bucket is closed before the gradient that would fill it. Here this gradient"
        " still goes in, and then the bucket is closed.",
    )
    require(
        max(sent) >= max(sizes),
        f"{here} the gradient of {max(sizes)} bytes is cut into pieces. It stays whole, in one"
        " bucket.",
    )
    raise WrongAnswer(
        f"{here} the all-reduces have {', '.join(map(str, sent))} bytes. Taken in their order,"
        f" the gradients make buckets of {', '.join(map(str, right))}."
    )
