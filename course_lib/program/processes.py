"""Several processes, one training: connected by `jax.distributed`, and ended together.

A launcher, or you, starts the same program once per host or once per GPU. Each process sees the
devices of all, and runs the same steps on its part of the arrays
(https://docs.jax.dev/en/latest/multi_process.html). Every step needs every process, so if one
ends, all end soon: a killed one closes its connections, and the next exchange of data raises an
error in the others; if one only falls silent, JAX misses its heartbeat, and aborts the others.
"""

import collections
import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

HEARTBEAT = 30  # seconds without a heartbeat until a process counts as gone; JAX's default: 100
PATIENCE = 300  # seconds that processes wait for each other at the start; JAX's default
PREPARING = 24 * 3600  # seconds that `gather` waits: preparing a text may take hours

_gathered = itertools.count()


def from_launcher(env: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """Returns what a launcher says about this process: arguments of
    `jax.distributed.initialize`, or None if this is the only process.
    """
    # JAX finds process 0, but would give a process that has a host for itself one of its GPUs,
    # not read Open MPI 5 without `mpi4py`, and before 0.8 miss a Slurm job without `srun`.

    def number(name, missing=None):
        value = env.get(name) or missing  # an empty variable is not set
        if value is None or not value.isdecimal():
            raise ValueError(
                f"{name}={value} must be a number, as the other variables of its launcher are"
                " set: start all processes by srun or mpirun, or this one by --processes 1"
            )
        return int(value)

    # Open MPI's come first, since `mpirun` may run inside a Slurm job.
    if (count := number("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        process, on_host = (
            number(f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "LOCAL_RANK")
        )
        shares_host = number("OMPI_COMM_WORLD_LOCAL_SIZE", "1") > 1
    # The tasks of this srun. A script without srun has SLURM_NTASKS, too.
    elif (count := number("SLURM_STEP_NUM_TASKS", "1")) > 1:
        process, on_host = (number(f"SLURM_{x}") for x in ("PROCID", "LOCALID"))
        shares_host = count > number("SLURM_STEP_NUM_NODES")
    elif "KUBERNETES_SERVICE_HOST" in env and env.get("JOB_COMPLETION_INDEX"):
        # JAX asks the API of Kubernetes for the other arguments.
        return {"process_id": number("JOB_COMPLETION_INDEX")}
    else:
        return None
    sees_one_gpu = len(env.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1
    gpus = [on_host] if shares_host and not sees_one_gpu else []  # []: all GPUs it sees
    return {"process_id": process, "num_processes": count, "local_device_ids": gpus}


@contextlib.contextmanager
def start(
    coordinator: str | None = None,
    process: int | None = None,
    processes: int | None = None,
    *,
    heartbeat: int = HEARTBEAT,
    patience: int = PATIENCE,
) -> Iterator[None]:
    """Connects this process with the others, if there are any, inside a `with` block, before
    JAX looks for devices.

    A launcher says the first three arguments: "host:port" of process 0, this process's number
    from 0, and the number of processes; 1 ignores the launcher. Under Open MPI and Slurm,
    processes that share a host take one GPU each, by their number on the host, unless
    `CUDA_VISIBLE_DEVICES` names a single one. Otherwise a process takes all GPUs that it sees.
    """
    given = dict(coordinator_address=coordinator, process_id=process, num_processes=processes)
    arguments = {name: value for name, value in given.items() if value is not None}
    place = None if processes == 1 else from_launcher()
    if processes == 1 or not (place or arguments):
        tasks = os.environ.get("SLURM_NTASKS") or "1"
        if processes is None and tasks != "1":
            _say(
                f"Slurm has {tasks} tasks for this job, but srun did not start this process: it"
                " is alone"
            )
        yield
        return
    if place is None and len(arguments) < 3:
        raise ValueError(
            f"coordinator={coordinator!r}, process={process}, processes={processes} must be"
            " given together, because no launcher (mpirun, srun, an indexed Job of Kubernetes)"
            " sets them"
        )
    host, _, port = (coordinator or "host:0").rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"coordinator={coordinator!r} must be host:port, as in 10.0.0.1:1234")
    place = {"local_device_ids": []} | (place or {}) | arguments
    where = f"process 0 at {coordinator}" if coordinator else "process 0"
    _say(
        f"process {place['process_id']} waits up to {patience} s for the other processes, which"
        f" meet at {where}"
    )
    try:
        jax.distributed.initialize(
            **place, initialization_timeout=patience, heartbeat_timeout_seconds=heartbeat
        )
    except ValueError as error:
        raise ValueError(
            f"coordinator={coordinator!r}, process={process}, processes={processes}: {error}"
            " JAX finds these three by itself under srun, under mpirun of Open MPI 4, and in an"
            ' indexed Job of Kubernetes after `pip install "jax[k8s]"`'
        ) from None
    _check_devices()
    try:
        yield
        jax.distributed.shutdown()
    except BaseException:
        # Python's own exit would wait for the others, which wait for this one within a step.
        traceback.print_exc()
        _say(
            f"process {jax.process_index()} ends with this error, and the others end, too. If a"
            " connection was lost, another process ended first: see its lines. Start all of"
            " them again: training resumes from the last checkpoint"
        )
        sys.stdout.flush()
        os._exit(1)


def gather(text: str) -> list[str]:
    """Returns the texts (without NUL) of all processes, by their numbers. A collective: every
    process must call it, and waits for the others for up to `PREPARING` seconds.
    """
    if jax.process_count() == 1:
        return [text]
    # The exchange itself would not wait long enough: Gloo gives up after 30 s.
    ocp.multihost.get_barrier_sync_fn()(
        key=f"gather-{next(_gathered)}", timeout_ms=1000 * PREPARING
    )
    mine = np.frombuffer(text.encode(), np.uint8)
    longest = multihost_utils.process_allgather(np.int32(len(mine))).max()
    rows = multihost_utils.process_allgather(np.pad(mine, (0, longest - len(mine))))
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def _check_devices() -> None:
    """Refuses, in all processes, unequal numbers of devices: a mesh is a rectangular array."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        jax.distributed.shutdown()
        raise ValueError(
            "each process must have the same number of devices, not (process, devices):"
            f" {sorted(counts.items())}"
        )


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
