"""Batches of a training run: shuffled, divided among processes, restorable, sent ahead.

    tokens = data.tokens("train")           # memory-mapped: read where a batch needs it
    batches = loading.batches(tokens, batch_size=8, seq_len=256, seed=0, vocab_size=2048)
    batches = loading.DeviceBatches(batches, sharding)
    batch = next(batches)                   # endless
    state = batches.get_state()             # belongs into a checkpoint, with the parameters

Documents are packed: they stand one after another, each closed by `END`, in one circular
stream. The stream is cut into windows wherever the cuts fall, so no label is padding, and
attention sees all that stands before in its window, even another document. Each epoch cuts at
other places and takes the windows in another order.

The pipeline is Grain's (https://google-grain.readthedocs.io). A batch follows from its number
alone, so the state is that number, and a run may go on with another number of processes.
"""

import collections
import contextlib
import functools
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Integer

from course_lib import files
from course_lib.text import data

AHEAD = 2  # batches on their way to the devices; each takes memory there
State = dict[str, Any]


def identity(tokens: Integer[np.ndarray, "T"]) -> dict[str, int]:
    """Returns the number of tokens and their CRC-32, which do not depend on where they lie."""
    return {"tokens": len(tokens), "crc32": zlib.crc32(np.ascontiguousarray(tokens))}


def check_apart(folder: pathlib.Path, corpus: data.Corpus) -> None:
    """Refuses a run folder inside of a corpus, or in a folder that a link in the corpus leads
    to: a run that goes on would read its own files as text.
    """
    if corpus in ("shipped", "stdlib"):
        return
    with contextlib.suppress(OSError):  # `data.tokens` reports a folder that cannot be read
        for inner, _ in files.folders(pathlib.Path(corpus)):
            if folder.resolve().is_relative_to(inner.resolve()):
                raise ValueError(
                    f"folder={str(folder)!r} must not lie in corpus={str(corpus)!r}: what a run"
                    " writes would be read as text when it goes on; take another --run"
                )


def batches(
    tokens: Integer[np.ndarray, "T"],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    vocab_size: int,
    shard: int = 0,
    shards: int = 1,
) -> grain.DatasetIterator:
    """Returns an endless iterator of `data.Batch`, in NumPy. Its `get_state()` is JSON, and
    `set_state(state)` goes back there.

    An epoch has T // L windows, and each comes once. A batch may hold the end of one epoch and
    the start of the next. The order is that of global batches: with n shards, shard p has the
    rows from p * B / n to (p + 1) * B / n of each. One thread reads ahead.

    Args:
      tokens: a split, as `data.tokens` returns it.
      batch_size: B windows per batch, of all shards together.
      seq_len: L tokens per window.
      seed: of the cuts and the order.
      vocab_size: V; every token must be below it. All tokens are read once to check that.
      shard: which part of each batch, from 0.
      shards: number of parts; see `shard_of`.

    Raises:
      ValueError: at the call, if the tokens do not fill one window, one is outside the
        vocabulary, the seed is negative, B or L is below 1, or a batch has no such part.
    """
    data.check_windows(tokens, batch_size, seq_len, vocab_size)
    if seed < 0:
        raise ValueError(f"seed={seed} must be 0 or more: random numbers begin there")
    if shards < 1 or batch_size % shards:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of shards={shards}: each process has"
            " the same number of rows"
        )
    if not 0 <= shard < shards:
        raise ValueError(
            f"shard={shard} must be in [0, shards={shards}): there is no such part of a batch"
        )

    count = len(tokens) // seq_len
    offsets = np.arange(seq_len + 1)

    def window(number, place):
        start = _start(seed, number // count, len(tokens)) + place * seq_len
        return tokens[(start + offsets) % len(tokens)]

    # Grain adds the epoch to the seed of its order: with seeds 1 and 2 as they are, one run's
    # second epoch would have the order of the other's first.
    order = int(np.random.SeedSequence(seed).generate_state(1)[0])
    windows = grain.MapDataset.range(count).shuffle(seed=order).repeat().map_with_index(window)
    # One part per shard makes a global batch.
    parts = windows.batch(batch_size // shards, drop_remainder=True)
    parts = parts[shard::shards].map(data.of_windows)
    return iter(parts.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


@functools.lru_cache(maxsize=16)
def _start(seed: int, epoch: int, length: int) -> int:
    """Returns where in the stream the first window of an epoch begins."""
    return int(np.random.default_rng([seed, epoch]).integers(length))


def shard_of(
    sharding: jax.sharding.Sharding,
    batch_size: int,
    seq_len: int,
    devices: Iterable[jax.Device] | None = None,
) -> tuple[int, int]:
    """Returns `(shard, shards)` for `batches`: which rows of a batch [B, L] some devices hold.

    Processes that divide the model rather than the batch have the same shard.

    Args:
      sharding: of a batch.
      batch_size: B.
      seq_len: L.
      devices: by default those of this process.

    Raises:
      ValueError: if those rows are not one of several parts of equal size.
    """
    devices = sharding.addressable_devices if devices is None else devices
    indices = sharding.devices_indices_map((batch_size, seq_len))
    rows = {indices[device][0].indices(batch_size)[:2] for device in devices}
    first, last, size = min(rows)[0], max(rows)[1], sum(end - start for start, end in rows)
    if size != last - first or batch_size % size or first % size:
        raise ValueError(
            f"sharding={sharding} must give a process one part of a batch, not the rows"
            f" {sorted(rows)} of {batch_size}: make the mesh from jax.devices() in their order,"
            " with the axis of the batch first"
        )
    return first // size, batch_size // size


class DeviceBatches(Iterator[data.Batch]):
    """The same batches as global `jax.Array`s, of which `AHEAD` are sent ahead (prefetch).

    Args:
      iterator: of `batches`, with this process' `shard_of` the sharding.
      sharding: of the batch; its first dimension is B.
    """

    def __init__(self, iterator: grain.DatasetIterator, sharding: jax.sharding.Sharding):
        self._iterator, self._sharding = iterator, sharding
        self._ready: collections.deque[tuple[data.Batch, State]] = collections.deque()
        self._state: State = iterator.get_state()

    def __next__(self) -> data.Batch:
        while len(self._ready) <= AHEAD:
            # Returns before the copy is done.
            batch = jax.make_array_from_process_local_data(self._sharding, next(self._iterator))
            self._ready.append((batch, self._iterator.get_state()))
        batch, self._state = self._ready.popleft()
        return batch

    def get_state(self) -> State:
        """Returns the state after the last batch that `next` returned: none of those ahead."""
        return dict(self._state)

    def set_state(self, state: State) -> None:
        """Goes to a state, and drops the batches that were sent ahead."""
        self._iterator.set_state(state)
        self._ready.clear()
        self._state = dict(state)
