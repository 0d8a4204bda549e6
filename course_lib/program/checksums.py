"""Checksums of all files under a folder, so that it can be told later whether they are still
what was written.

They stand in a file of the folder itself, `SHA256SUMS`, as the command `sha256sum` writes and
checks it. A flipped bit, a file cut short, one that is missing and one too many are found,
forgery is not (SHA-256: https://doi.org/10.6028/NIST.FIPS.180-4).
"""

import concurrent.futures
import hashlib
from pathlib import Path

NAME = "SHA256SUMS"


def write(folder: Path) -> None:
    """Reads every file under `folder`, one after another, and writes their checksums beside
    them.
    """
    (folder / NAME).write_text(
        "".join(f"{digest}  {name}\n" for name, digest in _digests(folder, threads=1).items())
    )


def damage(folder: Path) -> str | None:
    """Returns the first thing that is not as it was when the checksums were written; None if
    all is.
    """
    try:
        lines = (folder / NAME).read_bytes().decode().split("\n")[:-1]  # each ends with one
        listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
        found = _digests(folder, threads=8)
    except UnicodeDecodeError as error:
        return f"{NAME} cannot be read: {error}"
    except OSError as error:  # which names the file
        return f"it cannot be read: {error}"
    if not listed:
        return f"{NAME} is empty"
    missing, others = sorted(listed.keys() - found.keys()), sorted(found.keys() - listed.keys())
    # More likely a name that was damaged than a file that got another one.
    if missing and others:
        return f"{NAME} lists {missing[0]!r}, and the folder has {others[0]!r} instead"
    for name in sorted(listed.keys() | found.keys()):
        if name not in found:
            return f"{name!r} is missing"
        if name not in listed:
            return f"{name!r} is not in {NAME}"
        if listed[name] != found[name]:
            return f"{name!r} is not what {NAME} says"
    return None


def _digests(folder: Path, threads: int) -> dict[str, str]:
    """Returns the checksum of each file by its path below `folder`."""
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path != folder / NAME
    )
    # Threads, as hashing leaves the interpreter to others.
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return dict(
            zip(
                (path.relative_to(folder).as_posix() for path in paths),
                pool.map(_digest, paths),
                strict=True,
            )
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
