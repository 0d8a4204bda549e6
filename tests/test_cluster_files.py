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
        job = dict(JOB_ID="7", JOB_NAME="train", RESTART_COUNT=str(number), CPUS_PER_TASK="8")
        environ = {f"SLURM_{name}": value for name, value in job.items()}
        given = ["slurm.sbatch", "--preset", "cpu"]
        done = bash(*given, programs=programs, NEXT=str(code), **environ)
        assert done.returncode == code and done.stderr == ""
        called = "srun --cpus-per-task=8 python -u -m course_lib.train --preset cpu\n"
        assert called in done.stdout
        again = "scontrol requeue 7" in done.stdout
        assert again == (number + 1 < starts)
    assert not list(tmp_path.glob("*.failures"))


def test_over_ssh_each_host_gets_its_number_and_the_first_hosts_address(bash, tmp_path):
    program = 'echo "$(printf "<%s>" "$@")"'  # one write per process: both write at once
    programs = {"ssh": 'echo "at ${@: -2:1}"; exec bash -c "${@: -1}"', "program": program}
    given, python = "a b -- --run".split(), str(tmp_path / "program")
    done = bash("ssh.sh", *given, "two words", programs=programs, PYTHON=python)
    called = "<-u><-m><course_lib.train><--run><two words><--coordinator><a:12321>"
    called += "<--process><{}><--processes><2>"
    said = ["at a", "at b", called.format(0), called.format(1)]
    assert sorted(done.stdout.splitlines()) == sorted(said)
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


@pytest.fixture(scope="module")
def kubernetes():
    yaml = pytest.importorskip("yaml", reason="no PyYAML here: JupyterLab brings it")
    return [*yaml.safe_load_all((FOLDER / "jobset.yaml").read_text())]


def test_in_kubernetes_all_pods_are_of_one_job_which_they_may_look_up(kubernetes):
    account, role, binding, jobs = kubernetes
    [job] = jobs["spec"]["replicatedJobs"]
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    assert job["replicas"] == 1 and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] > 1
    # all pods restart together, or none
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    assert pod["shareProcessNamespace"]  # process 1 ignores SIGTERM before the first step
    names = [part["metadata"]["name"] for part in (account, role)]
    assert names == [pod["serviceAccountName"], binding["roleRef"]["name"]]
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert len({part["metadata"]["namespace"] for part in kubernetes}) == 1
    rules = [(rule["resources"], rule["verbs"]) for rule in role["rules"]]
    # the calls of JAX's K8sCluster in a JobSet
    assert rules == [(["pods"], ["list"]), (["jobs"], ["get"])]


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
    kubernetes, ended, action
):
    jobs = kubernetes[-1]["spec"]
    spec = jobs["replicatedJobs"][0]["template"]["spec"]
    [train] = spec["template"]["spec"]["containers"]
    messages = []  # as Kubernetes' Job controller writes them
    for index, rule in enumerate(spec["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        why = f"matching FailJob rule at index {index}"
        if {"type": ended, "status": "True"} in rule.get("onPodConditions", []):
            messages.append(f"Pod default/train-host-0-1-x has condition {ended} {why}")
        codes = rule.get("onExitCodes", {"values": []})
        if ended in codes["values"]:
            assert (codes["containerName"], codes["operator"]) == (train["name"], "In")
            pod = "Container train for pod default/x"
            messages.append(f"{pod} failed with exit code {ended} {why}")
    reason = "PodFailurePolicy" if messages else "BackoffLimitExceeded"
    taken = [
        rule["action"]
        for rule in jobs["failurePolicy"]["rules"]
        if reason in rule["onJobFailureReasons"]
        and any(re.search(p, messages[0]) for p in rule["onJobFailureMessagePatterns"])
    ]
    assert taken[:1] == ([action] if action else [])
    assert jobs["failurePolicy"]["maxRestarts"] > 0


def test_the_page_says_how_long_processes_wait_for_each_other():
    page = (FOLDER / "README.md").read_text()
    assert f"heartbeat after {processes.HEARTBEAT} s at most" in page
    assert f"wait {processes.PATIENCE} s" in page
