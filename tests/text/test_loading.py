"""Laws of token files, and of the batches that are read from them."""

import inspect
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from course_lib.many_devices import meshes
from course_lib.text import loading

TOKENS = np.arange(4003, dtype=np.uint16)  # each token is its own place
SIZES = dict(batch_size=4, seq_len=8, vocab_size=4003)
WINDOWS = 4003 // 8


pytestmark = pytest.mark.usefixtures("cache")


def batches(seed=0, **changes):
    return loading.batches(TOKENS, seed=seed, **SIZES | changes)


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def assert_equal(first, second):
    assert len(first) == len(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def starts(taken):
    return np.concatenate([batch.inputs[:, 0] for batch in taken])


def together(iterators):
    """Returns the batch of which each process has a part."""
    return jax.tree.map(lambda *rows: np.concatenate(rows), *map(next, iterators))


def test_the_same_seed_gives_the_same_batches_and_another_one_others():
    first = take(batches(), 20)
    assert_equal(take(batches(), 20), first)
    assert set(starts(take(batches(seed=1), 20))) != set(starts(first))


def test_a_label_is_the_token_after_its_input_around_the_end_of_the_stream_too():
    for batch in take(batches(), 2 * WINDOWS // 4):
        kinds = [(leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(batch)]
        assert kinds == [(kind, (4, 8)) for kind in (np.int32, np.int32, np.float32)]
        np.testing.assert_array_equal(batch.labels, (batch.inputs + 1) % len(TOKENS))
        following = (batch.inputs[:, :1] + np.arange(8)) % len(TOKENS)
        np.testing.assert_array_equal(batch.inputs, following)
        assert (batch.weights == 1).all()


def test_an_epoch_holds_every_window_once_and_the_next_one_cuts_and_orders_them_otherwise():
    epochs = [batch.inputs[:, 0] for batch in take(batches(batch_size=WINDOWS), 3)]
    for epoch in epochs:
        gaps = sorted(np.diff(np.sort(epoch)))
        # the larger one where the circle is cut
        assert gaps[:-1] == [8] * (WINDOWS - 2) and gaps[-1] in (8, 8 + 4003 % 8)
    ranks = [tuple(np.argsort(epoch)) for epoch in epochs]
    assert len(set(ranks)) == len({epoch.min() for epoch in epochs}) == 3


def test_no_epoch_of_a_seed_has_the_order_of_an_epoch_of_another_seed():
    """Grain shuffles epoch e with seed + e: a plain seed 1 would begin as seed 0 goes on."""
    epochs = [
        batch.inputs[:, 0].astype(int)
        for seed in range(3)
        for batch in take(batches(seed=seed, batch_size=WINDOWS), 3)
    ]
    # the steps from window to window, wherever an epoch makes its first cut
    orders = {tuple(np.diff(epoch) % len(TOKENS)) for epoch in epochs}
    assert len(orders) == len(epochs)


def test_a_batch_may_hold_the_end_of_one_epoch_and_the_start_of_the_next():
    epochs = starts(take(batches(batch_size=WINDOWS), 2))
    np.testing.assert_array_equal(starts(take(batches(batch_size=7), 100)), epochs[:700])


@pytest.mark.parametrize("before, after", [(1, 2), (4, 2), (2, 1)])
def test_a_state_leads_to_the_batches_that_came_after_it_on_any_number_of_processes(
    before, after
):
    unbroken = take(batches(), 12)
    running = [batches(shard=shard, shards=before) for shard in range(before)]
    assert_equal([together(running) for _ in range(7)], unbroken[:7])
    # one state, whichever process saves it
    (state,) = {json.dumps(iterator.get_state()) for iterator in running}
    resumed = [batches(shard=shard, shards=after) for shard in range(after)]
    for iterator in resumed:
        next(iterator)
        iterator.set_state(json.loads(state))
    assert_equal([together(resumed) for _ in range(5)], unbroken[7:])


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
    taken = take(loading.DeviceBatches(batches(), rows), 10)
    assert all(leaf.sharding.is_equivalent_to(rows, 2) for leaf in jax.tree.leaves(taken))
    assert taken[0].inputs.addressable_shards[0].data.shape == (1, 8)
    assert_equal(jax.device_get(taken), take(batches(), 10))


def test_the_state_on_devices_is_that_of_the_last_batch_handed_out(rows):
    unbroken = take(batches(), 12)
    iterator = loading.DeviceBatches(batches(), rows)
    assert iterator.get_state() == batches().get_state()
    take(iterator, 5)
    state = json.loads(json.dumps(iterator.get_state()))
    assert_equal(jax.device_get(take(iterator, 2)), unbroken[5:7])
    iterator.set_state(state)
    assert iterator.get_state() == state
    assert_equal(jax.device_get(take(iterator, 7)), unbroken[5:])


def test_a_process_is_the_shard_whose_rows_its_devices_hold(rows):
    def shard(devices=None):
        return loading.shard_of(rows, 8, 16, devices)

    devices = rows.mesh.devices
    assert shard() == (0, 1)
    assert [shard(devices[half].flat) for half in (slice(2), slice(2, 4))] == [(0, 2), (1, 2)]
    # these divide the model
    assert [shard(devices[:, half]) for half in (0, 1)] == [(0, 1), (0, 1)]
    for some, held in (([0, 3], "(0, 2), (6, 8)"), ([1, 2], "(2, 4), (4, 6)")):
        told = f"one of several equal parts of a batch, not the rows [{held}] of 8"
        with pytest.raises(ValueError, match=re.escape(told)):
            shard(devices[some].flat)


def test_a_run_folder_to_which_a_link_in_the_text_leads_is_refused(tmp_path):
    folder, runs = tmp_path / "text", tmp_path / "runs"
    folder.mkdir()
    runs.mkdir()
    loading.check_apart(runs / "1", folder)
    (folder / "linked").symlink_to(runs)
    with pytest.raises(ValueError, match="must not lie in corpus="):
        loading.check_apart(runs / "1", folder)
    with pytest.raises(ValueError, match="must not lie in corpus="):
        loading.check_apart(folder / "linked" / "1", folder)
    loading.check_apart(runs / "1", folder / "missing")  # which is refused when it is read


BAD = [
    ({"seq_len": 4003}, "seq_len=4003 must be under the number of tokens, 4003"),
    ({"shards": 3}, "batch_size=4 must be a multiple of shards=3"),
    ({"shard": 2, "shards": 2}, "shard=2"),
    ({"vocab_size": 4000}, r"tokens\[4000\]=4000 must be in \[0, vocab_size=4000\)"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_what_gives_no_batches_is_refused_at_the_call(changes, message):
    with pytest.raises(ValueError, match=message):
        batches(**changes)


def test_numbers_with_a_fraction_are_no_tokens():
    # without the tests' checks of types
    make = inspect.unwrap(loading.batches)
    with pytest.raises(ValueError, match="must be integers"):
        make(np.full(99, 0.7), batch_size=2, seq_len=4, seed=0, vocab_size=9)
