"""Builds the corpus of the package: an extract of one CPython release.

    python tools/build_corpus.py --source PATH/lib/python3.13

PATH is an installation of CPython 3.13.0; other releases are refused, since their texts differ.
Building again gives the same text everywhere, and the same file with the same zlib (zlib-ng
compresses differently). The SHA-256 of the text is printed; `course_lib/text/data.py` has it.
"""

import argparse
import gzip
import hashlib
import io
import json
import pathlib
import runpy

RELEASE = "3.13.0"
CORPUS = pathlib.Path(__file__).parent.parent / "course_lib" / "text" / "corpus"

# Modules that people read to learn: written by hand, without tables and tests.
MODULES = """
abc base64 bisect calendar cmd code codeop colorsys configparser contextlib copy csv dataclasses
filecmp fileinput fnmatch fractions functools getopt glob graphlib gzip hashlib heapq hmac
linecache numbers operator pprint queue quopri random reprlib sched selectors shelve shlex
socketserver string tempfile textwrap timeit types weakref _collections_abc _weakrefset
collections/__init__ concurrent/futures/_base concurrent/futures/thread html/parser json/decoder
json/encoder json/scanner tomllib/_parser urllib/parse wsgiref/handlers
""".split()


def documents(source: pathlib.Path) -> list[dict[str, str]]:
    """Reads the language reference's topics (English) and the chosen modules (Python), in the
    order of their names.
    """
    topics = runpy.run_path(str(source / "pydoc_data" / "topics.py"))["topics"]
    texts = {f"topics/{name}.txt": text for name, text in topics.items()}
    texts |= {
        f"lib/{name}.py": (source / f"{name}.py").read_text(encoding="utf-8")
        for name in MODULES
    }
    return [{"name": name, "text": texts[name]} for name in sorted(texts)]


def build(source: pathlib.Path, destination: pathlib.Path = CORPUS) -> str:
    """Writes the corpus and its licence, and returns the SHA-256 of its text.

    Raises:
      ValueError: if `source` is not the standard library of the named release.
    """
    patchlevel = source.parent.parent / "include" / "python3.13" / "patchlevel.h"
    if not patchlevel.is_file() or f'"{RELEASE}"' not in patchlevel.read_text():
        raise ValueError(
            f"source={source} must be the lib/python3.13 of an installed CPython {RELEASE}:"
            " other releases have other texts"
        )
    lines = [
        json.dumps(document, ensure_ascii=False, sort_keys=True) + "\n"
        for document in documents(source)
    ]
    text = "".join(lines).encode()
    destination.mkdir(exist_ok=True)
    (destination / f"cpython-{RELEASE}.jsonl.gz").write_bytes(pack(text))
    (destination / "LICENSE").write_bytes((source / "LICENSE.txt").read_bytes())
    return hashlib.sha256(text).hexdigest()


def pack(text: bytes) -> bytes:
    """Compresses without time, file name and operating system in the header (`gzip.compress`
    may write the last).
    """
    packed = io.BytesIO()
    with gzip.GzipFile(
        filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0
    ) as file:
        file.write(text)
    return packed.getvalue()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Build the corpus that ships with the package."
    )
    parser.add_argument(
        "--source",
        type=pathlib.Path,
        required=True,
        help=f"lib/python3.13 of CPython {RELEASE}",
    )
    print(build(parser.parse_args().source))
