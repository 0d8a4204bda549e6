"""Laws of what a process is told by its launcher or by hand, and of what processes exchange."""

import types

import jax
import numpy as np
import pytest

from course_lib.program import processes

OPEN_MPI = dict(SIZE="4", RANK="3", LOCAL_RANK="1")
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
SLURM = dict(STEP_NUM_TASKS="4", STEP_NUM_NODES="2", PROCID="3", LOCALID="1")
SLURM = {f"SLURM_{name}": value for name, value in SLURM.items()}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


def place(*gpus):
    return {"process_id": 3, "num_processes": 4, "local_device_ids": list(gpus)}


def test_processes_with_different_numbers_of_devices_are_refused(monkeypatch):
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    for counts in ([2, 2], [2, 1], [2, 4, 3]):
        numbers = [n for n, count in enumerate(counts) for _ in range(count)]
        devices = [types.SimpleNamespace(process_index=number) for number in numbers]
        monkeypatch.setattr(jax, "devices", lambda devices=devices: devices)
        if counts == [2, 2]:
            processes._check_devices()
            continue
        with pytest.raises(ValueError, match=r"\[\(0, 2\), \(1, \d\)"):
            processes._check_devices()


def test_one_process_alone_gathers_its_own_text():
    assert processes.gather("é") == ["é"]


def test_all_processes_wait_for_the_slowest_before_their_devices_exchange_anything(monkeypatch):
    order = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        processes.ocp.multihost, "get_barrier_sync_fn", lambda: lambda **how: order.append(how)
    )

    def exchange(mine):
        order.append("devices")
        return np.stack([mine, mine])

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", exchange)
    assert processes.gather("é") == processes.gather("é") == ["é", "é"]
    first, *exchanges, second = order[:4]
    assert (
        exchanges == ["devices", "devices"]
        and first["timeout_ms"] == second["timeout_ms"] > 3600 * 1000
    )
    assert first["key"] != second["key"]  # a barrier's key works once


@pytest.mark.parametrize(
    ("environ", "arguments"),
    [
        ({}, None),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, place(1)),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, place()),
        (SLURM, place(1)),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1"}, place(1)),
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "1"}, place()),  # it sees no other
        ({**SLURM, "SLURM_STEP_NUM_NODES": "4"}, place()),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
        ({**OPEN_MPI, **SLURM}, place()),
        (KUBERNETES, {"process_id": 3}),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        # An empty variable is not set.
        ({"OMPI_COMM_WORLD_SIZE": "", **SLURM}, place(1)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": ""}, None),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": ""}, None),
    ],
)
def test_a_launcher_says_which_process_this_is_and_which_gpu_it_takes(environ, arguments):
    assert processes.from_launcher(environ) == arguments


@pytest.mark.parametrize("name", [*SLURM, *OPEN_MPI])
def test_a_launchers_variable_that_is_no_number_is_named(name):
    whole = SLURM if name in SLURM else OPEN_MPI
    # Without its number of processes there is no launcher.
    for value in ("x",) if "SIZE" in name or "TASKS" in name else ("x", "", None):
        environ = {other: x for other, x in (whole | {name: value}).items() if x is not None}
        with pytest.raises(ValueError, match=f"^{name}={value or None} must be a number, "):
            processes.from_launcher(environ)


@pytest.fixture
def environ(no_launcher, monkeypatch):
    """Returns a function that sets variables in an environment without a launcher."""
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ({}, (), ""),
        (SLURM, (None, None, 1), ""),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": ""}, (None, None, 1), ""),
        ({"SLURM_NTASKS": "4"}, (), "srun did not start this process: it is alone"),
    ],
    ids=["no launcher", "one of a launcher's", "of half a launcher", "srun was forgotten"],
)
def test_one_process_alone_connects_to_nobody(environ, values, arguments, message, capsys):
    environ(values)
    with processes.start(*arguments):
        assert not jax.distributed.is_initialized()
    printed = capsys.readouterr().err
    assert message in printed and bool(message) == bool(printed)


BAD = [
    ({}, ("host:1", 0, None), "processes=None must be given together, because no launcher"),
    ({}, (None, 0, 2), "coordinator=None, .* must be given together"),
    ({}, ("host", 0, 2), "coordinator='host' must be host:port"),
    ({}, (":1234", 0, 2), "coordinator=':1234' must be host:port"),
    # JAX finds no coordinator
    (KUBERNETES, (), r'coordinator=None, .* no address.* `pip install "jax\[k8s\]"`'),
]


@pytest.mark.parametrize(("values", "arguments", "message"), BAD)
def test_arguments_that_describe_no_process_are_refused(
    environ, values, arguments, message, monkeypatch
):
    def initialize(**_):
        raise ValueError("no address.")

    environ(values)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match=message), processes.start(*arguments):
        pass


def test_arguments_come_before_what_the_launcher_says(environ, monkeypatch):
    passed = {}
    environ(SLURM)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **named: passed.update(named))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    with processes.start("host:1", None, 5, heartbeat=7, patience=8):
        pass
    assert passed == {
        "coordinator_address": "host:1",
        "process_id": 3,
        "num_processes": 5,
        "local_device_ids": [1],
        "heartbeat_timeout_seconds": 7,
        "initialization_timeout": 8,
    }
