"""Laws of the command `python -m course_lib.train` in processes of its own."""

import os
import random
import re
import signal
import time

import jax
import pytest
from slow_cases import slow
from small_run import assert_same_losses, assert_same_run, stored_configuration
from started import losses

from course_lib.program import command, loop, processes

KILLS = int(os.environ.get("COURSE_KILLS", 5))
BY_TWO = ["mesh.tensor=2", "strategy.zero=1"]
ENDLESS = "training.steps=100000"


def saved_after(process, why):
    """Returns the step after which a process says that it ended, with a checkpoint."""
    return int(re.search(rf"ended by {why} after step (\d+), with a check", process.said())[1])


@pytest.mark.slow
def test_a_run_killed_at_random_moments_is_bit_for_bit_one_that_was_never_killed(programs):
    moments, steps = random.Random(KILLS), 120 + 40 * KILLS  # the last kill: long before that
    changes = f"training.steps={steps} optimizer.total_steps={steps}"
    changes += " run.checkpoint_every=3 run.sample_tokens=5"
    changes += " run.validate_every=20 run.sample_every=20 run.log_every=2"
    changes = [*changes.split(), "model.dropout_rate=0.1", "optimizer.schedule=warmup_cosine"]
    unbroken = programs.train("unbroken", *changes, devices=1)
    assert unbroken.wait(600) == 0, unbroken.said()
    run = programs.folder / "killed"
    for number in range(KILLS):
        last = losses(run)[-1][0] if losses(run) else 0
        one = programs.train("killed", *changes, devices=1)
        if number % 5 == 3:  # perhaps before it has begun to train
            time.sleep(moments.uniform(0, 2))
        else:
            one.until_step(run, last + moments.uniform(1, 40))
            time.sleep(moments.uniform(0, 0.03))
        one.send_signal(signal.SIGKILL)
        assert one.wait(600) == -signal.SIGKILL and "damaged" not in one.said(), one.said()
    one = programs.train("killed", *changes, devices=1)
    assert one.wait(600) == 0, one.said()
    assert_same_run(run, programs.folder / "unbroken")


def test_processes_that_are_told_different_things_end_at_once_and_say_which(programs):
    other = ["seed=7", "run.validate_every=2"]
    for each in (both := programs.train_by_two("unlike", "training.steps=3", second=other)):
        assert each.wait(600) == command.USAGE, both[0].said()
        # of any thread, at any time
        lines = [line for line in each.said().splitlines() if not line.startswith("[Gloo]")]
        assert lines[-1] == (
            "error: all processes must have the same configuration: run.validate_every: 250 in"
            " process 0, 2 in process 1; seed: 42 in process 0, 7 in process 1"
        )
    assert not (programs.folder / "unlike" / "metrics.jsonl").exists()


ENDS = [(signal.SIGINT, "Ctrl-C", 130), slow(signal.SIGHUP, "SIGTERM", 75)]


@pytest.mark.parametrize(("number", "why", "code"), ENDS)
def test_a_signal_writes_a_checkpoint_and_has_its_exit_code(programs, number, why, code):
    one, run = (
        programs.train(f"ended-{why}", ENDLESS, devices=1),
        programs.folder / f"ended-{why}",
    )
    one.until_step(run, 3)
    one.send_signal(number)
    assert one.wait(600) == code, one.said()
    assert (run / "checkpoints" / f"{saved_after(one, why):08d}").is_dir()
    said = "Ctrl-C" if why == "Ctrl-C" else "SIGHUP, taken as SIGTERM"
    assert f"{said}: ends after this step, with a checkpoint" in one.said()


def test_two_processes_train_as_one_does_and_one_goes_on_with_what_they_saved(programs):
    changes = [*BY_TWO, "run.validate_every=3", "run.validation_batches=2", "training.steps=6"]
    both, run = programs.train_by_two("both", *changes), programs.folder / "both"
    assert [each.wait(600) for each in both] == [0, 0], both[0].said()
    # one of them speaks
    assert "done after 6 steps" in both[0].said() and "done" not in both[1].said()
    assert re.search(r"4 x cpu .*2 process\(es\)", (run / "times.jsonl").read_text())
    whole = stored_configuration(run)
    whole.training.steps = 8
    for folder in (run, programs.folder / "single"):
        with jax.numpy_dtype_promotion("standard"):
            loop.train(whole, folder, jax.devices("cpu")[:4])
    # of sums over processes the order is another
    assert_same_losses(run, programs.folder / "single", rtol=1e-5)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_and_then_one_is_told_to_end_lose_nothing(
    programs,
):
    changes, run = [*BY_TWO, "run.checkpoint_every=3"], programs.folder / "two"
    both = programs.train_by_two("two", *changes, ENDLESS)
    both[0].until_step(run, 7)
    both[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    jaxs = -signal.SIGABRT if jax.__version_info__ >= (0, 8) else 1
    # JAX's heartbeat may be faster than a broken connection
    assert both[0].wait(600) in (command.FAILED, jaxs), both[0].said()
    assert time.monotonic() - killed < processes.HEARTBEAT + 30  # the machine may be busy
    assert both[1].wait(600) == -signal.SIGKILL
    assert re.search("another process ended first|another task died", both[0].said())

    both = programs.train_by_two("two", *changes, ENDLESS)
    went_on = int(both[0].until(r"goes on after step (\d+)")[1])
    both[0].until_step(run, went_on + 4)
    both[1].send_signal(signal.SIGTERM)
    codes = [each.wait(600) for each in both]
    assert codes == [command.EXIT_CODE_PREEMPTED] * 2, both[0].said()
    steps = saved_after(both[0], "SIGTERM")

    alone = programs.train("one", *changes, f"training.steps={steps}", devices=4)
    assert alone.wait(600) == 0, alone.said()
    found, expected = losses(run), losses(programs.folder / "one")
    assert (
        [step for step, _ in found] == [step for step, _ in expected] == [*range(1, steps + 1)]
    )
    # sums over processes have another order
    assert [loss for _, loss in found] == pytest.approx([x for _, x in expected], rel=1e-4)
