"""Many processes, one training: JAX's own distributed engine, started, watched, and left in
order.

The same program is started once for each host, or for each GPU, by a launcher or by hand. Each
process then sees the devices of all, and runs the same steps on its own part of the arrays
(https://docs.jax.dev/en/latest/multi_process.html):

    with processes.start() as info:    # None where this is the only process: nothing happens
        grid = meshes.make({"data": jax.device_count()}, jax.devices())
        ...                            # the whole training: only what all processes do alike

Process 0 runs JAX's coordination service, at an address that JAX finds in what Slurm, Open MPI
4 or Kubernetes tell a process; on plain machines it is given. What the devices send each other
goes past it: NCCL on GPUs, Gloo on CPUs.

No process can go on without the others, so that one end is the end of all, and soon:

- An error in one process ends it at once, after its traceback. Left to itself, Python would
  wait at the exit for the others, which wait for this one in the middle of a step: nobody ends.
- A process that is killed closes its connections. What is being sent fails, or JAX's
  coordination service misses its heartbeat, after `HEARTBEAT` seconds at most. JAX then aborts
  the process from C++, past all of Python's handlers.
- So that the last line on the screen says what to do even then, a small shell waits beside each
  process, and prints what it was told last if the process ends without taking it back. Signals
  that are meant for all pass it by.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

HEARTBEAT = 30  # seconds without a sign of life until a process is gone; JAX's default is 100
PATIENCE = 300  # seconds that processes wait for each other at the start; JAX's default
PREPARING = 24 * 3600  # seconds for what each prepares, as a text; a process that goes ends it
OTHER_GONE = 76  # exit code where another process went; of JAX's abort: SIGABRT, on 0.7: 1

_AGAIN = "Start all of them again: training resumes from the last checkpoint"
# Words of errors that mean a lost connection.
_SIGNS = ("Gloo", "NCCL", "UNAVAILABLE", "ABORTED", "Socket closed", "Connection reset")
_gathered = itertools.count()
_WATCHER = (
    "trap '' TERM INT HUP; while read -r line; do last=$line; done;"
    """ [ -z "$last" ] || printf '%s\\n' "$last" >&2"""
)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a launcher tells a process about its place among all of them.

    Attributes:
      launcher: "openmpi", "slurm" or "kubernetes"; "" if there is none.
      process: its number, from 0.
      processes: how many there are; None if only the cluster's API knows.
      on_host: its number among several on this host; None if it has the host for itself.
    """

    launcher: str
    process: int
    processes: int | None
    on_host: int | None = None


@dataclasses.dataclass(frozen=True)
class Info:
    """One of several processes, all of them connected.

    Attributes:
      process: its number, from 0.
      processes: how many there are.
      local_devices: how many of `jax.devices()` are this process's own.
    """

    process: int
    processes: int
    local_devices: int


def find(environ: Mapping[str, str] | None = None) -> Place | None:
    """Returns this process's place as a launcher set it in the environment, or None if it is
    the only one.

    Open MPI's `mpirun` is asked first, as it may run inside of a Slurm job, then Slurm's
    `srun`, then Kubernetes, where the Job must be an indexed one.

    Args:
      environ: environment variables; those of this process if None.
    """
    env = os.environ if environ is None else environ
    if int(env.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        shared = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1)) > 1
        on_host = int(env["OMPI_COMM_WORLD_LOCAL_RANK"]) if shared else None
        return Place(
            "openmpi",
            int(env["OMPI_COMM_WORLD_RANK"]),
            int(env["OMPI_COMM_WORLD_SIZE"]),
            on_host,
        )
    # Tasks of this srun: SLURM_NTASKS is there in a script without srun too.
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        processes = int(env["SLURM_STEP_NUM_TASKS"])
        on_host = (
            int(env["SLURM_LOCALID"]) if processes > int(env["SLURM_STEP_NUM_NODES"]) else None
        )
        return Place("slurm", int(env["SLURM_PROCID"]), processes, on_host)
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:
        return Place("kubernetes", int(env["JOB_COMPLETION_INDEX"]), None)
    return None


@contextlib.contextmanager
def start(
    coordinator: str | None = None,
    process: int | None = None,
    processes: int | None = None,
    *,
    heartbeat: int = HEARTBEAT,
    patience: int = PATIENCE,
) -> Iterator[Info | None]:
    """Connects this process with the others for as long as a `with` lasts. Must come before JAX
    looks for devices.

    Without arguments all is found in the environment. With one process nothing is started, and
    nothing is changed.

    Several processes on one host take one GPU each, the one of their number there; a process
    that has the host for itself takes all of its GPUs. `CUDA_VISIBLE_DEVICES`, where it names
    one GPU only, is not cut any further.

    At the end the processes wait for each other. SIGTERM no longer ends a process in here: JAX
    notes it for `preemption.notices`.

    Args:
      coordinator: "host:port" of process 0, a free port there that all processes reach.
      process: this process's number, from 0.
      processes: how many there are; 1 ignores the launcher.
      heartbeat: seconds without a sign of life after which a process counts as gone.
      patience: seconds that processes wait for each other at the start. JAX ends those that are
        alone then, a few seconds later.

    Yields:
      `Info`, or None where this is the only process.

    Raises:
      ValueError: if the arguments do not describe a place among several, JAX does not find
        process 0 by itself, or some processes have more devices than others.
      RuntimeError: if JAX has looked for devices already.
    """
    place = find()
    if processes == 1 or (
        place is None and coordinator is None and process is None and processes is None
    ):
        if processes is None and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
            _say(
                f"Slurm has {os.environ['SLURM_NTASKS']} tasks for this job, but srun did not"
                " start this process: it is alone"
            )
        yield None
        return
    place = _checked(place, coordinator, process, processes)
    name = _name(place)
    where = f"process 0 at {coordinator}" if coordinator else "process 0"
    watcher = subprocess.Popen(["sh", "-c", _WATCHER], stdin=subprocess.PIPE, text=True)
    alone = (
        f"{name} did not meet the others: it was ended from outside, or they did not come in"
        f" {patience} s"
    )
    _tell(watcher, f"{alone}. Do all of them run, and is {where} reached from here?")
    _say(f"{name} waits up to {patience} s for the others, which meet at {where}")
    try:
        jax.distributed.initialize(
            coordinator,
            place.processes,
            place.process,
            local_device_ids=_own_gpus(place),
            initialization_timeout=patience,
            heartbeat_timeout_seconds=heartbeat,
        )
        _tell(
            watcher,
            f"{name} was ended: from outside, or by JAX as another one is gone, see its lines"
            f" above. {_AGAIN}",
        )
        _check_devices()
        with _ends_at_an_error(name, watcher):
            yield Info(place.process, jax.process_count(), jax.local_device_count())
            jax.distributed.shutdown()
    finally:  # not reached by what ends the process
        _tell(watcher, "")
        with contextlib.suppress(BrokenPipeError):
            watcher.stdin.close()
        watcher.wait()


def gather(text: str) -> list[str]:
    """Returns what each process says, by their numbers, to all of them. All processes call it;
    one alone hears itself.

    They wait for each other up to `PREPARING` seconds. The first exchange of devices alone
    would not: Gloo gives up after 30.

    Args:
      text: without the character of code 0, which fills up what is shorter than the longest.
    """
    if jax.process_count() == 1:
        return [text]
    ocp.multihost.get_barrier_sync_fn()(
        key=f"gather-{next(_gathered)}", timeout_ms=1000 * PREPARING
    )
    said = np.frombuffer(text.encode(), np.uint8)
    longest = multihost_utils.process_allgather(np.int32(len(said))).max()
    everyone = multihost_utils.process_allgather(np.pad(said, (0, longest - len(said))))
    return [row.tobytes().rstrip(b"\0").decode() for row in everyone]


def _checked(
    place: Place | None, coordinator: str | None, process: int | None, processes: int | None
) -> Place:
    """Returns the place that arguments and environment describe; arguments come first."""
    found = place or Place("", -1, None)
    count = found.processes if processes is None else processes
    number = found.process if process is None else process
    if place is None and None in (coordinator, process, processes):
        raise ValueError(
            f"coordinator={coordinator!r}, process={process}, processes={processes} must be"
            " given together where no launcher tells them: mpirun, srun, or an indexed Job of"
            " Kubernetes would"
        )
    if count is not None and count < 1:
        raise ValueError(f"processes={count} must be at least 1")
    if number < 0 or (count is not None and number >= count):
        raise ValueError(
            f"process={number} must be from 0 to processes - 1 ="
            f" {'?' if count is None else count - 1}"
        )
    if coordinator is not None and not (
        coordinator.rpartition(":")[0] and coordinator.rpartition(":")[2].isdecimal()
    ):
        raise ValueError(f"coordinator={coordinator!r} must be host:port, as in 10.0.0.1:1234")
    if (
        coordinator is None
        and found.launcher == "openmpi"
        and "OMPI_MCA_orte_hnp_uri" not in os.environ
    ):
        raise ValueError(
            "coordinator=None must be host:port of process 0 here: JAX finds it by itself under"
            " Open MPI 4 only"
        )
    if found.launcher == "kubernetes" and None in (coordinator, count):
        try:
            import kubernetes  # noqa: F401  JAX asks the cluster's API with it
        except ImportError:
            raise ValueError(
                f"coordinator={coordinator!r} and processes={processes} must be given in"
                ' Kubernetes without the package that asks its API: `pip install "jax[k8s]"`,'
                " or give them"
            ) from None
    return dataclasses.replace(found, process=number, processes=count)


def _check_devices() -> None:
    """Refuses processes that differ in how many devices they have, in all of them: JAX would
    make a table of the devices.
    """
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        jax.distributed.shutdown()
        raise ValueError(
            f"processes must have as many devices each, not {sorted(counts.items())}, as"
            " (process, devices)"
        )


def _own_gpus(place: Place) -> list[int]:
    """Returns the numbers of the GPUs that this process takes; none means all that it sees."""
    divided_already = len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1
    return [] if place.on_host is None or divided_already else [place.on_host]


@contextlib.contextmanager
def _ends_at_an_error(name: str, watcher: subprocess.Popen) -> Iterator[None]:
    """Ends this process at an error, without Python's exit, which would wait for the others."""
    try:
        yield
    except SystemExit:  # decided by all processes alike, as after a notice to end
        jax.distributed.shutdown()
        raise
    except BaseException as error:
        if lost := _lost_connection(error):
            code, message = (
                OTHER_GONE,
                f"{name}: another one is gone or out of reach ({lost}). {_AGAIN}",
            )
        else:
            traceback.print_exc()
            code, message = (
                1,
                (
                    f"{name} ends with this error, and the others with it, as they cannot go on"
                    " alone"
                ),
            )
        sys.stdout.flush()
        _say_last(message)
        _tell(watcher, "")
        os._exit(code)


def _lost_connection(error: BaseException | None) -> str | None:
    """Returns what JAX says of a lost connection, if that is the error, or what it came from,
    as of a checkpoint's writing.
    """
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) and any(
            sign in str(error) for sign in _SIGNS
        ):
            return str(error).splitlines()[0]
        error = error.__cause__ or error.__context__
    return None


def _name(place: Place) -> str:
    return f"process {place.process}" + (f" of {place.processes}" if place.processes else "")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _say_last(message: str) -> None:
    """Says what nothing comes after: JAX may be aborting this process just now, and then writes
    much of it in C++.
    """
    sys.stderr.flush()
    screen, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    with contextlib.suppress(OSError):
        os.write(screen, f"{message}\n".encode())


def _tell(watcher: subprocess.Popen, message: str) -> None:
    """Changes what the watcher will say; nothing if it is empty."""
    with contextlib.suppress(BrokenPipeError):  # it was ended before this process
        print(" ".join(message.split()), file=watcher.stdin, flush=True)
