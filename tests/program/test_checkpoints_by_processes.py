"""Checkpoints of processes that are killed, that may not write, and that save together."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from slow_cases import slow

from course_lib.lessons.by_processes import free_port
from course_lib.program.checkpoints import Checkpoints


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


@contextlib.contextmanager
def python(code, *arguments, prefix=(), **environment):
    """Runs a Python process with pipes; at the end it and its children are gone."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | own | environment
    with subprocess.Popen(
        command, **pipes, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# Forks before JAX starts: a process that will be killed need not import everything again.
SAVES_UNTIL_KILLED = """
    import os, sys
    import jax, jax.numpy as jnp
    from course_lib.program.checkpoints import Checkpoints

    def state(step):
        w = jnp.full((300, 300), float(step))
        return {"w": w, "rng": jax.random.key(step), "step": jnp.int32(step)}

    for _ in sys.stdin:
        child = os.fork()
        if not child:
            checkpoints = Checkpoints(sys.argv[1], keep=2)
            saved = checkpoints.newest()
            step = saved.step if saved else 0
            while True:
                step += 1
                checkpoints.save(step, state(step), [step], {})
                os.write(1, b"%d %d\\n" % (step, os.getpid()))  # one write: no partial line
        os.waitpid(child, 0)
        print("killed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_process_killed_at_any_moment_leaves_the_newest_checkpoint_or_the_one_before(
    tmp_path, capsys
):
    folder, moments = tmp_path / "checkpoints", random.Random(0)
    like = {"w": np.zeros((300, 300), np.float32), "step": np.int32(0)}
    like = abstract(like | {"rng": jax.random.key(0)})
    last, takes = 0, 0.12
    with (
        python(SAVES_UNTIL_KILLED, folder) as process,
        contextlib.closing(Checkpoints(folder)) as checkpoints,
    ):
        for number in range(12):
            process.stdin.write("\n")
            process.stdin.flush()
            first, pid = map(int, process.stdout.readline().split())
            assert first == last + 1  # it resumed where the one before was killed
            begun, began = [first], time.monotonic()
            # A save waits for the one before: this is how long one takes on this disk.
            if number == 1:
                begun.append(int(process.stdout.readline().split()[0]))
                takes = time.monotonic() - began
            time.sleep(moments.uniform(0, 2.5 * takes))
            os.kill(pid, signal.SIGKILL)
            while (line := process.stdout.readline()) != "killed\n":
                begun.append(int(line.split()[0]))
            saved = checkpoints.restore(like)
            last = saved.step if saved else 0
            # The last checkpoint begun may be incomplete, the one before is complete. The
            # next one may have begun without a line.
            assert begun[-1] - 1 <= last <= begun[-1] + 1
            if saved:
                assert saved.data_state == [last]
                assert (np.asarray(saved.state["w"]) == last).all()
                assert saved.state["rng"] == jax.random.key(last)
        process.stdin.close()
        assert process.wait() == 0
    assert last > 0 and capsys.readouterr().out == ""  # nothing was damaged


CANNOT_WRITE = """
    import json, resource, sys
    import jax, numpy as np
    from course_lib.program.checkpoints import CheckpointError, Checkpoints

    checkpoints, errors = Checkpoints(sys.argv[1], keep=2), []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def state(step, rows):
        return jax.device_put(
            {name: np.full((rows, size), step, np.float32) for name, size in SIZES.items()}
        )

    SIZES = {"w": 1000, "b": 500}

    def save(step, rows):
        try:
            checkpoints.save(step, state(step, rows), None, {})
            checkpoints.wait()
        except CheckpointError as error:
            errors.append(str(error))

    def report():
        saved = checkpoints.restore(state(0, 60))
        good = all(bool((saved.state[name] == saved.step).all()) for name in SIZES)
        print(json.dumps([saved.step, good, checkpoints.steps(), errors]))

    save(1, 60)
    save(2, 60)
    if sys.argv[2] == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    save(3, 500)
    report()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    save(4, 60)
    report()
"""


def namespace():
    """Returns the command that runs another one where it may mount, or None if that is not
    permitted.
    """
    for command in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        with contextlib.suppress(OSError):
            mounts = [*command, "mount", "-t", "tmpfs", "none", "/mnt"]
            if subprocess.run(mounts, capture_output=True).returncode == 0:
                return command
    return None


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("limit", "File too large"), slow("disk", "no space left on the disk")],
)
def test_a_checkpoint_that_cannot_be_written_is_an_error_and_costs_none_of_the_others(
    tmp_path, cause, reason
):
    prefix = []
    if cause == "disk":
        if (command := namespace()) is None:
            pytest.skip("no file system may be mounted here")
        script = f'mount -t tmpfs -o size=3m none "{tmp_path}" && exec "$@"'
        prefix = [*command, "sh", "-c", script, "sh"]
    with python(CANNOT_WRITE, tmp_path / "checkpoints", cause, prefix=prefix) as process:
        printed, errors = process.communicate()
    assert process.returncode == 0, errors
    (*after_error, [error]), (*after_next, _) = map(json.loads, printed.splitlines())
    assert after_error == [2, True, [1, 2]] and after_next == [4, True, [2, 4]]
    assert error.startswith("step 3 could not be saved in ") and reason in error
    assert error.endswith("the saved steps are [1, 2]")


ONE_OF_TWO = """
    import sys
    import jax, jax.numpy as jnp
    jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[3]))
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from course_lib.program.checkpoints import Checkpoints

    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices())
    split = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    copies = NamedSharding(mesh, PartitionSpec())

    def make(step):
        return {"w": jnp.arange(64.0).reshape(8, 8) + step, "rng": jax.random.key(step)}

    checkpoints = Checkpoints(sys.argv[1])
    for step in (1, 2, 3):
        state = jax.jit(make, static_argnums=0, out_shardings={"w": split, "rng": copies})(step)
        checkpoints.save(step, state, {"next": step}, {})
    checkpoints.wait()
    across = NamedSharding(mesh, PartitionSpec(None, ("data", "tensor")))
    like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=across)}
    like["rng"] = jax.ShapeDtypeStruct((), state["rng"].dtype, sharding=copies)
    saved = checkpoints.restore(like)
    right = jax.jit(lambda w: (w == jnp.arange(64.0).reshape(8, 8) + 3).all())(saved.state["w"])
    print(saved.step, bool(right), float(jax.random.uniform(saved.state["rng"])), flush=True)
    checkpoints.close()
    jax.distributed.shutdown()
"""


def test_what_two_processes_save_together_both_restore_and_one_alone_does(tmp_path):
    folder, port = tmp_path / "checkpoints", free_port()
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(python(ONE_OF_TWO, folder, port, i, JAX_NUM_CPU_DEVICES="2"))
            for i in range(2)
        ]
        for process in both:
            printed, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
            step, right, drawn = printed.splitlines()[-1].split()  # JAX's lines come before
            assert (step, right) == ("3", "True")
            assert float(drawn) == float(jax.random.uniform(jax.random.key(3)))
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        w = np.arange(64, dtype=np.float32).reshape(8, 8) + 3
        state = checkpoints.restore(abstract({"w": w, "rng": jax.random.key(3)})).state
        np.testing.assert_array_equal(state["w"], w)
        assert state["rng"] == jax.random.key(3)
