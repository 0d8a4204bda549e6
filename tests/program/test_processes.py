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

import pytest
import small_run
from slow_cases import slow
from started import PYTHON, ROOT, until

from course_lib.lessons.by_processes import free_port
from course_lib.program import journal

# Seconds in which all processes must end after one did. The workers' heartbeat is 10 s, JAX's
# default is 100 s, and the machine may be busy.
IN_TIME = 60
# The program's words after an error, or JAX's words where it aborts the process.
OTHER_ENDED = "another process ended first|another task died"
MPIRUN = "mpirun -np 2 --allow-run-as-root --oversubscribe --mca btl_base_warn_component_unused"


@pytest.fixture
def slurm(tmp_path):
    """Runs a Slurm on this machine alone during the test; returns its configuration's path."""
    missing = [name for name in ("srun", "slurmctld", "slurmd") if not _slurm(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: Debian's package slurm-wlm")
    host = socket.gethostname().partition(".")[0]
    settings = f"""
        ClusterName=test  AuthType=auth/none  CredType=cred/none
        SlurmctldHost=localhost  SlurmctldPort={free_port()}  SlurmdPort={free_port()}
        SlurmUser={getpass.getuser()}  SlurmdUser={getpass.getuser()}
        StateSaveLocation={tmp_path}  SlurmdSpoolDir={tmp_path}
        SlurmctldPidFile={tmp_path}/slurmctld.pid  SlurmdPidFile={tmp_path}/slurmd.pid
        ProctrackType=proctrack/linuxproc  TaskPlugin=task/none
        JobAcctGatherType=jobacct_gather/none  SelectType=select/linear
        SlurmdParameters=config_overrides  FirstJobId={os.getpid() % 4096 + 1}
        NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2
        PartitionName=all Nodes=ALL Default=YES
    """  # JAX derives a port from the job's number, which must differ from another test's
    path = tmp_path / "slurm.conf"
    path.write_text(re.sub(r"  +", "\n", settings))
    with (tmp_path / "slurm.log").open("w") as log:
        daemons = [
            subprocess.Popen([_slurm(name), "-D", *more, "-f", path], stdout=log, stderr=log)
            for name, more in (("slurmctld", ()), ("slurmd", ("-N", "localhost")))
        ]
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


@pytest.fixture
def launch(request, programs):
    """Returns a function that starts a command by a launcher."""

    def launch(launcher, *command, **environ):
        if launcher == "slurm":
            environ["SLURM_CONF"] = str(request.getfixturevalue("slurm"))
            command = [*(() if command[0] == "sbatch" else ("srun", "-n", "2")), *command]
        elif launcher == "mpirun":
            if shutil.which("mpirun") is None:
                pytest.skip("no mpirun here: Debian's package openmpi-bin")
            command = [*MPIRUN.split(), "0", *command]
        return programs.start(*command, **environ)

    return launch


def pair(programs, job, **environ):
    """Starts two workers by hand, and waits until both have said their numbers."""
    address = f"localhost:{free_port()}"
    both = [
        programs.start(*PYTHON, "cluster_worker", job, address, str(number), "2", **environ)
        for number in (0, 1)
    ]
    for each in both:
        until(lambda each=each: f"has pid {each.pid}" in each.said())
    return both


@pytest.mark.parametrize("launcher", [slow("mpirun"), slow("slurm")])
def test_the_program_under_a_launcher_has_the_losses_of_one_process(
    launch, programs, tmp_path, launcher
):
    changes = "mesh.tensor=2 strategy.zero=1 training.steps=6 run.checkpoint_every=3".split()
    for how, run, devices in ((launcher, "two", 2), ("", "one", 4)):
        given = small_run.arguments(programs.text, tmp_path / run, devices, *changes)
        process = launch(how, *PYTHON, "course_lib.train", *given)  # a learner's command
        assert process.wait(600) == 0, process.said()
    times = (tmp_path / "two" / "times.jsonl").read_text()
    assert re.search(r"4 x cpu .*2 process\(es\)", times)
    small_run.assert_same_losses(tmp_path / "two", tmp_path / "one", rtol=1e-5)
    steps = [step for step, _ in journal.pairs(journal.read(tmp_path / "two"), "loss")]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "two" / "checkpoints" / "00000006").is_dir()


@pytest.mark.slow
def test_slurm_runs_the_batch_script(launch, tmp_path):
    (tmp_path / "python").write_text(
        '#!/bin/bash\necho "task $SLURM_PROCID of $SLURM_STEP_NUM_TASKS: $*"\n'
    )
    (tmp_path / "python").chmod(0o755)
    here = "--nodes=1 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=0"
    given = ["--wait", *here.split(), f"--output={tmp_path}/log"]
    script = ROOT / "docs" / "cluster" / "slurm.sbatch"
    path = f"{tmp_path}:{os.environ['PATH']}"
    batch = launch("slurm", "sbatch", *given, script, "--preset", "cpu", PATH=path)
    assert batch.wait(600) == 0, batch.said()
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        f"task {number} of 2: -u -m course_lib.train --preset cpu" for number in (0, 1)
    ]


def test_an_error_in_one_process_ends_both(programs):
    both = pair(programs, "raise", WHO="1")
    assert both[1].wait(600) == 1 and both[0].wait(600) != 0
    assert "ZeroDivisionError: an error in one process" in both[1].said()
    assert "process 1 ends with this error" in both[1].said()
    assert re.search(OTHER_ENDED, both[0].said())


@pytest.mark.slow
@pytest.mark.parametrize(("gone", "job"), [(0, "step"), (1, "stop")])
def test_if_a_process_is_killed_or_silent_the_other_ends_in_time_and_says_why(
    programs, gone, job
):
    both = pair(programs, job, WHO="1")  # which stops itself, if that is the job
    if job == "step":
        both[gone].send_signal(signal.SIGKILL)
    assert both[1 - gone].wait(IN_TIME) != 0
    assert re.search(OTHER_ENDED, both[1 - gone].said())
    both[gone].send_signal(signal.SIGKILL)
    both[gone].wait(600)


def test_a_process_that_is_alone_at_the_start_says_where_it_waits_and_ends(programs):
    address = f"localhost:{free_port()}"
    worker = "cluster_worker", "step", address, "1", "2"
    alone = programs.start(*PYTHON, *worker, PATIENCE="2")
    assert alone.wait(600) != 0  # after two seconds, and a few more that JAX takes
    words = "process 1 waits up to 2 s for the other processes, which meet at process 0 at"
    assert alone.said().startswith(f"{words} {address}")
