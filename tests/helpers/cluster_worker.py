"""One of several processes of test_processes.py: `python cluster_worker.py JOB [coordinator
process processes]`.

They step without end, until the process whose number is in the environment's WHO does what the
job says.
"""

import os
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course_lib.many_devices import meshes
from course_lib.program import preemption, processes


def step_without_end(job, stop_reason):
    """Add one number of each device, again and again, until the job ends it."""
    grid = meshes.make({"data": 4})
    x = jax.make_array_from_callback(
        (4,), NamedSharding(grid, P("data")), lambda part: jnp.ones(4)[part]
    )
    add, me = jax.jit(jnp.sum), jax.process_index()
    chosen = me == int(os.environ["WHO"])
    for step in range(10_000):
        assert add(x) == 4
        if step == 5:
            print(f"process {me} has pid {os.getpid()}", flush=True)
        if step == 10 and chosen and job == "raise":
            raise ZeroDivisionError("an error in one process")
        if step == 10 and chosen and job == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # alive, and silent
        stop_reason()
        time.sleep(0.02)


if __name__ == "__main__":
    job, *place = sys.argv[1:]
    coordinator, *numbers = place or [None]
    meshes.simulate(2)
    seconds = dict(heartbeat=10, patience=int(os.environ.get("PATIENCE", 60)))
    with (
        processes.start(coordinator, *map(int, numbers), **seconds),
        preemption.notices() as stop_reason,
    ):
        step_without_end(job, stop_reason)
