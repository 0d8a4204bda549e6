"""Batches of a training run: shuffled, divided among processes, restorable, prefetched.

    tokens = data.tokens("train")           # memory-mapped: read where a batch needs it
    batches = loading.batches(tokens, batch_size=8, seq_len=256, seed=0, vocab_size=2048)
    batches = loading.DeviceBatches(batches, sharding)
    batch = next(batches)                   # endless
    state = batches.get_state()             # save it in the checkpoint, with the parameters

Documents are packed: they follow one another in one circular stream, each ending with `END`.
The stream is cut into windows of equal length, also in the middle of a document. So no label is
padding, and attention sees all earlier tokens in its window, also those of another document.
Each epoch cuts at other places and takes the windows in another order.

The pipeline is Grain's (https://google-grain.readthedocs.io). A batch depends only on its
number. So the state is that number, and a run may resume with another number of processes.
"""

import collections
import contextlib
import functools
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Integer

from course_lib import extras, files
from course_lib.text import data

with extras.needed("training"):
    import grain

AHEAD = 2  # batches prefetched beyond the one that `next` returns; each takes device memory
State = dict[str, Any]


def identity(tokens: Integer[np.ndarray, "T"]) -> dict[str, int]:
    """Returns the number of tokens and their CRC-32, which stay the same if the files move."""
    return {"tokens": len(tokens), "crc32": zlib.crc32(np.ascontiguousarray(tokens).data)}


def check_apart(folder: pathlib.Path, corpus: data.Corpus) -> None:
    """Refuses a run folder that the corpus contains or links to: it would become text."""
    if corpus == "shipped":
        return
    with contextlib.suppress(OSError):  # `data.tokens` reports a folder that cannot be read
        for inner, _ in files.folders(pathlib.Path(corpus)):
            if folder.resolve().is_relative_to(inner.resolve()):
                raise ValueError(
                    f"folder={str(folder)!r} must not lie in corpus={str(corpus)!r}: when the"
                    " run resumes, it would read its own files as text; take another --run"
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
    """Returns an endless iterator of `data.Batch`, in NumPy. Its `get_state()` returns a dict
    that JSON can store, and `set_state(state)` moves the iterator to that place.

    An epoch has T // L windows, and each comes once. A batch may contain the end of one epoch
    and the start of the next. The global batches [B, L] are the same for every number of
    shards: of n shards, shard p has the rows p * B / n to (p + 1) * B / n of each batch. See
    `shard_of`. One thread prefetches. The call reads all tokens once to check them.
    """
    data.check_windows(tokens, batch_size, seq_len, vocab_size)
    if shards < 1 or batch_size % shards or not 0 <= shard < shards:
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of shards={shards}, and"
            f" shard={shard} one of them: each process has the same number of rows"
        )

    count = len(tokens) // seq_len
    offsets = np.arange(seq_len + 1)

    def window(number, place):
        start = _start(seed, number // count, len(tokens)) + place * seq_len
        return tokens[(start + offsets) % len(tokens)]

    # Grain shuffles epoch e with seed + e. With plain seeds 1 and 2, the second epoch of run 1
    # would have the order of the first epoch of run 2. Hashing the seed avoids this.
    order = int(np.random.SeedSequence(seed).generate_state(1)[0])
    windows = grain.MapDataset.range(count).shuffle(seed=order).repeat().map_with_index(window)
    # `shards` consecutive parts make one global batch.
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
    """Returns `(shard, shards)` for `batches`: the part of a batch [B, L] on these devices (by
    default this process's). Processes that divide the model, not the batch, get the same shard.
    """
    devices = sharding.addressable_devices if devices is None else devices
    indices = sharding.devices_indices_map((batch_size, seq_len))
    rows = {indices[device][0].indices(batch_size)[:2] for device in devices}
    first, last, size = min(rows)[0], max(rows)[1], sum(end - start for start, end in rows)
    if size != last - first or batch_size % size or first % size:
        raise ValueError(
            f"sharding={sharding} must give a process one of several equal parts of a batch,"
            f" not the rows {sorted(rows)} of {batch_size}: make the mesh from jax.devices() in"
            " their order, with the axis of the batch first"
        )
    return first // size, batch_size // size


class DeviceBatches(Iterator[data.Batch]):
    """Turns the batches of an iterator from `batches`, with the shard that `shard_of` returns,
    into global `jax.Array`s, and sends `AHEAD` of them to the devices in advance (prefetch).
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
        """Returns the state after the last batch that `next` returned, not a prefetched one."""
        return dict(self._state)

    def set_state(self, state: State) -> None:
        """Goes to a state, and drops the prefetched batches."""
        self._iterator.set_state(state)
        self._ready.clear()
        self._state = dict(state)
