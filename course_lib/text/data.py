"""Text for the course: a corpus, its tokenizer, and batches of tokens.

The corpus of the package (`course_lib/text/corpus/SOURCE.md`) is an extract of CPython 3.13.0:
topics of its language reference (English) and modules of its standard library (Python): real
text, but narrow. A model learns to write manuals and code from it.

Tokens are byte-level byte pairs (Sennrich et al., 2016, https://arxiv.org/abs/1508.07909),
learned from the training split.
"""

import gzip
import hashlib
import importlib.resources
import io
import json
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from flax import struct
from jaxtyping import Float, Integer, UInt16

from course_lib import files

CORPUS = "cpython-3.13.0.jsonl.gz"
# The checksum of the text: see tools/build_corpus.py.
CORPUS_SHA256 = "998bb1245ab73c50003ee22e0757a0e439482143df8be21ead9e2920a4cb1ace"
VOCAB_SIZE = 2048
TOKENIZER = [CORPUS_SHA256, tokenizers.__version__, VOCAB_SIZE]  # what it follows from
END = "<|end|>"  # stands after each document; token 0
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Document:
    """A file of a corpus."""

    name: str
    text: str


@struct.dataclass
class Batch:
    """What a train step learns from: examples, their labels, and how much each label counts.

    Attributes:
      inputs: int32 tokens [B, L] of a language model, or float features [B, D] of a classifier.
      labels: int32 [B, L], the token after each input; or [B], the classes.
      weights: float32, shaped like labels: 1, or 0 where a label is only padding.
    """

    inputs: Any
    labels: Any
    weights: Any


def documents(split: str, corpus: str | os.PathLike[str] = "shipped") -> list[Document]:
    """Returns the documents of one split, in the order of their names.

    Files are split, not lines: a tenth of them, those whose names have the smallest CRC-32, are
    for validation.

    Args:
      split: "train" or "validation".
      corpus: "shipped"; "stdlib", the standard library of this machine's Python, larger, and
        not the same on every machine; or a folder of UTF-8 text, read with its subfolders and
        those that links lead to, each once.

    Raises:
      ValueError: if the split is unknown, or the folder is missing, has fewer than two files,
        one that is not UTF-8 or holds `END`, or what `files.below` refuses, or if all files of
        the split are empty.
    """
    check_split(split)
    return _of_split(split, _read(corpus), corpus)


def check_split(split: str) -> None:
    """Refuses a split that there is not."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r} must be one of {SPLITS}")


def _of_split(
    split: str, everything: list[Document], corpus: str | os.PathLike[str]
) -> list[Document]:
    by_name = {document.name: document for document in everything}
    chosen = [by_name[name] for name in names_of_split(split, by_name, corpus)]
    if not any(document.text for document in chosen):
        raise ValueError(
            f"corpus={str(corpus)!r} must hold text: the files of split={split!r} are all empty"
        )
    return chosen


def names_of_split(
    split: str, names: Collection[str], corpus: str | os.PathLike[str]
) -> list[str]:
    """Returns the names that are of one split, sorted, as `documents` says."""
    if len(names) < 2:
        why = (
            "one is for validation"
            if names
            else "it is empty, as a folder is whose disk is not mounted"
        )
        raise ValueError(
            f"corpus={str(corpus)!r} must hold two files or more, it has {len(names)}: {why}"
        )
    by_hash = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    count = max(1, len(names) // 10)
    return sorted(by_hash[:count] if split == "validation" else by_hash[count:])


def _read(corpus: str | os.PathLike[str]) -> list[Document]:
    if corpus == "shipped":
        packed = (
            importlib.resources.files("course_lib.text").joinpath("corpus", CORPUS).read_bytes()
        )
        return [Document(**json.loads(line)) for line in gzip.decompress(packed).splitlines()]
    return [read_document(name, path, corpus) for name, path in text_files(corpus).items()]


def text_files(corpus: str | os.PathLike[str]) -> dict[str, pathlib.Path]:
    """Returns the files of a corpus that is not the shipped one: their names in its folder, and
    where they are.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib") if corpus == "stdlib" else corpus)
    if not os.path.isdir(folder):  # pathlib's would raise where a folder above may not be read
        raise ValueError(
            f"corpus={str(corpus)!r}: no such folder to read; only 'shipped' and 'stdlib' are"
            " names of others"
        )
    if corpus == "stdlib":
        left_out = {"test", "tests", "site-packages", "dist-packages", "idlelib"}
        modules = sorted(path for path in folder.rglob("*.py") if path.is_file())
        found = [path for path in modules if not left_out & set(path.relative_to(folder).parts)]
    else:
        try:
            found = files.below(folder)
        except ValueError as error:
            raise ValueError(f"corpus={str(corpus)!r}: {error}") from None
    return {path.relative_to(folder).as_posix(): path for path in found}


def read_document(name: str, path: pathlib.Path, corpus: str | os.PathLike[str]) -> Document:
    """Returns one of `text_files`, read and checked."""
    try:
        document = Document(name, path.read_bytes().decode("utf-8"))
    except (UnicodeDecodeError, PermissionError) as error:
        raise ValueError(
            f"corpus={str(corpus)!r}: {name!r} is not UTF-8, or unreadable ({error}); mend or"
            " remove it"
        ) from None
    if END in document.text:
        raise ValueError(
            f"corpus={str(corpus)!r}: {name!r} holds {END!r}, which ends a document; remove it"
        )
    return document


def tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer: `.encode(text).ids` and `.decode(ids)`; any text without `END`
    survives the round trip.

    It was trained on the shipped corpus' training split, whatever corpus it is then used on:
    2048 tokens, of which 256 are the bytes and token 0 ends a document. The first call trains
    it, in seconds, and caches it (see `tokens`).
    """
    return tokenizers.Tokenizer.from_str(_prepared("shipped")["tokenizer"].tobytes().decode())


def tokens(split: str, corpus: str | os.PathLike[str] = "shipped") -> UInt16[np.ndarray, "T"]:
    """Returns the tokens of one split, document after document, each closed by the token `END`.

    The first call prepares them, in seconds, and caches them under `$COURSE_CACHE`, or the
    user's cache folder, in a file that is there whole or not at all. A damaged one is made
    again, and it is said.

    Args:
      split: "train" or "validation".
      corpus: as of `documents`.

    Raises:
      ValueError: as `documents`.
    """
    check_split(split)
    return _prepared(corpus)[split]


def _train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def _prepare(
    everything: list[Document], corpus: str | os.PathLike[str]
) -> dict[str, np.ndarray]:
    """Returns tokens of both splits, and with the shipped corpus the tokenizer as JSON."""
    texts = {
        split: [document.text for document in _of_split(split, everything, corpus)]
        for split in SPLITS
    }
    model = _train_tokenizer(texts["train"]) if corpus == "shipped" else tokenizer()
    prepared = {split: encode(model, texts[split]) for split in SPLITS}
    if corpus == "shipped":
        prepared["tokenizer"] = np.frombuffer(model.to_str().encode(), np.uint8)
    return prepared


def encode(model: tokenizers.Tokenizer, texts: list[str]) -> UInt16[np.ndarray, "T"]:
    """Returns the tokens of documents, one after another, each closed by `END`."""
    end = model.token_to_id(END)
    encoded = model.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, end], np.uint16) for one in encoded])


def _prepared(corpus: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    everything = _read(corpus)
    settings = [*TOKENIZER, *[(doc.name, doc.text) for doc in everything]]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    path = files.cache_folder() / f"tokens-{key}.npz"
    if path.is_file():
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() == stored[:32]:
            with np.load(io.BytesIO(stored[32:])) as arrays:
                return dict(arrays)
        print(f"the cached tokens {path.name} are damaged: making them again")
    # From the same texts as the key: files may be written meanwhile.
    prepared = _prepare(everything, corpus)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **prepared)
    try:
        with files.whole_file(path) as file:
            file.write(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
    except OSError as error:
        print(f"the tokens cannot be cached ({error}); COURSE_CACHE names another folder")
    return prepared


def check_tokens(tokens: Integer[np.ndarray, "..."], vocab_size: int) -> None:
    """Refuses tokens that the model has no embedding for.

    Inside a compiled step an index out of range is no error: the embedding reads NaN, and one
    step later every parameter is NaN. So it is checked here.

    Raises:
      ValueError: naming the first such token and its position.
    """
    if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab_size):
        position = tuple(map(int, np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]))
        raise ValueError(
            f"tokens[{', '.join(map(str, position))}]={int(tokens[position])} must be in [0,"
            f" vocab_size={vocab_size}): the model has no such embedding; take a larger"
            " vocab_size, or this model's tokenizer"
        )


def batches(
    tokens: Integer[np.ndarray, "T"],
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    steps: int,
    vocab_size: int,
) -> Iterator[Batch]:
    """Yields `steps` batches of windows from anywhere in the tokens, the same for the same
    seed.

    Args:
      tokens: a split.
      batch_size: B windows a batch.
      seq_len: L tokens a window.
      seed: of the windows' places.
      steps: how many batches.
      vocab_size: V that every token must be under.

    Raises:
      ValueError: at the call, if no window fits, a token is outside the vocabulary, or B, L or
        `steps` is below 1.
    """
    check_sizes(batch_size, seq_len, tokens)
    check_tokens(tokens, vocab_size)
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1: there would be no batch")
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"seq_len={seq_len} must be under the number of tokens, {len(tokens)}: no window"
            " fits"
        )
    starts = np.random.default_rng(seed).integers(
        0, len(tokens) - seq_len, (steps, batch_size, 1)
    )
    return (
        _windows(tokens, start + np.arange(seq_len), np.ones((batch_size, seq_len), np.float32))
        for start in starts
    )


def check_sizes(batch_size: int, seq_len: int, tokens: np.ndarray) -> None:
    """Refuses a batch without labels, and what is no stream of tokens: numbers with a fraction
    would be cut off.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} must be integers [T], one"
            " after another"
        )
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1: a batch would hold no label")


def _windows(
    tokens: Integer[np.ndarray, "T"],
    positions: Integer[np.ndarray, "B L"],
    weights: Float[np.ndarray, "B L"],
) -> Batch:
    inputs, labels = tokens[positions].astype(np.int32), tokens[positions + 1].astype(np.int32)
    return Batch(inputs=inputs, labels=labels, weights=weights)


def validation_batches(
    tokens: Integer[np.ndarray, "T"], *, batch_size: int, seq_len: int, vocab_size: int
) -> Iterator[Batch]:
    """Yields batches that hold every token but the first exactly once as a label. Each is made
    when it is asked for.

    What is missing to the last full batch is padding, of weight 0: a mean weighted by the
    labels' weights is exact.

    Args:
      tokens: a split.
      batch_size: B windows a batch.
      seq_len: L tokens a window.
      vocab_size: V that every token must be under.

    Raises:
      ValueError: if there are fewer than two tokens, one is outside the vocabulary, or B or L
        is below 1.
    """
    check_sizes(batch_size, seq_len, tokens)
    check_tokens(tokens, vocab_size)
    labels, size = len(tokens) - 1, batch_size * seq_len
    if labels < 1:
        raise ValueError(
            f"tokens must be two or more, not {len(tokens)}: the second is the first label"
        )

    def batch(start):
        positions = start + np.arange(size).reshape(batch_size, seq_len)
        weights = (positions < labels).astype(np.float32)
        return _windows(tokens, np.where(weights > 0, positions, 0), weights)

    return map(batch, range(0, labels, size))
