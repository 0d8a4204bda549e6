"""Text to train on: the tokens of a corpus (`text.documents`), and what cuts batches of them.

Tokens are byte-level byte pairs (Sennrich et al., 2016, https://arxiv.org/abs/1508.07909),
learned from the training split.
"""

import hashlib
import itertools
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt8

from course_lib import extras, files
from course_lib.text.batches import Batch as Batch
from course_lib.text.batches import batches as batches
from course_lib.text.batches import check_tokens as check_tokens
from course_lib.text.batches import check_windows as check_windows
from course_lib.text.batches import of_windows as of_windows
from course_lib.text.batches import validation_batches as validation_batches
from course_lib.text.documents import CORPUS as CORPUS
from course_lib.text.documents import CORPUS_SHA256, END, Corpus, each, text_files
from course_lib.text.documents import SPLITS as SPLITS
from course_lib.text.documents import Document as Document
from course_lib.text.documents import documents as documents

with extras.needed("training"):
    import tokenizers

VOCAB_SIZE = 2048  # of the course's tokenizer
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the token that ends a document, in tokenizers that people have."""
GROUP = 2**24  # characters that are tokenized at a time, on all cores


def tokenizer(
    name: str = "course", corpus: Corpus = "shipped", vocab_size: int = VOCAB_SIZE
) -> tokenizers.Tokenizer:
    """Returns a tokenizer: `.encode(text).ids` and `.decode(ids)`.

    Args:
      name: "course": 2,048 tokens, trained on the training split of the shipped corpus. "own":
        trained on the training split of `corpus`. Both are byte-level: any text without `END`
        survives the round trip. Else the path of a tokenizer.json of Hugging Face.
      corpus, vocab_size: for "own": the text, and how many tokens are made of it, at least 257.
    """
    if name not in ("course", "own"):
        try:
            return tokenizers.Tokenizer.from_file(name)
        except Exception as error:  # the package raises no narrower one
            raise ValueError(
                f"tokenizer={name!r} must be 'course', 'own' or a tokenizer.json: {error}"
            ) from None
    if name == "course":
        corpus, vocab_size = "shipped", VOCAB_SIZE
    elif not 257 <= vocab_size <= 2**16:
        raise ValueError(
            f"vocab_size={vocab_size} must be in [257, 65536] for tokenizer='own': 256 bytes,"
            f" {END!r}, and pairs"
        )

    def trained() -> Iterator[np.ndarray]:
        model = _train_tokenizer((one.text for one in each("train", corpus)), vocab_size)
        yield np.frombuffer(model.to_str().encode(), np.uint8)

    stored = _cached(f"tokenizer-{_key(corpus, vocab_size)}.bin", trained())
    model = tokenizers.Tokenizer.from_str(stored.tobytes().decode())
    if (found := model.get_vocab_size()) < vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} must be at most {found}: corpus={str(corpus)!r} has no"
            " more pairs"
        )
    return model


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model


def end_of(model: tokenizers.Tokenizer) -> int:
    """Returns the token that ends a document."""
    found = [token for name in ENDS if (token := model.token_to_id(name)) is not None]
    if not found:
        raise ValueError(f"the tokenizer must have one of {ENDS}: it ends a document")
    return found[0]


def tokens(
    split: str, corpus: Corpus = "shipped", model: tokenizers.Tokenizer | None = None
) -> Integer[np.ndarray, "T"]:
    """Returns the tokens of one split, document after document, each closed by the token that
    ends one: uint16, or uint32 if the tokenizer has more than 65,536. `model`: a tokenizer;
    None: the course's.

    They are memory-mapped from a file under `$COURSE_CACHE`, or the user's cache folder, which
    the first call prepares. It is made again if a name, a size or a time of the corpus' files
    changes, or if its checksum does not agree. A corpus may be larger than the memory, a
    document or a file of JSON lines may not.
    """
    model = tokenizer() if model is None else model
    key = _key(corpus, model.to_str())
    name = f"tokens-{key}-{split}.bin"
    return _cached(name, _encoded(split, corpus, model)).view(_dtype(model))


def _dtype(model: tokenizers.Tokenizer) -> str:
    return "<u2" if model.get_vocab_size() <= 2**16 else "<u4"


def _key(corpus: Corpus, *others: Any) -> str:
    """Returns a hash of all that the tokens of a corpus follow from."""
    known: list[Any] = [CORPUS_SHA256, tokenizers.__version__, corpus == "shipped", *others]
    for name, path in ({} if corpus == "shipped" else text_files(corpus)).items():
        status = path.stat()
        known.append((name, str(path.absolute()), status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _encoded(split: str, corpus: Corpus, model: tokenizers.Tokenizer) -> Iterator[np.ndarray]:
    size, key = 0, _key(corpus)

    def group(document):
        nonlocal size
        size += len(document.text)
        return size // GROUP

    for _, some in itertools.groupby(each(split, corpus), group):
        yield encode(model, [document.text for document in some])
    if _key(corpus) != key:
        raise OSError(f"corpus={str(corpus)!r} changed while it was read: call again")


def encode(model: tokenizers.Tokenizer, texts: list[str]) -> Integer[np.ndarray, "T"]:
    """Returns the tokens of documents, one after another, each closed by `end_of(model)`."""
    end, dtype = end_of(model), _dtype(model)
    encoded = model.encode_batch_fast(texts, add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, end], dtype) for one in encoded])


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
