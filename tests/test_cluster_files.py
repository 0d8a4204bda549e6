"""Laws of docs/cluster: the launch files call the program correctly, and the pages are true."""

import re
import subprocess
from pathlib import Path

import pytest

from course_lib.program import processes

FOLDER = Path(__file__).parent.parent / "docs" / "cluster"


@pytest.fixture
def bash(tmp_path):
    """Returns a function that runs a launch file with stand-ins for the programs it calls."""

    def bash(file, *arguments, programs, **environ):
        for name, text in programs.items():
            (tmp_path / name).write_text("#!/bin/bash\n" + text)
            (tmp_path / name).chmod(0o755)
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environ}
        return subprocess.run(
            ["bash", FOLDER / file, *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return bash


@pytest.mark.parametrize(
    ("codes", "starts"),
    [
        ([75, 143] * 4 + [0], 9),  # any number of preemptions
        ([1, 1, 75, 1, 1, 1, 137], 7),  # three failures in a row, a preemption in between
        ([1, 77], 2),
    ],
)
def test_slurm_restarts_a_job_after_every_preemption_and_after_three_failures_in_a_row(
    bash, tmp_path, codes, starts
):
    programs = {"srun": 'echo "srun $*"; exit "$NEXT"', "scontrol": 'echo "scontrol $*"'}
    for number, code in enumerate(codes):
        environ = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "train",
            "SLURM_RESTART_COUNT": str(number),
            "NEXT": str(code),
        }
        environ["SLURM_CPUS_PER_TASK"] = "8"
        done = bash("slurm.sbatch", "--preset", "cpu", programs=programs, **environ)
        assert done.returncode == code and done.stderr == ""
        assert (
            "srun --cpus-per-task=8 python -u -m course_lib.train --preset cpu\n" in done.stdout
        )
        again = "scontrol requeue 7" in done.stdout
        assert again == (number + 1 < starts)
    assert not list(tmp_path.glob("*.failures"))


def test_over_ssh_each_host_gets_its_number_and_the_first_hosts_address(bash, tmp_path):
    program = 'echo "$(printf "<%s>" "$@")"'  # one write per process: both write at once
    programs = {"ssh": 'echo "at ${@: -2:1}"; exec bash -c "${@: -1}"', "program": program}
    done = bash(
        "ssh.sh",
        "a",
        "b",
        "--",
        "--run",
        "two words",
        programs=programs,
        PYTHON=str(tmp_path / "program"),
    )
    called = (
        "<-u><-m><course_lib.train><--run><two"
        " words><--coordinator><a:12321><--process><{}><--processes><2>"
    )
    assert sorted(done.stdout.splitlines()) == sorted(
        ["at a", "at b", called.format(0), called.format(1)]
    )
    assert done.returncode == 0, done.stderr


def test_over_ssh_the_exit_code_is_that_of_the_process_that_failed(bash, tmp_path):
    programs = {
        "ssh": 'exec bash -c "${@: -1}"',
        "program": '[[ "$*" != *"--process 0"* ]] || exit 76',
    }
    done = bash("ssh.sh", "a", "b", "--", programs=programs, PYTHON=str(tmp_path / "program"))
    assert done.returncode == 76


@pytest.mark.parametrize("arguments", [["a", "--", "--preset", "cpu"], ["a", "b"]])
def test_over_ssh_fewer_than_two_hosts_or_a_missing_separator_is_refused(bash, arguments):
    done = bash("ssh.sh", *arguments, programs={})
    assert done.returncode == 2 and "usage:" in done.stderr


@pytest.mark.parametrize(
    ("ended", "action"),
    [
        (75, "RestartJobSetAndIgnoreMaxRestarts"),
        ("DisruptionTarget", "RestartJobSetAndIgnoreMaxRestarts"),
        (77, "FailJobSet"),
        (1, None),  # a restart that counts as a failure
    ],
)
def test_in_kubernetes_preemptions_do_not_count_and_permanent_failures_end_the_job(
    ended, action
):
    yaml = pytest.importorskip("yaml", reason="no PyYAML here: JupyterLab brings it")
    *_, jobs = yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())
    spec = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]
    [train] = spec["template"]["spec"]["containers"]

    def message(index, rule):  # as Kubernetes' Job controller writes it, or None
        assert rule["action"] == "FailJob"
        if any(
            each == {"type": ended, "status": "True"}
            for each in rule.get("onPodConditions", [])
        ):
            return (
                f"Pod default/train-host-0-1-x has condition {ended} matching FailJob rule at"
                f" index {index}"
            )
        codes = rule.get(
            "onExitCodes", {"containerName": train["name"], "operator": "In", "values": []}
        )
        assert (codes["containerName"], codes["operator"]) == (train["name"], "In")
        if ended in codes["values"]:
            return (
                f"Container train for pod default/x failed with exit code {ended} matching"
                f" FailJob rule at index {index}"
            )
        return None

    messages = [
        text
        for rule in enumerate(spec["podFailurePolicy"]["rules"])
        if (text := message(*rule))
    ]
    reason = "PodFailurePolicy" if messages else "BackoffLimitExceeded"
    taken = [
        rule["action"]
        for rule in jobs["spec"]["failurePolicy"]["rules"]
        if reason in rule["onJobFailureReasons"]
        and any(re.search(p, messages[0]) for p in rule["onJobFailureMessagePatterns"])
    ]
    assert (
        taken[:1] == ([action] if action else [])
        and jobs["spec"]["failurePolicy"]["maxRestarts"] > 0
    )


def test_the_page_says_how_long_processes_wait_for_each_other():
    page = (FOLDER / "README.md").read_text()
    assert f"heartbeat after {processes.HEARTBEAT} s at most" in page
    assert f"wait {processes.PATIENCE} s" in page
