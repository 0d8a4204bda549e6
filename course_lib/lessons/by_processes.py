"""The gradient of `three_axes` by several processes of this machine, as on a cluster with one
process per host.

    loss, grads = by_processes.run(2)

starts two Python processes with four simulated devices each. Every process runs the same
program, `work`; JAX connects them, and `jax.devices()` lists the devices of all.
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib.lessons import three_axes, tiny_transformer
from course_lib.many_devices import meshes

AXES = {"data": 2, "pipe": 2, "tensor": 2}
M = 4
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # each program runs once: compiling is the cost
}

_candidates = (20_000 + (97 * os.getpid() + number) % 12_000 for number in itertools.count())


def example() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Returns parameters of four layers, and inputs and labels [16, 16]: always the same."""
    random = np.random.default_rng(0)
    inputs, labels = random.integers(0, 64, (2, 16, 16)).astype(np.int32)
    sizes = {"N": 4, "D": 32, "H": 4, "V": 64, "L": 16}
    shapes = jax.eval_shape(lambda key: tiny_transformer.init(key, **sizes), jax.random.key(0))
    params = {
        name: random.normal(scale=0.1, size=leaf.shape).astype(np.float32)
        for name, leaf in shapes.items()
    }  # NumPy's: every process makes them, and JAX would compile a program for each shape
    return params, inputs, labels


def work(process: int, processes: int, address: str, path: str) -> None:
    """Computes the gradient as one of several processes; process 0 writes it to a file.

    Args:
      process: this process's number.
      processes: how many there are; they divide the eight devices.
      address: "host:port" where process 0 listens.
      path: of the `.npz` file.
    """
    meshes.simulate(8 // processes)
    jax.distributed.initialize(address, processes, process)
    mesh = meshes.make(AXES)  # of the devices of all processes
    specs, gradient = three_axes.make_gradient(mesh, M)

    def place(array: Any, spec: P) -> jax.Array:
        """Each process copies to its own devices the parts that they hold."""
        array = np.asarray(array)
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, spec), lambda part: array[part]
        )

    params, inputs, labels = example()
    placed = {name: place(value, specs[name]) for name, value in params.items()}
    with jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(gradient)(
            placed, place(inputs, P("data")), place(labels, P("data"))
        )
    on_every_device = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    # Each process waits for all of its devices: if one left early, another's transfer would
    # wait for it forever.
    whole = jax.block_until_ready(on_every_device({"loss": loss, **grads}))
    if process == 0:
        np.savez(path, **whole)
    jax.distributed.shutdown()


def free_port() -> int:
    """Returns a port at which nobody listens, below those that Linux itself hands out (32768).
    Each process that asks starts at another port.
    """
    for port in _candidates:
        with socket.socket() as listener:
            try:
                listener.bind(("localhost", port))
            except OSError:
                continue
            return port
    raise AssertionError("the candidates never end")


def run(processes: int, seconds: float = 900.0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Starts 2, 4 or 8 processes, waits for them, and returns the loss and the whole gradients.
    When it returns or raises, none of them runs any more.

    Raises:
      ValueError: for another number of processes.
      RuntimeError: if a process ends with an error, or takes longer than `seconds`; with the
        last lines that it printed.
    """
    if processes not in (2, 4, 8):
        raise ValueError(f"processes={processes} must be 2, 4 or 8, to divide eight devices")
    address = f"localhost:{free_port()}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder, "gradient.npz")
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(processes)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(process), str(processes), address, path],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
            )
            for process, log in enumerate(logs)
        ]
        codes = _wait(started, seconds)
        # An error is the cause; a process that still runs may wait for the one that failed.
        worst = max(range(processes), key=lambda n: (bool(codes[n]), codes[n] is None))
        if codes[worst] != 0:
            how = "ended with an error" if codes[worst] else f"still ran after {seconds:g} s"
            logs[worst].seek(0)
            raise RuntimeError(f"process {worst} {how}:\n{logs[worst].read()[-2000:]}")
        with np.load(path) as file:
            grads = dict(file)
    return grads.pop("loss"), grads


def _wait(started: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """Waits for all to end, one to fail, or the time; ends the others. Returns exit codes, None
    for those that still ran.
    """
    deadline = time.monotonic() + seconds
    try:
        while True:
            codes = [process.poll() for process in started]
            if None not in codes or any(codes) or time.monotonic() > deadline:
                return codes
            time.sleep(0.05)
    finally:  # an interrupted cell leaves none behind, either
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
