"""Documents of a corpus: the shipped one, a folder of text, or a file.

The package ships an extract of CPython 3.13.0 (`course_lib/text/corpus/SOURCE.md`): topics of
its language reference (English) and modules of its standard library (Python). The text is real
but narrow: a model learns to write manuals and code from it.
"""

import functools
import gzip
import hashlib
import importlib.resources
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from course_lib import files

CORPUS = "cpython-3.13.0.jsonl.gz"
# of the text: see corpus/SOURCE.md
CORPUS_SHA256 = "998bb1245ab73c50003ee22e0757a0e439482143df8be21ead9e2920a4cb1ace"
END = "<|end|>"  # ends each document; token 0 of the course's tokenizer
SPLITS = ("train", "validation")
EMPTY = hashlib.sha256().digest()
Corpus = str | os.PathLike[str]


@dataclass(frozen=True)
class Document:
    """A file of a corpus."""

    name: str
    text: str


def documents(split: str, corpus: Corpus = "shipped") -> list[Document]:
    """Returns the documents of one split ("train" or "validation"), sorted by name.

    The corpus is "shipped"; or a folder of UTF-8 text with its subfolders (also linked ones),
    but no names that begin with "." or end with "~"; or a file of JSON lines (.jsonl or
    .jsonl.gz), each a document with "text" and perhaps a "name". A tenth of the documents,
    those whose names have the smallest CRC-32, are for validation. Documents of equal text are
    in one split. Any other file is one text, whose last tenth is for validation.
    """
    return list(each(split, corpus))


def each(split: str, corpus: Corpus) -> Iterator[Document]:
    """Reads each file of a folder once for its checksum, and once when it is its turn."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r} must be one of {SPLITS}")
    if corpus == "shipped":
        folder = importlib.resources.files("course_lib.text").joinpath("corpus")
        read = _lines(folder.joinpath(CORPUS).read_bytes(), CORPUS, corpus)
    elif os.path.isfile(corpus):
        [(name, path)] = text_files(corpus).items()
        if not name.endswith((".jsonl", ".jsonl.gz")):
            yield Document(name, _part(split, _read(path, name, corpus), corpus))
            return
        read = _lines(path.read_bytes(), name, corpus)
    else:
        read = {
            name: functools.partial(_read, path, name, corpus)
            for name, path in text_files(corpus).items()
        }
    first: dict[bytes, str] = {}
    checksums = {name: hashlib.sha256(text().encode()).digest() for name, text in read.items()}
    alike = {name: first.setdefault(checksum, name) for name, checksum in checksums.items()}
    chosen = {*_names(split, first.values(), corpus)}
    names = [name for name in sorted(read) if alike[name] in chosen]
    if not any(checksums[name] != EMPTY for name in names):
        raise ValueError(
            f"corpus={str(corpus)!r} must hold text: the files of split={split!r} are all empty"
        )
    yield from (Document(name, read[name]()) for name in names)


def _lines(content: bytes, name: str, corpus: Corpus) -> dict[str, Callable[[], str]]:
    """Returns a function for each document of a file of JSON lines, which returns its text."""
    found: dict[str, Callable[[], str]] = {}
    try:
        content = gzip.decompress(content) if name.endswith(".gz") else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"corpus={str(corpus)!r} cannot be unpacked: {error}") from None
    for number, line in enumerate(content.splitlines(), 1):
        try:
            document = json.loads(line)
            text, own = document["text"], str(document.get("name") or "")
            text.encode()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"corpus={str(corpus)!r}: line {number} must be an object with a string"
                f' "text" ({type(error).__name__}: {error})'
            ) from None
        _check_text(text, f"line {number}", corpus)
        own = f"{own or 'line'} {number:09d}" if not own or own in found else own
        found[own] = functools.partial(str, text)
    return found


def _part(split: str, text: str, corpus: Corpus) -> str:
    """Returns nine tenths of a text, or its last tenth; cut after a line that ends nearby."""
    tenth = len(text) / 10
    cut = text.rfind("\n", int(8 * tenth), int(9 * tenth)) + 1 or int(9 * tenth)
    if not text[:cut].strip() or not text[cut:].strip():
        raise ValueError(
            f"corpus={str(corpus)!r} must hold more text: its last tenth is for validation"
        )
    return text[:cut] if split == "train" else text[cut:]


def _read(path: pathlib.Path, name: str, corpus: Corpus) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, PermissionError) as error:
        raise ValueError(
            f"corpus={str(corpus)!r}: {name!r} is not UTF-8, or unreadable ({error}); mend or"
            " remove it"
        ) from None
    _check_text(text, repr(name), corpus)
    return text


def _check_text(text: str, name: str, corpus: Corpus) -> None:
    bad = f"holds {END!r}, which ends a document" if END in text else ""
    if bad := "holds zero bytes, as no text does" if "\0" in text else bad:
        raise ValueError(f"corpus={str(corpus)!r}: {name} {bad}; mend or remove it")


def _names(split: str, names: Collection[str], corpus: Corpus) -> list[str]:
    if len(names) < 2:
        why = "one is for validation" if names else "it is empty; is its disk mounted?"
        raise ValueError(
            f"corpus={str(corpus)!r} must hold two documents or more that differ and are not"
            f" hidden, or be one file; it has {len(names)}: {why}"
        )
    by_hash = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    count = max(1, len(names) // 10)
    return sorted(by_hash[:count] if split == "validation" else by_hash[count:])


def text_files(corpus: Corpus) -> dict[str, pathlib.Path]:
    """Returns the files of a corpus by their names in its folder; a single file by its own."""
    folder = pathlib.Path(corpus)
    if os.path.isfile(folder):  # pathlib's raises if a parent folder may not be read
        files.check_name(folder)
        return {folder.name: folder}
    if not os.path.isdir(folder):
        raise ValueError(
            f"corpus={str(corpus)!r}: no such file or folder to read; only 'shipped' is a name"
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
