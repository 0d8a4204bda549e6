"""Checks of notebook 07's exercises. They run and compile for eight devices, simulated where
there are no eight accelerators.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from course_lib import measure
from course_lib.lessons.check.answers import call, close, exercise, predicted, require
from course_lib.many_devices import meshes


def _run(function: Callable[..., Any], mesh: Any, specs: Any, *arguments: Any) -> Any:
    """Runs a function on each device; returns its results stacked along the devices, and the
    ledger of the compiled program.
    """

    def on_each(*parts: Any) -> Any:
        axes = tuple(mesh.axis_names)
        return jax.tree.map(lambda x: meshes.vary(x, axes)[None], function(*parts))

    devices = P(tuple(mesh.axis_names))
    run = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=devices)
    with jax.default_matmul_precision("highest"):
        compiled = jax.jit(run).lower(*arguments).compile()
    placed = jax.device_put(arguments, compiled.input_shardings[0])
    return jax.device_get(compiled(*placed)), measure.ledger(compiled, mesh)


@exercise
def cut_norm(your_norm, sent=None):
    """Checks `your_norm(x)`: x is [16 16], a device's columns of [16 64] over the axis
    "tensor" of four devices. Returns its columns of `x / sqrt(mean of x**2 over 64 columns)`.

    `sent`, unless None, predicts the bytes that a device sends.
    """
    if sent is not None:
        predicted(sent, hint="Which array do the devices add up, and how many bytes has it?")
    mesh = meshes.make({"data": 2, "tensor": 4}, meshes.devices(8))
    x = jnp.asarray(
        np.random.default_rng(0).normal(size=(16, 64)) * np.arange(1, 65), "float32"
    )
    hint = "The mean runs over 64 columns. Which number per row can a device not know alone?"
    yours, ledger = _run(lambda x: call(your_norm, x, hint=hint), mesh, P(None, "tensor"), x)
    require(
        yours.shape == (8, 16, 16),
        f"Return the device's columns, (16, 16), not {yours.shape[1:]}.",
    )

    def in_parts(y):
        return jnp.tile(y.reshape(16, 4, 16).transpose(1, 0, 2), (2, 1, 1))

    def norm(squares):
        return in_parts((x.reshape(16, 4, 16) / jnp.sqrt(squares)).reshape(16, 64))

    per_device = (x.reshape(16, 4, 16) ** 2).mean(2, keepdims=True)
    mean = per_device.mean(1, keepdims=True)
    right = norm(mean)
    by_columns = norm((x.reshape(16, 4, 16) ** 2).mean((0, 1)))
    require(
        not close(yours, norm(per_device)),
        "Each device divides by the mean of its own columns. Nothing is summed along `tensor`,"
        " so this is another function for each number of devices.",
    )
    require(
        ledger.sent(axis="tensor") > 0,
        "Nothing is sent along `tensor`, and alone a device knows 16 of the 64 columns.",
    )
    require(not close(yours, norm(mean**2)), "The square root is missing.")
    require(
        not close(yours, norm(mean.mean())),
        "One number divides all rows: each row has a mean of its own, over its 64 columns.",
    )
    require(
        not close(yours, by_columns),
        "Your mean runs over the 16 rows of a column. It should run over the 64 columns of a"
        " row.",
    )
    factor = float(np.linalg.norm(yours) / np.linalg.norm(right))
    require(
        close(yours, right) or not close(yours, factor * right),
        f"{factor:.3g} times the right values: the mean is the sum over all four devices,"
        " divided by all 64 columns.",
    )
    require(close(yours, right), "Not the norm over all 64 columns.")
    measured = ledger.sent()
    require(
        measured <= 96,
        f"Right, but each device sends {measured:,} bytes; one number per row suffices.",
    )
    if sent is not None:
        require(
            sent != 64,
            "The norm is right. 64 bytes are the sums, one float32 per row. How often does a"
            " ring send each of them, for all devices to have them?",
        )
        require(
            sent < 1024,
            f"The norm is right. {sent:,} bytes are a prediction for x itself, which stays"
            " where it is.",
        )
        require(
            sent == measured,
            f"The norm is right. {sent:,} bytes are too {'many' if sent > measured else 'few'}:"
            " S is one float32 for each of 16 rows, n is the four devices along `tensor`, and"
            " an all-reduce is two collectives.",
        )
    return f"each device sends {measured} bytes; gathering x would take 3,072."


@exercise
def two_levels(your_all_reduce):
    """Checks `your_all_reduce(x)`, of x [16] on each device of a mesh "data" 2 (hosts) x
    "tensor" 4 (GPUs of a host): the sum over all eight, with a quarter of x sent across hosts.
    """
    mesh = meshes.make({"data": 2, "tensor": 4}, meshes.devices(8))
    x = np.random.default_rng(0).integers(-50, 50, (8, 16)).astype(np.float32)
    hint = (
        "Decide first: which part of its host's sum should a GPU hold before it sends to the"
        " other host?"
    )
    yours, ledger = _run(
        lambda x: call(your_all_reduce, x[0], hint=hint), mesh, P(("data", "tensor")), x
    )
    right = np.broadcast_to(x.sum(0), (8, 16))
    require(
        yours.shape == (8, 16),
        f"Each device should have all 16 sums, not {yours.shape[1:]}: gather inside the host at"
        " the end.",
    )
    in_host = np.repeat(x.reshape(2, 4, 16).sum(1), 4, axis=0)
    require(
        not close(yours, in_host), "This is the sum inside each host. The hosts must talk, too."
    )
    across_hosts = np.tile(x.reshape(2, 4, 16).sum(0), (2, 1))
    require(
        not close(yours, across_hosts),
        "This is the sum across hosts, GPU by GPU. The GPUs of a host must add up, too.",
    )
    factor = float(np.linalg.norm(yours) / np.linalg.norm(right))
    require(
        close(yours, right) or not close(yours, factor * right),
        f"{factor:.3g} times the sum over all eight devices: is one of the collectives a mean?",
    )
    require(close(yours, right), "Not the sum over all eight devices.")
    both = ledger.payload(axis=("data", "tensor"))
    require(
        both == 0,
        "The sum is right, but one collective runs over both axes: it does not say what stays"
        " inside a host.",
    )
    across = ledger.sent(axis="data")
    require(
        across <= 16,
        f"The sum is right, but each GPU sends {across} bytes across hosts: reduce-scatter"
        " inside the host first, and 16 suffice.",
    )
    return f"{across} of 64 bytes go across hosts, from each GPU its own quarter."


@exercise
def mean_gradient(your_gradient):
    """Checks `your_gradient(loss, w, x, y)`, run on each of eight devices: w is shared, x and
    y are the device's rows, and `loss(w, x, y)` is the mean over rows.
    """
    mesh = meshes.make({"data": 8}, meshes.devices(8))

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    random = np.random.default_rng(0)
    w, x, y = (random.normal(size=s).astype(np.float32) for s in (1000, (64, 1000), 64))
    right = jax.grad(loss)(w, x, y)
    hint = "Decide first whether `jax.grad(loss)(w, x, y)` is summed over the devices already."
    yours, ledger = _run(
        lambda w, x, y: call(your_gradient, loss, w, x, y, hint=hint),
        mesh,
        (P(), P("data"), P("data")),
        *(w, x, y),
    )
    require(
        hasattr(yours, "shape"),
        f"Return one array, the gradient of w, not {type(yours).__name__}.",
    )
    require(yours.shape == (8, 1000), f"The gradient has shape (1000,), not {yours.shape[1:]}.")
    require(
        float(np.ptp(yours, axis=0).max()) < 1e-3,
        "The devices have different gradients: each has that of its own rows.",
    )
    ratio = float(np.linalg.norm(yours[0]) / np.linalg.norm(right))
    require(
        not close(yours[0], 8 * right),
        "8 times too large: a sum over devices where the mean was meant. (If w is shared, its"
        " gradient comes summed already, and `pmean` of equal sums changes nothing.)",
    )
    require(
        not close(yours[0], 64 * right),
        "64 times too large: summed twice, and never divided.",
    )
    require(not close(yours[0], -right), "The sign is wrong.")
    require(close(yours[0], right), f"Its norm is {ratio:.3f} times the right one.")
    sent = ledger.payload("all-reduce", "data")
    require(
        sent == 4000,
        f"Right, but {sent:,} bytes are all-reduced per step, and the gradient has 4,000:"
        " all-reduce it once, and send nothing else.",
    )
    return "4,000 bytes are all-reduced per step, the gradient once."
