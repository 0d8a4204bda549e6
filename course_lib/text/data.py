"""Text for the course: a corpus, its tokenizer, and batches of tokens.

The package ships a corpus, an extract of CPython 3.13.0 (`course_lib/text/corpus/SOURCE.md`):
topics of its language reference (English) and modules of its standard library (Python). The
text is real but narrow: a model learns to write manuals and code from it.

Tokens are byte-level byte pairs (Sennrich et al., 2016, https://arxiv.org/abs/1508.07909),
learned from the training split.
"""

import gzip
import hashlib
import importlib.resources
import itertools
import json
import os
import pathlib
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from flax import struct
from jaxtyping import Integer, UInt8, UInt16

from course_lib import files

CORPUS = "cpython-3.13.0.jsonl.gz"
# The checksum of the text: see corpus/SOURCE.md.
CORPUS_SHA256 = "998bb1245ab73c50003ee22e0757a0e439482143df8be21ead9e2920a4cb1ace"
VOCAB_SIZE = 2048
END = "<|end|>"  # ends each document; token 0
SPLITS = ("train", "validation")
GROUP = 2**24  # characters that are tokenized at a time, on all cores
Corpus = str | os.PathLike[str]


@dataclass(frozen=True)
class Document:
    """A file of a corpus."""

    name: str
    text: str


@struct.dataclass
class Batch:
    """Examples, their labels, and how much each label counts."""

    inputs: Any  # int32 tokens [B, L] of a language model, or features [B, D] of a classifier
    labels: Any  # int32 [B, L], the token after each input; or [B], the classes
    weights: Any  # float32, shaped like labels: 1, or 0 where a label is only padding


def documents(split: str, corpus: Corpus = "shipped") -> list[Document]:
    """Returns the documents of one split ("train" or "validation"), sorted by name.

    A tenth of the files, those whose names have the smallest CRC-32, are for validation. The
    corpus is "shipped", or a folder of UTF-8 text with its subfolders (also linked ones), but
    no names that begin with "." or end with "~". Files of equal text are in one split.
    """
    return list(_documents(split, corpus))


def _documents(split: str, corpus: Corpus) -> Iterator[Document]:
    """Reads each file of a folder once for its checksum, and once when it is its turn."""
    if corpus == "shipped":
        folder = importlib.resources.files("course_lib.text").joinpath("corpus")
        lines = gzip.decompress(folder.joinpath(CORPUS).read_bytes()).splitlines()
        shipped = {line["name"]: line["text"] for line in map(json.loads, lines)}
        yield from (Document(name, shipped[name]) for name in _names(split, shipped, corpus))
        return
    first: dict[bytes, str] = {}
    paths, alike = text_files(corpus), {}
    for name in paths:
        checksum = hashlib.sha256(_read(name, paths, corpus).encode()).digest()
        alike[name] = first.setdefault(checksum, name)
    chosen = {*_names(split, first.values(), corpus)}
    names = [name for name in paths if alike[name] in chosen]
    if not any(paths[name].stat().st_size for name in names):
        raise ValueError(
            f"corpus={str(corpus)!r} must hold text: the files of split={split!r} are all empty"
        )
    yield from (Document(name, _read(name, paths, corpus)) for name in names)


def _read(name: str, paths: dict[str, pathlib.Path], corpus: Corpus) -> str:
    try:
        text = paths[name].read_bytes().decode("utf-8-sig")
        bad = f"holds {END!r}, which ends a document" if END in text else ""
        bad = "holds zero bytes, as no text does" if "\0" in text else bad
    except (UnicodeDecodeError, PermissionError) as error:
        bad = f"is not UTF-8, or unreadable ({error})"
    if bad:
        raise ValueError(f"corpus={str(corpus)!r}: {name!r} {bad}; mend or remove it")
    return text


def _names(split: str, names: Collection[str], corpus: Corpus) -> list[str]:
    if split not in SPLITS:
        raise ValueError(f"split={split!r} must be one of {SPLITS}")
    if len(names) < 2:
        why = "one is for validation" if names else "it is empty; is its disk mounted?"
        raise ValueError(
            f"corpus={str(corpus)!r} must hold two files or more that differ and are not"
            f" hidden, it has {len(names)}: {why}"
        )
    by_hash = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    count = max(1, len(names) // 10)
    return sorted(by_hash[:count] if split == "validation" else by_hash[count:])


def text_files(corpus: Corpus) -> dict[str, pathlib.Path]:
    folder = pathlib.Path(corpus)
    if not os.path.isdir(folder):  # pathlib's raises if a parent folder may not be read
        raise ValueError(
            f"corpus={str(corpus)!r}: no such folder to read; only 'shipped' is a name"
        )
    try:
        paths = sorted(inner / n for inner, names in files.folders(folder) for n in names)
        for path in paths:
            files.check_name(path)
            if not path.is_file():
                raise ValueError(
                    f"corpus={str(corpus)!r}: {str(path)!r} is neither a file nor a folder, or"
                    " a link that leads nowhere; remove it"
                )
    except PermissionError as error:
        raise ValueError(
            f"corpus={str(corpus)!r}: {str(error.filename)!r} may not be read; permit it, or"
            " take another folder"
        ) from error
    return {path.relative_to(folder).as_posix(): path for path in paths}


def tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer: `.encode(text).ids` and `.decode(ids)`; any text without `END`
    survives the round trip.

    Of its 2048 tokens 256 are the bytes, and token 0 ends a document. It is trained on the
    training split of the shipped corpus, whatever corpus it is then used on, by the first call.
    """

    def trained():
        texts = [document.text for document in documents("train")]
        yield np.frombuffer(_train_tokenizer(texts).to_str().encode(), np.uint8)

    stored = _cached(f"tokenizer-{_key('shipped')}.bin", trained())
    return tokenizers.Tokenizer.from_str(stored.tobytes().decode())


def _train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def tokens(split: str, corpus: Corpus = "shipped") -> UInt16[np.ndarray, "T"]:
    """Returns the tokens of one split, document after document, each closed by the token `END`.

    They are memory-mapped from a file under `$COURSE_CACHE`, or the user's cache folder, which
    the first call prepares. It is made again if a name, a size or a time of the corpus' files
    changes, or if its checksum does not agree. A corpus may be larger than the memory, a
    document may not.
    """
    key, model = _key(corpus), tokenizer()
    return _cached(f"tokens-{key}-{split}.bin", _encoded(split, corpus, model, key)).view("<u2")


def _key(corpus: Corpus) -> str:
    """Returns a hash of all that the tokens of a corpus follow from."""
    known: list[Any] = [CORPUS_SHA256, tokenizers.__version__, VOCAB_SIZE]
    known.append(corpus == "shipped" or "equal texts in one split")
    for name, path in ({} if corpus == "shipped" else text_files(corpus)).items():
        status = path.stat()
        known.append((name, str(path.absolute()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _encoded(
    split: str, corpus: Corpus, model: tokenizers.Tokenizer, key: str
) -> Iterator[np.ndarray]:
    size = 0

    def group(document):
        nonlocal size
        size += len(document.text)
        return size // GROUP

    for _, some in itertools.groupby(_documents(split, corpus), group):
        yield encode(model, [document.text for document in some]).astype("<u2")
    if _key(corpus) != key:
        raise OSError(f"corpus={str(corpus)!r} changed while it was read: call again")


def encode(model: tokenizers.Tokenizer, texts: list[str]) -> UInt16[np.ndarray, "T"]:
    """Returns the tokens of documents, one after another, each closed by `END`."""
    end = model.token_to_id(END)
    encoded = model.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, end], np.uint16) for one in encoded])


def _cached(name: str, pieces: Iterable[np.ndarray]) -> UInt8[np.ndarray, "_"]:
    """Maps a cached file, with its CRC-32 at the end; writes it first if missing or damaged."""
    path = files.cache_folder() / name
    try:
        if (stored := _stored(path)) is not None:
            return stored
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(path.parent, wait=True):
            if (stored := _stored(path)) is not None:  # another process has written it
                return stored
            if path.exists():
                print(f"the cached file {name} is damaged: making it again")
            checksum = 0
            with files.atomic_write(path) as file:
                for piece in pieces:
                    file.write(piece.tobytes())
                    checksum = zlib.crc32(piece.data, checksum)
                file.write(checksum.to_bytes(4, "little"))
            return np.memmap(path, np.uint8, "r")[:-4]
    except OSError as error:
        raise OSError(
            f"{path} cannot be prepared: {error}; COURSE_CACHE names another folder for it"
        ) from error


def _stored(path: pathlib.Path) -> UInt8[np.ndarray, "_"] | None:
    try:
        content = np.memmap(path, np.uint8, "r")
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: it is empty
        return None
    checksum = zlib.crc32(content[:-4].data).to_bytes(4, "little")
    return content[:-4] if content[-4:].tobytes() == checksum else None


def check_tokens(tokens: Integer[np.ndarray, "..."], vocab_size: int) -> None:
    """Refuses tokens without an embedding: in a compiled step they are no error, but NaN."""
    signed = tokens.dtype.kind == "i"
    if tokens.size and (tokens.max() >= vocab_size or (signed and tokens.min() < 0)):
        position = tuple(map(int, np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]))
        raise ValueError(
            f"tokens[{', '.join(map(str, position))}]={int(tokens[position])} must be in [0,"
            f" vocab_size={vocab_size}): the model has no such embedding; take a larger"
            " vocab_size, or this model's tokenizer"
        )


def check_windows(tokens: np.ndarray, batch_size: int, seq_len: int, vocab_size: int) -> None:
    """Refuses a stream of tokens that batches of windows cannot be cut from."""
    _check_stream(tokens, batch_size, seq_len, vocab_size)
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"seq_len={seq_len} must be under the number of tokens, {len(tokens)}: the text is"
            " too short for one window; take more text"
        )


def _check_stream(tokens: np.ndarray, batch_size: int, seq_len: int, vocab_size: int) -> None:
    # others would become integers, or batches of another rank, without a word
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} must be integers [T]"
        )
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1: a batch would hold no label")
    check_tokens(tokens, vocab_size)


def batches(
    tokens: Integer[np.ndarray, "T"],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    steps: int,
    vocab_size: int,
) -> Iterator[Batch]:
    """Yields `steps` batches [B, L] of windows from anywhere in the tokens of a split, the same
    for the same seed.
    """
    check_windows(tokens, batch_size, seq_len, vocab_size)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1: there would be no batch")
    starts = np.random.default_rng(seed).integers(
        0, len(tokens) - seq_len, (steps, batch_size, 1)
    )
    return (of_windows(tokens[start + np.arange(seq_len + 1)]) for start in starts)


def of_windows(windows: Integer[np.ndarray, "B _"]) -> Batch:
    """Returns the batch [B, L] of windows [B, L + 1]; all labels have weight 1."""
    inputs, labels = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
    return Batch(inputs=inputs, labels=labels, weights=np.ones(labels.shape, np.float32))


def validation_batches(
    tokens: Integer[np.ndarray, "T"], *, batch_size: int, seq_len: int, vocab_size: int
) -> Iterator[Batch]:
    """Yields batches that hold every token but the first exactly once as a label.

    The last batch is padded with labels of weight 0, so a mean weighted by the labels' weights
    is exact. Each batch is made when it is asked for.
    """
    _check_stream(tokens, batch_size, seq_len, vocab_size)
    labels, size = len(tokens) - 1, batch_size * seq_len
    if labels < 1:
        raise ValueError(f"tokens must be two or more, not {len(tokens)}: there is no label")

    def batch(start):
        positions = start + np.arange(size).reshape(batch_size, seq_len)
        weights = (positions < labels).astype(np.float32)
        positions = np.where(weights > 0, positions, 0)
        inputs, following = tokens[positions], tokens[positions + 1]
        return Batch(inputs.astype(np.int32), following.astype(np.int32), weights)

    return map(batch, range(0, labels, size))
