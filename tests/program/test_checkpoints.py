"""Checkpoints: a run gets back what it saved, whatever happened in between."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from course_lib import configs, optimizers, training
from course_lib.lessons.by_processes import free_port
from course_lib.many_devices import meshes
from course_lib.one_device import mixed_precision
from course_lib.program import checksums
from course_lib.program.checkpoints import CheckpointError, Checkpoints

CONFIG = {"model": {"num_layers": 3, "remat": ["MLP"]}, "seed": 42}


@pytest.fixture
def checkpoints(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as opened:
        yield opened


def small(step):
    """Returns a state in which every array tells its step."""
    values = jnp.arange(64.0).reshape(8, 8) + step
    return {"params": {"w": values}, "step": jnp.int32(step), "rng": jax.random.key(step)}


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )


def save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, small(step), {"next": step}, CONFIG)
    checkpoints.wait()


def bits(leaf):
    """Returns the numbers of an array as bytes: NaNs and signed zeros differ, too."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bits(one) == bits(other)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_was_never_stopped(checkpoints):
    """The state has parameters, their moments, a key that is used and a moving loss scale."""

    def loss_fn(params, batch, rng):
        noise = jax.random.normal(rng, (4, 4)) / 8
        loss = jnp.square(batch @ (params["w"] + noise) + params["b"]).mean()
        return loss, {"loss": (loss, jnp.float32(1))}

    optimizer = optimizers.from_config(configs.get("cpu").optimizer)
    step = training.make_train_step(loss_fn, optimizer)
    batches = [jax.random.normal(jax.random.key(number), (2, 4)) for number in range(6)]
    params = {"w": jnp.eye(4), "b": jnp.zeros((1, 4))}
    state = training.init_state(
        params, optimizer, jax.random.key(0), mixed_precision.loss_scale("dynamic")
    )
    like = abstract(state)
    for number, batch in enumerate(batches):
        if number == 3:
            checkpoints.save(number, state, {"next": number}, CONFIG, loss=2.5)
        state, _ = step(state, batch)  # donates the state that is being saved

    saved = checkpoints.restore(like)
    assert (saved.step, saved.data_state, saved.config, saved.loss) == (
        3,
        {"next": 3},
        CONFIG,
        2.5,
    )
    resumed = saved.state
    assert int(resumed.step) == 3
    for batch in batches[3:]:
        resumed, _ = step(resumed, batch)
    assert_same(resumed, state)


def test_numbers_of_every_kind_come_back_bit_for_bit(checkpoints):
    odd = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45, -1e-40])
    dtypes = ("float16", "bfloat16", "float32", "int8", "uint32", "bool")
    state = {name: jnp.array([0, 1, 1, 0]).astype(name) for name in dtypes}
    state |= {
        "odd": odd,
        "half": odd.astype(jnp.bfloat16),
        "none": None,
        "empty": {},
        "pair": (jnp.int32(1), jnp.ones((1, 1))),
    }
    state |= {
        "keys": jax.random.split(jax.random.key(1), 3),
        "rbg": jax.random.key(2, impl="rbg"),
    }
    checkpoints.save(1, state, None, {})
    assert_same(checkpoints.restore(abstract(state)).state, state)


def test_a_state_moves_to_any_mesh_and_back(checkpoints):
    devices = np.array(meshes.devices(4))
    line, square = Mesh(devices, ("data",)), Mesh(devices.reshape(2, 2), ("data", "tensor"))
    layouts = [
        (jax.sharding.SingleDeviceSharding(devices[0]),) * 2,
        (NamedSharding(line, PartitionSpec("data")), NamedSharding(line, PartitionSpec())),
        (
            NamedSharding(square, PartitionSpec("tensor", "data")),
            NamedSharding(square, PartitionSpec()),
        ),
        (jax.sharding.SingleDeviceSharding(devices[0]),) * 2,
    ]
    state = small(7)
    for step, (of_weights, of_others) in enumerate(layouts):
        wanted = abstract(state, of_others)
        wanted["params"] = abstract(state["params"], of_weights)
        state = (
            jax.device_put(state, of_others) if step == 0 else checkpoints.restore(wanted).state
        )
        assert_same(state, small(7))
        assert state["params"]["w"].sharding == of_weights and state[
            "rng"
        ].sharding.is_equivalent_to(of_others, 0)
        checkpoints.save(step, state, None, {})


def test_the_newest_and_the_best_are_not_deleted(checkpoints):
    for step, loss in enumerate([5.0, 1.0, float("nan"), 3.0, None, 2.0, 4.0]):
        checkpoints.save(step, small(step), None, CONFIG, loss)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4, 5, 6]
    checkpoints.save(7, small(7), None, CONFIG, 0.5)
    checkpoints.wait()
    assert checkpoints.steps() == [5, 6, 7]


def test_the_best_loss_is_the_lowest_of_the_checkpoints_that_have_one(checkpoints):
    assert checkpoints.best() is None
    for step, loss in enumerate((3.0, 1.0, None, 2.0)):
        checkpoints.save(step, small(step), {}, CONFIG, loss=loss)
    checkpoints.wait()
    assert checkpoints.best() == 1.0


def test_the_newest_the_best_and_the_next_one_take_room_at_the_same_time(
    checkpoints, monkeypatch
):
    delete_old, counts = checkpoints._delete_old, []

    def count_and_delete():
        counts.append(len(checkpoints.steps()))
        delete_old()

    monkeypatch.setattr(checkpoints, "_delete_old", count_and_delete)
    for step in range(7):  # the first one stays the best
        checkpoints.save(step, small(step), None, CONFIG, loss=float(step))
    checkpoints.wait()
    assert counts == [1, 2, 3, 4, 5, 5, 5]


def test_where_nothing_was_saved_there_is_nothing(checkpoints):
    assert checkpoints.newest() is None and checkpoints.restore(abstract(small(0))) is None


def test_a_step_saved_again_is_replaced(checkpoints):
    save(checkpoints, 1)
    checkpoints.save(1, small(5), None, CONFIG)
    assert_same(checkpoints.restore(abstract(small(0))).state, small(5))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def largest_of_the_arrays(folder):
    return max((folder / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("name", ["", "arrays/_METADATA", "about.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(checkpoints, name, capsys):
    save(checkpoints, 1, 2, 3)
    folder = checkpoints.folder / "00000003"
    path = folder / name if name else largest_of_the_arrays(folder)
    flip_a_bit(path)
    saved = checkpoints.restore(abstract(small(0)))
    assert saved.step == 2 and saved.data_state == {"next": 2}
    assert_same(saved.state, small(2))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("the checkpoint of step 3 is damaged and not used: ")
    assert path.name in line


def test_a_damaged_checkpoint_stays_until_the_next_one_and_does_not_count(checkpoints):
    save(checkpoints, 1, 2, 3)
    flip_a_bit(checkpoints.folder / "00000003" / "about.json")
    assert checkpoints.newest().step == 2
    assert checkpoints.steps() == [1, 2, 3]
    save(checkpoints, 4)
    assert checkpoints.steps() == [1, 2, 4]


def test_a_damaged_step_that_is_saved_again_stays(checkpoints):
    save(checkpoints, 1, 2, 3)
    flip_a_bit(checkpoints.folder / "00000003" / "about.json")
    assert checkpoints.newest().step == 2
    save(checkpoints, 3)
    assert checkpoints.steps() == [1, 2, 3] and checkpoints.newest().step == 3


def test_a_process_killed_while_it_deletes_leaves_no_incomplete_checkpoint(
    checkpoints, monkeypatch
):
    def killed_after_one_file(folder, **_):
        for path in [*Path(folder).rglob("about.json")][:1]:
            path.unlink()

    save(checkpoints, 1, 2, 3)
    monkeypatch.setattr(shutil, "rmtree", killed_after_one_file)
    save(checkpoints, 4)
    assert [
        checksums.damage(checkpoints.folder / f"{step:08d}") for step in checkpoints.steps()
    ] == [None] * 3


def test_if_all_are_damaged_the_run_does_not_start_anew(checkpoints):
    save(checkpoints, 1, 2)
    for step in (1, 2):
        flip_a_bit(checkpoints.folder / f"0000000{step}" / "SHA256SUMS")
    with pytest.raises(CheckpointError, match=r"are damaged \(steps \[1, 2\]\)"):
        checkpoints.restore(abstract(small(0)))


def test_a_draft_of_a_killed_process_is_ignored_and_deleted(checkpoints):
    save(checkpoints, 1)
    shutil.copytree(
        checkpoints.folder / "00000001", checkpoints.folder / "unfinished" / "00000002"
    )
    assert checkpoints.restore(abstract(small(0))).step == 1
    save(checkpoints, 3)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "00000001",
        "00000003",
    ]


def test_all_of_a_checkpoint_is_on_the_disk_before_older_ones_go(checkpoints, monkeypatch):
    fsync, delete_old, synced, left_out = os.fsync, checkpoints._delete_old, set(), []

    def version(status):
        return status.st_ino, status.st_size, status.st_mtime_ns

    def recorded(file):
        synced.add(version(os.fstat(file)))
        fsync(file)

    def delete_old_checked():
        paths = [
            checkpoints.folder,
            checkpoints.folder / "00000002",
            *checkpoints.folder.glob("00000002/**/*"),
        ]
        left_out.append([path.name for path in paths if version(path.stat()) not in synced])
        delete_old()

    monkeypatch.setattr(os, "fsync", recorded)
    save(checkpoints, 1)
    monkeypatch.setattr(checkpoints, "_delete_old", delete_old_checked)
    save(checkpoints, 2)
    assert left_out == [[]]


@pytest.mark.parametrize("after", ["restored", "saved"])
def test_a_process_killed_while_the_only_checkpoint_is_replaced_leaves_the_old_one_or_the_new(
    tmp_path, monkeypatch, after
):
    rename, left = Path.rename, []

    def copied(path, target):  # as a kill would leave it here
        left.append(shutil.copytree(tmp_path / "run", tmp_path / f"killed {len(left)}"))
        return rename(path, target)

    with contextlib.closing(Checkpoints(tmp_path / "run")) as checkpoints:
        save(checkpoints, 1)
        monkeypatch.setattr(Path, "rename", copied)
        checkpoints.save(1, small(5), None, CONFIG)
        checkpoints.wait()
        monkeypatch.undo()
    assert any(not (folder / "00000001").exists() for folder in left)
    for folder in left:
        with contextlib.closing(Checkpoints(folder)) as checkpoints:
            if after == "restored":
                assert_same(checkpoints.restore(abstract(small(0))).state, small(1))
            save(checkpoints, 2)
            assert sorted(path.name for path in folder.iterdir()) == ["00000001", "00000002"]


def test_a_checkpoint_that_cannot_be_replaced_stays(checkpoints, monkeypatch):
    rename = Path.rename

    def fails(path, target):
        if path.parent.name == "unfinished" and not path.name.startswith("replaced"):
            raise OSError("no")
        return rename(path, target)

    save(checkpoints, 1)
    with (
        monkeypatch.context() as patched,
        pytest.raises(CheckpointError, match=r"\(OSError: no\); the saved steps are \[1\]"),
    ):
        patched.setattr(Path, "rename", fails)
        checkpoints.save(1, small(5), None, CONFIG)
        checkpoints.wait()
    assert_same(checkpoints.restore(abstract(small(0))).state, small(1))
    assert [path.name for path in checkpoints.folder.iterdir()] == ["00000001"]


@contextlib.contextmanager
def python(code, *arguments, prefix=(), **environment):
    """Runs a Python process with pipes; at the end it and its children are gone."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    environment = (
        os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
        | environment
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
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
    like = {"w": jnp.zeros((300, 300)), "rng": jax.random.key(0), "step": jnp.int32(0)}
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
            saved = checkpoints.restore(abstract(like))
            last = saved.step if saved else 0
            # The last checkpoint begun may be incomplete, the one before is complete. The
            # next one may have begun without a line.
            assert begun[-1] - 1 <= last <= begun[-1] + 1
            if saved:
                assert (
                    saved.data_state == [last] and (np.asarray(saved.state["w"]) == last).all()
                )
                assert_same(saved.state["rng"], jax.random.key(last))
        process.stdin.close()
        assert process.wait() == 0
    assert last > 0 and capsys.readouterr().out == ""  # nothing was damaged


CANNOT_WRITE = """
    import json, resource, sys
    import jax, jax.numpy as jnp
    from course_lib.program.checkpoints import CheckpointError, Checkpoints

    checkpoints, errors = Checkpoints(sys.argv[1], keep=2), []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(step, rows):
        state = {
            "w": jnp.full((rows, 1000), step, jnp.float32),
            "b": jnp.full((rows, 500), step, jnp.float32),
        }
        try:
            checkpoints.save(step, state, None, {})
            checkpoints.wait()
        except CheckpointError as error:
            errors.append(str(error))

    def report():
        like = {
            "w": jax.ShapeDtypeStruct((60, 1000), jnp.float32),
            "b": jax.ShapeDtypeStruct((60, 500), jnp.float32),
        }
        saved = checkpoints.restore(like)
        good = all(bool((saved.state[name] == saved.step).all()) for name in like)
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
    ("cause", "reason"), [("limit", "File too large"), ("disk", "no space left on the disk")]
)
def test_a_checkpoint_that_cannot_be_written_is_an_error_and_the_run_can_go_on(
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
    folder = tmp_path / "checkpoints"
    port = free_port()
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                python(ONE_OF_TWO, folder, port, number, JAX_NUM_CPU_DEVICES="2")
            )
            for number in range(2)
        ]
        for process in both:
            printed, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
            # Lines before it are from JAX.
            step, right, drawn = printed.splitlines()[-1].split()
            assert (step, right, float(drawn)) == (
                "3",
                "True",
                float(jax.random.uniform(jax.random.key(3))),
            )
    with contextlib.closing(Checkpoints(folder)) as checkpoints:
        state = {"w": jnp.arange(64.0).reshape(8, 8) + 3.0, "rng": jax.random.key(3)}
        assert_same(checkpoints.restore(abstract(state)).state, state)


def test_another_state_than_the_one_saved_is_refused(checkpoints):
    save(checkpoints, 1)
    other = abstract(small(0)) | {"params": {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}}
    with pytest.raises(
        ValueError, match=r"params\.w: 'float32\[8, 8\]' saved, 'bfloat16\[8, 4\]' given"
    ):
        checkpoints.restore(other)


def test_a_data_state_that_json_would_change_is_refused(checkpoints):
    with pytest.raises(ValueError, match=r"data_state=\(1, 2\) must be the same after JSON"):
        checkpoints.save(1, small(1), (1, 2), CONFIG)
    assert checkpoints.steps() == []
