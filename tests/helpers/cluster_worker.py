"""What each of several processes runs in test_processes.py: `python cluster_worker.py JOB
[coordinator process processes]`.

Jobs: "train" prints losses, "prepare" comes to no step. The others step without end, until one
process, whose number is in WHO, does what the job says.
"""

import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import one_device
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib import training
from course_lib.many_devices import meshes, strategies
from course_lib.many_devices.strategies import Strategy
from course_lib.program import preemption, processes

STEPS = 3


def losses():
    """Trains on a mesh of four devices, wherever they are, and returns the losses."""
    whole = one_device.small(**{"model.num_layers": 1})
    grid = meshes.make({"data": 2, "tensor": 2}, jax.devices("cpu")[:4])
    run = strategies.build(whole, grid, Strategy(zero=1))
    cut = NamedSharding(grid, P("data"))
    batch = jax.tree.map(
        lambda whole: jax.make_array_from_callback(whole.shape, cut, lambda part: whole[part]),
        jax.device_get(one_device.batch(whole)),
    )
    state = run.init(jax.random.key(0))
    found = []
    for _ in range(STEPS):
        state, metrics = run.train_step(state, batch)
        found.append(training.mean_metrics(metrics)["loss"])
    return found


def endless(job, told_to_end):
    """Adds one number of each device, again and again, until the job says otherwise."""
    grid = meshes.make({"data": 4})
    x = jax.make_array_from_callback(
        (4,), NamedSharding(grid, P("data")), lambda part: jnp.ones(4)[part]
    )
    add = jax.jit(jnp.sum)
    chosen = jax.process_index() == int(os.environ["WHO"])
    for step in range(10_000):
        assert add(x) == 4
        if step == 5:
            print(f"process {jax.process_index()} has pid {os.getpid()}", flush=True)
        if step == 10 and chosen and job == "raise":
            raise ZeroDivisionError("an error in one process")
        if step == 10 and chosen and job == "stop":
            os.kill(os.getpid(), 19)  # SIGSTOP: alive, and silent
        if job == "preempt" and told_to_end():
            print(f"process {jax.process_index()} ends after step {step}", flush=True)
            return
        time.sleep(0.02)


if __name__ == "__main__":
    job, *place = sys.argv[1:]
    coordinator, process, count = (
        (place[0], int(place[1]), int(place[2])) if place else (None, None, None)
    )
    meshes.simulate(2)
    jax.config.update("jax_disable_most_optimizations", True)
    seconds = dict(
        heartbeat=processes.HEARTBEAT if job == "train" else 10,
        patience=int(os.environ.get("PATIENCE", 60)),
    )
    with processes.start(coordinator, process, count, **seconds):
        if job == "train":
            print(
                f"process {jax.process_index()} of {jax.process_count()} has"
                f" {jax.local_device_count()} devices, losses {losses()}",
                flush=True,
            )
        else:
            with preemption.notices() as told_to_end:
                if job == "prepare":
                    print(f"process {jax.process_index()} has pid {os.getpid()}", flush=True)
                    time.sleep(600)
                endless(job, told_to_end)
