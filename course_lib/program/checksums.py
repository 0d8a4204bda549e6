"""Writes checksums of all files under a folder, and detects later changes to the files.

The checksums are in the folder's own file `SHA256SUMS`, in the format of the command
`sha256sum`. They detect a flipped bit, and a file that is cut short, missing or added. They do
not detect forgery (SHA-256: https://doi.org/10.6028/NIST.FIPS.180-4).
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "SHA256SUMS"


def write(folder: Path) -> None:
    """Reads every file under `folder`, one after another, and writes their checksums."""
    (folder / NAME).write_bytes(_checksums(folder, threads=1))


def damage(folder: Path) -> str | None:
    """Describes one change since the checksums were written; returns None if there is none."""
    try:
        listed, actual = (
            set(lines.decode(errors="replace").split("\n"))
            for lines in ((folder / NAME).read_bytes(), _checksums(folder, threads=8))
        )
    except OSError as error:  # it names the file
        return f"it cannot be read: {error}"
    if listed == actual:
        return f"{NAME} is empty" if listed == {""} else None
    name = min(line.partition("  ")[2] for line in listed ^ actual)
    return f"{name!r} is not what {NAME} says"


def _checksums(folder: Path, threads: int) -> bytes:
    """Returns a line for each file with its checksum and its path below `folder`."""
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path != folder / NAME
    )

    def line(path: Path) -> str:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{digest}  {path.relative_to(folder).as_posix()}\n"

    with ThreadPoolExecutor(threads) as pool:  # hashing lets other threads run
        return "".join(pool.map(line, paths)).encode()
