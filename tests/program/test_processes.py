"""Laws of several processes: they train as one, and end together.

The tests start two processes with two simulated devices each.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_run

from course_lib.lessons.by_processes import free_port
from course_lib.program import journal

ROOT = Path(__file__).parents[2]
WORKER = [
    sys.executable,
    "-u",
    *small_run.STRICT,
    str(ROOT / "tests" / "helpers" / "cluster_worker.py"),
]
QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles quickly
# Seconds in which all processes must end after one did. The workers' heartbeat is 10 s, JAX's
# default is 100 s, and the machine may be busy.
IN_TIME = 60
AT_LAST = 600  # seconds; without a law, so that nothing hangs forever
# The program's words after an error, or JAX's words where it aborts the process.
OTHER_ENDED = "another process ended first|another task died"
LAUNCHERS = ("OMPI_", "SLURM_", "KUBERNETES_", "JOB_COMPLETION_INDEX")

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun here: Debian's package openmpi-bin"
)
MPIRUN = [
    "mpirun",
    "-np",
    "2",
    "--allow-run-as-root",
    "--oversubscribe",
    "--mca",
    "btl_base_warn_component_unused",
    "0",
]


@pytest.fixture
def launch(programs_kept, tmp_path):
    """Returns a function that starts a program with its output in a file. After the test,
    kills every program that still runs.
    """
    started = []

    def launch(command, name="0", **environ):
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
        }
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
        with (tmp_path / name).open("w") as file:
            env |= {"PYTHONPATH": paths, **programs_kept, **environ}
            process = subprocess.Popen(
                command, env=env, stdout=file, stderr=file, start_new_session=True
            )
        process.output = (tmp_path / name).read_text
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def slurm(tmp_path):
    """Runs a Slurm on this machine alone during the test; returns its configuration's path."""
    missing = [name for name in ("srun", "slurmctld", "slurmd") if not _slurm(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: Debian's package slurm-wlm")
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": "localhost",
        "SlurmctldPort": free_port(),
        "SlurmdPort": free_port(),
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "StateSaveLocation": tmp_path,
        "SlurmdSpoolDir": tmp_path,
        "SlurmctldPidFile": tmp_path / "slurmctld.pid",
        "SlurmdPidFile": tmp_path / "slurmd.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/linear",
        "SlurmdParameters": "config_overrides",
        # JAX derives a port from it, which must differ from that of a test beside this one.
        "FirstJobId": os.getpid() % 4096 + 1,
        "NodeName": (
            f"localhost NodeHostname={socket.gethostname().partition('.')[0]}"
            " NodeAddr=127.0.0.1 CPUs=2"
        ),
        "PartitionName": "all Nodes=ALL Default=YES",
    }
    path = tmp_path / "slurm.conf"
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    commands = (
        [_slurm("slurmctld"), "-D", "-f", path],
        [_slurm("slurmd"), "-D", "-N", "localhost", "-f", path],
    )
    with (tmp_path / "slurm.log").open("w") as log:
        daemons = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
    state = [_slurm("sinfo"), "--noheader", "--format=%t"]
    env = os.environ | {"SLURM_CONF": str(path)}
    until(
        lambda: subprocess.run(state, env=env, capture_output=True).stdout.split() == [b"idle"]
    )
    yield path
    for daemon in daemons:
        daemon.terminate()
        daemon.wait()


def _slurm(name):
    return shutil.which(name) or shutil.which(f"/usr/sbin/{name}")


def pair(launch, job, **environ):
    """Starts two processes by hand."""
    address = f"localhost:{free_port()}"
    return [
        launch([*WORKER, job, address, str(number), "2"], str(number), **environ)
        for number in (0, 1)
    ]


def pids(*processes):
    """Waits until both workers have printed their pids, and returns these by process number."""

    def by_number():
        ended = any(each.poll() is not None for each in processes)
        output = "".join(each.output() for each in processes)
        lines = re.findall(r"process (\d) has pid (\d+)", output)
        assert len(lines) == 2 or not ended, output
        return len(lines) == 2 and {int(number): int(pid) for number, pid in lines}

    return until(by_number)


def until(condition, seconds=AT_LAST):
    """Waits until a function returns something true, and returns that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return small_run.corpus(tmp_path_factory.mktemp("corpus") / "text")


def program(text, run, devices):
    """Returns a learner's command, for a run of six steps."""
    changes = ("mesh.tensor=2", "strategy.zero=1", "training.steps=6", "run.checkpoint_every=3")
    arguments = small_run.arguments(text, run, devices, *changes)
    return [sys.executable, "-u", *small_run.STRICT, "-m", "course_lib.train", *arguments]


def losses_of(run):
    return journal.pairs(journal.read(run), "loss") + journal.pairs(
        journal.read(run), "validation_loss"
    )


@pytest.fixture(scope="module")
def alone(text, programs_kept, tmp_path_factory):
    """Returns the losses of a run in one process with four devices."""
    run = tmp_path_factory.mktemp("alone") / "run"
    environment = os.environ | programs_kept | QUICK | {"PYTHONPATH": str(ROOT)}
    subprocess.run(program(text, run, 4), env=environment, check=True, capture_output=True)
    return losses_of(run)


def is_one_program(run, alone, launched):
    """Asserts that two processes ran the program together, with the losses of one process."""
    assert launched.wait(AT_LAST) == 0, launched.output()
    assert (
        "4 x cpu" in (run / "times.jsonl").read_text()
        and "2 process(es)" in (run / "times.jsonl").read_text()
    )
    losses = losses_of(run)
    assert [step for step, _ in losses] == [step for step, _ in alone] == [1, 2, 3, 4, 5, 6, 6]
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in alone], rel=1e-5)
    assert (run / "checkpoints" / "00000006").is_dir()


@pytest.mark.slow
@needs_mpirun
def test_the_program_under_mpirun_has_the_losses_of_one_process(launch, text, alone, tmp_path):
    is_one_program(
        tmp_path / "run", alone, launch([*MPIRUN, *program(text, tmp_path / "run", 2)], **QUICK)
    )


@pytest.mark.slow
def test_the_program_under_slurm_has_the_losses_of_one_process(
    launch, slurm, text, alone, tmp_path
):
    launched = launch(
        ["srun", "-n", "2", *program(text, tmp_path / "run", 2)], SLURM_CONF=str(slurm), **QUICK
    )
    is_one_program(tmp_path / "run", alone, launched)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 1])
def test_if_one_process_is_killed_the_other_ends_in_time_and_says_why(launch, gone):
    both = pair(launch, "step", WHO="2")
    pids(*both)
    both[gone].kill()
    assert both[1 - gone].wait(IN_TIME) != 0
    both[gone].wait()
    assert re.search(OTHER_ENDED, both[1 - gone].output())


@pytest.mark.slow
def test_if_one_process_is_alive_but_silent_the_other_ends_in_time_and_says_why(launch):
    both = pair(launch, "stop", WHO="1")
    pids(*both)
    assert both[0].wait(IN_TIME) != 0
    assert re.search(OTHER_ENDED, both[0].output())


def test_an_error_in_one_process_ends_both(launch):
    both = pair(launch, "raise", WHO="1")
    pids(*both)
    assert both[1].wait(IN_TIME) == 1
    assert both[0].wait(IN_TIME) != 0
    assert "ZeroDivisionError: an error in one process" in both[1].output()
    assert "process 1 ends with this error" in both[1].output()
    assert re.search(OTHER_ENDED, both[0].output())


@pytest.mark.slow
def test_sigterm_to_one_process_and_its_children_ends_both_after_the_same_step(launch):
    both = pair(launch, "preempt", WHO="2")
    os.killpg(pids(*both)[1], signal.SIGTERM)
    assert [each.wait(IN_TIME) for each in both] == [0, 0]
    steps = [re.findall(r"ends after step (\d+)", each.output()) for each in both]
    assert steps[0] == steps[1] and len(steps[0]) == 1
    assert not any(re.search(OTHER_ENDED, each.output()) for each in both)


@pytest.mark.slow
def test_sigterm_to_one_process_before_its_first_step_ends_both_at_once(launch):
    both = pair(launch, "prepare")
    os.kill(pids(*both)[1], signal.SIGTERM)
    assert both[1].wait(IN_TIME) == -signal.SIGTERM
    assert both[0].wait(IN_TIME) != 0


@pytest.mark.slow
@needs_mpirun
def test_mpirun_ends_if_one_process_is_killed(launch):
    both = launch([*MPIRUN, *WORKER, "step"], WHO="2")
    one_killed(both)
    assert "process rank 1" in " ".join(both.output().split())


@pytest.mark.slow
def test_slurm_ends_if_one_process_is_killed(launch, slurm):
    both = launch(["srun", "-n", "2", *WORKER, "step"], WHO="2", SLURM_CONF=str(slurm))
    one_killed(both)
    assert re.search(OTHER_ENDED, both.output())


@pytest.mark.slow
def test_slurm_runs_the_batch_script(launch, slurm, tmp_path):
    (tmp_path / "python").write_text(
        '#!/bin/bash\necho "task $SLURM_PROCID of $SLURM_STEP_NUM_TASKS: $*"\n'
    )
    (tmp_path / "python").chmod(0o755)
    here = [
        "--nodes=1",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--gpus-per-node=0",
        f"--output={tmp_path}/log",
    ]
    script = ROOT / "docs" / "cluster" / "slurm.sbatch"
    path = f"{tmp_path}:{os.environ['PATH']}"
    batch = launch(
        ["sbatch", "--wait", *here, script, "--preset", "cpu"], SLURM_CONF=str(slurm), PATH=path
    )
    assert batch.wait(AT_LAST) == 0, batch.output()
    lines = sorted((tmp_path / "log").read_text().splitlines())
    assert lines == [
        f"task {number} of 2: -u -m course_lib.train --preset cpu" for number in (0, 1)
    ]


def one_killed(launcher):
    """Kills process 1, and asserts that the launcher and process 0 end in time."""
    by_number = pids(launcher)
    os.kill(by_number[1], signal.SIGKILL)
    assert launcher.wait(IN_TIME) != 0
    # the launcher may end before the process that it kills
    until(lambda: not runs(by_number[0]), IN_TIME)


def runs(pid):
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_is_alone_at_the_start_says_where_it_waits_and_ends(launch):
    address = f"localhost:{free_port()}"
    alone = launch([*WORKER, "step", address, "1", "2"], PATIENCE="2")
    assert alone.wait(AT_LAST) != 0  # after two seconds, and a few more that JAX takes
    words = "process 1 waits up to 2 s for the other processes, which meet at process 0 at"
    assert alone.output().startswith(f"{words} {address}")
