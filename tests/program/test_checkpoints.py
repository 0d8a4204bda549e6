"""Checkpoints: a run gets back what it saved, whatever happened in between."""

import contextlib
import os
import random
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from small_run import full_disk, numbers

from course_lib.many_devices import meshes
from course_lib.program import checksums
from course_lib.program.checkpoints import CheckpointError, Checkpoints

CONFIG = {"model": {"num_layers": 3, "remat": ["MLP"]}, "seed": 42}


@pytest.fixture
def checkpoints(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints")) as opened:
        yield opened


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with contextlib.closing(Checkpoints(folder)) as opened:
        save(opened, 1, 2, 3)
    return folder


@pytest.fixture
def three(saved_once, checkpoints):
    """Checkpoints of steps 1, 2 and 3."""
    shutil.copytree(saved_once, checkpoints.folder)
    return checkpoints


def small(step):
    """Returns a state in which every array tells its step."""
    values = np.arange(64, dtype=np.float32).reshape(8, 8) + step
    arrays = {"params": {"w": values}, "step": np.int32(step)}
    return jax.device_put(arrays) | {"rng": jax.random.key(step)}


def abstract(state, sharding=None):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state
    )


def save(checkpoints, *steps, losses=None):
    for step in steps:
        checkpoints.save(step, small(step), {"next": step}, CONFIG, losses and losses[step])
    checkpoints.wait()


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for pair in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        # bytes: NaNs and signed zeros differ, too
        one, other = ((leaf.dtype, leaf.shape, numbers(leaf).tobytes()) for leaf in pair)
        assert one == other


def folders(checkpoints):
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_the_next_step_may_donate_a_state_that_is_being_saved(checkpoints):
    state = {"w": jnp.arange(2.0**20), "rng": jax.random.key(1)}
    like = abstract(state)
    checkpoints.save(3, state, {"next": 3}, CONFIG, loss=2.5)
    step = jax.jit(lambda state: state | {"w": -state["w"]}, donate_argnums=0)
    assert step(state)["w"][1] == -1
    saved = checkpoints.restore(like)
    found = (saved.step, saved.data_state, saved.config, saved.loss)
    assert found == (3, {"next": 3}, CONFIG, 2.5)
    assert_same(
        saved.state, {"w": np.arange(2**20, dtype=np.float32), "rng": jax.random.key(1)}
    )


def test_numbers_of_every_kind_come_back_bit_for_bit(checkpoints):
    odd = jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45, -1e-40])
    dtypes = ("float16", "bfloat16", "float32", "int8", "uint32", "bool")
    state = {name: jnp.array([0, 1, 1, 0]).astype(name) for name in dtypes}
    state |= {"odd": odd, "half": odd.astype(jnp.bfloat16), "none": None, "empty": {}}
    state |= {"pair": (jnp.int32(1), jnp.ones((1, 1))), "rbg": jax.random.key(2, impl="rbg")}
    state |= {"keys": jax.random.split(jax.random.key(1), 3)}
    checkpoints.save(1, state, None, {})
    assert_same(checkpoints.restore(abstract(state)).state, state)


def test_a_state_moves_to_any_mesh_and_back(checkpoints):
    devices = np.array(meshes.devices(4))
    line, square = Mesh(devices, ("data",)), Mesh(devices.reshape(2, 2), ("data", "tensor"))
    one = SingleDeviceSharding(devices[0])
    layouts = [
        (one, one),
        (NamedSharding(line, P("data")), NamedSharding(line, P())),
        (NamedSharding(square, P("tensor", "data")), NamedSharding(square, P())),
        (one, one),
    ]
    state = small(7)
    for step, (of_weights, of_others) in enumerate(layouts):
        wanted = abstract(state, of_others)
        wanted["params"] = abstract(state["params"], of_weights)
        restored = checkpoints.restore(wanted)
        state = restored.state if restored else jax.device_put(state, one)
        assert_same(state, small(7))
        assert state["params"]["w"].sharding == of_weights
        assert state["rng"].sharding.is_equivalent_to(of_others, 0)
        checkpoints.save(step, state, None, {})


def test_the_newest_and_the_best_are_kept_and_the_next_one_takes_room_besides(
    checkpoints, monkeypatch
):
    delete_old, counts = checkpoints._delete_old, []

    def count_and_delete():
        counts.append(len(checkpoints.steps()))
        delete_old()

    monkeypatch.setattr(checkpoints, "_delete_old", count_and_delete)
    losses = [5.0, 1.0, float("nan"), 3.0, None, 2.0, 4.0, 0.5]
    save(checkpoints, *range(7), losses=losses)
    assert checkpoints.steps() == [1, 4, 5, 6] and counts == [1, 2, 3, 4, 4, 5, 5]
    save(checkpoints, 7, losses=losses)
    assert checkpoints.steps() == [5, 6, 7]


def test_a_file_in_the_way_is_named_before_the_first_step(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoints is in the way of a folder"):
        Checkpoints(tmp_path / "checkpoints")


def test_a_step_saved_again_is_replaced(three):
    three.save(3, small(5), None, CONFIG)
    assert_same(three.restore(abstract(small(0))).state, small(5))
    assert three.steps() == [1, 2, 3]


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["", "arrays/_METADATA", "about.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(three, name, capsys):
    folder = three.folder / "00000003"
    largest = max((folder / "arrays").rglob("d/*"), key=lambda path: path.stat().st_size)
    path = folder / name if name else largest
    flip_a_bit(path)
    saved = three.restore(abstract(small(0)))
    assert saved.step == 2 and saved.data_state == {"next": 2}
    assert_same(saved.state, small(2))
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("the checkpoint of step 3 is damaged and not used: ")
    assert path.name in line


@pytest.mark.parametrize(("next_step", "left"), [(4, [1, 2, 4]), (3, [1, 2, 3])])
def test_a_damaged_checkpoint_does_not_count_until_it_is_saved_again(three, next_step, left):
    flip_a_bit(three.folder / "00000003" / "about.json")
    assert three.newest().step == 2 and three.steps() == [1, 2, 3]
    save(three, next_step)
    assert three.steps() == left and three.newest().step == next_step


def test_a_process_killed_while_it_deletes_leaves_no_incomplete_checkpoint(three, monkeypatch):
    def killed_after_one_file(folder, **_):
        for path in [*Path(folder).rglob("about.json")][:1]:
            path.unlink()

    monkeypatch.setattr(shutil, "rmtree", killed_after_one_file)
    save(three, 4)
    assert three.steps() == [2, 3, 4]
    assert {checksums.damage(three.folder / f"{step:08d}") for step in (2, 3, 4)} == {None}


def test_if_all_are_damaged_the_run_does_not_start_anew(three):
    for step in three.steps():
        flip_a_bit(three.folder / f"0000000{step}" / "SHA256SUMS")
    with pytest.raises(CheckpointError, match=r"are damaged \(steps \[1, 2, 3\]\)"):
        three.restore(abstract(small(0)))


def test_a_draft_of_a_killed_process_is_ignored_and_deleted(three):
    shutil.copytree(three.folder / "00000001", three.folder / "unfinished" / "00000004")
    assert three.newest().step == 3
    save(three, 5)
    assert folders(three) == ["00000002", "00000003", "00000005"]


def test_all_of_a_checkpoint_is_on_the_disk_before_older_ones_go(checkpoints, monkeypatch):
    fsync, delete_old, synced, left_out = os.fsync, checkpoints._delete_old, set(), []

    def version(status):
        return status.st_ino, status.st_size, status.st_mtime_ns

    def recorded(file):
        synced.add(version(os.fstat(file)))
        fsync(file)

    def delete_old_checked():
        folder = checkpoints.folder
        paths = [folder, folder / "00000002", *folder.glob("00000002/**/*")]
        left_out.append([path.name for path in paths if version(path.stat()) not in synced])
        delete_old()

    monkeypatch.setattr(os, "fsync", recorded)
    save(checkpoints, 1)
    monkeypatch.setattr(checkpoints, "_delete_old", delete_old_checked)
    save(checkpoints, 2)
    assert left_out == [[]]


def test_a_process_killed_while_the_only_checkpoint_is_replaced_leaves_the_old_one_or_the_new(
    tmp_path, monkeypatch
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
    for number, folder in enumerate(left):
        with contextlib.closing(Checkpoints(folder)) as checkpoints:
            if number % 2:  # restored first, or saved at once
                assert_same(checkpoints.restore(abstract(small(0))).state, small(1))
            save(checkpoints, 2)
            assert folders(checkpoints) == ["00000001", "00000002"]
            assert checksums.damage(folder / "00000001") is None


def test_a_checkpoint_that_cannot_be_replaced_stays(three, monkeypatch):
    rename = Path.rename

    def fails(path, target):
        if path.parent.name == "unfinished" and not path.name.startswith("replaced"):
            raise OSError("no")
        return rename(path, target)

    told = r"\(OSError: no\); the saved steps are"
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=told):
        patched.setattr(Path, "rename", fails)
        three.save(3, small(5), None, CONFIG)
        three.wait()
    assert_same(three.restore(abstract(small(0))).state, small(3))
    assert folders(three) == ["00000001", "00000002", "00000003"]


def test_a_full_disk_costs_none_of_the_checkpoints_before_or_after(three):
    large = {"params": {"w": np.ones((800, 800), np.float32)}}
    told = r"^step 4 could not be saved in .*too large.*; the saved steps are \[1, 2, 3\]$"
    with full_disk(500_000), pytest.raises(CheckpointError, match=told):
        three.save(4, jax.device_put(large), None, CONFIG)
        three.wait()
    assert_same(three.restore(abstract(small(0))).state, small(3))
    save(three, 5)
    assert three.steps() == [2, 3, 5]


def test_what_would_be_lost_or_cast_is_refused(three):
    other = abstract(small(0)) | {"params": {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}}
    with pytest.raises(ValueError, match=r"params\.w: 'float32\[8, 8\]' saved, 'bfloat16"):
        three.restore(other)
    with pytest.raises(ValueError, match=r"data_state=\(1, 2\) must be the same after JSON"):
        three.save(4, small(1), (1, 2), CONFIG)
    assert three.steps() == [1, 2, 3]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner" / "empty").mkdir(parents=True)
    (tmp_path / "numbers").write_bytes(bytes(range(256)))
    (tmp_path / "inner" / "text").write_text("two words\n")
    (tmp_path / "inner" / "nothing").touch()
    checksums.write(tmp_path)
    assert checksums.damage(tmp_path) is None
    return tmp_path


@pytest.mark.parametrize("name", ["numbers", "inner/text", "SHA256SUMS"])
def test_a_flipped_bit_or_a_file_cut_short_added_or_missing_is_detected_and_named(folder, name):
    """In the list, a flipped bit may change a file name, or join two lines."""
    path = folder / name
    original, draw = path.read_bytes(), random.Random(0)
    for bit in draw.sample(range(8 * len(original)), k=min(30, 8 * len(original))):
        flipped = bytearray(original)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert name in checksums.damage(folder), f"bit {bit}"
    for length in (0, 1, len(original) // 2, len(original) - 1):
        path.write_bytes(original[:length])
        assert name in checksums.damage(folder), f"{length} bytes"
    path.unlink()
    assert name in checksums.damage(folder)
    path.write_bytes(original)
    (folder / "inner" / "more").touch()
    assert checksums.damage(folder) == "'inner/more' is not what SHA256SUMS says"


def test_an_empty_list_alone_is_damage(tmp_path):
    (tmp_path / "SHA256SUMS").touch()
    assert checksums.damage(tmp_path) == "SHA256SUMS is empty"


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no command sha256sum here")
def test_the_command_sha256sum_reads_the_list(folder):
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=folder).returncode == 0
    (folder / "numbers").write_bytes(bytes(256))
    assert subprocess.run(check, cwd=folder, capture_output=True).returncode == 1
