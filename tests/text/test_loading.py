"""What must be true of token files, and of the batches that are read from them."""

import concurrent.futures
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from course_lib.many_devices import meshes
from course_lib.text import data, loading

TOKENS = np.arange(4003, dtype=np.uint16)  # each token is its own place
SIZES = dict(batch_size=4, seq_len=8, vocab_size=4003)
WINDOWS = 4003 // 8


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path):
    """A corpus of five documents, of which one is in the validation split."""
    for i in range(5):
        (tmp_path / f"{i}.txt").write_text(
            f"this is document {i}, in UTF-8: \N{GREEK SMALL LETTER PI}\n" * (i + 1), "utf-8"
        )
    return tmp_path


def batches(seed=0, **changes):
    return loading.batches(TOKENS, seed=seed, **SIZES | changes)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_equal(first, second):
    assert len(first) == len(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def starts(found):
    return np.concatenate([batch.inputs[:, 0] for batch in found])


def test_the_same_seed_gives_the_same_batches_and_another_one_others():
    first = take(batches(), 20)
    assert_equal(take(batches(), 20), first)
    assert set(starts(take(batches(seed=1), 20))) != set(starts(first))


def test_a_label_is_the_token_after_its_input_around_the_end_of_the_stream_too():
    for batch in take(batches(), 2 * WINDOWS // 4):
        assert (
            batch.inputs.dtype == batch.labels.dtype == np.int32
            and batch.weights.dtype == np.float32
        )
        assert batch.inputs.shape == batch.labels.shape == batch.weights.shape == (4, 8)
        np.testing.assert_array_equal(batch.labels, (batch.inputs + 1) % len(TOKENS))
        np.testing.assert_array_equal(
            batch.inputs, (batch.inputs[:, :1] + np.arange(8)) % len(TOKENS)
        )
        assert (batch.weights == 1).all()


def test_an_epoch_holds_every_window_once_and_the_next_one_cuts_and_orders_them_otherwise():
    epochs = [batch.inputs[:, 0] for batch in take(batches(batch_size=WINDOWS), 3)]
    for epoch in epochs:
        gaps = sorted(np.diff(np.sort(epoch)))
        # the larger one where the circle is cut
        assert gaps[:-1] == [8] * (WINDOWS - 2) and gaps[-1] in (8, 8 + 4003 % 8)
    ranks = [tuple(np.argsort(epoch)) for epoch in epochs]
    assert len(set(ranks)) == len({epoch.min() for epoch in epochs}) == 3


def test_a_batch_may_hold_the_end_of_one_epoch_and_the_start_of_the_next():
    whole = starts(take(batches(batch_size=WINDOWS), 2))
    np.testing.assert_array_equal(starts(take(batches(batch_size=7), 100)), whole[:700])


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_together_are_the_batch_of_one(shards):
    parts = [batches(shard=shard, shards=shards) for shard in range(shards)]
    for batch in take(batches(), 30):
        together = jax.tree.map(lambda *rows: np.concatenate(rows), *map(next, parts))
        assert_equal([together], [batch])


@pytest.mark.parametrize("before, after", [(1, 1), (1, 2), (4, 2), (2, 1)])
def test_a_state_leads_to_the_batches_that_came_after_it_on_any_number_of_processes(
    before, after
):
    whole = take(batches(), 12)
    running = [batches(shard=shard, shards=before) for shard in range(before)]
    for iterator in running:
        take(iterator, 7)
    # one state, whichever process saves it
    (state,) = {json.dumps(iterator.get_state()) for iterator in running}
    resumed = [batches(shard=shard, shards=after) for shard in range(after)]
    for iterator in resumed:
        next(iterator)
        iterator.set_state(json.loads(state))
    for batch in whole[7:]:
        assert_equal(
            [jax.tree.map(lambda *rows: np.concatenate(rows), *map(next, resumed))], [batch]
        )


def test_labels_that_are_masked_change_neither_inputs_nor_the_next_batch():
    iterator = batches()
    batch = next(iterator)
    inputs = batch.inputs.copy()
    batch.labels[:], batch.weights[:] = 0, 0
    np.testing.assert_array_equal(batch.inputs, inputs)
    assert next(iterator).weights.min() == 1


@pytest.fixture(scope="module")
def rows():
    return NamedSharding(meshes.make({"data": 4, "tensor": 2}), PartitionSpec("data"))


def test_batches_on_devices_are_the_same_and_divided_among_them(rows):
    found = take(loading.to_devices(batches(), rows), 10)
    assert all(leaf.sharding.is_equivalent_to(rows, 2) for leaf in jax.tree.leaves(found))
    assert found[0].inputs.addressable_shards[0].data.shape == (1, 8)
    assert_equal(jax.device_get(found), take(batches(), 10))


@pytest.mark.parametrize("ahead", [0, 3])
def test_the_state_on_devices_is_that_of_the_last_batch_handed_out(rows, ahead):
    whole = take(batches(), 12)
    iterator = loading.to_devices(batches(), rows, ahead)
    assert iterator.get_state() == batches().get_state()
    take(iterator, 5)
    state = json.loads(json.dumps(iterator.get_state()))
    assert_equal(jax.device_get(take(iterator, 2)), whole[5:7])
    iterator.set_state(state)
    assert iterator.get_state() == state
    assert_equal(jax.device_get(take(iterator, 7)), whole[5:])


def test_a_process_is_the_shard_whose_rows_its_devices_hold(rows):
    devices = rows.mesh.devices
    assert loading.shard_of(rows, 8, 16) == (0, 1)
    assert [
        loading.shard_of(rows, 8, 16, devices[half].flat) for half in (slice(2), slice(2, 4))
    ] == [(0, 2), (1, 2)]
    # these divide the model
    assert [loading.shard_of(rows, 8, 16, devices[:, half]) for half in (0, 1)] == [
        (0, 1),
        (0, 1),
    ]
    with pytest.raises(
        ValueError,
        match=(
            r"must give a process one part of a batch, not the rows \[\(0, 2\), \(6, 8\)\] of 8"
        ),
    ):
        loading.shard_of(rows, 8, 16, devices[[0, 3]].flat)
    with pytest.raises(ValueError, match=r"not the rows \[\(2, 4\), \(4, 6\)\] of 8"):
        loading.shard_of(rows, 8, 16, devices[1:3].flat)


@pytest.mark.parametrize("split", data.SPLITS)
def test_a_token_file_holds_the_tokens_of_its_split_and_stays_on_disk(
    split, folder, monkeypatch
):
    monkeypatch.setattr(loading, "GROUP", 100)  # several pieces
    for corpus in ("shipped", folder):
        found = loading.token_file(split, corpus)
        assert isinstance(found, np.memmap) and found.dtype == np.uint16
        np.testing.assert_array_equal(found, data.tokens(split, corpus))


def test_a_token_file_is_prepared_once(folder, monkeypatch):
    first = loading.token_file("train", folder)
    monkeypatch.setattr(data, "encode", lambda *args: pytest.fail("prepared again"))
    np.testing.assert_array_equal(loading.token_file("train", folder), first)


def test_a_document_is_read_when_those_before_it_are_written(folder, monkeypatch):
    monkeypatch.setattr(loading, "GROUP", 1)
    alive = []
    monkeypatch.setattr(
        data, "encode", lambda model, texts: alive.append(len(texts)) or np.zeros(1, np.uint16)
    )
    loading.token_file("train", folder)
    assert alive == [1, 1, 1, 1]


@pytest.mark.parametrize("change", ["text", "name", "time"])
def test_a_folder_that_changes_gets_another_token_file(folder, change):
    before = loading.token_file("train", folder)
    file = sorted(folder.iterdir())[0]
    if change == "text":
        file.write_text("something else, and longer than what was here before")
    elif change == "name":
        file.rename(folder / "renamed")
    else:
        os.utime(file, ns=(0, 0))
    assert loading.token_file("train", folder).filename != before.filename


def test_a_folder_that_changes_while_it_is_read_is_refused_and_leaves_no_file(
    folder, cache, monkeypatch
):
    loading.token_file("validation", folder)
    before, encode = set(cache.iterdir()), data.encode

    def written_meanwhile(model, texts):
        (folder / "0.txt").write_text("after")
        return encode(model, texts)

    monkeypatch.setattr(data, "encode", written_meanwhile)
    with pytest.raises(loading.Changed, match="changed while it was read"):
        loading.token_file("train", folder)
    assert set(cache.iterdir()) == before


@pytest.mark.parametrize("length", [0, 50, 200])
def test_a_token_file_that_is_too_short_is_made_again_and_it_is_said(folder, capsys, length):
    first = np.array(loading.token_file("train", folder))
    path = loading._path("train", folder)
    path.write_bytes(path.read_bytes()[:length])
    np.testing.assert_array_equal(loading.token_file("train", folder), first)
    assert f"{path.name} are damaged" in capsys.readouterr().out


def test_a_token_file_of_which_a_bit_was_flipped_is_made_again_and_it_is_said(folder, capsys):
    first = np.array(loading.token_file("train", folder))
    path = loading._path("train", folder)
    content = bytearray(path.read_bytes())
    content[-first.nbytes // 2] ^= 1
    path.write_bytes(content)
    np.testing.assert_array_equal(loading.token_file("train", folder), first)
    assert f"{path.name} are damaged" in capsys.readouterr().out
    assert loading.token_file("train", folder).filename == path and not capsys.readouterr().out


def test_a_token_file_that_is_killed_half_way_is_never_seen(folder, cache):
    program = (
        "import sys\n"
        "from course_lib.text import data, loading\n"
        "loading.GROUP, encode = 1, data.encode\n"
        "def slow(model, texts):\n"
        "    print('piece', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    return encode(model, texts)\n"
        "data.encode = slow\n"
        "loading.token_file('train', sys.argv[1])\n"
    )
    data.tokenizer()
    path = loading._path("train", folder)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], **pipes) as process:
        assert process.stdout.readline() == "piece\n"
        # for the first piece; the second waits for a line until it is killed
        process.stdin.write("\n")
        process.stdin.flush()
        # the first piece is written when the second begins
        assert process.stdout.readline() == "piece\n"
        parts = list(cache.glob(f"{path.name}.*.part"))
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(parts) == 1 and not path.exists()
    os.utime(parts[0], (0, 0))
    (folder / "0.txt").write_text("the next run's text, and so its token file, is another one")
    np.testing.assert_array_equal(
        loading.token_file("train", folder), data.tokens("train", folder)
    )
    assert not list(cache.glob("*.part"))


def test_one_prepares_the_tokens_and_the_others_wait(folder, monkeypatch):
    data.tokenizer()
    encode, called = data.encode, []

    def slow(model, texts):
        called.append(texts)
        time.sleep(0.3)
        return encode(model, texts)

    monkeypatch.setattr(data, "encode", slow)
    # a lock is that of an open file, not of a process
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: loading.token_file("train", folder), range(3)))
    assert len(called) == 1
    for each in found:
        np.testing.assert_array_equal(each, found[0])


def test_a_cache_that_cannot_be_written_is_named(folder, monkeypatch):
    data.tokens("train")
    monkeypatch.setattr(loading.files, "cache_folder", lambda: folder / "0.txt" / "cache")
    with pytest.raises(OSError, match="cannot be prepared .*COURSE_CACHE names another folder"):
        loading.token_file("train")


def test_a_folder_that_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        loading.token_file("train", tmp_path / "missing")
    with pytest.raises(ValueError, match="must be one of"):
        loading.token_file("test", tmp_path)
    (tmp_path / "good.txt").write_text("")
    with pytest.raises(ValueError, match="must hold two files or more, it has 1"):
        loading.token_file("train", tmp_path)
    (tmp_path / "more.txt").write_text("")
    with pytest.raises(ValueError, match="the files of split='train' are all empty"):
        loading.token_file("train", tmp_path)
    for name in ("good.txt", "more.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        loading.token_file("train", tmp_path)


def test_an_empty_folder_is_refused_though_the_shipped_corpus_is_prepared(tmp_path):
    for split in data.SPLITS:
        loading.token_file(split)
        with pytest.raises(
            ValueError, match="it has 0: it is empty, as a folder is whose disk is not mounted"
        ):
            loading.token_file(split, tmp_path)


def test_the_same_files_under_other_names_are_another_corpus_since_names_choose_the_split(
    tmp_path,
):
    (inner := tmp_path / "inner").mkdir()
    for i in range(9):
        (inner / f"{i}.txt").write_text(f"{i}" * 9)
    for folder in (tmp_path, inner):
        np.testing.assert_array_equal(
            loading.token_file("train", folder), data.tokens("train", folder)
        )
    assert (
        data.documents("validation", tmp_path)[0].text
        != data.documents("validation", inner)[0].text
    )


def test_a_document_that_may_not_be_read_is_named(folder, monkeypatch):
    read = pathlib.Path.read_bytes

    def forbidden(path):
        if path.name == "3.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    # for who runs the tests as root it would be readable
    monkeypatch.setattr(pathlib.Path, "read_bytes", forbidden)
    with pytest.raises(
        ValueError, match="'3.txt' is not UTF-8, or unreadable .*Permission denied.*remove it"
    ):
        for split in data.SPLITS:
            loading.token_file(split, folder)


def test_a_run_folder_to_which_a_link_in_the_text_leads_is_refused(folder, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    loading.check_apart(runs / "1", folder)
    (folder / "linked").symlink_to(runs)
    with pytest.raises(ValueError, match="must not lie in corpus="):
        loading.check_apart(runs / "1", folder)
    with pytest.raises(ValueError, match="must not lie in corpus="):
        loading.check_apart(folder / "linked" / "1", folder)
    loading.check_apart(runs / "1", folder / "missing")  # which is refused when it is read


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seq_len": 4003}, "seq_len=4003 must be under the number of tokens, 4003"),
        ({"seq_len": 0}, "seq_len=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"shards": 3}, "batch_size=4 must be a multiple of shards=3"),
        ({"shards": 0}, "batch_size=4 must be a multiple of shards=0"),
        ({"shard": 2, "shards": 2}, r"shard=2 must be in \[0, shards=2\)"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"vocab_size": 4000}, r"tokens\[4000\]=4000 must be in \[0, vocab_size=4000\)"),
    ],
)
def test_what_gives_no_batches_is_refused_at_the_call(changes, message):
    with pytest.raises(ValueError, match=message):
        batches(**changes)


@pytest.mark.parametrize("tokens", [np.full(99, 0.7), np.zeros((99, 2), np.int32)])
def test_numbers_with_a_fraction_and_rows_of_numbers_are_no_tokens(tokens):
    sizes = dict(batch_size=2, seq_len=4, seed=0, vocab_size=9)
    message = r"tokens of shape .* and dtype .* must be integers \[T\]"
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(loading.batches)(tokens, **sizes)  # without the tests' checks of types
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(data.batches)(tokens, steps=1, **sizes)


def test_a_negative_token_and_a_negative_number_ahead_are_refused(rows):
    with pytest.raises(ValueError, match=r"tokens\[1\]=-5 must be in"):
        loading.batches(np.array([3, -5, 4, 1]), batch_size=1, seq_len=2, seed=0, vocab_size=10)
    with pytest.raises(ValueError, match="ahead=-1 must be 0 or more"):
        loading.to_devices(batches(), rows, ahead=-1)
