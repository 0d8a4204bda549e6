"""Files that are written completely or not at all, locks on folders, and the cache folder."""

import contextlib
import errno
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import filelock

STALE = 3600  # seconds; a younger part may still be written to


def cache_folder() -> pathlib.Path:
    """Returns `$COURSE_CACHE`, or `course_lib` in the user's cache folder."""
    user = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get("COURSE_CACHE") or user / "course_lib")


def folders(top: pathlib.Path) -> Iterator[tuple[pathlib.Path, list[str]]]:
    """Yields each folder from `top` down, with the sorted names in it that are not folders.

    Links to folders are followed. Each folder comes once, so links may lead in a circle. Left
    out is what is hidden (.git, .ipynb_checkpoints) or an editor's backup (a.txt~).
    """

    def fail(error: OSError) -> None:
        raise error

    def shown(names: list[str]) -> list[str]:
        return sorted(n for n in names if not (n.startswith(".") or n.endswith("~")))

    seen = set()
    for folder, inner, others in os.walk(top, onerror=fail, followlinks=True):
        status = os.stat(folder)
        if (place := (status.st_dev, status.st_ino)) in seen:
            inner.clear()
            continue
        seen.add(place)
        inner[:] = shown(inner)
        yield pathlib.Path(folder), shown(others)


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuses a path that is not UTF-8: libraries in other languages cannot open it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{os.fspath(path)!r} has a name that is not UTF-8; rename it"
        ) from None


def to_disk(*paths: pathlib.Path) -> None:
    """Writes files, and the names in folders, through to the disk: they outlive a power cut."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:  # some file systems sync no folders
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(opened)


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file beside `path`, and renames it at the end of the `with` block: no
    other process ever sees half a file. What a killed process leaves (".part"), a later call
    removes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for part in path.parent.glob("*.????????.part"):  # as `tempfile` names them
        with contextlib.suppress(FileNotFoundError):  # another process removes it
            if time.time() - part.stat().st_mtime > STALE:
                part.unlink()
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f"{path.name}.", suffix=".part", delete=False
    ) as file:
        try:
            yield file
            file.flush()
            # Without this, a crash of the machine may leave an empty file of that name.
            os.fsync(file.fileno())
            file.close()
            os.chmod(file.name, 0o644)  # a shared cache is for all its users
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def why(error: Exception) -> str:
    """Returns the reason of a failed write in a few words."""
    full = "No space left" in str(error)
    return "no space left on the disk" if full else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def locked(folder: pathlib.Path, *, wait: bool = False) -> Iterator[None]:
    """Locks a folder, by its file `lock`, while the `with` lasts; the system ends it with the
    process.

    Raises BlockingIOError if another process has the lock, perhaps on another host, and `wait`
    is False; ValueError if nothing may be written there.
    """
    where = f"folder={str(folder)!r}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All users of a shared cache may lock it.
        lock = filelock.FileLock(folder / "lock", -1 if wait else 0, 0o666)
        lock.acquire()
    except filelock.Timeout:
        raise BlockingIOError(
            f"{folder} is in use by another process: wait until that one ends, or end it"
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{where} must be a folder, and there is a file in its way: name another"
        ) from None
    except PermissionError:
        raise ValueError(f"{where} may not be written to: permit it, or name another") from None
    except OSError as error:
        raise OSError(f"{where} cannot be used ({why(error)}): name another") from None
    try:
        yield
    finally:
        lock.release()
